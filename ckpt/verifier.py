"""``verify``: compares two checkpoints bit for bit in logical space, or checks a single one."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .checkpoint.function import Settings, contradictions, settings
from .checkpoint.json_io import load_json
from .checkpoint.state import ABSENT, KEYS, TrainingState
from .checkpoint.types import Checkpoint, ReadOptions
from .completeness import incomplete_states
from .errors import CheckpointError
from .formats.hf.names import NAME as HF
from .formats.megatron.classic.reader import NAME as MEGATRON
from .formats.megatron.torch_dist.reader import NAME as TORCH_DIST
from .integrity import faults_of, recorded_crcs, recorded_digests, size_faults, used_files
from .jobs import RunOptions
from .keywords import take_options
from .model.box import full, row_major
from .model.dtypes import CASTABLE
from .model.manifest import Chunk, Manifest, TensorMeta, View, category_of, is_padding
from .model.planner import Copy, Tolerance, plan, resolve
from .move.progress import Progress, human
from .move.storage import StoragePath, Where
from .reader import read_checkpoint
from .verdict import Finding, Verdict

if TYPE_CHECKING:
    from .move.compare import Difference


def verify(
    a: Where,
    b: Where | None = None,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    weights_only: bool = False,
    read: ReadOptions | None = None,
    read_b: ReadOptions | None = None,
    run: RunOptions | None = None,
    **more: object,
) -> Verdict:
    """Compare two checkpoints of any formats and layouts, or check a single one.

    ``read`` is about ``a`` only, ``read_b`` about ``b``: an option for one side must not change how
    the other is read. With a tolerance, dtypes may differ and values are compared
    as ``|a - b| <= atol + rtol * |b|``. Raises CheckpointError where a side cannot be read.
    ``more`` are keywords that mirror the options of the command; those about a source only where
    there is one.
    """
    own = verify.__kwdefaults__ or ()
    read, options = take_options("verify", more, read, run, own=own, reading=b is None)
    says = [replace(r or ReadOptions(), weights_only=weights_only) for r in (read, read_b)]
    left = read_checkpoint(a, says[0])
    if b is None:
        return _verify_one(left, weights_only, options)
    right = read_checkpoint(b, says[1])
    if not weights_only:
        unread = left.optimizer_fault() or right.optimizer_fault()
        if unread:
            raise CheckpointError(unread)
    left, right = _aligned(left, right, says)
    verdict = compare_checkpoints(left, right, Tolerance(rtol, atol), weights_only, options)
    # what reading said: files that were not read, rows that were kept
    verdict.notes[:0] = dict.fromkeys([*left.notes, *right.notes])
    return verdict


def compare_checkpoints(
    left: Checkpoint,
    right: Checkpoint,
    tolerance: Tolerance,
    weights_only: bool,
    options: RunOptions,
    *,
    state: bool = True,
) -> Verdict:
    """Two checkpoints that have been read; ``right`` may be the cast copy of ``left``.

    Without ``state`` the training state is left out.
    """
    verdict = Verdict()
    _compare_function(left, right, verdict)
    pick = set(_common(left, right, verdict, tolerance, weights_only))
    if state and not weights_only:
        _compare_state(left, right, verdict)
        _compare_random_states(left, right, verdict)
    ours, theirs = _only(left.manifest, pick), _only(right.manifest, pick)
    # Every chunk of the right side is compared with the left, replicas too. Only padding rows
    # that the left side lacks are not: their replicas are compared with each other.
    uneven = {f for f in pick if ours.tensors[f].shape != theirs.tensors[f].shape}
    repeats = resolve(plan(_only(theirs, uneven), _whole(_only(theirs, uneven)))).replicas
    made = resolve(plan(ours, theirs if options.compare_replicas else _first_of_each(theirs)))
    verdict.tensors = len(pick)
    verdict.nbytes = made.coverage.written_bytes
    moves = made.copies
    if options.compare_replicas:
        moves = moves + made.replicas + repeats
    _compare(moves, {f: ours.tensors[f].shape for f in pick}, tolerance, options, verdict)
    return verdict


def _first_of_each(manifest: Manifest) -> Manifest:
    """Without chunks that have the same box as an earlier one of the tensor."""
    chunks = {
        fqn: list({chunk.box: chunk for chunk in reversed(rows)}.values())
        for fqn, rows in manifest.chunks.items()
    }
    return replace(manifest, chunks=chunks)


def _aligned(
    left: Checkpoint, right: Checkpoint, says: Sequence[ReadOptions]
) -> tuple[Checkpoint, Checkpoint]:
    """If only one side knows the model, read the other side with the same config.

    A file without a config has raw names; its tied head must be found too.
    """
    for one, other, said in ((left, right, says[0]), (right, left, says[1])):
        if one.model is None and other.model is not None and one.format == "hf":
            config = _config_of(other)
            if config is not None:
                again = read_checkpoint(one.path, replace(said, config=config))
                return (again, right) if one is left else (left, again)
    return left, right


def _config_of(ckpt: Checkpoint) -> StoragePath | None:
    folder = ckpt.path if ckpt.path.is_dir() else ckpt.path.parent
    path = folder / "config.json"
    return path if path.is_file() else None


def _common(
    left: Checkpoint,
    right: Checkpoint,
    verdict: Verdict,
    tolerance: Tolerance,
    weights_only: bool,
) -> Iterable[str]:
    """Names that both sides have with the same shape; all others go into the verdict."""
    a, b = left.manifest.tensors, right.manifest.tensors
    absent = _missing_categories(left, right, verdict, weights_only)
    for fqn in [*a, *(f for f in b if f not in a)]:
        if category_of(fqn) in absent:
            continue
        if fqn not in a or fqn not in b:
            side = right.path if fqn not in b else left.path
            if is_padding(fqn):
                verdict.notes.append(f"{fqn}: padding rows of one side only, not compared")
            else:
                verdict.add("missing", fqn, f"{fqn}: missing in {side}")
            continue
        x, y = a[fqn], b[fqn]
        if x.shape != y.shape and not x.elastic:
            shapes = f"{list(x.shape)} in {left.path}, {list(y.shape)} in {right.path}"
            verdict.add("shape", fqn, f"{fqn}: shape {shapes}")
            continue
        if x.shape != y.shape:
            verdict.notes.append(
                f"{fqn}: {x.shape[0]} and {y.shape[0]} padding rows, the common ones compared"
            )
        if x.dtype != y.dtype and (tolerance.exact or not {x.dtype, y.dtype} <= set(CASTABLE)):
            verdict.add("dtype", fqn, f"{fqn}: dtype {x.dtype} and {y.dtype}")
            continue
        yield fqn


def _missing_categories(
    left: Checkpoint, right: Checkpoint, verdict: Verdict, weights_only: bool
) -> set[str]:
    """Kinds of optimizer state that one side lacks completely: one line for each."""
    sides = [{category_of(f) for f in c.manifest.tensors} - {""} for c in (left, right)]
    absent = sides[0] ^ sides[1]
    for name in sorted(absent) if not weights_only else ():
        has, lacks = (left, right) if name in sides[0] else (right, left)
        text = f"optimizer state {name}: only in {has.path}, not in {lacks.path}"
        text += _expected(_OPTIMIZER, lacks)
        verdict.add("optimizer", name, text)
    return absent if not weights_only else sides[0] | sides[1]


def _compare_function(left: Checkpoint, right: Checkpoint, verdict: Verdict) -> None:
    """Compare what the configs say about the computation; spelling does not count."""
    says = [_settings(side) for side in (left, right)]
    if says[0] is not None and says[1] is not None:
        for name, (one, other) in contradictions(says[0], says[1]).items():
            text = f"{_short(one)} in {left.path}, {_short(other)} in {right.path}"
            verdict.add("config", name, f"config: {name}: {text}")
        lone = sorted({*says[0]} ^ {*says[1]})
        if lone:
            verdict.notes.append(f"config keys of one side only, not compared: {', '.join(lone)}")


def _settings(ckpt: Checkpoint) -> Settings | None:
    """None if nothing describes the model."""
    if ckpt.model is not None:
        return settings(ckpt.model.config, ckpt.model)
    path = _config_of(ckpt)
    return settings(load_json(path, finite=False), None) if path is not None else None


def _compare_state(left: Checkpoint, right: Checkpoint, verdict: Verdict) -> None:
    ours, theirs = (TrainingState.of(c.manifest.state, str(c.path)) for c in (left, right))
    for name, one, other in ours.differences(theirs):
        text = f"state {name}: {_short(one)} and {_short(other)}"
        if ABSENT in (one, other) and "." not in name:
            has, lacks = (left, right) if other == ABSENT else (right, left)
            value = _short(one if other == ABSENT else other)
            text = f"state {name}: only in {has.path}: {value}{_expected(name, lacks)}"
        verdict.add("state", name, text)
    if None not in (left.frozen, right.frozen) and left.frozen != right.frozen:
        one, other = (sorted(c.frozen or ()) for c in (left, right))
        verdict.add("state", "frozen", f"state frozen: {_short(one)} and {_short(other)}")


def _compare_random_states(left: Checkpoint, right: Checkpoint, verdict: Verdict) -> None:
    """Random states of the ranks, byte for byte, unless the layouts differ."""
    sides = [{s.name: s.source for s in c.random_states} for c in (left, right)]
    names = sorted({*sides[0], *sides[1]})
    layouts = [(c.format, c.mesh, c.dp, c.sharded) for c in (left, right)]
    if names and layouts[0] != layouts[1]:
        verdict.notes.append(
            f"random states: {len(sides[0])} files in {left.path}, {len(sides[1])} in "
            f"{right.path}; not compared, the layouts differ"
        )
        return
    for name in names:
        if name not in sides[0] or name not in sides[1]:
            side = left.path if name in sides[0] else right.path
            verdict.add("state", name, f"state {name}: only in {side}")
        elif not _same_bytes(left.path.at(sides[0][name]), right.path.at(sides[1][name])):
            verdict.add("state", name, f"state {name}: {sides[0][name]} and {sides[1][name]}")


def _same_bytes(one: StoragePath, other: StoragePath) -> bool:
    return one.size() == other.size() and all(
        one_part == other_part
        for one_part, other_part in zip(one.parts(), other.parts(), strict=True)
    )


_OPTIMIZER = "optimizer"
# what a format has no place for: keys of a training state, and optimizer state
_NO_PLACE = {HF: (*KEYS, _OPTIMIZER), MEGATRON: ("data",), TORCH_DIST: ("data",)}


def _expected(name: str, lacks: Checkpoint) -> str:
    """What to add where the format of a side is the reason that it lacks something."""
    if name not in _NO_PLACE.get(lacks.format, ()):
        return ""
    return (
        f"; this was to be expected, the format {lacks.format} has no place for it "
        "(--weights-only compares the weights alone)"
    )


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _only(manifest: Manifest, names: set[str]) -> Manifest:
    tensors = {f: m for f, m in manifest.tensors.items() if f in names}
    return Manifest(tensors, {f: manifest.chunks.get(f, []) for f in tensors})


def _whole(manifest: Manifest) -> Manifest:
    """A target that takes each tensor as one piece, to check coverage and find replicas."""
    chunks = {
        fqn: [Chunk(fqn, full(m.shape), View("", 0, m.shape, row_major(m.shape), m.dtype))]
        for fqn, m in manifest.tensors.items()
    }
    tensors = {f: TensorMeta(m.shape, m.dtype) for f, m in manifest.tensors.items()}
    return Manifest(tensors, chunks)


def _compare(
    copies: list[Copy],
    shapes: Mapping[str, tuple[int, ...]],
    tolerance: Tolerance,
    options: RunOptions,
    verdict: Verdict,
) -> None:
    from .move.compare import compare
    from .move.executor import Budget, Mover, run_units, units

    lock = threading.Lock()
    found: dict[int, Finding] = {}

    def each(mover: Mover, index: int, unit: list[Copy]) -> None:
        mover.progress = progress.add
        difference = compare(mover, unit, tolerance)
        if difference is not None:
            with lock:
                found[index] = _finding(difference, math.prod(shapes[difference.fqn]))

    total = sum(copy.nbytes for copy in copies)
    with Progress(total, "verify", quiet=options.quiet) as progress:
        run_units(units(copies), Budget(options.threads, options.memory_budget), each)
    verdict.findings += [found[index] for index in sorted(found)]


def _finding(found: Difference, numel: int) -> Finding:
    return Finding(
        "values",
        found.fqn,
        found.describe(numel),
        found.elements,
        numel,
        found.max_abs,
        found.index,
        found.first,
        found.files,
    )


def _verify_one(ckpt: Checkpoint, weights_only: bool, options: RunOptions) -> Verdict:
    """Check coverage, replicas, and recorded sizes and digests."""
    verdict = Verdict(notes=list(ckpt.notes), alone=True)
    if ckpt.headers is not None:
        ckpt.headers()
    manifest = ckpt.manifest
    if not weights_only and ckpt.optimizer_fault():
        verdict.add("optimizer", "optimizer", ckpt.optimizer_fault())
        # its holes follow from the fault and would hide it
        manifest = _only(manifest, {f for f in manifest.tensors if category_of(f) == ""})
    faults, warnings = incomplete_states(ckpt)
    for fault in faults:
        verdict.add("optimizer", "optimizer", fault)
    verdict.notes += warnings
    made = resolve(plan(manifest, _whole(manifest)))
    verdict.tensors = len(manifest.tensors)
    verdict.nbytes = made.coverage.read_bytes
    if options.compare_replicas:
        shapes = {fqn: meta.shape for fqn, meta in ckpt.manifest.tensors.items()}
        _compare(made.replicas, shapes, Tolerance(), options, verdict)
        verdict.findings = [
            replace(f, text=f.text + ckpt.tied_to(f.name)) for f in verdict.findings
        ]
    _check_digests(ckpt, options, verdict)
    return verdict


def _check_digests(ckpt: Checkpoint, options: RunOptions, verdict: Verdict) -> None:
    """Compare recorded sizes and digests with the files."""
    recorded = {str(ckpt.path / name): row for name, row in sorted(ckpt.digests.items())}
    for path in _leading_out(ckpt, recorded):
        text = f"{path}: is {ckpt.path.at(path).real()}, outside of {ckpt.path}; not read"
        verdict.add("file", path, text)
        del recorded[path]
    faults = size_faults(ckpt, recorded)
    marks = recorded_digests(recorded, faults)
    crcs = recorded_crcs(ckpt, used_files(ckpt))
    faults += faults_of([*marks, *crcs], options.threads)
    for path, text in faults:
        verdict.add("file", path, text)
    if crcs:
        nbytes = sum(crc.length_bytes for crc in crcs)
        verdict.notes.append(f"CRC-32 of records: {len(crcs)} checked, {human(nbytes)}")
    verdict.notes.append(f"digests: {len(marks)} of {len(recorded)} files had one recorded")
    bare = [file.path for file in ckpt.files if file.path not in recorded]
    if recorded and bare:
        verdict.notes.append(f"not in the record of sizes and digests: {', '.join(bare)}")


def _leading_out(ckpt: Checkpoint, recorded: Iterable[str]) -> list[str]:
    """Recorded paths with links to folders that do not belong to the checkpoint.

    Anybody may have written the list, and printing the digest of a file tells about its content.
    """
    own = {file.path for file in ckpt.files}
    inside = {folder.real() for folder in (ckpt.path, *(ckpt.path.at(p).parent for p in own))}
    return [
        path
        for path in recorded
        if path not in own and not inside & set(ckpt.path.at(path).real().parents)
    ]
