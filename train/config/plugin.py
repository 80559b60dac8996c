"""``MegatronLMPlugin``: a script's settings for Megatron, with Accelerate's fields.

A value comes from the constructor, else from the environment (``MEGATRON_LM_TP_DEGREE``), else
from the ``megatron_lm_config`` of the Accelerate YAML that ``ACCELERATE_CONFIG_FILE`` names. The
default YAML in Hugging Face's cache is not read by a script: ``accelerate launch`` reads it and
passes it on as environment variables, and a script started without it would not expect it.

What the values mean together (sizes, schedules, contradictions) is left to ``from_plugin`` and
``checks``. Imports neither torch nor, until a YAML is read, yaml.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import nearest, raise_faults
from .accelerate_yaml import AccelerateFile, read_accelerate
from .fields import ALIASES, ARCHITECTURE, ARGUMENTS, ELSEWHERE, FIELDS
from .values import Resolved, Sourced, resolve

ENV = "MEGATRON_LM_"  # prefix of environment variables
CONSTRUCTOR, ASSIGNED, OTHER = "the constructor", "assigned", "other_megatron_args"


@dataclass
class MegatronLMPlugin:
    """Parallelism and training settings, in Accelerate's spelling; see ``FIELDS``.

    None means not given. After construction every field has a value, from some source.
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

    # Filled in: where each given field came from, Megatron arguments without a field, the YAML.
    origins: dict[str, str] = field(init=False, repr=False, compare=False)
    arguments: dict[str, Any] = field(init=False, repr=False, compare=False)
    file: AccelerateFile | None = field(init=False, repr=False, compare=False, default=None)
    overridden: list[str] = field(init=False, repr=False, compare=False)

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
        """A plugin from these sources; earlier ones override later ones."""
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
        self.origins, self.overridden = found.origins, found.overridden
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
        """Read again what was assigned since construction; TrainError if it does not fit."""
        given = {n: (getattr(self, n), self.origin(n)) for n in FIELDS if self.given(n)}
        overridden = self.overridden
        self._take([given])
        self.overridden = overridden

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Record batch sizes as attributes, where scripts for Accelerate look for them."""
        assert self.num_micro_batches is not None
        self.micro_batch_size, self.data_parallel_size = micro_batch_size, dp_degree
        self.global_batch_size = dp_degree * micro_batch_size * self.num_micro_batches


_SPOKEN = (CONSTRUCTOR, ASSIGNED)  # what other_megatron_args may not override


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


def environment(environ: Mapping[str, str]) -> Sourced:
    """What ``MEGATRON_LM_*`` variables say; one that is nearly a field's name is an error."""
    names = {ENV + name.upper(): name for name in FIELDS}
    unknown = [v for v in environ if v.startswith(ENV) and v not in names]
    # A variable of another program (MEGATRON_LM_PATH) is no fault; a typo is.
    slips = [(v, difflib.get_close_matches(v, names, 1, 0.9)) for v in unknown]
    raise_faults(
        "environment", [f"{v} is not known; did you mean {near[0]}?" for v, near in slips if near]
    )
    return {names[v]: (text, v) for v, text in environ.items() if v in names}
