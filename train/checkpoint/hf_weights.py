"""A transformers model's weights into a rank's tensors and back, through the same plan as files."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwright.ckpt.model.box import full, row_major
from shardwright.ckpt.model.dtypes import FROM_TORCH, TO_TORCH
from shardwright.ckpt.model.family import Model
from shardwright.ckpt.model.manifest import PADDING, Chunk, Manifest, TensorMeta, View, is_padding
from shardwright.ckpt.model.placement import Placement, shapes_of
from shardwright.ckpt.model.planner import Copy, plan
from shardwright.ckpt.move import live
from shardwright.ckpt.move.executor import Budget, Mover, run_units, units

from ..core.layout import Layout, mesh_of
from ..core.process import Parallel
from ..errors import raise_faults
from .rank_state import RankState, bytes_of

_HF = "hf:"  # keys of buffers that hold the transformers model


def logical_tensors(original: Any, model: Model, *, own: bool = False) -> dict[str, torch.Tensor]:
    """The transformers model's tensors under their logical names, tied heads left out.

    With ``own`` its parameters and buffers themselves, not views of their memory.
    """
    found = {}
    for name, tensor in original.state_dict(keep_vars=own).items():
        name = model.family.logical(name)
        tied = "tie_word_embeddings" in model.flags and name in model.family.tied_names
        if not tied:
            found[name] = tensor
    return found


def parameter_names(original: Any, model: Model) -> dict[int, str]:
    """id of a parameter -> its logical name; a tied head counts as the embedding."""
    found = {}
    for name, param in original.named_parameters(remove_duplicate=False):
        name = model.family.logical(name)
        if "tie_word_embeddings" in model.flags and name in model.family.tied_names:
            continue
        found[id(param)] = name
    return found


def check_names(original: Any, model: Model) -> None:
    """TrainError unless the transformers model has exactly the tensors of its family."""
    expected = shapes_of(model)
    tensors = logical_tensors(original, model)
    faults = [f"has {name}, which megatron-core's model does not have" for name in
              sorted(tensors.keys() - expected.keys())]  # fmt: skip
    faults += [f"has no {name}" for name in sorted(expected.keys() - tensors.keys())]
    faults += [
        f"{name} is {tuple(tensors[name].shape)}, its config says {shape}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    some = [name for name, tensor in tensors.items() if tensor.is_meta]
    if len(some) < len(tensors):  # on the meta device as a whole, it waits for its weights
        faults += [f"{name} is on the meta device; load the weights first" for name in some]
    raise_faults(f"prepare: {type(original).__name__}", faults)


def take(original: Any, held: RankState) -> None:
    """Fill this rank's weights from the transformers model, rank 0's if they differ."""
    tensors = {
        name: tensor.detach().to("cpu").contiguous()
        for name, tensor in logical_tensors(original, held.model).items()
    }
    for tensor in tensors.values():
        dist.broadcast(tensor, 0, group=held.control)
    source = Manifest(
        {n: TensorMeta(tuple(t.shape), _dtype(t)) for n, t in tensors.items()},
        {n: [_chunk(n, t, _HF + n)] for n, t in tensors.items()},
    )
    wanted = [*held.weights(), *(h for h in held.moments() if h.live.state == "master")]
    if any(h.live.state == "master" for h in wanted):
        # masters get every bit that the model has, also where the weights are bf16
        metas, chunks = dict(source.tensors), dict(source.chunks)
        for name in source.tensors:
            metas["master/" + name] = source.tensors[name]
            chunks["master/" + name] = source.chunks[name]
        source = Manifest(metas, chunks)
    host = {
        h.live.key: h.tensor
        if h.tensor.device.type == "cpu"
        else torch.zeros(h.tensor.shape, dtype=h.tensor.dtype)
        for h in wanted
    }
    for tensor in host.values():
        tensor.detach().zero_()
    buffers = {key: bytes_of(tensor) for key, tensor in host.items()}
    buffers |= {_HF + name: bytes_of(tensor) for name, tensor in tensors.items()}
    live.load(source, [h.live for h in wanted], buffers, held.placement)
    for h in wanted:
        if host[h.live.key] is not h.tensor:
            h.tensor.copy_(host[h.live.key])


def collect(held: RankState) -> dict[str, torch.Tensor]:
    """The whole model under its logical names, on the CPU of every rank.

    Each rank contributes what it holds; a sum of bytes joins them, since every byte comes from
    one rank alone. Needs memory for the whole model; ``save_model`` does not.
    """
    held.settle()
    weights = held.weights()
    ours = {h.live.key: h.tensor.detach().to("cpu").contiguous() for h in weights}
    dtype = weights[0].live.dtype
    shapes = held.placement.shapes
    made = {
        name: torch.zeros(shape, dtype=getattr(torch, TO_TORCH[dtype]))
        for name, shape in shapes.items()
    }
    target = Manifest(
        {n: TensorMeta(tuple(t.shape), dtype) for n, t in made.items()},
        {n: [_chunk(n, t, _HF + n)] for n, t in made.items()},
    )
    copies = [c for c in plan(_everyone(held, dtype), target).copies if _is_mine(c, held)]
    buffers = {_key(held.coord, key): bytes_of(tensor) for key, tensor in ours.items()}
    buffers |= {_HF + name: bytes_of(tensor) for name, tensor in made.items()}

    def each(mover: Mover, index: int, unit: list[Copy]) -> None:
        mover.move(unit)

    run_units(units(copies), Budget(1), each, buffers=buffers)
    for tensor in made.values():
        dist.all_reduce(tensor.reshape(-1).view(torch.uint8), group=held.control)
    return made


def _is_mine(copy: Copy, held: RankState) -> bool:
    """Whether this rank owns the source of a copy."""
    here = _key(held.coord, "")
    name = copy.src.file.removeprefix(here)
    return copy.src.file.startswith(here) and held.place.owns(name)


def _key(coord: tuple[tuple[str, int], ...], key: str) -> str:
    return "".join(f"{axis}{rank}." for axis, rank in coord) + ":" + key


def _everyone(held: RankState, dtype: str) -> Manifest:
    """What all ranks of a replica hold together, padding left out."""
    metas: dict[str, TensorMeta] = {}
    chunks: dict[str, list[Chunk]] = {}
    for coord, rows in held.placement.placed.items():
        part = live.manifest([live.LiveTensor("", p, dtype) for p in rows], held.placement)
        for fqn, found in part.chunks.items():
            if is_padding(fqn):
                continue
            metas[fqn] = part.tensors[fqn]
            for chunk in found:
                view = chunk.view
                moved = View(_key(coord, view.file), view.offset_bytes, view.shape, view.strides,
                             view.dtype)  # fmt: skip
                chunks.setdefault(fqn, []).append(Chunk(fqn, chunk.box, moved))
    return Manifest(metas, chunks)


def stored_parts(
    model: Model, layout: Layout, parallel: Parallel, vocab_multiple: int
) -> dict[str, list[str]]:
    """Stored name -> the logical tensors packed into it, for the tensors of this rank."""
    here = Placement.written(model, mesh_of(model, layout), vocab_multiple)
    coord = (("tp", parallel.tp_rank), ("pp", parallel.pp_rank))
    return {
        placed.name: sorted({fqn.removeprefix(PADDING) for fqn in placed.parts})
        for placed in here.placed[coord]
    }


def _dtype(tensor: torch.Tensor) -> str:
    return FROM_TORCH[str(tensor.dtype).removeprefix("torch.")]


def _chunk(name: str, tensor: torch.Tensor, key: str) -> Chunk:
    shape = tuple(tensor.shape)
    return Chunk(name, full(shape), View(key, 0, shape, row_major(shape), _dtype(tensor)))
