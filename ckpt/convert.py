"""``reshard`` and ``merge``: what an output is to be, handed to the one job runner."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .checkpoint.config import find_config
from .checkpoint.types import WITHOUT, Checkpoint, ReadOptions
from .errors import CheckpointError
from .formats import writers
from .formats.hf import reader as hf
from .formats.native import names as shard_names
from .formats.side_files import side_files
from .formats.writing import WriteRequest, checksums
from .jobs import Job, Report, RunOptions, run_job
from .model.design import Design
from .model.dtypes import CASTABLE, TO_TORCH, parse_dtype
from .model.family import Model, build_mesh
from .model.manifest import STATES, SideFile, TensorMeta, category_of, is_padding
from .model.mesh import AXES, interleaved, named_axes, split_by_counts
from .model.planner import Tolerance, by_category
from .model.target import Target, main_dtype
from .reader import read_checkpoint

if TYPE_CHECKING:
    from .verifier import Verdict


MAX_AXIS = 1 << 16  # ranks: each is a file, and planning them takes time and memory


@dataclass(frozen=True, slots=True)
class ReshardOptions:
    """The layout and format that an output is to have; None keeps the source's own."""

    axes: Mapping[str, int | None]  # ranks of tp, pp and further axes
    dp: int | None = None  # shard the optimizer over this many ranks
    pp_layers: tuple[int, ...] | None = None  # layers of each stage
    dtype: str | None = None  # of the weights
    safe: bool | None = None  # safetensors (True) or torch zips (False)
    weights_only: bool = False
    vocab_multiple: int | None = None  # make_vocab_size_divisible_by
    to: str | None = None  # format
    vpp: int | None = None  # virtual stages of each pipeline rank
    distributed: bool | None = None  # Megatron's distributed optimizer

    def asked(self) -> list[str]:
        """The options that not every format has, as far as they were given."""
        given = {
            **{f"--{axis}": size for axis, size in self.axes.items()},
            "--dp": self.dp,
            "--pp-layers": self.pp_layers,
            "--vpp": self.vpp,
            "--safe-serialization": self.safe,
            "--make-vocab-size-divisible-by": self.vocab_multiple,
            "--use-distributed-optimizer": self.distributed,
        }
        return [name for name, value in given.items() if value is not None]


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """The Hugging Face checkpoint that is to be written."""

    dtype: str | None = None
    max_shard_bytes: int | None = None  # None: one file
    from_master: bool = False  # export the optimizer's fp32 masters
    safe: bool = True


def reshard(
    source: str | Path,
    output: str | Path | None = None,
    *,
    tp: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    pp_layers: Sequence[int] | None = None,
    dtype: str | None = None,
    safe_serialization: bool | None = None,
    weights_only: bool = False,
    make_vocab_size_divisible_by: int | None = None,
    to: str | None = None,
    vpp: int | None = None,
    use_distributed_optimizer: bool | None = None,
    read: ReadOptions | None = None,
    run: RunOptions | None = None,
    **axes: int | None,
) -> Report:
    """Write ``source`` in another parallel layout, format or both; returns the report.

    ``to`` is shards, megatron, torch_dist or hf (which is ``merge``). What is None stays as in
    the source (a Hugging Face source is tp 1, pp 1 and becomes shards). ``dp`` shards the
    optimizer state over that many ranks, ``pp_layers`` names the layers of each stage, ``vpp``
    gives each stage that many virtual ones, ``dtype`` casts the weights, ``axes`` are ranks of
    mesh axes beyond these. ``use_distributed_optimizer`` picks the form of Megatron-LM's
    optimizer state. Default output: ``DIR-tp4-pp2`` beside the source. Raises CheckpointError.
    """
    unknown = set(axes) - set(AXES)
    if unknown:
        raise TypeError(f"reshard() got unexpected arguments: {', '.join(sorted(unknown))}")
    options = ReshardOptions(
        {"tp": tp, "pp": pp, **axes},
        dp,
        tuple(pp_layers) if pp_layers is not None else None,
        dtype,
        safe_serialization,
        weights_only,
        make_vocab_size_divisible_by,
        to,
        vpp,
        use_distributed_optimizer,
    )
    _check_applies(options)
    read, run = read or ReadOptions(), run or RunOptions()
    if to == hf.NAME:
        safe = safe_serialization is not False
        return merge(source, output, dtype=dtype, safe_serialization=safe, read=read, run=run)
    read = replace(read, weights_only=read.weights_only or weights_only)
    ckpt = _accompanied(read_checkpoint(source, read), read.config)
    model = ckpt.need_model()
    if not weights_only and ckpt.optimizer_fault():
        raise CheckpointError(ckpt.optimizer_fault())
    name = to or (ckpt.format if ckpt.format in writers() else shard_names.NAME)
    _check_applies(replace(options, to=name))
    target = _target(ckpt, options)
    metas = _cast(ckpt.manifest.tensors, dtype)
    sides = _with_dtype(ckpt.manifest.side_files, dtype)
    if read.vocab_size is not None:
        sides = _with_vocab(sides, model)
    order = WriteRequest(ckpt, target, metas, ckpt.manifest.state, weights_only, tuple(sides))
    writer = writers()[name]
    job = Job(
        ckpt,
        partial(writer.design, order),
        _absolute(output) if output else _beside(ckpt, target, name),
        single=False,
        drop=lambda fqn: None,
        sides=partial(writer.sides, order),
        identity={"to": repr(options), "read": repr(read)},
    )
    report = run_job(job, run)
    if weights_only:
        report.notes.append("optimizer and training state left out (--weights-only)")
    return report


def _check_applies(options: ReshardOptions) -> None:
    """An unknown format, and options that the known one does not have, are refused by name."""
    if options.to is None:
        return
    known = sorted({hf.NAME, *writers()})
    if options.to not in known:
        raise CheckpointError(f"--to {options.to}: not a format; known are {', '.join(known)}")
    every = {f"--{axis}" for axis in AXES} | {"--dp", "--make-vocab-size-divisible-by"}
    takes = (
        frozenset({"--safe-serialization"})
        if options.to == hf.NAME
        else every | writers()[options.to].TAKES
    )
    wrong = [name for name in options.asked() if name not in takes]
    if wrong:
        raise CheckpointError(
            f"{', '.join(wrong)}: nothing that a checkpoint of the format {options.to} has; "
            "leave it out, or name another format with --to"
        )


def _beside(ckpt: Checkpoint, target: Target, to: str) -> Path:
    """The default output: named after the source and the layout, and the format if it is new."""
    stem = ckpt.path.name if ckpt.path.is_dir() else ckpt.path.stem
    kind = "" if to in (ckpt.format, shard_names.NAME) else f"-{to}"
    return ckpt.path.parent / (stem + kind + "".join(f"-{a}{n}" for a, n in target.mesh.axes))


def _absolute(output: str | Path) -> Path:
    """Where an output goes; a shell leaves the ~ of ``--output=~/x`` to us."""
    return Path(os.path.expanduser(output)).absolute()


def _target(ckpt: Checkpoint, to: ReshardOptions) -> Target:
    """The new layout, with everything that the user left open taken from the source."""
    model = ckpt.need_model()
    for name, value in (*to.axes.items(), ("dp", to.dp), ("vpp", to.vpp)):
        if value is not None and value < 1:
            raise CheckpointError(f"--{name} {value}: must be at least 1")
        if value is not None and value > MAX_AXIS:
            raise CheckpointError(f"--{name} {value}: the limit is {MAX_AXIS} ranks")
    multiple = to.vocab_multiple if to.vocab_multiple is not None else ckpt.vocab_multiple
    if multiple < 1:
        raise CheckpointError(f"--make-vocab-size-divisible-by {multiple}: must be at least 1")
    asked = {axis: size for axis, size in to.axes.items() if size is not None}
    sizes = {axis: asked.get(axis, ckpt.mesh.size(axis)) for axis in AXES}
    stages = None
    if to.pp_layers is not None:
        if len(to.pp_layers) != asked.get("pp", len(to.pp_layers)):
            raise CheckpointError(
                f"--pp-layers names {len(to.pp_layers)} stages, --pp says {asked['pp']}"
            )
        sizes["pp"] = len(to.pp_layers)
        stages = split_by_counts(model.sizes["layer"], to.pp_layers)
    if to.vpp is not None:
        if stages is not None:
            raise CheckpointError("--vpp cuts layers evenly; --pp-layers cannot go with it")
        stages = interleaved(model.sizes["layer"], sizes["pp"], to.vpp)
    elif stages is None and "pp" not in asked:
        stages = ckpt.mesh.owned.get("pp")
    mesh = build_mesh(model.family.select(model.flags), model.sizes, named_axes(sizes), stages)
    dp = to.dp if to.dp is not None else ckpt.dp
    sharded = dp > 1 if to.dp is not None else ckpt.sharded
    sharded = to.distributed if to.distributed is not None else sharded
    safe = to.safe if to.safe is not None else not _is_bin(ckpt)
    step = None if to.weights_only and not ckpt.step else ckpt.step
    return Target(model, mesh, dp, sharded, multiple, safe, step)


def _is_bin(ckpt: Checkpoint) -> bool:
    """Whether shards should stay torch zips: the spelling of the source is kept."""
    return ckpt.format == shard_names.NAME and any(f.path.endswith(".bin") for f in ckpt.files)


def _cast(metas: Mapping[str, TensorMeta], dtype: str | None) -> dict[str, TensorMeta]:
    """The tensors with the weights' floating types replaced; optimizer state keeps its own."""
    if dtype is None:
        return dict(metas)
    want = parse_dtype(dtype)
    return {
        fqn: TensorMeta(m.shape, want, m.elastic)
        if category_of(fqn) == "" and m.dtype in CASTABLE
        else m
        for fqn, m in metas.items()
    }


def _with_dtype(sides: tuple[SideFile, ...], dtype: str | None) -> list[SideFile]:
    """Side files, with config.json saying the dtype that the weights are cast to.

    transformers loads a model in its config's dtype: an old one would undo the cast.
    """
    if dtype is None:
        return list(sides)
    return [_retyped(s, parse_dtype(dtype)) if s.name == "config.json" else s for s in sides]


def _retyped(side: SideFile, dtype: str) -> SideFile:
    table = _json_of(side)
    keys = [key for key in ("dtype", "torch_dtype") if key in table] or ["torch_dtype"]
    table.update(dict.fromkeys(keys, TO_TORCH[dtype]))
    return SideFile(side.name, text=json.dumps(table, indent=2) + "\n")


def _with_vocab(sides: list[SideFile], model: Model | None) -> list[SideFile]:
    """Side files, with config.json saying the rows that are left where --vocab-size cut some."""
    if model is None or model.config.get("vocab_size") == model.sizes["vocab"]:
        return sides
    return [_resized(s, model.sizes["vocab"]) if s.name == "config.json" else s for s in sides]


def _resized(side: SideFile, vocab: int) -> SideFile:
    table = {**_json_of(side), "vocab_size": vocab}
    return SideFile(side.name, text=json.dumps(table, indent=2) + "\n")


def _json_of(side: SideFile) -> dict[str, object]:
    table: dict[str, object] = json.loads(
        side.text or Path(side.source).read_text(encoding="utf-8")
    )
    return table


def _accompanied(ckpt: Checkpoint, config: Path | None) -> Checkpoint:
    """The checkpoint with the user's config, and what lies beside it, in place of its own."""
    if config is None:
        return ckpt
    extra = side_files(config) if config.is_dir() else (SideFile("config.json", str(config)),)
    sides = {side.name: side for side in (*ckpt.manifest.side_files, *extra)}
    return replace(ckpt, manifest=replace(ckpt.manifest, side_files=tuple(sides.values())))


def merge(
    source: str | Path,
    output: str | Path | None = None,
    *,
    dtype: str | None = None,
    max_shard_size: int | None = None,
    config: str | Path | None = None,
    from_master: bool = False,
    safe_serialization: bool = True,
    read: ReadOptions | None = None,
    run: RunOptions | None = None,
) -> Report:
    """Write ``source`` as a Hugging Face checkpoint; returns the report.

    An ``output`` that ends in ``.safetensors`` or ``.bin`` is one file, any other a folder
    with config, tokenizer and all other non-weight files of the source. Default: ``DIR-hf``.
    ``max_shard_size`` is in bytes (None: one file), ``config`` a folder whose config and
    tokenizer replace the source's, ``from_master`` exports the optimizer's fp32 masters.
    """
    to = MergeOptions(dtype, max_shard_size, from_master, safe_serialization)
    read, options = read or ReadOptions(), run or RunOptions()
    read = replace(read, config=Path(config) if config else read.config)
    ckpt = read_checkpoint(source, replace(read, weights_only=not to.from_master))
    if to.from_master and ckpt.optimizer_fault():
        raise CheckpointError(
            ckpt.optimizer_fault().replace(WITHOUT, "merge without --from-master")
        )
    ckpt = _accompanied(ckpt, read.config)
    metas = _masters(ckpt) if to.from_master else _weights(ckpt)
    metas = _cast(metas, to.dtype)
    base = ckpt.path if ckpt.path.is_dir() else ckpt.path.parent / ckpt.path.stem
    where = _absolute(output) if output else base.parent / f"{base.name}-hf"
    single = where.suffix in (".bin", ".safetensors")
    if single and to.max_shard_bytes is not None:
        raise CheckpointError(f"--output {where} is one file; --max-shard-size needs a folder")

    def design(root: Path) -> Design:
        return hf.design(
            metas,
            root,
            file_name=where.name if single else "",
            safe=to.safe,
            max_shard_bytes=to.max_shard_bytes,
        )

    def sides(made: Design, files: Mapping[str, tuple[int, str]]) -> list[SideFile]:
        return [] if single else _merge_sides(ckpt, to, made, files, metas)

    drop = by_category(
        {
            **dict.fromkeys(STATES, "Hugging Face files hold no optimizer state"),
            **({"": "the fp32 masters are exported in its place"} if to.from_master else {}),
        }
    )
    job = Job(
        _renamed_masters(ckpt) if to.from_master else ckpt,
        design,
        where,
        single,
        drop,
        sides,
        identity={"to": repr(to), "read": repr(read)},
    )
    report = run_job(job, options)
    report.notes += _merge_notes(ckpt)
    return report


def _weights(ckpt: Checkpoint) -> dict[str, TensorMeta]:
    """The logical weights, padding left behind."""
    return {
        fqn: meta
        for fqn, meta in ckpt.manifest.tensors.items()
        if category_of(fqn) == "" and not is_padding(fqn)
    }


def _masters(ckpt: Checkpoint) -> dict[str, TensorMeta]:
    """The weights with the types of their fp32 masters; an fp32 weight is its own."""
    metas = {}
    missing = []
    mixed = bool(ckpt.manifest.category("master"))
    for fqn, weight in _weights(ckpt).items():
        meta = ckpt.manifest.tensors.get("master/" + fqn)
        if meta is None and mixed and weight.dtype == "F32":
            meta = weight
        if meta is None:
            missing.append(fqn)
        else:
            metas[fqn] = meta
    if missing:
        raise CheckpointError(
            f"{ckpt.path}: --from-master: {len(missing)} weights have no master, first "
            f"{missing[0]}; merge without it"
        )
    return metas


def _renamed_masters(ckpt: Checkpoint) -> Checkpoint:
    """The checkpoint with its masters under the weights' names."""
    manifest = ckpt.manifest
    keep = {f: f.removeprefix("master/") for f in manifest.tensors if f.startswith("master/")}
    own = set(_weights(ckpt)) - set(keep.values())  # fp32 weights without a master
    keep |= {f: f for f in own}
    rest = {f: m for f, m in manifest.tensors.items() if f not in keep and category_of(f)}
    tensors = {new: manifest.tensors[old] for old, new in keep.items()}
    chunks = {new: [replace(c, fqn=new) for c in manifest.chunks[old]] for old, new in keep.items()}
    for fqn in rest:
        chunks[fqn] = manifest.chunks[fqn]
    return replace(ckpt, manifest=replace(manifest, tensors={**tensors, **rest}, chunks=chunks))


def _merge_notes(ckpt: Checkpoint) -> list[str]:
    """What a Hugging Face folder cannot hold, in plain words."""
    notes = []
    if ckpt.manifest.state or ckpt.has_optimizer or ckpt.random_states:
        notes.append("optimizer and training state left out: Hugging Face files do not hold them")
    return notes


def _merge_sides(
    ckpt: Checkpoint,
    to: MergeOptions,
    made: Design,
    files: Mapping[str, tuple[int, str]],
    metas: Mapping[str, TensorMeta],
) -> list[SideFile]:
    """Config, tokenizer and the rest."""
    dtype = main_dtype(metas) if to.dtype or to.from_master else None
    found = _with_vocab(_with_dtype(ckpt.manifest.side_files, dtype), ckpt.model)
    found += made.manifest.side_files
    return found + checksums(files)


def verify_merge(
    source: str | Path,
    output: Path,
    dtype: str | None,
    from_master: bool,
    read: ReadOptions | None = None,
    run: RunOptions | None = None,
) -> Verdict:
    """Compare a finished merge with its source, casting the source's values as it was."""
    from .verifier import compare_checkpoints

    read = read or ReadOptions()
    ckpt = read_checkpoint(source, replace(read, weights_only=not from_master))
    if from_master:
        ckpt = _renamed_masters(ckpt)
    config = find_config(ckpt.path if ckpt.path.is_dir() else ckpt.path.parent, read)
    made = read_checkpoint(output, ReadOptions(config, vocab_size=read.vocab_size))
    tolerance = Tolerance(cast=dtype is not None)
    return compare_checkpoints(ckpt, made, tolerance, True, run or RunOptions())
