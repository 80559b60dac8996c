"""Byte ranges of files: the only place, with ``publish.py``, that touches the operating system.

Every read and write is positional, so threads share nothing but their work list. A call
moves at most 1 GiB (Linux moves at most 2 GiB - 4 KiB per call, macOS refuses 2 GiB); short
reads and writes continue where they stopped.
"""

from __future__ import annotations

import errno
import os
import stat
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType

from ..errors import CheckpointError
from ..model.file_layout import Checksum, FileLayout

MAX_CALL_BYTES = 1 << 30
MAX_OPEN_FILES = 64  # per thread; the usual limit of a process is 1024
SCRATCH_BYTES = 1 << 20  # stays in the L2 cache, where copying is fastest

# copy_file_range and sendfile refuse with one of these where the file systems, the kernel
# or a sandbox cannot do it; plain reads and writes always can.
_REFUSALS = {
    errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM,
    errno.EACCES, errno.ETXTBSY, errno.EOVERFLOW, errno.ENOTSUP, errno.EIO,
}  # fmt: skip


def regular_size(path: str) -> int:
    """Bytes of a regular file; opening a pipe would wait for a writer, a device has no end."""
    try:
        info = os.stat(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(info.st_mode):
        raise CheckpointError(f"{path}: is not a regular file")
    return info.st_size


class Files:
    """Open files of one thread, closed least recently used first."""

    def __init__(self, buffers: Mapping[str, memoryview] | None = None) -> None:
        self._open: OrderedDict[tuple[str, bool], int] = OrderedDict()
        self._buffers = buffers or {}  # name -> memory that is read and written like a file
        self._kernel_copy = KERNEL_COPY
        self.dirty: set[str] = set()  # files written since the last `sync`

    def __enter__(self) -> Files:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def _fd(self, path: str, write: bool) -> int:
        key = (path, write)
        fd = self._open.get(key)
        if fd is None:
            if len(self._open) >= max(2, MAX_OPEN_FILES):  # a copy holds two
                os.close(self._open.popitem(last=False)[1])
            try:
                fd = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(f"{path}: {error.strerror}") from error
            self._open[key] = fd
        else:
            self._open.move_to_end(key)
        return fd

    def read_into(self, path: str, offset: int, into: memoryview) -> None:
        """Fill ``into`` (bytes) from ``offset``; CheckpointError if the file ends before."""
        if path in self._buffers:
            into[:] = self._buffers[path][offset : offset + len(into)]
            return
        fd, done = self._fd(path, write=False), 0
        while done < len(into):
            part = into[done : done + MAX_CALL_BYTES]
            try:
                got = PREADV(fd, [part], offset + done)
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
                done += PWRITE(fd, data[done : done + MAX_CALL_BYTES], offset + done)
            except OSError as error:
                raise CheckpointError(
                    f"{path}: {error.strerror} at byte {offset + done}"
                ) from error

    def transfer(
        self, src: str, src_offset: int, dst: str, dst_offset: int, length: int, scratch: memoryview
    ) -> None:
        """Move a contiguous range between files, inside the kernel where it can."""
        done = 0
        if self._kernel_copy is not None and not (src in self._buffers or dst in self._buffers):
            done = self._kernel_transfer(src, src_offset, dst, dst_offset, length)
        while done < length:
            part = scratch[: min(len(scratch), length - done)]
            self.read_into(src, src_offset + done, part)
            self.write(dst, dst_offset + done, part)
            done += len(part)

    def _kernel_transfer(
        self, src: str, src_offset: int, dst: str, dst_offset: int, length: int
    ) -> int:
        """How many bytes the kernel copied; fewer than asked where it refuses."""
        assert self._kernel_copy is not None
        reader, writer, done = self._fd(src, write=False), self._fd(dst, write=True), 0
        self.dirty.add(dst)
        while done < length:
            want = min(MAX_CALL_BYTES, length - done)
            try:
                got = self._kernel_copy(reader, writer, want, src_offset + done, dst_offset + done)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise CheckpointError(f"{dst}: {error.strerror}") from error
                self._kernel_copy = None
                break
            if got == 0:  # end of file, or a file system that copies nothing: let read say
                break
            done += got
        return done

    def sync(self) -> None:
        """Make everything written so far durable."""
        for path in sorted(self.dirty):
            try:
                os.fsync(self._fd(path, write=True))
            except OSError as error:
                raise CheckpointError(f"{path}: {error.strerror}") from error
        self.dirty.clear()


def _preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
    """``os.preadv`` for systems that lack it."""
    data = os.pread(fd, len(buffers[0]), offset)
    buffers[0][: len(data)] = data
    return len(data)


# Module attributes, so that a test can stand in for a system without them, or with short calls.
PREADV: Callable[[int, list[memoryview], int], int] = getattr(os, "preadv", _preadv)
PWRITE: Callable[[int, memoryview, int], int] = os.pwrite
KERNEL_COPY: Callable[[int, int, int, int, int], int] | None = getattr(os, "copy_file_range", None)


def create(path: str, blueprint: FileLayout) -> None:
    """Make a file at its full size with the bytes known now; the rest reads as zeros."""
    fd = -1
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        os.ftruncate(fd, blueprint.size_bytes)
        for offset, data in blueprint.fixed:
            view, done = memoryview(data), 0
            while done < len(data):
                done += PWRITE(fd, view[done : done + MAX_CALL_BYTES], offset + done)
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror} ({blueprint.size_bytes} bytes are needed)"
        ) from error
    finally:
        if fd >= 0:
            os.close(fd)


def seal(path: str, checksum: Checksum, files: Files, scratch: memoryview) -> None:
    """Write the CRC-32 of a range of a file into the slots that want it."""
    at, stop, crc = checksum.offset_bytes, checksum.offset_bytes + checksum.length_bytes, 0
    while at < stop:
        part = scratch[: min(len(scratch), stop - at)]
        files.read_into(path, at, part)
        crc = zlib.crc32(part, crc)
        at += len(part)
    for slot in checksum.slots:
        files.write(path, slot, memoryview(crc.to_bytes(4, "little")))


def digest(path: str, files: Files) -> str:
    """The xxh3-128 of a whole file, in hex."""
    import xxhash

    scratch = memoryview(bytearray(SCRATCH_BYTES))
    size, at, state = os.path.getsize(path), 0, xxhash.xxh3_128()
    while at < size:
        part = scratch[: min(len(scratch), size - at)]
        files.read_into(path, at, part)
        state.update(part)
        at += len(part)
    return state.hexdigest()
