"""The questions of ``train-ckpt config``, and the Accelerate YAML made from the answers.

An answer comes from a flag, else from a file that is read first, else from the user, else from the
default. The file is the one that ``accelerate config`` writes for Megatron-LM
(``distributed_type: MEGATRON_LM`` and ``megatron_lm_*`` keys), so that ``accelerate launch``,
scripts and ``train-ckpt`` all read it. Before it is written, it is read as a run would read it:
what a run would refuse is refused here. Imports no torch, and yaml only when a file is read or
written.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import TrainError, raise_faults
from .accelerate_yaml import (
    FILE_KEYS,
    KEY,
    AccelerateFile,
    import_yaml,
    parse_accelerate,
    read_yaml,
)
from .fields import ACCELERATE_FIELDS, FIELDS
from .from_plugin import MIXED, from_plugin
from .plugin import MegatronLMPlugin, environment
from .schema import TrainConfig
from .values import Values

Answers = dict[str, Any]  # by question, key of FILE_KEYS, or plugin field
Ask = Callable[[str], str]  # shows a prompt and returns a line; EOFError if there is none

RECOMPUTE = "recompute"
_AS_READ = "recompute as read"  # the answer that a file gave, and the fields that said it
PORT = 29500  # torch's own choice


@dataclass(frozen=True, slots=True)
class Question:
    """One question; its answer is known under ``name``."""

    name: str
    text: str
    values: Values
    default: Callable[[Answers], Any]
    applies: Callable[[Answers], bool] = lambda answers: True


def _field(name: str) -> Values:
    return FIELDS[name].values


def _several(answers: Answers) -> bool:
    return int(answers["num_machines"]) > 1


def _full(answers: Answers) -> bool:
    return answers[RECOMPUTE] == "full"


QUESTIONS: tuple[Question, ...] = (
    Question("num_machines", "How many machines", Values("int", 1), lambda a: 1),
    Question(
        "machine_rank", "Which of them is this, from 0", Values("int", 0), lambda a: 0, _several
    ),
    Question(
        "main_process_ip", "Address of machine 0", Values("str"), lambda a: None, _several
    ),
    Question(
        "main_process_port", "Port on machine 0", Values("int", 1, 65535), lambda a: PORT, _several
    ),
    Question(
        "rdzv_backend", "How machines find each other: static, or c10d, which needs no numbers",
        Values("str", choices=("static", "c10d")), lambda a: "static", _several,
    ),
    Question(
        "num_processes", "Processes of all machines together, one per GPU", Values("int", 1),
        lambda a: a["num_machines"] * a.get("gpus", 1),
    ),
    Question("tp_degree", "Tensor parallelism degree", _field("tp_degree"), lambda a: 1),
    Question(
        "sequence_parallelism", "Sequence parallelism", _field("sequence_parallelism"),
        lambda a: True, lambda a: a["tp_degree"] > 1,
    ),
    Question("pp_degree", "Pipeline parallelism degree", _field("pp_degree"), lambda a: 1),
    Question(
        "num_micro_batches", "Micro-batches of one pass of the pipeline",
        _field("num_micro_batches"), lambda a: 4 * a["pp_degree"] if a["pp_degree"] > 1 else 1,
    ),
    Question(
        RECOMPUTE, "Recompute activations: none, selective (attention) or full (whole layers)",
        Values("str", choices=("none", "selective", "full")), lambda a: "none",
    ),
    Question(
        "recompute_method", "Which layers: uniform (all) or block (the first of each stage)",
        _field("recompute_method"), lambda a: "uniform", _full,
    ),
    Question(
        "recompute_num_layers", "Layers of a recomputed group (uniform) or of a stage (block)",
        _field("recompute_num_layers"), lambda a: 1, _full,
    ),
    Question(
        "use_distributed_optimizer", "Distributed optimizer, cut over data-parallel ranks",
        _field("use_distributed_optimizer"), lambda a: True,
    ),
    Question(
        "gradient_clipping", "Largest gradient norm, 0 does not clip",
        _field("gradient_clipping"), lambda a: 1.0,
    ),
    Question(
        "mixed_precision", "Mixed precision: no or bf16", Values("str", choices=("no", "bf16")),
        lambda a: "bf16",
    ),
)  # fmt: skip

# Fields that the question about recomputation answers.
_DERIVED = ("recompute_activations", "recompute_granularity")
_ASKED = {q.name for q in QUESTIONS}
# Keys and fields without a question: flags, or a file that is read, set them.
UNASKED: dict[str, Values] = {
    "use_cpu": FILE_KEYS["use_cpu"].values,
    "gpu_ids": Values("str"),
    "same_network": FILE_KEYS["same_network"].values,
    **{n: _field(n) for n in ACCELERATE_FIELDS if n not in _ASKED and n not in _DERIVED},
}
VALUES: dict[str, Values] = {**{q.name: q.values for q in QUESTIONS}, **UNASKED}

# What `accelerate config` writes besides the answers, so that both files look the same.
_CONSTANT: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "MEGATRON_LM",
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "machine_rank": 0,
    "main_training_function": "main",
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}


# --- answers -----------------------------------------------------------------------------------


def read_flags(given: Mapping[str, object]) -> Answers:
    """Values of flags as their questions take them; TrainError lists those that do not fit."""
    found, faults = {}, []
    for name, value in given.items():
        try:
            found[name] = VALUES[name].read(value)
        except ValueError as error:
            faults.append(f"--{name.replace('_', '-')} {value}: {error}")
    raise_faults("answers", faults)
    return found


def answer(
    given: Mapping[str, Any],
    known: Mapping[str, Any],
    proposed: Mapping[str, Any],
    ask: Ask | None = None,
) -> Answers:
    """All answers: ``given`` by flags, asked for, else ``known`` from a file or ``proposed``.

    ``proposed`` and ``known`` are what a question suggests; ``known`` comes first.
    """
    answers: Answers = {**proposed, **known, **given}
    for question in QUESTIONS:
        name = question.name
        if not question.applies(answers):
            if name in given:
                raise TrainError(_pointless(name, answers))
            if name not in known:  # what a file says stays in it
                answers.pop(name, None)
        elif name not in given:
            default = answers.get(name, question.default(answers))
            answers[name] = _asked(question, default, ask) if ask else default
    answers.pop("gpus", None)
    if answers.get("use_cpu"):
        answers.pop("gpu_ids", None)
    return answers


def _pointless(name: str, answers: Answers) -> str:
    flag = "--" + name.replace("_", "-")
    if name == "sequence_parallelism":
        return f"{flag} needs several tensor-parallel ranks, --tp is 1; drop it or raise --tp"
    if name.startswith("recompute_"):
        return f"{flag} only works with --recompute full, it is {answers[RECOMPUTE]}"
    return f"{flag} needs several machines, --num-machines is {answers['num_machines']}"


def _asked(question: Question, default: Any, ask: Ask) -> Any:
    """Ask until the answer fits; an empty line takes the default."""
    shown = {True: "yes", False: "no", None: ""}.get(default, default) if (
        default is None or isinstance(default, bool)
    ) else default  # fmt: skip
    prompt = f"{question.text}? [{shown}]: "
    while True:
        try:
            line = ask(prompt).strip()
        except EOFError:
            raise TrainError(
                f"the answers ended before {question.text!r}; give it as "
                f"--{question.name.replace('_', '-')}, or take all defaults with --yes"
            ) from None
        if not line and default is not None:
            return default
        try:
            if line:
                return question.values.read(line)
            prompt = f"{question.text}? (there is no default): "
        except ValueError as error:
            prompt = f"{line}: {error}. {question.text}? [{shown}]: "


def of_file(file: AccelerateFile) -> Answers:
    """The answers in a file that was read."""
    kept = [n for n in file.given if FILE_KEYS[n].use == "used"]
    answers: Answers = {n: file.values[n] for n in kept}
    if answers.get("num_processes", 0) < 1:  # -1: not said
        answers.pop("num_processes", None)
    for name, (value, _) in file.plugin.items():
        answers[name] = FIELDS[name].values.read(value)
    derived = {n: answers.pop(n) for n in _DERIVED if n in answers}
    activations, granularity = (derived.get(n) for n in _DERIVED)
    full_only = {"recompute_method", "recompute_num_layers"} & answers.keys()
    if granularity is not None:
        answers[RECOMPUTE] = granularity
    elif activations is not None or full_only:
        full = full_only and activations is not False
        answers[RECOMPUTE] = "full" if full else "selective" if activations else "none"
    if RECOMPUTE in answers:
        answers[_AS_READ] = (answers[RECOMPUTE], derived)
    return answers


# --- the file ----------------------------------------------------------------------------------


def table(answers: Answers) -> dict[str, Any]:
    """The mapping that Accelerate writes for these answers."""
    made = dict(_CONSTANT)
    megatron: dict[str, Any] = {}
    for name, value in answers.items():
        if name in (RECOMPUTE, _AS_READ) or value is None:
            continue
        if name in FIELDS:
            megatron[KEY + name] = value
        else:
            made[name] = value
    megatron |= {KEY + n: v for n, v in _recompute_fields(answers).items()}
    if not made["use_cpu"]:
        made.setdefault("gpu_ids", "all")
    return {**made, "megatron_lm_config": megatron}


def _recompute_fields(answers: Answers) -> Mapping[str, Any]:
    """The answer about recomputation as Accelerate's fields; those of a file unless it changed."""
    now = answers[RECOMPUTE]
    was, fields = answers.get(_AS_READ, (None, {}))
    if now == was:
        return dict(fields)
    # Megatron lets recompute_activations override the granularity: it means selective.
    asked = {"recompute_activations": now == "selective"}
    return asked if now == "none" else {**asked, "recompute_granularity": now}


def check(made: Mapping[str, Any], path: str, environ: Mapping[str, str]) -> TrainConfig:
    """Read a mapping as a run would; TrainError says everything that is wrong with it."""
    file = parse_accelerate(made, path)
    said = file.values
    faults = []
    if said["num_machines"] > 1:
        faults += [
            f"{said['num_machines']} machines need {key}: --{key.replace('_', '-')}"
            for key in ("main_process_ip", "main_process_port")
            if said[key] is None
        ]
    raise_faults(path, [*faults, *_overridden(file, environ)])
    plugin = MegatronLMPlugin.resolved([file.plugin], file)
    return from_plugin(plugin, world_size=file.num_processes or 1, environ={})


def _overridden(file: AccelerateFile, environ: Mapping[str, str]) -> list[str]:
    """Environment variables that would override the file in a run."""
    faults = []
    for name, (text, variable) in environment(environ).items():
        if name not in file.plugin:
            continue
        read = FIELDS[name].values.read
        value = read(file.plugin[name][0])
        try:
            same = read(text) == value
        except ValueError:
            same = False
        if not same:
            faults.append(f"{name} is {value}, but {variable}={text} in the environment would "
                          f"override the file; unset {variable} or answer {text}")  # fmt: skip
    mixed = environ.get(MIXED)
    if mixed is not None and mixed != file.values["mixed_precision"]:
        faults.append(f"mixed_precision is {file.values['mixed_precision']}, but {MIXED}={mixed} "
                      f"in the environment would override the file; unset it")  # fmt: skip
    return faults


def summary(config: TrainConfig) -> list[str]:
    """What a file makes a run do, in a few lines."""
    p, b, launch = config.parallelism, config.batch, config.launch
    machines = "1 machine" if launch.num_machines == 1 else f"{launch.num_machines} machines"
    where = "" if launch.num_machines == 1 else (
        f" ({launch.rdzv_backend}, {launch.main_process_ip}:{launch.main_process_port})"
    )  # fmt: skip
    sequence = " with sequence parallelism" if p.sequence_parallel else ""
    recompute = config.recompute.granularity
    if recompute == "full":
        recompute += f" ({config.recompute.method}, {config.recompute.num_layers})"
    distributed = "distributed" if p.distributed_optimizer else "whole on each data-parallel rank"
    return [
        f"{config.world_size} processes on {machines}{where}: tp={p.tp}{sequence}, pp={p.pp}, "
        f"{b.data_parallel} data-parallel ranks",
        f"micro-batches per pass: {b.num_micro_batches}; recompute {recompute}, optimizer "
        f"{distributed}, gradients clipped at {config.optimizer.clip_grad:g}, "
        f"{config.precision.name}",
        *config.notes,
    ]


def refuse_to_replace(path: Path, read: str | None) -> str | None:
    """Why an existing file must not be replaced without asking; None if nothing is lost."""
    if not path.exists() or (read is not None and path.samefile(read)):
        return None
    engine = read_yaml(str(path)).get("distributed_type", "no distributed_type")
    return f"{path} exists, for {engine}"


def write(made: Mapping[str, Any], path: Path, remarks: Sequence[str] = ()) -> None:
    """Write the whole YAML or nothing; ``remarks`` are lines of comment before it."""
    yaml = import_yaml(str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"# {line}\n" for line in remarks) + yaml.safe_dump(dict(made))
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        os.close(handle)
        Path(partial).write_text(text, encoding="utf-8")
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
