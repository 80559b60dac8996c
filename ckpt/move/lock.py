"""One run at a time into one output, on one machine or on several that share a file system.

The lock has two parts. The kernel releases a `flock` when its process dies. But flock has no effect
between the clients of many network file systems, so the lock file also records who holds it. The
file is ``.NAME.partial.lock`` next to the output. Its holder touches it every minute. A record is
void if its process is gone from this machine, or after ten minutes without a touch.

The record also says what its run was about to replace. A run that takes over the lock of a killed
one knows from it which hidden files it may touch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..errors import CheckpointError, InUse
from .storage import told

RENEW_SECONDS = 60.0
STALE_SECONDS = 600.0
_MAX_RECORD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Record:
    """Who holds a lock, and which hidden names it has made. Inodes are -1 for none."""

    run: str  # random
    host: str
    boot: str  # id of this start of the kernel: two machines or containers may have one name
    space: str  # namespace of the process number
    pid: int
    started: str  # start of the process: another process may get the same number later
    staging: int = -1  # inode of the staging folder
    replaced: int = -1  # inode of the output that was to be replaced
    aside: str = ""  # name of the old output during the exchange, in the output's folder


class OutputLock:
    """The lock of an output. `take` first; `release` always."""

    def __init__(self, path: Path, output: Path, *, break_it: bool = False) -> None:
        self.path, self.output, self.break_it = path, output, break_it
        self.record = Record(os.urandom(8).hex(), *_here())
        self._fd = -1
        self._renewed = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> Record | None:
        """Take the lock; returns the record that a killed run left in it, else None.

        CheckpointError if another run holds it, OSError if the file cannot be made.
        """
        while True:
            self._fd, made = self._opened()
            try:
                if self._is_held(made):
                    before = None if made else _last(self._fd)
                    break
            except FileNotFoundError:
                pass  # its holder has removed it
            except BaseException:
                self._close()
                raise
            self._close()  # removed or replaced since it was opened
        try:
            self._begin(before)
        except BaseException:
            self.release()
            raise
        return before

    def _begin(self, before: Record | None) -> None:
        if before is not None:  # from now on its leftovers are ours
            self.record = replace(
                self.record, staging=before.staging, replaced=before.replaced, aside=before.aside
            )
        self._write()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()

    def _opened(self) -> tuple[int, bool]:
        flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            with contextlib.suppress(FileExistsError):
                return os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o600), True
            with contextlib.suppress(FileNotFoundError):
                return os.open(self.path, flags), False

    def _is_held(self, made: bool) -> bool:
        """Whether this run has the lock; False if the file is gone: try again."""
        if not self._flocked(made):
            if not self.break_it:
                raise InUse(f"{self.output}: another run is writing it ({self.path} is locked)")
            os.unlink(self.path)
            return False
        if not self._is_current():
            return False
        if made:
            return True
        if os.fstat(self._fd).st_uid != os.geteuid():
            raise CheckpointError(f"{self.path}: is another user's; remove it")
        said = self._alive(_last(self._fd))
        if said and not self.break_it:
            raise InUse(
                f"{self.output}: another run is writing it ({said}); if that run is dead, "
                "pass --break-lock"
            )
        return self._is_current()  # a holder removes it and ends

    def _flocked(self, made: bool) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if made:
                os.unlink(self.path)
            raise CheckpointError(
                f"{self.path}: cannot be locked against a second run ({error.strerror})"
            ) from error
        return True

    def _is_current(self) -> bool:
        """Whether the path still names the file that was opened."""
        with contextlib.suppress(FileNotFoundError):
            now = os.stat(self.path, follow_symlinks=False)
            return os.path.samestat(now, os.fstat(self._fd))
        return False

    def _alive(self, record: Record | None) -> str:
        """Why the last holder may still be alive; empty if it is not."""
        age = time.time() - os.fstat(self._fd).st_mtime
        exclusive = _is_exclusive(self.path)
        if record is None:  # it was killed before it wrote one, or has just begun
            return "" if exclusive or age > RENEW_SECONDS else "it has just begun"
        host, boot, space, _, _ = _here()
        if record.boot == boot if boot and record.boot else record.host == host:
            if exclusive:
                return ""  # the kernel releases the locks of a dead process
            if record.space == space:
                dead = _started(record.pid) != record.started
                return "" if dead else f"process {record.pid} of this machine"
        if age > STALE_SECONDS:
            return ""
        return f"process {record.pid} on {record.host}, seen {max(0, age):.0f} seconds ago"

    def note_staging(self, inode: int) -> None:
        """Record the staging folder that this run has made."""
        self.record = replace(self.record, staging=inode)
        self._write()

    def note_replaced(self, inode: int, aside: str) -> None:
        """Record, and sync, what is about to be replaced, and its name during the exchange."""
        self.record = replace(self.record, replaced=inode, aside=aside)
        self._write()
        os.fsync(self._fd)

    def _write(self) -> None:
        data = b"\n" + json.dumps(asdict(self.record)).encode() + b"\n"
        while data:
            data = data[os.write(self._fd, data) :]

    def check(self) -> None:
        """Raise unless this run still holds the lock."""
        with told(self.path):
            record = _last(self._fd)
            is_ours = self._is_current() and record is not None and record.run == self.record.run
        if not is_ours:
            raise CheckpointError(
                f"{self.output}: another run has taken {self.path}; nothing was published"
            )

    def _renew(self) -> None:
        while not self._renewed.wait(RENEW_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self._fd)

    def release(self) -> None:
        """Release the lock and remove its file."""
        self._renewed.set()
        if self._thread is not None:
            self._thread.join()
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                record = _last(self._fd)
                if self._is_current() and (record is None or record.run == self.record.run):
                    os.unlink(self.path)
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):  # its content is synced, or no longer needed
            os.close(fd)


def _here() -> tuple[str, str, str, int, str]:
    """This machine, its kernel, its process numbers, this process and its start."""
    boot = space = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    pid = os.getpid()
    return os.uname().nodename, boot, space, pid, _started(pid)


def _started(pid: int) -> str:
    """When a process of this machine started, as the system counts; empty if it is gone."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        pass  # another user's
    with contextlib.suppress(OSError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[19]
    return "unknown"


def _is_exclusive(path: Path) -> bool:
    """Whether flock works here: a second lock of the file must fail."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EAGAIN)
    finally:
        os.close(fd)
    return False


def _last(fd: int) -> Record | None:
    """The last whole record of a lock file; a kill may have cut the line after it."""
    size = os.fstat(fd).st_size
    start = max(0, size - _MAX_RECORD_BYTES)
    lines = os.pread(fd, _MAX_RECORD_BYTES, start).split(b"\n")[:-1]
    for line in reversed(lines):
        with contextlib.suppress(ValueError, TypeError):
            found = Record(**json.loads(line))
            kinds = [type(getattr(found, key)) for key in ("pid", "staging", "replaced")]
            if kinds == [int] * 3 and isinstance(found.aside, str):
                return found
    return None
