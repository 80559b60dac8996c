"""Moves the bytes of a plan, or compares them, in bounded memory.

It knows views, and no format, family or axis. A unit is all copies of one logical tensor. Ranges
that are contiguous on both sides go from file to file. The rest is cut into tiles along the logical
tensor, in the destination's order. Each source span of a tile is read once, for all ranks that need
it, and rearranged in memory; then each destination span is written once. Memory: two buffers per
worker and what a cast needs, at any model size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from ..model.box import Box
from ..model.dtypes import ITEMSIZE
from ..model.manifest import View
from ..model.planner import Copy
from .cast import Array, cast, overflows, raw
from .files import Files, Stopped
from .interrupts import uninterrupted
from .storage import LOCAL, Storage

RUN_BYTES = 1 << 16  # a contiguous run this long is moved by itself, not through a tile
TILE_BYTES = 2 << 20  # tiles above this leave the L2 cache and gain nothing
MIN_DENSITY = 4  # read a whole span if at least 1/4 of it is wanted; else run by run


@dataclass(frozen=True, slots=True)
class Budget:
    """How much memory moving may take."""

    workers: int = 2
    total_bytes: int = 32 << 20

    @property
    def buffer_bytes(self) -> int:
        """The most that each of a worker's two buffers may hold; a cast needs as much again."""
        return max(1 << 14, self.total_bytes // self.workers // 3)

    def tile_bytes(self, turned: bool) -> int:
        """Bytes of a destination tile.

        If the copy transposes, the source's runs grow with the tile, so a tile is as large as a
        buffer. Otherwise it is a quarter of that, so that a span of which 1/4 is needed fits.
        """
        return self.buffer_bytes if turned else min(TILE_BYTES, self.buffer_bytes // MIN_DENSITY)


def units(copies: Sequence[Copy]) -> list[list[Copy]]:
    """Copies grouped by logical tensor, in plan order: the units of moving, journal and resume."""
    grouped: dict[str, list[Copy]] = {}
    for copy in copies:
        grouped.setdefault(copy.fqn, []).append(copy)
    return list(grouped.values())


def run_units(
    work: Sequence[list[Copy]],
    budget: Budget,
    each: Callable[[Mover, int, list[Copy]], None],
    *,
    finish: Callable[[Mover], None] = lambda mover: None,
    buffers: Mapping[str, memoryview] | None = None,
    storage: Storage = LOCAL,
) -> None:
    """Call ``each(mover, index, unit)`` for every unit on ``budget.workers`` threads.

    ``finish`` gets each worker's mover at the end.
    """

    def loop(todo: Iterator[tuple[int, list[Copy]]], stop: threading.Event) -> None:
        with Files(buffers, storage) as files:
            mover = Mover(files, budget, stop)
            for index, unit in todo:
                each(mover, index, unit)
            finish(mover)

    in_threads(list(enumerate(work)), budget.workers, loop)


Item = TypeVar("Item")


def in_threads(
    items: Sequence[Item],
    workers: int,
    loop: Callable[[Iterator[Item], threading.Event], None],
) -> None:
    """Run ``loop(todo, stop)`` on threads that share one iterator over ``items``.

    The first error of any thread stops all threads and is raised here; so does a KeyboardInterrupt.
    Then ``stop`` is set, and ``todo`` ends early.
    """
    lock, stop = threading.Lock(), threading.Event()
    errors: list[BaseException] = []
    source = iter(items)

    def todo() -> Iterator[Item]:
        while not stop.is_set():
            with lock:
                try:
                    item = next(source)
                except StopIteration:
                    return
            yield item

    def guarded() -> None:
        try:
            loop(todo(), stop)
        except Stopped:
            return
        except BaseException as error:
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=guarded, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():  # a join without timeout would not see SIGINT
                thread.join(0.2)
    except BaseException:
        stop.set()
        uninterrupted(lambda: _join(threads))  # or the folder is removed while they write into it
        raise
    if errors:
        raise errors[0]


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join()


@dataclass(slots=True)
class Mover:
    """One worker: its open files, its buffers, and what it has moved."""

    files: Files
    budget: Budget
    stop: threading.Event = field(default_factory=threading.Event)
    progress: Callable[[int], None] = lambda nbytes: None
    overflows: dict[str, int] = field(default_factory=dict)  # finite values that became infinite
    _read: memoryview = field(default_factory=lambda: memoryview(b""))
    _write: memoryview = field(default_factory=lambda: memoryview(b""))

    def move(self, copies: Sequence[Copy]) -> None:
        """Carry out the copies of one logical tensor."""
        strided = []
        for copy in copies:
            runs = list(contiguous_runs(copy))
            if not runs:
                strided.append(copy)
            for src_offset, dst_offset, length in runs:
                self._move_run(copy, src_offset, dst_offset, length)
        for parts in tiles(strided, self.budget):
            self._check_stop()
            self._move_tile(parts)
            self.progress(sum(part.nbytes for part in parts))

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise Stopped

    def _move_run(self, copy: Copy, src_offset: int, dst_offset: int, length: int) -> None:
        """A contiguous range, in steps that let progress and interrupts through."""
        step = 64 << 20
        for done in range(0, length, step):
            self._check_stop()
            size = min(step, length - done)
            self._write = _grown(self._write, min(size, self.budget.tile_bytes(turned=False)))
            scratch = self._write[: self.budget.tile_bytes(turned=False)]
            self.files.transfer(
                copy.src.file, src_offset + done, copy.dst.file, dst_offset + done, size, scratch
            )
            self.progress(size)

    def _move_tile(self, parts: Sequence[Copy]) -> None:
        """Read each source span once, rearrange, write each destination span once."""
        spans = cluster([part.dst for part in parts])
        arrays = self.gather([part.src for part in parts])
        for span in spans:
            if not span.dense:
                for i in span.members:
                    self._write_runs(parts[i], arrays[i])
                continue
            self._write = _grown(self._write, span.length)
            buffer = self._write[: span.length]
            for i in span.members:
                _array(buffer, parts[i].dst, span.start)[...] = self._cast(parts[i], arrays[i])
            self.files.write(span.file, span.start, buffer)

    def _write_runs(self, part: Copy, array: Array) -> None:
        """Write only the bytes of a sparse view: the bytes between them may be another worker's."""
        moved = self._cast(part, array)
        packed = np.ascontiguousarray(moved.transpose(_slow_to_fast(part.dst)))
        data, at = memoryview(packed.reshape(-1).view(np.uint8).data), 0
        for offset, length in view_runs(part.dst):
            self.files.write(part.dst.file, offset, data[at : at + length])
            at += length

    def _cast(self, part: Copy, array: Array) -> Array:
        """The elements in the destination's dtype; counts finite ones that become infinite."""
        if part.src.dtype == part.dst.dtype:
            return array
        moved = cast(array, part.src.dtype, part.dst.dtype)
        lost = overflows(array, part.src.dtype, moved, part.dst.dtype)
        if lost:
            self.overflows[part.fqn] = self.overflows.get(part.fqn, 0) + lost
        return moved

    def gather(self, views: Sequence[View], *, beside: bool = False) -> list[Array]:
        """The raw elements of ``views``, each span of bytes read once.

        The arrays are views of this worker's read buffer, or with ``beside`` of its write buffer,
        so that two sides can be compared. They are valid until the next such call.
        """
        spans = cluster(views)
        room = self.budget.buffer_bytes - sum(span.useful for span in spans)
        whole = []
        for span in spans:  # read gaps too while the buffer has room for them
            gap = span.length - span.useful
            whole.append(gap <= room and span.useful * MIN_DENSITY >= span.length)
            room -= gap if whole[-1] else 0
        need = sum(s.length if w else s.useful for s, w in zip(spans, whole, strict=True))
        if beside:
            into = self._write = _grown(self._write, need)
        else:
            into = self._read = _grown(self._read, need)
        found: dict[int, Array] = {}
        at = 0
        for span, as_one in zip(spans, whole, strict=True):
            if as_one:
                buffer = into[at : at + span.length]
                self.files.read_into(span.file, span.start, buffer)
                found.update((i, _array(buffer, views[i], span.start)) for i in span.members)
                at += span.length
                continue
            for i in span.members:
                buffer = into[at : at + _nbytes(views[i])]
                self.files.read_runs(span.file, view_runs(views[i]), buffer)
                found[i] = _packed(buffer, views[i])
                at += len(buffer)
        return [found[i] for i in range(len(views))]


def _grown(buffer: memoryview, size: int) -> memoryview:
    return buffer if len(buffer) >= size else memoryview(bytearray(size))


def _nbytes(view: View) -> int:
    return int(np.prod(view.shape, dtype=np.int64)) * ITEMSIZE[view.dtype]


def _array(buffer: memoryview, view: View, base: int) -> Array:
    """A view's raw elements inside ``buffer``, whose first byte is the file's byte ``base``."""
    dtype = raw(view.dtype)
    strides = tuple(step * dtype.itemsize for step in view.strides)
    array: Array = np.ndarray(view.shape, dtype, buffer, view.offset_bytes - base, strides)
    return array


def _slow_to_fast(view: View) -> list[int]:
    """The view's dims, largest stride first."""
    return sorted(range(len(view.shape)), key=lambda d: -view.strides[d])


def _packed(buffer: memoryview, view: View) -> Array:
    """Elements in the file's order, put back into the view's dim order."""
    order = _slow_to_fast(view)
    array: Array = np.ndarray([view.shape[d] for d in order], raw(view.dtype), buffer)
    back: Array = array.transpose([order.index(d) for d in range(len(order))])
    return back


@dataclass(slots=True)
class Span:
    """Views of one file whose bytes touch or overlap, as one byte range."""

    file: str
    start: int  # byte offset
    length: int  # bytes
    useful: int  # bytes that belong to a view; equals length if there is no gap
    members: list[int]  # positions of the views

    @property
    def dense(self) -> bool:
        return self.useful == self.length


def cluster(views: Sequence[View]) -> list[Span]:
    """Views grouped into byte ranges, file by file."""
    extents = sorted((v.file, *v.extent(), i) for i, v in enumerate(views) if 0 not in v.shape)
    spans: list[Span] = []
    for file, start, stop, i in extents:
        last = spans[-1] if spans else None
        if last is not None and last.file == file and start <= last.start + last.length:
            last.length = max(last.length, stop - last.start)
            last.useful += _nbytes(views[i])
            last.members.append(i)
        else:
            spans.append(Span(file, start, stop - start, _nbytes(views[i]), [i]))
    return spans


def view_runs(view: View) -> Iterator[tuple[int, int]]:
    """(byte offset, length) of each contiguous run, in the file's order."""
    run = size = ITEMSIZE[view.dtype]
    outer: list[tuple[int, int]] = []  # (count, step in bytes), fastest first
    for dim in reversed(_slow_to_fast(view)):
        if view.shape[dim] == 1:
            continue
        if not outer and view.strides[dim] * size == run:
            run *= view.shape[dim]
        else:
            outer.append((view.shape[dim], view.strides[dim] * size))
    if 0 in view.shape:
        return
    for start in offsets_of(view.offset_bytes, outer):
        yield start, run


def offsets_of(start: int, outer: Sequence[tuple[int, int]]) -> Iterator[int]:
    """The byte offsets of a grid of (count, step) dims, fastest first, in rising order."""
    if not outer:
        yield start
        return
    (count, step), slower = outer[0], outer[1:]
    for base in offsets_of(start, slower):
        yield from range(base, base + count * step, step) if step else (base,) * count


def contiguous_runs(copy: Copy) -> Iterator[tuple[int, int, int]]:
    """(source offset, destination offset, bytes) if a copy is whole or a few long runs.

    Empty if elements must be rearranged or cast; tiles do that.
    """
    src, dst = copy.src, copy.dst
    if src.dtype != dst.dtype or 0 in src.shape:
        return
    size = run = ITEMSIZE[src.dtype]
    outer: list[tuple[int, int, int]] = []  # (count, source step, destination step) in bytes
    for dim in reversed(_slow_to_fast(dst)):
        count, a, b = src.shape[dim], src.strides[dim] * size, dst.strides[dim] * size
        if count == 1:
            continue
        if not outer and a == run and b == run:
            run *= count
        else:
            outer.append((count, a, b))
    if outer and run < RUN_BYTES:
        return
    sources = offsets_of(src.offset_bytes, [(count, step) for count, step, _ in outer])
    targets = offsets_of(dst.offset_bytes, [(count, step) for count, _, step in outer])
    for a, b in zip(sources, targets, strict=True):
        yield a, b, run


def tiles(copies: Sequence[Copy], budget: Budget) -> Iterator[list[Copy]]:
    """The copies of one logical tensor cut into tiles, in the destination's order.

    A tile's copies write at most ``budget.tile_bytes`` unless one element of each is more.
    """
    copies = [copy for copy in copies if copy.box.numel]
    if not copies:
        return
    rank = len(copies[0].box.sizes)
    lo = tuple(min(c.box.offsets[d] for c in copies) for d in range(rank))
    hi = tuple(max(c.box.stop(d) for c in copies) for d in range(rank))
    bounds = Box(lo, tuple(b - a for a, b in zip(lo, hi, strict=True)))
    order = _slow_to_fast(copies[0].dst)
    turned = order != _slow_to_fast(copies[0].src)
    yield from _split(bounds, copies, order, budget.tile_bytes(turned))


def _split(
    box: Box, copies: Sequence[Copy], order: list[int], tile_bytes: int
) -> Iterator[list[Copy]]:
    """Cut along the destination's slowest dim that still has more than one index."""
    inside = [(c, common) for c in copies if (common := c.box.intersect(box)) and common.numel]
    if not inside:
        return
    total = sum(
        common.numel * max(ITEMSIZE[copy.dst.dtype], ITEMSIZE[copy.src.dtype])
        for copy, common in inside
    )
    dim = next((d for d in order if box.sizes[d] > 1), -1)
    if total <= tile_bytes or dim < 0:
        yield [_sub(copy, common) for copy, common in inside]
        return
    step = max(1, box.sizes[dim] * tile_bytes // total)
    for start in range(box.offsets[dim], box.stop(dim), step):
        size = min(step, box.stop(dim) - start)
        offsets = (*box.offsets[:dim], start, *box.offsets[dim + 1 :])
        sizes = (*box.sizes[:dim], size, *box.sizes[dim + 1 :])
        yield from _split(Box(offsets, sizes), [c for c, _ in inside], order, tile_bytes)


def _sub(copy: Copy, box: Box) -> Copy:
    """The part of a copy inside ``box`` (logical coordinates)."""
    at = tuple(b - c for b, c in zip(box.offsets, copy.box.offsets, strict=True))
    return Copy(copy.fqn, box, copy.src.narrow(at, box.sizes), copy.dst.narrow(at, box.sizes))
