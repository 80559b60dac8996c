"""Whole folders of an output: listed, synced and removed, however deep, with no error swallowed.

`os.walk` skips what it cannot list, and like `shutil.rmtree` it is recursive.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def walk(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Each folder at and below ``root`` with the names in it that are no folders.

    A folder comes before those inside it; links are not followed. Raises OSError.
    """
    todo = [root]
    while todo:
        folder = todo.pop()
        names = []
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    todo.append(folder / entry.name)
                else:
                    names.append(entry.name)
        yield folder, names


def make(folder: Path) -> None:
    """Make a folder and those above it; one that is there is kept.

    `os.makedirs` and `Path.mkdir` call themselves for each level that is missing.
    """
    missing = [folder]
    while not missing[-1].is_dir() and missing[-1] != missing[-1].parent:
        missing.append(missing[-1].parent)
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def remove(path: Path, keep: str = "") -> None:
    """Remove a file, a link or a folder with its contents, if it exists.

    ``keep`` is a name in the folder that is removed last, so that it is left after a kill.
    """
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(info.st_mode):
        path.unlink()
        return
    empty(path, keep)
    os.rmdir(path)


def empty(root: Path, keep: str = "") -> None:
    """Remove everything in a folder, the file ``keep`` last."""
    folders = []
    for folder, names in walk(root):
        folders.append(folder)
        for name in names:
            if folder != root or name != keep:
                os.unlink(folder / name)
    for folder in reversed(folders[1:]):
        os.rmdir(folder)
    if keep and os.path.lexists(root / keep):
        os.unlink(root / keep)


def sync(path: Path) -> None:
    """Make one file or folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_names(folder: Path) -> None:
    """Make the names in a folder durable; the user may have named it through a link."""
    sync(Path(os.path.realpath(folder)))


def open_file(path: Path, mode: str) -> IO[bytes]:
    """Python's ``open`` of a binary file, which follows no link and waits for no pipe.

    A file is closed where opening fails half-way; ``os.fdopen`` would leave it open.
    """
    how = os.O_NOFOLLOW | os.O_NONBLOCK
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | how, 0o666))


def replace_file(path: Path, data: bytes) -> None:
    """Give a small file new content at once and durably; one process at a time may.

    A reader sees the old content or the new one, after a power cut too.
    """
    beside = path.with_name(f".{path.name}.partial")
    with open_file(beside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_names(path.parent)


def sync_all(root: Path) -> None:
    """Make every file and folder at and below ``root`` durable."""
    for folder, names in walk(root):
        for name in names:
            if not os.path.islink(folder / name):
                sync(folder / name)
        sync(folder)
