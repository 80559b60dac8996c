"""Boxes: half-open index ranges of a tensor, and their algebra.

Integer geometry without IO and without names. Every docstring says in whose coordinates a result
is; offsets and sizes are in elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """The elements ``offsets[d] <= index[d] < offsets[d] + sizes[d]``."""

    offsets: tuple[int, ...]  # elements, in the coordinates of the tensor that the box cuts
    sizes: tuple[int, ...]  # elements

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d box."""
        return math.prod(self.sizes)

    def stop(self, dim: int) -> int:
        """One past the last index along ``dim``."""
        return self.offsets[dim] + self.sizes[dim]

    def intersect(self, other: Box) -> Box | None:
        """The common box in the shared coordinates; None if no element is common.

        Two 0-size boxes at the same place have it in common, so a 0-size tensor needs no special
        case.
        """
        offsets, sizes = [], []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start = a if a > b else b
            stop = min(a + n, b + m)
            if stop < start or (stop == start and n and m):
                return None
            offsets.append(start)
            sizes.append(stop - start)
        return Box(tuple(offsets), tuple(sizes))

    def subtract(self, other: Box) -> list[Box]:
        """What is left of this box without ``other``: at most 2 boxes per dim, disjoint."""
        common = self.intersect(other)
        if common is None or common.numel == 0:
            return [self]
        rest: list[Box] = []
        offsets, sizes = list(self.offsets), list(self.sizes)
        for dim in range(len(sizes)):
            before = common.offsets[dim] - offsets[dim]
            after = offsets[dim] + sizes[dim] - common.stop(dim)
            for start, size in ((offsets[dim], before), (common.stop(dim), after)):
                if size:
                    rest.append(
                        Box(
                            (*offsets[:dim], start, *offsets[dim + 1 :]),
                            (*sizes[:dim], size, *sizes[dim + 1 :]),
                        )
                    )
            offsets[dim], sizes[dim] = common.offsets[dim], common.sizes[dim]
        return rest

    def contains(self, other: Box) -> bool:
        """Whether every element of ``other`` is one of this box."""
        return all(
            a <= b and b + m <= a + n
            for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )


MAX_CORNERS = 1 << 22  # limit for ``tile``: 500,000 boxes cut along three dims


def tile(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Whether boxes inside a tensor cover each of its elements exactly once.

    Each box adds +1 or -1 at its corners, alternating. Summing along every dim turns the corners
    into the number of boxes at each element. So the boxes tile the tensor if and only if their sums
    are those of one box of its shape. Dims that no box cuts are left out. ValueError if the boxes
    have too many corners.
    """
    boxes = [box for box in boxes if box.numel]
    if not math.prod(shape):
        return not boxes
    cut = [d for d, n in enumerate(shape) if any(box.sizes[d] != n for box in boxes)]
    if len(boxes) << len(cut) > MAX_CORNERS:
        raise ValueError(f"{len(boxes)} boxes, cut along {len(cut)} dims")
    sums: dict[tuple[int, ...], int] = {}
    for box, sign in (*((box, 1) for box in boxes), (full(shape), -1)):
        ends = [((box.offsets[d], 1), (box.stop(d), -1)) for d in cut]
        for corner in itertools.product(*ends):
            at = tuple(place for place, _ in corner)
            sums[at] = sums.get(at, 0) + sign * math.prod(factor for _, factor in corner)
    return not any(sums.values())


def full(shape: tuple[int, ...]) -> Box:
    """The whole of a tensor."""
    return Box((0,) * len(shape), shape)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor, last dim fastest."""
    strides, step = [0] * len(shape), 1
    for dim in range(len(shape) - 1, -1, -1):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def range_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The row-major range ``[start, stop)`` of a tensor as boxes: at most 2n - 1 for n dims.

    Boxes come in row-major order and are disjoint; coordinates are the tensor's.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"range [{start}, {stop}) outside a tensor of {math.prod(shape)} elements")
    return list(_range_boxes(shape, (), start, stop))


def _range_boxes(
    shape: tuple[int, ...], prefix: tuple[int, ...], start: int, stop: int
) -> Iterator[Box]:
    """``range_boxes`` of the sub-tensor at index ``prefix``, in the whole tensor's coordinates."""
    if start >= stop:
        return
    dim = len(prefix)
    rest = shape[dim:]
    if not rest:
        yield Box(prefix, (1,) * dim)
        return
    row = math.prod(rest[1:])  # elements per step along `dim`
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if head:
        yield from _range_boxes(shape, (*prefix, first), head, min(row, stop - first * row))
        first += 1
    if first < last:
        yield Box((*prefix, first, *(0,) * (len(rest) - 1)), (*(1,) * dim, last - first, *rest[1:]))
    if tail and last >= first:
        yield from _range_boxes(shape, (*prefix, last), 0, tail)
