"""Campaign ``calls``: every system call of small jobs fails once, in each of three ways.

A job then ends with CheckpointError (the trainer's with TrainError) or with the right bytes. No
output is torn, the source is untouched, no file stays open, and what stays behind is what
``--resume`` needs, or what the failing call itself kept from being removed: the next run ends with
the right bytes and leaves nothing.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import trainer_save
from bounded import Cost, measured
from failing_calls import CALLS, ROUNDS, watched
from fixtures_safety import content, names, tree
from torture_sources import broken_unless, write_sources

from shardwright.ckpt import RunOptions, jobs, merge, reshard

# The calls by which hidden files are removed: where one fails, what it was to remove stays.
REMOVING = ("unlink", "rmdir", "rename", "replace", "chmod", "lstat", "stat", "scandir", "open",
            "close", "fsync", "pread", "fstat", "listdir", "renameat2")  # fmt: skip


class Calls:
    """Jobs, the calls that each makes, and one of them to fail by each seed."""

    step = 20

    def __init__(self, home: Path) -> None:
        self.room = home / "work"
        self.older = home / "older"
        self.sources = write_sources(home / "sources")
        jobs.SYNC_SECONDS = -1.0  # every unit is journalled at once: no call hangs on the clock
        reshard(self.sources["hf"], self.older / "out", tp=1)
        self.jobs = self._jobs()
        self.wanted: list[object] = []
        self.plan: list[tuple[int, str, int]] = []  # job, call, number of the call
        for index, job in enumerate(self.jobs):
            self._start(index)
            job()  # once before, so that modules and caches are in place
            self.wanted.append(_seen(self.output(index)))
            self._start(index)
            with watched() as counts:
                job()
            self.plan += [(index, name, at) for name in CALLS for at in range(counts[name])]
        self.total = ROUNDS * len(self.plan)

    def _jobs(self) -> list[Callable[..., object]]:
        """In the order of their names; each writes ``out`` in the room."""
        src, out = self.sources, self.room / "out"

        def run(resume: bool = False, overwrite: bool = False) -> RunOptions:
            return RunOptions(workers=1, resume=resume, overwrite=overwrite)

        return [
            lambda **how: reshard(src["hf"], out, tp=2, pp=2, run=run(**how)),
            lambda **how: reshard(src["native"], out, tp=1, dp=2, safe_serialization=False,
                                  run=run(**{"resume": True, **how})),
            lambda **how: reshard(src["native-bin"], out, tp=2,
                                  run=run(**{"overwrite": True, **how})),
            lambda **how: reshard(src["classic"], out, to="torch_dist", run=run(**how)),
            lambda **how: reshard(src["torch_dist"], out, to="megatron", run=run(**how)),
            lambda **how: merge(src["native"], out, run=run(**how)),
            lambda **how: merge(src["classic-distributed"], self.room / "out.bin", run=run(**how)),
            lambda **how: trainer_save.save(self.room / "out", 2),
        ]  # fmt: skip

    OVERWRITES, RESUMES, FILE, SAVES = 2, 1, 6, 7  # places in the list

    def output(self, index: int) -> Path:
        """What a job writes."""
        return self.room / ("out.bin" if index == self.FILE else "out")

    def _start(self, index: int) -> None:
        """An empty room, or one with an output to replace."""
        shutil.rmtree(self.room, ignore_errors=True)
        self.room.mkdir(parents=True)
        if index == self.OVERWRITES:
            shutil.copytree(self.older / "out", self.room / "out")

    def run(self, seed: int) -> tuple[str, Cost]:
        index, name, at = self.plan[seed % len(self.plan)]
        number = CALLS[name][2][seed // len(self.plan)]
        job, output = self.jobs[index], self.output(index)
        self._start(index)
        old, before = _seen(output), tree(self.room.parent / "sources")
        opened, threads = _open_files(), threading.active_count()
        outcome = "done"
        with measured() as cost, watched(name, at, number) as counts:
            try:
                job()
            except trainer_save.ERRORS:
                outcome = "refused"
        if counts[name] <= at:
            outcome = "not reached"
        where = f"job {index}, {name} number {at}, {os.strerror(number)}"
        seen = _seen(output)
        allowed = [old, self.wanted[index]]
        if index == self.SAVES:  # a checkpoint is whole before ``latest`` names it
            allowed.append({k: v for k, v in allowed[1].items() if k != "latest"})
        broken_unless(seen in allowed, f"{where}: a torn output")
        broken_unless(outcome == "refused" or seen == self.wanted[index], f"{where}: not done")
        broken_unless(tree(self.room.parent / "sources") == before, f"{where}: source changed")
        broken_unless(_open_files() == opened, f"{where}: a file stays open")
        broken_unless(threading.active_count() == threads, f"{where}: a thread stays")
        left = [one for one in names(self.room) if one != output.name]
        may_leave = name in REMOVING or (index == self.RESUMES and outcome == "refused")
        broken_unless(not left or may_leave, f"{where}: left behind {left}")
        broken_unless(all(one.startswith(".") for one in left), f"{where}: left behind {left}")
        again = {} if index == self.SAVES else {"overwrite": seen is not None}
        job(**again)
        broken_unless(_seen(output) == self.wanted[index], f"{where}: the next run is wrong")
        broken_unless(names(self.room) == [output.name], f"{where}: stays {names(self.room)}")
        return f"{outcome}{' with leftovers' if left else ''}: {name}", cost


def _seen(path: Path) -> object:
    """The bytes there, those of hidden names left out; None where nothing is to be seen."""
    found = content(path)
    if isinstance(found, dict):
        found = {k: v for k, v in found.items() if not k.startswith(".")} or None
    return found


def _open_files() -> int:
    """How many files this process has open; 0 where the system does not say."""
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
