"""The hidden folder in which an output grows: whose it is, its journal, and its removal.

A folder of that name is used, or removed, only if the lock's record, its journal or the caller says
that this tool made it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from ..errors import CheckpointError
from . import tree
from .lock import OutputLock
from .storage import MAX_PARSED_BYTES, told

JOURNAL = "shardwright.journal"  # in an output that is being written, or was left unfinished
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def nobodys(folder: Path) -> bool:
    """The default of `is_ours`: a folder without a mark of this tool belongs to the user."""
    return False


class StagingFolder:
    """A hidden folder that a lock guards. Take the lock before any method is called."""

    def __init__(
        self, path: Path, lock: OutputLock, is_ours: Callable[[Path], bool] = nobodys
    ) -> None:
        self.path, self.lock, self.is_ours = path, lock, is_ours
        self._journal = -1

    def make(self) -> None:
        """Make the folder, or take over one that is there if it is this tool's and this user's."""
        try:
            os.mkdir(self.path, 0o700)
        except FileExistsError:
            self.check()
            self._check_ours()
            os.chmod(self.path, 0o700)
        self.lock.note_staging(inode(self.path))

    def check(self) -> None:
        """An existing folder may be used if it belongs to this user and is no link. Others must not
        be able to write into it, because their files would be published.
        """
        info = os.lstat(self.path)
        if not stat.S_ISDIR(info.st_mode):  # through a link, another folder would be emptied
            raise CheckpointError(f"{self.path}: cannot be used: it is not a folder; remove it")
        own = os.lstat(self.lock.path)
        if info.st_uid != own.st_uid:
            raise CheckpointError(f"{self.path}: is another user's; remove it")
        if info.st_mode & _OTHERS_WRITE and not own.st_mode & _OTHERS_WRITE:
            raise CheckpointError(
                f"{self.path}: other users may write into it (mode {info.st_mode & 0o777:o}); "
                "remove it"
            )

    def _check_ours(self) -> None:
        """Refuse a folder of this name that no run of this tool made."""
        names = os.listdir(self.path)
        if names and JOURNAL not in names and not self.is_ours(self.path):
            raise CheckpointError(
                f"{self.path}: is in the way: it holds {sorted(names)[0]!r} and was not left by a "
                "run of this tool; move it, or name another --output"
            )

    def lines(self) -> list[bytes]:
        """The complete lines of the journal."""
        return lines(self.path / JOURNAL)

    def clear(self) -> None:
        """Remove everything in the folder."""
        self.void_journal()
        tree.empty(self.path, keep=JOURNAL)  # the journal last: it marks the folder as ours

    def open_journal(self) -> None:
        """Open the journal, so that lines can be added."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._journal = os.open(self.path / JOURNAL, flags, 0o600)

    def append(self, text: str) -> None:
        """Add lines to the journal, durably."""
        data = text.encode()
        with told(self.path / JOURNAL):
            while data:
                data = data[os.write(self._journal, data) :]
            os.fsync(self._journal)

    def close_journal(self) -> None:
        """Close it, if it is open; an open file would keep its name on NFS."""
        journal, self._journal = self._journal, -1
        if journal >= 0:
            os.close(journal)

    def void_journal(self) -> None:
        """Take back what the journal says, before the files that it speaks of are removed.

        It would outlive them if the run is killed in between, and `--resume` would look for them.
        Nothing new is written: the disk may be full.
        """
        flags = os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(self.path / JOURNAL, flags)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def discard(self, *, void: bool = True) -> None:
        """Remove what can be removed of it. ``void`` takes back the journal first."""
        with contextlib.suppress(OSError, CheckpointError):
            self.lock.check()  # if not, the folder belongs to another run
            os.chmod(self.path, 0o700)
            if void:
                self.void_journal()
            tree.remove(self.path, keep=JOURNAL)

    def leave(self, *, remove: bool) -> None:
        """Close everything after an error; with ``remove`` an empty folder goes."""
        with contextlib.suppress(OSError):
            self.close_journal()
        if remove:
            with contextlib.suppress(OSError):
                os.rmdir(self.path)


def inode(path: Path) -> int:
    """The inode at a path; -1 if there is none."""
    try:
        return os.lstat(path).st_ino
    except OSError:
        return -1


def lines(path: Path) -> list[bytes]:
    """The complete lines; a kill may have cut the last one. None if there is no file."""
    try:
        file = tree.open_file(path, "rb")
    except FileNotFoundError:
        return []
    with file:
        return file.read(MAX_PARSED_BYTES).split(b"\n")[:-1]
