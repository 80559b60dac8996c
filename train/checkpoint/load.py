"""Loads any readable checkpoint, in any layout, into a rank's tensors.

The rank's live tensors are planned against the checkpoint (ckpt/move/live.py), so that each rank
reads its own share and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.ckpt.checkpoint.types import WITHOUT, Checkpoint, ReadOptions
from shardwright.ckpt.errors import CheckpointError
from shardwright.ckpt.formats.megatron.classic import reader as megatron
from shardwright.ckpt.formats.megatron.torch_dist import reader as megatron_dist
from shardwright.ckpt.integrity import check_used, used_files
from shardwright.ckpt.model.dtypes import FROM_TORCH
from shardwright.ckpt.model.manifest import Manifest, category_of
from shardwright.ckpt.move import live
from shardwright.ckpt.move.storage import Where, storage_path
from shardwright.ckpt.reader import follow, read_checkpoint

from ..core import rng
from ..errors import TrainError
from . import training_state
from .rank_state import Held, Log, RankState, bytes_of


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a checkpoint gave."""

    checkpoint: Checkpoint
    step: int
    state: Mapping[str, object]  # schedule, param_groups, data
    optimizer: bool  # moments were loaded
    random: bool  # this rank's random state was restored


def load(
    path: str | Path,
    held: RankState,
    *,
    read: ReadOptions | None = None,
    weights_only: bool = False,
    seed: int = 0,
    verify_source: bool = True,
    log: Log = lambda line: None,
) -> Loaded:
    """Fill this rank's weights, and its optimizer and random states where the source has them.

    Any readable checkpoint in any layout. Raises CheckpointError or TrainError.
    """
    read = read or _reading(path, held)
    try:
        ckpt = read_checkpoint(path, read)
    except CheckpointError:
        if not weights_only:
            raise
        # the fault may be in the optimizer only; its masters, if sound, would refine the weights
        ckpt = read_checkpoint(path, replace(read, weights_only=True))
    _check_model(ckpt, held)
    if held.optimizer is not None and (fault := ckpt.optimizer_fault()):
        if not weights_only:
            how = "MEGATRON_LM_NO_LOAD_OPTIM=true continues without the optimizer"
            raise TrainError(fault.replace(WITHOUT, how))
        ckpt = read_checkpoint(
            path, replace(read, weights_only=True)
        )  # its masters are not sound either
    if verify_source:
        _check_source(ckpt, held, log)
    held.settle()
    source = _as_masters(ckpt.manifest, held)
    states = {category_of(fqn) for fqn in ckpt.manifest.tensors} - {""}
    with_optimizer = bool(states) and not weights_only and held.optimizer is not None
    if with_optimizer and held.optimizer is not None:
        held.optimizer.init_state(to_load=bool(states - {"master"}))
    known = {category_of(fqn) for fqn in source.tensors}
    moments = held.moments()
    kinds = {h.live.state for h in moments}
    fresh = with_optimizer and states <= {"master"} and _no_step_yet(ckpt.manifest.state)
    if with_optimizer and not fresh and (kinds - known) - {"master"}:
        raise TrainError(
            f"{path}: has no {', '.join(sorted(kinds - known))}, which this optimizer needs; "
            "load with weights only"
        )
    if with_optimizer and (more := known - kinds - {"", "master"}):
        log(f"not loaded, this optimizer does not keep it: {', '.join(sorted(more))}")
    loads = known if with_optimizer else known & {"master"}
    _fill(source, held.weights() + [h for h in moments if h.live.state in loads], held)
    if held.optimizer is not None and "master" in kinds - loads:
        held.optimizer.refresh_masters()
        log("fp32 master weights initialised from the model")
    random = _restore_random(ckpt, held, seed, log) if not weights_only else False
    had_moments = with_optimizer and not fresh
    state = training_state.from_json(ckpt.manifest.state)
    return Loaded(ckpt, ckpt.step or 0, state, had_moments, random)


def describes_itself(path: Where) -> bool:
    """Whether Megatron-LM's args describe the model, because there is no config.json."""
    where = storage_path(path)
    own = megatron.sniff(where) or megatron_dist.sniff(where)
    return own and not (where / "config.json").is_file()


def _check_source(ckpt: Checkpoint, held: RankState, log: Log) -> None:
    """Recorded checksums of the files that are loaded: each rank checks its share of the files.

    All ranks raise the same faults, so that none waits for one that has ended.
    """
    world = dist.get_world_size(held.control) if dist.is_initialized() else 1
    share = used_files(ckpt)[held.rank % world :: world]
    line = "recorded checksums of the source: all right"
    try:
        checked = check_used(ckpt, share)
        mine = [text for _, text in checked.faults]
        line = checked.line() if world == 1 else line
    except CheckpointError as error:
        mine = [str(error)]
    every = [mine] * world
    if world > 1:
        dist.all_gather_object(every, mine, group=held.control)
    if faults := [text for texts in every for text in texts]:
        raise TrainError(
            f"{ckpt.path} is damaged (--no-verify-source loads it as it is): " + "; ".join(faults)
        )
    log(line)


def _reading(path: str | Path, held: RankState) -> ReadOptions:
    """Options with the model's number of real vocabulary rows, which Megatron-LM's args lack."""
    if describes_itself(follow(path)):
        return ReadOptions(vocab_size=held.model.sizes["vocab"])
    return ReadOptions()


def _no_step_yet(state: Mapping[str, object]) -> bool:
    """Whether the optimizer was saved before its first step, when it has only masters."""
    groups = state.get("param_groups")
    return isinstance(groups, list) and not any(
        "step" in group for group in groups if isinstance(group, Mapping)
    )


def _check_model(ckpt: Checkpoint, held: RankState) -> None:
    """A checkpoint of another model is refused before any tensor is looked at."""
    if ckpt.model is None:
        return  # a bare file: names and shapes decide
    ours, theirs = held.model, ckpt.model
    if ours.family.name != theirs.family.name:
        raise TrainError(
            f"{ckpt.path}: is a {theirs.family.name} model, this run trains {ours.family.name}"
        )
    for symbol, size in ours.sizes.items():
        if theirs.sizes.get(symbol) != size:
            raise TrainError(
                f"{ckpt.path}: {symbol} is {theirs.sizes.get(symbol)}, this run has {size}; "
                "it is a checkpoint of another model"
            )


def _as_masters(source: Manifest, held: RankState) -> Manifest:
    """Use fp32 weights as masters, and masters as fp32 weights, if the source has only one.

    So a run in bf16 that resumes from fp32 weights keeps all their bits.
    """
    ours = FROM_TORCH[str(next(iter(held.named.values())).dtype).removeprefix("torch.")]
    masters = {f for f in source.tensors if category_of(f) == "master"}
    tensors, chunks = dict(source.tensors), dict(source.chunks)
    if masters and ours == "F32":
        for fqn in masters:
            plain = fqn.removeprefix("master/")
            tensors[plain], chunks[plain] = source.tensors[fqn], source.chunks[fqn]
    if not masters and ours != "F32":
        for fqn, meta in source.tensors.items():
            if category_of(fqn) == "" and meta.dtype == "F32":
                tensors["master/" + fqn], chunks["master/" + fqn] = meta, source.chunks[fqn]
    return Manifest(tensors, chunks, source.state, source.side_files)


def _fill(source: Manifest, wanted: Sequence[Held], held: RankState) -> None:
    """Read into the tensors: directly on CPU, through host memory elsewhere."""
    host = {
        h.live.key: torch.zeros(h.tensor.shape, dtype=h.tensor.dtype)
        if h.tensor.device.type != "cpu"
        else h.tensor
        for h in wanted
    }
    for tensor in host.values():
        tensor.detach().zero_()  # padding rows that the source does not have
    buffers = {key: bytes_of(tensor) for key, tensor in host.items()}
    live.load(source, [h.live for h in wanted], buffers, held.placement)
    for h in wanted:
        if host[h.live.key] is not h.tensor:
            h.tensor.copy_(host[h.live.key])


def _restore_random(ckpt: Checkpoint, held: RankState, seed: int, log: Log) -> bool:
    """This rank's random state, if the layout is the one that saved it."""
    same = ckpt.mesh == held.mesh and ckpt.dp == held.dp
    name = f"random_states_{held.rank}.safetensors"
    path = next((s.source for s in ckpt.random_states if s.name == name), None)
    if same and path is not None:
        from safetensors import safe_open

        with safe_open(path, "pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            rng.restore(tensors, opened.metadata(), stream=held.stream)
        return True
    rng.reseed(seed, ckpt.step or 0, held.rank)
    why = "another layout saved it" if ckpt.random_states else "the checkpoint holds none"
    log(f"random state: reseeded from (seed {seed}, step {ckpt.step or 0}, rank); {why}")
    return False
