"""Adds a set of files to a folder that holds other files too, and replaces an older set whole.

All that is private lies inside the folder, so it may be a mount point, the current folder, or
named through a link. New files grow in its ``.shardwright.partial``. Once they are durable, a line
in the journal there says which files leave and which come. From then on there are only renames,
and whoever opens the folder next finishes them (`finish`). The file that describes the others
leaves first and comes last. Without that line nothing was touched yet, and the next save removes
what was left.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ..errors import CheckpointError
from . import tree
from .interrupts import uninterrupted
from .lock import OutputLock
from .staging import JOURNAL, StagingFolder, lines
from .storage import is_path_below, told

STAGE = ".shardwright.partial"
LOCK = STAGE + ".lock"
_REPLACED = "shardwright.replaced"  # in the staging folder: files that have left
_WAIT_SECONDS = 30.0  # for another run that is exchanging files, which takes it a moment
_SHOWN = 8  # names in a message


class FileSetTransaction:
    """Files that are to be added to a folder; a context manager, or `open` and `close`.

    ``folder`` is made if it is not there. ``last`` is the file that describes the others. ``owned``
    gets the folder and says which files in it an earlier set of this tool recorded as its own, by
    their paths below the folder: these are replaced, all others are left alone, and one that is in
    the way is refused. Files are written into ``path``, by any process; all of them are published.
    """

    def __init__(self, folder: Path, last: str, owned: Callable[[Path], Collection[str]]) -> None:
        self.output, self.last, self._owned = folder, last, owned
        self.folder = Path(os.path.realpath(folder))
        self.path = self.folder / STAGE
        self.lock = OutputLock(self.folder / LOCK, folder)
        self.staging = StagingFolder(self.path, self.lock)
        self.older: frozenset[str] = frozenset()  # files of the set that is to be replaced
        self.yielding: frozenset[str] = frozenset()  # files that stay out where a user's own came
        self.yielded: list[str] = []
        self._made: list[Path] = []  # the folder and those around it, innermost first
        self._locked = self._exchanging = False

    def __enter__(self) -> FileSetTransaction:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def open(self) -> None:
        """Take the lock, finish or remove what a killed run left, and make the staging folder."""
        with told(self.output):
            around = (self.folder, *self.folder.parents)
            self._made = [folder for folder in around if not folder.exists()]
        try:
            self._enter()
        except BaseException:
            uninterrupted(self._leave)
            raise

    def _enter(self) -> None:
        try:
            tree.make(self.folder)
            self.lock.take()
            self._locked = True
        except OSError as error:
            raise CheckpointError(f"{self.output}: cannot write here ({error.strerror})") from error
        with told(self.output):
            _go_on(self.staging)
            self.staging.make()
            self.staging.clear()
            self.staging.open_journal()
            self.older = frozenset(self._owned(self.folder))

    def check(self, names: Collection[str]) -> None:
        """CheckpointError if a file of these names cannot come, because another is in its place."""
        with told(self.output):
            faults = [fault for name in sorted(names) if (fault := self._fault(name))]
        if faults:
            more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
            raise CheckpointError(
                f"{self.output}: {'; '.join(faults[:_SHOWN])}{more}: not written by an earlier "
                "save, so not replaced; move it away, or save into another folder"
            )

    def _fault(self, name: str) -> str:
        assert is_path_below(name), f"{name}: not a file below the folder"
        assert name.split("/")[0] not in (STAGE, LOCK, JOURNAL, _REPLACED), name
        for parent in reversed(self._folders_of(name)):
            if _is_there(parent) and not _is_folder(parent):
                return f"{parent.relative_to(self.folder)} is no folder"
        at = self.folder / name
        if _is_folder(at):
            return f"{name} is a folder"
        return f"{name} is there" if _is_there(at) and name not in self.older else ""

    def _folders_of(self, name: str) -> Sequence[Path]:
        """The folders between the folder and a file in it, innermost first."""
        return (self.folder / name).parents[: name.count("/")]

    def _is_as_made(self, name: str) -> bool:
        """Whether a file of the older set is there, and neither it nor a folder was exchanged."""
        at = self.folder / name
        return all(map(_is_folder, self._folders_of(name))) and _is_there(at) and not _is_folder(at)

    def publish(self) -> None:
        """Make all files durable, then let the older set leave and the new one come.

        On an error the older set is there again, and nothing else has changed.
        """
        with told(self.output):
            names = self._staged()
            assert self.last in names, f"{self.output}: {self.last} was not written"
            self.check(set(names) - self.yielding)
            tree.sync_all(self.path)
            tree.sync(self.folder)
            self.lock.check()
            names = self._without_yielding(names)
            leave = [name for name in self.older if self._is_as_made(name)]
            exchange = Exchange(self.path, self._in_order(leave)[::-1], self._in_order(names))
            self._exchanging = True
            try:
                self.staging.append(exchange.line())
                self.staging.close_journal()
                uninterrupted(exchange.forward)
            except (OSError, CheckpointError):
                with contextlib.suppress(OSError, CheckpointError):
                    uninterrupted(exchange.back)
                    self._end_exchange()
                raise
            self._end_exchange()
            self.staging.discard()

    def _without_yielding(self, names: Sequence[str]) -> list[str]:
        """The names that come; a script may have written files while the set was made."""
        self.yielded = [name for name in names if name in self.yielding and self._fault(name)]
        for name in self.yielded:
            os.unlink(self.path / name)
        return [name for name in names if name not in self.yielded]

    def _end_exchange(self) -> None:
        """One of the two sets is in place, durably: the other one may be removed."""
        self.staging.void_journal()
        self._exchanging = False

    def _staged(self) -> list[str]:
        found = [
            (folder / name).relative_to(self.path).as_posix()
            for folder, names in tree.walk(self.path)
            for name in names
        ]
        return [name for name in found if name != JOURNAL]

    def _in_order(self, names: Collection[str]) -> tuple[str, ...]:
        return tuple(sorted(names, key=lambda name: (name == self.last, name)))

    def close(self, *, failed: bool = False) -> None:
        """Release the lock; what was not published is removed."""
        try:
            with told(self.path):
                self.staging.close_journal()
            if self._exchanging:  # it was interrupted, or could not be undone
                with contextlib.suppress(OSError, CheckpointError):
                    _go_on(self.staging)
            else:
                uninterrupted(self.staging.discard)
        finally:
            uninterrupted(self._leave)

    def _leave(self) -> None:
        self.staging.leave(remove=self._locked)
        self.lock.release()
        for folder in self._made:
            try:
                folder.rmdir()
            except OSError:
                return  # something is in it


@dataclass(frozen=True, slots=True)
class Exchange:
    """Which files leave a folder and which come, in order. Every step can be repeated.

    A file has left if it is in the private folder; one has come if it is no longer staged.
    """

    stage: Path  # in the folder
    leaving: tuple[str, ...]
    coming: tuple[str, ...]

    def line(self) -> str:
        """The journal's line."""
        return json.dumps({"leave": self.leaving, "come": self.coming}) + "\n"

    @classmethod
    def of(cls, stage: Path) -> Exchange:
        """What the journal says; CheckpointError if it was not written by `line`."""
        names: list[tuple[str, ...]] = []
        with contextlib.suppress(ValueError, IndexError, RecursionError):
            said = json.loads(lines(stage / JOURNAL)[0])
            for key in ("leave", "come"):
                found = said.get(key) if isinstance(said, dict) else None
                if isinstance(found, list) and all(is_path_below(name) for name in found):
                    names.append(tuple(found))
        if len(names) != 2:
            raise CheckpointError(f"{stage / JOURNAL}: is damaged; remove {stage}")
        return cls(stage, *names)

    def forward(self) -> None:
        """Take every step that is not taken yet."""
        self._check_folders()
        for name in self.leaving:
            here, there = self._at(name)
            come = name in self.coming and not _is_there(self.stage / name)
            if not come and not _is_there(there) and _is_there(here):
                tree.make(there.parent)
                os.rename(here, there)
        for name in self.coming:
            here, _ = self._at(name)
            if not _is_there(self.stage / name):
                continue
            _check_free(here)
            tree.make(here.parent)
            if name == self.coming[-1]:
                self._sync()
            os.rename(self.stage / name, here)
        self._sync()

    def back(self) -> None:
        """Undo every step that was taken."""
        self._check_folders()
        for name in reversed(self.coming):
            here, there = self._at(name)
            had_one = name not in self.leaving or _is_there(there)
            if had_one and not _is_there(self.stage / name) and _is_there(here):
                os.rename(here, self.stage / name)
        for name in reversed(self.leaving):
            here, there = self._at(name)
            if _is_there(there):
                _check_free(here)
                os.rename(there, here)
        self._sync()

    def _check_folders(self) -> None:
        """Refuse folders that are links: they lead out of the folder."""
        for name in {*self.leaving, *self.coming}:
            for place in (*self._at(name), self.stage / name):
                for folder in place.parents[: name.count("/") + 1]:
                    if folder != self.stage.parent and folder.is_symlink():
                        raise CheckpointError(f"{folder}: is a link, which a save does not follow")

    def _at(self, name: str) -> tuple[Path, Path]:
        """Where a file is in the folder, and where it goes when it leaves."""
        return self.stage.parent / name, self.stage / _REPLACED / name

    def _sync(self) -> None:
        """Make every rename so far durable."""
        names = {*self.leaving, *self.coming}
        for folder in {place.parent for name in names for place in self._at(name)}:
            if folder.is_dir():
                tree.sync(folder)
        for folder, _ in tree.walk(self.stage):
            tree.sync(folder)


def _is_there(path: Path) -> bool:
    """Whether anything has this name. Unlike `os.path.lexists` it raises OSError if nobody knows:
    what is taken for gone would be lost.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _check_free(path: Path) -> None:
    if _is_there(path):
        raise CheckpointError(f"{path}: came while a save replaced files; move it away")


def is_decided(stage: Path) -> bool:
    """Whether files of a folder are being exchanged, or a killed run has begun to. Raises OSError.

    Nobody else's folder counts: no link, no other file.
    """
    try:
        return not stage.is_symlink() and bool(lines(stage / JOURNAL))
    except NotADirectoryError:
        return False


def _go_on(staging: StagingFolder) -> None:
    """Finish an exchange that a killed run has begun, under the lock."""
    if not is_decided(staging.path):
        return
    staging.check()
    uninterrupted(Exchange.of(staging.path).forward)
    staging.discard()


def _is_ours_to_finish(stage: Path) -> bool:
    try:
        return is_decided(stage)
    except PermissionError:
        if os.lstat(stage).st_uid == os.geteuid():
            raise
        return False  # another user's, who does not let us see


def finish(place: str | os.PathLike[str]) -> None:
    """Finish the exchange that a killed run began in a folder; one look where there is none.

    Where another run is at it, its end is waited for. Raises CheckpointError.
    """
    folder = Path(place)
    stop = time.monotonic() + _WAIT_SECONDS
    while True:
        with told(folder):
            if not _is_ours_to_finish(folder / STAGE):
                return
        lock = OutputLock(folder / LOCK, folder)
        try:
            lock.take()
        except CheckpointError:
            if time.monotonic() > stop:
                raise
            time.sleep(0.05)
            continue
        except OSError as error:
            raise CheckpointError(
                f"{folder}: a save was cut off while it replaced files, and it cannot be finished "
                f"here ({error.strerror}); open the folder once where it can be written"
            ) from error
        try:
            with told(folder):
                _go_on(StagingFolder(folder / STAGE, lock))
            return
        finally:
            lock.release()
