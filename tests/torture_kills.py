"""Campaign ``kills``: runs that SIGKILL ends at a random moment, once or more often.

Afterwards the output is the old one, the new one whole, or absent; the next run ends with the same
bytes and leaves nothing hidden behind. A moment is a call that changes files, in the middle of it
where it has a middle (``Forge``): between two of them a kill finds the same files.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from bounded import Cost
from fixtures_safety import Forge, content, names, tree
from torture_sources import ONE, broken_unless, write_sources

from shardwright.ckpt import reshard

RESHARD, MERGE, SAVE = "reshard", "merge", "trainer_save"
KILLED = -9


@dataclass(frozen=True, slots=True)
class Job:
    """A command, its source, and the name of its output."""

    tool: str
    source: str
    words: tuple[object, ...] = ()
    output: str = "out"


JOBS = (
    Job(RESHARD, "hf", ("--tp", 2, "--pp", 2)),
    Job(RESHARD, "native", ("--tp", 1, "--pp", 2, "--dp", 2, "--no-safe-serialization",
                            "--checksum")),
    Job(RESHARD, "native", ("--to", "megatron", "--tp", 1, "--use-distributed-optimizer")),
    Job(RESHARD, "native", ("--to", "torch_dist", "--tp", 2)),
    Job(RESHARD, "classic", ("--to", "shards",)),
    Job(RESHARD, "torch_dist", ("--to", "megatron",)),
    Job(MERGE, "native"),
    Job(MERGE, "classic-distributed", ("--max-shard-size", "1KB", "--no-safe-serialization")),
    Job(MERGE, "native-bin", (), "out.safetensors"),
    Job(MERGE, "torch_dist", (), "out.bin"),
    Job(SAVE, "hf", ("--step", 2), "run"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Way:
    """How the runs of one seed are made."""

    job: int
    workers: int
    sync: bool  # every unit durable and journalled at once
    exchange: bool  # the system can swap two folders in one step
    older: bool  # an output of another layout stands there, and --overwrite is given


class Kills:
    """A process whose forks are killed, and the undisturbed outputs."""

    total = 1_000
    step = 10

    def __init__(self, home: Path) -> None:
        self.room = home / "work"  # sources and outputs, so that what a run leaves is seen
        self.room.mkdir(parents=True)
        self.sources = write_sources(home / "sources")
        self.forge = Forge()
        self._older(home / "older")
        self._wanted: dict[int, object] = {}
        self._moments: dict[Way, int] = {}

    def close(self) -> None:
        """End the process."""
        self.forge.__exit__()

    def _older(self, home: Path) -> None:
        """Outputs for each kind of output to replace."""
        reshard(self.sources["hf"], home / "out", tp=1, run=ONE)
        for name in ("out.safetensors", "out.bin"):
            (home / name).write_bytes(b"an older file")
        self._run(Way(len(JOBS) - 1, 1, False, True, False), JOBS[-1], home / "run", "--step", 1)
        self.older = home

    def run(self, seed: int) -> tuple[str, Cost]:
        self._clear()  # a seed that failed before left its files: they were to be kept
        rng = random.Random(seed)
        way = Way(
            seed % len(JOBS), rng.choice([1, 1, 2]), rng.random() < 0.5, rng.random() < 0.75,
            rng.random() < 0.5,
        )  # fmt: skip
        job = JOBS[way.job]
        output = self.room / job.output
        wanted = self._undisturbed(way)
        moments = self._moments[way]
        before = tree(self.sources[job.source])
        self._place_older(way, output)
        old, kills = content(output), 0
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            resume = ("--resume",) if job.tool != SAVE and rng.random() < 0.6 else ()
            ended = self._run(way, job, output, *resume, at=rng.randrange(moments))
            kills += ended["code"] == KILLED
            broken_unless(ended["code"] in (KILLED, 0, 1), ended["text"])
            self._check(job, way, output, old, wanted)
        self._finish(job, way, output, wanted)
        broken_unless(tree(self.sources[job.source]) == before, "the source was changed")
        return ("killed" if kills else "came through") + f": {job.tool}", Cost()

    def _run(self, way: Way, job: Job, output: Path, *more: object, at: int = -1) -> dict:
        words = () if job.tool == SAVE else ("--workers", way.workers)
        if way.older and job.tool != SAVE:
            words += ("--overwrite",)
        return self.forge.run(
            job.tool, self.sources[job.source], *job.words, *words, "--output", output, *more,
            at=at, sync=way.sync, exchange=way.exchange,
        )  # fmt: skip

    def _undisturbed(self, way: Way) -> object:
        """The bytes of the job's output; the moments of this way are counted on the way."""
        job = JOBS[way.job]
        if way not in self._moments:
            output = self.room / job.output
            self._place_older(way, output)
            ended = self._run(way, job, output)
            broken_unless(ended["code"] == 0, ended["text"])
            found = _seen(job, output)
            broken_unless(self._wanted.setdefault(way.job, found) == found, f"other bytes by {way}")
            self._moments[way] = ended["moments"]
            self._clear()
        return self._wanted[way.job]

    def _place_older(self, way: Way, output: Path) -> None:
        old = self.older / output.name
        if way.older:
            shutil.copytree(old, output) if old.is_dir() else shutil.copyfile(old, output)

    def _check(self, job: Job, way: Way, output: Path, old: object, wanted: object) -> None:
        """After a kill: old, new, or, where folders cannot be swapped, none for a moment."""
        if job.tool == SAVE:
            _check_run(output, old, wanted)
            return
        seen = content(output)
        absent = old is None or (not way.exchange and isinstance(old, dict))
        allowed = [old, wanted, *([None] if absent else [])]
        broken_unless(any(seen == one for one in allowed), f"a torn output: {_names(seen)}")

    def _finish(self, job: Job, way: Way, output: Path, wanted: object) -> None:
        """The next run ends with the right bytes, and only they are left."""
        resume = () if job.tool == SAVE else ("--resume",)
        ended = self._run(way, job, output, *resume)
        done = ended["code"] == 1 and "exists; pass --overwrite" in ended["text"]
        broken_unless(ended["code"] == 0 or (done and not way.older), ended["text"])
        seen = _seen(job, output)
        broken_unless(seen == wanted, f"other bytes after the last run: {_names(seen)}")
        broken_unless(names(self.room) == [output.name], f"left behind: {names(self.room)}")

    def _clear(self) -> None:
        shutil.rmtree(self.room)
        self.room.mkdir()


def _seen(job: Job, output: Path) -> object:
    """What a run made; of a training run, the checkpoint of its last step and the pointer."""
    if job.tool != SAVE:
        return content(output)
    broken_unless(all(not name.startswith(".") for name in names(output)), f"left {names(output)}")
    return {"latest": (output / "latest").read_text(), "2": content(output / "checkpoint-2")}


def _check_run(folder: Path, old: object, wanted: dict) -> None:
    """A folder of a training run after a kill: every checkpoint whole, the pointer at one."""
    new = content(folder / "checkpoint-2")
    broken_unless(new in (None, wanted["2"]), f"a torn checkpoint: {_names(new)}")
    for path, data in (old or {}).items():
        if path.startswith("checkpoint-1/"):
            broken_unless((folder / path).read_bytes() == data, f"{path}: changed")
    if (folder / "latest").exists():
        name = (folder / "latest").read_text().strip()
        broken_unless((folder / name / "checkpoint.json").exists(), f"latest names {name}")
    else:
        broken_unless(old is None, "latest is gone")


def _names(seen: object) -> object:
    return sorted(seen) if isinstance(seen, dict) else seen if seen is None else "a file"
