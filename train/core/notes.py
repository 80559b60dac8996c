"""Notes that ranks leave for each other in torch.distributed's store.

A collective waits for every rank, one that is gone or elsewhere included. A note waits for nobody:
it is left, and read by whoever wants to know, for as long as he likes.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter

import torch.distributed as dist

_LOOK_SECONDS = 0.02
_counts: Counter[str] = Counter()  # occasions so far, by subject: the same on every rank


class Notes:
    """Notes on one subject; every rank makes the same ones in the same order."""

    def __init__(self, subject: str) -> None:
        self.subject = f"{subject}.{_counts[subject]}"
        _counts[subject] += 1
        self._numbers = itertools.count()
        self._own: dict[int, str] = {}  # where there is no world: this process's

    def next(self) -> int:
        """The number of a new occasion."""
        return next(self._numbers)

    def leave(self, number: int, rank: int, text: str) -> None:
        """Leave this rank's note; nothing happens where the store is gone with its rank."""
        self._own = {number: text}
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                _store().set(self._key(number, rank), text)

    def read(self, number: int, world: int, seconds: float) -> list[str | None]:
        """The note of each rank; None for one that has left none when ``seconds`` are over."""
        if not dist.is_initialized():
            return [self._own.get(number)]
        stop = time.monotonic() + seconds
        found: list[str | None] = [None] * world
        while True:
            for rank, note in enumerate(found):
                if note is None:
                    found[rank] = self._look(number, rank)
            if None not in found or time.monotonic() > stop:
                return found
            time.sleep(_LOOK_SECONDS)

    def absent(self, rank: int, world: int, seconds: float) -> list[int]:
        """Meet all ranks on a new occasion: those that did not come before ``seconds`` are over."""
        number = self.next()
        if not dist.is_initialized():
            return []
        self.leave(number, rank, "")
        stop = time.monotonic() + seconds
        count = self._key(number, -1)
        come = _store().add(count, 1)
        while come < world and time.monotonic() < stop:
            time.sleep(_LOOK_SECONDS)
            come = _store().add(count, 0)
        if come >= world:
            return []
        return [rank for rank, note in enumerate(self.read(number, world, 0)) if note is None]

    def _look(self, number: int, rank: int) -> str | None:
        key = self._key(number, rank)
        try:
            return _store().get(key).decode() if _store().check([key]) else None
        except RuntimeError:  # the store is gone
            return None

    def _key(self, number: int, rank: int) -> str:
        return f"shardwright/{self.subject}/{number}/{rank}"


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
