"""A run that is killed, interrupted, repeated or doubled: an output is whole, or there is none.

Runs are forks of a process that has the product loaded (``Forge``); a moment is a call that
changes files, so killing at every moment of a small job visits every state that a run leaves.
"""

import json
import os
import shutil
import time

import independent
import pytest
from fixtures_safety import (
    LONG_S,
    case,
    content,
    edit_json,
    names,
    tree,
    untouched,
    write_hf,
    write_native,
    write_split,
)

from shardwright.ckpt import CheckpointError, RunOptions, jobs, merge, reshard
from shardwright.ckpt.move import storage
from shardwright.ckpt.move.staging import JOURNAL
from shardwright.tools import merge_ckpt
from shardwright.tools import reshard as reshard_tool

TO_SHARDS = ("reshard", "hf", "--tp", 2, "--pp", 2)
TO_BIN = ("reshard", "native", "--tp", 4, "--pp", 1, "--dp", 2, "--no-safe-serialization",
          "--checksum")  # fmt: skip
TO_FOLDER = ("merge", "native")
TO_PARTS = ("merge", "native", "--max-shard-size", "4KB", "--no-safe-serialization")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with the sources ``hf`` and ``native``; jobs name them and ``out`` from here."""
    write_hf(tmp_path / "hf", sides=True)
    write_native(tmp_path / "native", random_states=2)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def spread(count, moments):
    """``count`` moments of a run that has ``moments``, first and last included."""
    count = min(count, moments)
    return sorted({round(i * (moments - 1) / max(1, count - 1)) for i in range(count)})


def reached(gate):
    """Wait until a run pauses."""
    stop = time.monotonic() + LONG_S
    while not gate.exists():
        assert time.monotonic() < stop, "the run ended before its moment"
        time.sleep(0.002)


class Job:
    """A job, its undisturbed output, and the number of its moments."""

    def __init__(self, forge, home, argv, output="out", **how):
        self.forge, self.home, self.how = forge, home, how
        self.tool, source, *self.rest = argv
        self.source = home / source
        self.output = home / output
        whole = self.run()
        assert whole["code"] == 0, whole["text"]
        self.moments = whole["moments"]
        self.wanted = content(self.output)
        self.clear()
        self.around = names(home)

    def run(self, *more, at=-1, **how):
        return self.forge.run(
            self.tool, self.source, *self.rest, "--output", self.output, *more, at=at,
            **{**self.how, **how},
        )  # fmt: skip

    def clear(self):
        if self.output.is_dir():
            shutil.rmtree(self.output)
        else:
            self.output.unlink(missing_ok=True)

    @property
    def staging(self):
        return self.output.parent / f".{self.output.name}.partial"


def write_drift(folder):
    """Native shards of two ranks that do not agree about a norm."""
    made = case()
    ranks = independent.stored(made.config, made.state, 2, 1, multiple=4)
    ranks[1, 0] = {k: x.clone() for k, x in ranks[1, 0].items()}
    ranks[1, 0]["decoder.layers.2.input_layernorm.weight"][3] = -1
    independent.write_native(folder, made.config, ranks, multiple=4)


# --- SIGKILL ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "output", "sync", "workers", "kills"),
    [
        (TO_SHARDS, "out", False, 1, 50),
        (TO_BIN, "out", True, 2, 50),
        (TO_FOLDER, "out", True, 1, 20),
        (TO_PARTS, "out", False, 2, 20),
        (TO_FOLDER, "out.safetensors", True, 1, 20),
        (TO_FOLDER, "out.bin", True, 2, 20),
    ],
    ids=["shards", "bin", "folder", "parts", "file", "bin-file"],
)
def test_killed_at_any_moment_there_is_no_output_or_all_of_it_and_resume_finishes_it(
    argv, output, sync, workers, kills, forge, home
):
    """kind I: torn saves."""
    job = Job(forge, home, (*argv, "--workers", workers), output, sync=sync)
    assert job.moments >= kills
    continued = 0
    with untouched(job.source):
        for at in spread(kills, job.moments):
            assert job.run(at=at)["code"] == -9
            seen = content(job.output)
            assert seen in (None, job.wanted)
            again = job.run("--resume")
            if seen is None:
                assert again["code"] == 0, again["text"]
                continued += "continued: " in again["text"]
            else:
                assert again["code"] == 1
                assert "exists; pass --overwrite" in again["text"]
            assert content(job.output) == job.wanted
            assert names(home) == sorted([*job.around, output])
            job.clear()
    assert continued >= kills * (0.6 if sync else 0.2)


def test_a_run_killed_again_and_again_ends_with_the_same_bytes(forge, home):
    job = Job(forge, home, TO_BIN, sync=True)
    for step in (14, 23):
        kills = 0
        for at in range(step, 10_000, step):
            ended = job.run("--resume", at=at)
            if ended["code"] == 0:
                break
            assert ended["code"] == -9
            kills += 1
            if content(job.output) is not None:  # after the rename, while the lock is given back
                break
        assert kills > 4
        assert content(job.output) == job.wanted
        job.clear()


def test_what_was_durable_before_the_kill_is_not_done_again(forge, home):
    job = Job(forge, home, TO_SHARDS, sync=True)
    job.run("--workers", 1, at=job.moments * 3 // 4)
    done = len((job.staging / JOURNAL).read_text().splitlines()) - 1
    again = job.run("--workers", 1, "--resume")
    assert f"continued: {done} tensors were already there" in again["text"]
    assert again["moments"] < job.moments * 3 // 4
    assert content(job.output) == job.wanted


def test_a_run_without_resume_starts_over_what_a_killed_one_left(forge, home):
    job = Job(forge, home, TO_SHARDS, sync=True)
    for at in spread(8, job.moments - 4):
        job.run(at=at)
        again = job.run()
        assert again["code"] == 0
        assert "continued" not in again["text"]
        assert content(job.output) == job.wanted
        assert names(home) == sorted([*job.around, "out"])
        job.clear()


def test_killed_while_it_removes_an_older_stage_a_run_is_started_over_by_resume(forge, home):
    """The journal goes last, and must not speak of files that are gone."""
    job = Job(forge, home, TO_SHARDS, sync=True)
    torn = 0
    for at in range(job.moments):
        stop_half_way(job)
        whole = set(names(job.staging))
        assert job.run(at=at)["code"] == -9
        left = set(names(job.staging))
        torn += left != whole
        again = job.run("--resume")
        assert again["code"] == 0, again["text"]
        assert content(job.output) == job.wanted
        assert names(home) == sorted([*job.around, "out"])
        job.clear()
        if left == {JOURNAL}:
            break
    assert torn == 4  # with 3, 2, 1 and none of its files left


def test_killed_while_it_cleans_up_after_an_error_a_run_is_started_over_by_resume(forge, home):
    write_drift(home / "drift")
    words = ("reshard", "drift", "--tp", 2, "--pp", 2, "--workers", 1, "--output", "out")
    whole = forge.run(*words, sync=True)
    assert "replicas differ" in whole["text"]
    torn = 0
    for at in range(whole["moments"] - 12, whole["moments"]):
        assert forge.run(*words, sync=True, at=at)["code"] == -9
        staging = home / ".out.partial"
        torn += staging.exists() and 0 < len(names(staging)) < 5
        again = forge.run(*words, "--resume", sync=True)
        assert "replicas differ" in again["text"]
        shutil.rmtree(staging, ignore_errors=True)
    assert torn > 2


def test_a_run_leaves_the_stages_of_other_outputs_alone(forge, home):
    job = Job(forge, home, TO_SHARDS, sync=True)
    job.run(at=job.moments // 2)
    with untouched(job.staging):
        reshard("hf", "other", tp=1)
        reshard("hf", "out2", tp=1)


def test_resume_with_nothing_to_resume_just_runs(forge, home):
    job = Job(forge, home, TO_SHARDS)
    assert job.run("--resume")["code"] == 0
    assert content(job.output) == job.wanted
    assert names(home) == sorted([*job.around, "out"])


def test_killed_before_the_end_an_overwritten_folder_is_the_old_one_whole(forge, home):
    reshard("native", "old", tp=1, pp=1)
    old = content(home / "old")
    job = Job(forge, home, (*TO_SHARDS, "--overwrite"), sync=True)
    ends = []
    for at in sorted({*spread(20, job.moments), *range(job.moments - 8, job.moments + 16)}):
        shutil.copytree("old", "out")
        ended = job.run(at=at)
        assert ended["code"] in (-9, 0)
        ends.append(content(job.output) == job.wanted)
        assert content(job.output) in (old, job.wanted)
        assert job.run("--resume")["code"] == 0
        assert content(job.output) == job.wanted
        assert names(home) == sorted([*job.around, "out"])
        job.clear()
    assert ends == sorted(ends)  # the old one up to a moment, the new one from then on
    assert {True, False} == set(ends)


@pytest.mark.parametrize("name", ["out.safetensors", "out.bin"])
def test_killed_before_the_end_an_overwritten_file_is_the_old_one_whole(name, forge, home):
    job = Job(forge, home, (*TO_FOLDER, "--overwrite"), name, sync=True)
    for at in spread(20, job.moments):
        job.output.write_bytes(b"old")
        assert job.run(at=at)["code"] == -9
        assert content(job.output) in (b"old", job.wanted)
        assert job.run("--resume")["code"] == 0
        assert content(job.output) == job.wanted
        assert names(home) == sorted([*job.around, name])
        job.clear()


def test_without_a_call_that_swaps_folders_a_kill_never_costs_the_old_output(forge, home):
    """Between two renames there is no output; the old one then lies beside, and comes back."""
    reshard("native", "old", tp=1, pp=1)
    old = content(home / "old")
    job = Job(forge, home, (*TO_SHARDS, "--overwrite"), exchange=False)
    absent = 0
    for at in range(job.moments - 8, job.moments + 40):
        shutil.copytree("old", "out")
        if job.run(at=at)["code"] == 0:
            break
        seen = content(job.output)
        assert seen in (None, old, job.wanted)
        if seen is None:
            absent += 1
            refused = forge.run("reshard", "hf", "--tp", 1, "--output", "out", exchange=False)
            assert "exists; pass --overwrite" in refused["text"]
            assert content(job.output) == old
        assert job.run()["code"] == 0
        assert content(job.output) == job.wanted
        assert names(home) == sorted([*job.around, "out"])
        job.clear()
    assert absent


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs the names of open files")
@pytest.mark.parametrize(
    ("argv", "output"), [(TO_SHARDS, "out"), (TO_BIN, "out"), (TO_FOLDER, "out.bin")]
)
def test_nothing_is_journalled_or_published_before_it_is_durable(argv, output, home, monkeypatch):
    """A power cut loses what was not synced: neither journal nor output may be ahead of that."""
    late, marks = {}, []  # inode -> what was written there and not synced

    def wrote(fd):
        late[os.fstat(fd).st_ino] = os.readlink(f"/proc/self/fd/{fd}")

    def after(module, name, note):
        call = getattr(module, name)

        def noted(*args):
            result = call(*args)
            note(*args)
            return result

        monkeypatch.setattr(module, name, noted)

    def journalled(fd, data):
        # a lock's record is void after a power cut
        lines = [path for path in late.values() if not path.endswith((JOURNAL, ".lock"))]
        assert not lines, f"journalled before these were synced: {lines}"
        marks.append("journal")
        wrote(fd)

    def published(source, target):
        mine = (f"{source}/{JOURNAL}", str(home / f".{output}.partial.lock"))
        left = [path for path in late.values() if not path.startswith(mine)]
        assert not left, f"published before these were synced: {left}"
        marks.append("rename")
        late[os.stat(home).st_ino] = str(home)

    def side(root, made, source):
        for path in (root / made.name, (root / made.name).parent):
            late[path.stat().st_ino] = str(path)

    after(storage, "PWRITE", lambda fd, data, at: wrote(fd))
    after(storage, "KERNEL_COPY", lambda reader, writer, *_: wrote(writer))
    after(os, "ftruncate", lambda fd, size: wrote(fd))
    after(os, "write", journalled)
    after(os, "fsync", lambda fd: late.pop(os.fstat(fd).st_ino, None))
    after(os, "rename", published)
    after(os, "replace", published)
    after(jobs, "write_side", side)
    monkeypatch.setattr(jobs, "SYNC_SECONDS", -1.0)
    tool, source, *words = argv
    main = {"reshard": reshard_tool, "merge": merge_ckpt}[tool].main
    words = [str(word) for word in words]
    assert main([source, *words, "--workers", "1", "--output", output, "--quiet"]) == 0
    assert marks.count("journal") > 10
    assert marks[-1] == "rename"
    assert [path for path in late.values() if not path.endswith(".lock")] == []


# --- what --resume refuses --------------------------------------------------------------------


def stop_half_way(job, *more):
    ended = job.run(*more, at=job.moments // 2)
    assert ended["code"] == -9
    assert (job.staging / JOURNAL).read_text().count("\n") > 3


@pytest.mark.parametrize(
    "other",
    [
        ("--dtype", "bf16"),
        ("--pp-layers", "3,1"),
        ("--weights-only",),
        ("--no-safe-serialization",),
        ("--make-vocab-size-divisible-by", 8),
        ("--replicas", "first"),
    ],
)
def test_resume_with_other_options_is_refused_and_the_stage_is_kept(other, forge, home):
    job = Job(forge, home, ("reshard", "native", "--tp", 2, "--pp", 2), sync=True)
    stop_half_way(job)
    with untouched(job.staging, job.source):
        ended = job.run(*other, "--resume")
    assert ended["code"] == 1
    assert ended["text"].startswith("error: ")
    assert "run again without --resume to start over" in ended["text"]
    assert content(job.output) is None


@pytest.mark.parametrize(
    "change", ["time", "bytes", "inode", "config", "side file", "new side file"]
)
def test_resume_after_the_source_changed_is_refused(change, forge, home):
    job = Job(forge, home, TO_SHARDS, sync=True)
    stop_half_way(job)
    if change == "time":
        os.utime("hf/model.safetensors", ns=(1, 1))
    elif change == "bytes":
        with open("hf/model.safetensors", "r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x01")
    elif change == "inode":  # another file with the same size and times
        shutil.copy2("hf/model.safetensors", "copy")
        os.replace("copy", "hf/model.safetensors")
    elif change == "config":
        edit_json(home / "hf/config.json", rope_theta=5)
    elif change == "side file":
        (home / "hf/tokenizer.json").write_text("{}")
    else:
        (home / "hf/new.txt").write_text("")
    ended = job.run("--resume")
    assert ended["code"] == 1
    assert "a source that has changed" in ended["text"]
    assert content(job.output) is None
    assert job.run()["code"] == 0


def test_resume_is_refused_when_only_the_packing_changed(forge, home):
    """Shapes and file sizes stay the same; rows would be taken from other places."""
    job = Job(forge, home, TO_FOLDER, sync=True)
    stop_half_way(job)
    edit_json(home / "native/checkpoint.json", layout={"qkv": "flat"})
    ended = job.run("--resume")
    assert ended["code"] == 1
    assert "another plan" in ended["text"]


def test_resume_is_refused_when_an_outside_config_cuts_heads_elsewhere(forge, home):
    write_hf(home / "config", layers=4)
    (home / "native/config.json").unlink()
    job = Job(forge, home, ("merge", "native", "--config", "config"), sync=True)
    stop_half_way(job)
    edit_json(home / "config/config.json", num_attention_heads=8, num_key_value_heads=4, head_dim=3)
    ended = job.run("--resume")
    assert ended["code"] == 1
    assert "another plan" in ended["text"]


def test_replicas_that_differ_are_not_forgotten_by_a_second_resume(forge, home):
    """kind D: the unit that was refused once must be refused again."""
    write_drift(home / "drift")
    for _ in range(3):
        ended = forge.run("merge", "drift", "--output", "out", "--resume", sync=True)
        assert ended["code"] == 1
        assert "model.layers.2.input_layernorm.weight" in ended["text"]
        assert not (home / "out").exists()


# --- a staging folder that somebody touched ---------------------------------------------------


def test_a_journal_line_cut_by_a_kill_does_not_join_the_next(forge, home):
    job = Job(forge, home, TO_SHARDS, sync=True)
    for at in spread(60, job.moments):
        job.run("--workers", 1, at=at)
        journal = job.staging / JOURNAL
        if not journal.exists() or not journal.read_text():
            continue
        lines = journal.read_text().splitlines()
        if len(lines) < 3:
            continue
        journal.write_text("\n".join([*lines[:-1], "1"]))  # of "1?\n"
        job.run("--workers", 1, "--resume", at=12)
        assert [len(line) for line in journal.read_text().splitlines()[1:]] <= [2] * 60
        kept = journal.read_text().splitlines()[1:]
        assert len(kept) == len(set(kept))
        assert job.run("--resume")["code"] == 0
        assert content(job.output) == job.wanted
        job.clear()
        return
    pytest.fail("no kill left a journal")


@pytest.mark.parametrize("damage", ["garbage", "zeros", "a file gone", "a file cut"])
def test_a_damaged_stage_is_not_continued(damage, forge, home):
    job = Job(forge, home, TO_SHARDS, sync=True)
    stop_half_way(job)
    journal = job.staging / JOURNAL
    if damage == "garbage":
        journal.write_bytes(journal.read_bytes() + b"x\n\xff\n")
    elif damage == "zeros":
        journal.write_bytes(journal.read_bytes() + b"\0" * 8 + b"\n")
    elif damage == "a file gone":
        (job.staging / "model_tp_1_pp_1.safetensors").unlink()
    else:
        os.truncate(job.staging / "model_tp_0_pp_0.safetensors", 100)
    ended = job.run("--resume")
    if ended["code"] == 0:
        assert content(job.output) == job.wanted
    else:
        assert ended["text"].startswith("error: ")
        assert "without --resume" in ended["text"]
        assert content(job.output) is None
        assert job.run()["code"] == 0
        assert content(job.output) == job.wanted


@pytest.mark.parametrize("more", [{}, {"resume": True}, {"overwrite": True}])
@pytest.mark.parametrize("output", ["out", "out.safetensors"])
def test_a_folder_of_the_users_in_the_place_of_the_stage_is_not_emptied(output, more, home):
    mine = home / f".{output}.partial"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    with untouched(home), pytest.raises(CheckpointError, match=r"in the way.*thesis\.tex"):
        merge("hf", output, run=RunOptions(**more))
    (mine / "thesis.tex").unlink()
    merge("hf", output)  # an empty one is anybody's


def test_a_link_in_the_place_of_the_stage_is_refused(home):
    (home / "precious").mkdir()
    (home / "precious/file").write_text("keep")
    (home / ".out.partial").symlink_to("precious")
    with untouched(home), pytest.raises(CheckpointError, match=r"\.out\.partial"):
        reshard("hf", "out", tp=2)


@pytest.mark.parametrize("argv", [TO_SHARDS, TO_FOLDER], ids=["shards", "hf"])
def test_an_unfinished_output_is_no_source(argv, forge, home):
    """kind I: no success marker, no load."""
    job = Job(forge, home, argv, sync=True)
    stop_half_way(job)
    shutil.copy("hf/config.json", job.staging)
    with untouched(job.staging):
        for path in (job.staging, *job.staging.glob("model.safetensors")):
            ended = forge.run("merge", path, "--output", "other")
            assert ended["code"] == 1
            assert "unfinished" in ended["text"]
    assert not (home / "other").exists()


# --- signals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("signal", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(
    ("argv", "output"), [(TO_SHARDS, "out"), (TO_FOLDER, "deep/er/out.bin")], ids=["shards", "bin"]
)
def test_an_interrupted_run_ends_with_code_1_and_leaves_nothing(signal, argv, output, forge, home):
    job = Job(forge, home, argv, output)
    shutil.rmtree("deep", ignore_errors=True)
    job.around = names(home)
    with untouched(job.source):
        # after the last rename the output is there
        for at in spread(7, job.moments - 4):
            ended = job.run(at=at, action=signal)
            assert ended["code"] == 1, ended
            assert ended["text"].strip() == "interrupted; nothing was published"
            assert names(home) == job.around


@pytest.mark.parametrize("signal", ["SIGINT", "SIGTERM"])
def test_an_interrupted_run_with_resume_keeps_its_work_and_continues(signal, forge, home):
    job = Job(forge, home, TO_BIN, sync=True)
    for at in spread(6, job.moments // 2)[3:]:
        ended = job.run("--resume", at=at, action=signal)
        assert ended["code"] == 1
        assert names(home) == sorted([*job.around, job.staging.name])
        again = job.run("--resume")
        assert "continued: " in again["text"]
        assert content(job.output) == job.wanted
        job.clear()


def test_interrupted_at_the_very_end_the_output_is_whole_or_absent(forge, home):
    job = Job(forge, home, TO_SHARDS)
    for at in range(job.moments - 4, job.moments):
        ended = job.run(at=at, action="SIGINT")
        assert ended["code"] == 1
        assert content(job.output) in (None, job.wanted)
        assert names(home) in (job.around, sorted([*job.around, "out"]))
        job.clear()


@pytest.mark.parametrize(
    ("output", "more"), [("out", ()), ("out.bin", ()), ("out", ("--overwrite",))]
)
def test_interrupted_after_the_rename_the_output_is_not_called_unpublished(
    output, more, forge, home
):
    job = Job(forge, home, (*TO_FOLDER, *more), output)
    said = set()
    for at in range(job.moments - 8, job.moments + 20):
        if more:
            job.output.mkdir()
        ended = job.run(at=at, action="SIGINT")
        if ended["code"] == 0:
            break  # it had no such moment
        whole = content(job.output) == job.wanted
        assert ("published and is whole" in ended["text"]) == whole, ended["text"]
        assert ("nothing was published" in ended["text"]) != whole
        said.add(whole)
        job.clear()
    assert said == {True, False}


# --- two runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [(), ("--resume",), ("--overwrite",)])
@pytest.mark.parametrize("output", ["out", "out.safetensors"])
def test_of_two_runs_into_one_output_the_second_is_refused(more, output, forge, home):
    job = Job(forge, home, TO_FOLDER, output, sync=True)
    for at in spread(4, job.moments - 4):
        gate = home / "gate"
        first = forge.start("merge", "native", "--output", output, at=at, action="pause",
                            gate=str(gate), sync=True)  # fmt: skip
        reached(gate)
        if job.staging.exists():
            second = job.run(*more)
            assert second["code"] == 1, second
            assert "another run is writing it" in second["text"]
        gate.unlink()
        assert forge.wait(first)["code"] == 0
        assert content(job.output) == job.wanted
        job.clear()


@pytest.mark.parametrize("output", ["out", "out.bin"])
def test_an_output_that_appears_during_the_run_is_not_replaced(output, forge, home):
    job = Job(forge, home, TO_FOLDER, output, sync=True)
    gate = home / "gate"
    first = forge.start("merge", "native", "--output", output, at=job.moments // 2,
                        action="pause", gate=str(gate), sync=True)  # fmt: skip
    reached(gate)
    if output == "out":
        (home / output).mkdir()
        (home / output / "mine").write_text("keep")
    else:
        (home / output).write_text("keep")
    with untouched(home / output):
        gate.unlink()
        ended = forge.wait(first)
    assert ended["code"] == 1
    assert "exists; pass --overwrite" in ended["text"]
    assert names(home) == sorted([*job.around, output])


def test_a_dry_run_writes_nothing(home):
    with untouched(home):
        report = reshard("native", "out", tp=4, pp=1, run=RunOptions(dry_run=True))
        assert report.dry_run
        merge("native", "sub/out.bin", run=RunOptions(dry_run=True))


def test_the_same_job_gives_the_same_bytes_each_time(home):
    write_split(home / "split")
    for name in ("a", "b"):
        reshard("split", name, tp=2, pp=2)
    assert content(home / "a") == content(home / "b")
    said = json.loads((home / "a/checkpoint.json").read_text())
    assert said["mesh"] == {"tp": 2, "pp": 2, "dp": 1}
    assert tree(home / "a").keys() == {k.replace("b", "a", 1) for k in tree(home / "b")}
