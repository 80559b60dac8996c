"""Real files with damage of any kind: success or our error, nothing else, and nothing half.

Where a damaged checkpoint is still read, the output must say what the damaged input says: by
our own comparison, and by the libraries of the formats where those read it too.
"""

import contextlib
import json
import os
import resource
import shutil
from pathlib import Path

import bounded
import damage
import independent
import pytest
from fixtures_safety import case, names, tree, write_hf, write_native, write_split
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwright.ckpt import CheckpointError, RunOptions, merge, open_checkpoint, reshard, verify
from shardwright.ckpt.inspect import describe, describe_tensor

pytestmark = pytest.mark.timeout(300)


def examples(count):
    """The same examples in every run, as many as the time allows."""
    return settings(
        max_examples=count, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


SMALL = {"layers": 2, "hidden": 6, "heads": (2, 2), "head_dim": 2, "ffn": 4, "vocab": 5}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Folder name -> an undamaged checkpoint of a few kilobytes."""
    root = tmp_path_factory.mktemp("sources")
    made = case(**SMALL)
    write_hf(root / "hf", **SMALL)
    write_hf(root / "hf-bin", binary=True, **SMALL)
    write_split(root / "split", parts=2, made=made)
    write_split(root / "split-bin", parts=2, made=made, binary=True)
    write_native(root / "native", 2, 1, made=made, multiple=2)
    write_native(root / "native-bin", 1, 2, made=made, multiple=2, safe=False)
    reshard(root / "native", root / "megatron", to="megatron", tp=2)
    reshard(root / "native", root / "torch_dist", to="torch_dist", tp=1)
    write_native(root / "sharded", 1, 1, made=made, multiple=2, dp=2, sharded=True)
    ranks = independent.stored(made.config, made.state, 2, 2, multiple=2)
    independent.write_foreign(root / "foreign", ranks, wrap=True)
    shutil.copy(root / "hf/config.json", root / "foreign/config.json")
    size = (root / "hf/model.safetensors").stat().st_size  # a false one is refused
    (root / "hf/checksums.json").write_text(
        json.dumps({"files": {"model.safetensors": {"size": size, "xxh3_128": ""}}})
    )
    return root


@pytest.fixture(scope="module", autouse=True)
def little_memory():
    """No claim of a damaged file makes us take gigabytes: that would be a MemoryError here."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    statm = Path("/proc/self/statm")
    if statm.exists():
        size = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


# --- damage -----------------------------------------------------------------------------------


@st.composite
def edits(draw):
    """Flip, set, insert, remove and cut, mostly where headers and directories are."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(damage.BYTE_KINDS))
        anchor = draw(st.sampled_from(damage.BYTE_ANCHORS))
        place = draw(st.integers(0, 1500) if anchor != "any" else st.integers(0, 1 << 20))
        found.append((kind, anchor, place, draw(st.binary(min_size=1, max_size=9))))
    return found


@st.composite
def json_edits(draw):
    """A walk to some value, and what happens to it."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(damage.JSON_KINDS))
        found.append((kind, draw(st.lists(st.integers(0, 99), min_size=1, max_size=4)),
                      draw(st.sampled_from(damage.ODD))))  # fmt: skip
    return found


# --- what must hold ---------------------------------------------------------------------------


def attempt(call):
    """The result, or None where it was refused; either costs what an input under 1 MiB may."""
    found = None
    with bounded.measured() as cost, contextlib.suppress(CheckpointError):
        found = call()
    assert not cost.complaint(), cost.complaint()
    return found


def by_library(folder):
    """The tensors of Hugging Face files as their libraries read them; None where they do not."""
    try:
        return independent.load_hf(folder)
    except Exception:
        return None


def check(folder):
    """Everything that can be done with a damaged checkpoint."""
    before, to = tree(folder), folder.parent / "to"
    assert sum(path.stat().st_size for path in files_of(folder)) < bounded.MiB
    to.mkdir()
    opened = attempt(lambda: open_checkpoint(folder))
    if opened is not None:
        json.dumps(describe(opened.checkpoint))
        for fqn in list(opened)[:3]:
            # torch_dist's headers of tensors are read when a tensor is
            attempt(lambda fqn=fqn: json.dumps(describe_tensor(opened.checkpoint, fqn)))
            attempt(opened[fqn].torch)
    attempt(lambda: verify(folder))
    jobs = {
        "shards": lambda out: reshard(folder, out, tp=1, pp=2, run=RunOptions(workers=1)),
        "hf": lambda out: merge(folder, out, run=RunOptions(workers=2)),
        "half.bin": lambda out: merge(folder, out, dtype="fp16"),
        **{to: lambda out, to=to: reshard(folder, out, to=to, tp=1) for to in MEGATRON},
    }
    made = {name for name, job in jobs.items() if attempt(lambda job=job, n=name: job(to / n))}
    assert set(names(to)) == made
    assert tree(folder) == before
    if "shards" in made:
        verdict = verify(folder, to / "shards")
        assert verdict.same, verdict.differences
    for name in made & set(MEGATRON):
        verdict = verify(folder, to / name, weights_only=True)
        assert not [f for f in verdict.findings if f.kind == "values"], verdict.differences
    if "hf" in made:
        verdict = verify(folder, to / "hf", weights_only=True)
        assert verdict.same, verdict.differences
        wanted = by_library(folder) if opened is not None and opened.format == "hf" else None
        if wanted is not None:
            independent.assert_same(independent.load_hf(to / "hf"), wanted)
    if opened is None:  # a merge does not read optimizer files
        assert "shards" not in made
        assert not made or independent.rank_files(folder, "optimizer")
    return made


def files_of(folder):
    """Every file, those of ranks too."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def damaged(sources, name, pick, change):
    """A copy of a source with one file changed, looked at from all sides."""
    room = sources.parent / "room"
    shutil.rmtree(room, ignore_errors=True)
    shutil.copytree(sources / name, room / name)
    files = files_of(room / name)
    change(files[pick % len(files)])
    return check(room / name)


SHARE = 10  # of each form and kind of damage; campaigns over ranges of seeds take the rest
MEGATRON = ("megatron", "torch_dist")
OURS = ["hf", "hf-bin", "split", "split-bin", "native", "native-bin", "sharded", "foreign"]
FORMS = [*OURS, *MEGATRON]


@pytest.mark.parametrize("name", FORMS)
def test_the_undamaged_sources_pass(name, sources):
    assert damaged(sources, name, 0, lambda path: None) == {"shards", "hf", "half.bin", *MEGATRON}


@pytest.mark.parametrize("name", FORMS)
def test_any_damage_of_bytes_is_read_right_or_refused(name, sources):
    @examples(SHARE)
    @given(st.integers(0, 20), edits())
    def run(pick, changes):
        damaged(sources, name, pick, lambda path: damage.damage_bytes(path, changes))

    run()


@pytest.mark.parametrize("name", OURS)
def test_any_damage_of_headers_and_tables_is_read_right_or_refused(name, sources):
    @examples(SHARE)
    @given(st.integers(0, 20), json_edits())
    def run(pick, changes):
        damaged(sources, name, pick, lambda path: damage.damage_table(path, changes))

    run()


@pytest.mark.parametrize("name", OURS)
def test_files_exchanged_emptied_or_missing_are_read_right_or_refused(name, sources):
    """Exhaustively: every pair of files swapped, every file removed, every file emptied."""
    count = len(files_of(sources / name))
    for a in range(count):
        damaged(sources, name, a, Path.unlink)
        damaged(sources, name, a, lambda path: os.truncate(path, 0))
        for b in range(a):

            def swap(path, other=b):
                second = files_of(sources.parent / "room" / name)[other]
                path.rename(path.parent / "aside")
                second.rename(path)
                (path.parent / "aside").rename(second)

            damaged(sources, name, a, swap)


@pytest.mark.parametrize("name", ["loop", "memory"])
def test_the_bounds_of_an_input_are_asserted(name):
    """What takes more is found, also where it is refused in the end."""

    def loop():
        while True:
            pass

    def memory():
        held = bytearray(bounded.MEMORY_BYTES + (32 << 20))
        raise CheckpointError(f"{len(held)}")

    if name == "memory":
        with pytest.raises(AssertionError, match=r"MiB are allowed"):
            attempt(memory)
        return
    with pytest.raises(bounded.TooLong), bounded.measured(stop_after_s=0.2):
        loop()
