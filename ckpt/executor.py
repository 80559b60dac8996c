"""Moves the bytes of a plan, or compares them, in bounded memory.

No ``if`` about formats, families or axes: only views. A unit is all copies of one logical
tensor. Ranges that are contiguous on both sides go from file to file; the rest is tiled along
the logical tensor in the destination's order: each source span of a tile is read once, however
many ranks it goes to, rearranged in memory, and each destination span is written once.

Memory: workers x three buffers of a tile, whatever the model's size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from .box import Box
from .cast import Array, cast, raw, values
from .containers.files import Files
from .dtypes import ITEMSIZE
from .manifest import View
from .planner import Copy

RUN_BYTES = 1 << 16  # a contiguous run this long is moved by itself, not through a tile
TILE_BYTES = 2 << 20  # tiles above this leave the L2 cache and gain nothing
SPAN_TILES = 4  # a source span may be this many tiles long if it is dense enough
MIN_DENSITY = 4  # read a whole span if at least 1/4 of it is wanted; else run by run


@dataclass(frozen=True, slots=True)
class Budget:
    """How much memory moving may take."""

    workers: int = 2
    total_bytes: int = 32 << 20

    @property
    def tile_bytes(self) -> int:
        """Bytes of a destination tile, such that a worker's buffers stay inside its share."""
        return max(1 << 14, min(TILE_BYTES, self.total_bytes // self.workers // (SPAN_TILES + 2)))


def units(copies: Sequence[Copy]) -> list[list[Copy]]:
    """Copies grouped by logical tensor, in plan order: what is done, journalled and resumed."""
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
) -> None:
    """Call ``each(mover, index, unit)`` for every unit on ``budget.workers`` threads.

    ``finish`` sees each worker's mover once its work is done.
    """

    def loop(todo: Iterator[tuple[int, list[Copy]]], stop: threading.Event) -> None:
        with Files(buffers) as files:
            mover = Mover(files, budget.tile_bytes, stop)
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

    The first error of any thread stops all and is raised here, a KeyboardInterrupt too:
    ``stop`` is set, and ``todo`` ends early.
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
        for thread in threads:
            thread.join()
        raise
    if errors:
        raise errors[0]


class Stopped(Exception):
    """Another thread failed, or the user interrupted."""


@dataclass(slots=True)
class Mover:
    """One worker: its open files, its buffers, and what it has moved."""

    files: Files
    tile_bytes: int
    stop: threading.Event = field(default_factory=threading.Event)
    progress: Callable[[int], None] = lambda nbytes: None
    overflows: dict[str, int] = field(default_factory=dict)  # finite values that became infinite
    _twin: Mover | None = None
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
        for box, parts in tiles(strided, self.tile_bytes):
            del box
            self._check_stop()
            self._move_tile(parts)
            self.progress(sum(part.nbytes for part in parts))

    def twin(self) -> Mover:
        """The same worker with buffers of its own, to hold two sides of a comparison."""
        if self._twin is None:
            self._twin = Mover(self.files, self.tile_bytes, self.stop)
        return self._twin

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise Stopped

    def _move_run(self, copy: Copy, src_offset: int, dst_offset: int, length: int) -> None:
        """A contiguous range, in steps that let progress and interrupts through."""
        step = 64 << 20
        for done in range(0, length, step):
            self._check_stop()
            size = min(step, length - done)
            self._write = _grown(self._write, min(size, self.tile_bytes))
            scratch = self._write[: self.tile_bytes]
            self.files.transfer(
                copy.src.file, src_offset + done, copy.dst.file, dst_offset + done, size, scratch
            )
            self.progress(size)

    def _move_tile(self, parts: Sequence[Copy]) -> None:
        """Read each source span once, rearrange, write each destination span once."""
        spans = cluster([part.dst for part in parts])
        arrays = self.gather([part.src for part in parts])
        for part, array in zip(parts, arrays, strict=True):
            if part.dst.dtype == "F16" != part.src.dtype:
                self._count_overflows(part, array)
        for span in spans:
            if not span.dense:
                for i in span.members:
                    self._write_runs(parts[i], arrays[i])
                continue
            self._write = _grown(self._write, span.length)
            buffer = self._write[: span.length]
            for i in span.members:
                src, dst = parts[i].src, parts[i].dst
                _array(buffer, dst, span.start)[...] = cast(arrays[i], src.dtype, dst.dtype)
            self.files.write(span.file, span.start, buffer)

    def _write_runs(self, part: Copy, array: Array) -> None:
        """Write only the bytes of a sparse view: another worker may own those between them."""
        moved = cast(array, part.src.dtype, part.dst.dtype)
        packed = np.ascontiguousarray(moved.transpose(_slow_to_fast(part.dst)))
        data, at = memoryview(packed.reshape(-1).view(np.uint8).data), 0
        for offset, length in view_runs(part.dst):
            self.files.write(part.dst.file, offset, data[at : at + length])
            at += length

    def _count_overflows(self, part: Copy, before: Array) -> None:
        """Half precision has a small range; say so where a finite value leaves it."""
        wide = values(before, part.src.dtype)
        after = cast(before, part.src.dtype, "F16")
        lost = int(np.count_nonzero(np.isfinite(wide) & ~np.isfinite(after.view(np.float16))))
        if lost:
            self.overflows[part.fqn] = self.overflows.get(part.fqn, 0) + lost

    def gather(self, views: Sequence[View]) -> list[Array]:
        """The raw elements of ``views``, each span of bytes read once.

        The arrays look into this worker's read buffer and hold until the next call.
        """
        spans = cluster(views)
        limit = self.tile_bytes * SPAN_TILES
        whole = [
            s.length <= limit - self.tile_bytes and s.useful * MIN_DENSITY >= s.length
            for s in spans
        ]
        need = sum(s.length if w else s.useful for s, w in zip(spans, whole, strict=True))
        self._read = _grown(self._read, need)
        found: dict[int, Array] = {}
        at = 0
        for span, as_one in zip(spans, whole, strict=True):
            if as_one:
                buffer = self._read[at : at + span.length]
                self.files.read_into(span.file, span.start, buffer)
                found.update((i, _array(buffer, views[i], span.start)) for i in span.members)
                at += span.length
                continue
            for i in span.members:
                at = self._gather_runs(views[i], at)
                found[i] = _packed(self._read[at - _nbytes(views[i]) : at], views[i])
        return [found[i] for i in range(len(views))]

    def _gather_runs(self, view: View, at: int) -> int:
        """Read a sparse view run by run into the read buffer; the position after it."""
        for offset, length in view_runs(view):
            self.files.read_into(view.file, offset, self._read[at : at + length])
            at += length
        return at


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
    """Elements that were read in the file's order, back in the view's dim order."""
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
    useful: int  # bytes that belong to a view; equals length where there is no gap
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
    outer: list[tuple[int, int]] = []  # (count, step in bytes)
    for dim in reversed(_slow_to_fast(view)):
        if view.shape[dim] == 1:
            continue
        if not outer and view.strides[dim] * size == run:
            run *= view.shape[dim]
        else:
            outer.append((view.shape[dim], view.strides[dim] * size))
    if 0 in view.shape:
        return
    outer.reverse()
    for index in np.ndindex(*(n for n, _ in outer)):
        step = sum(i * s for i, (_, s) in zip(index, outer, strict=True))
        yield view.offset_bytes + step, run


def contiguous_runs(copy: Copy) -> Iterator[tuple[int, int, int]]:
    """(source offset, destination offset, bytes) if a copy is whole or a few long runs.

    Nothing where elements must be rearranged or cast: that is a tile's work.
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
    outer.reverse()
    for index in np.ndindex(*(n for n, _, _ in outer)) if outer else [()]:
        a = sum(i * s for i, (_, s, _) in zip(index, outer, strict=True))
        b = sum(i * d for i, (_, _, d) in zip(index, outer, strict=True))
        yield src.offset_bytes + a, dst.offset_bytes + b, run


def tiles(copies: Sequence[Copy], tile_bytes: int) -> Iterator[tuple[Box, list[Copy]]]:
    """The copies of one logical tensor cut into tiles, in the destination's order.

    A tile's box lies in the logical tensor's coordinates; its copies write at most
    ``tile_bytes`` unless one element of every copy is more.
    """
    copies = [copy for copy in copies if copy.box.numel]
    if not copies:
        return
    rank = len(copies[0].box.sizes)
    lo = tuple(min(c.box.offsets[d] for c in copies) for d in range(rank))
    hi = tuple(max(c.box.stop(d) for c in copies) for d in range(rank))
    bounds = Box(lo, tuple(b - a for a, b in zip(lo, hi, strict=True)))
    yield from _split(bounds, copies, _slow_to_fast(copies[0].dst), tile_bytes)


def _split(
    box: Box, copies: list[Copy], order: list[int], tile_bytes: int
) -> Iterator[tuple[Box, list[Copy]]]:
    """Cut along the destination's slowest dim that still has more than one index."""
    inside = [(copy, common) for copy in copies if (common := copy.box.intersect(box))]
    inside = [(copy, common) for copy, common in inside if common.numel]
    if not inside:
        return
    total = sum(
        common.numel * max(ITEMSIZE[copy.dst.dtype], ITEMSIZE[copy.src.dtype])
        for copy, common in inside
    )
    dim = next((d for d in order if box.sizes[d] > 1), -1)
    if total <= tile_bytes or dim < 0:
        yield box, [_sub(copy, common) for copy, common in inside]
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
