"""Byte ranges of files in any storage: what the executor reads and writes.

Every read and write names its position, so threads share only their work list. A call
moves at most 1 GiB (Linux moves at most 2 GiB - 4 KiB per call, macOS refuses 2 GiB); short
reads and writes continue where they stopped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from threading import Event
from types import TracebackType

from ..errors import CheckpointError
from ..model.file_layout import Checksum, FileLayout
from .computed import ComputedFile
from .crc import crc32
from .storage import LOCAL, Storage, StoragePath, told

MAX_CALL_BYTES = 1 << 30
MAX_OPEN_FILES = 64  # per thread; the usual limit of a process is 1024
SCRATCH_BYTES = 1 << 20  # stays in the L2 cache, where copying is fastest


class Stopped(Exception):
    """Another thread failed, or the user interrupted."""


class Files:
    """Open files of one thread; the least recently used one is closed first."""

    def __init__(
        self, buffers: Mapping[str, memoryview] | None = None, storage: Storage = LOCAL
    ) -> None:
        self.storage = storage
        self._open: OrderedDict[tuple[str, bool], int] = OrderedDict()
        self._buffers = buffers or {}  # name -> memory that is read and written like a file
        self._can_copy = True  # inside the kernel
        self.dirty: set[str] = set()  # files written since the last `sync`

    def __enter__(self) -> Files:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        fault: CheckpointError | None = None
        while self._open:
            try:
                self._close_oldest()
            except CheckpointError as failed:
                fault = fault or failed
        if fault is not None and error is None:
            raise fault

    def _close_oldest(self) -> None:
        """Close the least recently used file; a quota may fail only here."""
        (path, _), fd = self._open.popitem(last=False)
        try:
            self.storage.close(fd)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error

    def _fd(self, path: str, write: bool) -> int:
        key = (path, write)
        fd = self._open.get(key)
        if fd is None:
            if len(self._open) >= max(2, MAX_OPEN_FILES):  # a copy holds two
                self._close_oldest()
            try:
                fd = self.storage.open(path, write=write)
            except OSError as error:
                raise CheckpointError(f"{path}: {error.strerror}") from error
            self._open[key] = fd
        else:
            self._open.move_to_end(key)
        return fd

    def size(self, path: str) -> int:
        """Bytes of a file."""
        if isinstance(path, ComputedFile):
            return path.size
        try:
            return self.storage.stat_open(self._fd(path, write=False)).size
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error

    def read_into(self, path: str, offset: int, into: memoryview) -> None:
        """Fill ``into`` (bytes) from ``offset``; CheckpointError if the file ends before."""
        if isinstance(path, ComputedFile):
            path.read_into(self, offset, into)
            return
        if path in self._buffers:
            into[:] = self._buffers[path][offset : offset + len(into)]
            return
        fd, done = self._fd(path, write=False), 0
        while done < len(into):
            part = into[done : done + MAX_CALL_BYTES]
            try:
                got = self.storage.read(fd, part, offset + done)
            except OSError as error:
                raise CheckpointError(
                    f"{path}: {error.strerror} at byte {offset + done}"
                ) from error
            if got == 0:
                raise CheckpointError(
                    f"{path}: ends at byte {offset + done}, {len(into) - done} bytes too early; "
                    "it became shorter while it was read"
                )
            done += got

    def read_runs(self, path: str, runs: Iterable[tuple[int, int]], into: memoryview) -> None:
        """Fill ``into`` with the (offset, length) ranges one after another."""
        at = 0
        for offset, length in runs:
            self.read_into(path, offset, into[at : at + length])
            at += length

    def write(self, path: str, offset: int, data: memoryview) -> None:
        """Write all of ``data`` (bytes) at ``offset``."""
        if path in self._buffers:
            self._buffers[path][offset : offset + len(data)] = data
            return
        fd, done = self._fd(path, write=True), 0
        self.dirty.add(path)
        while done < len(data):
            try:
                part = data[done : done + MAX_CALL_BYTES]
                done += self.storage.write(fd, part, offset + done)
            except OSError as error:
                raise CheckpointError(
                    f"{path}: {error.strerror} at byte {offset + done}"
                ) from error

    def transfer(
        self, src: str, src_offset: int, dst: str, dst_offset: int, length: int, scratch: memoryview
    ) -> None:
        """Move a contiguous range between files, inside the kernel where it can."""
        if src in self._buffers and dst not in self._buffers:
            data = self._buffers[src][src_offset : src_offset + length]
            self.write(dst, dst_offset, data)
            return
        done = 0
        computed = isinstance(src, ComputedFile)
        if self._can_copy and not (computed or src in self._buffers or dst in self._buffers):
            done = self._copy(src, src_offset, dst, dst_offset, length)
        while done < length:
            part = scratch[: min(len(scratch), length - done)]
            self.read_into(src, src_offset + done, part)
            self.write(dst, dst_offset + done, part)
            done += len(part)

    def _copy(self, src: str, src_offset: int, dst: str, dst_offset: int, length: int) -> int:
        """How many bytes the storage copied by itself; fewer than asked if it cannot."""
        reader, writer, done = self._fd(src, write=False), self._fd(dst, write=True), 0
        self.dirty.add(dst)
        while done < length:
            want = min(MAX_CALL_BYTES, length - done)
            try:
                got = self.storage.copy(reader, writer, want, src_offset + done, dst_offset + done)
            except OSError as error:
                raise CheckpointError(f"{dst}: {error.strerror}") from error
            if got is None:
                self._can_copy = False
                break
            if got == 0:  # end of file, or a file system that copies nothing: read will tell
                break
            done += got
        return done

    def sync(self) -> None:
        """Make everything written so far durable."""
        for path in sorted(self.dirty):
            try:
                self.storage.sync(self._fd(path, write=True))
            except OSError as error:
                raise CheckpointError(f"{path}: {error.strerror}") from error
        self.dirty.clear()


def create(path: str, layout: FileLayout, storage: Storage = LOCAL) -> None:
    """Make a file at its full size with the bytes known now; the rest reads as zeros."""
    fd = -1
    try:
        fd = storage.create(path, layout.size_bytes)
        for offset, data in layout.fixed:
            view, done = memoryview(data), 0
            while done < len(data):
                part = view[done : done + MAX_CALL_BYTES]
                done += storage.write(fd, part, offset + done)
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror} ({layout.size_bytes} bytes are needed)"
        ) from error
    finally:
        if fd >= 0:
            with told(path):
                storage.close(fd)


def write_file(target: StoragePath, data: bytes) -> None:
    """Write a small file at once."""
    create(str(target), FileLayout(len(data), {}, ((0, data),)), target.storage)


def copy_file(source: StoragePath, target: StoragePath) -> None:
    """Copy a regular file of any size, byte for byte, up to the size that it has when it is opened.
    So a file without a size, such as a kernel's, gives an empty file, and the copy ends.
    """
    size, scratch = source.size(), memoryview(bytearray(SCRATCH_BYTES))
    create(str(target), FileLayout(size, {}, ()), target.storage)
    with Files(storage=target.storage) as files:
        if source.storage is target.storage:
            files.transfer(str(source), 0, str(target), 0, size, scratch)
            return
        at = 0
        for part in source.parts():
            files.write(str(target), at, memoryview(part))
            at += len(part)


def parts(
    path: str,
    offset: int,
    length: int,
    files: Files,
    scratch: memoryview,
    stop: Event | None = None,
) -> Iterator[memoryview]:
    """The bytes of a range, a scratch buffer at a time; `Stopped` once ``stop`` is set."""
    at, end = offset, offset + length
    while at < end:
        if stop is not None and stop.is_set():
            raise Stopped
        part = scratch[: min(len(scratch), end - at)]
        files.read_into(path, at, part)
        yield part
        at += len(part)


def range_crc32(
    path: str,
    offset: int,
    length: int,
    files: Files,
    scratch: memoryview,
    stop: Event | None = None,
) -> int:
    """The CRC-32 of a range of a file."""
    crc = 0
    for part in parts(path, offset, length, files, scratch, stop):
        crc = crc32(part, crc)
    return crc


def range_xxh3(
    path: str,
    offset: int,
    length: int,
    files: Files,
    scratch: memoryview,
    stop: Event | None = None,
) -> str:
    """The xxh3-128 of a range of a file, in hex."""
    import xxhash

    state = xxhash.xxh3_128()
    for part in parts(path, offset, length, files, scratch, stop):
        state.update(part)
    return state.hexdigest()


def seal(path: str, checksum: Checksum, files: Files, scratch: memoryview, stop: Event) -> None:
    """Write the CRC-32 of a range of a file into its slots."""
    crc = range_crc32(path, checksum.offset_bytes, checksum.length_bytes, files, scratch, stop)
    for slot in checksum.slots:
        files.write(path, slot, memoryview(crc.to_bytes(4, "little")))


def digest(path: str, files: Files) -> str:
    """The xxh3-128 of a whole file, in hex."""
    scratch = memoryview(bytearray(SCRATCH_BYTES))
    return range_xxh3(path, 0, files.size(path), files, scratch)
