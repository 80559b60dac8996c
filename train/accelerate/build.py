"""From a script's model and optimizer to this rank's engine, filled with the model's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from shardwright.ckpt.checkpoint.config import model_from

from ..checkpoint import hf_weights as weights
from ..checkpoint.rank_state import RankState
from ..config import schema as settings_of
from ..config.schema import TrainConfig
from ..core.engine import Engine
from ..core.from_config import engine_of, layout_of, positions_of, settle
from ..core.process import Parallel
from ..errors import TrainError
from . import param_groups as groups

CAUSAL = ("ForCausalLM", "LMHeadModel")  # ends of class names


@dataclass(frozen=True, slots=True)
class Built:
    """What a script's model became."""

    settings: TrainConfig  # with what depends on the model filled in
    engine: Engine
    held: RankState
    positions: int | None  # the longest sequence that the model has positions for
    handler: Any  # an instance of the plugin's custom_train_step_class, or None


def check_kind(original: torch.nn.Module) -> None:
    """TrainError for a model that is no causal language model."""
    name = type(original).__name__
    if not name.endswith(CAUSAL):
        raise TrainError(
            f"prepare: {name} is no causal language model; megatron-core's GPTModel has a "
            "language-model head only"
        )


def build(
    original: Any,
    optimizer: torch.optim.Optimizer | None,
    settings: TrainConfig,
    parallel: Parallel,
    *,
    several_calls: bool,
) -> Built:
    """The engine of a model, with the optimizer where there is one; a collective.

    ``several_calls`` of forward and backward in a step exclude overlapped reduction.
    """
    name = type(original).__name__
    model = model_from(original.config.to_dict(), name)
    settings = settle(settings, model, name)
    parts = weights.stored_parts(
        model, layout_of(settings), parallel, settings.model.vocab_multiple
    )
    weights.check_names(original, model)
    index = _groups(original, model, optimizer, parts)
    trained = _trained(original, parts) if index is None else {n for n in index if index[n] >= 0}
    engine = engine_of(
        settings, model, parallel, name,
        eod_tokens=_eod_tokens(original, settings),
        several_calls=several_calls,
        own_loss=True,
        trained=trained.__contains__,
    )  # fmt: skip
    if index is not None:
        assert optimizer is not None
        made = groups.param_groups(optimizer, index, engine.named, settings.optimizer)
        engine.attach_optimizer(settings.optimizer, made)
    held = RankState.of(engine)
    held.stream = True
    _fill(original, held)
    engine.zero_grad()
    return Built(settings, engine, held, positions_of(model), _handler(settings, engine))


def _fill(original: Any, held: RankState) -> None:
    """The model's weights; one that has none yet (on the meta device) waits for ``load_state``."""
    if not any(tensor.is_meta for tensor in original.state_dict().values()):
        weights.take(original, held)


def attach(
    built: Built, original: Any, optimizer: torch.optim.Optimizer, settings: TrainConfig
) -> None:
    """Give a model that was prepared alone its optimizer, over either model's parameters."""
    engine = built.engine
    options = settings.optimizer
    ours = {id(parameter): name for name, parameter in engine.named.items()}
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if given & ours.keys():
        index = dict.fromkeys(engine.named, -1)
        for number, group in enumerate(optimizer.param_groups):
            index.update({ours[id(p)]: number for p in group["params"] if id(p) in ours})
    else:
        parts = weights.stored_parts(
            engine.model, engine.layout, engine.parallel, engine.model_options.vocab_multiple
        )
        found = _groups(original, engine.model, optimizer, parts)
        assert found is not None
        index = found
    engine.attach_optimizer(options, groups.param_groups(optimizer, index, engine.named, options))
    built.held.optimizer = engine.view  # masters are the weights that the model has by now
    engine.zero_grad()


def _trained(original: Any, parts: Mapping[str, list[str]]) -> set[str]:
    """The stored tensors that are trained, where no optimizer says."""
    frozen = {n for n, p in original.named_parameters() if not p.requires_grad}
    index = groups.stored_groups(parts, [{n for names in parts.values() for n in names}], frozen)
    return {name for name, group in index.items() if group >= 0}


def _groups(
    original: Any,
    model: Any,
    optimizer: torch.optim.Optimizer | None,
    parts: Mapping[str, list[str]],
) -> dict[str, int] | None:
    """Stored name -> the script's param group, -1 where frozen; None without optimizer."""
    if optimizer is None:
        return None
    names = weights.parameter_names(original, model)
    frozen = {n for n, p in original.named_parameters() if not p.requires_grad}
    return groups.stored_groups(parts, groups.group_names(optimizer, names), frozen)


def _eod_tokens(original: Any, settings: TrainConfig) -> list[int]:
    """The end-of-document tokens, where their positions do not count toward the loss."""
    if not settings.data.eod_mask_loss:
        return []
    eod = original.config.eos_token_id
    if eod is None:
        raise TrainError(
            "eod_mask_loss: the model's config has no eos_token_id; set it before prepare()"
        )
    return eod if isinstance(eod, list) else [eod]


def _handler(settings: TrainConfig, engine: Engine) -> Any:
    """An instance of the plugin's custom_train_step_class, or None."""
    hooks = settings.hooks
    if hooks.train_step_class is None:
        return None
    for name in ("loss_function", "get_batch"):
        if getattr(hooks, name) is not None:
            raise TrainError(
                f"custom_train_step_class makes its own batches and losses; drop custom_{name}"
                + ("_function" if name == "get_batch" else "")
            )
    args = settings_of.megatron_args(settings) | engine.facts()
    args["eos_token_id"] = engine.model.config.get("eos_token_id")
    made = hooks.train_step_class(SimpleNamespace(**args), **hooks.train_step_kwargs)
    if not callable(getattr(made, "forward_step", None)):
        raise TrainError(
            f"custom_train_step_class: {type(made).__name__} has no forward_step; set it to a "
            "function of (iterator, model) in __init__"
        )
    return made
