"""The one function that reshards: ``plan(source, target) -> Plan``.

It proves coverage before a byte moves: every destination element is written exactly once, and
every source element is used, or is a replica, or is listed with a reason. All faults of a pair
of manifests are reported together. Boxes alone decide, so it is pure; the places of the chunks
that copies need are looked up last, which reads headers where a format has put that off.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ..errors import raise_all
from .box import Box, full
from .dtypes import CASTABLE, ITEMSIZE
from .manifest import Chunk, Manifest, TensorMeta, View, category_of, locate


@dataclass(frozen=True, slots=True)
class Copy:
    """One box of a logical tensor, from one view to another of the same shape."""

    fqn: str
    box: Box  # in the logical tensor's coordinates; the executor tiles along it
    src: View
    dst: View

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return self.box.numel * ITEMSIZE[self.dst.dtype]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """When two elements are equal: ``|a - b| <= atol + rtol * |b|``; zeros mean bit for bit."""

    rtol: float = 0.0
    atol: float = 0.0
    cast: bool = False  # `b` is `a` cast to its dtype: cast again, then bit for bit

    @property
    def exact(self) -> bool:
        """Whether dtypes must agree as well."""
        return self.rtol == 0.0 and self.atol == 0.0 and not self.cast


@dataclass(slots=True)
class Coverage:
    """What a plan does with every element, for the closing report."""

    tensors: int = 0  # logical tensors written
    read_bytes: int = 0
    written_bytes: int = 0  # tensor bytes; replicas in the target count each time
    zero_bytes: int = 0  # new padding rows
    tied: int = 0  # tied heads that the source repeats, or that the target leaves out or repeats
    replicas: int = 0  # source chunks that repeat another one
    dropped: dict[str, list[int]] = field(default_factory=dict)  # reason -> [tensors, bytes]

    def drop(self, reason: str, nbytes: int) -> None:
        """Count a tensor that is left out, under the reason that the report prints."""
        row = self.dropped.setdefault(reason, [0, 0])
        row[0] += 1
        row[1] += nbytes


@dataclass(frozen=True, slots=True)
class Plan:
    """Copies in destination order, replicas to compare, and the account of coverage."""

    copies: list[Copy]
    replicas: list[Copy]  # src: the chunk that is used; dst: the one that must equal it
    coverage: Coverage


def plan(
    source: Manifest,
    target: Manifest,
    drop: Callable[[str], str | None] = lambda fqn: None,
    *,
    share: bool = False,
) -> Plan:
    """How every element of ``target`` is filled from ``source``.

    ``drop`` names the reason why a source tensor that the target lacks may be left out;
    None means that it may not. With ``share`` the target is one process's share of a model:
    what it has no place for is another's. Raises CheckpointError with every fault found.
    """
    faults: list[str] = []
    coverage = Coverage()
    found: dict[str, _Match] = {}
    if not share:
        _account_for_unused(source, target, drop, coverage, faults)
    for fqn, meta in target.tensors.items():
        have = source.tensors.get(fqn)
        if have is None:
            _fill_with_zeros(fqn, meta, target, coverage, faults)
            continue
        fault = _meta_fault(have, meta)
        if fault:
            faults.append(f"{fqn}: {fault}")
            continue
        common = full(tuple(map(min, have.shape, meta.shape)))
        if meta.elastic:
            _account_for_padding(fqn, have, meta, target, coverage)
        boxes = [tuple(c.box for c in m.chunks[fqn]) for m in (source, target)]
        found[fqn] = match = _match(common, *boxes)
        fault = match.fault
        if not fault and not share:
            fault = _target_fault(common, boxes[1])
        if fault:
            faults.append(f"{fqn}: {fault}")
        coverage.tensors += 1
    raise_all(faults, "the plan does not cover every element")
    locate(_needed(found, source, target))
    copies: list[Copy] = []
    replicas: list[Copy] = []
    for fqn, match in found.items():
        moves, repeats = _copies(fqn, match, source.chunks[fqn], target.chunks[fqn])
        copies += moves
        replicas += repeats
    _count_bytes(coverage, copies, replicas)
    return Plan(copies, replicas, coverage)


def _account_for_unused(
    source: Manifest,
    target: Manifest,
    drop: Callable[[str], str | None],
    coverage: Coverage,
    faults: list[str],
) -> None:
    for fqn, meta in source.tensors.items():
        if fqn in target.tensors:
            continue
        reason = drop(fqn)
        if reason is None and meta.elastic:
            reason = "padding rows that the target has no place for"
        if reason is None:
            faults.append(f"{fqn}: unknown tensor of shape {list(meta.shape)}, nothing takes it")
        else:
            coverage.drop(reason, meta.nbytes)


def _fill_with_zeros(
    fqn: str, meta: TensorMeta, target: Manifest, coverage: Coverage, faults: list[str]
) -> None:
    """New padding rows: files are created as zeros, so nothing is copied."""
    if not meta.elastic:
        faults.append(f"{fqn}: missing in the source (shape {list(meta.shape)} is needed)")
        return
    coverage.zero_bytes += sum(
        c.box.numel * ITEMSIZE[c.view.dtype] for c in target.chunks.get(fqn, ())
    )


def _meta_fault(have: TensorMeta, want: TensorMeta) -> str | None:
    if have.shape != want.shape:
        same_rank = len(have.shape) == len(want.shape)
        if not (want.elastic and same_rank and have.shape[1:] == want.shape[1:]):
            return f"shape {list(have.shape)} in the source, {list(want.shape)} in the target"
    if have.dtype != want.dtype and not {have.dtype, want.dtype} <= set(CASTABLE):
        return f"cannot be cast from {have.dtype} to {want.dtype}"
    return None


def _account_for_padding(
    fqn: str, have: TensorMeta, want: TensorMeta, target: Manifest, coverage: Coverage
) -> None:
    """Padding tensors may differ in rows: say what is zero and what is left behind."""
    itemsize = ITEMSIZE[want.dtype]
    for chunk in target.chunks[fqn]:
        rows = max(0, chunk.box.stop(0) - max(have.shape[0], chunk.box.offsets[0]))
        if chunk.box.sizes[0]:
            coverage.zero_bytes += rows * chunk.box.numel // chunk.box.sizes[0] * itemsize
    lost = have.shape[0] - want.shape[0]
    if lost > 0:
        reason = "padding rows that the target has no place for"
        coverage.drop(reason, lost * have.nbytes // have.shape[0])


def _count_bytes(coverage: Coverage, copies: list[Copy], replicas: list[Copy]) -> None:
    coverage.read_bytes = sum(c.box.numel * ITEMSIZE[c.src.dtype] for c in copies)
    coverage.written_bytes = sum(c.nbytes for c in copies)
    coverage.replicas = len({(c.dst.file, c.dst.offset_bytes) for c in replicas})


def _needed(found: Mapping[str, _Match], source: Manifest, target: Manifest) -> Iterator[Chunk]:
    """The chunks that some copy reads, compares or writes."""
    for fqn, match in found.items():
        sources, targets = source.chunks[fqn], target.chunks[fqn]
        for i, j, _ in match.moves:
            yield sources[i]
            yield targets[j]
        for i, j, _ in match.repeats:
            yield sources[i]
            yield sources[j]


def _copies(
    fqn: str, match: _Match, sources: Sequence[Chunk], targets: Sequence[Chunk]
) -> tuple[list[Copy], list[Copy]]:
    """The copies of one logical tensor, and its replicas."""
    copies = [
        Copy(fqn, box, _narrow(sources[i], box), _narrow(targets[j], box))
        for i, j, box in match.moves
    ]
    repeats = [
        Copy(fqn, box, _narrow(sources[i], box), _narrow(sources[j], box))
        for i, j, box in match.repeats
    ]
    return copies, repeats


def _narrow(chunk: Chunk, box: Box) -> View:
    if box == chunk.box:
        return chunk.view
    offsets = tuple(b - c for b, c in zip(box.offsets, chunk.box.offsets, strict=True))
    return chunk.view.narrow(offsets, box.sizes)


@dataclass(frozen=True, slots=True)
class _Match:
    """Which source chunk fills which part of which target chunk, by position."""

    moves: tuple[tuple[int, int, Box], ...] = ()  # (source, target, box)
    repeats: tuple[tuple[int, int, Box], ...] = ()  # (source used, source repeated, box)
    fault: str | None = None


@lru_cache(maxsize=512)  # layers repeat the same geometry, so a deep model costs one layer
def _match(wanted: Box, sources: tuple[Box, ...], targets: tuple[Box, ...]) -> _Match:
    """The geometry of one logical tensor; boxes are in its coordinates."""
    tiles, repeats = _tile(sources)
    finder = _Finder(sources)
    for box, _ in tiles:
        finder.add(box)
    if wanted.numel:
        covered = sum(
            common.numel for box, _ in tiles if (common := box.intersect(wanted)) is not None
        )
        if covered != wanted.numel:
            return _Match(fault=_hole(wanted, [box for box, _ in tiles]))
    moves = []
    for j, target in enumerate(targets):
        region = target.intersect(wanted)
        if region is None or (region.numel == 0 and target.numel):
            continue
        for tile, common in finder.overlaps(region):
            moves.append((tiles[tile][1], j, common))
    return _Match(tuple(moves), tuple(repeats))


def _tile(boxes: Sequence[Box]) -> tuple[list[tuple[Box, int]], list[tuple[int, int, Box]]]:
    """Disjoint boxes that cover the union, each with the chunk it is taken from, and repeats.

    A chunk that lies on elements already taken is a replica there, to be compared; what is
    new of it is taken.
    """
    tiles: list[tuple[Box, int]] = []
    repeats: list[tuple[int, int, Box]] = []
    seen: dict[Box, int] = {}
    finder = _Finder(boxes)
    for i, box in enumerate(boxes):
        if box in seen:  # the common case: whole replicas
            repeats.append((seen[box], i, box))
            continue
        seen[box] = i
        rest = [box]
        for at, common in finder.overlaps(box) if box.numel else ():
            repeats.append((tiles[at][1], i, common))
            rest = [piece for part in rest for piece in part.subtract(tiles[at][0])]
        for part in rest:
            finder.add(part)
            tiles.append((part, i))
    return tiles, repeats


class _Finder:
    """Boxes kept sorted along the dim that separates most of them, for overlap queries."""

    def __init__(self, likely: Sequence[Box]) -> None:
        rank = len(likely[0].sizes) if likely else 0
        self.dim = max(range(rank), key=lambda d: len({b.offsets[d] for b in likely}), default=-1)
        self.boxes: list[Box] = []
        self.starts: list[tuple[int, int]] = []  # (offset along dim, position), sorted
        self.longest = 0  # along dim

    def add(self, box: Box) -> None:
        """Give ``box`` the next position."""
        if self.dim >= 0:
            bisect.insort(self.starts, (box.offsets[self.dim], len(self.boxes)))
            self.longest = max(self.longest, box.sizes[self.dim])
        self.boxes.append(box)

    def overlaps(self, region: Box) -> list[tuple[int, Box]]:
        """(position, common box) of every box that shares an element with ``region``."""
        picked: Iterable[int] = range(len(self.boxes))
        if self.dim >= 0:
            lo = bisect.bisect_left(self.starts, (region.offsets[self.dim] - self.longest, -1))
            hi = bisect.bisect_right(self.starts, (region.stop(self.dim), len(self.boxes)))
            picked = (i for _, i in self.starts[lo:hi])
        found = []
        for i in picked:
            common = self.boxes[i].intersect(region)
            if common is not None and (common.numel or not region.numel):
                found.append((i, common))
        return found


def _hole(wanted: Box, tiles: list[Box]) -> str:
    """A sentence that names the first box that no source chunk holds."""
    rest = [wanted]
    for tile in tiles:
        rest = [piece for part in rest for piece in part.subtract(tile)]
    first = rest[0] if rest else wanted
    missing = sum(part.numel for part in rest)
    return (
        f"the source holds {wanted.numel - missing} of {wanted.numel} elements; the first hole "
        f"is the box at {list(first.offsets)} of size {list(first.sizes)}"
    )


@lru_cache(maxsize=512)
def _target_fault(wanted: Box, targets: tuple[Box, ...]) -> str | None:
    """Every source element must have a place: the target's boxes must cover the tensor."""
    if not wanted.numel:
        return None
    tiles, _ = _tile(targets)
    covered = sum(common.numel for box, _ in tiles if (common := box.intersect(wanted)) is not None)
    if covered != wanted.numel:
        return "the target has no place for every element: " + _hole(wanted, [b for b, _ in tiles])
    return None


def chunk_count(*manifests: Manifest) -> int:
    """Chunks held by manifests; each costs under 2 KiB of memory."""
    return sum(len(chunks) for m in manifests for chunks in m.chunks.values())


def by_category(reasons: Mapping[str, str]) -> Callable[[str], str | None]:
    """A ``drop`` function from category (``exp_avg``, ...) to reason."""
    return lambda fqn: reasons.get(category_of(fqn))
