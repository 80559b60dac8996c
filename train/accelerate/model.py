"""A prepared model: what a script calls, and what that runs on this rank."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from ..config.schema import TrainConfig
from ..core import rng
from ..core.engine import Engine
from ..core.losses import MicroBatch
from ..errors import TrainError
from .batches import as_engine_batch, from_tuple, listed, padded
from .build import Built
from .replica import Replica

# Keywords of a forward that change no loss: caches, and what an output is wrapped in.
HARMLESS = {"use_cache", "return_dict", "output_attentions", "output_hidden_states"}
KNOWN = {"input_ids", "labels", "attention_mask", "position_ids"}


class Owner(Protocol):
    """What a prepared model asks of the Accelerator that made it."""

    replica: Replica
    gradient_accumulation_steps: int

    @property
    def device(self) -> torch.device: ...

    def remember_loss(self, own: float, mean: float, training: bool) -> torch.Tensor: ...

    def evaluated(self) -> None: ...

    def whole_state(self) -> dict[str, torch.Tensor]: ...

    def clear_gradients(self) -> None: ...


class PreparedModel(torch.nn.Module):
    """A transformers model, trained as this rank's part of a megatron-core GPTModel.

    Its parameters are this rank's. The transformers model is no submodule of it.
    """

    owner: Owner
    original: Any

    def __init__(self, owner: Owner, built: Built, original: Any) -> None:
        super().__init__()
        object.__setattr__(self, "owner", owner)
        object.__setattr__(self, "original", original)
        self.engine: Engine = built.engine
        self.settings: TrainConfig = built.settings
        self.config, self.handler, self._positions = original.config, built.handler, built.positions
        self._names = _forward_names(original)

    def train(self, mode: bool = True) -> PreparedModel:
        """Forward runs the whole schedule, backward included."""
        if mode and not self.training:
            self.owner.evaluated()
        self.training = mode
        return self

    @property
    def device(self) -> torch.device:
        """Where this rank trains."""
        return self.owner.device

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """This rank's parameters."""
        return iter(self.engine.named.values())

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters by stored name."""
        start = f"{prefix}." if prefix else ""
        return ((start + name, parameter) for name, parameter in self.engine.named.items())

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """The whole model under transformers' names; every rank calls it."""
        return self.owner.whole_state()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: weights come by ``load_state``, each rank its share."""
        raise TrainError(
            "load_state_dict: load the weights into the model before prepare(), or a checkpoint "
            "by accelerator.load_state()"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        self.owner.clear_gradients()

    # --- a call ----------------------------------------------------------------------------------

    def forward(self, *args: Any, **batch: Any) -> Any:
        """One forward (and in train mode backward) of this rank's rows.

        Takes input_ids, labels, attention_mask and position_ids, [rows, sequence], by name or in
        the order of the transformers model. Returns an object with ``loss``, ``logits`` [rows,
        sequence, vocab] where they are asked for, and ``reported`` where the plugin has a loss or
        train step of its own.
        """
        batch = self._shared(dict(zip(self._names, args, strict=False)) | batch)
        if batch.get("input_ids") is None:
            raise TrainError("the model needs input_ids; the batch has " + listed(batch))
        self._check_length(batch["input_ids"].shape[1])
        as_tuple = batch.pop("return_dict", None) is False
        with self._stream():
            out = self._custom_call(batch) if self.handler is not None else self._call(batch)
        return out.to_tuple() if as_tuple and hasattr(out, "to_tuple") else out

    def _shared(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch of the replica's first rank, so that nothing can part its ranks."""
        found = self.owner.replica.share(lambda: batch)
        on_device = self.device
        return {
            k: v.to(on_device, non_blocking=True) if isinstance(v, torch.Tensor) else v
            for k, v in found.items()
        }

    def _stream(self) -> contextlib.AbstractContextManager[None]:
        """Dropout draws from a state of the model's own, which a script's seeds do not touch."""
        options = self.engine.config
        draws = self.training and (options.hidden_dropout or options.attention_dropout)
        return rng.model_stream() if draws else contextlib.nullcontext()

    def _call(self, batch: dict[str, Any]) -> Any:
        labels, hooks = batch.get("labels"), self.settings.hooks
        makes = hooks.get_batch is not None
        if self._trains and labels is None and not makes:
            raise TrainError("the model is in train mode and the batch has no labels; add them, "
                             "or call model.eval()")  # fmt: skip
        wants_logits = self.settings.model.return_logits or (labels is None and not makes)
        micros, length, rows = self._micro_batches(batch)
        loss, logits = self.engine.forward_backward(
            micros, loss_function=hooks.loss_function, collect=wants_logits, **self._how()
        )
        whole = self.engine.whole_logits(logits, length)[:rows] if wants_logits else None
        return self._output(loss if labels is not None or makes else None, whole)

    @property
    def _trains(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def _how(self) -> dict[str, Any]:
        """How the engine is to be called."""
        weight = 1.0 / self.owner.gradient_accumulation_steps
        return {"forward_only": not self.training, "weight": weight}

    def _output(self, loss: float | None, logits: torch.Tensor | None) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        found = None
        if loss is not None:
            found = self.owner.remember_loss(loss, self.engine.mean_loss, self._trains)
        out = CausalLMOutput(loss=found, logits=logits)
        if self.engine.reported:
            out["reported"] = {
                key: torch.tensor(value, device=self.device)
                for key, value in self.engine.reported.items()
            }
        return out

    def _custom_call(self, batch: dict[str, Any]) -> Any:
        """The forward by the plugin's custom_train_step_class."""
        rows = self._sliced(batch)
        shape = tuple(rows[0]["input_ids"].shape)
        if shape[1] % self.engine.sequence_multiple:
            raise TrainError(
                f"sequence parallelism cannot cut sequences of {shape[1]} over "
                f"tp={self.engine.parallel.tp}; pad them, since the custom_train_step_class makes "
                "its own batches"
            )
        step = self.handler.forward_step
        loss = self.engine.custom_forward_backward(step, rows, shape, **self._how())
        out = self._output(loss, None)
        made = getattr(self.handler, "model_output_class", type(out))
        if made is None:
            return out.loss
        return out if made is type(out) else made(loss=out.loss, logits=None)

    # --- micro-batches ---------------------------------------------------------------------------

    def _micro_rows(self, rows: int) -> int:
        """Rows of a micro-batch: a batch is ``num_micro_batches`` of them."""
        return -(-rows // self.settings.batch.num_micro_batches)

    def _sliced(self, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The batch's rows as micro-batches, whatever else it holds."""
        rows = batch["input_ids"].shape[0]
        size = self._micro_rows(rows)
        if rows % size:
            raise TrainError(
                f"a batch of {rows} rows does not divide into "
                f"{self.settings.batch.num_micro_batches} micro-batches; fill it up"
            )
        every, of = rows // size, self.engine.layout
        if of.virtual_pp_layers is not None and every % of.pp:
            raise TrainError(
                f"an interleaved pipeline needs micro-batches in multiples of pp={of.pp}, a batch "
                f"of {rows} rows makes {every} of {size}"
            )
        there = {key: value for key, value in batch.items() if value is not None}
        return [
            {
                key: value[at : at + size] if _is_of_rows(value, rows) else value
                for key, value in there.items()
            }
            for at in range(0, rows, size)
        ]

    def _micro_batches(self, batch: Mapping[str, Any]) -> tuple[list[MicroBatch], int, int]:
        """The batch as engine micro-batches, its sequence length, and its rows."""
        make, rows = self.settings.hooks.get_batch, batch["input_ids"].shape[0]
        if make is not None:
            sliced = self._sliced(batch)
            iterator = iter(sliced)
            made = [from_tuple(make(iterator)) for _ in sliced]
        else:
            surplus = {k for k, v in batch.items() if k not in KNOWN | HARMLESS and v is not None}
            if surplus:
                raise TrainError(
                    f"the model takes {listed(KNOWN)}; the batch also has {listed(surplus)}: "
                    "remove them in the collate function"
                )
            there = {k: v for k, v in batch.items() if k in KNOWN and v is not None}
            made = [as_engine_batch(one) for one in self._sliced(self._filled(there, rows))]
        length = made[0]["tokens"].shape[1]
        if make is not None or batch.get("position_ids") is not None:
            for one in made:
                self._check_positions(one["position_ids"])
        multiple = self.engine.sequence_multiple
        return [padded(one, multiple) for one in made], length, rows

    def _filled(self, batch: dict[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
        """The batch with rows that make its micro-batches whole, and that do not count."""
        of, size = self.engine.layout, self._micro_rows(rows)
        whole = size * (of.pp if of.virtual_pp_layers is not None else 1)
        short = -rows % whole
        if not short:
            return batch
        more = {
            k: torch.cat((v, v[:1].expand(short, *v.shape[1:]))) if _is_of_rows(v, rows) else v
            for k, v in batch.items()
        }
        if "labels" in more:
            more["labels"][rows:] = -100
        return more

    def _check_length(self, length: int) -> None:
        said = self.settings.data.seq_length
        longest, named = (self._positions, "the model's positions") if said is None else (
            said, "seq_length"
        )  # fmt: skip
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


def _forward_names(original: Any) -> list[str]:
    """The parameters of the transformers model's forward, in their order."""
    function: Callable[..., Any] = original.forward
    return list(inspect.signature(function).parameters)


def _is_of_rows(value: Any, rows: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == rows
