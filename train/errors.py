"""The trainer's error for what a user gave it: a layout, a model, an option, a file.

As with ``CheckpointError``, our own bugs are ``assert`` failures and never this type.
"""

from __future__ import annotations

LOST_A_RANK = 75  # exit code of a rank that ends because another one did


class TrainError(ValueError):
    """A training run that cannot be set up, or cannot go on, as asked."""
