"""An output before it exists: its files, where its tensors lie, and a check that none overlap.

`check_design` runs for every output before anything is written: no two files have one name, no
two tensors share a byte. It is pure, so a dry run also finds a design that cannot be written.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePath, PurePosixPath

from ..errors import raise_all
from .dtypes import ITEMSIZE
from .file_layout import FileLayout
from .manifest import Manifest, SideFile, View

SLOT_BYTES = 4  # of a CRC-32


@dataclass(frozen=True, slots=True)
class OutFile:
    """A file to be made."""

    path: str
    layout: FileLayout


@dataclass(slots=True)
class Design:
    """An output before it exists."""

    files: list[OutFile]
    manifest: Manifest
    tied: int = 0  # copies of tied tensors that are written in addition
    notes: list[str] = field(default_factory=list)  # what the format cannot hold


def check_design(design: Design, root: PurePath, sides: Sequence[SideFile]) -> None:
    """Check that every file below ``root`` has another name, and every byte one writer.

    ``sides`` are the text files of the output. CheckpointError names every file of the source that
    has the name of another one. Tensors that share bytes are a bug of a writer.
    """
    names = [_below(root, file.path) for file in design.files]
    raise_all(_name_faults(names, sides), "this output cannot be written")
    shared = list(_byte_faults(design))
    assert not shared, "; ".join(shared[:5])


def _below(root: PurePath, path: str) -> str:
    return PurePath(path).relative_to(root).as_posix()


def _name_faults(names: Sequence[str], sides: Sequence[SideFile]) -> Iterator[str]:
    """Equal names; for weights also names that differ only in case or in the form of accents.

    Two side files may differ only so, as they do in the source.
    """
    weights = {_folded(name): name for name in names}
    assert len(weights) == len(names), f"files of one name: {sorted(names)}"
    texts = [side.name for side in sides if not side.source]
    assert len(set(texts)) == len(texts), f"texts of one name: {sorted(texts)}"
    taken = set(texts)
    for side in sides:
        if not _is_below(side.name):
            yield f"{side.source or side.name}: {side.name!r} leads out of the output"
            continue
        met = weights.get(_folded(side.name), "")
        if side.source and side.name in taken:
            met = side.name
        if met:
            yield f"{side.source or side.name}: {met} is written there; {_AWAY}"
        taken.add(side.name)
    yield from _folder_faults([*names, *sorted(taken)])


def _folder_faults(names: Sequence[str]) -> Iterator[str]:
    """Files with a name that another file needs for its folder."""
    files = {_folded(name): name for name in names}
    for name in names:
        for parent in PurePosixPath(_folded(name)).parents:
            if str(parent) in files:
                yield f"{name}: needs a folder where the file {files[str(parent)]} is; {_AWAY}"


_AWAY = "move it out of the source"


def _is_below(name: str) -> bool:
    return "\0" not in name and all(part not in ("", ".", "..") for part in name.split("/"))


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


# --- bytes --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Claim:
    """Bytes of a file: from ``start`` on a grid of (count, step in bytes), largest step first."""

    start: int  # byte offset
    stop: int  # one past the last byte
    grid: tuple[tuple[int, int], ...]
    run: int  # contiguous bytes at each point of the grid
    says: str  # what they belong to


def _byte_faults(design: Design) -> Iterator[str]:
    """Every pair of tensors, headers and checksum slots of one file that share a byte."""
    claims: dict[str, list[_Claim]] = {file.path: [] for file in design.files}
    for fqn, chunks in design.manifest.chunks.items():
        for chunk in chunks:
            view = chunk.view
            if 0 not in view.shape:
                claims[view.file].append(_claim(view, fqn))
    for file in design.files:
        rows = claims[file.path]
        size = file.layout.size_bytes
        rows += [
            _Claim(at, at + len(data), (), len(data), "the header")
            for at, data in file.layout.fixed
            if data
        ]
        rows.sort(key=lambda claim: (claim.start, claim.stop))
        if rows and (rows[0].start < 0 or max(row.stop for row in rows) > size):
            yield f"{file.path}: a tensor lies outside its {size} bytes"
        yield from _meetings(file.path, rows)
        tensors = [row for row in rows if row.says != "the header"]
        slots = [
            _Claim(at, at + SLOT_BYTES, (), SLOT_BYTES, "a checksum")
            for checksum in file.layout.checksums
            for at in checksum.slots
        ]
        yield from _meetings(file.path, sorted([*tensors, *slots], key=lambda c: c.start))


def _meetings(path: str, rows: Sequence[_Claim]) -> Iterator[str]:
    """One line for each two claims that overlap; ``rows`` are sorted by their starts."""
    active: list[_Claim] = []
    furthest = 0
    for row in rows:
        if row.start < furthest:
            active = [other for other in active if other.stop > row.start]
            for other in active:
                if _meet(other.start, other.grid, other.run, row.start, row.grid, row.run):
                    yield f"{path}: {other.says} and {row.says} share bytes from {row.start} on"
        else:
            active = []
        active.append(row)
        furthest = max(furthest, row.stop)


def _claim(view: View, fqn: str) -> _Claim:
    grid, run, length = _grid(view.shape, view.strides, ITEMSIZE[view.dtype])
    return _Claim(view.offset_bytes, view.offset_bytes + length, grid, run, fqn)


@lru_cache(maxsize=4096)  # layers repeat the same geometry
def _grid(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> tuple[tuple[tuple[int, int], ...], int, int]:
    """A view's grid, its contiguous run, and the bytes from its first to its last."""
    run = length = itemsize
    grid: list[tuple[int, int]] = []
    for step, count in sorted(
        (stride * itemsize, size) for size, stride in zip(shape, strides, strict=True) if size > 1
    ):
        assert step >= length, f"elements of a view of shape {shape}, strides {strides} overlap"
        if not grid and step == run:
            run *= count
        else:
            grid.append((count, step))
        length += (count - 1) * step
    return tuple(reversed(grid)), run, length


def _meet(
    a: int,
    grid_a: tuple[tuple[int, int], ...],
    run_a: int,
    b: int,
    grid_b: tuple[tuple[int, int], ...],
    run_b: int,
) -> bool:
    """Whether two grids of runs share a byte, or cannot be shown not to.

    Boxes of one tensor have the same steps: first the row ranges are compared, along the largest
    step, then the rest within a row.
    """
    if a + _length(grid_a, run_a) <= b or b + _length(grid_b, run_b) <= a:
        return False
    steps = [grid[0][1] for grid in (grid_a, grid_b) if grid]
    if not steps:
        return True
    step = max(steps)
    rows_a, inner_a = (grid_a[0][0], grid_a[1:]) if grid_a and grid_a[0][1] == step else (1, grid_a)
    rows_b, inner_b = (grid_b[0][0], grid_b[1:]) if grid_b and grid_b[0][1] == step else (1, grid_b)
    for origin in (a, b):  # of the rows: where neither box leaves its row
        (row_a, at_a), (row_b, at_b) = divmod(a - origin, step), divmod(b - origin, step)
        if at_a + _length(inner_a, run_a) > step or at_b + _length(inner_b, run_b) > step:
            continue
        if row_a + rows_a <= row_b or row_b + rows_b <= row_a:
            return False
        return _meet(at_a, inner_a, run_a, at_b, inner_b, run_b)
    return True


def _length(grid: Iterable[tuple[int, int]], run: int) -> int:
    return run + sum((count - 1) * step for count, step in grid)
