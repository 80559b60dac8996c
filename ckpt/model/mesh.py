"""Device meshes: which axes a model is split over, and how many ranks each has.

Axes are only names here. An axis that a rule does not mention replicates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..errors import CheckpointError

AXES: tuple[str, ...] = ("tp", "pp")  # of file names, in their order
Coord = tuple[tuple[str, int], ...]  # (axis, rank) pairs in the mesh's order


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank of the axis holds an equal contiguous part of stored dim ``dim``."""

    dim: int


@dataclass(frozen=True, slots=True)
class ShardByIndex:
    """Each rank of the axis holds whole tensors: those whose ``name`` index it owns."""

    name: str  # "layer", "expert": a placeholder in the rule's stored name


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ordered axis -> size, and which indices each rank of an indexed axis owns."""

    axes: tuple[tuple[str, int], ...]
    # axis -> for each rank, the indices it owns, in the order it holds them
    owned: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def size(self, axis: str) -> int:
        """Ranks along ``axis``; 1 for an axis that the mesh does not have."""
        return dict(self.axes).get(axis, 1)

    def coords(self) -> Iterator[Coord]:
        """Every rank's coordinate, last axis fastest."""
        names = [axis for axis, _ in self.axes]
        for ranks in itertools.product(*(range(size) for _, size in self.axes)):
            yield tuple(zip(names, ranks, strict=True))

    def owner(self, axis: str, index: int) -> int:
        """The rank of ``axis`` that owns ``index``."""
        for rank, owned in enumerate(self.owned[axis]):
            if index in owned:
                return rank
        raise AssertionError(f"index {index} is owned by no rank of {axis}: {self.owned[axis]}")


def named_axes(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """The axes of a mesh of these sizes: always tp and pp, others if they have several ranks."""
    return tuple((a, sizes.get(a, 1)) for a in AXES if a in ("tp", "pp") or sizes.get(a, 1) > 1)


def split_evenly(
    count: int, ranks: int, what: str = "layer", axis: str = "pp"
) -> tuple[tuple[int, ...], ...]:
    """``count`` indices over ``ranks``, contiguous and equal; CheckpointError if they do not
    divide.

    ``what`` (``layer``, ``expert``) and ``axis`` are for the message.
    """
    if count % ranks:
        hint = ""
        if axis == "pp" and ranks <= count:
            hint = f"; name the stages with --pp-layers, for example {_uneven(count, ranks)}"
        raise CheckpointError(f"{count} {what}s do not divide over {axis}={ranks}{hint}")
    return split_by_counts(count, (count // ranks,) * ranks)


def split_by_counts(count: int, counts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Stage s gets the next ``counts[s]`` indices; every index must have an owner."""
    if sum(counts) != count or min(counts, default=0) < 0:
        raise CheckpointError(
            f"--pp-layers {','.join(map(str, counts))} names {sum(counts)} layers, "
            f"the model has {count}"
        )
    starts = itertools.accumulate(counts, initial=0)
    return tuple(tuple(range(s, s + n)) for s, n in zip(starts, counts, strict=False))


def interleaved(count: int, ranks: int, vpp: int) -> tuple[tuple[int, ...], ...]:
    """``count`` layers over ``ranks`` stages of ``vpp`` virtual ones, in Megatron-LM's order.

    Virtual stage c of rank p holds n layers from (c * ranks + p) * n on; n = count / ranks / vpp.
    """
    if vpp > 1 and ranks == 1:
        raise CheckpointError(f"--vpp {vpp}: virtual stages need pipeline stages; pp is 1")
    if count % (ranks * vpp):
        raise CheckpointError(f"{count} layers do not divide over pp={ranks} with --vpp {vpp}")
    n = count // (ranks * vpp)
    return tuple(
        tuple((c * ranks + p) * n + i for c in range(vpp) for i in range(n)) for p in range(ranks)
    )


def runs(layers: tuple[int, ...]) -> list[tuple[int, ...]]:
    """A stage's layers as runs of consecutive numbers: its virtual stages."""
    found: list[list[int]] = []
    for layer in layers:
        if found and layer == found[-1][-1] + 1:
            found[-1].append(layer)
        else:
            found.append([layer])
    return [tuple(run) for run in found]


def _uneven(count: int, ranks: int) -> str:
    base, more = divmod(count, ranks)
    return ",".join(str(base + (rank < more)) for rank in range(ranks))
