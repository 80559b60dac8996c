"""Files that are copied with the tensors, and checks of what a killed run left of an output."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from ..model.design import OutFile
from ..model.manifest import SideFile, View
from . import tree
from .files import SCRATCH_BYTES, copy_file, write_file
from .storage import StoragePath, storage_path, told


def write_side(root: Path, side: SideFile, source: StoragePath) -> None:
    """Write a side file, byte for byte or as new text, no more readable than its source.

    ``source`` is the checkpoint from which it is copied.
    """
    target = root / side.name
    with told(target):
        tree.make(target.parent)
        with contextlib.suppress(FileNotFoundError):
            target.unlink()  # of a run that was killed here
        if side.source:
            copy_file(source.at(side.source), storage_path(target))
            os.chmod(target, target.stat().st_mode & (os.stat(side.source).st_mode | 0o600))
        else:
            write_file(storage_path(target), side.text.encode())


def side_bytes(side: SideFile, source: StoragePath) -> int:
    """The size of a side file."""
    return source.at(side.source).size() if side.source else len(side.text.encode())


def mode_of(files: Iterable[str], within: StoragePath) -> int:
    """Permissions with which a new file is no more readable than any of ``files``.

    The group may read it only if new files get the same group.
    """
    mode = 0o666
    with told(within):
        for path in files:
            info = os.stat(path)
            allowed = info.st_mode | 0o600
            if info.st_gid != os.getegid():
                allowed &= ~0o070 | (allowed & 0o007) << 3
            mode &= allowed
        folder = os.stat(within).st_mode
    for who in (0o070, 0o007):  # who cannot enter the folder cannot read what is in it
        mode &= 0o777 if folder & who & 0o111 else ~who
    return mode


def kept_fault(file: OutFile, zeros: Iterable[View]) -> str:
    """Why a file is not the one that the earlier run made; empty if it is.

    ``zeros`` are the places in it to which nothing is copied.
    """
    from .executor import view_runs  # NumPy, which a dry run does not need

    size = file.layout.size_bytes
    try:
        opened = tree.open_file(Path(file.path), "rb")
    except OSError as error:
        return error.strerror or "cannot be opened"
    with opened:
        info = os.fstat(opened.fileno())
        if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
            return "is a link, or no regular file"
        if info.st_size != size:
            return f"{info.st_size} bytes, {size} were made"
        slots = {at for checksum in file.layout.checksums for at in checksum.slots}
        for offset, made in file.layout.fixed:
            opened.seek(offset)
            found = bytearray(opened.read(len(made)))
            for slot in (slot for slot in slots if offset <= slot < offset + len(made)):
                found[slot - offset : slot - offset + 4] = made[slot - offset : slot - offset + 4]
            if bytes(found) != made:
                return f"its header at byte {offset} is not the one that was made"
        for offset, length in (run for view in zeros for run in view_runs(view)):
            opened.seek(offset)
            for at in range(0, length, SCRATCH_BYTES):
                if any(opened.read(min(SCRATCH_BYTES, length - at))):
                    return f"its new padding rows from byte {offset} on are not zeros"
    return ""
