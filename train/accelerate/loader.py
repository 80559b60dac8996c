"""A script's DataLoader on data-parallel replicas.

Accelerate's own loader cuts the data over replicas, on the first rank of each, its leader; peers
receive. A batch has the loader's ``batch_size`` times ``num_micro_batches`` rows, unless batches
are split. Rows that only fill an epoch's last batch have no label, so that they do not count.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.data_loader import (
    DataLoaderDispatcher,
    DataLoaderStateMixin,
    SeedableRandomSampler,
    prepare_data_loader,
    skip_first_batches,
)
from accelerate.state import GradientState
from accelerate.utils import DataLoaderConfiguration, send_to_device

from ..errors import TrainError
from ..patches.accelerate import leaders_alone
from .order import Cursor, Ordered, OrderedBatches, drawing, skip_draws
from .replica import Replica

IGNORED = -100  # label of a position that does not count, as in transformers
_END = "the end"  # in place of a batch


@dataclass(frozen=True, slots=True)
class Share:
    """How an epoch is cut."""

    micro_batches: int  # that a batch is made of
    dp: int
    dp_rank: int
    config: DataLoaderConfiguration
    rng_types: tuple[Any, ...] = ()


class PreparedLoader(DataLoaderStateMixin):
    """What ``prepare`` makes of a DataLoader."""

    def __init__(
        self,
        given: torch.utils.data.DataLoader[Any],
        inner: Any,
        share: Share,
        replica: Replica,
        device: torch.device | None,
        cursor: Cursor,
        skips: int = 0,
    ) -> None:
        """``inner`` is Accelerate's loader, which only leaders iterate; it ``skips`` batches."""
        self.given, self.inner, self.share, self.replica = given, inner, share, replica
        self.device, self.cursor, self.gradient_state = device, cursor, GradientState()
        self.skips, self.first_skip = skips, 0  # batches; of the first epoch alone
        self.source: PreparedLoader | None = None  # whose epoch this one ends
        self._drop_last = given.drop_last
        self.reset()

    @classmethod
    def of(
        cls,
        given: torch.utils.data.DataLoader[Any],
        share: Share,
        replica: Replica,
        device: torch.device,
        place: bool = True,
    ) -> PreparedLoader:
        """``place``: batches are put on the device."""
        if isinstance(given.sampler, torch.utils.data.DistributedSampler):
            raise TrainError(
                "prepare: the DataLoader's DistributedSampler splits data that prepare() splits; "
                "leave it out"
            )
        cursor, config = Cursor(), share.config
        stream = isinstance(given.dataset, torch.utils.data.IterableDataset)
        dispatch = stream if config.dispatch_batches is None else config.dispatch_batches
        inner = prepare_data_loader(
            _rebuilt(given, share, None if dispatch else replica, cursor),
            device,
            num_processes=share.dp,
            process_index=share.dp_rank,
            split_batches=config.split_batches,
            put_on_device=dispatch,  # others are handed to peers first
            rng_types=list(share.rng_types),
            dispatch_batches=dispatch,
            even_batches=share.dp > 1,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
        )
        return cls(given, inner, share, replica, device if place else None, cursor)

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "given"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # as Accelerate's loaders, an instance of DataLoader
        return torch.utils.data.DataLoader

    def __len__(self) -> int:
        return len(self.inner)

    @property
    def batch_size(self) -> int | None:
        """Rows that this rank gets at once."""
        total = self.total_batch_size
        return None if total is None else total // self.share.dp

    @property
    def total_batch_size(self) -> int | None:
        """Rows of all data-parallel ranks; None where batches differ."""
        if self.given.batch_size is None:
            return None
        if self.share.config.split_batches:
            return self.given.batch_size
        return self.given.batch_size * self.share.micro_batches * self.share.dp

    @property
    def total_dataset_length(self) -> int:
        """Rows in the dataset."""
        return len(self.given.dataset)  # type: ignore[arg-type]

    @property
    def batches_seen(self) -> int:
        """Batches of the epoch under way; after ``load_state`` how many to skip."""
        return self.cursor.batches

    @property
    def epoch_length(self) -> int:
        """Batches in a whole epoch."""
        whole = self if self.source is None else self.source
        return len(whole.inner)

    def set_epoch(self, epoch: int) -> None:
        """The epoch that comes next, for samplers and data sets that have one."""
        self.cursor.epoch, self.cursor.batches, self.cursor.broken_off = epoch, 0, False
        self.inner.set_epoch(epoch)

    def set_sampler(self, sampler: Any) -> None:
        """Another sampler of rows, in the order of the first leader's."""
        self.inner.set_sampler(Ordered(sampler, self.replica, self.cursor))

    def begin(self) -> None:
        """Called when an epoch begins: Accelerate's states know that this loader is iterated."""
        self.reset()
        self.remainder = self._known_remainder()
        self.gradient_state._add_dataloader(self)

    def _known_remainder(self) -> int:
        """Rows of an epoch beyond whole batches; -1 where it is not known before its end."""
        total = self.total_batch_size
        if self._drop_last or total is None or self.given.sampler is None:
            return -1
        try:
            return len(self.given.sampler) % total  # type: ignore[arg-type]
        except TypeError:  # a stream
            return -1

    def __iter__(self) -> Iterator[Any]:
        if self.first_skip:
            first, self.first_skip = self.skipping(self.first_skip), 0
            yield from first
            return
        cursor = self.cursor
        cursor.batches, cursor.broken_off = self.skips, True
        self.begin()
        batches = self._read() if self.replica.is_leader else iter(())
        try:
            while True:
                batch, self.end_of_dataloader, remainder, state = self.replica.share(
                    lambda: next(batches)
                )
                if not self.replica.is_leader:
                    torch.set_rng_state(state)  # a script's own draws are the same on all ranks
                if _is_end(batch):
                    break
                if remainder is not None:
                    self.remainder = remainder
                cursor.batches += 1
                batch = self._without_filler(batch)
                if self.device is not None:
                    batch = send_to_device(batch, self.device)
                yield batch
            cursor.epoch, cursor.batches, cursor.broken_off = cursor.epoch + 1, 0, False
        finally:
            self.end()

    def _read(self) -> Iterator[tuple[Any, bool, int | None, torch.Tensor]]:
        """On a leader: batch, whether it is the last, its real rows, and torch's random state."""
        generator = self.given.generator or getattr(self.given.sampler, "generator", None)
        skip_draws(self.cursor, self.given)
        self.inner.iteration = self.cursor.epoch
        dispatched = type(self.inner) is DataLoaderDispatcher
        with leaders_alone(), drawing(self.cursor, generator):
            batches = iter(self.inner)
            batch = next(batches, _END)
        if batch is None:  # older releases of Accelerate give this for an empty loader
            batch = _END
        self.inner.end()  # this loader stands for it in Accelerate's states
        while not _is_end(batch):
            last = self.inner.end_of_dataloader
            remainder = self.inner.remainder if dispatched and last else None
            yield batch, last, remainder, torch.get_rng_state()
            with leaders_alone():
                batch = next(batches, _END)
        yield _END, True, None, torch.get_rng_state()

    def _without_filler(self, batch: Any) -> Any:
        """The last batch with no labels in the rows that fill it up."""
        if not self.end_of_dataloader or self.remainder <= 0 or self.share.dp == 1:
            return batch
        labels = batch.get("labels") if isinstance(batch, MutableMapping) else None
        if not isinstance(labels, torch.Tensor) or not labels.dim():
            return batch
        rows = len(labels)
        real = max(0, min(rows, self.remainder - self.share.dp_rank * rows))
        if real < rows:
            batch = copy.copy(batch)
            batch["labels"] = labels.clone()
            batch["labels"][real:] = IGNORED
        return batch

    def skipping(self, batches: int) -> PreparedLoader:
        """The same loader, its first epoch without the first ``batches``."""
        inner = skip_first_batches(self.inner, batches)
        made = PreparedLoader(
            self.given, inner, self.share, self.replica, self.device, self.cursor, batches
        )
        made.source = self if self.source is None else self.source
        return made

    def state(self, pending: int) -> dict[str, Any]:
        """Where it is, for a checkpoint; the last ``pending`` batches are to be seen again."""
        batches, total = self.cursor.batches - pending, self.total_batch_size
        return {
            "epoch": self.cursor.epoch,
            "batches": batches,
            "samples": batches * total if total else batches,
            "order": self._order(),
            **({} if self.cursor.old_seed is None else {"seed": self.cursor.old_seed}),
        }

    def _order(self) -> dict[str, str]:
        """What the order of the epoch under way came from; empty between epochs."""
        if self.cursor.again is not None:  # not begun since it was loaded
            return dict(self.cursor.again)
        return dict(self.cursor.drawn_from) if self.cursor.broken_off else {}

    def restore(self, state: Mapping[str, Any]) -> int:
        """Go to the epoch of ``state``; ``skip_first_batches`` goes to the batch.

        Returns how many samples will be seen again, where the global batch is another one.
        """
        self.set_epoch(int(state["epoch"]))
        self.cursor.again = state.get("order") or None
        self.cursor.old_seed = int(state["seed"]) if "seed" in state else None
        self.cursor.batches, again = divmod(int(state["samples"]), self.total_batch_size or 1)
        return again

    def start_after(self, samples: int) -> None:
        """Begin after ``samples`` rows that an earlier run has seen (``consumed_samples``)."""
        full = self.total_batch_size
        if full is None:
            raise TrainError("consumed_samples: batches of a batch_sampler have no size to count")
        batches, rest = divmod(samples, full)
        if rest:
            low = max(batches, 1) * full
            raise TrainError(
                f"consumed_samples {samples} is not a multiple of the global batch of {full}; "
                f"{low} would be"
            )
        if not isinstance(self.given.dataset, torch.utils.data.IterableDataset):
            self.cursor.to_draw, batches = divmod(batches, max(1, self.epoch_length))
            self.set_epoch(self.cursor.to_draw)
        self.first_skip = batches


def _is_end(batch: object) -> bool:
    return isinstance(batch, str) and batch == _END


def _rebuilt(
    given: torch.utils.data.DataLoader[Any], share: Share, replica: Replica | None, cursor: Cursor
) -> torch.utils.data.DataLoader[Any]:
    """The loader with whole batches of rows, and with an order that leaders agree on."""
    every = 1 if share.config.split_batches else share.micro_batches
    how: dict[str, Any] = {
        name: getattr(given, name)
        for name in (
            "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn",
            "multiprocessing_context", "generator", "prefetch_factor", "persistent_workers",
        )
    }  # fmt: skip
    if isinstance(given.dataset, torch.utils.data.IterableDataset):
        size = None if given.batch_size is None else given.batch_size * every
        return torch.utils.data.DataLoader(
            given.dataset, batch_size=size, drop_last=given.drop_last, **how
        )
    if given.batch_size is None:
        return _with_batches(given, every, replica, cursor, how)
    sampler = given.sampler
    if share.config.use_seedable_sampler and isinstance(sampler, torch.utils.data.RandomSampler):
        sampler = SeedableRandomSampler(
            data_source=sampler.data_source, replacement=sampler.replacement,
            num_samples=sampler._num_samples, generator=sampler.generator,
            data_seed=share.config.data_seed,
        )  # fmt: skip
    return torch.utils.data.DataLoader(
        given.dataset, batch_size=given.batch_size * every, drop_last=given.drop_last,
        sampler=Ordered(sampler, replica, cursor), **how,
    )  # fmt: skip


def _with_batches(
    given: torch.utils.data.DataLoader[Any],
    every: int,
    replica: Replica | None,
    cursor: Cursor,
    how: Mapping[str, Any],
) -> torch.utils.data.DataLoader[Any]:
    """A loader whose batches come from a sampler of batches of its own."""
    if every > 1:
        raise TrainError(
            "prepare: a DataLoader with a batch_sampler of its own cannot be rebuilt to "
            f"{every} micro-batches; give it batch_size instead"
        )
    if given.batch_sampler is not None:
        batches = OrderedBatches(given.batch_sampler, replica, cursor)
        return torch.utils.data.DataLoader(given.dataset, batch_sampler=batches, **how)
    if not isinstance(given.sampler, torch.utils.data.BatchSampler):
        raise TrainError(
            "prepare: a DataLoader with batch_size=None needs a sampler of batches; give it a "
            "BatchSampler, or a batch_size"
        )
    batches = OrderedBatches(given.sampler, replica, cursor)
    return torch.utils.data.DataLoader(given.dataset, batch_size=None, sampler=batches, **how)
