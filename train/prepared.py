"""What ``Accelerator.prepare`` returns: loader, optimizer, scheduler and model of a rank.

They look like the objects that a script gave, and drive the engine. Rows of a batch are assigned
as in ``data.py``: row ``(m * dp + r) * b + j`` of a global batch is row j of micro-batch m on
data-parallel rank r, so that a run on another number of ranks sees the same global batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .data import _rows
from .engine import Batch, Engine, StepResult
from .errors import TrainError

if TYPE_CHECKING:
    from .accelerator import Accelerator

IGNORED = -100  # label of a position that does not count, as in transformers


class PreparedLoader:
    """A DataLoader rebuilt to this rank's share of global batches."""

    def __init__(
        self,
        loader: torch.utils.data.DataLoader[Any],
        *,
        micro_batch_size: int,
        num_micro_batches: int,
        dp_rank: int,
        dp_size: int,
        seed: int,
        control: dist.ProcessGroup | None,
        skip: int = 0,
    ) -> None:
        if loader.batch_size is None:
            raise TrainError(
                "prepare: a DataLoader with a batch_sampler of its own cannot be rebuilt to "
                "micro-batches; give it batch_size instead"
            )
        self.loader, self.dataset = loader, loader.dataset
        self.micro_batch_size, self.num_micro_batches = micro_batch_size, num_micro_batches
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.seed, self.control, self.skip = seed, control, skip
        self.epoch = 0
        self.batches_seen = 0
        self.remainder = -1  # real rows of the last global batch; -1 before it
        self.end_of_dataloader = False
        self._at_last: Callable[[bool], None] = lambda last: None

    @property
    def batch_size(self) -> int:
        """Rows that this rank gets at once: micro-batch size x number of micro-batches."""
        return self.micro_batch_size * self.num_micro_batches

    @property
    def total_batch_size(self) -> int:
        """Rows of all data-parallel ranks."""
        return self.batch_size * self.dp_size

    @property
    def total_dataset_length(self) -> int:
        """Rows in the dataset."""
        return len(self.dataset)  # type: ignore[arg-type]

    def __len__(self) -> int:
        rows, full = len(self._sampler), self.total_batch_size  # type: ignore[arg-type]
        count = rows // full if self.loader.drop_last else -(-rows // full)
        return max(0, count - self.skip)

    @property
    def _sampler(self) -> Iterable[int]:
        return self.loader.sampler

    def set_epoch(self, epoch: int) -> None:
        """The epoch whose order comes next."""
        self.epoch = epoch
        for thing in (self.loader.sampler, self.dataset):
            if hasattr(thing, "set_epoch"):
                thing.set_epoch(epoch)

    def _order(self) -> list[int]:
        """The epoch's order of rows, the same on every rank and a function of (seed, epoch)."""
        sampler = self.loader.sampler
        if isinstance(sampler, torch.utils.data.RandomSampler):
            generator = torch.Generator().manual_seed((self.seed + self.epoch) % (1 << 63))
            old, sampler.generator = sampler.generator, generator
            try:
                return list(sampler)
            finally:
                sampler.generator = old
        return list(sampler)

    def __iter__(self) -> Iterator[Mapping[str, torch.Tensor]]:
        self.batches_seen, self.end_of_dataloader = self.skip, False
        batches = self._streamed() if self._is_stream else self._indexed()
        current = next(batches, None)
        while current is not None:
            following = next(batches, None)
            self.end_of_dataloader = following is None
            self.batches_seen += 1
            yield current
            current = following
        self.epoch += 1

    @property
    def _is_stream(self) -> bool:
        return isinstance(self.dataset, torch.utils.data.IterableDataset)

    def _indexed(self) -> Iterator[Any]:
        """This rank's rows of every global batch, loaded by torch's own workers."""
        order, full = self._order(), self.total_batch_size
        whole = len(order) // full * full
        self.remainder = len(order) - whole or full
        if len(order) > whole and not self.loader.drop_last:
            short = full - (len(order) - whole)  # the last batch is filled from the start
            filled = order * (1 + short // max(1, len(order)))
            order = order + filled[:short]
            whole += full
        mine = [
            [order[start + i] for i in self._positions()]
            for start in range(self.skip * full, whole, full)
        ]
        again = torch.utils.data.DataLoader(
            self.dataset, batch_sampler=mine, num_workers=self.loader.num_workers,
            collate_fn=self.loader.collate_fn, pin_memory=self.loader.pin_memory,
            worker_init_fn=self.loader.worker_init_fn,
        )  # fmt: skip
        yield from again

    def _streamed(self) -> Iterator[Any]:
        """The same of a stream, which every rank reads whole."""
        full, rows = self.total_batch_size, []
        first: list[Any] = []
        seen = 0
        for row in self.dataset:
            rows.append(row)
            if len(first) < full:
                first.append(row)
            if len(rows) == full:
                seen += 1
                if seen > self.skip:
                    yield self.loader.collate_fn([rows[i] for i in self._positions()])
                rows = []
        self.remainder = len(rows) or full
        if rows and not self.loader.drop_last:
            while len(rows) < full:
                rows += first[: full - len(rows)]
            yield self.loader.collate_fn([rows[i] for i in self._positions()])

    def _positions(self) -> list[int]:
        """Places of this rank's rows in a global batch, micro-batch by micro-batch."""
        return [
            i
            for micro in range(self.num_micro_batches)
            for i in _rows(micro, self.micro_batch_size, self.dp_rank, self.dp_size)
        ]

    def skipping(self, batches: int) -> PreparedLoader:
        """The same loader, its first epoch without the first ``batches``."""
        made = PreparedLoader(
            self.loader, micro_batch_size=self.micro_batch_size,
            num_micro_batches=self.num_micro_batches, dp_rank=self.dp_rank, dp_size=self.dp_size,
            seed=self.seed, control=self.control, skip=batches,
        )  # fmt: skip
        made.epoch = self.epoch
        return made

    def state(self) -> dict[str, int]:
        """Where it is, for a checkpoint."""
        return {"epoch": self.epoch, "batches": self.batches_seen, "seed": self.seed}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to the epoch of ``state``; ``skip_first_batches`` goes to the batch."""
        self.seed = int(state["seed"])
        self.set_epoch(int(state["epoch"]))


class PreparedOptimizer:
    """The user's optimizer, carried out by megatron-core's."""

    def __init__(
        self, accelerator: Accelerator, engine: Engine, original: torch.optim.Optimizer
    ) -> None:
        self.accelerator, self.engine, self.original = accelerator, engine, original
        self.last: StepResult | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The user's groups; what is set here counts at the next step."""
        return self.original.param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        return self.original.defaults

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing because a gradient overflowed."""
        return self.last is not None and self.last.skipped

    def step(self, closure: object = None) -> None:
        """Step, if this call ends an accumulation."""
        if closure is not None:
            raise TrainError("optimizer.step(closure): closures cannot be run in a pipeline")
        if not self.accelerator.sync_gradients:
            return
        self.copy_options()
        self.last = self.engine.step()
        self.accelerator.after_step(self.last)

    def copy_options(self) -> None:
        """Hand learning rates and the like, which schedulers set, to megatron's groups."""
        assert self.engine.optimizer is not None
        for group in self.engine.optimizer.param_groups:
            theirs = self.original.param_groups[group["group_index"]]
            for key in ("lr", "weight_decay", "betas", "eps", "momentum", "nesterov", "dampening"):
                if key in theirs:
                    group[key] = theirs[key]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, if this call ends an accumulation."""
        if self.accelerator.sync_gradients:
            self.engine.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Hyper-parameters only: masters and moments are saved by ``save_state``."""
        options = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        return {"param_groups": options}


class PreparedScheduler:
    """A learning-rate scheduler of torch or transformers; steps once per optimizer step."""

    def __init__(self, accelerator: Accelerator, scheduler: Any) -> None:
        self.accelerator, self.scheduler = accelerator, scheduler

    def step(self, *args: Any) -> None:
        """Advance, if gradients were synchronized and the optimizer's step was not skipped."""
        if self.accelerator.sync_gradients and not self.accelerator.optimizer_step_was_skipped:
            self.scheduler.step(*args)

    def get_last_lr(self) -> list[float]:
        return list(self.scheduler.get_last_lr())

    def state_dict(self) -> dict[str, Any]:
        return {k: v for k, v in self.scheduler.state_dict().items() if not _is_opaque(v)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scheduler.load_state_dict({**self.scheduler.state_dict(), **state})


def _is_opaque(value: object) -> bool:
    """Whether JSON cannot hold a scheduler's value (functions, for example)."""
    if isinstance(value, (list, tuple)):
        return any(_is_opaque(item) for item in value)
    return not (value is None or isinstance(value, (int, float, str, bool)))


class PreparedModel:
    """A transformers model, trained as this rank's part of a megatron-core GPTModel."""

    def __init__(self, accelerator: Accelerator, engine: Engine, original: Any) -> None:
        self.accelerator, self.engine, self.original = accelerator, engine, original
        self.config = original.config
        self.training = True

    def train(self, mode: bool = True) -> PreparedModel:
        """Forward runs the whole schedule, backward included."""
        self.training = mode
        return self

    def eval(self) -> PreparedModel:
        """Forward runs forward only."""
        return self.train(False)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """This rank's parameters."""
        return iter(self.engine.named.values())

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters by stored name."""
        return iter(self.engine.named.items())

    def __call__(self, **batch: Any) -> Any:
        """One forward (and in train mode backward) of this rank's rows.

        Takes input_ids, labels, attention_mask and position_ids, [rows, sequence]. Returns an
        object with ``loss`` and, where they are asked for, ``logits`` [rows, sequence, vocab].
        """
        from transformers.modeling_outputs import CausalLMOutput

        options = self.accelerator.settings
        wants_logits = options.model.return_logits or batch.get("labels") is None
        if self.training and batch.get("labels") is None:
            raise TrainError("the model is in train mode and the batch has no labels; add them, "
                             "or call model.eval()")  # fmt: skip
        micro = self.accelerator.micro_batch_size
        micros, length = self._micro_batches(batch, micro)
        loss, logits = self.engine.forward_backward(
            micros,
            forward_only=not self.training,
            reduce=self.accelerator.sync_gradients,
            weight=1.0 / self.accelerator.gradient_accumulation_steps,
            loss_function=self.accelerator.loss_function,
            collect=wants_logits,
        )
        found = torch.tensor(loss, device=self.accelerator.device, requires_grad=self.training)
        if self.training:
            self.accelerator.remember_loss(found)
        out = self.engine.whole_logits(logits, length) if wants_logits else None
        return CausalLMOutput(loss=found if batch.get("labels") is not None else None, logits=out)

    def _micro_batches(self, batch: dict[str, Any], micro: int) -> tuple[list[Batch], int]:
        """The rows of a script's batch as engine micro-batches, and their sequence length."""
        known = {"input_ids", "labels", "attention_mask", "position_ids"}
        surplus = {k for k, v in batch.items() if k not in known and v is not None}
        if surplus:
            raise TrainError(
                f"the model takes {', '.join(sorted(known))}; the batch also has "
                f"{', '.join(sorted(surplus))}: remove them in the collate function"
            )
        tokens = batch["input_ids"]
        rows, length = tokens.shape
        if rows % micro:
            raise TrainError(
                f"a batch of {rows} rows does not divide into micro-batches of {micro}; "
                "use the loader that prepare() returned"
            )
        full = as_engine_batch(batch, self.engine.sequence_multiple)
        return [
            {k: v[i : i + micro] for k, v in full.items()} for i in range(0, rows, micro)
        ], length


def as_engine_batch(batch: Mapping[str, Any], multiple: int) -> dict[str, torch.Tensor]:
    """Labels shifted, -100 masked, the sequence padded to a multiple (sequence parallelism).

    Position i predicts token i + 1, so the last position never counts.
    """
    tokens = batch["input_ids"]
    rows, length = tokens.shape
    labels = batch.get("labels")
    labels = torch.full_like(tokens, IGNORED) if labels is None else labels.to(tokens.device)
    shifted = torch.full_like(labels, IGNORED)
    shifted[:, :-1] = labels[:, 1:]
    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(length, device=tokens.device).expand(rows, length)
    made = {
        "tokens": tokens,
        "labels": shifted.clamp_min(0),
        "loss_mask": (shifted != IGNORED).float(),
        "position_ids": positions,
    }
    mask = batch.get("attention_mask")
    if mask is not None and not bool((mask != 0).all()):
        made["attention_mask"] = mask
    short = -length % multiple
    if short:
        made = {k: torch.nn.functional.pad(v, (0, short)) for k, v in made.items()}
    return {k: v.contiguous() for k, v in made.items()}


def group_names(
    original: torch.optim.Optimizer, names: Mapping[int, str]
) -> list[tuple[set[str], dict[str, Any]]]:
    """Each of the user's groups as (names of the model's parameters, options)."""
    found = []
    for group in original.param_groups:
        inside, strangers = set(), 0
        for param in group["params"]:
            if id(param) in names:
                inside.add(names[id(param)])
            else:
                strangers += 1
        if strangers:
            raise TrainError(
                f"prepare: the optimizer holds {strangers} parameters that the model does not "
                "have; make it from model.parameters()"
            )
        found.append((inside, {k: v for k, v in group.items() if k != "params"}))
    return found


def stored_groups(
    parts: Mapping[str, Sequence[str]], groups: Sequence[tuple[set[str], dict[str, Any]]]
) -> dict[str, int]:
    """Stored name -> group index, -1 where no group has it.

    ``parts`` maps a stored tensor to the logical tensors packed into it, which must share a
    group: one tensor has one learning rate.
    """
    found = {}
    for stored, logical in parts.items():
        inside = {
            next((i for i, (names, _) in enumerate(groups) if fqn in names), -1) for fqn in logical
        }
        if len(inside) > 1:
            raise TrainError(
                f"prepare: {', '.join(logical)} are in different param groups, and megatron-core "
                f"holds them as one tensor ({stored}); put them into one group"
            )
        found[stored] = inside.pop()
    return found
