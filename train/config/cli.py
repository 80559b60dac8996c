"""``train-ckpt``'s options: one table of them, from which the parser and its help are made.

What the options mean is left to ``from_options``. Imports neither torch nor yaml.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .fields import FIELDS
from .schema import LATEST, TrainConfig
from .values import Values


@dataclass(frozen=True, slots=True)
class Need:
    """What an option needs; without it, a run with the option would be as one without it."""

    met: Callable[[TrainConfig], bool]
    lack: str  # why the option changes nothing, and what to do
    only_said: bool = False  # a note, not an error: launch scripts give it on every machine


@dataclass(frozen=True, slots=True)
class Option:
    """One option of train-ckpt, which is also a key of its YAML."""

    values: Values
    help: str
    default: object = None
    field: str = ""  # the plugin field with the same meaning; it has the same default
    metavar: str | None = None
    group: str = "training"
    needs: Need | None = None


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
    needs: Need | None = None,
) -> Option:
    if metavar is None and not choices:
        metavar = {"int": "N", "float": "X", "texts": "FILE"}.get(kind)
    values = Values(kind, least, most, choices)
    return Option(values, help, default, field, metavar, group, needs)


def _of_field(
    field: str,
    help: str,
    *,
    group: str = "training",
    choices: tuple[str, ...] = (),
    metavar: str | None = None,
    needs: Need | None = None,
) -> Option:
    """The option for a plugin field, with the field's bounds and default."""
    use = FIELDS[field]
    found, kind = choices or use.values.choices, use.values.kind
    return _option(
        kind, help, use.default, field=field, group=group, least=use.values.least,
        most=use.values.most, choices=found, metavar=metavar, needs=needs,
    )  # fmt: skip


_EVALUATION = Need(lambda c: bool(c.data.eval_files), "there is no --eval-data to evaluate on")
_ADAM = Need(lambda c: c.optimizer.name != "sgd", "is Adam's, the optimizer is sgd; leave it out")
_SGD = Need(lambda c: c.optimizer.name == "sgd", "is SGD's; --optimizer sgd takes it")
_SAVE_DIR = Need(lambda c: c.saving.save_dir is not None, "there is no --save-dir to write to")
_FALLING = Need(
    lambda c: c.schedule is None or c.schedule.style != "constant",
    "the learning rate does not fall; --lr-decay-style linear or cosine takes it",
)
_STAGES = Need(lambda c: c.parallelism.pp > 1, "pp is 1; --pp N takes it")
_TP = Need(lambda c: c.parallelism.tp > 1, "no effect at tp=1", only_said=True)
_DP = Need(
    lambda c: c.batch.data_parallel > 1, "no effect on one data-parallel rank", only_said=True
)
_MACHINES = Need(lambda c: c.launch.num_machines > 1, "no effect on one machine", only_said=True)
_STATIC = Need(
    lambda c: c.launch.num_machines > 1 and c.launch.rdzv_backend == "static",
    "no effect: machines number themselves with c10d, and one machine is number 0",
    only_said=True,
)
# If a help text names no default, the table's is added to it.
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
    "data_key": _option(
        "str", "key of a JSONL record's text", "text", metavar="KEY", group="model and data"
    ),
    "eval_data": _option("texts", "text or JSONL files to evaluate on", group="model and data"),
    "eval_interval": _of_field(
        "eval_interval", "steps between evaluations", group="model and data", needs=_EVALUATION
    ),
    "eval_iters": _of_field(
        "eval_iters", "steps of one evaluation", group="model and data", needs=_EVALUATION
    ),
    "tp": _of_field("tp_degree", "tensor-parallel ranks", group="layout"),
    "pp": _of_field("pp_degree", "pipeline stages", group="layout"),
    "pp_layers": _option(
        "ints", "layers of each pipeline stage (default: even)", metavar="10,10,8",
        group="layout", least=1, needs=_STAGES,
    ),
    "virtual_pp_layers": _of_field(
        "num_layers_per_virtual_pipeline_stage",
        "layers of each chunk of an interleaved pipeline (default: not interleaved)",
        group="layout",
    ),
    "sequence_parallel": _of_field(
        "sequence_parallelism", "cut activations along the sequence over the tp ranks",
        group="layout", needs=_TP,
    ),
    "distributed_optimizer": _of_field(
        "use_distributed_optimizer", "cut the optimizer over the data-parallel ranks",
        group="layout", needs=_DP,
    ),
    "recompute": _of_field(
        "recompute_granularity", "what the backward pass computes again (default: none)",
        group="layout", choices=("none", "selective", "full"),
    ),
    "nproc": _option(
        "int", "processes on this machine (default: tp x pp)", group="layout", least=1
    ),
    "num_machines": _option("int", "machines (default: 1)", group="layout", least=1),
    "machine_rank": _option(
        "int", "this machine's number, from 0", group="layout", least=0, needs=_STATIC
    ),
    "main_process_ip": _option(
        "str", "address of machine 0, to which all connect", metavar="HOST", group="layout"
    ),
    "main_process_port": _option(
        "int", "its port (default: 29500)", group="layout", least=1, most=65535
    ),
    "rdzv_backend": _option(
        "str", "how machines find each other (default: static)", group="layout",
        choices=("static", "c10d"), needs=_MACHINES,
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
    "lr": _option("float", "the peak learning rate", 1e-4, least=0),
    "lr_decay_style": _of_field("lr_decay_style", "how the learning rate falls"),
    "lr_warmup_steps": _of_field(
        "lr_warmup_iters", "steps over which the learning rate rises (default: 0)"
    ),
    "min_lr": _of_field("min_lr", "the learning rate at the end", needs=_FALLING),
    "weight_decay": _option("float", "weight decay", 0.01, least=0),
    "adam_beta1": _option("float", "Adam's first decay rate", 0.9, least=0, most=1, needs=_ADAM),
    "adam_beta2": _option("float", "Adam's second decay rate", 0.999, least=0, most=1, needs=_ADAM),
    "adam_eps": _option("float", "Adam's epsilon", 1e-8, least=0, needs=_ADAM),
    "sgd_momentum": _option("float", "SGD's momentum", 0.0, least=0, most=1, needs=_SGD),
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
                             group="saving", least=1, needs=_SAVE_DIR),
    "keep_last": _option("int", "checkpoints to keep (default: all)", group="saving", least=1,
                         needs=_SAVE_DIR),
    "resume": _option(
        "str", "continue from a checkpoint, or from SAVE_DIR's latest", metavar="DIR",
        group="saving",
    ),
    "overwrite": _option(
        "bool", "replace another run in SAVE_DIR after this one has saved", False, group="saving",
        needs=_SAVE_DIR,
    ),
    "break_lock": _option(
        "bool", "write to SAVE_DIR although another run holds its lock; only if that run is dead",
        False, group="saving", needs=_SAVE_DIR,
    ),
    "verify_source": _option(
        "bool", "check the checksums that a checkpoint records before it is loaded", True,
        group="saving",
    ),
    "tensorboard_dir": _of_field(
        "tensorboard_dir", "TensorBoard event files (default: below SAVE_DIR)", group="saving",
        metavar="DIR",
    ),
}  # fmt: skip


def options(parser: argparse.ArgumentParser, names: Sequence[str] = tuple(OPTIONS)) -> None:
    """Add train-ckpt's options, or some of them, to ``parser``; it must get dashed arguments."""
    groups: dict[str, Any] = {}
    for name in names:
        option = OPTIONS[name]
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
