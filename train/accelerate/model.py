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
from .output import Output
from .passes import closed
from .replica import Replica

Later = Callable[[], torch.Tensor] | None  # computes logits

# Keywords of a forward that change no loss: caches, and what an output is wrapped in.
HARMLESS = {"use_cache", "return_dict", "output_attentions", "output_hidden_states"}
# num_items_in_batch is what transformers divides the sum of losses by.
OTHERS = HARMLESS | {"num_items_in_batch"}
KNOWN = {"input_ids", "labels", "attention_mask", "position_ids"}


class Owner(Protocol):
    """What a prepared model asks of the Accelerator that made it."""

    replica: Replica

    @property
    def device(self) -> torch.device: ...

    def watched(self, training: bool) -> contextlib.AbstractContextManager[None]: ...

    def begin_pass(self, training: bool) -> float: ...

    def end_pass(self, value: float, random: Any, training: bool) -> torch.Tensor: ...

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
        """One forward of this rank's rows; in train mode their gradients may be computed as well.

        Takes input_ids, labels, attention_mask and position_ids, [rows, sequence], by name or in
        the order of the transformers model. Returns an object with ``loss``, ``logits`` [rows,
        sequence, vocab] as soon as they are read, and ``reported`` where the plugin has a loss or
        train step of its own.
        """
        batch = self._shared(dict(zip(self._names, args, strict=False)) | batch)
        if batch.get("input_ids") is None:
            raise TrainError("the model needs input_ids; the batch has " + listed(batch))
        self._check_length(batch["input_ids"].shape[1])
        as_tuple = batch.pop("return_dict", None) is False
        with self._stream():
            if self.handler is not None:
                out = self._custom_call(batch)
            else:
                out = self._call(batch, as_tuple)
        return out.to_tuple() if as_tuple and hasattr(out, "to_tuple") else out

    def _shared(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch of the replica's first rank, so that nothing can part its ranks."""
        found = self.owner.replica.share(lambda: batch)
        on_device = self.device
        return {
            k: v.to(on_device, non_blocking=True) if isinstance(v, torch.Tensor) else v
            for k, v in found.items()
        }

    @property
    def _draws(self) -> bool:
        options = self.engine.config
        return self.training and bool(options.hidden_dropout or options.attention_dropout)

    def _stream(self) -> contextlib.AbstractContextManager[None]:
        """Dropout draws from a state of the model's own, which a script's seeds do not touch."""
        return rng.model_stream() if self._draws else contextlib.nullcontext()

    @property
    def _trains(self) -> bool:
        return self.training and torch.is_grad_enabled()

    @property
    def _is_direct(self) -> bool:
        """Whether a backward pass of the script's own runs through the model."""
        few = self.engine.layout.pp == 1 and self.settings.batch.num_micro_batches == 1
        return self._trains and few and self.handler is None

    def _call(self, batch: dict[str, Any], as_tuple: bool) -> Any:
        labels, hooks = batch.get("labels"), self.settings.hooks
        makes = hooks.get_batch is not None
        counts = labels is not None or makes  # toward a loss
        items = batch.pop("num_items_in_batch", None)
        if self._trains and not counts and not self._is_direct:
            raise TrainError(
                "the model is in train mode and the batch has no labels; add them, or call "
                "model.eval(); a loss of your own made of logits needs pp_degree=1 and "
                "num_micro_batches=1"
            )
        micros, length, rows = self._micro_batches(batch)
        self.engine.heads.keeps = counts
        if self._is_direct:
            loss, later = self._direct(micros[0], counts, length)
        else:
            loss, later = self._scheduled(micros, counts, length, rows, keeps=as_tuple)
        self.engine.heads.keeps = False  # logits that are read later go through the layer again
        if loss is not None and items is not None:  # transformers divides the sum by it
            loss = loss * (self.engine.counted / float(items))
        return self._output(loss, later)

    def _direct(
        self, micro: MicroBatch, counts: bool, length: int
    ) -> tuple[torch.Tensor | None, Later]:
        """Loss and logits of one micro-batch, with their graph."""
        if not counts:
            found = self.engine.direct_logits(micro)[:, :length]
            return None, lambda: found
        with self.owner.watched(training=True):
            loss, parts = self.engine.direct(
                micro, self.settings.hooks.loss_function, self.settings.model.return_logits
            )
        kept = self.engine.heads.take()

        def logits() -> torch.Tensor:
            found = parts or [head.logits() for head in kept]
            return self.engine.with_graph(found)[:, :length]

        return loss, logits

    def _scheduled(
        self, micros: list[MicroBatch], counts: bool, length: int, rows: int, keeps: bool
    ) -> tuple[torch.Tensor | None, Later]:
        """The same by the schedule, whose backward pass is over when it returns.

        In train mode logits are kept if the plugin says so, or ``keeps``.
        """
        engine, trains, function = self.engine, self._trains, self.settings.hooks.loss_function
        collect = not counts or (trains and (keeps or self.settings.model.return_logits))
        random = rng.model_states() if self._draws and trains else None
        with self.owner.watched(trains) if counts else contextlib.nullcontext():
            value, parts = engine.forward_backward(
                micros, loss_function=function, collect=collect,
                forward_only=not self.training, weight=self.owner.begin_pass(trains),
            )  # fmt: skip
        loss = self.owner.end_pass(value, random, trains) if counts else None
        kept = engine.heads.take()
        if trains and not collect:
            return loss, None

        def logits() -> torch.Tensor:
            with torch.set_grad_enabled(False):
                found = parts if collect else [head.logits() for head in kept]
                whole = engine.whole_logits(found, length)[:rows]
            return closed(whole) if trains else whole

        return loss, logits

    def _output(self, loss: torch.Tensor | None, later: Later) -> Any:
        out = Output.of(loss, later)
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
        step, trains = self.handler.forward_step, self._trains
        random = rng.model_states() if self._draws and trains else None
        with self.owner.watched(trains):
            value = self.engine.custom_forward_backward(
                step, rows, shape, forward_only=not self.training,
                weight=self.owner.begin_pass(trains),
            )  # fmt: skip
        out = self._output(self.owner.end_pass(value, random, trains), None)
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
            surplus = {k for k, v in batch.items() if k not in KNOWN | OTHERS and v is not None}
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
