"""Calls to the system that are counted, and of which one fails.

The product reaches the system through functions of ``os``, ``fcntl`` and ``shutil``, through the
three calls that move/storage.py keeps for itself, and through Python's file objects. The latter
are made of C; here they come from ``_pyio``, which is the same in Python and reads, writes and
closes by way of ``os``, so that those calls are seen as well.
"""

from __future__ import annotations

import _pyio
import builtins
import contextlib
import errno
import io
import os
import pathlib
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator

from shardwright.ckpt.move import lock, publish, storage

READING = (errno.EIO, errno.EACCES, errno.ESTALE)
WRITING = (errno.ENOSPC, errno.EIO, errno.EDQUOT)
NAMING = (errno.EIO, errno.EACCES, errno.EROFS)
# name -> (module, attribute, how it may fail)
CALLS: dict[str, tuple[object, str, tuple[int, ...]]] = {
    "pwrite": (storage, "PWRITE", WRITING),
    "preadv": (storage, "PREADV", READING),
    "copy_file_range": (storage, "KERNEL_COPY", (errno.ENOSPC, errno.EIO, errno.EXDEV)),
    "write": (os, "write", WRITING),
    "read": (os, "read", READING),
    "pread": (os, "pread", READING),
    "fsync": (os, "fsync", WRITING),
    "open": (os, "open", (errno.EMFILE, errno.EACCES, errno.EIO)),
    "close": (os, "close", (errno.EIO, errno.EDQUOT, errno.ENOSPC)),
    "ftruncate": (os, "ftruncate", WRITING),
    "truncate": (os, "truncate", WRITING),
    "rename": (os, "rename", NAMING),
    "replace": (os, "replace", NAMING),
    "link": (os, "link", NAMING),
    "unlink": (os, "unlink", NAMING),
    "mkdir": (os, "mkdir", (errno.ENOSPC, errno.EACCES, errno.EROFS)),
    "rmdir": (os, "rmdir", NAMING),
    "chmod": (os, "chmod", NAMING),
    "stat": (os, "stat", READING),
    "lstat": (os, "lstat", READING),
    "fstat": (os, "fstat", READING),
    "listdir": (os, "listdir", (errno.EIO, errno.EACCES, errno.EMFILE)),
    "scandir": (os, "scandir", (errno.EIO, errno.EACCES, errno.EMFILE)),
    "readlink": (os, "readlink", READING),
    "statvfs": (os, "statvfs", READING),
    "flock": (lock.fcntl, "flock", (errno.ENOLCK, errno.EIO, errno.EACCES)),
    "copyfile": (shutil, "copyfile", WRITING),
    "renameat2": (publish, "_exchange", NAMING),
}
ROUNDS = 3  # as many ways as each call may fail

Call = Callable[..., object]


def fail(number: int, path: object = None) -> None:
    """Raise what the system would."""
    raise OSError(number, os.strerror(number), path)


@contextlib.contextmanager
def watched(
    name: str = "", at: int = -1, number: int = errno.EIO, *, all_files: bool = True
) -> Iterator[Counter[str]]:
    """Count every call of ``CALLS``; the ``at``-th one of ``name`` fails, once.

    A close that fails has closed the file all the same, as on Linux.
    """
    counts: Counter[str] = Counter()
    with contextlib.ExitStack() as undo:
        for each, (module, attribute, _) in CALLS.items():
            real = getattr(module, attribute)
            if real is not None:
                hit = at if each == name else -1
                made = _counted(each, real, counts, hit, number)
                _replace(undo, module, attribute, real, made)
        for module in (io, builtins) if all_files else ():
            _replace(undo, module, "open", module.open, _pyio.open)
        yield counts


def _counted(name: str, real: Call, counts: Counter[str], at: int, number: int) -> Call:
    def call(*args: object, **kwargs: object) -> object:
        counts[name] += 1
        if counts[name] - 1 == at:
            if name == "close":
                real(*args, **kwargs)
            fail(number, args[0] if args and isinstance(args[0], (str, os.PathLike)) else None)
        return real(*args, **kwargs)

    return call


def _replace(
    undo: contextlib.ExitStack, module: object, attribute: str, real: Call, made: Call
) -> None:
    undo.callback(setattr, module, attribute, real)
    setattr(module, attribute, made)
    if sys.version_info < (3, 11):  # pathlib holds the functions themselves
        accessor = pathlib._NormalAccessor
        for key, value in list(vars(accessor).items()):
            held = value.__func__ if isinstance(value, staticmethod) else value
            if held is real:
                undo.callback(setattr, accessor, key, value)
                setattr(accessor, key, staticmethod(made))
