"""Notes that ranks leave for each other in torch.distributed's store.

A collective waits for every rank, one that is gone or elsewhere included. A note waits for nobody:
it is left, and read by whoever wants to know, for as long as he likes.
"""

from __future__ import annotations

import contextlib
import itertools
import time

import torch.distributed as dist

KEPT = 64  # occasions whose notes stay: no rank is further behind
_LOOK_SECONDS = 0.02
_made = itertools.count()  # in this process


class Notes:
    """Notes on one subject; all ranks of ``group`` make them together, and number them alike."""

    def __init__(self, subject: str, group: dist.ProcessGroup | None) -> None:
        box = [f"{subject}.{next(_made)}"]
        if dist.is_initialized():  # a process may have been of other worlds, with other notes
            dist.broadcast_object_list(box, 0, group=group)
        self.subject = box[0]
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
                _store().delete_key(self._key(number - KEPT, rank))

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

    def count(self, number: int, what: str, *, add: int = 0) -> int:
        """A count that every rank may add to; 0 where the store is gone."""
        try:
            return int(_store().add(f"{self._key(number, 0)}/{what}", add))
        except RuntimeError:
            return 0

    def forget(self, number: int, what: str) -> None:
        """Remove a count."""
        with contextlib.suppress(RuntimeError):
            _store().delete_key(f"{self._key(number, 0)}/{what}")

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
