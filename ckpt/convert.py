"""``reshard`` and ``merge``: turn options into a job, which ``jobs.py`` runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .checkpoint.config import find_config, with_config
from .checkpoint.types import WITHOUT, Checkpoint, ReadOptions
from .completeness import frozen_faults, incomplete_states
from .errors import CheckpointError, raise_all
from .formats import writer as writer_of
from .formats import writers
from .formats.hf.names import NAME as HF
from .formats.native.names import NAME as SHARDS
from .formats.side_files import side_files
from .formats.writing import WholeFiles, WriteRequest
from .jobs import Job, Report, RunOptions, check_place, run_job
from .keywords import take_axes, take_options
from .model.dtypes import CASTABLE, parse_dtype
from .model.family import build_mesh, is_mtp
from .model.manifest import STATES, SideFile, TensorMeta, category_of, is_padding
from .model.mesh import AXES, Mesh, Stages, named_axes
from .model.pipeline import interleaved, parse
from .model.placement import buffers_of
from .model.planner import Tolerance, by_category
from .model.target import Target, main_dtype
from .move.progress import parse_bytes
from .move.storage import Where, storage_path
from .output_name import absolute, default_output
from .reader import check_replaceable, read_checkpoint
from .without_mtp import without_mtp

if TYPE_CHECKING:
    from .formats.writing import Writer
    from .logits import LogitsVerdict
    from .verdict import Verdict


_WHOLE_STATE = ("megatron", "torch_dist")  # formats that hold the state of every parameter
MAX_AXIS = 1 << 16  # ranks: each has a file, and planning it takes time and memory


@dataclass(frozen=True, slots=True)
class ReshardOptions:
    """The layout and format of an output; None keeps the source's."""

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
    max_shard_bytes: int | None = None  # None: one file
    from_master: bool = False  # export the optimizer's fp32 masters
    allow_incomplete_args: bool = False  # write args of Megatron-LM that lack part of the model
    adam: str | None = None  # whose Adam megatron-core uses: fused or torch
    pp_layout: str | None = None  # Megatron-LM's layout string
    ep: int | None = None  # ranks that share the experts
    etp: int | None = None  # ranks that cut each expert
    drop_mtp: bool = False  # leave out the layers that predict further tokens

    def asked(self) -> list[str]:
        """The given options that not every format has."""
        given = {
            **{f"--{axis}": size for axis, size in self.axes.items()},
            "--dp": self.dp,
            "--pp-layers": self.pp_layers,
            "--pp-layout": self.pp_layout,
            "--ep": self.ep,
            "--etp": self.etp,
            "--vpp": self.vpp,
            "--safe-serialization": self.safe,
            "--make-vocab-size-divisible-by": self.vocab_multiple,
            "--use-distributed-optimizer": self.distributed,
            "--max-shard-size": self.max_shard_bytes,
            "--from-master": self.from_master or None,
            "--allow-incomplete-args": self.allow_incomplete_args or None,
            "--adam": self.adam,
        }
        return [name for name, value in given.items() if value is not None]


def reshard(
    source: Where,
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
    max_shard_size: int | str | None = None,
    from_master: bool = False,
    allow_incomplete_args: bool = False,
    adam: str | None = None,
    pp_layout: str | None = None,
    ep: int | None = None,
    etp: int | None = None,
    drop_mtp: bool = False,
    read: ReadOptions | None = None,
    run: RunOptions | None = None,
    **more: object,
) -> Report:
    """Write ``source`` in another parallel layout, format or both; returns the report.

    ``to`` is shards, megatron, torch_dist or hf. What is None stays as in the source (a Hugging
    Face source is tp 1, pp 1 and becomes shards). ``dp`` splits the optimizer state over that many
    ranks, ``pp_layers`` gives the layers of each stage, ``vpp`` the virtual stages of each stage,
    ``pp_layout`` both as Megatron-LM's layout string; ``ep`` spreads experts over that many ranks,
    ``etp`` cuts each (default: as ``tp``). ``dtype`` casts the weights.
    ``use_distributed_optimizer`` picks the form of Megatron-LM's optimizer state.
    ``max_shard_size`` (bytes, or "5GB") and ``from_master`` belong to hf, see `merge`. A model that
    Megatron-LM's args cannot describe is refused without ``allow_incomplete_args``. ``adam`` names
    the class that will load Megatron-LM's plain optimizer: fused (Apex's, TransformerEngine's) or
    torch. Default output: ``DIR-tp4-pp2`` or ``DIR-hf`` next to the source. Raises CheckpointError.

    ``more`` are the ranks of further mesh axes, and keywords that mirror the command's options:
    ``overwrite``, ``resume``, ``dry_run``, ``workers``, ``memory_budget``, ``checksum``,
    ``replicas``, ``quiet``, ``config``, ``layout``, ``vocab_size``, ``iteration``, ``format``, ...
    """
    axes = take_axes("reshard", more)
    own = (*AXES, *(reshard.__kwdefaults__ or ()))
    read, run = take_options("reshard", more, read, run, own=own)
    layers = tuple(pp_layers) if pp_layers is not None else None
    most = parse_bytes(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
    options = ReshardOptions(
        axes={"tp": tp, "pp": pp, **axes}, dp=dp, pp_layers=layers, dtype=dtype,
        safe=safe_serialization, weights_only=weights_only,
        vocab_multiple=make_vocab_size_divisible_by, to=to, vpp=vpp,
        distributed=use_distributed_optimizer, max_shard_bytes=most,
        from_master=from_master, allow_incomplete_args=allow_incomplete_args, adam=adam,
        pp_layout=pp_layout, ep=ep, etp=etp, drop_mtp=drop_mtp,
    )  # fmt: skip
    return _run(source, output, options, read, run)


def _run(
    source: Where,
    output: str | Path | None,
    options: ReshardOptions,
    read: ReadOptions,
    run: RunOptions,
) -> Report:
    _check_applies(options)
    job = _job(source, output, options, read)
    check_place(job.source, job.output)
    if run.overwrite:
        check_replaceable(job.output)
    return run_job(job, run)


def merge(
    source: Where,
    output: str | Path | None = None,
    *,
    dtype: str | None = None,
    max_shard_size: int | str | None = None,
    config: Where | None = None,
    from_master: bool = False,
    safe_serialization: bool = True,
    read: ReadOptions | None = None,
    run: RunOptions | None = None,
    **more: object,
) -> Report:
    """``reshard`` to a Hugging Face checkpoint; returns the report.

    An ``output`` that ends in ``.safetensors`` or ``.bin`` is one file, any other a folder
    with config, tokenizer and all other non-weight files of the source. Default: ``DIR-hf``.
    ``max_shard_size`` is in bytes or "5GB" (None: one file), ``config`` a folder whose config and
    tokenizer replace the source's, ``from_master`` exports the optimizer's fp32 masters. ``more``
    are keywords that mirror the options of the command, as of ``reshard``.
    """
    own = merge.__kwdefaults__ or ()
    read, run = take_options("merge", more, read, run, own=own)
    return reshard(
        source,
        output,
        to=HF,
        dtype=dtype,
        safe_serialization=safe_serialization,
        max_shard_size=max_shard_size,
        from_master=from_master,
        read=replace(read, config=config or read.config),
        run=run,
    )


def _job(
    source: Where, output: str | Path | None, options: ReshardOptions, read: ReadOptions
) -> Job:
    """The conversion that the options describe, ready to be planned."""
    weights_only = read.weights_only or options.weights_only
    if options.to == HF:
        weights_only = not options.from_master
    options = replace(options, weights_only=weights_only)
    ckpt = read_checkpoint(source, replace(read, weights_only=weights_only))
    ckpt = _accompanied(ckpt, read)
    ckpt = without_mtp(ckpt) if options.drop_mtp else ckpt
    writer = _writer(ckpt, options)
    if not weights_only:
        _check_optimizer(ckpt, options)
    target = None if writer.WEIGHTS_ONLY else _target(ckpt, options)
    where = absolute(output) if output is not None else default_output(source, ckpt, target, writer)
    ckpt = _renamed_masters(ckpt) if options.from_master else ckpt
    keep = buffers_of(ckpt.model) if ckpt.model is not None else frozenset()
    metas = _cast(ckpt.manifest.tensors, options.dtype, keep)
    said = parse_dtype(options.dtype) if options.dtype else ""
    sides = with_config(ckpt, metas, said or (main_dtype(metas) if options.from_master else ""))
    whole = _whole_files(where, options) if writer.WEIGHTS_ONLY else WholeFiles()
    state = ckpt.manifest.state
    request = WriteRequest(
        ckpt, target, metas, state, weights_only, tuple(sides), whole,
        options.allow_incomplete_args, options.adam,
    )  # fmt: skip
    lost = "Hugging Face files hold no optimizer state"
    return Job(
        ckpt,
        partial(writer.design, request),
        where,
        single=bool(whole.file_name),
        drop=by_category(dict.fromkeys(STATES, lost) if writer.WEIGHTS_ONLY else {}),
        sides=partial(writer.sides, request),
        identity={"to": repr(options), "read": repr(read)},
        notes=_notes(options, metas),
    )


def _writer(ckpt: Checkpoint, options: ReshardOptions) -> Writer:
    """The writer of the format asked for: as the source, but shards for a Hugging Face one."""
    name = options.to or (ckpt.format if ckpt.format in writers() else SHARDS)
    name = SHARDS if name == HF and options.to is None else name
    _check_applies(replace(options, to=name))
    return writer_of(name)


def _check_optimizer(ckpt: Checkpoint, options: ReshardOptions) -> None:
    """Optimizer state that is written, or exported, must be sound."""
    fault = ckpt.optimizer_fault()
    if fault and options.from_master:
        fault = fault.replace(WITHOUT, "merge without --from-master")
    if fault:
        raise CheckpointError(fault)
    if options.from_master:
        return
    faults, warnings = incomplete_states(ckpt)
    if (options.to or ckpt.format) in _WHOLE_STATE:
        faults += warnings
        faults += frozen_faults(ckpt)
    raise_all(faults, f"the optimizer state is not whole; {WITHOUT}")


def _whole_files(where: Path, options: ReshardOptions) -> WholeFiles:
    """One file if the output is named as one, else transformers' names."""
    single = where.suffix in (".bin", ".safetensors")
    if single and options.max_shard_bytes is not None:
        raise CheckpointError(f"--output {where} is one file; --max-shard-size needs a folder")
    safe = options.safe is not False
    return WholeFiles(safe, options.max_shard_bytes, where.name if single else "")


def _notes(options: ReshardOptions, metas: Mapping[str, TensorMeta]) -> tuple[str, ...]:
    notes = []
    if options.weights_only and options.to != HF:
        notes.append("optimizer and training state left out (--weights-only)")
    other = [f for f, m in metas.items() if category_of(f) == "" and m.dtype not in CASTABLE]
    if options.dtype is not None and other:
        kinds = ", ".join(sorted({metas[fqn].dtype for fqn in other}))
        notes.append(
            f"--dtype {options.dtype}: {len(other)} of the weights stay as they are ({kinds}), "
            f"first {other[0]}"
        )
    return tuple(notes)


def _check_applies(options: ReshardOptions) -> None:
    """Refuse an unknown format, and options that the format does not have, by name."""
    if options.to is None:
        return
    if options.to not in writers():
        known = ", ".join(sorted(writers()))
        raise CheckpointError(f"--to {options.to}: not a format; known are {known}")
    writer = writer_of(options.to)
    parallel = {f"--{axis}" for axis in AXES} | {"--dp", "--make-vocab-size-divisible-by"}
    takes = writer.TAKES if writer.WEIGHTS_ONLY else parallel | writer.TAKES
    wrong = [name for name in options.asked() if name not in takes]
    if wrong:
        raise CheckpointError(
            f"{', '.join(wrong)}: nothing that a checkpoint of the format {options.to} has; "
            "leave it out, or name another format with --to"
        )


def _target(ckpt: Checkpoint, to: ReshardOptions) -> Target:
    """The new layout; what the user does not give is as in the source."""
    model = ckpt.need_model()
    ranks = {**to.axes, "dp": to.dp, "vpp": to.vpp, "ep": to.ep, "etp": to.etp}
    for name, value in ranks.items():
        if value is not None and value < 1:
            raise CheckpointError(f"--{name} {value}: must be at least 1")
        if value is not None and value > MAX_AXIS:
            raise CheckpointError(f"--{name} {value}: the limit is {MAX_AXIS} ranks")
    multiple = to.vocab_multiple if to.vocab_multiple is not None else ckpt.vocab_multiple
    if multiple < 1:
        raise CheckpointError(f"--make-vocab-size-divisible-by {multiple}: must be at least 1")
    asked = {axis: size for axis, size in to.axes.items() if size is not None}
    sizes = {axis: asked.get(axis, ckpt.mesh.size(axis)) for axis in AXES}
    mesh = _mesh(ckpt, to, sizes)
    dp = to.dp if to.dp is not None else ckpt.dp
    sharded = dp > 1 if to.dp is not None else ckpt.sharded
    sharded = to.distributed if to.distributed is not None else sharded
    safe = to.safe if to.safe is not None else not _is_bin(ckpt)
    step = None if to.weights_only and not ckpt.step else ckpt.step
    return Target(model, mesh, dp, sharded, multiple, safe, step)


def _mesh(ckpt: Checkpoint, to: ReshardOptions, sizes: dict[str, int]) -> Mesh:
    """The mesh of these sizes; stages stay the source's if nothing is said of them."""
    model, layers = ckpt.need_model(), ckpt.need_model().sizes["layer"]
    asked = to.axes.get("pp")
    stages: Stages | None = None
    mtp = None
    if to.pp_layout is not None:
        if to.pp_layers is not None:
            raise CheckpointError(
                "--pp-layout says the layers of each stage; leave out --pp-layers"
            )
        stages = parse(to.pp_layout, 1, layers, "--pp-layout").stages
        sizes["pp"] = asked or len(stages[0]) // (to.vpp or 1) or 1
        split = parse(to.pp_layout, sizes["pp"], layers, "--pp-layout")
        stages, mtp = split.stages, split.mtp
        if mtp is not None and not any(map(is_mtp, model.rules())):
            raise CheckpointError(f"--pp-layout {to.pp_layout}: the model has no MTP layers (m)")
        if sizes["pp"] == 1 and len(stages[0]) > 1:
            raise CheckpointError(f"--pp-layout {to.pp_layout}: virtual stages need pp above 1")
        if to.vpp is not None and len(stages[0]) != to.vpp:
            raise CheckpointError(
                f"--pp-layout {to.pp_layout} on pp={sizes['pp']} has {len(stages[0])} virtual "
                f"stages for each rank, --vpp says {to.vpp}"
            )
    elif to.pp_layers is not None:
        if len(to.pp_layers) != (asked or len(to.pp_layers)):
            raise CheckpointError(
                f"--pp-layers names {len(to.pp_layers)} stages, --pp says {asked}"
            )
        sizes["pp"] = len(to.pp_layers)
        stages = interleaved(layers, sizes["pp"], to.vpp or 1, to.pp_layers)
    elif to.vpp is not None:
        stages = interleaved(layers, sizes["pp"], to.vpp)
    elif asked is None:
        stages, mtp = ckpt.mesh.stages.get("pp"), ckpt.mesh.mtp
    experts = ckpt.mesh.experts
    ep, etp = to.ep, to.etp
    if experts is not None:
        ep = experts.size("ep") if ep is None else ep
        if etp is None and experts.size("tp") != ckpt.mesh.size("tp"):
            etp = experts.size("tp")  # it was chosen; else it follows tp
    return build_mesh(model, named_axes(sizes), stages, mtp, ep=ep or 1, etp=etp)


def _is_bin(ckpt: Checkpoint) -> bool:
    """Whether shards stay torch zips: by default the container is the source's."""
    return ckpt.format == SHARDS and any(f.path.endswith(".bin") for f in ckpt.files)


def _cast(
    metas: Mapping[str, TensorMeta], dtype: str | None, keep: frozenset[str]
) -> dict[str, TensorMeta]:
    """The tensors with the weights' floating types replaced; optimizer state and ``keep`` do not
    change theirs.
    """
    if dtype is None:
        return dict(metas)
    want = parse_dtype(dtype)
    return {
        fqn: TensorMeta(m.shape, want, m.elastic)
        if category_of(fqn) == "" and m.dtype in CASTABLE and fqn not in keep
        else m
        for fqn, m in metas.items()
    }


def _accompanied(ckpt: Checkpoint, read: ReadOptions) -> Checkpoint:
    """The checkpoint with the user's config, and the files next to it, in place of its own."""
    if read.config is None:
        return ckpt
    config = storage_path(read.config)
    extra = side_files(config, read) if config.is_dir() else (SideFile("config.json", str(config)),)
    sides = {side.name: side for side in (*ckpt.manifest.side_files, *extra)}
    return replace(ckpt, manifest=replace(ckpt.manifest, side_files=tuple(sides.values())))


def _weights(ckpt: Checkpoint) -> dict[str, TensorMeta]:
    """The logical weights without padding."""
    return {
        fqn: meta
        for fqn, meta in ckpt.manifest.tensors.items()
        if category_of(fqn) == "" and not is_padding(fqn)
    }


def _masters(ckpt: Checkpoint) -> dict[str, str]:
    """Each weight -> the logical name of its fp32 master; an fp32 weight is its own."""
    found = {}
    missing = []
    mixed = bool(ckpt.manifest.category("master"))
    buffers = buffers_of(ckpt.model) if ckpt.model is not None else frozenset()
    for fqn, weight in _weights(ckpt).items():
        if "master/" + fqn in ckpt.manifest.tensors:
            found[fqn] = "master/" + fqn
        elif fqn in buffers or (mixed and weight.dtype == "F32"):
            found[fqn] = fqn
        else:
            missing.append(fqn)
    if missing:
        raise CheckpointError(
            f"{ckpt.path}: --from-master: {len(missing)} weights have no master, first "
            f"{missing[0]}; merge without it"
        )
    return found


def _renamed_masters(ckpt: Checkpoint) -> Checkpoint:
    """The checkpoint with its masters under the weights' names, their padding rows as well."""
    manifest = ckpt.manifest
    names = {old: new for new, old in _masters(ckpt).items()}
    for fqn in manifest.tensors:
        if category_of(fqn) == "master":
            names.setdefault(fqn, fqn.removeprefix("master/"))
        elif category_of(fqn) or (is_padding(fqn) and "master/" + fqn not in manifest.tensors):
            names[fqn] = fqn
    tensors = {new: manifest.tensors[old] for old, new in names.items()}
    chunks = {
        new: [replace(c, fqn=new) for c in manifest.chunks[old]] for old, new in names.items()
    }
    return replace(ckpt, manifest=replace(manifest, tensors=tensors, chunks=chunks))


def verify_output(
    source: Where,
    output: Path,
    dtype: str | None,
    from_master: bool = False,
    read: ReadOptions | None = None,
    run: RunOptions | None = None,
    *,
    weights_only: bool = True,
) -> Verdict:
    """Compare a finished output with its source, casting the source's values as it was.

    Unless ``weights_only``, optimizer state is compared too, and the training state if the format
    is the source's: another one may hold less of it, which the report of the conversion names.
    """
    from .verifier import compare_checkpoints

    ckpt, made = _both(source, output, from_master, read or ReadOptions(), weights_only)
    tolerance = Tolerance(cast=dtype is not None)
    state = ckpt.format == made.format
    run = run or RunOptions()
    return compare_checkpoints(ckpt, made, tolerance, weights_only, run, state=state)


def output_logits(
    source: Where,
    output: Path,
    prompt: str,
    dtype: str | None,
    from_master: bool = False,
    read: ReadOptions | None = None,
) -> LogitsVerdict:
    """Compare the logits of a finished output with those of its source's model."""
    from .logits import compare_logits

    ckpt, made = _both(source, output, from_master, read or ReadOptions(), weights_only=True)
    return compare_logits(ckpt, made, prompt, cast=dtype is not None)


def _both(
    source: Where, output: Path, from_master: bool, read: ReadOptions, weights_only: bool
) -> tuple[Checkpoint, Checkpoint]:
    """A source, under the names that its output has, and the output."""
    ckpt = read_checkpoint(source, replace(read, weights_only=weights_only and not from_master))
    if from_master:
        ckpt = _renamed_masters(ckpt)
    config = find_config(ckpt.path if ckpt.path.is_dir() else ckpt.path.parent, read)
    return ckpt, read_checkpoint(output, ReadOptions(config, vocab_size=read.vocab_size))
