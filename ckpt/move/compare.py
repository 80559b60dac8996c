"""Compares views of the same logical boxes, tile by tile, bit for bit or within tolerances.

Memory: the buffers of a tile; if elements differ, also one byte per element of the tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..model.box import Box
from ..model.planner import Copy, Tolerance
from .cast import Array, cast, values
from .executor import Mover, tiles

Mask = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Difference:
    """What differs in one logical tensor."""

    fqn: str
    elements: int = 0  # logical elements that differ; a replica does not count again
    index: tuple[int, ...] | None = None  # of the first one, in the logical tensor
    first: tuple[str, str] = ("", "")  # its two values
    max_abs: float = 0.0
    files: tuple[str, str] = ("", "")  # where the first one lies

    def describe(self, numel: int | None = None) -> str:
        """One line: index, both values, how many (of ``numel``), how far apart."""
        a, b = self.first
        of = "" if numel is None else f" of {numel}"
        verb = "differs" if self.elements == 1 else "differ"
        noun = "element" if (self.elements if numel is None else numel) == 1 else "elements"
        return (
            f"{self.fqn}: {self.elements}{of} {noun} {verb}; first at {list(self.index or ())}: "
            f"{a} ({self.files[0]}) and {b} ({self.files[1]}); max abs difference {self.max_abs:g}"
        )


def compare(mover: Mover, copies: Sequence[Copy], tolerance: Tolerance) -> Difference | None:
    """The difference between ``src`` and ``dst`` of one logical tensor's copies, or None."""
    found = Difference(copies[0].fqn) if copies else None
    for parts in tiles(copies, mover.budget):
        a = mover.gather([part.src for part in parts])
        b = mover.gather([part.dst for part in parts], beside=True)
        counted: list[tuple[Box, Mask]] = []
        for part, x, y in zip(parts, a, b, strict=True):
            assert found is not None
            wrong = _compare(found, part, x, y, tolerance)
            if wrong is not None:
                found.elements += _count_new(counted, part.box, wrong)
                counted.append((part.box, wrong))
        mover.progress(sum(part.nbytes for part in parts))
    return found if found is not None and found.elements else None


def _count_new(counted: Sequence[tuple[Box, Mask]], box: Box, wrong: Mask) -> int:
    """Wrong elements of ``box`` that no earlier copy of the tile had; replicas cover each other.

    A tile is a box of the logical tensor, so all copies of an element are in the same tile.
    """
    new = wrong.copy()
    for other, mask in counted:
        common = box.intersect(other)
        if common is not None and common.numel:
            new[_inside(common, box)] &= ~mask[_inside(common, other)]
    return int(np.count_nonzero(new))


def _inside(part: Box, whole: Box) -> tuple[slice, ...]:
    """Where ``part`` lies in an array over ``whole``."""
    return tuple(
        slice(p - w, p - w + n)
        for p, w, n in zip(part.offsets, whole.offsets, part.sizes, strict=True)
    )


def _compare(
    found: Difference, part: Copy, x: Array, y: Array, tolerance: Tolerance
) -> Mask | None:
    """Which elements of ``part`` differ, None if none; records the first and the largest
    difference."""
    src, dst = part.src.dtype, part.dst.dtype
    if tolerance.cast:
        x, src = cast(x, src, dst), dst
    same_type = src == dst
    if same_type and np.array_equal(x, y):
        return None
    a, b = values(x, src), values(y, dst)
    if same_type and not (tolerance.rtol or tolerance.atol):
        wrong: Mask = np.asarray(x != y)
    else:
        wrong = ~_near(a, b, tolerance)
    if not wrong.any():
        return None
    local = tuple(int(i) for i in np.argwhere(wrong)[0])
    index = tuple(o + i for o, i in zip(part.box.offsets, local, strict=True))
    if found.index is None or index < found.index:
        found.index, found.first = index, (str(a[local]), str(b[local]))
        found.files = (part.src.file, part.dst.file)
    if a.dtype.kind != "V":
        gap = _gap(a[wrong], b[wrong])
        found.max_abs = max(found.max_abs, float(np.nanmax(gap, initial=0.0)))
    return wrong


def _near(a: Array, b: Array, tolerance: Tolerance) -> Mask:
    """``|a - b| <= atol + rtol * |b|``; a NaN equals a NaN, an infinity itself."""
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        if a.dtype.kind in "iu":  # float64 cannot tell neighbours above 2**53 apart
            limit = tolerance.atol + tolerance.rtol * np.abs(b.astype(np.float64))
            return np.asarray(_gap(a, b) <= limit)
        near = np.isclose(
            a.astype(wide), b.astype(wide), tolerance.rtol, tolerance.atol, equal_nan=True
        )
    return np.asarray(near)


def _gap(a: Array, b: Array) -> npt.NDArray[np.float64]:
    """``|a - b|``; for integers the exact difference, rounded once."""
    with np.errstate(invalid="ignore", over="ignore"):
        if a.dtype.kind in "iu":
            larger, smaller = np.maximum(a, b), np.minimum(a, b)
            exact = larger.astype(np.uint64) - smaller.astype(np.uint64)  # wraps to the right one
            return np.asarray(exact.astype(np.float64))
        wide = np.complex128 if a.dtype.kind == "c" else np.float64
        return np.asarray(np.abs(a.astype(wide) - b.astype(wide)), dtype=np.float64)
