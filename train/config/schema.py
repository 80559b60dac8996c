"""``TrainConfig``: everything that the trainer is told, from a script's plugin or a command line.

Two ways lead here: ``config_plugin.from_plugin`` from a ``MegatronLMPlugin``, and
``config_options.from_options`` from ``train-ckpt``'s options. Derived sizes and every
contradiction between values are settled here, once, and reported together. What only the model or
the data can tell is checked by ``for_model``. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import TrainError
from .fields import OTHER, raise_faults

LATEST = "latest"  # --resume without a folder: the one that SAVE_DIR/latest names
LENGTH = 1024  # tokens of a sequence when nobody says, if the model has as many positions


# --- parts -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How a model is spread over ranks."""

    tp: int = 1
    pp: int = 1
    pp_layers: tuple[int, ...] | None = None  # layers of each stage
    last_stage_layers: int | None = None  # layers of the last one, the rest being even
    virtual_pp_layers: int | None = None  # layers of a chunk of an interleaved pipeline
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    overlap: bool = False  # reduce gradients and gather parameters while computing

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tp * self.pp

    def stages(self, num_layers: int) -> tuple[int, ...] | None:
        """Layers of each stage; None where they are even."""
        if self.pp_layers is not None or self.last_stage_layers is None:
            return self.pp_layers
        rest, others = num_layers - self.last_stage_layers, self.pp - 1
        if rest < others or rest % others:
            raise TrainError(
                f"decoder_last_pipeline_num_layers={self.last_stage_layers} leaves {rest} of "
                f"{num_layers} layers, which do not divide over the other {others} stages"
            )
        return (*(rest // others,) * others, self.last_stage_layers)


@dataclass(frozen=True, slots=True)
class Batch:
    """How many sequences make a step."""

    micro_batch_size: int = 1  # sequences of a rank in one pass through the layers
    num_micro_batches: int = 1  # passes in one forward and backward of the pipeline
    data_parallel: int = 1  # ranks that see different sequences
    accumulation: int = 1  # such forwards and backwards in one optimizer step

    @property
    def rank_size(self) -> int:
        """Sequences of one data-parallel rank in a forward: the prepared loader's batch size."""
        return self.micro_batch_size * self.num_micro_batches

    @property
    def global_batch_size(self) -> int:
        """Sequences of all ranks in a forward."""
        return self.rank_size * self.data_parallel

    @property
    def samples_per_step(self) -> int:
        """Sequences of all ranks in an optimizer step."""
        return self.global_batch_size * self.accumulation


@dataclass(frozen=True, slots=True)
class Precision:
    """Of weights and activations; masters, moments and gradients are fp32."""

    name: str = "fp32"  # fp32 or bf16


@dataclass(frozen=True, slots=True)
class Recompute:
    """What is computed again in the backward pass instead of being saved."""

    granularity: str = "none"  # none, selective (core attention) or full (whole layers)
    method: str | None = None  # full: uniform or block
    num_layers: int | None = None  # full: of a group (uniform), or per stage (block)
    distribute_saved_activations: bool = False  # full: each tp rank keeps its part of the inputs


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The optimizer's hyper-parameters, and conditions over (name, parameter)."""

    name: str = "adamw"  # adamw, adam or sgd
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    momentum: float = 0.0  # sgd
    clip_grad: float = 1.0  # largest global gradient norm; 0 does not clip
    check_for_nan: bool = True  # a loss or gradient that is not finite stops the run
    no_weight_decay: Callable[..., bool] | None = None  # None: megatron's rule, or own groups
    scale_lr: Callable[..., bool] | None = None  # parameters whose lr is multiplied by lr_mult
    lr_mult: float = 1.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate and weight decay over optimizer steps.

    Steps are fractional where they were given in samples or as a share, as in Megatron.
    """

    style: str = "linear"  # constant, linear or cosine
    lr: float = 1e-4  # the peak
    min_lr: float = 0.0
    warmup_steps: float = 0  # linear from 0
    decay_steps: float = 1  # the step at which min_lr is reached, warmup included
    wd_style: str = "constant"
    wd_start: float = 0.01
    wd_end: float = 0.01
    wd_steps: float = 1


@dataclass(frozen=True, slots=True)
class Data:
    """What is trained and evaluated on."""

    files: tuple[str, ...] = ()
    seq_length: int | None = None  # None: the first batch's, or what `for_model` chooses
    eval_files: tuple[str, ...] = ()
    eval_interval: int = 1000  # steps
    eval_iters: int = 100  # steps of one evaluation
    eod_mask_loss: bool = False
    per_token_loss: bool = True  # mean over the batch's tokens, else over micro-batches' means
    consumed_samples: tuple[int, int, int] = (0, 0, 0)  # to skip in each loader
    smallest_loader: bool = True  # of several loaders' batch sizes the smallest is the micro-batch


@dataclass(frozen=True, slots=True)
class Saving:
    """Checkpoints."""

    save_dir: str | None = None
    save_interval: int | None = None  # steps; None: at the end only
    keep_last: int | None = None  # None: all
    resume: str | None = None  # LATEST, or a checkpoint's folder
    save_optimizer: bool = True
    load_optimizer: bool = True


@dataclass(frozen=True, slots=True)
class Model:
    """How the model is built and run."""

    path: str | None = None  # a Hugging Face folder or a config.json
    attention_dropout: float | None = None  # None: the model's own
    hidden_dropout: float | None = None
    rotary: bool | None = None  # what the user says the positions are; None: nothing said
    return_logits: bool = False
    vocab_multiple: int = 128  # the vocabulary is padded to a multiple of this times tp
    expected: Mapping[str, Any] = field(default_factory=dict)  # see `check_expected`


@dataclass(frozen=True, slots=True)
class Hooks:
    """A script's own functions."""

    loss_function: Callable[..., Any] | None = None
    get_batch: Callable[..., Any] | None = None
    train_step_class: Callable[..., Any] | None = None
    train_step_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Logging:
    """What is logged beside metrics.jsonl and the progress bar."""

    tensorboard_dir: str | None = None  # None: below SAVE_DIR, if there is one
    params_norm: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """Processes and machines. None: not said."""

    nproc: int | None = None  # on this machine
    num_machines: int = 1
    machine_rank: int = 0
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str = "static"
    gpu_ids: str | None = None
    use_cpu: bool = False
    accelerate_file: str | None = None  # ranks must get it as ACCELERATE_CONFIG_FILE
    timeout_minutes: int = 10  # of a collective


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """All of it."""

    parallelism: Parallelism = field(default_factory=Parallelism)
    batch: Batch = field(default_factory=Batch)
    precision: Precision = field(default_factory=Precision)
    recompute: Recompute = field(default_factory=Recompute)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule | None = None  # None: the optimizer's own lr, or a scheduler object
    data: Data = field(default_factory=Data)
    saving: Saving = field(default_factory=Saving)
    model: Model = field(default_factory=Model)
    hooks: Hooks = field(default_factory=Hooks)
    logging: Logging = field(default_factory=Logging)
    launch: Launch = field(default_factory=Launch)
    world_size: int = 1  # processes of all machines
    steps: int | None = None  # optimizer steps of the whole training, if anyone said
    seed: int = 1234
    notes: tuple[str, ...] = ()  # lines for the user: what was outranked or has no effect


@dataclass(frozen=True, slots=True)
class Sizes:
    """What of a model bounds the settings; its heads and widths are `model.build`'s to check."""

    name: str  # for messages
    num_layers: int
    positions: int | None  # longest sequence; None: unbounded
    rotary: bool


# --- batches -----------------------------------------------------------------------------------


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
) -> Batch:
    """Batch sizes from those that are given; micro x num_micro x data_parallel = global.

    Without ``micro`` it follows from both others, else it is 1.
    """
    for name, size in (("micro-batch", micro), ("number of micro-batches", num_micro),
                       ("global batch", global_size), ("accumulation", accumulation)):  # fmt: skip
        if size is not None and size < 1:
            raise TrainError(f"{name} of {size}: must be at least 1")
    if global_size is None:
        return Batch(micro or 1, num_micro or 1, data_parallel, accumulation)
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
    return Batch(micro, global_size // (micro * data_parallel), data_parallel, accumulation)


# --- checks ------------------------------------------------------------------------------------


def faults_of(config: TrainConfig) -> list[str]:
    """Every contradiction that needs no model to be seen."""
    return [
        *_layout_faults(config.parallelism, config.batch),
        *_optimizer_faults(config.optimizer, config.schedule),
        *_distributed_faults(config.parallelism, config.optimizer),
        *_saving_faults(config.saving),
    ]


def _layout_faults(layout: Parallelism, batch: Batch) -> list[str]:
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


def _optimizer_faults(optimizer: Optimizer, schedule: Schedule | None) -> list[str]:
    faults = []
    if optimizer.lr_mult != 1.0 and optimizer.scale_lr is None:
        faults.append(f"lr_mult={optimizer.lr_mult} has no scale_lr_cond to apply to")
    if schedule is None:
        return faults
    if schedule.min_lr > schedule.lr:
        faults.append(f"min_lr {schedule.min_lr} is above the learning rate {schedule.lr}")
    if schedule.warmup_steps >= schedule.decay_steps:
        faults.append(
            f"a warmup of {schedule.warmup_steps:g} steps leaves nothing of a schedule of "
            f"{schedule.decay_steps:g}"
        )
    if schedule.wd_end < schedule.wd_start:
        faults.append(
            f"weight decay falls from {schedule.wd_start} to {schedule.wd_end}; it may only grow"
        )
    return faults


def _distributed_faults(layout: Parallelism, optimizer: Optimizer) -> list[str]:
    if not layout.distributed_optimizer or optimizer.name != "sgd":
        return []
    return [
        "megatron-core's distributed optimizer has no sgd; use adamw or adam, or leave "
        "use_distributed_optimizer out"
    ]


def _saving_faults(saving: Saving) -> list[str]:
    if saving.save_dir is not None:
        return []
    faults = []
    if saving.save_interval is not None:
        faults.append(f"--save-interval {saving.save_interval} has no --save-dir to save to")
    if saving.keep_last is not None:
        faults.append(f"--keep-last {saving.keep_last} has no --save-dir to keep them in")
    if saving.resume == LATEST:
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
    """Compare what ``other_megatron_args`` says of the model with what it is."""
    raise_faults(
        name,
        [
            f"{OTHER}[{key!r}] is {value!r}, the model's is {actual.get(key)!r}; leave it out"
            for key, value in expected.items()
            if actual.get(key) != value
        ],
    )


def megatron_args(config: TrainConfig) -> dict[str, Any]:
    """The settings under Megatron's argument names, for a ``custom_train_step_class``."""
    layout, batch = config.parallelism, config.batch
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": 1,
        "sequence_parallel": layout.sequence_parallel,
        "use_distributed_optimizer": layout.distributed_optimizer,
        "data_parallel_size": batch.data_parallel,
        "micro_batch_size": batch.micro_batch_size,
        "num_micro_batches": batch.num_micro_batches,
        "global_batch_size": batch.global_batch_size,
        "seq_length": config.data.seq_length,
        "eod_mask_loss": config.data.eod_mask_loss,
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "megatron_dataset_flag": False,
        "vocab_file": None,
        "model_type_name": "gpt",
        "model_return_dict": True,
        "pretraining_flag": True,
        "return_logits": config.model.return_logits,
        "calculate_per_token_loss": config.data.per_token_loss,
        "attention_dropout": config.model.attention_dropout,
        "hidden_dropout": config.model.hidden_dropout,
        "check_for_nan_in_loss_and_grad": config.optimizer.check_for_nan,
        "clip_grad": config.optimizer.clip_grad,
        "bf16": config.precision.name == "bf16",
        "fp16": False,
        "seed": config.seed,
        "train_iters": config.steps,
    }
