"""How a run is asked to end: a signal, the launcher's file, or a launcher that is gone.

A launcher holds a lock for as long as it lives, and the kernel gives it back however it dies. A
rank that finds the lock free has nobody left who could stop it: it saves and ends. Imports no
torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

STOP_FILE = "SHARDWRIGHT_STOP_FILE"  # the launcher makes this file to ask for a save and an end
LAUNCHER = "SHARDWRIGHT_LAUNCHER"  # a file that the launcher keeps locked
_ELASTIC = "TORCHELASTIC_RUN_ID"  # torchrun started this process
_parent = os.getppid()


def signals() -> list[signal.Signals]:
    """What asks for an end: Ctrl-C, SIGTERM, and a closed terminal unless nohup says otherwise."""
    found = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        found.append(signal.SIGHUP)
    return found


def stop_file_exists() -> bool:
    """Whether the launcher asks for an end."""
    path = os.environ.get(STOP_FILE)
    return bool(path and os.path.exists(path))


@contextlib.contextmanager
def alive(path: Path) -> Iterator[dict[str, str]]:
    """Hold the launcher's lock; gives the environment in which ranks find it."""
    with path.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: ranks cannot be told
            yield {}
            return
        yield {LAUNCHER: str(path)}


def is_orphan() -> bool:
    """Whether the launcher, or torchrun's agent, of this rank is gone."""
    if _ELASTIC in os.environ and os.getppid() != _parent:
        return True
    path = os.environ.get(LAUNCHER)
    if path is None:
        return False
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:  # it has tidied up
        return True
    except OSError:
        return False
    return True


def silence() -> None:
    """Write nowhere from now on: who read our output is gone, and a write would fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    os.close(nowhere)
