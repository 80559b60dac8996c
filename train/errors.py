"""The trainer's error for what a user gave it: a layout, a model, an option, a file.

As with ``CheckpointError``, our own bugs are ``assert`` failures and never this type.
"""

from __future__ import annotations

LOST_A_RANK = 75  # exit code of a rank that ends because another one did
WAITED_IN_VAIN = 76  # exit code of a rank that waited for another one for too long


class TrainError(ValueError):
    """A training run that cannot be set up, or cannot go on, as asked."""


class LostRank(RuntimeError):
    """Another rank is gone, or did not come to a collective in time; the text says which."""

    def __init__(self, said: str, code: int) -> None:
        super().__init__(said)
        self.code = code  # LOST_A_RANK or WAITED_IN_VAIN
