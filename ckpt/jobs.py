"""How every conversion runs: plan, create, move, compare replicas, seal, publish."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from .checkpoint.types import Checkpoint
from .errors import CheckpointError, raise_all
from .integrity import SourceCheck
from .model.design import Design, check_design
from .model.dtypes import TO_TORCH
from .model.manifest import SideFile, View
from .model.planner import Copy, Plan, Tolerance, chunk_count, plan, resolve
from .move.computed import real_ranges
from .move.kept import kept_fault, mode_of, side_bytes, write_side
from .move.progress import Progress, human
from .move.storage import storage_path
from .screen import Printer, one_screen

if TYPE_CHECKING:
    from .move.executor import Mover
    from .move.publish import OutputTransaction
    from .move.seal import ChecksumFollower

SYNC_SECONDS = 5.0  # a killed run loses at most this much work
CHUNK_BYTES = 2048  # memory that a chunk of a manifest may take
BASE_BYTES = 40 << 20  # the interpreter with NumPy


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a job runs; the same for every command."""

    dry_run: bool = False
    memory_budget: int = 32 << 20  # bytes, all workers together
    workers: int = 0  # threads; 0 means as many as there are cores, at most 4
    overwrite: bool = False
    resume: bool = False
    break_lock: bool = False  # take over the lock of a run that is dead
    compare_replicas: bool = True
    checksum: bool = False
    verify_source: bool = True  # check the source's recorded checksums before reading it
    quiet: bool = True

    @property
    def threads(self) -> int:
        """Worker threads: moving is bound by memory bandwidth, so more than 4 gain nothing."""
        if self.workers < 0:
            raise CheckpointError(f"--workers {self.workers}: must be at least 1")
        return self.workers or min(4, len(os.sched_getaffinity(0)) if _HAS_AFFINITY else 2)


_HAS_AFFINITY = hasattr(os, "sched_getaffinity")


@dataclass(slots=True)
class Report:
    """What a job did, or with ``dry_run`` would do; ``lines`` is the text for people."""

    output: Path
    plan: Plan
    files: list[tuple[str, int]]  # name, bytes
    seconds: float = 0.0
    peak_bytes: int = 0  # estimate: buffers, chunks and the interpreter
    dry_run: bool = False
    notes: list[str] = field(default_factory=list)
    sides: list[tuple[str, int]] = field(default_factory=list)  # name, bytes of each side file
    digests: dict[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """The coverage report, one fact a line."""
        c = self.plan.coverage
        verb = "would write" if self.dry_run else "wrote"
        out = [
            f"{verb} {self.output}: {_count(len(self.files), 'file')}, "
            f"{_count(c.tensors, 'tensor')}, "
            f"{human(sum(n for _, n in self.files))}"
        ]
        if self.sides:
            size = human(sum(n for _, n in self.sides))
            out.append(f"beside the weights: {_count(len(self.sides), 'file')}, {size}")
        if self.dry_run:
            out += [f"  {name}  {human(size)}" for name, size in (*self.files, *self.sides)]
            out.append(f"peak memory about {human(self.peak_bytes)}")
        out.append(f"read {human(c.read_bytes)}, written {human(c.written_bytes)}")
        if c.zero_bytes:
            out.append(f"padding rows filled with zeros: {human(c.zero_bytes)}")
        if c.tied:
            out.append(f"tied copies of the embedding: {c.tied}")
        if c.replicas:
            out.append(f"replicas: {_count(c.replicas, 'chunk')}, {self._replicas_said}")
        for reason, (tensors, nbytes) in c.dropped.items():
            out.append(f"dropped {_count(tensors, 'tensor')}, {human(nbytes)}: {reason}")
        out += [f"xxh3-128 {digest}  {name}" for name, digest in self.digests.items()]
        if not self.dry_run and self.seconds:
            out.append(f"{self.seconds:.2f} s, {human(int(c.written_bytes / self.seconds))}/s")
        return out + self.notes

    def __str__(self) -> str:
        """The report on one screen."""
        return one_screen(self.lines())

    def __repr__(self) -> str:
        verb = "would write" if self.dry_run else "wrote"
        size = human(sum(n for _, n in self.files))
        return f"<Report: {verb} {self.output}, {_count(len(self.files), 'file')}, {size}>"

    def _repr_pretty_(self, printer: Printer, cycle: bool) -> None:
        """What a notebook shows of the last value of a cell."""
        printer.text(str(self))

    @property
    def _replicas_said(self) -> str:
        if not self.plan.replicas:
            return "not compared (--replicas first)"
        return "to be compared" if self.dry_run else "compared, equal"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# (design, file name -> size and digest) -> the text files that are written last
SideWriter = Callable[[Design, Mapping[str, tuple[int, str]]], list[SideFile]]


@dataclass(frozen=True, slots=True)
class Job:
    """A conversion that is ready to be planned."""

    source: Checkpoint
    design: Callable[[Path], Design]  # gets the staging folder
    output: Path
    single: bool  # the output is one file, not a folder
    drop: Callable[[str], str | None]
    sides: SideWriter  # text files that need to know the written files' sizes and digests
    identity: Mapping[str, object]  # options that change bytes, for --resume
    notes: tuple[str, ...] = ()  # lines of the report


def run_job(job: Job, options: RunOptions) -> Report:
    """Run a job; nothing is visible at ``job.output`` before it is complete."""
    from .move.publish import (
        OutputTransaction,
        check_unchanged,
        fingerprint,
        snapshot,
        staging_folder,
    )

    started = time.monotonic()
    check_place(job.source, job.output)
    root = staging_folder(job.output)
    design = job.design(root)
    made = resolve(plan(job.source.manifest, design.manifest, job.drop))
    report = _report(job, options, design, made, root)
    # finds a value that a text file cannot hold now, not after everything else is written
    sizes = {_name(root, f.path): (f.layout.size_bytes, "") for f in design.files}
    sides = job.sides(design, sizes)
    check_design(design, root, sides)
    report.sides = [(side.name, side_bytes(side, job.source.path)) for side in sides]
    if options.dry_run:
        return report
    before = {**snapshot(_source_files(job.source)), **job.source.seen}
    mark = fingerprint(
        [job.identity, options.compare_replicas, sorted(before.items()), _plan_mark(design, made)]
    )
    with OutputTransaction(job.output, mark, single=job.single, overwrite=options.overwrite,
               resume=options.resume, break_lock=options.break_lock,
               mode=_mode(job.source)) as transaction:  # fmt: skip
        if not transaction.continued:
            _check_space(report, transaction.path)
            _create(design)
            transaction.begin()
        else:
            _check_kept(design, made)
            report.notes.append(f"continued: {len(transaction.done)} tensors were already there")
        sums = _move(job.source, made, design, options, transaction, report)
        names = {_name(root, path): row for path, row in sums.items()}
        for side in job.sides(design, names):
            write_side(transaction.path, side, job.source.path)
        check_unchanged(before)
        report.digests = {n: d for n, (_, d) in names.items() if d} if job.single else {}
        transaction.publish()
    report.seconds = time.monotonic() - started
    return report


def check_place(source: Checkpoint, output: Path) -> None:
    """Refuse an output inside its source, at its place or around it: it would change the source."""
    from .move.publish import staging_folder

    if output.name in ("", "..") or "\0" in str(output):
        raise CheckpointError(f"--output {str(output)!r}: must end in the name of a file or folder")
    path = source.path
    inner = storage_path(output.parent).real() / output.name
    if inner == path or (path.is_dir() and path in inner.parents):
        raise CheckpointError(
            f"--output {output}: lies inside the source {path}, which is never modified"
        )
    staging = storage_path(staging_folder(Path(inner)))  # emptied before it is used
    for file in [str(path), *_source_files(source)]:
        real = path.at(file).real()
        if any(place == real or place in real.parents for place in (inner, staging)):
            raise CheckpointError(
                f"--output {output}: {real} of the source lies there, which is never modified"
            )


def _name(root: Path, path: str) -> str:
    """The name of an output file in text files and reports, with its sub-folders."""
    return PurePath(path).relative_to(root).as_posix()


def _report(job: Job, options: RunOptions, design: Design, made: Plan, root: Path) -> Report:
    coverage = made.coverage
    for reason, nbytes in job.source.left_out:
        coverage.drop(reason, nbytes)
    coverage.tied = len(job.source.tied) + design.tied
    if not options.compare_replicas:
        made.replicas.clear()
    chunks = chunk_count(job.source.manifest, design.manifest)
    peak = BASE_BYTES + options.memory_budget + chunks * CHUNK_BYTES
    files = [(_name(root, f.path), f.layout.size_bytes) for f in design.files]
    report = Report(job.output, made, files, peak_bytes=peak, dry_run=options.dry_run)
    report.notes += [*job.source.notes, *design.notes, *job.notes]
    return report


def _source_files(source: Checkpoint) -> list[str]:
    sides = (*source.manifest.side_files, *source.random_states)
    return sorted({f.path for f in source.files} | {s.source for s in sides if s.source})


def _plan_mark(design: Design, made: Plan) -> str:
    """A hash of every byte that is known now, and of the origin of every other byte.

    Sizes are not enough: another packing of the same shapes has the same sizes.
    """
    import hashlib

    state = hashlib.sha256()
    for file in design.files:
        state.update(repr((file.path, file.layout.size_bytes)).encode())
        for offset, data in file.layout.fixed:
            state.update(offset.to_bytes(8, "little") + data)
    for copy in made.copies:
        for view in (copy.src, copy.dst):
            row = (view.file, view.offset_bytes, view.shape, view.strides, view.dtype)
            state.update(repr((copy.fqn, row)).encode())
    return state.hexdigest()


def _mode(source: Checkpoint) -> int:
    folder = source.path if source.path.is_dir() else source.path.parent
    return mode_of({*(file.path for file in source.files), *source.described_by}, folder)


def _check_space(report: Report, folder: Path) -> None:
    """Find a full disk before anything is written, if the system tells."""
    need = sum(size for _, size in (*report.files, *report.sides))
    free = storage_path(folder).free_bytes()
    if free is not None and need > free:
        raise CheckpointError(
            f"{folder.parent}: {human(need)} are needed, {human(free)} are free "
            f"({need} and {free} bytes)"
        )


def _check_kept(design: Design, made: Plan) -> None:
    """On resume, check the partial files: regular, of their sizes, with headers and zeros."""
    zeros: dict[str, list[View]] = {file.path: [] for file in design.files}
    for chunk in made.zeros:
        zeros[chunk.view.file].append(chunk.view)
    for file in design.files:
        fault = kept_fault(file, zeros[file.path])
        if fault:
            raise CheckpointError(f"{file.path}: {fault}; run again without --resume to start over")


def _create(design: Design) -> None:
    from .move.files import create

    for folder in sorted({storage_path(file.path).parent for file in design.files}):
        folder.make()
    for file in design.files:
        create(file.path, file.layout)


class _Journal:
    """Which units the workers have finished; they are journalled once their bytes are synced."""

    def __init__(self, transaction: OutputTransaction) -> None:
        self.transaction = transaction
        self.lock = threading.Lock()
        self.overflows: Counter[str] = Counter()  # finite values that a cast made infinite
        self._pending: dict[int, tuple[float, list[int]]] = {}  # by worker: since when, units

    def finished(self, mover: Mover, index: int) -> None:
        """Note a unit; every ``SYNC_SECONDS`` the worker's units are synced and journalled."""
        me = threading.get_ident()
        since, units = self._pending.setdefault(me, (time.monotonic(), []))
        units.append(index)
        if time.monotonic() - since > SYNC_SECONDS:
            mover.files.sync()
            with self.lock:
                self.transaction.record(units)
            self.count_overflows(mover)
            self._pending[me] = (time.monotonic(), [])

    def count_overflows(self, mover: Mover) -> None:
        """Add a worker's count to that of all."""
        with self.lock:
            self.overflows.update(mover.overflows)
        mover.overflows.clear()


class _Moving:
    """What the workers of a job do with each unit, and what they share: journal, checks, faults."""

    def __init__(
        self,
        source: Checkpoint,
        made: Plan,
        options: RunOptions,
        transaction: OutputTransaction,
        follower: ChecksumFollower,
        progress: Progress,
    ) -> None:
        from .move.compare import compare
        from .move.executor import units

        self.compare = compare
        self.source, self.transaction = source, transaction
        self.follower, self.progress = follower, progress
        self.journal = _Journal(transaction)
        self.repeats = {u[0].fqn: u for u in units(made.replicas)}
        paths = {copy.src.file for copy in (*made.copies, *made.replicas)}
        used = {file for path in paths for file, *_ in real_ranges(path, 0, 0)}
        self.check = SourceCheck(source, used) if options.verify_source else None
        self.faults: list[str] = []  # replicas that differ

    def each(self, mover: Mover, index: int, unit: list[Copy]) -> None:
        """Move a unit, unless it is there already, and compare its replicas."""
        again = self.repeats.get(unit[0].fqn, [])
        if self.check is not None:
            self.check.before((*unit, *again), mover.files, mover.stop)
            if self.check.faults:
                return
        if self._is_kept(mover, index, unit):
            self.progress.add(sum(copy.nbytes for copy in unit))
            self.follower.finish(index)
            return
        mover.progress = self.progress.add
        mover.move(unit)
        if again and self._differ(mover, again):
            return  # not journalled: --resume must compare it again
        self.follower.finish(index)
        self.follower.follow(unit, mover.files, mover.stop)
        self.journal.finished(mover, index)

    def _is_kept(self, mover: Mover, index: int, unit: list[Copy]) -> bool:
        """Whether --resume found the unit; read again: the staging folder may have changed."""
        if index not in self.transaction.done:
            return False
        return self.compare(mover, unit, Tolerance(cast=True)) is None

    def _differ(self, mover: Mover, replicas: list[Copy]) -> bool:
        mover.progress = lambda nbytes: None
        found = self.compare(mover, replicas, Tolerance())
        if found is not None:
            with self.journal.lock:
                tied = self.source.tied_to(replicas[0].fqn)
                self.faults.append(f"{found.describe()}{tied}")
        return found is not None

    def finish(self, mover: Mover) -> None:
        """The end of a worker."""
        if self.check is not None:
            self.check.rest(mover.files, mover.stop)
        self.follower.follow_all(mover.files, mover.stop)
        self.journal.count_overflows(mover)


def _move(
    source: Checkpoint,
    made: Plan,
    design: Design,
    options: RunOptions,
    transaction: OutputTransaction,
    report: Report,
) -> dict[str, tuple[int, str]]:
    """Move every unit that is not done yet, and compare its replicas while they are cached.

    Returns each file's size and, with --checksum, its digest: CRC-32s and digests are computed
    while the files grow. What a unit is read from is checked right before; after a fault in it the
    rest is checked, not moved.
    """
    from .move.executor import Budget, run_units, units
    from .move.seal import ChecksumFollower

    work = units(made.copies)
    follower = ChecksumFollower(design, work, checksum=options.checksum)
    total = made.coverage.written_bytes
    with Progress(total, report.output.name, quiet=options.quiet) as progress:
        moving = _Moving(source, made, options, transaction, follower, progress)
        lonely = moving.repeats.keys() - {unit[0].fqn for unit in work}
        assert not lonely, f"replicas of tensors that are not moved: {lonely}"
        budget = Budget(options.threads, options.memory_budget)
        run_units(work, budget, moving.each, finish=moving.finish)
    if moving.check is not None:
        moving.check.raise_faults()
    raise_all(moving.faults, "replicas differ", hint="to use the first copy: --replicas first")
    unchecked = "checksums of the source not checked (--no-verify-source)"
    report.notes.append(unchecked if moving.check is None else moving.check.line())
    report.notes += _overflow_notes(moving.journal.overflows, design)
    return follower.close(options.threads)


def _overflow_notes(overflows: Mapping[str, int], design: Design) -> list[str]:
    """A warning for each tensor with values outside the range of its new dtype."""
    return [
        f"warning: {fqn}: {count} finite values became infinite in "
        f"{TO_TORCH[design.manifest.tensors[fqn].dtype]}"
        for fqn, count in sorted(overflows.items())
    ]
