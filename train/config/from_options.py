"""From ``train-ckpt``'s options, its files and the environment to a ``TrainConfig``.

In order of precedence: flags, ``--config`` files (its own form, or Accelerate's; a later one
before an earlier one), ``MEGATRON_LM_*`` variables, the Accelerate YAML of
``ACCELERATE_CONFIG_FILE`` or, where ``train-ckpt`` itself starts the ranks as ``accelerate
launch`` would, Accelerate's default file. What was overridden is a line in ``notes``. What they say
makes a plugin, which goes a script's way (from_plugin.py). Imports neither torch nor, until a
file is read, yaml.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import TrainError, nearest, raise_faults
from .accelerate_yaml import (
    KEY,
    AccelerateFile,
    default_accelerate_path,
    is_accelerate,
    parse_accelerate,
    read_accelerate,
    read_yaml,
)
from .checks import faults_of
from .cli import OPTIONS
from .from_plugin import MIXED, from_plugin, launch_of
from .plugin import ENV, MegatronLMPlugin, environment
from .schema import LATEST, Launch, OptimizerSettings, TrainConfig
from .values import Resolved, Sourced, resolve


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
    launch = _machines(launch_of(file, 10), said, environ)
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
    notes = [f"using the settings in {file.path}"] if file and file.path not in args.config else []
    notes += [
        *own.overridden,
        *plugin.overridden,
        *config.notes,
        *more,
        *_batch_note(plugin, config),
    ]
    launch = replace(launch, timeout_minutes=config.launch.timeout_minutes)
    config = _with_options(replace(config, launch=launch), said, tuple(notes))
    idle, more_notes = _without_effect(config, own, plugin)
    config = replace(config, notes=(*config.notes, *more_notes, *_launched(own, environ)))
    faults = faults_of(config) + idle
    if not complete:
        raise_faults("options", faults)
        return config
    faults += [] if config.steps else ["say how many steps: --steps N"]
    faults += [] if config.data.files else ["say what to train on: --data FILE ..."]
    if config.model.path is None and config.saving.resume is None:
        faults.append("say which model: --model HF_DIR_OR_CONFIG")
    raise_faults("options", faults)
    return config


def _without_effect(
    config: TrainConfig, own: Resolved, plugin: MegatronLMPlugin
) -> tuple[list[str], list[str]]:
    """Faults, and notes, about options that somebody gave and that change nothing.

    What several programs read, the environment and an Accelerate YAML, is only noted.
    """
    faults: list[str] = []
    notes: list[str] = []
    for name, option in OPTIONS.items():
        where = _origin(option.field or name, own, plugin)
        needs = option.needs
        if where is None or needs is None or needs.met(config):
            continue
        is_shared = where.startswith((ENV, KEY))
        value = own.values[name] if name in own.values else getattr(plugin, option.field)
        given = _flag(name) if value is True else f"{_flag(name)} {_spelled(value)}"
        where = "" if where == _flag(name) else f" ({where})"
        line = f"{given}{where}: {needs.lack}"
        (notes if needs.only_said or is_shared else faults).append(line)
    notes += [
        f"{name} ({plugin.origin(name)}): for scripts; train-ckpt does not use it"
        for name in SCRIPTS_ONLY
        if plugin.given(name)
    ]
    return faults, notes


# Plugin fields without an option that train-ckpt has no use for.
SCRIPTS_ONLY = ("return_logits", "is_train_batch_min")


def _origin(name: str, own: Resolved, plugin: MegatronLMPlugin) -> str | None:
    """Where an option, or its plugin field, was given; None if it was not, or is turned off."""
    if name in own.values:
        return own.origins.get(name) if own.values[name] is not False else None
    if not plugin.given(name) or getattr(plugin, name) is False:
        return None
    return plugin.origin(name)


def _spelled(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _with_options(
    config: TrainConfig, said: Mapping[str, Any], notes: tuple[str, ...]
) -> TrainConfig:
    """``config`` with what no plugin field says."""
    layers = tuple(said["pp_layers"]) if said["pp_layers"] else None
    local = config.world_size // config.launch.num_machines
    return replace(
        config,
        parallelism=replace(config.parallelism, pp_layers=layers),
        data=replace(
            config.data,
            files=said["data"] or (),
            key=said["data_key"],
            eval_files=said["eval_data"] or (),
        ),
        saving=replace(
            config.saving,
            save_dir=said["save_dir"],
            save_interval=said["save_interval"],
            keep_last=said["keep_last"],
            resume=said["resume"],
            overwrite=bool(said["overwrite"]),
            break_lock=bool(said["break_lock"]),
            verify_source=said["verify_source"],
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
    """``launch`` with the command line's options of machines; TrainError if some are missing."""
    given = {name: said[name] for name in _OF_A_LAUNCHER if said[name] is not None}
    launch = replace(launch, **given)
    count, rank = launch.num_machines, launch.machine_rank
    if "WORLD_SIZE" in environ:
        return launch  # the machines have met already
    faults = []
    if count == 1:
        alone = [f"--{n.replace('_', '-')} {given[n]}" for n in _OF_A_LAUNCHER[2:4] if n in given]
        faults += [f"{flag} needs several machines: --num-machines N" for flag in alone]
    elif launch.main_process_ip is None:
        faults.append(f"{count} machines need the address of the first: --main-process-ip HOST")
    if rank >= count:
        faults.append(f"--machine-rank {rank}: {count} machines count from 0")
    raise_faults("options", faults)
    if count > 1 and launch.main_process_port is None:
        launch = replace(launch, main_process_port=29500)
    return launch


# What the launcher of the ranks decides.
_OF_A_LAUNCHER = ("num_machines", "machine_rank", "main_process_ip", "main_process_port",
                  "rdzv_backend")  # fmt: skip
OURS = "SHARDWRIGHT_ARGUMENTS"  # in the environment of ranks that train-ckpt itself starts


def _launched(own: Resolved, environ: Mapping[str, str]) -> list[str]:
    """A note on options of machines, where another launcher has started this rank."""
    if "WORLD_SIZE" not in environ or OURS in environ:
        return []
    given = [_flag(name) for name in _OF_A_LAUNCHER if name in own.origins]
    return [f"{', '.join(given)}: no effect, another launcher started the ranks"] if given else []


def _optimizer_of(said: Mapping[str, Any]) -> OptimizerSettings:
    return OptimizerSettings(
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
    """Values by plugin field, for options that set one."""
    found = {OPTIONS[name].field or name: value for name, value in said.items()}
    granularity, where = said.get("recompute", (None, ""))
    if (
        granularity is not None
    ):  # so that it overrides what another source says about the older field
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
    """What an Accelerate file says about options without a plugin field."""
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
    """The Accelerate file that the environment names, or the default one."""
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
            return world, [f"nproc: {nproc} is overridden by the {local} that the launcher started"]
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
        f"num_micro_batches: {said} ({plugin.origin('num_micro_batches')}) is overridden by {now}, "
        f"which the global batch of {config.batch.global_batch_size} needs"
    ]
