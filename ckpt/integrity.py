"""Compares every checksum that a checkpoint records with its bytes.

Two kinds: xxh3-128 digests of whole files, which checkpoint.json or checksums.json list, and the
CRC-32 that torch's zip archives record of each tensor's bytes. Parts without tensors (headers,
pickles, directories) are checked whenever they are read. Memory: a buffer of 1 MiB for each thread.

A conversion checks what a tensor lies in right before it moves the tensor: the second reading finds
the bytes in the system's cache, so a source larger than memory is read from its disk once.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .checkpoint.types import Checkpoint
from .errors import raise_all
from .model.file_layout import RecordedChecksum, RecordedDigest
from .move.computed import real_ranges
from .move.progress import human

if TYPE_CHECKING:
    from .model.planner import Copy
    from .move.files import Files

Fault = tuple[str, str]  # the file, and a line that names it
Recorded = RecordedDigest | RecordedChecksum


def used_files(ckpt: Checkpoint) -> list[str]:
    """The files that hold the checkpoint's tensors, without those that were left out."""
    chunks = itertools.chain.from_iterable(ckpt.manifest.chunks.values())
    return sorted({chunk.place.file for chunk in chunks})


class SourceCheck:
    """The checksums of the files that a job reads, each compared once, from any thread."""

    def __init__(self, ckpt: Checkpoint, files: Collection[str]) -> None:
        """Look up what is recorded, and compare the files' sizes; no tensor byte is read."""
        recorded = {str(ckpt.path / name): row for name, row in ckpt.digests.items()}
        own = {path: recorded[path] for path in sorted(files) if path in recorded}
        self.faults = size_faults(ckpt, own)
        marks = recorded_digests(own, self.faults)
        marked = {path for path, (_, mark) in own.items() if mark}
        crcs = recorded_crcs(ckpt, [path for path in sorted(files) if path not in marked])
        covered = marked | {crc.file for crc in crcs}
        self.digests, self.crcs = len(marks), len(crcs)
        self.bare = tuple(path for path in sorted(files) if path not in covered)
        self._items: list[Recorded] = sorted(
            (*marks, *crcs), key=lambda item: (item.file, item.offset_bytes)
        )
        self.nbytes = sum(item.length_bytes for item in self._items)
        self._taken = bytearray(len(self._items))
        self._places: dict[str, _Places] = {}  # by file
        for number, item in enumerate(self._items):
            self._places.setdefault(item.file, _Places(number)).starts.append(item.offset_bytes)
        self._lock = threading.Lock()

    def before(self, copies: Iterable[Copy], files: Files, stop: threading.Event) -> None:
        """Check what the sources of copies lie in, except what another worker has taken."""
        numbers: set[int] = set()
        for copy in copies:
            for file, start, stop_bytes in real_ranges(copy.src.file, *copy.src.extent()):
                if file in self._places:
                    numbers.update(self._places[file].touched(start, stop_bytes))
        self._check(sorted(numbers), files, stop)

    def rest(self, files: Files, stop: threading.Event) -> None:
        """Check everything that no worker has taken; for one that has nothing left to move."""
        self._check(range(len(self._items)), files, stop)

    def _check(self, numbers: Iterable[int], files: Files, stop: threading.Event) -> None:
        for number in numbers:
            with self._lock:
                if self._taken[number]:
                    continue
                self._taken[number] = 1
            fault = _fault(self._items[number], files, stop)
            if fault is not None:
                self.faults.append(fault)

    def raise_faults(self) -> None:
        """CheckpointError with every fault."""
        raise_all(
            (text for _, text in sorted(self.faults)),
            "the source is damaged (--no-verify-source reads it as it is)",
        )

    def line(self) -> str:
        """For reports."""
        what = [f"xxh3-128 of files: {self.digests}"] if self.digests else []
        what += [f"CRC-32 of records: {self.crcs}"] if self.crcs else []
        more = f"; files that record none: {len(self.bare)}" if self.bare else ""
        if not what:
            return f"checksums of the source: none recorded{more}"
        return f"checksums of the source, all right: {', '.join(what)}, {human(self.nbytes)}{more}"


@dataclass(slots=True)
class _Places:
    """Where the checked ranges of one file begin; they do not overlap."""

    first: int  # number of the first range
    starts: list[int] = field(default_factory=list)  # bytes, rising

    def touched(self, start: int, stop: int) -> Iterable[int]:
        """Numbers of the ranges that a range of bytes touches, and maybe the one before it."""
        low = max(0, bisect_right(self.starts, start) - 1)
        high = bisect_left(self.starts, stop)
        return range(self.first + low, self.first + high)


def check_used(ckpt: Checkpoint, files: Collection[str]) -> SourceCheck:
    """Check the files that are loaded: sizes, and each file's digest or else its CRC-32s."""
    from .move.files import Files

    check = SourceCheck(ckpt, files)
    with Files() as opened:
        check.rest(opened, threading.Event())
    return check


def size_faults(ckpt: Checkpoint, recorded: Mapping[str, tuple[int, str]]) -> list[Fault]:
    """Files that are missing or have another size than recorded."""
    faults = []
    for path, (size, _) in recorded.items():
        there = ckpt.path.at(path)
        now = f"{there.size()} bytes" if there.is_file() else "no file is there"
        if now != f"{size} bytes":
            faults.append((path, f"{path}: {now}, {size} bytes are recorded"))
    return faults


def recorded_digests(
    recorded: Mapping[str, tuple[int, str]], faults: Iterable[Fault]
) -> list[RecordedDigest]:
    """The digests of files that have the recorded size."""
    wrong = {path for path, _ in faults}
    return [
        RecordedDigest(path, size, mark)
        for path, (size, mark) in recorded.items()
        if mark and path not in wrong
    ]


def recorded_crcs(ckpt: Checkpoint, files: Iterable[str]) -> list[RecordedChecksum]:
    """The CRC-32s that files record of their tensors' bytes."""
    wanted = set(files)
    found = [crc for crc in ckpt.checksums() if crc.file in wanted]
    rest = wanted - {file.path for file in ckpt.files} - {crc.file for crc in found}
    for path in sorted(rest):  # an optimizer's file beside a rank's
        if path.endswith((".bin", ".pt", ".pth")):
            from .containers import torch_zip

            found += torch_zip.checksums(ckpt.path.at(path))
    return found


def faults_of(items: Iterable[Recorded], threads: int) -> list[Fault]:
    """Files and ranges of files with another checksum than recorded."""
    from .move.executor import in_threads
    from .move.files import Files

    faults: list[Fault] = []

    def loop(todo: Iterator[Recorded], stop: threading.Event) -> None:
        with Files() as files:
            for item in todo:
                fault = _fault(item, files, stop)
                if fault is not None:
                    faults.append(fault)

    in_threads(list(items), threads, loop)
    return sorted(faults)


def _fault(item: Recorded, files: Files, stop: threading.Event) -> Fault | None:
    """What is wrong with bytes that have a checksum."""
    from .move.files import SCRATCH_BYTES, range_crc32, range_xxh3

    scratch = memoryview(bytearray(min(SCRATCH_BYTES, max(1, item.length_bytes))))
    place = (item.file, item.offset_bytes, item.length_bytes)
    if isinstance(item, RecordedDigest):
        now = range_xxh3(*place, files, scratch, stop)
        text = f"xxh3-128 {now}, {item.xxh3_128} is recorded"
        return None if now == item.xxh3_128 else (item.file, f"{item.file}: {text}")
    crc = range_crc32(*place, files, scratch, stop)
    if crc == item.crc32:
        return None
    at, stop_bytes = item.offset_bytes, item.offset_bytes + item.length_bytes
    text = f"CRC-32 {crc:08x}, {item.crc32:08x} is recorded"
    return item.file, f"{item.file}: bytes {at} to {stop_bytes}: {text}"
