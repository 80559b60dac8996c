"""Device meshes: which axes a model is split over, and how many ranks each has.

Axes are only names here. An axis that a rule does not mention replicates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..errors import CheckpointError

EXPERT = "expert"  # Rule.mesh of experts' tensors
AXES: tuple[str, ...] = ("tp", "pp")  # of file names, in their order
Coord = tuple[tuple[str, int], ...]  # (axis, rank) pairs in the mesh's order
# rank of an axis -> its virtual stages -> the indices that each owns; a stage may be empty
Stages = tuple[tuple[tuple[int, ...], ...], ...]


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
    stages: Mapping[str, Stages] = field(default_factory=dict)  # of each indexed axis
    # rank and virtual stage of the layers that predict further tokens; None: the last
    mtp: tuple[int, int] | None = None
    # of the experts' tensors; its tp are the ranks that cut an expert (etp), ep spreads experts
    experts: Mesh | None = None

    @property
    def owned(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Axis -> for each rank, the indices it owns, in the order of its virtual stages."""
        return {
            axis: tuple(tuple(itertools.chain.from_iterable(rank)) for rank in stages)
            for axis, stages in self.stages.items()
        }

    def size(self, axis: str) -> int:
        """Ranks along ``axis``; 1 for an axis that the mesh does not have."""
        return dict(self.axes).get(axis, 1)

    def parts(self) -> Iterator[tuple[Mesh, str]]:
        """The meshes of a model, with the name that rows call each by (``Rule.mesh``)."""
        yield self, ""
        if self.experts is not None:
            yield self.experts, EXPERT

    def label(self, axis: str) -> str:
        """What messages call an axis: the tp of experts is etp."""
        return "etp" if axis == "tp" and "ep" in dict(self.axes) else axis

    def expert_dp(self, dp: int) -> int:
        """The data-parallel replicas of each expert where other tensors have ``dp``.

        CheckpointError if the ranks do not divide, as in megatron-core.
        """
        assert self.experts is not None
        etp, ep = self.experts.size("tp"), self.experts.size("ep")
        ranks = self.size("tp") * dp
        if ranks % (etp * ep):
            raise CheckpointError(
                f"tp={self.size('tp')} x dp={dp} are {ranks} ranks of each pipeline stage, which "
                f"do not divide over etp={etp} x ep={ep}; choose dp as a multiple of "
                f"{etp * ep // math.gcd(etp * ep, self.size('tp'))}"
            )
        return ranks // (etp * ep)

    def all_coords(self) -> Iterator[Coord]:
        """The coordinates of all meshes."""
        for mesh, _ in self.parts():
            yield from mesh.coords()

    def coords(self) -> Iterator[Coord]:
        """Every rank's coordinate, last axis fastest."""
        names = [axis for axis, _ in self.axes]
        for ranks in itertools.product(*(range(size) for _, size in self.axes)):
            yield tuple(zip(names, ranks, strict=True))

    def place(self, axis: str, where: str) -> tuple[int, int]:
        """The rank of ``axis``, and its virtual stage, that a row without indices lies on.

        ``where`` is one of ``first``, ``last``, ``last_index`` (that of the highest index) and
        ``mtp``.
        """
        stages = self.stages.get(axis, (((),),) * self.size(axis))
        last = len(stages) - 1, len(stages[-1]) - 1
        if where == "last_index":
            ends = {
                max(owned): (rank, stage)
                for rank, each in enumerate(stages)
                for stage, owned in enumerate(each)
                if owned
            }
            return ends[max(ends)] if ends else last
        assert where in ("first", "last", "mtp"), where
        return (0, 0) if where == "first" else self.mtp or last if where == "mtp" else last


def named_axes(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """The axes of a mesh of these sizes: always tp and pp, others if they have several ranks."""
    return tuple((a, sizes.get(a, 1)) for a in AXES if a in ("tp", "pp") or sizes.get(a, 1) > 1)
