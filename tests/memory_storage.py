"""A storage that holds its files in this process: what a second implementation needs."""

from __future__ import annotations

import errno
import itertools
import os
import posixpath

from shardwright.ckpt.move.storage import FILE, FOLDER, Stat


class MemoryStorage:
    """Paths -> bytes; folders are there once something lies in them, or once they were made."""

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}
        self.folders: set[str] = {"/"}
        self._versions: dict[str, int] = {}
        self._clock = itertools.count(1)
        self._open: dict[int, str] = {}
        self._numbers = itertools.count(1000)

    def put(self, path: str, data: bytes) -> None:
        """A file with these bytes."""
        self.make_folder(posixpath.dirname(path))
        self.files[path] = bytearray(data)
        self._versions[path] = next(self._clock)

    def stat(self, path: str, *, follow: bool = True) -> Stat | None:
        if path in self.files:
            size = len(self.files[path])
            return Stat(FILE, size, (size, self._versions[path]))
        return Stat(FOLDER, 0, (0,)) if path in self.folders else None

    def list(self, folder: str) -> list[str]:
        if folder not in self.folders:
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
        held = {*self.files, *self.folders} - {folder, "/"}
        return [posixpath.basename(path) for path in held if posixpath.dirname(path) == folder]

    def real(self, path: str) -> str:
        return path

    def open(self, path: str, *, write: bool = False) -> int:
        if path not in self.files:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        number = next(self._numbers)
        self._open[number] = path
        return number

    def create(self, path: str, size: int) -> int:
        if posixpath.dirname(path) not in self.folders:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self.put(path, bytes(size))
        return self.open(path, write=True)

    def stat_open(self, file: int) -> Stat:
        found = self.stat(self._open[file])
        assert found is not None
        return found

    def read(self, file: int, into: memoryview, offset: int) -> int:
        data = self.files[self._open[file]][offset : offset + len(into)]
        into[: len(data)] = data
        return len(data)

    def write(self, file: int, data: memoryview, offset: int) -> int:
        path = self._open[file]
        self.files[path][offset : offset + len(data)] = data
        self._versions[path] = next(self._clock)
        return len(data)

    def copy(self, src: int, dst: int, length: int, src_offset: int, dst_offset: int) -> int | None:
        return None

    def sync(self, file: int) -> None:
        assert file in self._open

    def close(self, file: int) -> None:
        del self._open[file]

    def make_folder(self, path: str) -> None:
        while path not in self.folders:
            self.folders.add(path)
            path = posixpath.dirname(path)

    def rename(self, path: str, to: str) -> None:
        for table in (self.files, self._versions):
            for name in [n for n in table if n == path or n.startswith(path + "/")]:
                table[to + name[len(path) :]] = table.pop(name)
        self.folders = {
            to + n[len(path) :] if n == path or n.startswith(path + "/") else n
            for n in self.folders
        }

    def free_bytes(self, folder: str) -> int | None:
        return None

    @property
    def opened(self) -> int:
        """Files that are open now."""
        return len(self._open)
