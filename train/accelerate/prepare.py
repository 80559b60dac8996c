"""What ``Accelerator.prepare`` returns for a model, an optimizer and a scheduler.

They look like the objects that a script gave, and drive the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch

from ..config.schema import TrainConfig
from ..core.engine import Engine, StepResult
from ..core.losses import MicroBatch, described
from ..errors import TrainError
from .loader import IGNORED
from .param_groups import HANDED_ON


class Owner(Protocol):
    """What the objects below ask of the Accelerator that made them."""

    sync_gradients: bool
    gradient_accumulation_steps: int
    settings: TrainConfig

    @property
    def device(self) -> torch.device: ...

    @property
    def longest(self) -> tuple[int | None, str]: ...

    @property
    def optimizer_step_was_skipped(self) -> bool: ...

    def rows_of_micro_batch(self, rows: int) -> int: ...

    def remember_loss(self, value: float, training: bool) -> torch.Tensor: ...

    def evaluated(self) -> None: ...

    def after_step(self, result: StepResult) -> None: ...


class PreparedOptimizer(torch.optim.Optimizer):
    """The user's optimizer, carried out by megatron-core's.

    Schedulers of torch insist on its base class, whose own state is not used.
    """

    def __init__(self, accelerator: Owner, engine: Engine, original: torch.optim.Optimizer) -> None:
        self.accelerator, self.engine, self.original = accelerator, engine, original
        self.last: StepResult | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The user's groups; what is set here counts at the next step."""
        return self.original.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.original.defaults

    @property
    def state(self) -> Mapping[str, Any]:  # type: ignore[override]
        """Empty: moments lie in megatron's optimizer."""
        return {}

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing because a gradient overflowed."""
        return self.last is not None and self.last.skipped

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Step, if this call ends an accumulation."""
        if closure is not None:
            raise TrainError("optimizer.step(closure): closures cannot be run in a pipeline")
        if not self.accelerator.sync_gradients:
            return
        self.copy_options()
        self.last = self.engine.step()
        # torch's schedulers ask the optimizer that they were made with whether it has stepped
        self.original._opt_called = True  # type: ignore[attr-defined]
        self.accelerator.after_step(self.last)

    def copy_options(self) -> None:
        """Hand learning rates and the like, which schedulers set, to megatron's groups."""
        assert self.engine.optimizer is not None
        for group in self.engine.optimizer.param_groups:
            theirs = self.original.param_groups[group["source"]]
            group.update({key: theirs[key] for key in HANDED_ON if key in theirs})
            group["lr"] = group["lr"] * group["lr_mult"]
            group["weight_decay"] = group["weight_decay"] * group["wd_mult"]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, if this call ends an accumulation."""
        if self.accelerator.sync_gradients:
            self.engine.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Hyper-parameters only: masters and moments are saved by ``save_state``."""
        options = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        return {"state": {}, "param_groups": options}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        raise TrainError("the optimizer's state is loaded by accelerator.load_state")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise TrainError("add the param group to the optimizer before prepare()")


class PreparedScheduler:
    """A learning-rate scheduler of torch or transformers; steps once per optimizer step."""

    def __init__(self, accelerator: Owner, scheduler: Any) -> None:
        self.accelerator, self.scheduler = accelerator, scheduler

    def step(self, *args: Any) -> None:
        """Advance, if gradients were synchronized and the optimizer's step was not skipped."""
        if self.accelerator.sync_gradients and not self.accelerator.optimizer_step_was_skipped:
            self.scheduler.step(*args)

    def get_last_lr(self) -> list[float]:
        return list(self.scheduler.get_last_lr())

    def state_dict(self) -> dict[str, Any]:
        """What of its state JSON can hold; the rest are its maker's arguments."""
        found = plain(self.scheduler.state_dict())
        assert isinstance(found, dict)
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scheduler.load_state_dict(_updated(self.scheduler.state_dict(), state))


_OPAQUE = object()


def plain(value: Any) -> Any:
    """``value`` as JSON has it, without dict entries that JSON cannot hold (functions, say)."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        items = {key: plain(part) for key, part in value.items()}
        return {key: part for key, part in items.items() if part is not _OPAQUE}
    if isinstance(value, (list, tuple)):
        parts = [plain(part) for part in value]
        return _OPAQUE if any(part is _OPAQUE for part in parts) else parts
    return _OPAQUE


def _updated(now: Any, saved: Any) -> Any:
    """What ``plain`` gave put back into the state that it was taken from."""
    if isinstance(now, Mapping) and isinstance(saved, Mapping):
        return {**now, **{key: _updated(now.get(key), part) for key, part in saved.items()}}
    if isinstance(now, (list, tuple)) and isinstance(saved, list) and len(now) == len(saved):
        return type(now)(_updated(a, b) for a, b in zip(now, saved, strict=True))
    return saved


class PreparedModel:
    """A transformers model, trained as this rank's part of a megatron-core GPTModel."""

    def __init__(self, accelerator: Owner, engine: Engine, original: Any, handler: Any) -> None:
        """``handler`` is an instance of the plugin's custom_train_step_class, or None."""
        self.accelerator, self.engine, self.original = accelerator, engine, original
        self.config, self.handler = original.config, handler
        self.training = True

    def train(self, mode: bool = True) -> PreparedModel:
        """Forward runs the whole schedule, backward included."""
        if mode and not self.training:
            self.accelerator.evaluated()
        self.training = mode
        return self

    def eval(self) -> PreparedModel:
        """Forward runs forward only."""
        return self.train(False)

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """This rank's parameters."""
        return iter(self.engine.named.values())

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters by stored name."""
        return iter(self.engine.named.items())

    def __call__(self, input_ids: torch.Tensor | None = None, **batch: Any) -> Any:
        """One forward (and in train mode backward) of this rank's rows.

        Takes input_ids, labels, attention_mask and position_ids, [rows, sequence]. Returns an
        object with ``loss``, ``logits`` [rows, sequence, vocab] where they are asked for, and
        ``reported`` where the plugin has a loss or train step of its own.
        """
        if input_ids is not None:
            batch["input_ids"] = input_ids
        if batch.get("input_ids") is None:
            raise TrainError("the model needs input_ids; the batch has " + _listed(batch))
        self._check_length(batch["input_ids"].shape[1])
        trains = self.training and torch.is_grad_enabled()
        how = {
            "forward_only": not self.training,
            "weight": 1.0 / self.accelerator.gradient_accumulation_steps,
        }
        if self.handler is not None:
            return self._custom_call(batch, how)
        labels = batch.get("labels")
        own_batch = self.accelerator.settings.hooks.get_batch
        if trains and labels is None and own_batch is None:
            raise TrainError("the model is in train mode and the batch has no labels; add them, "
                             "or call model.eval()")  # fmt: skip
        wants_logits = self.accelerator.settings.model.return_logits or (
            labels is None and own_batch is None
        )
        micros, length = self._micro_batches(batch)
        loss, logits = self.engine.forward_backward(
            micros,
            loss_function=self.accelerator.settings.hooks.loss_function,
            collect=wants_logits,
            **how,  # type: ignore[arg-type]
        )
        whole = self.engine.whole_logits(logits, length) if wants_logits else None
        has_loss = labels is not None or own_batch is not None
        return self._output(loss if has_loss else None, whole)

    def _output(self, loss: float | None, logits: torch.Tensor | None) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        found = None
        if loss is not None:
            found = self.accelerator.remember_loss(loss, self.training and torch.is_grad_enabled())
        out = CausalLMOutput(loss=found, logits=logits)
        if self.engine.reported:
            out["reported"] = {
                key: torch.tensor(value, device=self.accelerator.device)
                for key, value in self.engine.reported.items()
            }
        return out

    def _custom_call(self, batch: dict[str, Any], how: dict[str, Any]) -> Any:
        """The forward by the plugin's custom_train_step_class."""
        rows = self._sliced(batch)
        shape = tuple(rows[0]["input_ids"].shape)
        if shape[1] % self.engine.sequence_multiple:
            raise TrainError(
                f"sequence parallelism cannot cut sequences of {shape[1]} over "
                f"tp={self.engine.parallel.tp}; pad them, since the custom_train_step_class makes "
                "its own batches"
            )
        loss = self.engine.custom_forward_backward(self.handler.forward_step, rows, shape, **how)
        out = self._output(loss, None)
        made = getattr(self.handler, "model_output_class", type(out))
        if made is None:
            return out.loss
        return out if made is type(out) else made(loss=out.loss, logits=None)

    def _sliced(self, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The batch's rows as micro-batches, whatever else it holds."""
        rows = batch["input_ids"].shape[0]
        size = self.accelerator.rows_of_micro_batch(rows)
        if rows % size:
            raise TrainError(
                f"a batch of {rows} rows does not divide into micro-batches of {size}; "
                "use the loader that prepare() returned"
            )
        every, of = rows // size, self.engine.layout
        if of.virtual_pp_layers is not None and every % of.pp:
            raise TrainError(
                f"an interleaved pipeline needs micro-batches in multiples of pp={of.pp}, a batch "
                f"of {rows} rows makes {every} of {size}"
            )
        there = {key: value for key, value in batch.items() if value is not None}
        return [
            {key: value[at : at + size] for key, value in there.items()}
            for at in range(0, rows, size)
        ]

    def _micro_batches(self, batch: Mapping[str, Any]) -> tuple[list[MicroBatch], int]:
        """The rows of a script's batch as engine micro-batches, and their sequence length."""
        make = self.accelerator.settings.hooks.get_batch
        if make is not None:
            rows = self._sliced(batch)
            iterator = iter(rows)
            made = [from_tuple(make(iterator)) for _ in rows]
        else:
            known = {"input_ids", "labels", "attention_mask", "position_ids"}
            surplus = {k for k, v in batch.items() if k not in known and v is not None}
            if surplus:
                raise TrainError(
                    f"the model takes {_listed(known)}; the batch also has {_listed(surplus)}: "
                    "remove them in the collate function"
                )
            made = [as_engine_batch(one) for one in self._sliced(batch)]
        length = made[0]["tokens"].shape[1]
        if make is not None or batch.get("position_ids") is not None:
            for one in made:
                self._check_positions(one["position_ids"])
        multiple = self.engine.sequence_multiple
        return [padded(one, multiple) for one in made], length

    def _check_length(self, length: int) -> None:
        longest, named = self.accelerator.longest
        if longest is not None and length > longest:
            raise TrainError(
                f"a sequence of {length} tokens is longer than {named} of {longest}; shorten it in "
                "the tokenizer or the collate function"
            )

    def _check_positions(self, positions: torch.Tensor) -> None:
        """Rotary positions are counted inside megatron-core, which takes no others."""
        if "pos" in self.engine.model.sizes:
            return
        counted = torch.arange(positions.shape[1], device=positions.device)
        if not bool((positions == counted).all()):
            raise TrainError(
                "position_ids that do not count from 0 in each row: megatron-core computes rotary "
                "positions itself; leave position_ids out"
            )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def as_engine_batch(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Labels shifted, -100 masked.

    Position i predicts token i + 1, so the last position never counts.
    """
    tokens = batch["input_ids"]
    labels = batch.get("labels")
    labels = torch.full_like(tokens, IGNORED) if labels is None else labels.to(tokens.device)
    if labels.shape != tokens.shape:
        raise TrainError(
            f"labels of shape {tuple(labels.shape)} for input_ids of {tuple(tokens.shape)}; give "
            "one label per token, unshifted"
        )
    shifted = torch.full_like(labels, IGNORED)
    shifted[:, :-1] = labels[:, 1:]
    return from_tuple(
        (
            tokens,
            shifted.clamp_min(0),
            (shifted != IGNORED).float(),
            batch.get("attention_mask"),
            batch.get("position_ids"),
        )
    )


def from_tuple(given: Any) -> dict[str, torch.Tensor]:
    """A micro-batch of what Megatron's get_batch gives, in its order; labels are shifted."""
    names = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
    if not isinstance(given, tuple) or len(given) != len(names):
        raise TrainError(
            f"custom_get_batch_function must return ({', '.join(names)}), not {described(given)}"
        )
    made = dict(zip(names, given, strict=True))
    tokens, mask = made["tokens"], made["attention_mask"]
    if made["position_ids"] is None:
        counted = torch.arange(tokens.shape[1], device=tokens.device)
        made["position_ids"] = counted.expand(tokens.shape)
    if mask is not None and mask.dim() not in (2, 4):
        raise TrainError(
            f"an attention_mask of shape {tuple(mask.shape)}; give [rows, sequence], 1 for a token "
            "and 0 for padding"
        )
    return {name: value for name, value in made.items() if value is not None}


def padded(batch: Mapping[str, torch.Tensor], multiple: int) -> MicroBatch:
    """The sequence padded to a multiple (sequence parallelism); what is added does not count."""
    short = -batch["tokens"].shape[1] % multiple
    made = dict(batch)
    mask = made.pop("attention_mask", None)
    if short:
        made = {k: torch.nn.functional.pad(v, (0, short)) for k, v in made.items()}
    if mask is not None and short:
        by_key = mask.dim() == 4  # true where a key is hidden; else 1 for a token
        mask = torch.nn.functional.pad(
            mask, (0, short, 0, short) if by_key else (0, short), value=int(by_key)
        )
    if mask is not None:
        made["attention_mask"] = mask
    return {key: value.contiguous() for key, value in made.items()}
