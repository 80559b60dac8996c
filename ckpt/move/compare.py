"""Compares two views of the same logical boxes, streaming, bit for bit or within tolerances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..model.planner import Copy, Tolerance
from .cast import Array, cast, values
from .executor import Mover, tiles


@dataclass(slots=True)
class Difference:
    """What differs in one logical tensor."""

    fqn: str
    elements: int = 0  # how many differ
    index: tuple[int, ...] | None = None  # of the first one, in the logical tensor
    first: tuple[str, str] = ("", "")  # its two values
    max_abs: float = 0.0
    files: tuple[str, str] = ("", "")  # where the first one lies

    def describe(self) -> str:
        """One line: index, both values, how many, how far apart."""
        a, b = self.first
        return (
            f"{self.fqn}: {self.elements} elements differ; first at {list(self.index or ())}: "
            f"{a} ({self.files[0]}) and {b} ({self.files[1]}); max abs difference {self.max_abs:g}"
        )


def compare(mover: Mover, copies: Sequence[Copy], tolerance: Tolerance) -> Difference | None:
    """The difference between ``src`` and ``dst`` of one logical tensor's copies, or None."""
    found = Difference(copies[0].fqn) if copies else None
    for parts in tiles(copies, mover.budget):
        a = mover.gather([part.src for part in parts])
        b = mover.gather([part.dst for part in parts], beside=True)
        for part, x, y in zip(parts, a, b, strict=True):
            assert found is not None
            _compare(found, part, x, y, tolerance)
        mover.progress(sum(part.nbytes for part in parts))
    return found if found is not None and found.elements else None


def _compare(found: Difference, part: Copy, x: Array, y: Array, tolerance: Tolerance) -> None:
    src, dst = part.src.dtype, part.dst.dtype
    if tolerance.cast:
        x, src = cast(x, src, dst), dst
    same_type = src == dst
    if same_type and np.array_equal(x, y):
        return
    a, b = values(x, src), values(y, dst)
    if same_type and not (tolerance.rtol or tolerance.atol):
        wrong = np.asarray(x != y)
    else:
        with np.errstate(invalid="ignore", over="ignore"):
            near = np.isclose(
                a.astype(np.float64),
                b.astype(np.float64),
                tolerance.rtol,
                tolerance.atol,
                equal_nan=True,
            )
        wrong = ~near
    count = int(np.count_nonzero(wrong))
    if not count:
        return
    found.elements += count
    local = tuple(int(i) for i in np.argwhere(wrong)[0])
    index = tuple(o + i for o, i in zip(part.box.offsets, local, strict=True))
    if found.index is None or index < found.index:
        found.index, found.first = index, (str(a[local]), str(b[local]))
        found.files = (part.src.file, part.dst.file)
    if a.dtype.kind != "V":
        with np.errstate(invalid="ignore", over="ignore"):
            gap = np.abs(a[wrong].astype(np.float64) - b[wrong].astype(np.float64))
        found.max_abs = max(found.max_abs, float(np.nanmax(gap, initial=0.0)))
