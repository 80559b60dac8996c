"""Optimizer state of torch_dist checkpoints that lies in the flat buffers of the run's ranks.

``dp_reshardable``, Megatron's default: 1-D tensors, one for each bucket of each buffer of each
model-parallel rank. Which parameters a rank has, and in which order, follows from args; the
lengths of the buckets are those of the tensors. Megatron itself can then change dp alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ....containers.dcp import Blob, BlobSlice, Stored
from ....errors import CheckpointError
from ....model.chunk_builder import ChunkBuilder
from ....model.family import WHOLE_DOWN, Model, build_mesh
from ....model.layout import default_layout
from ....model.mesh import Coord, Mesh
from ....model.placement import Placed, Placement
from ....move.storage import StoragePath
from .. import optimizer as megatron_optim
from .. import pipeline
from ..classic import files as megatron_files
from ..optimizer import Param, registration_key

_FLAT = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\..*")
_BUCKET = re.compile(
    r"(?:chained_(\d)\.)?optimizer\.distributed\.dp_group_idx_(\d{1,6})\.gbuf_idx_(\d{1,6})\.dtype_\((.+)\)"
    r"\.bucket_idx_(\d{1,6})\.(param|exp_avg|exp_avg_sq)"
)
_STATES = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


@dataclass(frozen=True, slots=True)
class SavedRun:
    """What is known of the run that wrote the buffers, and where its state is collected."""

    folder: StoragePath
    args: Mapping[str, object]
    model: Model
    padded: int  # vocabulary rows
    layout: Mapping[str, str]
    builder: ChunkBuilder  # holds the weights already
    left_out: list[tuple[str, int]]  # reason, bytes


def is_flat(name: str) -> bool:
    """Whether a key is one of a flat buffer, or of what lies beside it."""
    return _FLAT.fullmatch(name) is not None


# (number in a chain of optimizers or None, model-parallel rank, buffer) -> key -> bucket -> tensor
_Buckets = dict[tuple[int | None, int, int], dict[str, dict[int, Stored]]]


def read(saved: SavedRun, tensors: Mapping[str, Stored]) -> str:
    """Add all flat buffers to the chunks; returns why they cannot be read, or ""."""
    buckets: _Buckets = {}
    for name, stored in tensors.items():
        match = _BUCKET.fullmatch(name)
        if match is None:
            return f"{saved.folder}: {name}: optimizer state of an unknown form"
        if len(stored.shape) != 1:
            return f"{saved.folder}: {name}: shape {list(stored.shape)}, a flat one is needed"
        chain = None if match[1] is None else int(match[1])
        table = buckets.setdefault((chain, int(match[2]), int(match[3])), {})
        table.setdefault(match[6], {})[int(match[5])] = stored
    if _lies_together(saved):
        return (
            f"{saved.folder}: flat buffers of experts that lie in one tensor (megatron-core's "
            "GroupedMLP), whose elements have another order"
        )
    try:
        here = _placement(saved)
    except CheckpointError as error:
        return f"{saved.folder}: {error}"
    chained = any(chain is not None for chain, _, _ in buckets)
    for coord, rows in _ranks(here, chained=chained):
        at = dict(coord)
        chain = int("ep" in at) if chained else None
        says = " ".join(f"{axis} {rank}" for axis, rank in coord)
        pools = _pools(saved, rows, here.mesh.size("pp"))
        for number, pool in enumerate(pools):
            found = buckets.pop((chain, _group(here.mesh, coord), number), None)
            if found is None:
                return f"{saved.folder}: buffer {number} of {says} is missing"
            why = _buffer(saved, found, pool, rows)
            if why:
                return f"{saved.folder}: buffer {number} of {says}: {why}"
    if buckets:
        _, group, number = next(iter(buckets))
        return f"{saved.folder}: buffer {number} of group {group} belongs to no rank of args"
    return ""


def _ranks(here: Placement, *, chained: bool) -> Iterator[tuple[Coord, dict[str, Placed]]]:
    """What each optimizer of each model-parallel rank of the saving run held, by name.

    In a chain experts have an optimizer of their own; else the rank's one has them too.
    """
    experts = here.mesh.experts
    for coord in here.mesh.all_coords() if chained else here.mesh.coords():
        shards = [coord]
        if experts is not None and not chained:
            at = dict(coord)
            shards.append((("tp", at["tp"] % experts.size("tp")), ("pp", at["pp"]), ("ep", 0)))
        yield coord, {n: p for n, p in here.held(shards).items() if p.trained}


def _group(mesh: Mesh, coord: Coord) -> int:
    """The number of a model-parallel rank: tp fastest, then ep, then pp."""
    at = dict(coord)
    if "ep" not in at:
        return at["pp"] * mesh.size("tp") + at["tp"]
    assert mesh.experts is not None
    return (at["pp"] * mesh.experts.size("ep") + at["ep"]) * mesh.experts.size("tp") + at["tp"]


def mesh_of(args: Mapping[str, object], model: Model) -> Mesh:
    """The mesh of a run, as args split it; CheckpointError for an impossible split."""
    sizes = {axis: megatron_files.size_of(args, axis) or 1 for axis in ("tp", "pp")}
    split = pipeline.read(args, model.sizes["layer"], sizes["pp"])
    axes = tuple(sizes.items())
    if not any(rule.mesh for rule in model.rules()):
        return build_mesh(model, axes, split.stages, split.mtp)
    ep, etp = megatron_files.size_of(args, "ep"), megatron_files.size_of(args, "etp")
    return build_mesh(model, axes, split.stages, split.mtp, ep=ep or 1, etp=etp)


def _is_fused(saved: SavedRun) -> bool:
    """Whether the run had TransformerEngine's layers."""
    return saved.args.get("transformer_impl") == "transformer_engine"


def _lies_together(saved: SavedRun) -> bool:
    """Whether a parameter of the run was a linear layer of all experts of a rank."""
    args = saved.args
    if args.get("moe_grouped_gemm") is not True or not saved.model.sizes.get("expert"):
        return False
    return not _is_fused(saved) or args.get("moe_use_legacy_grouped_gemm") is True


def _placement(saved: SavedRun) -> Placement:
    """What each rank of the saving run held."""
    model = saved.model
    mesh = mesh_of(saved.args, model)
    layout = {**default_layout(model.family), "qkv": saved.layout["qkv"]}
    variant = frozenset({WHOLE_DOWN} if _is_fused(saved) else ())
    return Placement.of(model, mesh, layout, saved.padded, variant)


def _pools(saved: SavedRun, rows: Mapping[str, Placed], pp: int) -> list[list[Param]]:
    """The parameters of each buffer, in registration order."""
    fused = _is_fused(saved)
    grouped = fused and saved.args.get("moe_grouped_gemm") is True
    tied = "tie_word_embeddings" in saved.model.flags and pp > 1
    params = []
    for name, placed in rows.items():
        shared = tied and name in ("embedding.word_embeddings.weight", "output_layer.weight")
        dtype = saved.builder.metas[placed.parts[0]].dtype
        params.append(Param(name, placed.shape, dtype, placed.stage, shared))
    params.sort(key=lambda p: (p.chunk, registration_key(p.name, fused, grouped)))
    pools: dict[tuple[int, str], list[Param]] = {}
    for param in params:
        pools.setdefault((param.chunk, param.dtype), []).append(param)
    return list(pools.values())


def _buffer(
    saved: SavedRun,
    found: Mapping[str, Mapping[int, Stored]],
    pool: Sequence[Param],
    rows: Mapping[str, Placed],
) -> str:
    for key, parts in found.items():
        if sorted(parts) != list(range(len(parts))):
            return f"{key} has the buckets {sorted(parts)}"
        lengths = [parts[i].shape[0] for i in range(len(parts))]
        flat = megatron_optim.bucketed(pool, lengths)
        if flat is None:
            total = sum(p.numel for p in pool)
            return f"{key}: buckets of {lengths} elements fit no {len(pool)} parameters of {total}"
        blobs: list[tuple[int, Blob]] = []
        base = 0
        for i in range(len(parts)):
            blobs += [(base + blob.box.offsets[0], blob) for blob in parts[i].blobs]
            base += lengths[i]
        for span in flat.spans:
            if key == "param" and span.param.dtype == "F32":
                saved.left_out.append(("masters of fp32 weights repeat them", 4 * span.param.numel))
                continue
            _span(saved, _STATES[key], span, rows[span.param.name], blobs)
    return ""


def _span(
    saved: SavedRun,
    state: str,
    span: megatron_optim.Span,
    placed: Placed,
    blobs: Sequence[tuple[int, Blob]],
) -> None:
    """A parameter's elements, in the pieces in which data-parallel ranks wrote them."""
    for first, blob in blobs:
        start = max(0, first - span.start)
        stop = min(span.param.numel, first + blob.box.sizes[0] - span.start)
        if start >= stop:
            continue
        for piece in placed.clip(start, stop):
            element, steps = placed.bytes_at(piece, span.start - first, 1)
            part = BlobSlice(blob, (element,), piece.box.sizes, steps=steps)
            saved.builder.add_box(state, piece, part, placed.name)
