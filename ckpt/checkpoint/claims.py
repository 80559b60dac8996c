"""Numbers that a file claims, bounded before anything is made for each of them."""

from __future__ import annotations

from ..errors import CheckpointError

MAX_RANKS = 1 << 17  # of one mesh: each has files of its own
MAX_VOCAB_MULTIPLE = 1 << 16  # rows of padding at most, where the file has fewer rows itself


def ranks(claimed: int, what: str, origin: object) -> int:
    """A number of ranks; CheckpointError above what any run has."""
    if claimed > MAX_RANKS:
        raise CheckpointError(f"{origin}: says {what} {claimed}; the limit is {MAX_RANKS} ranks")
    return claimed


def vocab_multiple(claimed: int, rows: int, origin: object) -> int:
    """``make_vocab_size_divisible_by``; CheckpointError where ``rows`` speak against it."""
    if claimed > max(rows, MAX_VOCAB_MULTIPLE):
        raise CheckpointError(
            f"{origin}: says make_vocab_size_divisible_by {claimed}, and has {rows} rows of the "
            f"vocabulary; above {MAX_VOCAB_MULTIPLE} it cannot be more than the rows"
        )
    return claimed
