"""Calls that all ranks make together. One that some ranks leave out ends with an error, not a hang.

Before a collective each rank leaves a note of the call that it makes. Whoever waits for the others
reads their notes: a rank that makes another call will never come.
"""

from __future__ import annotations

import time
from collections import deque

import torch.distributed as dist

from ..core.notes import KEPT, Notes
from ..errors import TrainError
from .rank_state import RankState

WAIT_SECONDS = 600.0  # for a rank that is on its way, as long as collectives wait
_LOOK_SECONDS = 0.25  # between two looks at the notes of all ranks
_SHOWN = 8  # ranks in a message


class Meetings:
    """The meetings of the ranks that hold one model."""

    def __init__(self, held: RankState) -> None:
        self._rank, self._notes = held.rank, Notes("meeting", held.control)
        self._calls: deque[str] = deque(maxlen=KEPT + 1)  # the last ones
        self._world = dist.get_world_size(held.control) if dist.is_initialized() else 1

    def meet(self, call: str) -> None:
        """Wait for all ranks to make this call; TrainError if one makes another, or none."""
        number = self.announce(call)
        stop = time.monotonic() + WAIT_SECONDS
        look = time.monotonic() + _LOOK_SECONDS
        while self._world > 1 and self._notes.count(number, call) < self._world:
            now = time.monotonic()
            if now > look:
                self._check(number, call, late=now > stop)
                look = time.monotonic() + _LOOK_SECONDS
            time.sleep(0.005)

    def announce(self, call: str) -> int:
        """Leave a note of this call, and go on; the number of the meeting."""
        number = self._notes.next()
        if self._world > 1:
            self._notes.leave(number, self._rank, call)
            self._notes.count(number, call, add=1)
            self._calls.append(call)
            if len(self._calls) > KEPT and self._rank == 0:
                self._notes.forget(number - KEPT, self._calls[0])
        return number

    def _check(self, number: int, call: str, *, late: bool) -> None:
        said = self._notes.read(number, self._world, 0)
        others = [(rank, note) for rank, note in enumerate(said) if note not in (None, call)]
        if others:
            rank, note = others[0]
            raise TrainError(
                f"{call}: was called on rank {self._rank}, while rank {rank} is at {note}. It "
                "concerns what all ranks hold: call it on every rank, outside of "
                "`if accelerator.is_main_process`"
            )
        absent = [rank for rank, note in enumerate(said) if note is None]
        if late and absent:
            more = " and more" if len(absent) > _SHOWN else ""
            listed = ", ".join(map(str, absent[:_SHOWN])) + more
            raise TrainError(
                f"{call}: was not called on rank {listed} within {WAIT_SECONDS:.0f} seconds. It "
                "concerns what all ranks hold: call it on every rank"
            )
