"""Files that no storage has: their bytes are computed from those of others when they are read.

Quantised tensors are read as bfloat16 in this way. To all that plans and moves, such a file holds
a row-major tensor of bfloat16, and a view of it is cut and strided like any other. The values are
those of transformers' own dequantisation: both multiply in float32 and round once.

Shapes: a matrix is [rows, columns]; R x C are the elements that share a scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..model.dtypes import ITEMSIZE

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from .cast import Array

    Floats = npt.NDArray[np.float32]

STEP = 1 << 16  # elements computed at once: some 100 KiB of each intermediate array
_BYTES = 2  # of a bfloat16


class Reading(Protocol):
    """What reads bytes of real files: `files.Files`."""

    def read_into(self, path: str, offset: int, into: memoryview) -> None: ...


class Recipe(Protocol):
    """How the elements of a computed file come about."""

    @property
    def numel(self) -> int: ...

    def reads(self) -> tuple[tuple[str, int, int], ...]:
        """File, first byte and stop of all that it reads."""
        ...

    def elements(self, files: Reading, start: int, stop: int) -> Array:
        """Elements [start, stop) as raw bfloat16; at most `STEP` of them."""
        ...


class ComputedFile(str):
    """The path of a computed file: that of the file that it is computed from, and a tensor."""

    __slots__ = ("recipe",)
    recipe: Recipe

    def __new__(cls, path: str, tensor: str, recipe: Recipe) -> ComputedFile:
        made = super().__new__(cls, f"{path}: {tensor}, dequantized")
        made.recipe = recipe
        return made

    @property
    def size(self) -> int:
        """Bytes."""
        return self.recipe.numel * _BYTES

    def read_into(self, files: Reading, offset: int, into: memoryview) -> None:
        """Fill ``into`` from byte ``offset`` on."""
        done, end = 0, offset + len(into)
        assert end <= self.size, f"{self}: bytes up to {end} of {self.size}"
        while done < len(into):
            start, skip = divmod(offset + done, _BYTES)
            stop = min(start + STEP, -(-end // _BYTES))
            made = self.recipe.elements(files, start, stop)
            data = memoryview(made.view("u1").data)[skip : skip + len(into) - done]
            into[done : done + len(data)] = data
            done += len(data)


def real_ranges(path: str, start: int, stop: int) -> tuple[tuple[str, int, int], ...]:
    """The bytes of real files that a range of bytes of any file is read from."""
    return path.recipe.reads() if isinstance(path, ComputedFile) else ((path, start, stop),)


@dataclass(frozen=True, slots=True)
class Stored:
    """A contiguous tensor in a real file."""

    file: str
    offset_bytes: int
    dtype: str
    numel: int

    @property
    def range(self) -> tuple[str, int, int]:
        stop = self.offset_bytes + self.numel * ITEMSIZE[self.dtype]
        return self.file, self.offset_bytes, stop

    def read(self, files: Reading, start: int, stop: int) -> Array:
        """Elements [start, stop), raw."""
        import numpy as np

        from .cast import raw

        array: Array = np.empty(stop - start, raw(self.dtype))
        size = ITEMSIZE[self.dtype]
        files.read_into(
            self.file, self.offset_bytes + start * size, memoryview(array.view(np.uint8).data)
        )
        return array


@dataclass(frozen=True, slots=True)
class BlockScaled:
    """Matrices of 8-bit floats, of which each block of R x C elements has a scale.

    The blocks at the right and at the lower edge may be smaller.
    """

    weight: Stored
    scale: Stored
    rows: int  # of each matrix
    columns: int
    block: tuple[int, int]  # R, C
    grid: tuple[int, int]  # blocks below each other, and side by side

    @property
    def numel(self) -> int:
        return self.weight.numel

    def reads(self) -> tuple[tuple[str, int, int], ...]:
        return self.weight.range, self.scale.range

    def elements(self, files: Reading, start: int, stop: int) -> Array:
        import numpy as np

        from .cast import cast, raw, values

        number = values(self.weight.read(files, start, stop), self.weight.dtype).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for at, count, row, column, width in self._strips(start, stop):
                part = number[at - start : at - start + count * width].reshape(count, width)
                part *= self._scales(files, row, column, width)
        return cast(number.view(raw("F32")), "F32", "BF16")

    def _strips(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int, int]]:
        """(first element, rows, row, column, width) of rectangles whose rows share scales."""
        at = start
        while at < stop:
            row, column = divmod(at, self.columns)
            width = min(self.columns - column, stop - at)
            count = 1
            if width == self.columns:
                inside = row % self.rows
                edge = min((inside // self.block[0] + 1) * self.block[0], self.rows)
                count = max(1, min(edge - inside, (stop - at) // self.columns))
            yield at, count, row, column, width
            at += count * width

    def _scales(self, files: Reading, row: int, column: int, width: int) -> Floats:
        """The factor of each of ``width`` elements of a row, as float32."""
        import numpy as np

        matrix, inside = divmod(row, self.rows)
        base = (matrix * self.grid[0] + inside // self.block[0]) * self.grid[1]
        size = self.block[1]
        first, last = column // size, (column + width - 1) // size + 1
        found = _factors(self.scale.read(files, base + first, base + last), self.scale.dtype)
        skip = column - first * size
        return np.repeat(found, size)[skip : skip + width]


def _factors(array: Array, dtype: str) -> Floats:
    """Scales as float32; bytes are exponents of two, 127 for 1."""
    import numpy as np

    from .cast import values

    if dtype != "U8":
        return values(array, dtype).astype(np.float32)
    found: Floats = np.ldexp(np.float32(1), array.astype(np.int32) - 127)
    return found


GROUP = 32  # elements of MXFP4 that share a scale
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """4-bit floats in groups of 32 that share an exponent; the low half of a byte comes first."""

    blocks: Stored
    scales: Stored

    @property
    def numel(self) -> int:
        return self.blocks.numel * 2

    def reads(self) -> tuple[tuple[str, int, int], ...]:
        return self.blocks.range, self.scales.range

    def elements(self, files: Reading, start: int, stop: int) -> Array:
        import numpy as np

        from .cast import cast, raw

        first, last = start // GROUP, -(-stop // GROUP)
        packed = self.blocks.read(files, first * GROUP // 2, last * GROUP // 2).astype(np.uint8)
        values = np.array([*_FP4, *(-x for x in _FP4)], np.float32)
        number = np.empty((len(packed), 2), np.float32)
        number[:, 0], number[:, 1] = values[packed & 15], values[packed >> 4]
        with np.errstate(over="ignore", invalid="ignore"):
            groups = number.reshape(-1, GROUP)
            groups *= _factors(self.scales.read(files, first, last), "U8")[:, None]
        flat = number.reshape(-1)[start - first * GROUP : stop - first * GROUP]
        return cast(np.ascontiguousarray(flat).view(raw("F32")), "F32", "BF16")
