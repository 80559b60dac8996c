"""A script's DataLoader as this rank's share of global batches.

Rows of a global batch are assigned as in ``data.py``: row ``(m * dp + r) * b + j`` is row j of
micro-batch m on data-parallel rank r, so that a run on another number of ranks sees the same
global batches. The order of an epoch is a function of (seed, epoch) alone, and the same on every
rank. Rows that fill up an epoch's last batch have no label, so that they do not count.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..data.samples import epoch_seed, rows_of
from ..errors import TrainError

IGNORED = -100  # label of a position that does not count, as in transformers


@dataclass(frozen=True, slots=True)
class Share:
    """Which rows of a global batch are this rank's."""

    micro_batch_size: int
    num_micro_batches: int
    dp_rank: int
    dp_size: int

    @property
    def rank_rows(self) -> int:
        """Rows of one data-parallel rank."""
        return self.micro_batch_size * self.num_micro_batches

    @property
    def total_rows(self) -> int:
        """Rows of all data-parallel ranks."""
        return self.rank_rows * self.dp_size

    def places(self, dp_rank: int | None = None) -> list[int]:
        """Places in a global batch of a rank's rows, micro-batch by micro-batch."""
        rank = self.dp_rank if dp_rank is None else dp_rank
        return [
            place
            for micro in range(self.num_micro_batches)
            for place in rows_of(micro, self.micro_batch_size, rank, self.dp_size)
        ]


@dataclass(slots=True)
class Cursor:
    """Where in the data a loader is; loaders that skip batches share it with their source."""

    seed: int
    epoch: int = 0  # the epoch under way, or the next
    batches: int = 0  # of that epoch that were handed out
    broken_off: bool = False  # an iteration began and has not come to its end


class PreparedLoader:
    """What ``prepare`` makes of a DataLoader."""

    def __init__(
        self,
        loader: torch.utils.data.DataLoader[Any],
        share: Share,
        cursor: Cursor,
        *,
        device: torch.device,
        control: dist.ProcessGroup | None,
        active: list[PreparedLoader],
        skip: int = 0,
    ) -> None:
        """``active`` holds the loaders that are being iterated, the innermost last."""
        if loader.batch_size is None:
            raise TrainError(
                "prepare: a DataLoader with a batch_sampler of its own cannot be rebuilt to "
                "micro-batches; give it batch_size instead"
            )
        if isinstance(loader.sampler, torch.utils.data.DistributedSampler):
            raise TrainError(
                "prepare: the DataLoader's DistributedSampler splits data that prepare() splits; "
                "leave it out"
            )
        self.loader, self.dataset, self.share, self.cursor = loader, loader.dataset, share, cursor
        self.device, self.control, self.skip = device, control, skip
        self.remainder = -1  # real rows of the last global batch; -1 where it is not known
        self.end_of_dataloader = False
        self._active = active

    @property
    def batch_size(self) -> int:
        """Rows that this rank gets at once: micro-batch size x number of micro-batches."""
        return self.share.rank_rows

    @property
    def total_batch_size(self) -> int:
        """Rows of all data-parallel ranks."""
        return self.share.total_rows

    @property
    def total_dataset_length(self) -> int:
        """Rows in the dataset."""
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def batches_seen(self) -> int:
        """Batches of the epoch under way; after ``load_state`` how many to skip."""
        return self.cursor.batches

    def __len__(self) -> int:
        return max(0, self.epoch_length - self.skip)

    @property
    def epoch_length(self) -> int:
        """Batches in a whole epoch."""
        rows, full = len(self.loader.sampler), self.total_batch_size  # type: ignore[arg-type]
        return rows // full if self.loader.drop_last else -(-rows // full)

    def set_epoch(self, epoch: int) -> None:
        """The epoch whose order comes next."""
        self.cursor.epoch, self.cursor.batches, self.cursor.broken_off = epoch, 0, False

    def __iter__(self) -> Iterator[Any]:
        cursor, first = self.cursor, self.skip
        self.skip = 0  # a later epoch is whole
        cursor.epoch += cursor.broken_off  # every iteration is an epoch with an order of its own
        cursor.batches, cursor.broken_off, self.end_of_dataloader = first, True, False
        for thing in (self.loader.sampler, self.dataset):
            if hasattr(thing, "set_epoch"):
                thing.set_epoch(cursor.epoch)
        batches = self._streamed(first) if self._is_stream else self._indexed(first)
        self._active.append(self)
        try:
            for batch, is_last in batches:
                self.end_of_dataloader = is_last
                cursor.batches += 1
                yield _map(self._without_filler(batch), lambda t: t.to(self.device))
            cursor.epoch, cursor.batches, cursor.broken_off = cursor.epoch + 1, 0, False
        finally:
            self._active.remove(self)

    @property
    def _is_stream(self) -> bool:
        return isinstance(self.dataset, torch.utils.data.IterableDataset)

    def _order(self) -> list[Any]:
        """The epoch's order of rows."""
        sampler, mixed = self.loader.sampler, epoch_seed(self.cursor.seed, self.cursor.epoch)
        if isinstance(sampler, torch.utils.data.SequentialSampler):
            return list(sampler)
        if hasattr(sampler, "generator"):
            old, sampler.generator = sampler.generator, torch.Generator().manual_seed(mixed)
            try:
                order = list(sampler)
            finally:
                sampler.generator = old
            if isinstance(sampler, torch.utils.data.RandomSampler):
                return order
        else:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(mixed)
                order = list(sampler)
        box = [order]  # a sampler of another kind may draw from anywhere
        dist.broadcast_object_list(box, 0, group=self.control)
        return box[0]

    def _indexed(self, first: int) -> Iterator[tuple[Any, bool]]:
        """This rank's rows of every global batch from ``first`` on, loaded by torch's workers."""
        order, full = self._order(), self.total_batch_size
        whole = len(order) // full * full
        self.remainder = full if self.loader.drop_last else len(order) - whole or full
        if len(order) > whole and not self.loader.drop_last:
            short = full - (len(order) - whole)  # the last batch is filled from the start
            order = order + (order * (1 + short // len(order)))[:short]
            whole += full
        starts = range(first * full, whole, full)
        places = self.share.places()
        mine = [[order[start + place] for place in places] for start in starts]
        for number, batch in enumerate(self._loading(mine)):
            yield batch, number == len(mine) - 1

    def _loading(self, batches: list[list[Any]]) -> Iterable[Any]:
        """A loader of these rows with the script's settings."""
        theirs = self.loader
        # what torch draws for its workers must not come from the state that dropout draws from
        mixed = epoch_seed(self.cursor.seed + 1, self.cursor.epoch)
        return torch.utils.data.DataLoader(
            self.dataset, batch_sampler=batches, num_workers=theirs.num_workers,
            collate_fn=theirs.collate_fn, pin_memory=theirs.pin_memory, timeout=theirs.timeout,
            worker_init_fn=theirs.worker_init_fn, prefetch_factor=theirs.prefetch_factor,
            multiprocessing_context=theirs.multiprocessing_context,
            generator=torch.Generator().manual_seed(mixed),
        )  # fmt: skip

    def _streamed(self, first: int) -> Iterator[tuple[Any, bool]]:
        """The same of a stream, which every rank reads whole, one batch ahead."""
        places, collate = self.share.places(), self.loader.collate_fn
        ahead: list[Any] | None = None
        for number, rows in enumerate(self._stream_of_rows()):
            if ahead is not None:
                yield collate(ahead), False
            ahead = [rows[place] for place in places] if number >= first else None
        if ahead is not None:
            yield collate(ahead), True

    def _stream_of_rows(self) -> Iterator[list[Any]]:
        """Global batches of a stream; the last is filled from the start of the stream."""
        full, rows = self.total_batch_size, []
        start: list[Any] = []
        self.remainder = full
        for row in self.dataset:  # type: ignore[attr-defined]
            rows.append(row)
            if len(start) < full:
                start.append(row)
            if len(rows) == full:
                yield rows
                rows = []
        if rows and not self.loader.drop_last:
            self.remainder = len(rows)
            while len(rows) < full:
                rows += start[: full - len(rows)]
            yield rows

    def _without_filler(self, batch: Any) -> Any:
        """The last batch with no labels in the rows that fill it up."""
        if not self.end_of_dataloader or self.remainder == self.total_batch_size:
            return batch
        labels = batch.get("labels") if isinstance(batch, MutableMapping) else None
        if isinstance(labels, torch.Tensor) and labels.shape[:1] == (self.batch_size,):
            filler = [k for k, place in enumerate(self.share.places()) if place >= self.remainder]
            batch = copy.copy(batch)
            batch["labels"] = labels.clone()
            batch["labels"][filler] = IGNORED
        return batch

    def skipping(self, batches: int) -> PreparedLoader:
        """The same loader, its first epoch without the first ``batches``."""
        return PreparedLoader(
            self.loader, self.share, self.cursor, device=self.device, control=self.control,
            active=self._active, skip=batches,
        )  # fmt: skip

    def state(self, pending: int) -> dict[str, int]:
        """Where it is, for a checkpoint; the last ``pending`` batches are to be seen again."""
        batches = self.cursor.batches - pending
        return {
            "epoch": self.cursor.epoch,
            "batches": batches,
            "samples": batches * self.total_batch_size,
            "seed": self.cursor.seed,
        }

    def restore(self, state: Mapping[str, Any]) -> int:
        """Go to the epoch of ``state``; ``skip_first_batches`` goes to the batch.

        Returns how many samples will be seen again, where the global batch is another one.
        """
        self.set_epoch(int(state["epoch"]))
        self.cursor.seed, self.skip = int(state["seed"]), 0
        self.cursor.batches, again = divmod(int(state["samples"]), self.total_batch_size)
        return again

    def start_after(self, samples: int) -> None:
        """Begin after ``samples`` rows that an earlier run has seen (``consumed_samples``)."""
        full = self.total_batch_size
        batches, rest = divmod(samples, full)
        if rest:
            low = max(batches, 1) * full
            raise TrainError(
                f"consumed_samples {samples} is not a multiple of the global batch of {full}; "
                f"{low} would be"
            )
        if not self._is_stream:
            self.cursor.epoch, batches = divmod(batches, max(1, self.epoch_length))
        self.skip = batches


def _map(data: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply to every tensor of a nested structure; leave all else as it is."""
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, MutableMapping):
        made = copy.copy(data)
        for key in data:
            made[key] = _map(data[key], function)
        return made
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_map(value, function) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(_map(value, function) for value in data)
    return data
