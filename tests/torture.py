"""The long campaign: hostile files, hostile checkpoints, kills and failing system calls.

    python tests/torture.py --state FILE [--only reader,whole,kills,calls,folder] [--seeds A:B]
                            [--part K/N] [--workers N] [--minutes M] [--dir DIR]
    python tests/torture.py --report FILE... [--into docs/reliability.md]

A seed says everything about an input, so that ranges of seeds can be spread over processes and
machines. FILE gets a line of JSON for every range that is finished: a campaign goes on where the
file ends, and ``--report`` adds up the files of several. A promise that is broken is printed with
its seed and the command that repeats it, its input is kept, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shlex
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

READERS = [f"reader.{name}" for name in
           ("safetensors", "torch_zip", "torch_legacy", "dcp", "json")]  # fmt: skip
CAMPAIGNS = [*READERS, "whole", "kills", "calls", "folder.kills", "folder.calls"]
WHAT = {
    "reader.safetensors": "mutated safetensors files through the reader",
    "reader.torch_zip": "mutated torch zip files through the reader",
    "reader.torch_legacy": "mutated legacy torch files through the reader",
    "reader.dcp": "mutated `.metadata` and `.distcp` files through the reader",
    "reader.json": "mutated JSON files, configs and indexes through the reader",
    "whole": "mutated checkpoints through every `--to`, `inspect-ckpt`, `verify-ckpt`",
    "kills": "kills of reshard, merge and the trainer's save",
    "calls": "system calls that fail once",
    "folder.kills": "kills of a save into a folder of other files",
    "folder.calls": "system calls of such a save that fail once",
}
MARKS = ("<!-- counts -->", "<!-- end of counts -->")
STOP_EARLY_S = 20  # before --minutes are over: so long may a range still take


@dataclass(slots=True)
class Range:
    """Seeds ``[start, stop)`` of a campaign, and what came of them."""

    campaign: str
    start: int
    stop: int
    counts: dict[str, int] = field(default_factory=dict)  # by outcome
    failures: list[dict[str, object]] = field(default_factory=list)  # seed, error
    cpu_s: float = 0.0
    worst_s: float = 0.0  # CPU time of the dearest input
    worst_mib: float = 0.0  # and memory


# --- one process ------------------------------------------------------------------------------


class Runner:
    """Campaigns that are set up in one process, each once."""

    def __init__(self, home: Path, kept: Path) -> None:
        self.home, self.kept, self.made = home, kept, {}

    def campaign(self, name: str):
        """The campaign of a name; the imports belong to the process that runs it."""
        if name not in self.made:
            home = self.home / name
            head, _, container = name.partition(".")
            if head == "reader":
                from torture_reader import Reader

                self.made[name] = Reader(container, home)
            elif head == "whole":
                from torture_whole import Whole

                self.made[name] = Whole(home)
            elif head == "kills":
                from torture_kills import Kills

                self.made[name] = Kills(home)
            elif head == "folder":
                from torture_folder import FolderCalls, FolderKills

                self.made[name] = (FolderKills if container == "kills" else FolderCalls)(home)
            else:
                from torture_calls import Calls

                self.made[name] = Calls(home)
        return self.made[name]

    def run(self, todo: Range) -> Range:
        """Every seed of a range."""
        campaign = self.campaign(todo.campaign)
        counts, started = Counter(), time.process_time()
        for seed in range(todo.start, todo.stop):
            (self.home / "seed").write_text(str(seed))
            self._one(campaign, seed, todo, counts)
        todo.counts = dict(counts)
        todo.cpu_s = round(time.process_time() - started, 2)
        return todo

    def _one(self, campaign, seed: int, done: Range, counts: Counter[str]) -> None:
        from bounded import TooLong

        try:
            outcome, cost = campaign.run(seed)
        except (Exception, TooLong) as error:
            outcome, text = "broken", "".join(traceback.format_exception(error, limit=-6))
        else:
            text = cost.complaint()
            done.worst_s = round(max(done.worst_s, cost.cpu_s), 3)
            done.worst_mib = round(max(done.worst_mib, cost.peak_bytes / (1 << 20)), 1)
        counts[outcome if not text else "broken"] += 1
        if text:
            input_at = self.kept / f"{done.campaign}-{seed}"
            with contextlib.suppress(OSError):
                shutil.rmtree(input_at, ignore_errors=True)
                shutil.copytree(campaign.room, input_at, symlinks=True)
            done.failures.append({"seed": seed, "error": text})

    def close(self) -> None:
        for made in self.made.values():
            if hasattr(made, "close"):
                made.close()


def serve(home: Path, kept: Path, pipe: Connection) -> None:
    """A worker: ranges come in, finished ones go out, None ends it."""
    from bounded import limit_address_space

    runner = Runner(home, kept)
    limited = False
    while (todo := pipe.recv()) is not None:
        runner.campaign(todo.campaign)
        if not limited:
            limit_address_space()
            limited = True
        pipe.send(runner.run(todo))
    runner.close()


# --- many -------------------------------------------------------------------------------------


class Workers:
    """Processes that take ranges; one that dies is replaced, and its seed is a failure."""

    def __init__(self, count: int, home: Path, kept: Path) -> None:
        self.context = multiprocessing.get_context("spawn")
        self.home, self.kept, self.made = home, kept, 0
        self.busy: dict[Connection, tuple[multiprocessing.Process, Path, Range | None]] = {}
        for _ in range(count):
            self._start()

    def _start(self) -> None:
        home = self.home / f"worker-{self.made}"
        home.mkdir(parents=True)
        self.made += 1
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=serve, args=(home, self.kept, theirs), daemon=False)
        process.start()
        theirs.close()
        self.busy[ours] = (process, home, None)

    def run(self, todo: Iterator[Range]) -> Iterator[Range]:
        """The ranges, finished, in any order."""
        again: list[Range] = []
        for pipe in list(self.busy):
            self._give(pipe, again, todo)
        while any(task is not None for _, _, task in self.busy.values()):
            for pipe in wait([p for p, (_, _, task) in self.busy.items() if task is not None]):
                process, home, task = self.busy[pipe]
                try:
                    done = pipe.recv()
                except EOFError:
                    process.join()
                    del self.busy[pipe]
                    yield self._lost(process, home, task, again)
                    self._start()
                    pipe = next(reversed(self.busy))
                else:
                    yield done
                self._give(pipe, again, todo)

    def _give(self, pipe: Connection, again: list[Range], todo: Iterator[Range]) -> None:
        process, home, _ = self.busy[pipe]
        task = again.pop() if again else next(todo, None)
        self.busy[pipe] = (process, home, task)
        if task is not None:
            pipe.send(task)

    def _lost(self, process, home: Path, task: Range, again: list[Range]) -> Range:
        """The seed at which a process died; what it had done of its range is done again."""
        with contextlib.suppress(OSError, ValueError):
            seed = int((home / "seed").read_text())
            if task.start <= seed < task.stop:
                rest = ((task.start, seed), (seed + 1, task.stop))
                again += [Range(task.campaign, a, b) for a, b in rest if a < b]
                task = Range(task.campaign, seed, seed + 1)
        shutil.copytree(home, self.kept / f"{task.campaign}-{task.start}", dirs_exist_ok=True)
        task.counts = {"broken": task.stop - task.start}
        error = f"the process died (exit code {process.exitcode})"
        task.failures = [{"seed": task.start, "error": error}]
        return task

    def close(self) -> None:
        """End the processes."""
        for pipe, (process, _, task) in self.busy.items():
            if task is None:
                with contextlib.suppress(OSError):
                    pipe.send(None)
            else:
                process.terminate()
        for process, _, _ in self.busy.values():
            process.join()


def pending(
    totals: dict[str, tuple[int, int]],
    seeds: tuple[int, int | None],
    part: tuple[int, int],
    done: Sequence[Range],
) -> list[Range]:
    """What is to be run: of every campaign the seeds of this part that no range has yet."""
    found = []
    for name, (total, step) in totals.items():
        start, stop = seeds[0], seeds[1] if seeds[1] is not None else total
        # There are no more calls; of the others there are as many inputs as one likes.
        if name in ("calls", "folder.calls"):
            stop = min(stop, total)
        size = max(0, stop - start)
        low, high = (start + size * k // part[1] for k in (part[0] - 1, part[0]))
        have = sorted((r.start, r.stop) for r in done if r.campaign == name)
        for gap_start, gap_stop in _gaps(low, high, have):
            found += [
                Range(name, at, min(at + step, gap_stop)) for at in range(gap_start, gap_stop, step)
            ]
    return found


def _gaps(low: int, high: int, have: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for start, stop in have:
        if start > low:
            yield low, min(start, high)
        low = max(low, stop)
        if low >= high:
            return
    if low < high:
        yield low, high


# --- reports ----------------------------------------------------------------------------------


def read_state(paths: Iterable[Path]) -> list[Range]:
    """The ranges of state files, each range once; half a last line is left out."""
    found: dict[tuple[str, int, int], Range] = {}
    for path in paths:
        for line in path.read_text().split("\n")[:-1]:
            made = Range(**json.loads(line))
            found[made.campaign, made.start, made.stop] = made
    return list(found.values())


def report(ranges: Sequence[Range]) -> str:
    """Markdown: a row for each campaign, and one for each outcome of the whole checkpoints."""
    lines = ["| campaign | inputs | outcomes | broken promises | dearest input | CPU time |",
             "|---|---:|---|---:|---|---:|"]  # fmt: skip
    for name in CAMPAIGNS:
        mine = [r for r in ranges if r.campaign == name]
        if not mine:
            continue
        counts = Counter()
        for made in mine:
            counts.update(made.counts)
        broken = counts.pop("broken", 0)
        dearest = f"{max(r.worst_s for r in mine):.2f} s, {max(r.worst_mib for r in mine):.0f} MiB"
        if name in ("kills", "folder.kills"):
            dearest = ""
        cells = (WHAT[name], f"{broken + counts.total():,}", _outcomes(counts), f"{broken:,}",
                 dearest, f"{sum(r.cpu_s for r in mine):,.0f} s")  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _outcomes(counts: Counter[str]) -> str:
    """Outcomes added up over what follows or precedes their colon."""
    words = ("read", "refused", "written", "partly", "killed", "came through", "done",
             "not reached", "refused with leftovers", "done with leftovers",
             "not reached with leftovers")  # fmt: skip
    total = Counter()
    for outcome, number in counts.items():
        sides = [side.strip() for side in outcome.split(":")]
        total[next((side for side in sides if side in words), outcome)] += number
    return ", ".join(f"{word} {total[word]:,}" for word in sorted(total, key=words.index))


def insert(text: str, into: Path) -> None:
    """Put a report between the marks of a page."""
    page = into.read_text()
    head, _, rest = page.partition(MARKS[0])
    _, mark, tail = rest.partition(MARKS[1])
    if not mark:
        raise SystemExit(f"{into}: has no {MARKS[0]} ... {MARKS[1]}")
    into.write_text(f"{head}{MARKS[0]}\n\n{text}\n{MARKS[1]}{tail}")


# --- the command ------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 where a promise was broken."""
    args = _parser().parse_args(argv)
    if args.report:
        ranges = read_state(args.report)
        text = report(ranges)
        print(text, end="")
        if args.into is not None:
            insert(text, args.into)
        return int(any(r.failures for r in ranges))
    chosen = [c for c in CAMPAIGNS if any(c == o or c.startswith(o + ".") for o in args.only)]
    if not chosen:
        raise SystemExit(f"--only: choose of {', '.join(['reader', 'folder', *CAMPAIGNS])}")
    home = Path(tempfile.mkdtemp(prefix="torture-", dir=args.dir))
    kept = (args.kept or Path.cwd() / "build" / "torture").absolute()
    kept.mkdir(parents=True, exist_ok=True)
    try:
        return _campaign(args, chosen, home, kept)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _campaign(args: argparse.Namespace, chosen: list[str], home: Path, kept: Path) -> int:
    started, done = time.monotonic(), []
    if args.state is not None and args.state.exists():
        done = read_state([args.state])
    todo = pending(_totals(chosen, home), args.seeds, args.part, done)
    print(f"{sum(r.stop - r.start for r in todo):,} inputs in {len(todo)} ranges", flush=True)
    limit = args.minutes * 60 - STOP_EARLY_S if args.minutes else float("inf")
    queue = _until(iter(todo), started + limit)
    failed, finished, told = 0, [], started
    workers = Workers(min(args.workers, len(todo)), home, kept)
    try:
        for made in workers.run(queue):
            finished.append(made)
            if args.state is not None:
                with args.state.open("a") as file:
                    file.write(json.dumps(asdict(made)) + "\n")
            for failure in made.failures:
                failed += 1
                _tell(made.campaign, failure, kept)
            if time.monotonic() - told > 30:
                told = time.monotonic()
                print(f"{len(finished)} of {len(todo)} ranges, {failed} broken", flush=True)
    finally:
        workers.close()
    print(report(finished if args.state is None else read_state([args.state])), end="")
    left = len(todo) - len(finished)
    if left:
        print(f"{left} ranges are left; run the same command again to go on")
    return int(failed > 0 or any(r.failures for r in done))


def _until(todo: Iterator[Range], stop: float) -> Iterator[Range]:
    for task in todo:
        if time.monotonic() >= stop:
            return
        yield task


def _totals(chosen: list[str], home: Path) -> dict[str, tuple[int, int]]:
    """(inputs, inputs of a range) of each campaign; how many calls can fail is counted."""
    found = {}
    for name in chosen:
        if name == "calls":
            from torture_calls import Calls

            found[name] = (Calls(home / "counted").total, Calls.step)
        elif name == "kills":
            from torture_kills import Kills

            found[name] = (Kills.total, Kills.step)
        elif name == "folder.kills":
            from torture_folder import FolderKills

            found[name] = (FolderKills.total, FolderKills.step)
        elif name == "folder.calls":
            from torture_folder import FolderCalls

            found[name] = (FolderCalls(home / "counted-folder").total, FolderCalls.step)
        elif name == "whole":
            from torture_whole import Whole

            found[name] = (Whole.total, Whole.step)
        else:
            from torture_reader import Reader

            found[name] = (Reader.total, Reader.step)
    return found


def _tell(campaign: str, failure: dict[str, object], kept: Path) -> None:
    seed = failure["seed"]
    words = [sys.executable, sys.argv[0], "--only", campaign, "--seeds", f"{seed}:{int(seed) + 1}"]
    print(f"BROKEN {campaign}, seed {seed}:\n{failure['error']}")
    print(f"  input: {kept / f'{campaign}-{seed}'}\n  again: {shlex.join(words)}", flush=True)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    memory = Path("/dev/shm")
    made.add_argument("--only", type=lambda text: text.split(","), default=CAMPAIGNS,
                      help=f"campaigns: reader, folder, {', '.join(CAMPAIGNS)}")  # fmt: skip
    made.add_argument("--seeds", type=_seeds, default=(0, None), metavar="A:B",
                      help="of each campaign; default: all")  # fmt: skip
    made.add_argument("--part", type=_part, default=(1, 1), metavar="K/N",
                      help="the K-th of N equal parts of the seeds")  # fmt: skip
    made.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    made.add_argument("--minutes", type=float, help="take no new range after so long")
    made.add_argument("--state", type=Path, help="file of finished ranges, to go on later")
    made.add_argument("--dir", type=Path, default=memory if os.access(memory, os.W_OK) else None,
                      help="folder for scratch files")  # fmt: skip
    made.add_argument("--kept", type=Path, help="folder for inputs that broke a promise")
    made.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="add up state files")
    made.add_argument("--into", type=Path, help="page to put the report into")
    return made


def _seeds(text: str) -> tuple[int, int | None]:
    start, _, stop = text.partition(":")
    return int(start or 0), int(stop) if stop else None


def _part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not 1 <= int(number) <= int(count):
        raise argparse.ArgumentTypeError(f"{text}: not one of so many parts")
    return int(number), int(count)


if __name__ == "__main__":
    # For this process and its workers: no GPU, whose driver maps more than a worker may have, and
    # one thread each.
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    sys.exit(main())
