"""``TrainConfig``: all settings of the trainer, from a script's plugin or a command line.

It is made by ``from_plugin.from_plugin`` from a ``MegatronLMPlugin``, or by
``from_options.from_options`` from ``train-ckpt``'s options. ``checks`` computes sizes, finds every
contradiction between values and reports all together. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import TrainError

LATEST = "latest"  # --resume without a folder: the one that SAVE_DIR/latest names


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
        """Layers of each stage; None if they are even."""
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
class BatchSizes:
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
class OptimizerSettings:
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
    key: str = "text"  # of a JSONL record's text
    seq_length: int | None = None  # None: the first batch's, or what `for_model` chooses
    eval_files: tuple[str, ...] = ()
    eval_interval: int = 1000  # steps
    eval_iters: int = 100  # steps of one evaluation
    eod_mask_loss: bool = False
    per_token_loss: bool = True  # mean over the batch's tokens; if false, over micro-batches' means
    consumed_samples: tuple[int, int, int] = (0, 0, 0)  # to skip in each loader
    smallest_loader: bool = True  # of several loaders' batch sizes the smallest is the micro-batch


@dataclass(frozen=True, slots=True)
class Saving:
    """Checkpoints."""

    save_dir: str | None = None
    save_interval: int | None = None  # steps; None: at the end only
    keep_last: int | None = None  # None: all
    resume: str | None = None  # LATEST, or a checkpoint's folder
    overwrite: bool = False  # replace another run's results in save_dir
    break_lock: bool = False  # take over the lock of a run that is dead
    save_optimizer: bool = True
    load_optimizer: bool = True
    verify_source: bool = True  # check the recorded checksums of what is loaded


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """How the model is built and run."""

    path: str | None = None  # a Hugging Face folder or a config.json
    attention_dropout: float | None = None  # None: the model's own
    hidden_dropout: float | None = None
    rotary: bool | None = None  # what the user says about positions; None: nothing
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
    """What is logged besides metrics.jsonl and the progress bar."""

    tensorboard_dir: str | None = None  # None: below SAVE_DIR, if there is one
    params_norm: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """Processes and machines; None: not given."""

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
    batch: BatchSizes = field(default_factory=BatchSizes)
    precision: Precision = field(default_factory=Precision)
    recompute: Recompute = field(default_factory=Recompute)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: Schedule | None = None  # None: the optimizer's own lr, or a scheduler object
    data: Data = field(default_factory=Data)
    saving: Saving = field(default_factory=Saving)
    model: ModelSettings = field(default_factory=ModelSettings)
    hooks: Hooks = field(default_factory=Hooks)
    logging: Logging = field(default_factory=Logging)
    launch: Launch = field(default_factory=Launch)
    world_size: int = 1  # processes of all machines
    steps: int | None = None  # optimizer steps of the whole training, if given
    seed: int = 1234
    notes: tuple[str, ...] = ()  # lines for the user: what was overridden or has no effect


@dataclass(frozen=True, slots=True)
class Sizes:
    """Properties of a model that limit the settings; `model.build` checks heads and widths."""

    name: str  # for messages
    num_layers: int
    positions: int | None  # longest sequence; None: unbounded
    rotary: bool


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
