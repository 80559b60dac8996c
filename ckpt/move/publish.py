"""Makes a whole output visible in one step, or nothing.

Everything is written into ``.NAME.partial`` next to the output, under a lock, with a journal of the
units that are synced. Publishing is fsync, then one rename. A killed run leaves only hidden names.
``--resume`` continues it; any other run of the same output removes them. A name is removed only if
the lock's record, the journal or the caller says that this tool made it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType

from ..errors import CheckpointError
from . import tree
from .interrupts import uninterrupted
from .lock import OutputLock, Record
from .staging import JOURNAL, StagingFolder, inode, lines, nobodys
from .storage import LOCAL, FileIdentity, Storage, told

_LOCK_ENDS = ".partial.lock"  # the name of an output's lock
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

published: list[Path] = []  # outputs of this process, for the message after an interrupt


def staging_folder(output: Path) -> Path:
    """The hidden folder in which an output grows."""
    return output.parent / f".{output.name}.partial"


class OutputTransaction:
    """The hidden folder that becomes the output; a context manager, or `open` and `close`.

    ``output`` is the final path: a folder, or a single file where ``single`` is given.
    ``fingerprint`` is a hash of plan, options and sources; a journal with another one is not
    continued. With ``resume`` an interrupted staging folder is kept for the next run. ``is_ours``
    says whether a folder of its name without a journal may be emptied. ``mode`` are the permissions
    of the files; the folder's follow from them.

    Several processes may write into ``path``; one of them holds the transaction and publishes
    once all have finished.
    """

    def __init__(
        self,
        output: Path,
        fingerprint: str = "",
        *,
        single: bool = False,
        overwrite: bool = False,
        resume: bool = False,
        break_lock: bool = False,
        is_ours: Callable[[Path], bool] = nobodys,
        mode: int = 0o666,
    ) -> None:
        self.output = output
        self.path = staging_folder(output)
        self.fingerprint = fingerprint
        self.single = single
        self.overwrite = overwrite
        self.resume = resume
        self.mode = mode
        self.done: set[int] = set()  # units that are durable
        self.continued = False
        self.lock = OutputLock(output.parent / f".{output.name}{_LOCK_ENDS}", output,
                               break_it=break_lock)  # fmt: skip
        self.staging = StagingFolder(self.path, self.lock, is_ours)
        self._made: list[Path] = []  # folders around the output, innermost first
        self._inode = -2  # of what publish renames
        self._locked = False

    def __enter__(self) -> OutputTransaction:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(failed=error is not None)

    def open(self) -> None:
        """Take the lock and make the staging folder, or continue the one that a run left."""
        with told(self.output):
            if not self._has_leftovers():
                self._check_output()
            parents = (self.output.parent, *self.output.parent.parents)
            self._made = [folder for folder in parents if not folder.exists()]
        try:
            self._enter()
        except BaseException:
            uninterrupted(self._leave)
            raise

    def _has_leftovers(self) -> bool:
        """Whether a killed run left something; that is cleaned up before any refusal."""
        return os.path.lexists(self.lock.path)

    def _enter(self) -> None:
        try:
            tree.make(self.output.parent)
            before = self.lock.take()
            self._locked = True
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot write here ({error.strerror})") from error
        with told(self.path):
            self._restore(before)
            self._check_output()
            self.staging.make()
            self._open_journal()

    def _check_output(self) -> None:
        if os.path.lexists(self.output) and not self.overwrite:
            raise CheckpointError(f"{self.output} exists; pass --overwrite to replace it")
        if self.output.is_symlink() and not self.single:
            raise CheckpointError(f"{self.output} is a symlink; remove it or name its target")
        if self.output.exists() and self.output.is_dir() == self.single:
            kind, other = ("folder", "file") if self.single else ("file", "folder")
            raise CheckpointError(f"{self.output} is a {kind}; a {other} cannot replace it")

    def _restore(self, before: Record | None) -> None:
        """Undo or finish what a killed run left, but only what its lock record names.

        Between the two renames of `_exchange` there is no output, and the old one has its other
        name. After `_exchange`, the old one is in the staging folder's place.
        """
        if before is None:
            return
        if before.aside and inode(aside := self.output.parent / before.aside) == before.replaced:
            if os.path.lexists(self.output):
                tree.remove(aside)
            else:
                os.rename(aside, self.output)
        if inode(self.path) == before.replaced:
            tree.remove(self.path)
        elif inode(self.path) == before.staging and not (self.path / JOURNAL).exists():
            tree.remove(self.path)  # killed while it was made or published

    def _open_journal(self) -> None:
        """Continue a journal of the same fingerprint, or start with an empty folder."""
        path, said = self.path / JOURNAL, self.staging.lines()
        if said and self.resume:
            if said[0] != self.fingerprint.encode():
                raise CheckpointError(
                    f"{self.path}: was left by a run with another plan, other options or a source "
                    "that has changed since; run again without --resume to start over"
                )
            if not all(line.isdigit() for line in said[1:]):
                raise CheckpointError(
                    f"{path}: is damaged; run again without --resume to start over"
                )
            self.done = {int(line) for line in said[1:]}
            self.continued = True
            # half a line left by a kill would become one with the next
            os.truncate(path, sum(len(line) + 1 for line in said))
        else:
            self.staging.clear()
        self.staging.open_journal()

    def begin(self) -> None:
        """Record that every file exists at its full size; from now on a run can be resumed."""
        if not self.continued:
            with told(self.path):
                tree.sync_all(self.path)
            self.staging.append(self.fingerprint + "\n")

    def record(self, finished: Iterable[int]) -> None:
        """Record units whose bytes are synced."""
        text = "".join(f"{index}\n" for index in finished)
        if text:
            self.lock.check()
            self.staging.append(text)

    def publish(self) -> None:
        """Sync every file and folder, then rename into place."""
        with told(self.path):
            self._check_output()  # an output may have appeared since
            self.staging.close_journal()
            self._restrict()
            tree.sync_all(self.path)
            (self.path / JOURNAL).unlink()
            tree.sync(self.path)
            self._check_output()
            self.lock.check()
            made = self.path / self.output.name if self.single else self.path
            self._inode = inode(made)
            if self.single:
                os.replace(made, self.output)
            else:
                os.chmod(self.path, folder_mode(self.mode))
                self._rename_folder()
            published.append(self.output)
            self._discard()
            tree.sync_names(self.output.parent)

    def _restrict(self) -> None:
        """Take permissions that ``mode`` does not have from all that is to be published."""
        if self.mode == 0o666:
            return
        for folder, names in tree.walk(self.path):
            if folder != self.path:
                os.chmod(folder, folder_mode(self.mode))
            for name in names:
                mode = os.lstat(folder / name).st_mode
                if stat.S_ISREG(mode) and mode & 0o777 & ~self.mode:
                    os.chmod(folder / name, mode & (self.mode | 0o600))

    def _rename_folder(self) -> None:
        if not os.path.lexists(self.output):
            os.rename(self.path, self.output)
            return
        aside = f".{self.output.name}.replaced-{self.lock.record.run}"
        self.lock.note_replaced(inode(self.output), aside)
        _exchange(self.path, self.output, self.output.parent / aside)

    def close(self, *, failed: bool = False) -> None:
        """Release the lock. If nothing was published, remove the staging folder, or keep it to
        resume."""
        if self._is_published() and self.output not in published:
            published.append(self.output)  # interrupted between the rename and the next line
        try:
            with told(self.path):
                self.staging.close_journal()
            if not (self.resume and failed and os.path.lexists(self.path / JOURNAL)):
                uninterrupted(self._discard)
        finally:
            uninterrupted(self._leave)

    def _discard(self) -> None:
        """Remove what can be removed of the staging folder, which may hold the replaced output."""
        self.staging.discard(void=not self._is_published())

    def _leave(self) -> None:
        """Release everything after an error; an empty staging folder is removed."""
        self.staging.leave(remove=self._locked and not self._is_published())
        self.lock.release()
        if not os.path.lexists(self.output):
            self._remove_made_parents()

    def _is_published(self) -> bool:
        """Whether the output is the file or folder that this run wrote."""
        return inode(self.output) == self._inode

    def _remove_made_parents(self) -> None:
        for folder in self._made:
            try:
                folder.rmdir()
            except OSError:
                return  # another file is there, or it was never made


def tidy_up(folder: Path, outputs: str) -> None:
    """Remove what killed runs left of outputs whose names match ``outputs``, a shell's pattern.

    What a run at work holds, what `--resume` can continue, and what nothing marks as this tool's
    stays.
    """
    for path in folder.glob(f".{outputs}{_LOCK_ENDS}"):
        output = folder / path.name.removesuffix(_LOCK_ENDS)[1:]
        with contextlib.suppress(CheckpointError), told(path):
            if not lines(staging_folder(output) / JOURNAL):
                with OutputTransaction(output, overwrite=True):
                    continue


def folder_mode(mode: int) -> int:
    """The permissions of a folder whose files have ``mode``, within the user's umask."""
    umask = os.umask(0o077)
    os.umask(umask)
    wanted = mode | (mode & 0o444) >> 2 | 0o700
    return wanted & ~umask | 0o700


def _exchange(new: Path, old: Path, aside: Path) -> None:
    """Swap two folders in one step if the system can, else by renames with ``aside`` in between."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, "renameat2", None)
    if call is not None:
        paths = os.fsencode(new), os.fsencode(old)
        if call(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
            return
        if ctypes.get_errno() not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(old))
    os.rename(old, aside)
    try:
        os.rename(new, old)
    except BaseException:
        if not os.path.lexists(old):
            os.rename(aside, old)
        raise
    os.rename(aside, new)


def snapshot(paths: Iterable[str], storage: Storage = LOCAL) -> dict[str, FileIdentity]:
    """The identity of every source file, to notice a change while it is read."""
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
