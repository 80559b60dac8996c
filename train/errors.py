"""The trainer's error for what a user gave it: a layout, a model, an option, a file.

As with ``CheckpointError``, our own bugs are ``assert`` failures and never this type.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

LOST_A_RANK = 75  # exit code of a rank that ends because another one did
WAITED_TOO_LONG = 76  # exit code of a rank that waited for another one for too long


class TrainError(ValueError):
    """A training run that cannot start or continue as asked."""


class LostRank(RuntimeError):
    """Another rank has ended, or did not come to a collective in time; the text says which."""

    def __init__(self, said: str, code: int) -> None:
        super().__init__(said)
        self.code = code  # LOST_A_RANK or WAITED_TOO_LONG


def nearest(name: str, known: Iterable[str]) -> str:
    """A phrase with the known name that is most similar to ``name``."""
    near = difflib.get_close_matches(name, list(known), 1, 0.3)
    return f"; the nearest is {near[0]}" if near else ""


def raise_faults(headline: str, faults: Sequence[str]) -> None:
    """Raise one TrainError that lists every fault; return quietly if there is none."""
    if len(faults) == 1:
        raise TrainError(f"{headline}: {faults[0]}")
    if faults:
        lines = "".join(f"\n  - {fault}" for fault in faults)
        raise TrainError(f"{headline} ({len(faults)} faults){lines}")
