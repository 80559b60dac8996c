"""Which source boxes fill which target boxes of one logical tensor; used by ``planner.py``."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from .box import Box

# A file may claim any boxes, so the work is limited in proportion to their number.
PER_BOX = 16  # parts of overlapping boxes, or copies, for each box
FEW_PARTS = 1 << 14  # this many are always allowed
FEW_COPIES = 1 << 17
LOOKS = 1 << 19  # pairs of boxes of one tensor that are compared
HOLES = 64  # parts that are kept while looking for the first hole


@dataclass(frozen=True, slots=True)
class Match:
    """Which source chunk fills which part of which target chunk, by position."""

    moves: tuple[tuple[int, int, Box], ...] = ()  # (source, target, box)
    repeats: tuple[tuple[int, int, Box], ...] = ()  # (source used, source repeated, box)
    fault: str | None = None


class _TooManyError(Exception):
    """Boxes of one tensor overlap in too many places."""


@lru_cache(maxsize=512)  # layers repeat the same geometry, so a deep model costs one layer
def match(
    wanted: Box, sources: tuple[Box, ...], targets: tuple[Box, ...], part: bool = False
) -> Match:
    """The geometry of one logical tensor; boxes are in its coordinates.

    The sources must cover ``wanted``; with ``part`` only what the targets cover of it.
    """
    try:
        tiling = _Tiling(sources)
        tiles = tiling.tiles
        if wanted.numel and not part and tiling.covers(wanted) != wanted.numel:
            return Match(fault=_hole(wanted, tiling))
        moves: list[tuple[int, int, Box]] = []
        limit = max(FEW_COPIES, PER_BOX * (len(sources) + len(targets)))
        for j, target in enumerate(targets):
            region = target.intersect(wanted)
            if region is None or (region.numel == 0 and target.numel):
                continue
            found = tiling.finder.overlaps(region)
            if part and sum(common.numel for _, common in found) != region.numel:
                return Match(fault=_hole(region, tiling))
            moves += [(tiles[tile][1], j, common) for tile, common in found]
            if len(moves) > limit:
                raise _TooManyError
    except _TooManyError:
        return Match(fault=_crossed(len(sources), len(targets)))
    return Match(tuple(moves), tuple(tiling.repeats))


def _crossed(sources: int, targets: int) -> str:
    return (
        f"the {sources} boxes of the source, and the {targets} of the target, overlap in more "
        "places than any parallel layout gives; one of them is damaged, save it again"
    )


class _Tiling:
    """Disjoint boxes that cover the union of a tensor's boxes, and the replicas of them.

    Where a box lies on elements that an earlier box has, it is a replica to compare; its other
    elements are added. Raises _TooManyError if boxes overlap in more places than any layout gives.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self.tiles: list[tuple[Box, int]] = []  # with the box that each is taken from
        self.repeats: list[tuple[int, int, Box]] = []  # (box used, box repeated, where)
        self.finder = _Finder(boxes)
        seen: dict[Box, int] = {}
        limit = max(FEW_PARTS, PER_BOX * len(boxes))
        for i, box in enumerate(boxes):
            if box in seen:  # the common case: whole replicas
                self.repeats.append((seen[box], i, box))
                continue
            seen[box] = i
            self._add(i, box, limit)

    def _add(self, i: int, box: Box, limit: int) -> None:
        rest = [box]
        for at, common in self.finder.overlaps(box) if box.numel else ():
            self.repeats.append((self.tiles[at][1], i, common))
            self.finder.look(len(rest))
            rest = [piece for part in rest for piece in part.subtract(self.tiles[at][0])]
            if len(self.tiles) + len(self.repeats) + len(rest) > limit:
                raise _TooManyError
        for part in rest:
            self.finder.add(part)
            self.tiles.append((part, i))

    def covers(self, wanted: Box) -> int:
        """Elements of ``wanted`` that some box holds."""
        common = (box.intersect(wanted) for box, _ in self.tiles)
        return sum(part.numel for part in common if part is not None)


class _Finder:
    """Boxes kept sorted along the dim that separates most of them, for overlap queries."""

    def __init__(self, likely: Sequence[Box]) -> None:
        rank = len(likely[0].sizes) if likely else 0
        self.dim = max(range(rank), key=lambda d: len({b.offsets[d] for b in likely}), default=-1)
        self.boxes: list[Box] = []
        self.starts: list[tuple[int, int]] = []  # (offset along dim, position), sorted
        self.longest = 0  # along dim
        self.looks = 0  # boxes compared with another so far

    def add(self, box: Box) -> None:
        """Give ``box`` the next position."""
        if self.dim >= 0:
            bisect.insort(self.starts, (box.offsets[self.dim], len(self.boxes)))
            self.longest = max(self.longest, box.sizes[self.dim])
        self.boxes.append(box)

    def look(self, count: int) -> None:
        """Count pairs of boxes before they are compared."""
        self.looks += count
        if self.looks > LOOKS:
            raise _TooManyError

    def overlaps(self, region: Box) -> list[tuple[int, Box]]:
        """(position, common box) of every box that shares an element with ``region``."""
        picked: Sequence[int] = range(len(self.boxes))
        if self.dim >= 0:
            touch = 0 if region.sizes[self.dim] else 1  # an empty region meets its neighbours
            first = region.offsets[self.dim] - self.longest + 1 - touch
            lo = bisect.bisect_left(self.starts, (first, -1))
            hi = bisect.bisect_left(self.starts, (region.stop(self.dim) + touch, -1))
            picked = [i for _, i in self.starts[lo:hi]]
        self.look(len(picked))
        found = []
        for i in picked:
            common = self.boxes[i].intersect(region)
            if common is not None and (common.numel or not region.numel):
                found.append((i, common))
        return found


def _hole(wanted: Box, tiling: _Tiling) -> str:
    """A sentence that names the first box that no source chunk holds."""
    rest = [wanted]
    for tile in sorted((box for box, _ in tiling.tiles), key=lambda box: box.offsets):
        rest = [piece for part in rest for piece in part.subtract(tile)]
        rest = sorted(rest, key=lambda box: box.offsets)[:HOLES]
    found = f"the source holds {tiling.covers(wanted)} of {wanted.numel} elements"
    if not rest:  # the hole lies behind the parts that were kept
        return found
    return (
        f"{found}; the first hole is the box at {list(rest[0].offsets)} "
        f"of size {list(rest[0].sizes)}"
    )


@lru_cache(maxsize=512)
def target_fault(wanted: Box, targets: tuple[Box, ...]) -> str | None:
    """Every source element must have a place: the target's boxes must cover the tensor."""
    if not wanted.numel:
        return None
    try:
        tiling = _Tiling(targets)
    except _TooManyError:
        return _crossed(0, len(targets))
    if tiling.covers(wanted) != wanted.numel:
        return "the target has no place for every element: " + _hole(wanted, tiling)
    return None
