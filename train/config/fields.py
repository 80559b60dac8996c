"""``MegatronLMPlugin``: what a script says to Accelerate about Megatron, field by field.

Every field of Accelerate 1.15's plugin is here under the same name and with the same default.
``FIELDS`` says of each what it does here, or why it is refused; a refused field raises as soon as
it gets another value than its default, so that none is silently ignored.

A value comes from the constructor, else from the environment (``MEGATRON_LM_TP_DEGREE``), else
from the ``megatron_lm_config`` of the Accelerate YAML that ``ACCELERATE_CONFIG_FILE`` names. The
default YAML in Hugging Face's cache is not read by a script: ``accelerate launch`` reads it and
hands it on as environment variables, and a script started without it would not expect it.

One default differs: ``context_parallel_size`` is 1, where Accelerate's 2 doubles the processes that
are needed. And some defaults count only when they are given: the recompute settings ("full",
"uniform", 1), the dropouts (0.0) and ``use_rotary_position_embeddings``, so that a plugin that says
nothing recomputes nothing and keeps the model's own dropout and positions.

What the values mean together (sizes, schedules, contradictions) is left to ``config.py``.
Imports neither torch nor, until a YAML is read, yaml.
"""

from __future__ import annotations

import difflib
import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..errors import TrainError

ENV, KEY = "MEGATRON_LM_", "megatron_lm_"  # prefixes of variables and of YAML keys
CONSTRUCTOR, ASSIGNED, OTHER = "the constructor", "assigned", "other_megatron_args"

Sourced = Mapping[str, tuple[object, str]]  # name -> (value, where it comes from)


# --- values ------------------------------------------------------------------------------------


def _whole(value: object) -> int:
    if isinstance(value, bool):
        raise ValueError
    return int(value) if isinstance(value, str) else operator.index(value)  # type: ignore[arg-type]


def _real(value: object) -> float:
    if isinstance(value, bool) or not math.isfinite(number := float(value)):  # type: ignore[arg-type]
        raise ValueError
    return number


def _truth(value: object) -> bool:
    word = str(value).strip().lower()
    if word in ("y", "yes", "t", "true", "on", "1"):
        return True
    if word in ("n", "no", "f", "false", "off", "0"):
        return False
    raise ValueError


def _text(value: object) -> str:
    return os.fspath(value)  # type: ignore[call-overload]


def _backend(value: object) -> bool | str:
    if value in ("auto", "sdpa"):
        return True
    names = ("flash", "fused", "unfused", "local")
    return value if isinstance(value, str) and value in names else _truth(value)


def _wholes(value: object) -> list[int]:
    parts = value.split(",") if isinstance(value, str) else value
    return [_whole(part) for part in parts]  # type: ignore[attr-defined]


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(_text, value)) if isinstance(value, (list, tuple)) else (_text(value),)


def _table(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError
    return dict(value)


def _callable(value: object) -> object:
    if not callable(value):
        raise TypeError
    return value


# kind -> (what makes a value of it from a text or an object, its name in errors)
KINDS: dict[str, tuple[Callable[[object], object], str]] = {
    "int": (_whole, "a whole number"),
    "float": (_real, "a number"),
    "bool": (_truth, "true or false"),
    "str": (_text, "a text"),
    "ints": (_wholes, "a list of whole numbers"),
    "texts": (_texts, "a text or a list of texts"),
    "dict": (_table, "a dict"),
    "callable": (_callable, "a function or class, which only the constructor can give"),
    "backend": (_backend, "true, false, auto, flash, fused, unfused or local"),
    "any": (lambda value: value, "anything"),
}


@dataclass(frozen=True, slots=True)
class Values:
    """The values that a name may take."""

    kind: str  # a key of KINDS
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()

    def read(self, value: object) -> Any:
        """``value``, or the text that stands for it, in its own type; ValueError says what fits."""
        make, expected = KINDS[self.kind]
        try:
            made: Any = make(value)
        except (TypeError, ValueError, AttributeError, OverflowError):
            raise ValueError(f"expected {expected}") from None
        if self.choices and made not in self.choices:
            raise ValueError(f"choose one of {', '.join(self.choices)}")
        for number in made if isinstance(made, list) else [made]:
            if self.least is not None and number < self.least:
                raise ValueError(f"must be at least {self.least:g}")
            if self.most is not None and number > self.most:
                raise ValueError(f"must be at most {self.most:g}")
        return made


@dataclass(frozen=True, slots=True)
class FieldUse:
    """What becomes of one field, argument or key."""

    use: Literal["used", "refused"]
    values: Values
    default: object
    what: str  # what it does here, or what it would do
    reason: str = ""  # why any value but the default is refused, and what to do instead


def _used(
    kind: str,
    default: object,
    what: str,
    *,
    least: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
) -> FieldUse:
    return FieldUse("used", Values(kind, least, most, choices), default, what)


def _refused(kind: str, default: object, what: str, reason: str) -> FieldUse:
    return FieldUse("refused", Values(kind), default, what, reason)


# --- fields ------------------------------------------------------------------------------------

_DECODER_ONLY = "only decoder models are trained here; leave it out"
_OWN_MODEL = (
    "the model comes from the transformers model given to prepare(), because weights of unknown "
    "names could be neither saved nor resharded; leave it out"
)
_NO_DUMMY = (
    "there is no MegatronLMDummyDataLoader here; give prepare() a DataLoader over your dataset "
    "(megatron-core's GPTDataset is one), or use train-ckpt, which builds indexed datasets"
)
_NO_CPU_OPTIMIZER = (
    "masters and moments stay on the training device; use_distributed_optimizer=True cuts them "
    "over the data-parallel ranks"
)
_STYLES = ("constant", "linear", "cosine")

FIELDS: dict[str, FieldUse] = {
    "tp_degree": _used("int", 1, "Ranks that share each layer's matrices.", least=1),
    "pp_degree": _used("int", 1, "Pipeline stages that the layers are spread over.", least=1),
    "use_custom_fsdp": _refused(
        "bool", False, "Would cut the weights over the data-parallel ranks.",
        "checkpoints hold whole tp x pp shards; use_distributed_optimizer=True cuts the optimizer, "
        "the larger part",
    ),
    "overlap_cpu_optimizer_d2h_h2d": _refused(
        "bool", False, "Would overlap copies of an optimizer in host memory.", _NO_CPU_OPTIMIZER
    ),
    "no_load_optim": _used(
        "bool", False, "load_state leaves the optimizer; its masters follow the loaded weights."
    ),
    "eod_mask_loss": _used(
        "bool", False, "Leaves positions whose input is the end-of-text token out of the loss."
    ),
    "no_save_optim": _used("bool", False, "Checkpoints hold weights and no optimizer state."),
    "optimizer_cpu_offload": _refused(
        "bool", False, "Would keep the optimizer in host memory.", _NO_CPU_OPTIMIZER
    ),
    "use_precision_aware_optimizer": _refused(
        "bool", False, "Would keep masters and moments in less than fp32.",
        "it needs Transformer Engine's FusedAdam, and checkpoints hold fp32 masters and moments",
    ),
    "decoder_last_pipeline_num_layers": _used(
        "int", None, "Layers of the last pipeline stage; the others share the rest evenly.", least=1
    ),
    "recompute_granularity": _used(
        "str", "full", "What is computed again in the backward pass: full (whole "
        "layers), selective (attention) or none; it outranks recompute_activations.",
        choices=("full", "selective", "none"),
    ),
    "recompute_method": _used(
        "str", "uniform", "Which layers full recomputation covers: uniform (all, in groups of "
        "recompute_num_layers) or block (the first recompute_num_layers of each stage).",
        choices=("uniform", "block"),
    ),
    "recompute_num_layers": _used(
        "int", 1, "Layers in a recomputed group (uniform), or recomputed per stage (block).",
        least=1,
    ),
    "attention_backend": _refused(
        "backend", True, "Attention is PyTorch's SDPA, which picks its flash, cuDNN or own kernel.",
        "megatron-core's other attention keeps the score matrix, and a kernel of SDPA is pinned by "
        "running the script inside torch.nn.attention.sdpa_kernel; leave it at True or auto",
    ),
    "expert_model_parallel_size": _refused(
        "int", 1, "Would spread experts over ranks.", "mixture-of-experts models are not trained "
        "here yet; leave it at 1",
    ),
    "context_parallel_size": _refused(
        "int", 1, "Would cut long sequences over ranks.", "the attention here needs whole "
        "sequences; for long ones use sequence_parallelism, recomputation or a larger tp_degree",
    ),
    "attention_dropout": _used(
        "float", 0.0, "Dropout of attention weights; the model's own where it is not given.",
        least=0, most=1,
    ),
    "hidden_dropout": _used(
        "float", 0.0, "Dropout after embedding, attention and MLP; the model's own where it is "
        "not given.", least=0, most=1,
    ),
    "attention_softmax_in_fp32": _refused(
        "bool", True, "SDPA computes the softmax in fp32.", "SDPA has no other; leave it at True"
    ),
    "expert_tensor_parallel_size": _refused(
        "int", 1, "Would set the tensor parallelism of experts.", "mixture-of-experts models are "
        "not trained here yet; leave it at 1",
    ),
    "calculate_per_token_loss": _used(
        "bool", True, "The loss is the mean over all tokens of the batch, as in transformers; "
        "False takes the mean of the micro-batches' means, those without a token left out.",
    ),
    "use_rotary_position_embeddings": _used(
        "bool", True, "The model keeps its own positions; a given value that contradicts them is "
        "an error.",
    ),
    "num_micro_batches": _used(
        "int", 1, "Micro-batches in one forward and backward of the pipeline.", least=1
    ),
    "gradient_clipping": _used(
        "float", 1.0, "Largest L2 norm of all gradients together; 0 does not clip.", least=0
    ),
    "sequence_parallelism": _used(
        "bool", False, "Cuts norms, dropout and saved activations along the sequence over the tp "
        "ranks; without effect at tp_degree 1.",
    ),
    "recompute_activations": _used(
        "bool", False, "Selective recomputation; full where one of its settings is given too "
        "(checkpoint_num_layers, recompute_method, ...).",
    ),
    "use_distributed_optimizer": _used(
        "bool", False, "Cuts masters and moments over the data-parallel ranks; for AdamW and Adam."
    ),
    "pipeline_model_parallel_split_rank": _refused(
        "int", None, "Would be the stage where the decoder begins.", _DECODER_ONLY
    ),
    "num_layers_per_virtual_pipeline_stage": _used(
        "int", None, "Layers in each of the several chunks that a stage holds when the pipeline "
        "is interleaved.", least=1,
    ),
    "is_train_batch_min": _used(
        "bool", True, "The micro-batch is the smallest batch size of the prepared loaders; False "
        "takes the largest.",
    ),
    "train_iters": _used(
        "int", None, "Optimizer steps of the whole training: where the schedule ends; train-ckpt "
        "stops there.", least=1,
    ),
    "train_samples": _used("int", None, "The same in samples.", least=1),
    "weight_decay_incr_style": _used(
        "str", "constant", "How weight decay grows over the training.", choices=_STYLES
    ),
    "start_weight_decay": _used("float", None, "Weight decay of the first step.", least=0),
    "end_weight_decay": _used("float", None, "Weight decay of the last step.", least=0),
    "lr_decay_style": _used(
        "str", "linear", "How the learning rate falls after the warmup.", choices=_STYLES
    ),
    "lr_decay_iters": _used(
        "int", None, "Step at which the learning rate reaches min_lr; train_iters by default.",
        least=1,
    ),
    "lr_decay_samples": _used("int", None, "The same in samples.", least=1),
    "lr_warmup_iters": _used(
        "int", None, "Steps over which the learning rate rises from 0.", least=0
    ),
    "lr_warmup_samples": _used("int", None, "The same in samples.", least=0),
    "lr_warmup_fraction": _used(
        "float", None, "The same as a share of the decay's steps.", least=0, most=1
    ),
    "min_lr": _used("float", 0, "Learning rate at the end of the decay and after it.", least=0),
    "consumed_samples": _used(
        "ints", None, "Samples to skip in each prepared loader, in the order of prepare(); whole "
        "global batches, which may be epochs. A loaded checkpoint outranks it.", least=0,
    ),
    "no_wd_decay_cond": _used(
        "callable", None, "no_wd_decay_cond(name, parameter): true for parameters without weight "
        "decay. Names are megatron-core's, layers counted over the whole model. An error beside "
        "several param groups of the optimizer's own.",
    ),
    "scale_lr_cond": _used(
        "callable", None, "scale_lr_cond(name, parameter): true for parameters whose learning "
        "rate is multiplied by lr_mult; else as no_wd_decay_cond.",
    ),
    "lr_mult": _used("float", 1.0, "The factor of scale_lr_cond.", least=0),
    "megatron_dataset_flag": _refused(
        "bool", False, "Would announce a MegatronLMDummyDataLoader.", _NO_DUMMY
    ),
    "seq_length": _used(
        "int", None, "Longest sequence, longer ones are refused; by default the model's positions "
        "(train-ckpt: at most 1024 of them).", least=1,
    ),
    "encoder_seq_length": _refused(
        "int", None, "Would be the sequence length of an encoder.", _DECODER_ONLY
    ),
    "decoder_seq_length": _used("int", None, "Another name of seq_length.", least=1),
    "tensorboard_dir": _used(
        "str", None, "Folder of TensorBoard event files: loss, lr and grad_norm of every optimizer "
        "step, eval_loss of every evaluation.",
    ),
    "set_all_logging_options": _used(
        "bool", False, "Logs the norm of the weights too (params_norm), which costs a pass over "
        "them; everything else is logged anyway.",
    ),
    "eval_iters": _used(
        "int", 100, "train-ckpt: steps of one evaluation. A script evaluates as it likes.", least=1
    ),
    "eval_interval": _used(
        "int", 1000, "train-ckpt: steps between evaluations. A script evaluates as it likes.",
        least=1,
    ),
    "return_logits": _used(
        "bool", False, "The output has the logits of the whole vocabulary, gathered on every rank; "
        "without it only a batch without labels gives them.",
    ),
    "custom_train_step_class": _used(
        "callable", None, "Called with a namespace of Megatron's arguments and "
        "custom_train_step_kwargs; its forward_step(iterator, model) runs each micro-batch and "
        "returns (output, function of the output that returns (loss, dict)). The loss is the mean "
        "over micro-batches and data-parallel ranks.",
    ),
    "custom_train_step_kwargs": _used(
        "dict", None, "Keyword arguments for custom_train_step_class."
    ),
    "custom_model_provider_function": _refused(
        "callable", None, "Would build the model.", _OWN_MODEL
    ),
    "custom_prepare_model_function": _refused(
        "callable", None, "Would wrap the model.", _OWN_MODEL
    ),
    "custom_megatron_datasets_provider_function": _refused(
        "callable", None, "Would build Megatron datasets.", _NO_DUMMY
    ),
    "custom_get_batch_function": _used(
        "callable", None, "custom_get_batch_function(iterator) gives tokens, labels (shifted), "
        "loss_mask, attention_mask (None, [rows, sequence] with 1 for a token, or [rows or 1, 1, "
        "sequence, sequence] with true for hidden) and position_ids of a micro-batch.",
    ),
    "custom_loss_function": _used(
        "callable", None, "custom_loss_function(loss_mask, losses) gives the loss of a "
        "micro-batch, a scalar, and a dict of scalars that the output has as reported; with "
        "return_logits it gets (losses, logits of this tp rank). Micro-batches count by their "
        "tokens, or all alike where calculate_per_token_loss is False.",
    ),
    "other_megatron_args": _used(
        "dict", None, "Megatron arguments by name: those with a meaning here are used, those that "
        "describe the model are compared with it, any other is an error.",
    ),
    "checkpoint_num_layers": _used(
        "int", None, "The older name of recompute_num_layers; asks for full recomputation.", least=1
    ),
    "distribute_checkpointed_activations": _used(
        "bool", False, "Each tp rank keeps its part of the inputs that full recomputation saves.",
    ),
    "partition_activations": _used(
        "bool", False, "The same as distribute_checkpointed_activations."
    ),
    "check_for_nan_in_loss_and_grad": _used(
        "bool", True, "A loss or gradient that is not finite stops the run, naming step and rank."
    ),
}  # fmt: skip

# What Accelerate itself takes from the environment and from a YAML's megatron_lm_config.
ACCELERATE_FIELDS = tuple(
    name
    for name in list(FIELDS)[: list(FIELDS).index("use_distributed_optimizer") + 1]
)  # fmt: skip

# Megatron's own names for what a plugin field says.
ALIASES = {
    "tensor_model_parallel_size": "tp_degree",
    "pipeline_model_parallel_size": "pp_degree",
    "sequence_parallel": "sequence_parallelism",
    "clip_grad": "gradient_clipping",
    "distribute_saved_activations": "distribute_checkpointed_activations",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}

# Megatron arguments that no field stands for.
ARGUMENTS: dict[str, FieldUse] = {
    "seed": _used("int", 1234, "Seed of initial weights, dropout and data order.", least=0),
    "make_vocab_size_divisible_by": _used(
        "int", 128, "The vocabulary is padded to a multiple of this times tp.", least=1
    ),
    "overlap_grad_reduce": _used(
        "bool", False, "Overlaps gradient reduction, and with the distributed optimizer gathering "
        "parameters, with computing; without effect while gradients are accumulated.",
    ),
    "distributed_timeout_minutes": _used(
        "int", 10, "How long a collective waits for other ranks.", least=1
    ),
}  # fmt: skip

# Megatron arguments that describe the model: they must say what the model is.
ARCHITECTURE: dict[str, FieldUse] = {
    name: _used(kind, None, "Compared with the model.")
    for kind, names in {
        "int": "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups "
        "kv_channels max_position_embeddings rotary_base orig_vocab_size padded_vocab_size",
        "float": "rotary_percent norm_epsilon",
        "bool": "group_query_attention swiglu add_bias_linear add_qkv_bias qk_layernorm "
        "untie_embeddings_and_output_weights",
        "str": "position_embedding_type normalization",
    }.items()
    for name in names.split()
}

# Megatron arguments that something else says here.
ELSEWHERE = {
    **dict.fromkeys(
        ("lr", "weight_decay", "optimizer", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum"),
        "the optimizer given to prepare() says it",
    ),
    **dict.fromkeys(
        ("micro_batch_size", "global_batch_size"),
        "the loader's batch_size is the micro-batch, num_micro_batches the number of them",
    ),
    "overlap_param_gather": "overlap_grad_reduce covers it",
    **dict.fromkeys(("bf16", "fp16"), "Accelerator(mixed_precision=...) says it"),
    **dict.fromkeys(("load", "save"), "load_state and save_state take the folder"),
    **dict.fromkeys(("wandb_project", "wandb_exp_name", "wandb_save_dir"), "use init_trackers"),
}


# --- the plugin --------------------------------------------------------------------------------


@dataclass
class MegatronLMPlugin:
    """Parallelism and training settings, in Accelerate's spelling; see ``FIELDS``.

    None means not given. After construction every field has its value, whatever its source.
    """

    tp_degree: int | None = None
    pp_degree: int | None = None
    use_custom_fsdp: bool | None = None
    overlap_cpu_optimizer_d2h_h2d: bool | None = None
    no_load_optim: bool | None = None
    eod_mask_loss: bool | None = None
    no_save_optim: bool | None = None
    optimizer_cpu_offload: bool | None = None
    use_precision_aware_optimizer: bool | None = None
    decoder_last_pipeline_num_layers: int | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    attention_backend: bool | str | None = None
    expert_model_parallel_size: int | None = None
    context_parallel_size: int | None = None
    attention_dropout: float | None = None
    hidden_dropout: float | None = None
    attention_softmax_in_fp32: bool | None = None
    expert_tensor_parallel_size: int | None = None
    calculate_per_token_loss: bool | None = None
    use_rotary_position_embeddings: bool | None = None
    num_micro_batches: int | None = None
    gradient_clipping: float | None = None
    sequence_parallelism: bool | None = None
    recompute_activations: bool | None = None
    use_distributed_optimizer: bool | None = None
    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: bool | None = None
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str | None = None
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str | None = None
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float | None = None
    consumed_samples: list[int] | None = None
    no_wd_decay_cond: Callable[..., bool] | None = None
    scale_lr_cond: Callable[..., bool] | None = None
    lr_mult: float | None = None
    megatron_dataset_flag: bool | None = None
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool | None = None
    eval_iters: int | None = None
    eval_interval: int | None = None
    return_logits: bool | None = None
    custom_train_step_class: Callable[..., Any] | None = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None
    checkpoint_num_layers: int | None = None
    distribute_checkpointed_activations: bool | None = None
    partition_activations: bool | None = None
    check_for_nan_in_loss_and_grad: bool | None = None

    # Filled in: where each given field came from, what the arguments of no field say, the YAML.
    origins: dict[str, str] = field(init=False, repr=False, compare=False)
    arguments: dict[str, Any] = field(init=False, repr=False, compare=False)
    file: AccelerateFile | None = field(init=False, repr=False, compare=False, default=None)
    overruled: list[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = {name: (getattr(self, name), CONSTRUCTOR) for name in FIELDS}
        named = os.environ.get("ACCELERATE_CONFIG_FILE")
        self.file = read_accelerate(named) if named else None
        sources = [given, environment(os.environ)]
        self._take(sources + ([self.file.plugin] if self.file else []))

    @classmethod
    def resolved(
        cls, sources: Sequence[Sourced], file: AccelerateFile | None = None
    ) -> MegatronLMPlugin:
        """A plugin from these sources alone, the first having the last word."""
        made = cls.__new__(cls)
        made.file = file
        made._take(sources)
        return made

    def _take(self, sources: Sequence[Sourced]) -> None:
        found = resolve(FIELDS, sources)
        faults, self.arguments = list(found.faults), {}
        faults += _apply_other(found, self.arguments)
        consumed = found.values["consumed_samples"]
        if consumed is not None and not 1 <= len(consumed) <= 3:
            faults.append(f"consumed_samples={consumed}: expected one to three numbers")
        raise_faults("MegatronLMPlugin", faults + _refusals(found))
        self.origins, self.overruled = found.origins, found.overruled
        if consumed is not None:
            found.values["consumed_samples"] = [*consumed, 0, 0][:3]
        for name in FIELDS:
            setattr(self, name, found.values[name])
        self._start = dict(found.values)

    def given(self, name: str) -> bool:
        """Whether someone gave the field a value, by assignment after construction included."""
        return name in self.origins or getattr(self, name) != self._start[name]

    def origin(self, name: str) -> str:
        """Where the field's value comes from."""
        if getattr(self, name) != self._start[name]:
            return ASSIGNED
        return self.origins.get(name, "default")

    def check(self) -> None:
        """Read again what was assigned since construction; TrainError where it does not fit."""
        given = {n: (getattr(self, n), self.origin(n)) for n in FIELDS if self.given(n)}
        overruled = self.overruled
        self._take([given])
        self.overruled = overruled

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Record batch sizes as attributes, where scripts for Accelerate look for them."""
        assert self.num_micro_batches is not None
        self.micro_batch_size, self.data_parallel_size = micro_batch_size, dp_degree
        self.global_batch_size = dp_degree * micro_batch_size * self.num_micro_batches


_SPOKEN = (CONSTRUCTOR, ASSIGNED)  # what a contradicting other_megatron_args may not outrank


def _apply_other(found: Resolved, arguments: dict[str, Any]) -> list[str]:
    """Let ``other_megatron_args`` set fields and arguments; the faults among them."""
    faults = []
    for name, value in (found.values["other_megatron_args"] or {}).items():
        where = f"{OTHER}[{name!r}]"
        known = ALIASES.get(name, name)
        use = FIELDS.get(known) or ARGUMENTS.get(name) or ARCHITECTURE.get(name)
        if name in ELSEWHERE:
            faults.append(f"{where}: {ELSEWHERE[name]}; leave it out")
        elif use is None or known == OTHER:
            known_names = [*FIELDS, *ALIASES, *ARGUMENTS, *ARCHITECTURE]
            faults.append(f"{where}: no argument that is known here{nearest(name, known_names)}")
        elif value is not None:
            try:
                made = use.values.read(value)
            except ValueError as error:
                faults.append(f"{where} = {value!r}: {error}")
                continue
            if known not in FIELDS:
                arguments[name] = made
            elif found.origins.get(known) in _SPOKEN and found.values[known] != made:
                faults.append(f"{where} is {made!r}, but {known} is {found.values[known]!r}")
            else:
                found.values[known], found.origins[known] = made, where
    return faults


def _refusals(found: Resolved) -> list[str]:
    return [
        f"{name}={found.values[name]!r} ({found.origins[name]}) is refused: {use.reason}"
        for name, use in FIELDS.items()
        if use.use == "refused" and name in found.origins and found.values[name] != use.default
    ]


# --- sources -----------------------------------------------------------------------------------


class Entry(Protocol):
    """A row of a table of settings."""

    @property
    def values(self) -> Values:
        """What the setting may be."""

    @property
    def default(self) -> object:
        """What it is when nobody says."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """The outcome of several sources."""

    values: dict[str, Any]
    origins: dict[str, str]  # of the values that somebody gave
    overruled: list[str]  # a line for each value that another source outranked
    faults: list[str]


def resolve(table: Mapping[str, Entry], sources: Sequence[Sourced]) -> Resolved:
    """For each name of ``table`` the first value that is not None, read as the table says."""
    found = Resolved({}, {}, [], [])
    for name, entry in table.items():
        found.values[name] = entry.default
        said = [source[name] for source in sources if name in source]
        said = [(value, where) for value, where in said if value is not None]
        if not said:
            continue
        try:
            value = entry.values.read(said[0][0])
        except ValueError as error:
            found.faults.append(f"{name}={said[0][0]!r} ({said[0][1]}): {error}")
            continue
        found.values[name], found.origins[name] = value, said[0][1]
        for other, where in said[1:]:
            if _differs(entry.values, other, value):
                line = f"{name}: {value} ({said[0][1]}) outranks {other} ({where})"
                found.overruled.append(line)
    return found


def _differs(values: Values, other: object, value: object) -> bool:
    try:
        return bool(values.read(other) != value)
    except ValueError:
        return True


def environment(environ: Mapping[str, str]) -> Sourced:
    """What ``MEGATRON_LM_*`` variables say; one that is nearly a field's name is an error."""
    names = {ENV + name.upper(): name for name in FIELDS}
    unknown = [v for v in environ if v.startswith(ENV) and v not in names]
    # A variable of another program (MEGATRON_LM_PATH) is no fault; a slip of the pen is.
    slips = [(v, difflib.get_close_matches(v, names, 1, 0.9)) for v in unknown]
    raise_faults(
        "environment", [f"{v} is not known; did you mean {near[0]}?" for v, near in slips if near]
    )
    return {names[v]: (text, v) for v, text in environ.items() if v in names}


def nearest(name: str, known: Iterable[str]) -> str:
    """A phrase that names the known name nearest to ``name``."""
    near = difflib.get_close_matches(name, list(known), 1, 0.3)
    return f"; the nearest is {near[0]}" if near else ""


def raise_faults(headline: str, faults: Sequence[str]) -> None:
    """Raise one TrainError that lists every fault; return quietly if there is none."""
    if len(faults) == 1:
        raise TrainError(f"{headline}: {faults[0]}")
    if faults:
        lines = "".join(f"\n  - {fault}" for fault in faults)
        raise TrainError(f"{headline} ({len(faults)} faults){lines}")


# --- Accelerate's YAML -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AccelerateFile:
    """What an Accelerate YAML of ``distributed_type: MEGATRON_LM`` says."""

    path: str
    plugin: Sourced  # field -> (value as written, where)
    values: Mapping[str, Any]  # key of FILE_KEYS -> value, default where absent
    given: frozenset[str]  # the keys of ``values`` that the file has

    @property
    def num_processes(self) -> int | None:
        """Processes of all machines together, if the file says."""
        count = self.values["num_processes"]
        return count if count > 0 else None  # Accelerate writes -1 for "not said"


_OTHER_ENGINE = "it configures another engine; remove it"
FILE_KEYS: dict[str, FieldUse] = {
    "compute_environment": _used(
        "str", "LOCAL_MACHINE", "Where it runs.", choices=("LOCAL_MACHINE",)
    ),
    "mixed_precision": _used("str", "no", "no (fp32) or bf16."),
    "use_cpu": _used("bool", False, "Trains on CPU even where there is a GPU."),
    "num_processes": _used("int", -1, "Processes of all machines together.", least=-1),
    "num_machines": _used("int", 1, "Machines.", least=1),
    "machine_rank": _used("int", 0, "This machine's number.", least=0),
    "main_process_ip": _used("any", None, "Address of machine 0."),
    "main_process_port": _used("int", None, "Port of machine 0.", least=0, most=65535),
    "rdzv_backend": _used("str", "static", "How machines find each other: static, c10d, ..."),
    "same_network": _used("bool", True, "Whether the machines share a network."),
    "gpu_ids": _used("any", None, "GPUs to use: all, or numbers with commas."),
    "main_training_function": _used("str", "main", "For notebooks and TPUs; nothing here."),
    "debug": _refused("bool", False, "", "set TORCH_DISTRIBUTED_DEBUG=DETAIL instead"),
    "enable_cpu_affinity": _refused("bool", False, "", "start the command under numactl instead"),
    "fp8_config": _refused("any", None, "", "bf16 is the lowest precision here; remove it"),
    **{
        name: _refused("any", None, "", _OTHER_ENGINE)
        for name in ("deepspeed_config", "fsdp_config", "parallelism_config", "mpirun_config")
    },
    **{
        name: _refused("any", None, "", "the trainer compiles what gains from it; remove it")
        for name in ("dynamo_config", "dynamo_backend")
    },
    **{
        name: _refused("any", None, "", "there are no TPUs here; remove it")
        for name in (
            "downcast_bf16", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo",
            "command_file", "commands", "tpu_vm", "tpu_env",
        )
    },
    "fp16": _refused("bool", False, "", "train in bf16: mixed_precision: bf16"),
}  # fmt: skip


def read_yaml(path: str) -> dict[str, Any]:
    """The mapping in a YAML or JSON file."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise TrainError(f"{path}: reading YAML needs PyYAML; pip install pyyaml") from None
    try:
        with open(path, encoding="utf-8") as file:
            found = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TrainError(f"{path}: cannot be read: {reason}") from None
    except yaml.YAMLError as error:
        raise TrainError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        kind = type(found).__name__
        raise TrainError(f"{path}: expected a mapping of settings, found {kind}")
    return found


def is_accelerate(table: Mapping[str, object]) -> bool:
    """Whether a YAML's mapping is in Accelerate's form."""
    return bool(table.keys() & {"distributed_type", "megatron_lm_config", "compute_environment"})


def default_accelerate_path(environ: Mapping[str, str]) -> str:
    """Where ``accelerate config`` writes and ``accelerate launch`` looks without --config_file."""
    cache = environ.get("XDG_CACHE_HOME", "~/.cache")
    home = environ.get("HF_HOME", os.path.join(cache, "huggingface"))
    return os.path.join(os.path.expanduser(home), "accelerate", "default_config.yaml")


def read_accelerate(path: str | os.PathLike[str]) -> AccelerateFile:
    """Read an Accelerate YAML; TrainError unless it is for Megatron and every key is known."""
    name = os.fspath(path)
    return parse_accelerate(read_yaml(name), name)


def parse_accelerate(table: Mapping[str, Any], path: str) -> AccelerateFile:
    """What a mapping in Accelerate's form says; ``path`` is for messages."""
    engine = table.get("distributed_type")
    if engine != "MEGATRON_LM":
        found_type = f"distributed_type {engine}" if engine else "no distributed_type"
        raise TrainError(
            f"{path}: {found_type}, expected MEGATRON_LM; answer yes to Megatron-LM in "
            "`accelerate config`, or write distributed_type: MEGATRON_LM"
        )
    megatron = table.get("megatron_lm_config") or {}
    if not isinstance(megatron, dict):
        raise TrainError(f"{path}: megatron_lm_config: expected a mapping of {KEY}* keys")
    faults = _unknown_keys(table, [*FILE_KEYS, "distributed_type", "megatron_lm_config"])
    faults += _unknown_keys(megatron, [KEY + field_name for field_name in FIELDS])
    said = {k: (_spelled(k, v), k) for k, v in table.items() if k in FILE_KEYS}
    found = resolve(FILE_KEYS, [{k: v for k, v in said.items() if not _off(k, v[0])}])
    faults += found.faults + _file_faults(found)
    raise_faults(path, faults)
    plugin = {
        key.removeprefix(KEY): (value, f"{key} in {path}")
        for key, value in megatron.items()
        if value is not None
    }
    return AccelerateFile(path, plugin, found.values, frozenset(found.origins))


def _unknown_keys(table: Mapping[str, Any], known: Sequence[str]) -> list[str]:
    return [f"unknown key {key}{nearest(str(key), known)}" for key in table if key not in known]


def _spelled(key: str, value: object) -> object:
    """YAML reads an unquoted ``no`` as false."""
    return "no" if key == "mixed_precision" and value is False else value


def _off(key: str, value: object) -> bool:
    """Whether a key that would be refused is only there to say that it is off."""
    if FILE_KEYS[key].use == "used":
        return False
    if isinstance(value, dict):
        return all(_off(key, part) for part in value.values())
    return value in (None, []) or str(value).lower() in ("false", "no", "none", "")


def _file_faults(found: Resolved) -> list[str]:
    faults = [
        f"{key}: {found.values[key]} is refused: {FILE_KEYS[key].reason}"
        for key in found.origins
        if FILE_KEYS[key].use == "refused"
    ]
    machines, processes = found.values["num_machines"], found.values["num_processes"]
    if processes > 0 and processes % machines:
        faults.append(f"num_processes {processes} does not divide over num_machines {machines}")
    if found.values["machine_rank"] >= machines:
        faults.append(
            f"machine_rank {found.values['machine_rank']}: {machines} machines count from 0"
        )
    if found.values["mixed_precision"] not in ("no", "bf16"):
        faults.append(precision_fault("mixed_precision", found.values["mixed_precision"]))
    return faults


def precision_fault(name: str, value: object) -> str:
    """Why a mixed precision other than bf16 is refused."""
    if value in ("fp16", "fp8"):
        return f"{name}: {value} is refused: bf16 needs no loss scale and works here; write bf16"
    return f"{name}: {value!r} is not known; write no or bf16"
