"""Compares every checksum that a checkpoint records with its bytes.

Two kinds: xxh3-128 digests of whole files, which checkpoint.json or checksums.json list, and the
CRC-32 that torch's zip archives record of each tensor's bytes. Parts without tensors (headers,
pickles, directories) are checked whenever they are read. Memory: a buffer of 1 MiB for each thread.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from .checkpoint.types import Checkpoint
from .containers import torch_zip
from .errors import raise_all
from .model.dtypes import HALF
from .model.file_layout import RecordedChecksum
from .model.manifest import STATES, category_of, is_padding
from .move.progress import human

Fault = tuple[str, str]  # the file, and a line that names it


@dataclass(frozen=True, slots=True)
class Checked:
    """What was compared with what is recorded."""

    faults: tuple[Fault, ...]
    digests: int  # files with one
    crcs: int  # ranges with one
    nbytes: int  # read for the check
    bare: tuple[str, ...]  # files that record nothing

    def line(self) -> str:
        """For reports."""
        what = [f"xxh3-128 of files: {self.digests}"] if self.digests else []
        what += [f"CRC-32 of records: {self.crcs}"] if self.crcs else []
        more = f"; files that record none: {len(self.bare)}" if self.bare else ""
        if not what:
            return f"checksums of the source: none recorded{more}"
        return f"checksums of the source, all right: {', '.join(what)}, {human(self.nbytes)}{more}"


def used_files(ckpt: Checkpoint) -> list[str]:
    """The files that hold the checkpoint's tensors, without those that were left out."""
    chunks = itertools.chain.from_iterable(ckpt.manifest.chunks.values())
    return sorted({chunk.place.file for chunk in chunks})


def check_used(ckpt: Checkpoint, files: Collection[str], threads: int) -> Checked:
    """Check the files that a job reads: sizes, and each file's digest or else its CRC-32s."""
    recorded = {str(ckpt.path / name): row for name, row in ckpt.digests.items()}
    own = {path: recorded[path] for path in sorted(files) if path in recorded}
    marks = {path: mark for path, (_, mark) in own.items() if mark}
    faults = size_faults(ckpt, own)
    crcs = recorded_crcs(ckpt, [path for path in sorted(files) if path not in marks])
    found = digests(sorted(marks), threads)
    faults += [
        (path, f"{path}: xxh3-128 {mark}, {marks[path]} is recorded")
        for path, mark in sorted(found.items())
        if mark != marks[path]
    ]
    faults += crc_faults(crcs, threads)
    nbytes = sum(own[path][0] for path in marks) + sum(crc.length_bytes for crc in crcs)
    covered = {*marks, *(crc.file for crc in crcs)}
    bare = tuple(path for path in sorted(files) if path not in covered)
    return Checked(tuple(faults), len(marks), len(crcs), nbytes, bare)


def check_source(ckpt: Checkpoint, files: Collection[str], threads: int) -> str:
    """`check_used` for jobs: a line for the report, or CheckpointError with every fault."""
    checked = check_used(ckpt, files, threads)
    raise_all(
        (text for _, text in checked.faults),
        "the source is damaged (--no-verify-source reads it as it is)",
    )
    return checked.line()


def size_faults(ckpt: Checkpoint, recorded: Mapping[str, tuple[int, str]]) -> list[Fault]:
    """Files that are missing or have another size than recorded."""
    faults = []
    for path, (size, _) in recorded.items():
        there = ckpt.path.at(path)
        now = f"{there.size()} bytes" if there.is_file() else "no file is there"
        if now != f"{size} bytes":
            faults.append((path, f"{path}: {now}, {size} bytes are recorded"))
    return faults


def recorded_crcs(ckpt: Checkpoint, files: Iterable[str]) -> list[RecordedChecksum]:
    """The CRC-32s that files record of their tensors' bytes."""
    wanted = set(files)
    found = [crc for crc in ckpt.checksums() if crc.file in wanted]
    rest = wanted - {file.path for file in ckpt.files} - {crc.file for crc in found}
    for path in sorted(rest):  # an optimizer's file beside a rank's
        if path.endswith((".bin", ".pt", ".pth")):
            found += torch_zip.checksums(ckpt.path.at(path))
    return found


def crc_faults(crcs: Iterable[RecordedChecksum], threads: int) -> list[Fault]:
    """Ranges of files with another CRC-32 than recorded."""
    from .move.executor import in_threads
    from .move.files import SCRATCH_BYTES, Files, crc32

    faults: list[tuple[str, int, str]] = []

    def loop(todo: Iterator[RecordedChecksum], stop: threading.Event) -> None:
        scratch = memoryview(bytearray(SCRATCH_BYTES))
        with Files() as files:
            for crc in todo:
                at, length = crc.offset_bytes, crc.length_bytes
                now = crc32(crc.file, at, length, files, scratch)
                if now != crc.crc32:
                    text = f"CRC-32 {now:08x}, {crc.crc32:08x} is recorded"
                    faults.append(
                        (crc.file, at, f"{crc.file}: bytes {at} to {at + length}: {text}")
                    )

    in_threads(list(crcs), threads, loop)
    return [(file, text) for file, _, text in sorted(faults)]


def digests(paths: Iterable[str], threads: int) -> dict[str, str]:
    """The xxh3-128 of each file."""
    from .move.executor import in_threads
    from .move.files import Files, digest

    found: dict[str, str] = {}

    def loop(todo: Iterator[str], stop: threading.Event) -> None:
        with Files() as files:
            for path in todo:
                found[path] = digest(path, files)

    in_threads(list(paths), threads, loop)
    return found


_PAIR = ("exp_avg", "exp_avg_sq")  # Adam's moments: it keeps both for a tensor, or none


def incomplete_states(ckpt: Checkpoint) -> tuple[list[str], list[str]]:
    """(faults, warnings) of optimizer state that some weights have and others lack.

    A weight with only one of Adam's two moments is a fault. So is a half-precision one with moments
    and no master, if others have a master. Other states may exist for some weights only (Muon has
    momentum for matrices). A weight without any was frozen, or its state was lost: a warning if
    files do not record which weights the run trained.
    """
    names = [f for f in ckpt.manifest.tensors if not is_padding(f)]
    held = {s: {f[len(s) + 1 :] for f in names if category_of(f) == s} for s in STATES}
    weights = [f for f in names if category_of(f) == ""]
    moments = set().union(*(have for state, have in held.items() if state != "master"))
    faults = []
    for state, other in (_PAIR, _PAIR[::-1]):
        lost = [f for f in weights if f in held[other] and f not in held[state]]
        if held[state] and lost:
            faults.append(
                f"{ckpt.path}: {state}: lacks {len(lost)} of the {len(held[other])} tensors that "
                f"have {other}, first {lost[0]}"
            )
    half = [f for f in weights if ckpt.manifest.tensors[f].dtype in HALF]
    lost = [f for f in half if f in moments and f not in held["master"]]
    if held["master"] and lost:
        faults.append(
            f"{ckpt.path}: master: lacks {len(lost)} of the {len(half)} half-precision weights, "
            f"first {lost[0]}"
        )
    stated, trained = (moments, weights) if moments else (held["master"], half)
    bare = [f for f in trained if f not in stated and f not in (ckpt.frozen or ())]
    if not bare or not stated:
        return faults, []
    text = f"{len(bare)} of {len(trained)} weights have no optimizer state, first {bare[0]}"
    if ckpt.frozen is not None:
        return [*faults, f"{ckpt.path}: {text}: it was lost"], []
    return faults, [f"warning: {text}: they were frozen, or it was lost"]
