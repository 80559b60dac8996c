"""Which checkpoints of a folder stay, and how the others go: a checkpoint that is seen is whole.

One that goes gets a hidden name first. Where a run is killed while it deletes, the next save of the
folder deletes the rest.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shardwright.ckpt.move import tree
from shardwright.ckpt.move.publish import tidy_up

REMOVED = ".removed"  # ends the private name of a checkpoint that is being deleted


@dataclass(frozen=True, slots=True)
class Numbered:
    """Folders of checkpoints that differ in a number: ``checkpoint-1000``."""

    folder: Path
    prefix: str

    def path(self, number: int) -> Path:
        return self.folder / f"{self.prefix}{number}"

    def found(self) -> dict[int, Path]:
        """Number -> folder, in order."""
        steps = {}
        for child in self.folder.iterdir() if self.folder.is_dir() else ():
            number = self.number(child)
            if number is not None and child.is_dir():
                steps[number] = child
        return dict(sorted(steps.items()))

    def number(self, path: Path) -> int | None:
        """The number in a folder's name; None if it is not one of these."""
        match = re.fullmatch(re.escape(self.prefix) + r"(\d{1,18})", path.name)
        return int(match[1]) if match else None

    def older(self, newest: Path, keep: int, leaving: Iterable[Path] = ()) -> list[Path]:
        """Those before the last ``keep``, up to ``newest``: later ones are no steps of its run.

        ``leaving`` go in any case, and do not count.
        """
        last, gone = self.number(newest), set(leaving)
        if last is None:
            return []
        up_to = [path for n, path in self.found().items() if n <= last and path not in gone]
        return up_to[:-keep]

    def remove(self, old: Iterable[Path]) -> None:
        """Delete checkpoints, and what killed runs left of others here."""
        for path in old:
            os.rename(path, _unused(self.folder / f".{path.name}{REMOVED}"))
        tidy_up(self.folder, f"{self.prefix}*")  # of killed runs that saved at other steps
        for gone in self.folder.glob(f".{self.prefix}*{REMOVED}"):  # also those of a killed run
            with contextlib.suppress(OSError):  # the next save tries again
                tree.remove(gone)


def _unused(path: Path) -> Path:
    """``path``, or where a killed run has left one, the same with a number."""
    found, number = path, 1
    while os.path.lexists(found):
        found = path.with_name(f"{path.name.removesuffix(REMOVED)}.{number}{REMOVED}")
        number += 1
    return found
