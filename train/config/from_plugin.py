"""From a ``MegatronLMPlugin`` to a ``TrainConfig``: what each of its fields means.

A script's way, and the second half of a command line's (from_options.py). Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import TrainError, raise_faults
from .accelerate_yaml import AccelerateFile, precision_fault
from .checks import batch_sizes, data_parallel_of, faults_of
from .fields import ARCHITECTURE, ARGUMENTS, FIELDS
from .plugin import MegatronLMPlugin
from .schema import (
    BatchSizes,
    Data,
    Hooks,
    Launch,
    Logging,
    ModelSettings,
    OptimizerSettings,
    Parallelism,
    Precision,
    Recompute,
    Saving,
    Schedule,
    TrainConfig,
)

MIXED = "ACCELERATE_MIXED_PRECISION"  # what `accelerate launch` passes on


def from_plugin(
    plugin: MegatronLMPlugin,
    mixed_precision: str | None = None,
    *,
    world_size: int = 1,
    optimizer: OptimizerSettings | None = None,
    micro_batch_size: int | None = None,
    global_batch_size: int | None = None,
    gradient_accumulation_steps: int = 1,
    total_steps: int | None = None,
    warmup_steps: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> TrainConfig:
    """What a plugin means for ``world_size`` processes.

    ``optimizer`` holds what the user's optimizer says; clipping and conditions are the plugin's.
    ``total_steps`` and ``warmup_steps`` are a dummy scheduler's: they count where the plugin says
    nothing. ``global_batch_size`` overrides ``num_micro_batches``.
    """
    plugin.check()
    environ = os.environ if environ is None else environ
    parallelism, notes = _parallelism(plugin)
    recompute, more = _recompute(plugin, parallelism)
    num_micro = None if global_batch_size else plugin.num_micro_batches
    data_parallel = data_parallel_of(world_size, parallelism)
    batch = batch_sizes(
        data_parallel, micro_batch_size, num_micro, global_batch_size, gradient_accumulation_steps
    )
    settings = _optimizer(plugin, optimizer or OptimizerSettings())
    steps, schedule = _schedule(plugin, settings, batch, total_steps, warmup_steps)
    config = TrainConfig(
        parallelism=parallelism,
        batch=batch,
        precision=_precision(plugin, mixed_precision, environ),
        recompute=recompute,
        optimizer=settings,
        schedule=schedule,
        data=_data(plugin),
        saving=Saving(
            save_optimizer=not plugin.no_save_optim, load_optimizer=not plugin.no_load_optim
        ),
        model=_model(plugin),
        hooks=_hooks(plugin),
        logging=Logging(plugin.tensorboard_dir, bool(plugin.set_all_logging_options)),
        launch=launch_of(plugin.file, _argument(plugin, "distributed_timeout_minutes")),
        world_size=world_size,
        steps=steps,
        seed=_argument(plugin, "seed"),
        notes=(*(plugin.file.notes if plugin.file else ()), *notes, *more),
    )
    raise_faults("settings", faults_of(config))
    return config


def _argument(plugin: MegatronLMPlugin, name: str) -> Any:
    return plugin.arguments.get(name, ARGUMENTS[name].default)


def _parallelism(plugin: MegatronLMPlugin) -> tuple[Parallelism, list[str]]:
    assert plugin.tp_degree is not None
    assert plugin.pp_degree is not None
    idle = plugin.sequence_parallelism and plugin.tp_degree == 1
    made = Parallelism(
        tp=plugin.tp_degree,
        pp=plugin.pp_degree,
        last_stage_layers=plugin.decoder_last_pipeline_num_layers,
        virtual_pp_layers=plugin.num_layers_per_virtual_pipeline_stage,
        sequence_parallel=bool(plugin.sequence_parallelism) and not idle,
        distributed_optimizer=bool(plugin.use_distributed_optimizer),
        overlap=_argument(plugin, "overlap_grad_reduce"),
    )
    return made, ["sequence parallelism has no effect at tp=1"] if idle else []


# Fields that mean something to full recomputation alone.
_FULL_ONLY = (
    "recompute_method",
    "recompute_num_layers",
    "checkpoint_num_layers",
    "distribute_checkpointed_activations",
    "partition_activations",
)


def _recompute(plugin: MegatronLMPlugin, parallelism: Parallelism) -> tuple[Recompute, list[str]]:
    """Granularity where it is given; else full if one of full's settings is; else selective."""
    asked = [n for n in _FULL_ONLY if plugin.given(n) and getattr(plugin, n) is not False]
    telling = [n for n in asked if getattr(plugin, n) != FIELDS[n].default]
    granularity = _granularity(plugin, asked)
    if granularity == "none" and plugin.recompute_activations:
        raise TrainError(
            "recompute_activations=True contradicts recompute_granularity='none'; drop one"
        )
    if granularity != "full":
        unused = f"{', '.join(telling)}: no effect on {granularity} recomputation, only on full"
        return Recompute(granularity), [unused] if telling else []
    layers = plugin.recompute_num_layers
    if plugin.checkpoint_num_layers is not None:
        if plugin.given("recompute_num_layers") and layers != plugin.checkpoint_num_layers:
            raise TrainError(
                f"recompute_num_layers={layers} contradicts its older name "
                f"checkpoint_num_layers={plugin.checkpoint_num_layers}; drop one"
            )
        layers = plugin.checkpoint_num_layers
    distribute, notes = _distribute(plugin, parallelism)
    return Recompute("full", plugin.recompute_method, layers, distribute), notes


def _granularity(plugin: MegatronLMPlugin, full_settings: Sequence[str]) -> str:
    if plugin.given("recompute_granularity"):
        return str(plugin.recompute_granularity)
    if plugin.given("recompute_activations") and not plugin.recompute_activations:
        return "none"
    if full_settings:
        return "full"
    return "selective" if plugin.recompute_activations else "none"


def _distribute(plugin: MegatronLMPlugin, parallelism: Parallelism) -> tuple[bool, list[str]]:
    if not (plugin.distribute_checkpointed_activations or plugin.partition_activations):
        return False, []
    if parallelism.tp == 1:
        return False, ["saved activations cannot be distributed: there is one tp rank"]
    if parallelism.sequence_parallel:
        return False, ["sequence parallelism already distributes saved activations"]
    return True, []


def _precision(
    plugin: MegatronLMPlugin, given: str | None, environ: Mapping[str, str]
) -> Precision:
    named = "mixed_precision"
    if given is None:
        named, given = MIXED, environ.get(MIXED)
    if given is None and plugin.file is not None:
        named, given = plugin.file.path, plugin.file.values["mixed_precision"]
    if given not in (None, "no", "fp32", "bf16"):
        raise TrainError(precision_fault(named, given))
    return Precision("bf16" if given == "bf16" else "fp32")


def _optimizer(plugin: MegatronLMPlugin, said: OptimizerSettings) -> OptimizerSettings:
    assert plugin.gradient_clipping is not None
    assert plugin.lr_mult is not None
    return replace(
        said,
        clip_grad=plugin.gradient_clipping,
        check_for_nan=bool(plugin.check_for_nan_in_loss_and_grad),
        no_weight_decay=plugin.no_wd_decay_cond,
        scale_lr=plugin.scale_lr_cond,
        lr_mult=plugin.lr_mult,
    )


def _data(plugin: MegatronLMPlugin) -> Data:
    lengths = {plugin.seq_length, plugin.decoder_seq_length} - {None}
    if len(lengths) > 1:
        raise TrainError(
            f"seq_length={plugin.seq_length} contradicts decoder_seq_length="
            f"{plugin.decoder_seq_length}; they are one length here, drop one"
        )
    assert plugin.eval_interval is not None
    assert plugin.eval_iters is not None
    train, valid, test = plugin.consumed_samples or (0, 0, 0)
    return Data(
        seq_length=lengths.pop() if lengths else None,
        eval_interval=plugin.eval_interval,
        eval_iters=plugin.eval_iters,
        eod_mask_loss=bool(plugin.eod_mask_loss),
        per_token_loss=bool(plugin.calculate_per_token_loss),
        consumed_samples=(train, valid, test),
        smallest_loader=bool(plugin.is_train_batch_min),
    )


def _model(plugin: MegatronLMPlugin) -> ModelSettings:
    return ModelSettings(
        attention_dropout=_if_given(plugin, "attention_dropout"),
        hidden_dropout=_if_given(plugin, "hidden_dropout"),
        rotary=_if_given(plugin, "use_rotary_position_embeddings"),
        return_logits=bool(plugin.return_logits),
        vocab_multiple=_argument(plugin, "make_vocab_size_divisible_by"),
        expected={n: v for n, v in plugin.arguments.items() if n in ARCHITECTURE},
    )


def _if_given(plugin: MegatronLMPlugin, name: str) -> Any:
    return getattr(plugin, name) if plugin.given(name) else None


def _hooks(plugin: MegatronLMPlugin) -> Hooks:
    if plugin.custom_train_step_kwargs and plugin.custom_train_step_class is None:
        raise TrainError("custom_train_step_kwargs: there is no custom_train_step_class to take it")
    return Hooks(
        plugin.custom_loss_function,
        plugin.custom_get_batch_function,
        plugin.custom_train_step_class,
        dict(plugin.custom_train_step_kwargs or {}),
    )


def launch_of(file: AccelerateFile | None, timeout_minutes: int) -> Launch:
    if file is None:
        return Launch(timeout_minutes=timeout_minutes)
    said, count = file.values, file.num_processes
    return Launch(
        nproc=count // said["num_machines"] if count else None,
        num_machines=said["num_machines"],
        machine_rank=said["machine_rank"],
        main_process_ip=_text_or_none(said["main_process_ip"]),
        main_process_port=said["main_process_port"],
        rdzv_backend=said["rdzv_backend"],
        gpu_ids=_text_or_none(said["gpu_ids"]),
        use_cpu=said["use_cpu"],
        accelerate_file=file.path,
        timeout_minutes=timeout_minutes,
    )


def _text_or_none(value: object) -> str | None:
    return None if value is None else str(value)


# --- schedules ---------------------------------------------------------------------------------

# Fields that describe a schedule: a script that gives one may not give a scheduler object too.
SCHEDULE_FIELDS = (
    "train_iters",
    "train_samples",
    "lr_decay_style",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_fraction",
    "min_lr",
    "weight_decay_incr_style",
    "start_weight_decay",
    "end_weight_decay",
)


def schedule_fields(plugin: MegatronLMPlugin) -> list[str]:
    """The given fields that describe a schedule."""
    return [name for name in SCHEDULE_FIELDS if plugin.given(name)]


def _schedule(
    plugin: MegatronLMPlugin,
    optimizer: OptimizerSettings,
    batch: BatchSizes,
    total: int | None,
    warmup: int | None,
) -> tuple[int | None, Schedule | None]:
    """(steps of the training, schedule), by Megatron's rules; None where nothing says."""
    samples = batch.samples_per_step
    _one_of(plugin, "train_iters", "train_samples")
    _one_of(plugin, "lr_decay_iters", "lr_decay_samples")
    _one_of(plugin, "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction")
    steps = plugin.train_iters or total
    if plugin.train_samples:
        steps = plugin.train_samples // samples
        if not steps:
            raise TrainError(
                f"train_samples={plugin.train_samples} is less than one step of {samples} samples"
            )
    named = schedule_fields(plugin)
    if not named and total is None:
        return None, None
    decay = _in_steps(plugin.lr_decay_iters, plugin.lr_decay_samples, samples) or steps
    warm = _in_steps(plugin.lr_warmup_iters, plugin.lr_warmup_samples, samples)
    warm = (warmup or 0) if warm is None else warm
    if decay is None and _is_endless(plugin):
        decay = warm + 1  # any later step: a constant rate has no end
    if decay is None:
        raise TrainError(
            f"{named[0]}={getattr(plugin, named[0])!r} needs an end of the training; "
            "say train_iters or lr_decay_iters too"
        )
    if plugin.lr_warmup_fraction is not None:
        warm = plugin.lr_warmup_fraction * decay
    wd_start, wd_end = _decay_bounds(plugin, optimizer.weight_decay)
    assert plugin.lr_decay_style is not None
    assert plugin.weight_decay_incr_style is not None
    return steps, Schedule(
        plugin.lr_decay_style, optimizer.lr, plugin.min_lr or 0.0, warm, decay,
        plugin.weight_decay_incr_style, wd_start, wd_end, steps or decay,
    )  # fmt: skip


def _is_endless(plugin: MegatronLMPlugin) -> bool:
    """Whether the schedule is the same wherever the training ends."""
    styles = {plugin.lr_decay_style, plugin.weight_decay_incr_style}
    return styles == {"constant"} and plugin.lr_warmup_fraction is None


def _in_steps(iters: int | None, samples: int | None, per_step: int) -> float | None:
    if samples is None:
        return iters
    exact, rest = divmod(samples, per_step)
    return samples / per_step if rest else exact


def _one_of(plugin: MegatronLMPlugin, *names: str) -> None:
    said = [f"{n}={getattr(plugin, n)}" for n in names if getattr(plugin, n)]  # 0 says nothing
    if len(said) > 1:
        raise TrainError(f"{' and '.join(said)} say the same thing; drop all but one")


def _decay_bounds(plugin: MegatronLMPlugin, constant: float) -> tuple[float, float]:
    """Weight decay at the first and the last step."""
    start, end = plugin.start_weight_decay, plugin.end_weight_decay
    style = plugin.weight_decay_incr_style
    if style == "constant":
        if (start is None and end is None) or start == end == constant:
            return constant, constant
        raise TrainError(
            f"start_weight_decay={start} and end_weight_decay={end} need weight_decay_incr_style "
            f"linear or cosine, it is constant; the optimizer's weight decay is {constant}"
        )
    if start is None or end is None:
        raise TrainError(
            f"weight_decay_incr_style={style} needs both start_weight_decay (now {start}) and "
            f"end_weight_decay (now {end})"
        )
    return start, end
