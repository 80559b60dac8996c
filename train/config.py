"""``TrainConfig``: everything that the trainer is told, from a script's plugin or a command line.

Two ways lead here. ``from_plugin`` reads a ``MegatronLMPlugin``; ``from_options`` reads
``train-ckpt``'s options, its ``--config`` files (its own form, or Accelerate's) and the
environment, makes a plugin of what they say and goes the first way. In that order of precedence:
flags, ``--config`` files (a later one before an earlier one), ``MEGATRON_LM_*`` variables, the
Accelerate YAML of ``ACCELERATE_CONFIG_FILE`` or, where ``train-ckpt`` itself starts the ranks as
``accelerate launch`` would, Accelerate's default file. What was outranked is a line in ``notes``.

Derived sizes and every contradiction between values are settled here, once, and reported
together. What only the model or the data can tell is checked by ``for_model``. Imports neither
torch nor, until a file is read, yaml.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import TrainError
from .plugin import (
    ARCHITECTURE,
    ARGUMENTS,
    FIELDS,
    OTHER,
    AccelerateFile,
    MegatronLMPlugin,
    Sourced,
    Values,
    default_accelerate_path,
    environment,
    is_accelerate,
    nearest,
    parse_accelerate,
    precision_fault,
    raise_faults,
    read_accelerate,
    read_yaml,
    resolve,
)

LATEST = "latest"  # --resume without a folder: the one that SAVE_DIR/latest names
MIXED = "ACCELERATE_MIXED_PRECISION"  # what `accelerate launch` hands on
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


# --- from a plugin -----------------------------------------------------------------------------


def from_plugin(
    plugin: MegatronLMPlugin,
    mixed_precision: str | None = None,
    *,
    world_size: int = 1,
    optimizer: Optimizer | None = None,
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
    nothing. ``global_batch_size`` outranks ``num_micro_batches``.
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
    settings = _optimizer(plugin, optimizer or Optimizer())
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
        launch=_launch(plugin.file, _argument(plugin, "distributed_timeout_minutes")),
        world_size=world_size,
        steps=steps,
        seed=_argument(plugin, "seed"),
        notes=(*notes, *more),
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
        return False, ["saved activations have one tp rank to lie on: nothing to distribute"]
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


def _optimizer(plugin: MegatronLMPlugin, said: Optimizer) -> Optimizer:
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


def _model(plugin: MegatronLMPlugin) -> Model:
    return Model(
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


def _launch(file: AccelerateFile | None, timeout_minutes: int) -> Launch:
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
    optimizer: Optimizer,
    batch: Batch,
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


# --- train-ckpt's options ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    """One option of train-ckpt, and key of its YAML."""

    values: Values
    help: str
    default: object = None
    field: str = ""  # the plugin field that it stands for, whose default is the option's
    metavar: str | None = None
    group: str = "training"


def _option(
    kind: str,
    help: str,
    default: object = None,
    *,
    field: str = "",
    metavar: str | None = None,
    group: str = "training",
    least: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
) -> Option:
    if metavar is None and not choices:
        metavar = {"int": "N", "float": "X", "texts": "FILE"}.get(kind)
    return Option(Values(kind, least, most, choices), help, default, field, metavar, group)


def _of_field(
    field: str,
    help: str,
    *,
    group: str = "training",
    choices: tuple[str, ...] = (),
    metavar: str | None = None,
) -> Option:
    """The option that stands for a plugin field, with the field's bounds and default."""
    use = FIELDS[field]
    found, kind = choices or use.values.choices, use.values.kind
    return _option(
        kind, help, use.default, field=field, group=group, least=use.values.least,
        most=use.values.most, choices=found, metavar=metavar,
    )  # fmt: skip


# Where a help text names no default, the table's is added to it.
OPTIONS: dict[str, Option] = {
    "model": _option(
        "str", "a Hugging Face model folder, or a config.json to start from",
        metavar="HF_DIR_OR_CONFIG", group="model and data",
    ),
    "data": _option("texts", "text or JSONL files", group="model and data"),
    "seq_length": _of_field(
        "seq_length", "tokens of a sequence (default: the model's positions, at most 1024)",
        group="model and data",
    ),
    "eval_data": _option("texts", "text or JSONL files to evaluate on", group="model and data"),
    "eval_interval": _of_field(
        "eval_interval", "steps between evaluations", group="model and data"
    ),
    "eval_iters": _of_field("eval_iters", "steps of one evaluation", group="model and data"),
    "tp": _of_field("tp_degree", "tensor-parallel ranks", group="layout"),
    "pp": _of_field("pp_degree", "pipeline stages", group="layout"),
    "pp_layers": _option(
        "ints", "layers of each pipeline stage (default: even)", metavar="10,10,8",
        group="layout", least=1,
    ),
    "virtual_pp_layers": _of_field(
        "num_layers_per_virtual_pipeline_stage",
        "layers of each chunk of an interleaved pipeline (default: not interleaved)",
        group="layout",
    ),
    "sequence_parallel": _of_field(
        "sequence_parallelism", "cut activations along the sequence over the tp ranks",
        group="layout",
    ),
    "distributed_optimizer": _of_field(
        "use_distributed_optimizer", "cut the optimizer over the data-parallel ranks",
        group="layout",
    ),
    "recompute": _of_field(
        "recompute_granularity", "what the backward pass computes again (default: none)",
        group="layout", choices=("none", "selective", "full"),
    ),
    "nproc": _option(
        "int", "processes on this machine (default: tp x pp)", group="layout", least=1
    ),
    "num_machines": _option("int", "machines (default: 1)", group="layout", least=1),
    "machine_rank": _option("int", "this machine's number, from 0", group="layout", least=0),
    "main_process_ip": _option(
        "str", "address of machine 0, where all meet", metavar="HOST", group="layout"
    ),
    "main_process_port": _option(
        "int", "its port (default: 29500)", group="layout", least=1, most=65535
    ),
    "rdzv_backend": _option(
        "str", "how machines meet (default: static)", group="layout", choices=("static", "c10d")
    ),
    "timeout_minutes": _option(
        "int", "how long a collective waits for other ranks (default: 10)", group="layout", least=1
    ),
    "micro_batch_size": _option("int", "sequences of a rank in one pass", 1, least=1),
    "global_batch_size": _option(
        "int", "sequences of all ranks in a step (default: one micro-batch each)", least=1
    ),
    "steps": _of_field("train_iters", "optimizer steps of the whole training"),
    "optimizer": _option(
        "str", "which optimizer", "adamw", choices=("adamw", "adam", "sgd")
    ),
    "lr": _option("float", "the highest learning rate", 1e-4, least=0),
    "lr_decay_style": _of_field("lr_decay_style", "how the learning rate falls"),
    "lr_warmup_steps": _of_field(
        "lr_warmup_iters", "steps over which the learning rate rises (default: 0)"
    ),
    "min_lr": _of_field("min_lr", "the learning rate at the end"),
    "weight_decay": _option("float", "weight decay", 0.01, least=0),
    "adam_beta1": _option("float", "Adam's first decay rate", 0.9, least=0, most=1),
    "adam_beta2": _option("float", "Adam's second decay rate", 0.999, least=0, most=1),
    "adam_eps": _option("float", "Adam's epsilon", 1e-8, least=0),
    "sgd_momentum": _option("float", "SGD's momentum", 0.0, least=0, most=1),
    "clip_grad": _of_field("gradient_clipping", "largest gradient norm; 0 does not clip"),
    "attention_dropout": _of_field(
        "attention_dropout", "dropout of attention weights (default: the model's)"
    ),
    "hidden_dropout": _of_field("hidden_dropout", "dropout elsewhere (default: the model's)"),
    "precision": _option("str", "of weights and activations", "fp32", choices=("fp32", "bf16")),
    "seed": _option(
        "int", "of initial weights, dropout and data order (default: 1234)", least=0
    ),
    "save_dir": _option("str", "where checkpoints, metrics and curves go", metavar="DIR",
                        group="saving"),
    "save_interval": _option("int", "steps between checkpoints (default: only at the end)",
                             group="saving", least=1),
    "keep_last": _option("int", "checkpoints to keep (default: all)", group="saving", least=1),
    "resume": _option(
        "str", "continue from a checkpoint, or from SAVE_DIR's latest", metavar="DIR",
        group="saving",
    ),
    "tensorboard_dir": _of_field(
        "tensorboard_dir", "TensorBoard event files (default: below SAVE_DIR)", group="saving",
        metavar="DIR",
    ),
}  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
    """Add train-ckpt's options to ``parser``, which must get dashed arguments."""
    groups: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        groups[option.group].add_argument("--" + name.replace("_", "-"), **_argparse(name, option))
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE.yaml",
        help="options by name (seq_length: 2048), or an Accelerate YAML for Megatron; may be "
        "repeated; options on the command line come first",
    )


def _argparse(name: str, option: Option) -> dict[str, Any]:
    """The keyword arguments of add_argument. No defaults: what was given must stay visible."""
    text = option.help.replace("%", "%%")
    if option.default is not None and option.default is not False and "(default" not in text:
        text += f" (default: {option.default})"
    made: dict[str, Any] = {"default": None, "help": text}
    kind = option.values.kind
    if kind == "bool":
        return made | {"action": argparse.BooleanOptionalAction}
    if option.metavar:
        made["metavar"] = option.metavar
    if name == "resume":
        return made | {"nargs": "?", "const": LATEST}
    if kind == "texts":
        return made | {"nargs": "+"}
    if option.values.choices:
        made["choices"] = option.values.choices
    return made | {"type": {"int": int, "float": float}.get(kind, str)}


def from_options(
    args: argparse.Namespace, environ: Mapping[str, str] | None = None, *, complete: bool = True
) -> TrainConfig:
    """What a command line means, with its files and the environment (see the module).

    Without ``complete`` model, data and steps may be missing: what is there can be diagnosed.
    """
    environ = os.environ if environ is None else environ
    sources, file = _sources(args, environ)
    own = resolve({n: o for n, o in OPTIONS.items() if not o.field}, sources)
    raise_faults("options", own.faults)
    plugin = MegatronLMPlugin.resolved(sources, file)
    said = own.values
    launch = _machines(_launch(file, 10), said, environ)
    world, more = _world(plugin, said["nproc"], launch, environ)
    config = from_plugin(
        plugin,
        said["precision"],
        world_size=world,
        optimizer=_optimizer_of(said),
        micro_batch_size=said["micro_batch_size"],
        global_batch_size=said["global_batch_size"],
        environ=environ,
    )
    notes = [f"settings in {file.path} count"] if file and file.path not in args.config else []
    notes += [*own.overruled, *plugin.overruled, *config.notes, *more, *_batch_note(plugin, config)]
    launch = replace(launch, timeout_minutes=config.launch.timeout_minutes)
    config = _with_options(replace(config, launch=launch), said, tuple(notes))
    faults = faults_of(config)
    if not complete:
        raise_faults("options", faults)
        return config
    faults += [] if config.steps else ["say how many steps: --steps N"]
    faults += [] if config.data.files else ["say what to train on: --data FILE ..."]
    if config.model.path is None and config.saving.resume is None:
        faults.append("say which model: --model HF_DIR_OR_CONFIG")
    raise_faults("options", faults)
    return config


def _with_options(
    config: TrainConfig, said: Mapping[str, Any], notes: tuple[str, ...]
) -> TrainConfig:
    """``config`` with what no plugin field says."""
    layers = tuple(said["pp_layers"]) if said["pp_layers"] else None
    local = config.world_size // config.launch.num_machines
    return replace(
        config,
        parallelism=replace(config.parallelism, pp_layers=layers),
        data=replace(config.data, files=said["data"] or (), eval_files=said["eval_data"] or ()),
        saving=replace(
            config.saving,
            save_dir=said["save_dir"],
            save_interval=said["save_interval"],
            keep_last=said["keep_last"],
            resume=said["resume"],
        ),
        model=replace(config.model, path=said["model"]),
        launch=replace(
            config.launch,
            nproc=local,
            timeout_minutes=said["timeout_minutes"] or config.launch.timeout_minutes,
        ),
        seed=config.seed if said["seed"] is None else said["seed"],
        notes=notes,
    )


def _machines(launch: Launch, said: Mapping[str, Any], environ: Mapping[str, str]) -> Launch:
    """``launch`` with what the command line says of machines; TrainError where that lacks."""
    names = ("num_machines", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend")
    given = {name: said[name] for name in names if said[name] is not None}
    launch = replace(launch, **given)
    count, rank = launch.num_machines, launch.machine_rank
    if "WORLD_SIZE" in environ:
        return launch  # the machines have met already
    faults = []
    if count == 1:
        alone = [f"--{n.replace('_', '-')} {given[n]}" for n in names[2:4] if n in given]
        faults += [f"{flag} needs several machines: --num-machines N" for flag in alone]
    elif launch.main_process_ip is None:
        faults.append(f"{count} machines need the address of the first: --main-process-ip HOST")
    if rank >= count:
        faults.append(f"--machine-rank {rank}: {count} machines count from 0")
    raise_faults("options", faults)
    if count > 1 and launch.main_process_port is None:
        launch = replace(launch, main_process_port=29500)
    return launch


def _optimizer_of(said: Mapping[str, Any]) -> Optimizer:
    return Optimizer(
        name=said["optimizer"],
        lr=said["lr"],
        betas=(said["adam_beta1"], said["adam_beta2"]),
        eps=said["adam_eps"],
        weight_decay=said["weight_decay"],
        momentum=said["sgd_momentum"],
    )


def _sources(
    args: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[list[Sourced], AccelerateFile | None]:
    """Who says what, the first having the last word; and the Accelerate file that counts."""
    flags = {n: (getattr(args, n, None), "--" + n.replace("_", "-")) for n in OPTIONS}
    named, file = [], None
    for path in reversed(args.config):
        table = read_yaml(path)
        if is_accelerate(table):
            read = parse_accelerate(table, path)
            named += [_own_keys(read), read.plugin]
            file = file or read
        else:
            named.append(_by_field(_own_file(table, path)))
    inherited = _inherited(environ)
    last: list[Sourced] = [_own_keys(inherited), inherited.plugin] if inherited else []
    mixed = environ.get(MIXED)
    launched: Sourced = {"precision": (_fp32(mixed), MIXED)} if mixed else {}
    return [_by_field(flags), *named, environment(environ), launched, *last], file or inherited


def _by_field(said: Mapping[str, tuple[object, str]]) -> Sourced:
    """Values by plugin field where the option stands for one."""
    found = {OPTIONS[name].field or name: value for name, value in said.items()}
    granularity, where = said.get("recompute", (None, ""))
    if granularity is not None:  # so that it outranks what another source says of the older field
        found["recompute_activations"] = (granularity != "none", where)
    return found


def _own_file(table: Mapping[str, Any], path: str) -> dict[str, tuple[object, str]]:
    """A YAML in train-ckpt's own form: option names, with dashes or underscores."""
    found, faults = {}, []
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in OPTIONS:
            faults.append(f"unknown key {key}{nearest(name, OPTIONS)}")
        elif name in found:
            faults.append(f"{key} is there twice")
        else:
            found[name] = (_resume(value) if name == "resume" else value, f"{key} in {path}")
    raise_faults(path, faults)
    return found


def _resume(value: object) -> object:
    """``resume: true`` is a bare ``--resume``."""
    return {True: LATEST, False: None}.get(value, value) if isinstance(value, bool) else value


def _own_keys(file: AccelerateFile) -> Sourced:
    """What an Accelerate file says of options that no plugin field stands for."""
    found: dict[str, tuple[object, str]] = {}
    if "mixed_precision" in file.given:
        where = f"mixed_precision in {file.path}"
        found["precision"] = (_fp32(file.values["mixed_precision"]), where)
    if file.num_processes:
        local = file.num_processes // file.values["num_machines"]
        found["nproc"] = (local, f"num_processes in {file.path}")
    return found


def _fp32(mixed: str) -> str:
    return "fp32" if mixed == "no" else mixed


def _inherited(environ: Mapping[str, str]) -> AccelerateFile | None:
    """The Accelerate file that nobody named on the command line."""
    named = environ.get("ACCELERATE_CONFIG_FILE")
    if named:
        return read_accelerate(named)
    path = default_accelerate_path(environ)
    if "WORLD_SIZE" in environ or not os.path.isfile(path):
        return None  # a launcher that reads it has done so
    table = read_yaml(path)
    if table.get("distributed_type") != "MEGATRON_LM":
        return None  # written for something else
    return parse_accelerate(table, path)


def _world(
    plugin: MegatronLMPlugin, nproc: int | None, launch: Launch, environ: Mapping[str, str]
) -> tuple[int, list[str]]:
    """Processes of all machines: those that a launcher started, else those that we shall."""
    assert plugin.tp_degree is not None
    assert plugin.pp_degree is not None
    model = plugin.tp_degree * plugin.pp_degree
    if "WORLD_SIZE" in environ:
        world, local = int(environ["WORLD_SIZE"]), environ.get("LOCAL_WORLD_SIZE")
        if nproc is not None and local is not None and int(local) != nproc:
            return world, [f"nproc: {nproc} gives way to the {local} that the launcher started"]
        return world, []
    if nproc is not None:
        return nproc * launch.num_machines, []
    if model % launch.num_machines:
        raise TrainError(
            f"tp x pp = {model} processes do not divide over {launch.num_machines} machines; "
            "say how many each starts: --nproc N"
        )
    return model, []


def _batch_note(plugin: MegatronLMPlugin, config: TrainConfig) -> list[str]:
    said, now = plugin.num_micro_batches, config.batch.num_micro_batches
    if not plugin.given("num_micro_batches") or said == now:
        return []
    return [
        f"num_micro_batches: {said} ({plugin.origin('num_micro_batches')}) gives way to {now}, "
        f"which the global batch of {config.batch.global_batch_size} takes"
    ]
