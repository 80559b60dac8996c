"""Limits for numbers that a file claims, checked before anything loops over them."""

from __future__ import annotations

from ..errors import CheckpointError

MAX_RANKS = 1 << 17  # of one mesh; each has files
MAX_VOCAB_MULTIPLE = 1 << 16  # if the file has fewer rows than that


def ranks(claimed: int, what: str, origin: object) -> int:
    """A number of ranks; CheckpointError if it is more than any run has."""
    if claimed > MAX_RANKS:
        raise CheckpointError(f"{origin}: says {what} {claimed}; the limit is {MAX_RANKS} ranks")
    return claimed


def vocab_multiple(claimed: int, rows: int, origin: object) -> int:
    """``make_vocab_size_divisible_by``; CheckpointError if ``rows`` contradict it."""
    if claimed > max(rows, MAX_VOCAB_MULTIPLE):
        raise CheckpointError(
            f"{origin}: says make_vocab_size_divisible_by {claimed}, and has {rows} rows of the "
            f"vocabulary; above {MAX_VOCAB_MULTIPLE} it cannot be more than the rows"
        )
    return claimed
