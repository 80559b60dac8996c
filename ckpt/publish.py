"""Makes an output visible at once, whole, or not at all.

Everything is written into ``.NAME.partial`` beside the output, under a lock, with a journal
of the units that are durable. Publishing is fsync, then one rename. A killed run leaves only
that hidden folder: ``--resume`` continues it, any other run of the same output removes it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from .errors import CheckpointError

JOURNAL = "shardwright.journal"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class Stage:
    """The hidden folder that becomes the output.

    ``output`` is the final path: a folder, or a single file where ``single`` is given.
    ``fingerprint`` stands for plan, options and sources: a journal with another one is not
    continued. With ``resume`` an interrupted stage is kept for the next run.
    """

    def __init__(
        self, output: Path, fingerprint: str, *, single: bool, overwrite: bool, resume: bool
    ) -> None:
        self.output = output
        self.path = output.parent / f".{output.name}.partial"
        self.fingerprint = fingerprint
        self.single = single
        self.overwrite = overwrite
        self.resume = resume
        self.done: set[int] = set()  # units that are durable
        self.continued = False
        self._lock = -1
        self._journal = -1

    def __enter__(self) -> Stage:
        self._check_output()
        made = not self.output.parent.exists()
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot write here ({error.strerror})") from error
        self._made_parent = made
        self._take_lock()
        try:
            self._open_journal()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._journal)
        if self.path.exists() and not (self.resume and error is not None):
            shutil.rmtree(self.path, ignore_errors=True)
            if error is not None and self._made_parent:
                self._remove_empty_parent()
        os.close(self._lock)

    def _remove_empty_parent(self) -> None:
        try:
            self.output.parent.rmdir()
        except OSError:
            return  # somebody else put a file there

    def _check_output(self) -> None:
        if os.path.lexists(self.output) and not self.overwrite:
            raise CheckpointError(f"{self.output} exists; pass --overwrite to replace it")
        if self.output.exists() and self.output.is_dir() == self.single:
            kind, other = ("folder", "file") if self.single else ("file", "folder")
            raise CheckpointError(f"{self.output} is a {kind}; a {other} cannot replace it")

    def _take_lock(self) -> None:
        self._lock = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise CheckpointError(
                f"{self.output}: another run is writing it ({self.path} is locked)"
            ) from error
        held = os.fstat(self._lock)
        if not self.path.exists() or os.stat(self.path).st_ino != held.st_ino:
            os.close(self._lock)
            raise CheckpointError(f"{self.output}: another run has just published it")

    def _open_journal(self) -> None:
        """Continue a journal of the same fingerprint, or start with an empty folder."""
        path = self.path / JOURNAL
        lines = _lines(path) if path.exists() else []
        if lines and self.resume:
            if lines[0] != self.fingerprint:
                raise CheckpointError(
                    f"{self.path}: was left by a run with another plan, other options or a source "
                    "that has changed since; run again without --resume to start over"
                )
            self.done = {int(line) for line in lines[1:]}
            self.continued = True
        else:
            for child in self.path.iterdir():
                shutil.rmtree(child) if child.is_dir() else child.unlink()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._journal = os.open(path, flags, 0o666)

    def begin(self) -> None:
        """Record that every file exists at its full size; from here on a run can continue."""
        if not self.continued:
            self._append(self.fingerprint + "\n")

    def record(self, finished: Iterable[int]) -> None:
        """Note units whose bytes have been synced."""
        text = "".join(f"{index}\n" for index in finished)
        if text:
            self._append(text)

    def _append(self, text: str) -> None:
        os.write(self._journal, text.encode())
        os.fsync(self._journal)

    def publish(self) -> None:
        """Sync every file and folder, then rename into place."""
        (self.path / JOURNAL).unlink()
        _sync_tree(self.path)
        if self.single:
            (only,) = self.path.iterdir()
            os.replace(only, self.output)
            self.path.rmdir()
        elif self.output.is_symlink() or not self.output.exists():
            if self.output.is_symlink():
                raise CheckpointError(f"{self.output} is a symlink; remove it or name its target")
            os.rename(self.path, self.output)
        else:
            _exchange(self.path, self.output)
            shutil.rmtree(self.path)
        _sync(self.output.parent)


def _lines(path: Path) -> list[str]:
    """Whole lines; the last one may have been cut by a kill."""
    text = path.read_text()
    return text[: text.rfind("\n") + 1].splitlines()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_tree(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for name in files:
            _sync(Path(folder, name))
        _sync(Path(folder))


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders in one step where the system can, else in two renames."""
    libc = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, "renameat2", None)
    if call is not None:
        paths = os.fsencode(new), os.fsencode(old)
        if call(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
            return
        if ctypes.get_errno() not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(old))
    aside = old.parent / f".{old.name}.replaced"
    os.rename(old, aside)
    os.rename(new, old)
    os.rename(aside, new)


def snapshot(paths: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Size and mtime (ns) of every source file, to notice a change while we read."""
    found = {}
    for path in sorted(set(paths)):
        try:
            stat = os.stat(path)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        found[path] = (stat.st_size, stat.st_mtime_ns)
    return found


def check_unchanged(before: dict[str, tuple[int, int]]) -> None:
    """Raise if a source file is not what it was when the plan was made."""
    for path, was in before.items():
        now = snapshot([path])[path]
        if now != was:
            raise CheckpointError(
                f"{path}: changed while it was read (size {was[0]} then, {now[0]} now); "
                "nothing was published"
            )


def fingerprint(parts: object) -> str:
    """A short stable hash of JSON-able values."""
    import hashlib

    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
