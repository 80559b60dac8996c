"""Checksums of files that are still being written: CRC-32s into their slots, and digests.

Both need the bytes in the file's order, but workers finish logical tensors in another order. Every
byte before the first unfinished tensor is final. So a worker that has finished a tensor continues
where the last one stopped, and all cores stay busy to the end.
A slot's value depends on bytes behind it, but it must be filled before it is hashed. So a digest
waits for the lowest slot that is still empty.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..model.design import Design, OutFile
from ..model.file_layout import Checksum
from .executor import in_threads
from .files import SCRATCH_BYTES, Files, Stopped, seal

if TYPE_CHECKING:
    import xxhash

    from ..model.planner import Copy

STEP_BYTES = 8 << 20  # a worker interrupts its moving only for this much or more


class ChecksumFollower:
    """Follows the files of a design while their units are moved, from any thread."""

    def __init__(self, design: Design, work: Sequence[Sequence[Copy]], *, checksum: bool) -> None:
        self._finished = bytearray(len(work))
        starts: dict[str, list[tuple[int, int]]] = {file.path: [] for file in design.files}
        self._trails = {f.path: _Trail(f, self._finished, checksum) for f in design.files}
        for index, unit in enumerate(work):
            for path, start in _first_bytes(unit).items():
                starts[path].append((start, index))
        for path, rows in starts.items():
            rows.sort()
            self._trails[path].starts.extend(start for start, _ in rows)
            self._trails[path].units.extend(index for _, index in rows)
        self.active = checksum or any(file.layout.checksums for file in design.files)

    def finish(self, index: int) -> None:
        """Note that all bytes of a unit are in their files."""
        self._finished[index] = 1

    def follow(self, unit: Sequence[Copy], files: Files, stop: threading.Event) -> None:
        """Continue with the final bytes of a unit's files, unless another worker does."""
        if self.active:
            for path in _first_bytes(unit):
                self._trails[path].advance(files, stop, least=STEP_BYTES)

    def follow_all(self, files: Files, stop: threading.Event) -> None:
        """The same for every file; for a worker that has nothing left to move."""
        for trail in self._trails.values() if self.active else ():
            trail.advance(files, stop)

    def close(self, workers: int) -> dict[str, tuple[int, str]]:
        """Do the rest, after all units are finished; each file's size and digest, or ``""``."""
        assert all(self._finished), "a unit was not moved"

        def loop(todo: Iterator[_Trail], stop: threading.Event) -> None:
            with Files() as files:
                for trail in todo:
                    trail.advance(files, stop)

        left = [trail for trail in self._trails.values() if not trail.done]
        in_threads(left, min(workers, len(left)), loop)
        assert all(trail.done for trail in self._trails.values())
        return {path: (trail.size, trail.digest) for path, trail in self._trails.items()}


def _first_bytes(unit: Sequence[Copy]) -> dict[str, int]:
    """File -> the first byte that a unit writes there."""
    found: dict[str, int] = {}
    for copy in unit:
        start, stop = copy.dst.extent()
        if start < stop:
            found[copy.dst.file] = min(start, found.get(copy.dst.file, start))
    return found


class _Trail:
    """How far one file is sealed and hashed."""

    def __init__(self, file: OutFile, finished: bytearray, checksum: bool) -> None:
        self.path = file.path
        self.size = file.layout.size_bytes
        self.starts = array("q")  # first byte of each unit in this file, rising
        self.units = array("q")  # the units' numbers in the same order
        self._finished = finished  # by unit
        self._lock = threading.Lock()
        self._first = 0  # position of the first unit that was unfinished at the last look
        self._ranges: list[Checksum] = sorted(
            file.layout.checksums, key=lambda c: c.offset_bytes + c.length_bytes
        )
        self._open = _lowest_slots(self._ranges, self.size)
        self._sealed = 0  # ranges whose slots are filled
        self._state = _xxh3() if checksum else None
        self._hashed = 0 if checksum else self.size  # bytes

    @property
    def done(self) -> bool:
        return self._sealed == len(self._ranges) and self._hashed == self.size

    @property
    def digest(self) -> str:
        """The xxh3-128 in hex; empty without --checksum."""
        return self._state.hexdigest() if self._state is not None else ""

    def advance(self, files: Files, stop: threading.Event, least: int = 1) -> None:
        """Seal and hash what is final, if it is ``least`` bytes or more."""
        if self.done or not self._lock.acquire(blocking=False):
            return
        try:
            final = self._final()
            if final - self._behind() < min(least, self.size - self._behind()):
                return
            scratch = memoryview(bytearray(SCRATCH_BYTES))
            while self._sealed < len(self._ranges):
                todo = self._ranges[self._sealed]
                if todo.offset_bytes + todo.length_bytes > final:
                    break
                _check(stop)
                self._hash(min(final, self._open[self._sealed]), files, stop, scratch)
                seal(self.path, todo, files, scratch, stop)
                self._sealed += 1
            self._hash(min(final, self._open[self._sealed]), files, stop, scratch)
        finally:
            self._lock.release()

    def _behind(self) -> int:
        """Offset of the next byte to seal or hash."""
        if self._sealed < len(self._ranges):
            return min(self._ranges[self._sealed].offset_bytes, self.size)
        return self._hashed

    def _final(self) -> int:
        """Bytes at the start of the file that no unit will write any more."""
        while self._first < len(self.units) and self._finished[self.units[self._first]]:
            self._first += 1
        return self.starts[self._first] if self._first < len(self.units) else self.size

    def _hash(self, limit: int, files: Files, stop: threading.Event, scratch: memoryview) -> None:
        while self._hashed < limit:
            assert self._state is not None
            _check(stop)
            part = scratch[: min(len(scratch), limit - self._hashed)]
            files.read_into(self.path, self._hashed, part)
            self._state.update(part)
            self._hashed += len(part)


def _check(stop: threading.Event) -> None:
    if stop.is_set():
        raise Stopped


def _lowest_slots(ranges: Sequence[Checksum], size: int) -> array[int]:
    """For each position, the lowest slot of the ranges from there on; ``size`` after them."""
    lowest = array("q", [size])
    for checksum in reversed(ranges):
        lowest.append(min(lowest[-1], *checksum.slots))
    lowest.reverse()
    return lowest


def _xxh3() -> xxhash.xxh3_128:
    import xxhash

    return xxhash.xxh3_128()
