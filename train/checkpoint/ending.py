"""What is under way when a process ends is finished: at its exit, an error's too, or at SIGTERM.

The main thread may be stuck in a collective when a signal comes, so a thread of its own waits for
one. A script's own handler of a signal is left alone: what it raises ends the process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable

from ..errors import TrainError

_ENDS_S = 1.0  # how long an end of the watch is waited for
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_under_way: list[Callable[[], None]] = []
_watch: _Watch | None = None
_lost = False  # something could not be finished


def begin(finish: Callable[[], None]) -> None:
    """Call ``finish`` should the process end before `over`."""
    global _watch
    if finish not in _under_way:
        _under_way.append(finish)
    if _watch is None and threading.current_thread() is threading.main_thread():
        _watch = _Watch()


def over(finish: Callable[[], None]) -> None:
    """Nothing is left to finish."""
    global _watch
    with contextlib.suppress(ValueError):
        _under_way.remove(finish)
    main = threading.current_thread() is threading.main_thread()
    if not _under_way and _watch is not None and main:
        watch, _watch = _watch, None
        watch.close()


def finish() -> None:
    """Finish what is under way, and say what is lost."""
    global _lost
    for one in tuple(_under_way):
        _under_way.remove(one)
        try:
            one()
        except TrainError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            _lost = True


@atexit.register
def _at_exit() -> None:
    finish()
    if _lost:
        logging.shutdown()
        sys.stdout.flush()
        os._exit(1)  # no other way to set the exit code now


class _Watch:
    """Waits for a signal that would end this process at once."""

    def __init__(self) -> None:
        self._taken = [n for n in _SIGNALS if signal.getsignal(n) is signal.SIG_DFL]
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in self._taken:
            signal.signal(number, lambda number, frame: None)
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            while said := os.read(self._reader, 1):
                if said[0] in self._taken:
                    finish()
                    # signal.signal works in the main thread alone, which may be stuck
                    ctypes.CDLL(None).signal(said[0], 0)
                    os.kill(os.getpid(), said[0])
        except OSError:
            pass  # a pipe of one's own fails only where its process is at its end
        finally:
            with contextlib.suppress(OSError):
                os.close(self._reader)

    def close(self) -> None:
        """Let signals end the process again."""
        for number in self._taken:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(self._before, warn_on_full_buffer=False)
        with contextlib.suppress(OSError):  # nothing is in it, and its number is free all the same
            os.close(self._writer)
        if self._thread is not threading.current_thread():
            self._thread.join(_ENDS_S)  # it closes the pipe; it may also be busy with a signal
