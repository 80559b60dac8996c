"""Campaign ``whole``: mutated checkpoints through every command and every format of output.

What is written must be what the damaged source says: by our own comparison, and for Hugging Face
files by their libraries. Whatever is refused leaves nothing behind; the source stays as it was.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import damage
import independent
from bounded import Cost, measured
from fixtures_safety import names, tree
from torture_sources import ONE, broken_unless, replaced, write_sources

from shardwright.ckpt import CheckpointError, merge, open_checkpoint, reshard, verify
from shardwright.ckpt.inspect import describe, describe_tensor

FORMATS = ("shards", "megatron", "torch_dist", "hf")
HALF = "half.bin"


class Whole:
    """The sources, and what is done with one of them by a seed."""

    total = 5_000
    step = 25

    def __init__(self, home: Path) -> None:
        self.home = home
        self.sources = write_sources(home / "sources")

    @property
    def room(self) -> Path:
        """The folder of the input that was looked at last."""
        return self.home / "input"

    def run(self, seed: int) -> tuple[str, Cost]:
        """(outcome, the dearest step's cost)."""
        rng = random.Random(seed)
        name = list(self.sources)[seed % len(self.sources)]
        source = replaced(self.sources[name], self.room)
        harm(source, rng)
        made, cost = judge(source, self.home / "outputs", rng)
        outcome = "refused" if not made else "written" if len(made) == len(FORMATS) else "partly"
        return f"{name}: {outcome}", cost


def harm(source: Path, rng: random.Random) -> None:
    """Damage one file of a checkpoint, now and then two."""
    files = sorted(path for path in source.rglob("*") if path.is_file())
    for path in rng.sample(files, 1 if rng.random() < 0.85 else min(2, len(files))):
        kind = rng.random()
        if kind < 0.03:
            path.unlink()
        elif kind < 0.06:
            other = rng.choice(files)
            if other.exists():
                shutil.copyfile(other, path) if other != path else path.write_bytes(b"")
        elif kind < 0.5 and path.suffix in (".json", ".safetensors"):
            damage.damage_table(path, damage.random_json_edits(rng))
        elif kind < 0.75 and damage.is_archive(path.read_bytes()):
            data = damage.damage_archive(
                path.read_bytes(), lambda _, record: damage.damage_pickle(record, rng),
                rng.choice([0, 0, 0, rng.randint(0, 50)]),
            )  # fmt: skip
            path.write_bytes(data)
        elif kind < 0.75 and path.name == ".metadata":
            path.write_bytes(damage.damage_pickle(path.read_bytes(), rng))
        else:
            near = rng.choice([150, 1500, 20_000])
            damage.damage_bytes(path, damage.random_byte_edits(rng, rng.choice([1, 1, 3]), near))


def judge(source: Path, outputs: Path, rng: random.Random) -> tuple[set[str], Cost]:
    """The formats that were written, and the cost of the dearest command."""
    before, costs = tree(source), [Cost()]
    shutil.rmtree(outputs, ignore_errors=True)
    outputs.mkdir(parents=True)

    def attempt(call: Callable[[], object]) -> object | None:
        with measured() as cost:
            try:
                return call()
            except CheckpointError as error:
                broken_unless(bool(str(error)), "an error without a word")
                return None
            finally:
                costs.append(cost)

    opened = attempt(lambda: open_checkpoint(source))
    if opened is not None:
        attempt(lambda: json.dumps(describe(opened.checkpoint)))
        for fqn in rng.sample(list(opened), min(2, len(opened))):
            attempt(lambda fqn=fqn: json.dumps(describe_tensor(opened.checkpoint, fqn)))
            attempt(lambda fqn=fqn: opened[fqn][...])
    attempt(lambda: verify(source))
    reports = {
        to: attempt(lambda to=to: reshard(source, outputs / to, to=to, run=ONE)) for to in FORMATS
    }
    reports[HALF] = attempt(lambda: merge(source, outputs / HALF, dtype="fp16", run=ONE))
    made = {name for name, report in reports.items() if report is not None}
    broken_unless(set(names(outputs)) == made, f"left {names(outputs)}, wrote {sorted(made)}")
    for name in sorted(made - {HALF}):
        _compare(source, outputs / name, reports[name].notes)
    if "hf" in made and opened is not None and opened.format == "hf":
        _compare_with_libraries(source, outputs / "hf")
    broken_unless(tree(source) == before, "the source was changed")
    worst = Cost(max(c.cpu_s for c in costs), max(c.peak_bytes for c in costs))
    return made - {HALF}, worst


def _compare(source: Path, made: Path, notes: Sequence[str]) -> None:
    """Everything the same, but for training state that the report said was left out.

    Where the source says nothing, a format may need a value all the same.
    """
    verdict = verify(source, made, weights_only=made.name == "hf")
    said = " ".join(notes)
    unsaid = [
        finding.text
        for finding in verdict.findings
        if finding.kind != "state"
        or not (finding.name.partition(".")[0] in said or ': "absent" and ' in finding.text)
    ]
    broken_unless(not unsaid, f"--to {made.name}: {unsaid[:3]}")


def _compare_with_libraries(source: Path, made: Path) -> None:
    """The same tensors in Hugging Face files in and out, where the libraries read both."""
    try:
        wanted = independent.load_hf(source)
    except Exception:
        return
    independent.assert_same(independent.load_hf(made), wanted)
