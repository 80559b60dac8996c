"""The YAML that ``accelerate config`` writes: its keys and their meaning.

Imports yaml only when a file is read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.ckpt.errors import install

from ..errors import TrainError, nearest, raise_faults
from .fields import FIELDS, YAML_ALIASES, FieldUse, refused_field, used_field
from .values import Resolved, Sourced, resolve

KEY = "megatron_lm_"  # prefix of YAML keys


@dataclass(frozen=True, slots=True)
class AccelerateFile:
    """What an Accelerate YAML of ``distributed_type: MEGATRON_LM`` says."""

    path: str
    plugin: Sourced  # field -> (value as written, where)
    values: Mapping[str, Any]  # key of FILE_KEYS -> value, default where absent
    given: frozenset[str]  # the keys of ``values`` that the file has
    notes: tuple[str, ...] = ()  # on keys of another name or place

    @property
    def num_processes(self) -> int | None:
        """Processes of all machines together, if the file says."""
        count = self.values["num_processes"]
        return count if count > 0 else None  # Accelerate writes -1 for "not said"


_OTHER_ENGINE = "it configures another engine; remove it"
FILE_KEYS: dict[str, FieldUse] = {
    "compute_environment": used_field(
        "str", "LOCAL_MACHINE", "Where it runs.", choices=("LOCAL_MACHINE",)
    ),
    "mixed_precision": used_field("str", "no", "no (fp32) or bf16."),
    "use_cpu": used_field("bool", False, "Trains on CPU even where there is a GPU."),
    "num_processes": used_field("int", -1, "Processes of all machines together.", least=-1),
    "num_machines": used_field("int", 1, "Machines.", least=1),
    "machine_rank": used_field("int", 0, "This machine's number.", least=0),
    "main_process_ip": used_field("any", None, "Address of machine 0."),
    "main_process_port": used_field("int", None, "Port of machine 0.", least=0, most=65535),
    "rdzv_backend": used_field("str", "static", "How machines find each other: static, c10d, ..."),
    "same_network": used_field("bool", True, "Whether the machines share a network."),
    "gpu_ids": used_field("any", None, "GPUs to use: all, or numbers with commas."),
    "main_training_function": used_field("str", "main", "For notebooks and TPUs; nothing here."),
    "debug": refused_field("bool", False, "", "set TORCH_DISTRIBUTED_DEBUG=DETAIL instead"),
    "enable_cpu_affinity": refused_field(
        "bool", False, "", "start the command under numactl instead"
    ),
    "fp8_config": refused_field("any", None, "", "bf16 is the lowest precision here; remove it"),
    **{
        name: refused_field("any", None, "", _OTHER_ENGINE)
        for name in ("deepspeed_config", "fsdp_config", "parallelism_config", "mpirun_config")
    },
    **{
        name: refused_field("any", None, "", "the trainer compiles what gains from it; remove it")
        for name in ("dynamo_config", "dynamo_backend")
    },
    **{
        name: refused_field("any", None, "", "there are no TPUs here; remove it")
        for name in (
            "downcast_bf16", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo",
            "command_file", "commands", "tpu_vm", "tpu_env",
        )
    },
    "fp16": refused_field("bool", False, "", "train in bf16: mixed_precision: bf16"),
}  # fmt: skip


def import_yaml(path: str) -> Any:
    """PyYAML, which only YAML files need; TrainError if it is not installed."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise TrainError(f"{path}: {install('yaml')}") from None
    return yaml


def read_yaml(path: str) -> dict[str, Any]:
    """The mapping in a YAML or JSON file."""
    yaml = import_yaml(path)
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
    megatron, notes, faults = _megatron_keys(table, path)
    faults += _unknown_keys(table, [*FILE_KEYS, *filter(_is_megatron, table), *_ELSEWHERE])
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
    return AccelerateFile(path, plugin, found.values, frozenset(found.origins), tuple(notes))


_ELSEWHERE = ("distributed_type", "megatron_lm_config")


def _megatron_keys(
    table: Mapping[str, Any], path: str
) -> tuple[dict[str, Any], list[str], list[str]]:
    """The ``megatron_lm_*`` keys by their own names, with lines on them, and faults.

    Some files have these keys at the top, and some use Megatron's names for them.
    """
    nested = table.get("megatron_lm_config") or {}
    if not isinstance(nested, dict):
        raise TrainError(f"{path}: megatron_lm_config: expected a mapping of {KEY}* keys")
    flat = {key: value for key, value in table.items() if _is_megatron(key)}
    notes = []
    if flat:
        notes.append(f"{path}: the {KEY}* keys at the top are read as if below megatron_lm_config")
    made: dict[str, Any] = {}
    faults = []
    for key, value in [*nested.items(), *flat.items()]:
        own = KEY + YAML_ALIASES.get(str(key).removeprefix(KEY), str(key).removeprefix(KEY))
        name = own if _is_megatron(key) else str(key)
        if name != key:
            notes.append(f"{path}: {key} is read as {name}")
        if name in made and made[name] != value:
            faults.append(f"{name}: the file says {made[name]} and, with {key}, {value}; drop one")
        made[name] = value
    return made, notes, faults


def _is_megatron(key: object) -> bool:
    return str(key).startswith(KEY) and key != "megatron_lm_config"


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
