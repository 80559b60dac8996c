"""What a piece of work may cost: CPU time and memory of this process, measured around it.

CPU time, since a loaded machine stretches every other. Memory is the process's peak above what it
had before; the kernel keeps that peak and lets a process set it back (Linux; elsewhere only the
bound on the address space holds).
"""

from __future__ import annotations

import contextlib
import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MiB = 1 << 20
CPU_SECONDS = 5.0
# 300 MiB for a whole command: Python with NumPy has about 60 of them before it reads anything.
MEMORY_BYTES = 240 * MiB
_ADDRESS_BYTES = 1 << 30  # above today's: a claim of gigabytes ends in MemoryError, not in swap
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class TooLong(BaseException):
    """Raised inside work that does not end; no handler of the work's own catches it."""


@dataclass(slots=True)
class Cost:
    """What some work took."""

    cpu_s: float = 0.0
    peak_bytes: int = 0

    def complaint(self) -> str:
        """What was more than allowed; empty if nothing was."""
        if self.cpu_s > CPU_SECONDS:
            return f"took {self.cpu_s:.1f} s of CPU time; {CPU_SECONDS:g} s are allowed"
        if self.peak_bytes > MEMORY_BYTES:
            return f"took {self.peak_bytes / MiB:.0f} MiB; {MEMORY_BYTES // MiB} MiB are allowed"
        return ""


def limit_address_space() -> None:
    """From now on this process gets at most a GiB more than it has."""
    now = _memory("VmSize")
    if now:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (now + _ADDRESS_BYTES, hard))


@contextlib.contextmanager
def measured(stop_after_s: float = 4 * CPU_SECONDS) -> Iterator[Cost]:
    """The cost of what runs inside; TooLong ends it where it takes far more than it may."""

    def stop(*_: object) -> None:
        raise TooLong(f"did not end within {stop_after_s:g} s of CPU time")

    cost, before = Cost(), _reset_peak()
    old = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, stop_after_s)
    # A loop inside a C function sees no handler: the default of this signal ends the process.
    signal.setitimer(signal.ITIMER_VIRTUAL, 3 * stop_after_s)
    started = time.process_time()
    try:
        yield cost
    finally:
        cost.cpu_s = time.process_time() - started
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGPROF, old)
        cost.peak_bytes = max(0, _memory("VmHWM") - before)


def _reset_peak() -> int:
    """Bytes that this process has now, from where its peak is counted."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")
    return _memory("VmRSS")


def _memory(key: str) -> int:
    """A size from the kernel's account of this process; 0 where there is none."""
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) << 10
    return 0
