"""Makes an output visible at once, whole, or not at all.

Everything is written into ``.NAME.partial`` beside the output, under a lock, with a journal
of the units that are durable. Publishing is fsync, then one rename. A killed run leaves only
that hidden folder: ``--resume`` continues it, any other run of the same output removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

from ..checkpoint.types import JOURNAL
from ..errors import CheckpointError
from .storage import LOCAL, FileIdentity, Storage, told

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

published: list[Path] = []  # what this process has made visible, for a run that is interrupted


class OutputTransaction:
    """The hidden folder that becomes the output.

    ``output`` is the final path: a folder, or a single file where ``single`` is given.
    ``fingerprint`` stands for plan, options and sources: a journal with another one is not
    continued. With ``resume`` an interrupted stage is kept for the next run. ``private``:
    the folder around the output is the tool's own, so nothing in it is a user's.
    """

    def __init__(
        self,
        output: Path,
        fingerprint: str,
        *,
        single: bool,
        overwrite: bool,
        resume: bool,
        private: bool = False,
    ) -> None:
        self.output = output
        self.path = output.parent / f".{output.name}.partial"
        self.fingerprint = fingerprint
        self.single = single
        self.overwrite = overwrite
        self.resume = resume
        self.private = private
        self.done: set[int] = set()  # units that are durable
        self.continued = False
        self._lock = -1
        self._journal = -1
        self._inode = -1  # of what publish renames

    def __enter__(self) -> OutputTransaction:
        with _told(self.output):
            self._check_output()
            parents = (self.output.parent, *self.output.parent.parents)
            self._made = [folder for folder in parents if not folder.exists()]
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(exist_ok=True)
        except OSError as error:
            self._remove_made_parents()
            raise CheckpointError(f"{self.path}: cannot write here ({error.strerror})") from error
        self._take_lock()
        try:
            with _told(self.path):
                self._restore()
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
        self._close_journal()
        if self._is_published() and self.output not in published:
            published.append(self.output)  # interrupted between the rename and the next line
        if self.path.exists() and not (self.resume and error is not None):
            self._discard()
            if error is not None:
                self._remove_made_parents()
        os.close(self._lock)

    def _is_published(self) -> bool:
        """Whether the output is the very file or folder that was written here."""
        with contextlib.suppress(OSError):
            return os.stat(self.output, follow_symlinks=False).st_ino == self._inode
        return False

    def _remove_made_parents(self) -> None:
        for folder in self._made:
            try:
                folder.rmdir()
            except OSError:
                return  # somebody else put a file there, or it was never made

    def _check_output(self) -> None:
        if os.path.lexists(self.output) and not self.overwrite:
            raise CheckpointError(f"{self.output} exists; pass --overwrite to replace it")
        if self.output.is_symlink() and not self.single:
            raise CheckpointError(f"{self.output} is a symlink; remove it or name its target")
        if self.output.exists() and self.output.is_dir() == self.single:
            kind, other = ("folder", "file") if self.single else ("file", "folder")
            raise CheckpointError(f"{self.output} is a {kind}; a {other} cannot replace it")

    def _take_lock(self) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._lock = os.open(self.path, flags)
        except OSError as error:  # a link would have us empty the folder that it names
            raise CheckpointError(
                f"{self.path}: cannot be used to write in ({error.strerror}); remove it"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            if not isinstance(error, BlockingIOError):
                self._made.insert(0, self.path)
                self._remove_made_parents()
                raise CheckpointError(
                    f"{self.path}: cannot be locked against a second run ({error.strerror})"
                ) from error
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
            if lines[0] != self.fingerprint.encode():
                raise CheckpointError(
                    f"{self.path}: was left by a run with another plan, other options or a source "
                    "that has changed since; run again without --resume to start over"
                )
            if not all(line.isdigit() for line in lines[1:]):
                raise CheckpointError(
                    f"{path}: is damaged; run again without --resume to start over"
                )
            self.done = {int(line) for line in lines[1:]}
            self.continued = True
            # half a line left by a kill would become one with the next
            os.truncate(path, sum(len(line) + 1 for line in lines))
        else:
            self._check_ours()
            self._empty()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._journal = os.open(path, flags, 0o666)

    def _empty(self) -> None:
        """Remove everything, the journal last: what a kill leaves must be known as ours."""
        journal = self.path / JOURNAL
        for child in sorted(self.path.iterdir(), key=lambda child: child == journal):
            is_folder = child.is_dir() and not child.is_symlink()
            shutil.rmtree(child) if is_folder else child.unlink()

    def _discard(self) -> None:
        """Remove the folder, which may be the output that was replaced, as far as possible."""
        with contextlib.suppress(OSError):
            (self.path / JOURNAL).touch()
            self._empty()
        shutil.rmtree(self.path, ignore_errors=True)

    def _check_ours(self) -> None:
        """A folder of somebody else's that happens to have this name is not emptied.

        Ours holds a journal, or for a moment before it is published a whole output.
        """
        from ..reader import is_checkpoint

        names = os.listdir(self.path)
        whole = names == [self.output.name] if self.single else is_checkpoint(self.path)
        if names and JOURNAL not in names and not (whole or self.private):
            raise CheckpointError(
                f"{self.path}: is in the way: it holds {sorted(names)[0]!r} and was not left by a "
                "run of this tool; move it, or name another --output"
            )

    def begin(self) -> None:
        """Record that every file exists at its full size; from here on a run can continue."""
        if not self.continued:
            with _told(self.path):
                _sync_tree(self.path)
            self._append(self.fingerprint + "\n")

    def record(self, finished: Iterable[int]) -> None:
        """Note units whose bytes have been synced."""
        text = "".join(f"{index}\n" for index in finished)
        if text:
            self._append(text)

    def _append(self, text: str) -> None:
        data = text.encode()
        with _told(self.path / JOURNAL):
            while data:
                data = data[os.write(self._journal, data) :]
            os.fsync(self._journal)

    def _close_journal(self) -> None:
        journal, self._journal = self._journal, -1
        if journal >= 0:
            os.close(journal)

    def publish(self) -> None:
        """Sync every file and folder, then rename into place."""
        with _told(self.path):
            self._close_journal()  # NFS would keep the name of an open file
            (self.path / JOURNAL).unlink()
            _sync_tree(self.path)
            self._check_output()  # somebody may have put one there since
            self._inode = os.stat(self.path / self.output.name if self.single else self.path).st_ino
            if self.single:
                os.replace(self.path / self.output.name, self.output)
                shutil.rmtree(self.path, ignore_errors=True)
            elif not self.output.exists():
                os.rename(self.path, self.output)
            else:
                _exchange(self.path, self.output)
                self._discard()
            published.append(self.output)
            _sync(self.output.parent)

    def _restore(self) -> None:
        """Undo what a kill between the two renames of ``_exchange`` left."""
        aside = _aside(self.output)
        if not os.path.lexists(aside):
            return
        if os.path.lexists(self.output):
            shutil.rmtree(aside)
        else:
            os.rename(aside, self.output)
            self._check_output()


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """The system's refusals as our error, with the file that they are about."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {error.strerror}") from error


def _lines(path: Path) -> list[bytes]:
    """Whole lines; the last one may have been cut by a kill."""
    return path.read_bytes().split(b"\n")[:-1]


def _aside(output: Path) -> Path:
    """Where the old output is for a moment if two folders cannot be swapped in one step."""
    return output.parent / f".{output.name}.replaced"


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
    aside = _aside(old)
    os.rename(old, aside)
    os.rename(new, old)
    os.rename(aside, new)


def snapshot(paths: Iterable[str], storage: Storage = LOCAL) -> dict[str, FileIdentity]:
    """What tells of a change of every source file, to notice a change while we read."""
    found = {}
    for path in sorted(set(paths)):
        with told(path):
            stat = storage.stat(path)
        if stat is None:
            raise CheckpointError(f"{path}: {os.strerror(errno.ENOENT)}")
        found[path] = stat.identity
    return found


def check_unchanged(before: Mapping[str, FileIdentity], storage: Storage = LOCAL) -> None:
    """Raise if a source file is not what it was when the plan was made."""
    for path, was in before.items():
        now = snapshot([path], storage)[path]
        if now != was:
            what = f"size {was[0]} then, {now[0]} now"
            if now[:2] == was[:2]:
                what = "it was written again, or another file is in its place"
            raise CheckpointError(
                f"{path}: changed while it was read ({what}); nothing was published"
            )


def fingerprint(parts: object) -> str:
    """A short stable hash of JSON-able values."""
    import hashlib

    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
