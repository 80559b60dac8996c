"""From a TrainConfig to a running step: the one way, for train-ckpt and for the Accelerator.

Only this module reads what the settings say about layout, model and engine. It imports torch only
when an engine is asked for, so that checks stay fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwright.ckpt.model.family import Model

from ..config import checks, schema
from ..config.schema import TrainConfig
from .layout import Layout

if TYPE_CHECKING:
    from ..model.options import ModelOptions
    from .engine import Engine, EngineOptions
    from .process import Parallel


def positions_of(model: Model) -> int | None:
    """The longest sequence that a model has positions for."""
    for key in ("max_position_embeddings", "n_positions"):
        if isinstance(model.config.get(key), int):
            return int(str(model.config[key]))
    return None


def settle(config: TrainConfig, model: Model, name: str) -> TrainConfig:
    """The configuration, completed with what depends on the model; TrainError if they contradict.

    ``name`` stands for the model in messages.
    """
    rotary = "pos" not in model.sizes
    sizes = schema.Sizes(name, model.sizes["layer"], positions_of(model), rotary)
    return checks.for_model(config, sizes)


def layout_of(config: TrainConfig) -> Layout:
    """How ranks are arranged. Before ``settle`` an uneven last stage is not known."""
    p = config.parallelism
    return Layout(p.tp, p.pp, p.sequence_parallel, p.pp_layers, p.virtual_pp_layers)


def groups_of(config: TrainConfig) -> Layout:
    """The layout as far as process groups need it: the layers of stages depend on the model."""
    return replace(layout_of(config), pp_layers=None, virtual_pp_layers=None)


def model_options(config: TrainConfig) -> ModelOptions:
    """How the model computes."""
    from ..model.options import ModelOptions

    bf16 = config.precision.name == "bf16"
    return ModelOptions(
        precision="bf16" if bf16 else "fp32",
        recompute=config.recompute.granularity,  # type: ignore[arg-type]
        recompute_method=config.recompute.method,
        recompute_num_layers=config.recompute.num_layers,
        attention_dropout=config.model.attention_dropout,
        hidden_dropout=config.model.hidden_dropout,
        fused_cross_entropy=bf16,  # megatron's fused kernel rounds gradients to bfloat16
        vocab_multiple=config.model.vocab_multiple,
        distribute_saved_activations=config.recompute.distribute_saved_activations,
    )


def engine_options(
    config: TrainConfig,
    *,
    eod_tokens: Sequence[int] = (),
    several_calls: bool = False,
    own_loss: bool = False,
) -> EngineOptions:
    """How gradients are reduced and kept, and what counts toward the loss.

    Positions of ``eod_tokens`` do not count if the settings say so.
    ``several_calls`` of forward and backward in a step exclude overlapped reduction. ``own_loss``:
    each data-parallel rank has its own.
    """
    from .engine import EngineOptions

    return EngineOptions(
        distributed_optimizer=config.parallelism.distributed_optimizer,
        overlap=config.parallelism.overlap and not several_calls,
        check_for_nan=config.optimizer.check_for_nan,
        per_token_loss=config.data.per_token_loss,
        own_loss=own_loss,
        eod_tokens=tuple(eod_tokens) if config.data.eod_mask_loss else (),
    )


def engine_of(
    config: TrainConfig,
    model: Model,
    parallel: Parallel,
    name: str,
    *,
    eod_tokens: Sequence[int] = (),
    several_calls: bool = False,
    own_loss: bool = False,
    trained: Callable[[str], bool] | None = None,
) -> Engine:
    """The engine of a settled configuration; ``Engine.attach_optimizer`` comes after it.

    ``name`` stands for the model in messages. ``trained(name)``: whether a stored tensor
    gets gradients; None: all do. TrainError if ``other_megatron_args`` describe another model.
    """
    from .engine import Engine

    options = engine_options(
        config, eod_tokens=eod_tokens, several_calls=several_calls, own_loss=own_loss
    )
    made = Engine(model, parallel, layout_of(config), model_options(config), options, trained)
    checks.check_expected(config.model.expected, made.facts(), name)
    return made
