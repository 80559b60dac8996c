"""What a configuration may say: batch sizes that divide, and every contradiction between values.

What only the model or the data can tell is checked by ``for_model``. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import TrainError, raise_faults
from .plugin import OTHER
from .schema import (
    LATEST,
    BatchSizes,
    OptimizerSettings,
    Parallelism,
    Saving,
    Schedule,
    Sizes,
    TrainConfig,
)

LENGTH = 1024  # tokens of a sequence if it is not given, and the model has as many positions


def data_parallel_of(world_size: int, parallelism: Parallelism) -> int:
    """Data-parallel ranks; TrainError unless the processes divide into copies of the model."""
    model = parallelism.model_ranks
    if world_size < model or world_size % model:
        low = max(world_size // model, 1) * model
        raise TrainError(
            f"{world_size} processes do not divide over tp={parallelism.tp} x "
            f"pp={parallelism.pp} = {model}; start a multiple of {model}, for example {low}"
        )
    return world_size // model


def batch_sizes(
    data_parallel: int,
    micro: int | None = None,
    num_micro: int | None = None,
    global_size: int | None = None,
    accumulation: int = 1,
) -> BatchSizes:
    """Batch sizes from those that are given; micro x num_micro x data_parallel = global.

    Without ``micro`` it follows from both others, else it is 1.
    """
    for name, size in (("micro-batch", micro), ("number of micro-batches", num_micro),
                       ("global batch", global_size), ("accumulation", accumulation)):  # fmt: skip
        if size is not None and size < 1:
            raise TrainError(f"{name} of {size}: must be at least 1")
    if global_size is None:
        return BatchSizes(micro or 1, num_micro or 1, data_parallel, accumulation)
    if micro is None and num_micro is None:
        micro = 1
    known = (micro or 1) * (num_micro or 1) * data_parallel
    if global_size % known or (micro and num_micro and global_size != known):
        parts = [f"micro-batch {micro}"] if micro else []
        parts += [f"{num_micro} micro-batches"] if num_micro else []
        text = " x ".join([*parts, f"{data_parallel} data-parallel ranks"])
        exact = "is not" if micro and num_micro else "is not a multiple of"
        near = max(global_size // known, 1) * known
        raise TrainError(f"global batch {global_size} {exact} {text} = {known}; {near} would be")
    if micro is None:
        micro = global_size // known
    return BatchSizes(micro, global_size // (micro * data_parallel), data_parallel, accumulation)


def faults_of(config: TrainConfig) -> list[str]:
    """Every contradiction that needs no model to be seen."""
    return [
        *_layout_faults(config.parallelism, config.batch),
        *_optimizer_faults(config.optimizer, config.schedule),
        *_distributed_faults(config.parallelism, config.optimizer),
        *_saving_faults(config.saving),
    ]


def _layout_faults(layout: Parallelism, batch: BatchSizes) -> list[str]:
    faults = []
    if layout.pp_layers is not None and len(layout.pp_layers) != layout.pp:
        faults.append(f"--pp-layers names {len(layout.pp_layers)} stages, pp is {layout.pp}")
    if layout.pp_layers is not None and min(layout.pp_layers, default=1) < 1:
        faults.append(f"--pp-layers {layout.pp_layers}: each stage needs a layer")
    if layout.last_stage_layers is not None and (layout.pp == 1 or layout.pp_layers):
        why = "pp is 1" if layout.pp == 1 else f"--pp-layers says {layout.pp_layers}"
        faults.append(f"decoder_last_pipeline_num_layers={layout.last_stage_layers}, but {why}")
    if layout.virtual_pp_layers is not None:
        name = f"num_layers_per_virtual_pipeline_stage={layout.virtual_pp_layers}"
        if layout.pp == 1:
            faults.append(f"{name} needs a pipeline: pp is 1")
        elif batch.num_micro_batches % layout.pp:
            faults.append(
                f"{name} needs micro-batches in multiples of pp={layout.pp}, there are "
                f"{batch.num_micro_batches}"
            )
        if layout.pp_layers or layout.last_stage_layers:
            faults.append(f"{name} needs equal stages; drop --pp-layers and "
                          "decoder_last_pipeline_num_layers")  # fmt: skip
    return faults


def _optimizer_faults(optimizer: OptimizerSettings, schedule: Schedule | None) -> list[str]:
    faults = []
    if optimizer.lr_mult != 1.0 and optimizer.scale_lr is None:
        faults.append(f"lr_mult={optimizer.lr_mult} has no scale_lr_cond to apply to")
    if schedule is None:
        return faults
    if schedule.min_lr > schedule.lr:
        faults.append(f"min_lr {schedule.min_lr} is above the learning rate {schedule.lr}")
    if schedule.warmup_steps >= schedule.decay_steps:
        faults.append(
            f"a warmup of {schedule.warmup_steps:g} steps is not shorter than the schedule of "
            f"{schedule.decay_steps:g}"
        )
    if schedule.wd_end < schedule.wd_start:
        faults.append(
            f"weight decay falls from {schedule.wd_start} to {schedule.wd_end}; it may only grow"
        )
    return faults


def _distributed_faults(layout: Parallelism, optimizer: OptimizerSettings) -> list[str]:
    if not layout.distributed_optimizer or optimizer.name != "sgd":
        return []
    return [
        "megatron-core's distributed optimizer has no sgd; use adamw or adam, or leave "
        "use_distributed_optimizer out"
    ]


def _saving_faults(saving: Saving) -> list[str]:
    faults = []
    if saving.overwrite and saving.resume == LATEST:
        faults.append("--overwrite replaces the run that --resume would continue; drop one")
    if saving.save_dir is None and saving.resume == LATEST:
        faults.append("--resume without a folder takes the latest in --save-dir; name either")
    return faults


def for_model(config: TrainConfig, sizes: Sizes) -> TrainConfig:
    """``config`` with its sequence length and stages settled for a model; TrainError if it cannot.

    The length is left open where it is not given and ``data.files`` are none: batches say it.
    """
    layout, seq = config.parallelism, config.data.seq_length
    split = layout.tp if layout.sequence_parallel else 1
    if seq is None and config.data.files:
        seq = min(sizes.positions or LENGTH, LENGTH) // split * split
    faults, stages = [], layout.pp_layers
    if seq is not None and sizes.positions is not None and seq > sizes.positions:
        faults.append(
            f"sequences of {seq} are longer than its {sizes.positions} positions; shorten "
            "--seq-length"
        )
    if seq is not None and seq % split:
        faults.append(f"sequence parallelism cannot cut sequences of {seq} over tp={split}")
    if config.model.rotary not in (None, sizes.rotary):
        faults.append(
            f"use_rotary_position_embeddings={config.model.rotary}, but its positions are "
            f"{'rotary' if sizes.rotary else 'learned'}; leave it out"
        )
    try:
        stages = layout.stages(sizes.num_layers)
    except TrainError as error:
        faults.append(str(error))
    raise_faults(sizes.name, faults)
    return replace(
        config,
        parallelism=replace(layout, pp_layers=stages, last_stage_layers=None),
        data=replace(config.data, seq_length=seq),
    )


def check_expected(expected: Mapping[str, Any], actual: Mapping[str, Any], name: str) -> None:
    """Compare what ``other_megatron_args`` says about the model with the model."""
    raise_faults(
        name,
        [
            f"{OTHER}[{key!r}] is {value!r}, the model's is {actual.get(key)!r}; leave it out"
            for key, value in expected.items()
            if actual.get(key) != value
        ],
    )
