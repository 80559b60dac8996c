"""Storages: what one can do, the local file system, and paths bound to a storage.

Containers, formats and the executor reach files only through a ``Storage``, so another one, in
memory or remote, changes nothing in them. Readers hold a ``StoragePath``: it has the methods of
``pathlib`` that they need, asks its storage, and turns OSError into ``CheckpointError``. The size
of a file is taken after it was opened, and no more than that is read. So a pipe, a device or a
kernel's file without a size can neither block nor go on forever.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol

from ..errors import CheckpointError
from . import tree

MAX_PARSED_BYTES = 100_000_000  # of a file that is read whole: what safetensors allows a header

PART_BYTES = 1 << 20  # of a file that is read from start to end

FILE, FOLDER, LINK, OTHER = "file", "folder", "link", "other"  # what may lie at a path

FileIdentity = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stat:
    """What lies at a path."""

    kind: str  # FILE, FOLDER, LINK (only where links are not followed) or OTHER
    size: int  # bytes
    identity: FileIdentity  # size first; another one means another file, or other bytes


def is_file_name(name: object) -> bool:
    """Whether a name in a file is a file name without a folder."""
    if not isinstance(name, str) or name in ("", ".", "..") or re.search(r"[/\\\0]", name):
        return False
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return True


def is_path_below(name: object) -> bool:
    """Whether a name in a file is a normalised path below the file's folder."""
    return isinstance(name, str) and all(is_file_name(part) for part in name.split("/"))


class Storage(Protocol):
    """Files under text paths. Every method raises OSError if the storage refuses.

    ``open`` and ``create`` return a number for the open file, like a descriptor. Reads and writes
    take an offset, so threads may share an open file; they may move fewer bytes than asked.
    """

    def stat(self, path: str, *, follow: bool = True) -> Stat | None:
        """What is at ``path``; None if nothing is. With ``follow``, links are followed."""
        ...

    def list(self, folder: str) -> list[str]:
        """The names in a folder, in any order."""
        ...

    def real(self, path: str) -> str:
        """``path`` made absolute, with every link followed."""
        ...

    def open(self, path: str, *, write: bool = False) -> int: ...

    def create(self, path: str, size: int) -> int:
        """A new file of ``size`` zeros, open for reading and writing; refused if one is there."""
        ...

    def stat_open(self, file: int) -> Stat: ...

    def read(self, file: int, into: memoryview, offset: int) -> int:
        """Bytes read; 0 at the end of the file."""
        ...

    def write(self, file: int, data: memoryview, offset: int) -> int: ...

    def copy(self, src: int, dst: int, length: int, src_offset: int, dst_offset: int) -> int | None:
        """Bytes that the storage copied by itself; None if it cannot."""
        ...

    def sync(self, file: int) -> None:
        """Returns when every byte written is durable."""
        ...

    def close(self, file: int) -> None: ...

    def make_folder(self, path: str) -> None:
        """Makes a folder and its parents; an existing one is kept."""
        ...

    def rename(self, path: str, to: str) -> None:
        """Renames a file or folder in one step; replaces a file of the new name."""
        ...

    def free_bytes(self, folder: str) -> int | None:
        """Free bytes; None if the storage does not know."""
        ...


# --- the local file system --------------------------------------------------------------------

# copy_file_range fails with one of these if the file systems, the kernel or a sandbox cannot do
# it; plain reads and writes always work.
_NO_COPY = {
    errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM,
    errno.EACCES, errno.ETXTBSY, errno.EOVERFLOW, errno.ENOTSUP, errno.EIO,
}  # fmt: skip
_NOTHING_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}


def _preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
    """``os.preadv`` for systems that lack it."""
    data = os.pread(fd, len(buffers[0]), offset)
    buffers[0][: len(data)] = data
    return len(data)


# Module attributes, so that a test can replace them, for systems without them or with short calls.
PREADV: Callable[[int, list[memoryview], int], int] = getattr(os, "preadv", _preadv)
PWRITE: Callable[[int, memoryview, int], int] = os.pwrite
KERNEL_COPY: Callable[[int, int, int, int, int], int] | None = getattr(os, "copy_file_range", None)


class LocalStorage:
    """The file system of this machine, with whatever is mounted there."""

    def stat(self, path: str, *, follow: bool = True) -> Stat | None:
        try:
            return _stat(os.stat(path, follow_symlinks=follow))
        except OSError as error:
            if error.errno in _NOTHING_THERE:
                return None
            raise
        except ValueError:  # a NUL in the name
            return None

    def list(self, folder: str) -> list[str]:
        return os.listdir(folder)

    def real(self, path: str) -> str:
        return os.path.realpath(path)

    def open(self, path: str, *, write: bool = False) -> int:
        # A pipe opened without O_NONBLOCK would wait for its other end.
        how = os.O_RDWR | os.O_NOFOLLOW if write else os.O_RDONLY  # do not write through a link
        fd = os.open(path, how | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "is not a regular file", path)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def create(self, path: str, size: int) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            os.ftruncate(fd, size)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def stat_open(self, file: int) -> Stat:
        return _stat(os.fstat(file))

    def read(self, file: int, into: memoryview, offset: int) -> int:
        return PREADV(file, [into], offset)

    def write(self, file: int, data: memoryview, offset: int) -> int:
        return PWRITE(file, data, offset)

    def copy(self, src: int, dst: int, length: int, src_offset: int, dst_offset: int) -> int | None:
        if KERNEL_COPY is None:
            return None
        try:
            return KERNEL_COPY(src, dst, length, src_offset, dst_offset)
        except OSError as error:
            if error.errno in _NO_COPY:
                return None
            raise

    def sync(self, file: int) -> None:
        os.fsync(file)

    def close(self, file: int) -> None:
        os.close(file)

    def make_folder(self, path: str) -> None:
        tree.make(Path(path))

    def rename(self, path: str, to: str) -> None:
        os.replace(path, to)

    def free_bytes(self, folder: str) -> int | None:
        room = os.statvfs(folder)
        return room.f_bavail * room.f_frsize


def _stat(info: os.stat_result) -> Stat:
    kinds = {stat.S_IFREG: FILE, stat.S_IFDIR: FOLDER, stat.S_IFLNK: LINK}
    identity = (info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)
    return Stat(kinds.get(stat.S_IFMT(info.st_mode), OTHER), info.st_size, identity)


LOCAL = LocalStorage()


_WATCHED: ContextVar[dict[str, FileIdentity] | None] = ContextVar("watched", default=None)


@contextmanager
def watching() -> Iterator[dict[str, FileIdentity]]:
    """The identity of every file that this thread opens, taken when it is first opened.

    A file that is replaced after its header was read has another identity.
    """
    seen: dict[str, FileIdentity] = {}
    token = _WATCHED.set(seen)
    try:
        yield seen
    finally:
        _WATCHED.reset(token)


# --- paths ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class StoragePath:
    """A path of a storage; its methods raise CheckpointError if the storage refuses."""

    pure: PurePosixPath
    storage: Storage = field(default=LOCAL, compare=False, repr=False)

    def __str__(self) -> str:
        return str(self.pure)

    def __fspath__(self) -> str:
        """The path for functions of the system; only for the local storage."""
        if self.storage is not LOCAL:
            raise TypeError(f"{self.pure} is no path of the local file system")
        return str(self.pure)

    def __truediv__(self, name: str | PurePosixPath) -> StoragePath:
        return StoragePath(self.pure / name, self.storage)

    def at(self, path: str) -> StoragePath:
        """Another path of the same storage."""
        return StoragePath(PurePosixPath(path), self.storage)

    @property
    def name(self) -> str:
        return self.pure.name

    @property
    def stem(self) -> str:
        return self.pure.stem

    @property
    def suffix(self) -> str:
        return self.pure.suffix

    @property
    def parent(self) -> StoragePath:
        return StoragePath(self.pure.parent, self.storage)

    @property
    def parents(self) -> tuple[StoragePath, ...]:
        return tuple(StoragePath(pure, self.storage) for pure in self.pure.parents)

    def relative_to(self, folder: StoragePath) -> PurePosixPath:
        """This path relative to ``folder``."""
        return self.pure.relative_to(folder.pure)

    def stat(self) -> Stat | None:
        """What is here, links followed; None if nothing is."""
        with told(self):
            return self.storage.stat(str(self.pure))

    def is_file(self) -> bool:
        return (found := self.stat()) is not None and found.kind == FILE

    def is_dir(self) -> bool:
        return (found := self.stat()) is not None and found.kind == FOLDER

    def exists(self) -> bool:
        return self.stat() is not None

    def is_symlink(self) -> bool:
        """Whether this is a symbolic link, to whatever target."""
        with told(self):
            found = self.storage.stat(str(self.pure), follow=False)
        return found is not None and found.kind == LINK

    def is_named(self) -> bool:
        """Whether anything has this name, a broken link included."""
        return self.exists() or self.is_symlink()

    def iterdir(self) -> list[StoragePath]:
        """What lies in this folder, by name."""
        with told(self):
            return [self / name for name in sorted(self.storage.list(str(self.pure)))]

    def glob(self, pattern: str) -> list[StoragePath]:
        """What lies in this folder under a name of the shell's pattern."""
        return [child for child in self.iterdir() if fnmatch.fnmatchcase(child.name, pattern)]

    def walk(self) -> Iterator[tuple[StoragePath, list[StoragePath], list[StoragePath]]]:
        """(folder, folders in it, all else in it) of every folder below; linked ones are not
        entered, since they may lead in circles. Folders taken from the list are not entered.
        """
        todo = [self]
        while todo:
            folder = todo.pop()
            held = folder.iterdir()
            folders = [child for child in held if child.is_dir()]
            rest = set(folders)
            yield folder, folders, [child for child in held if child not in rest]
            todo += [child for child in reversed(folders) if not child.is_symlink()]

    def make(self) -> None:
        """Makes a folder here, and those above it."""
        with told(self):
            self.storage.make_folder(str(self.pure))

    def free_bytes(self) -> int | None:
        """Free bytes for this folder; None if that is not known."""
        with told(self):
            return self.storage.free_bytes(str(self.pure))

    def real(self) -> StoragePath:
        """The absolute path with every link followed."""
        with told(self):
            return StoragePath(PurePosixPath(self.storage.real(str(self.pure))), self.storage)

    def size(self) -> int:
        """Bytes of a regular file; CheckpointError for anything else."""
        found = self.stat()
        if found is None:
            raise CheckpointError(f"{self}: {os.strerror(errno.ENOENT)}")
        if found.kind != FILE:
            raise CheckpointError(f"{self}: is not a regular file")
        return found.size

    @contextmanager
    def opened(self) -> Iterator[OpenFile]:
        """The regular file here, open to be read."""
        with told(self):
            file = self.storage.open(str(self.pure))
        try:
            with told(self):
                found = self.storage.stat_open(file)
            if found.kind != FILE:
                raise CheckpointError(f"{self}: is not a regular file")
            if (seen := _WATCHED.get()) is not None:
                seen.setdefault(str(self.pure), found.identity)
            yield OpenFile(self, found.size, file)
        finally:
            with told(self):
                self.storage.close(file)

    def read_bytes(self, limit: int = MAX_PARSED_BYTES) -> bytes:
        """The whole file, if it is no larger than ``limit``."""
        with self.opened() as file:
            if file.size > limit:
                raise CheckpointError(
                    f"{self}: {file.size} bytes; at most {limit} are read of such a file"
                )
            return file.read(0, file.size)

    def parts(self) -> Iterator[bytes]:
        """The whole file, of any size, in pieces."""
        with self.opened() as file:
            for start in range(0, file.size, PART_BYTES):
                yield file.read(start, PART_BYTES)

    def read_text(self, limit: int = MAX_PARSED_BYTES) -> str:
        """The whole file as UTF-8; invalid bytes are replaced."""
        return self.read_bytes(limit).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A regular file that is open to be read."""

    path: StoragePath
    size: int  # bytes, when it was opened
    _file: int

    def read(self, offset: int, length: int) -> bytes:
        """The bytes from ``offset`` on; fewer if the file ends."""
        length = max(0, min(length, self.size - offset))
        into, done = memoryview(bytearray(length)), 0
        while done < length:
            try:
                got = self.path.storage.read(self._file, into[done:], offset + done)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path}: {error.strerror} at byte {offset + done}"
                ) from error
            if got == 0:
                break
            done += got
        return bytes(into[:done])


Where = StoragePath | str | os.PathLike[str]  # text means a path of the local file system


def storage_path(where: Where) -> StoragePath:
    """A path bound to its storage."""
    if isinstance(where, StoragePath):
        return where
    return StoragePath(PurePosixPath(os.path.expanduser(os.fspath(where))))


@contextmanager
def told(path: object) -> Iterator[None]:
    """Turn OSError into CheckpointError, with the file that it is about."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {error.strerror}") from error
