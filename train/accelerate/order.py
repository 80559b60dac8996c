"""In which order rows come: that which one process would draw, on every layout.

A sampler of torch draws from its generator, or from torch's default state, when an epoch begins.
Every leader draws as one process would, and all go by what the first has drawn. What an epoch was
drawn from is kept, so that a resumed run can draw it again.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from ..data.samples import epoch_seed
from .replica import Replica

_AT_ONCE = 1024  # indices, or batches of them, that leaders agree on in one message


@dataclass(slots=True)
class Cursor:
    """Where in the data a loader is; loaders that skip batches share it with their source."""

    epoch: int = 0  # the epoch under way, or the next
    batches: int = 0  # of that epoch that were handed out
    broken_off: bool = False  # an iteration began and has not come to its end
    drawn_from: dict[str, str] = field(default_factory=dict)  # what the epoch's order came from
    to_draw: int = 0  # epochs whose order is drawn and left, before the next
    again: Mapping[str, str] | None = None  # what the next epoch's order is to come from
    old_seed: int | None = None  # orders of a release that drew them from (seed, epoch)


class Ordered:
    """A sampler (of rows or of batches) in the order of the first leader's."""

    def __init__(self, sampler: Any, replica: Replica | None, cursor: Cursor) -> None:
        """Without a ``replica`` only the first leader reads, and asks nobody."""
        self.sampler, self.replica, self.cursor = sampler, replica, cursor
        for name in ("batch_size", "drop_last"):
            if hasattr(sampler, name):  # of a sampler of batches
                setattr(self, name, getattr(sampler, name))

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """For samplers that have an order for each epoch."""
        inside: Any = getattr(self.sampler, "sampler", None)
        for thing in (self.sampler, inside):
            if hasattr(thing, "set_epoch"):
                thing.set_epoch(epoch)
                return

    def __iter__(self) -> Iterator[Any]:
        cursor = self.cursor
        self.set_epoch(cursor.epoch)
        if cursor.old_seed is not None:
            own: Iterator[Any] = _as_of_old(self.sampler, epoch_seed(cursor.old_seed, cursor.epoch))
        else:
            own = iter(self.sampler)
        if self.replica is None or self.replica.council is None:  # one; or a peer
            yield from own
            return
        while found := self.replica.agreed(list(islice(own, _AT_ONCE))):
            yield from found


class OrderedBatches(Ordered, torch.utils.data.BatchSampler):
    """The same for what is a sampler of batches, which Accelerate asks for."""


def _as_of_old(sampler: Any, seed: int) -> Iterator[Any]:
    """The order of an epoch that came from a seed alone."""
    if isinstance(sampler, torch.utils.data.SequentialSampler):
        return iter(sampler)
    if hasattr(sampler, "generator"):
        before, sampler.generator = sampler.generator, torch.Generator().manual_seed(seed)
        try:
            return iter(list(sampler))
        finally:
            sampler.generator = before
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return iter(list(sampler))


def skip_draws(cursor: Cursor, loader: torch.utils.data.DataLoader[Any]) -> None:
    """Draw what epochs that are left out would have drawn."""
    for _ in range(cursor.to_draw):
        _ = torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        if loader.batch_sampler is not None:
            next(iter(loader.batch_sampler), None)
    cursor.to_draw = 0


@contextlib.contextmanager
def drawing(cursor: Cursor, generator: torch.Generator | None) -> Iterator[None]:
    """An epoch's order is drawn in this block; ``generator`` is the loader's or sampler's own.

    A resumed epoch is drawn again, and then the default state goes on from where it is.
    """
    if cursor.again is None:
        cursor.drawn_from = {"torch": _text(torch.get_rng_state())}
        if generator is not None:
            cursor.drawn_from["generator"] = _text(generator.get_state())
        yield
        return
    cursor.drawn_from, cursor.again = dict(cursor.again), None
    now = torch.get_rng_state()
    torch.set_rng_state(_tensor(cursor.drawn_from["torch"]))
    if generator is not None and "generator" in cursor.drawn_from:
        generator.set_state(_tensor(cursor.drawn_from["generator"]))
    try:
        yield
    finally:
        torch.set_rng_state(now)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
