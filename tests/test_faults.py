"""A system that fails, or does less than asked: one error and nothing half, or the same bytes."""

import errno
import itertools
import os
import pathlib
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import failing_calls
import independent
import numpy as np
import pytest
import torch
from fixtures_safety import (
    case,
    content,
    edit_tensors,
    names,
    refused,
    tree,
    untouched,
    write_hf,
    write_native,
    write_split,
)

from shardwright.ckpt import (
    CheckpointError,
    RunOptions,
    jobs,
    merge,
    open_checkpoint,
    reshard,
    verify,
)
from shardwright.ckpt.model.design import OutFile
from shardwright.ckpt.model.file_layout import FileLayout
from shardwright.ckpt.move import executor, files, lock, staging, storage
from shardwright.ckpt.move.kept import kept_fault
from shardwright.ckpt.move.tree import replace_file


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with the sources ``hf`` and ``native``; outputs go to ``to``."""
    write_hf(tmp_path / "hf", sides=True)
    write_native(tmp_path / "native")
    (tmp_path / "to").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def mounted(tmp_path):
    """A function that mounts a small file system in memory; skips where that is not allowed."""
    made = []

    def mount(size, *options):
        path = tmp_path / f"mount{len(made)}"
        path.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", *options]), "tmpfs"]
        done = subprocess.run([*words, str(path)], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount: {done.stderr.decode().strip()}")
        made.append(path)
        return path

    yield mount
    for path in made:
        subprocess.run(["umount", str(path)], check=True)


def to_shards(output, **run):
    return reshard("hf", output, tp=2, pp=2, run=RunOptions(**run))


def to_bin(output, **run):
    return reshard("native", output, tp=4, pp=1, dp=2, safe_serialization=False,
                   run=RunOptions(**run))  # fmt: skip


def to_folder(output, **run):
    return merge("native", output, run=RunOptions(**run))


def to_parts(output, **run):
    return merge("native", output, max_shard_size=4000, run=RunOptions(**run))


def to_file(output, **run):
    return merge("native", f"{output}.safetensors", run=RunOptions(**run))


def to_bin_file(output, **run):
    return merge("native", f"{output}.bin", run=RunOptions(**run))


def to_half(output, **run):
    return merge("native", output, dtype="bf16", run=RunOptions(**run))


def to_gpt2(output, **run):
    """Transposed on the way, so that no run is contiguous."""
    if not Path("gpt2").exists():
        write_hf(Path("gpt2"), "gpt2")
    return reshard("gpt2", output, tp=2, pp=2, run=RunOptions(**run))


JOBS = [to_shards, to_bin, to_folder, to_parts, to_file, to_bin_file, to_half, to_gpt2]
every_job = pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
some_jobs = pytest.mark.parametrize("job", [to_shards, to_bin, to_file], ids=lambda j: j.__name__)


def fail(number, path=None):
    raise OSError(number, os.strerror(number), path)


def failing(call, at, number):
    """``call``, which fails the ``at``-th time."""
    count = itertools.count()
    return lambda *args, **kwargs: fail(number) if next(count) == at else call(*args, **kwargs)


# --- disks ------------------------------------------------------------------------------------


@every_job
def test_a_disk_that_is_too_small_is_said_before_a_byte_is_written(job, home, mounted):
    disk = mounted("16k")
    with untouched(home / "hf", home / "native"):
        refused(lambda: job(disk / "out"), disk, "are needed", "are free")
        assert names(disk) == []


@every_job
def test_a_disk_that_fills_up_on_the_way_is_an_error_and_nothing_stays(
    job, home, mounted, monkeypatch
):
    real = os.statvfs
    disk = mounted("24k")
    monkeypatch.setattr(os, "statvfs", lambda path: real("/tmp"))
    with untouched(home / "hf", home / "native"):
        refused(lambda: job(disk / "out"), disk, "No space left on device")
        assert names(disk) == []


def test_a_disk_that_fills_up_keeps_the_work_of_a_run_with_resume(home, mounted, monkeypatch):
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: real("/tmp"))
    monkeypatch.setattr(jobs, "SYNC_SECONDS", -1.0)
    disk = mounted("40k")
    refused(lambda: to_folder(disk / "out", resume=True), "No space left on device")
    assert names(disk) == [".out.partial"]
    subprocess.run(["mount", "-o", "remount,size=1m", str(disk)], check=True)
    report = to_folder(disk / "out", resume=True)
    assert any(note.startswith("continued: ") for note in report.notes)
    to_folder("to/whole")
    assert content(disk / "out") == content(home / "to/whole")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize(
    ("module", "name"),
    [(storage, "PWRITE"), (os, "fsync"), (os, "write"), (os, "ftruncate"), (os, "rename"),
     (os, "replace"), (shutil, "copyfile")],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
@some_jobs
def test_a_call_that_fails_at_any_time_is_our_error_and_leaves_nothing(
    job, module, name, number, home, monkeypatch
):
    """kind I: partial saves."""
    real, calls = getattr(module, name), []
    monkeypatch.setattr(storage, "KERNEL_COPY", None)
    monkeypatch.setattr(jobs, "SYNC_SECONDS", -1.0)
    monkeypatch.setattr(module, name, lambda *a, **k: (calls.append(0), real(*a, **k))[1])
    job("to/out")
    count = len(calls)
    shutil.rmtree("to")
    Path("to").mkdir()
    for at in sorted({0, 1, count // 3, count // 2, count - 1} & set(range(count))):
        monkeypatch.setattr(module, name, failing(real, at, number))
        before = tree(home)
        refused(lambda: job("to/out", workers=1), os.strerror(number))
        if name != "fsync" or at < count - 1:  # the last one comes after the last rename
            assert tree(home) == before


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs the list of open files")
@pytest.mark.parametrize("name", ["stat", "fstat", "pread"])
@some_jobs
def test_a_look_at_a_lock_or_file_that_fails_is_our_error_and_leaves_no_file_open(
    name, job, home, monkeypatch
):
    """The lock is looked at before every line of the journal: found by ``make torture``."""
    monkeypatch.setattr(jobs, "SYNC_SECONDS", -1.0)
    with failing_calls.watched() as counts:
        job("to/out", workers=1)
    shutil.rmtree("to")
    Path("to").mkdir()
    opened = len(os.listdir("/proc/self/fd"))
    for at in range(0, counts[name], max(1, counts[name] // 12)):
        with failing_calls.watched(name, at, errno.ESTALE), suppress(CheckpointError):
            job("to/out", workers=1, overwrite=True)
        assert len(os.listdir("/proc/self/fd")) == opened, at


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs the list of open files")
@pytest.mark.parametrize(
    "use",
    [
        lambda path, kept: replace_file(path, b"old\n"),
        lambda path, kept: staging.lines(path),
        lambda path, kept: kept_fault(kept, []),
    ],
    ids=["replaced", "journal", "kept"],
)
def test_no_file_stays_open_where_it_cannot_be_looked_at(use, tmp_path):
    """``os.fdopen`` leaves its file open where it fails: found by ``make torture``."""
    path = tmp_path / "x"
    path.write_bytes(b"old\n")
    kept = OutFile(str(path), FileLayout(4, {}, ((0, b"old\n"),)))
    with failing_calls.watched() as counts:
        use(path, kept)
    opened = len(os.listdir("/proc/self/fd"))
    assert counts["fstat"] >= 1
    for at in range(counts["fstat"]):
        with failing_calls.watched("fstat", at, errno.EIO), suppress(OSError):
            use(path, kept)
        assert len(os.listdir("/proc/self/fd")) == opened, at
        assert path.read_bytes() == b"old\n"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENAMETOOLONG])
def test_a_folder_that_cannot_be_written_is_named(number, home, monkeypatch):
    monkeypatch.setattr(os, "mkdir", lambda *_, **__: fail(number))
    if sys.version_info < (3, 11):  # pathlib holds the function itself
        monkeypatch.setattr(pathlib._NormalAccessor, "mkdir", lambda *_, **__: fail(number))
    with untouched(home):
        refused(lambda: to_shards("to/out"), "to/.out.partial", os.strerror(number))
        refused(lambda: to_shards("new/deep/out"), "new/deep/.out.partial", os.strerror(number))


def test_a_read_only_file_system_is_named(home, mounted):
    disk = mounted("1m")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for job in JOBS:
        refused(lambda job=job: job(disk / "out"), disk, "Read-only file system")
    assert names(disk) == []


def test_a_file_in_the_place_of_a_folder_is_refused(home):
    Path("to/file").write_text("")
    with untouched(home):
        refused(lambda: to_shards("to/file/out"), "to/file", "cannot write here")
        refused(lambda: to_shards("to/file/deep/out"), "to/file", "Not a directory")
        refused(lambda: to_shards("hf/config.json", overwrite=True), "inside the source")
        refused(lambda: to_shards("to/file", overwrite=True), "is a file; a folder cannot replace")
        refused(lambda: to_shards("to/.."), "must end in the name")
        refused(lambda: to_shards("/"), "must end in the name")
        refused(lambda: to_shards("to/a\0b"), "must end in the name")
        refused(lambda: to_shards("to/" + "x" * 250), "x" * 250, "name too long")


def test_a_home_of_nobody_is_a_name_like_any_other(home):
    to_shards("to/~nobody-of-that-name")
    to_shards("~nobody-of-that-name/out")
    assert content(home / "to/~nobody-of-that-name") == content(home / "~nobody-of-that-name/out")


def test_folders_that_a_failed_run_made_are_gone(home, monkeypatch):
    monkeypatch.setattr(storage, "PWRITE", lambda *_: fail(errno.EIO))
    with untouched(home):
        refused(lambda: to_shards("a/b/c/out"), os.strerror(errno.EIO))


# --- sources that change ----------------------------------------------------------------------


def during(monkeypatch, job, change, at=5):
    """Run ``job`` and ``change`` the source at its ``at``-th write."""
    real, count = storage.PWRITE, itertools.count()
    monkeypatch.setattr(storage, "KERNEL_COPY", None)

    def write(*args):
        if next(count) == at:
            change()
        return real(*args)

    monkeypatch.setattr(storage, "PWRITE", write)
    with pytest.raises(CheckpointError) as caught:
        job("to/out")
    assert names(Path("to")) == []
    return str(caught.value)


SOURCE_OF = {to_shards: "hf/model.safetensors", to_bin: "native/optimizer_tp_1_pp_1.safetensors",
             to_file: "native/model_tp_1_pp_1.safetensors"}  # fmt: skip


@pytest.mark.parametrize("at", [5, 30])
@some_jobs
def test_a_source_that_vanishes_is_named(job, at, home, monkeypatch):
    path = Path(SOURCE_OF[job])
    text = during(monkeypatch, job, path.unlink, at)
    assert path.name in text
    assert "No such file" in text


@pytest.mark.parametrize("at", [5, 30])
@some_jobs
def test_a_source_that_grows_or_is_rewritten_is_named(job, at, home, monkeypatch):
    path = Path(SOURCE_OF[job])
    whole = path.read_bytes()

    def grow():
        with path.open("ab") as file:
            file.write(b"x")

    text = during(monkeypatch, job, grow, at)
    assert f"{path.name}: changed while it was read" in text
    assert f"size {len(whole)} then, {len(whole) + 1} now" in text
    path.write_bytes(whole)
    monkeypatch.undo()
    monkeypatch.chdir(home)
    text = during(monkeypatch, job, lambda: os.utime(path, ns=(1, 1)), at)
    assert f"{path.name}: changed while it was read" in text


@some_jobs
def test_a_source_that_becomes_shorter_is_named_with_the_byte(job, home, monkeypatch):
    path = Path(SOURCE_OF[job])
    text = during(monkeypatch, job, lambda: os.truncate(path, 3000), 3)
    assert path.name in text
    assert "too early" in text or "changed while" in text


def test_a_side_file_that_changes_is_named(home, monkeypatch):
    text = during(monkeypatch, to_shards, lambda: Path("hf/tokenizer.json").write_text("{}"))
    assert "tokenizer.json: changed while it was read" in text


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_source_that_cannot_be_read_is_named_with_the_byte(number, home, monkeypatch):
    monkeypatch.setattr(storage, "KERNEL_COPY", None)
    weights, real = Path("hf/model.safetensors").stat().st_ino, storage.PREADV

    def read(fd, *rest):
        return fail(number) if os.fstat(fd).st_ino == weights else real(fd, *rest)

    monkeypatch.setattr(storage, "PREADV", read)
    with untouched(home):
        refused(lambda: to_shards("to/out"), "model.safetensors", os.strerror(number), "at byte")


# --- systems that do less than asked ----------------------------------------------------------


def short_reads(step):
    real = storage.PREADV
    count = itertools.count()
    return lambda fd, into, at: real(fd, [into[0][: 1 + next(count) % step]], at)


def short_writes(step):
    real = storage.PWRITE
    count = itertools.count()
    return lambda fd, data, at: real(fd, data[: 1 + next(count) % step], at)


def kernel_copy(number=None, *, after=0, short=0, nothing=False):
    """A system call that refuses after some calls, copies less than asked, or nothing."""
    real = storage.KERNEL_COPY or pytest.skip("this system has no copy_file_range")
    count = itertools.count()

    def call(reader, writer, length, *offsets):
        if next(count) >= after:
            if number is not None:
                fail(number)
            if nothing:
                return 0
        return real(reader, writer, min(length, short) if short else length, *offsets)

    return call


def lesser_systems(patch):
    """(name, function that turns this system into a lesser one)."""
    none = lambda: patch(storage, "KERNEL_COPY", None)  # noqa: E731
    refusals = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM,
                errno.EBADF, errno.EIO)  # fmt: skip
    yield "no copy call", none
    for number in refusals:
        after = 7 if number == errno.EXDEV else 0
        yield (
            f"{errno.errorcode[number]} after {after}",
            lambda n=number, a=after: patch(storage, "KERNEL_COPY", kernel_copy(n, after=a)),
        )
    yield "copies nothing", lambda: patch(storage, "KERNEL_COPY", kernel_copy(nothing=True))
    yield (
        "copies nothing later",
        lambda: patch(storage, "KERNEL_COPY", kernel_copy(nothing=True, after=5)),
    )
    yield "copies short", lambda: patch(storage, "KERNEL_COPY", kernel_copy(short=5))
    for step in (2, 7):
        yield (
            f"reads of 1 to {step}",
            lambda s=step: (none(), patch(storage, "PREADV", short_reads(s))),
        )
        yield (
            f"writes of 1 to {step}",
            lambda s=step: (none(), patch(storage, "PWRITE", short_writes(s))),
        )
    yield "no preadv", lambda: (none(), patch(storage, "PREADV", storage._preadv))
    yield "calls of 3 bytes", lambda: (none(), patch(files, "MAX_CALL_BYTES", 3))
    yield "copies of 3 bytes", lambda: patch(files, "MAX_CALL_BYTES", 3)
    for count in (1, 2):
        yield f"{count} open files", lambda n=count: patch(files, "MAX_OPEN_FILES", n)
    yield "small scratch", lambda: patch(files, "SCRATCH_BYTES", 11)
    yield "long runs", lambda: patch(executor, "RUN_BYTES", 1)
    yield "long runs, no copy call", lambda: (patch(executor, "RUN_BYTES", 1), none())


@every_job
def test_a_lesser_system_gives_the_same_bytes(job, home, monkeypatch):
    job("to/whole")
    suffix = {to_file: ".safetensors", to_bin_file: ".bin"}.get(job, "")
    wanted = content(home / f"to/whole{suffix}")
    for name, become in lesser_systems(monkeypatch.setattr):
        become()
        job("to/out", workers=2)
        monkeypatch.undo()
        monkeypatch.chdir(home)
        assert content(home / f"to/out{suffix}") == wanted, name
        shutil.rmtree("to/out") if not suffix else Path(f"to/out{suffix}").unlink()


@every_job
def test_workers_and_memory_do_not_change_a_byte(job, home):
    job("to/whole")
    suffix = {to_file: ".safetensors", to_bin_file: ".bin"}.get(job, "")
    wanted = content(home / f"to/whole{suffix}")
    for workers, memory in [*((n, 32 << 20) for n in range(1, 9)), (1, 1), (3, 1), (2, 4096)]:
        job(f"to/{workers}-{memory}", workers=workers, memory_budget=memory)
        assert content(home / f"to/{workers}-{memory}{suffix}") == wanted


def test_tiles_of_a_few_bytes_give_the_same_bytes(home, monkeypatch):
    made = case()
    wanted = independent.stored(made.config, made.state, 4, 1, multiple=128)
    for tile in (16, 100):
        monkeypatch.setattr(executor.Budget, "tile_bytes", lambda self, turned, n=tile: n)
        reshard("hf", f"to/{tile}", tp=4, pp=1)
        independent.assert_same_ranks(independent.load_ranks(home / f"to/{tile}"), wanted)
        to_gpt2(f"to/gpt2-{tile}")
    monkeypatch.undo()
    monkeypatch.chdir(home)
    to_gpt2("to/gpt2")
    assert content(home / "to/gpt2-16") == content(home / "to/gpt2")
    assert content(home / "to/gpt2-100") == content(home / "to/gpt2")


def test_comparing_and_slicing_stand_short_reads(home, monkeypatch):
    to_shards("to/out")
    monkeypatch.setattr(storage, "PREADV", short_reads(5))
    monkeypatch.setattr(files, "MAX_OPEN_FILES", 1)
    assert verify("hf", "to/out").same
    name = "model.layers.2.mlp.gate_proj.weight"
    wanted = case().state[name].numpy()
    for path in ("hf", "to/out"):
        assert np.array_equal(open_checkpoint(path)[name][3:9, 2:5], wanted[3:9, 2:5])


def test_a_target_of_other_bytes_is_found_different_whatever_is_short(home, monkeypatch):
    """The comparison of this file is worth something: one wrong bit is seen."""
    to_shards("to/out")

    def change(tensors):
        tensors["output_layer.weight"].view(torch.uint8)[3, 8] ^= 1

    edit_tensors(Path("to/out/model_tp_0_pp_1.safetensors"), change)
    monkeypatch.setattr(storage, "PREADV", short_reads(5))
    verdict = verify("hf", "to/out")
    assert not verdict.same
    assert "lm_head.weight: 1 of 336 elements differs; first at [3, 2]" in verdict.differences[0]


# --- places -----------------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "output", ["hf", "hf/out", "hf/deep/er/out", "native/../hf", "to/link/out", "to/link/nested"]
)
def test_an_output_inside_its_source_is_refused(output, overwrite, home):
    Path("to/link").symlink_to(home / "hf")
    with untouched(home):
        refused(lambda: to_shards(output, overwrite=overwrite), "source", "never modified")


@pytest.mark.parametrize("run", [{}, {"dry_run": True}, {"resume": True}])
@pytest.mark.parametrize("output", ["save", "save/run", "save/run/../../save"])
def test_an_output_around_its_source_is_refused_even_with_overwrite(output, run, home):
    """Replacing that folder would remove the source with it."""
    shutil.copytree("hf", "save/run/source")
    with untouched(home):
        refused(
            lambda: reshard("save/run/source", output, tp=2, run=RunOptions(overwrite=True, **run)),
            "never modified",
        )


def test_an_output_over_the_files_that_a_source_links_to_is_refused(home):
    """Hugging Face's cache: a snapshot of links into blobs."""
    Path("cache/snapshots/main").mkdir(parents=True)
    shutil.move("hf", "cache/blobs")
    for name in ("config.json", "model.safetensors"):
        Path("cache/snapshots/main", name).symlink_to(f"../../blobs/{name}")
    for output in ("cache/blobs", "cache/blobs/model.safetensors", "cache"):
        with untouched(home):
            refused(
                lambda output=output: merge(
                    "cache/snapshots/main", output, run=RunOptions(overwrite=True)
                ),
                "never modified",
            )
    merge("cache/snapshots/main", "cache/snapshots/other")
    assert verify("cache/snapshots/main", "cache/snapshots/other").same


def test_a_source_in_the_place_of_the_stage_is_refused(home):
    """The hidden folder is emptied before it is written to."""
    shutil.copytree("hf", "to/.out.partial")
    with untouched(home):
        refused(lambda: reshard("to/.out.partial", "to/out", tp=2), "never modified")


def test_a_file_over_or_beside_its_source(home):
    with untouched(home):
        refused(
            lambda: merge("hf/model.safetensors", "hf/model.safetensors",
                          run=RunOptions(overwrite=True)),
            "never modified",
        )  # fmt: skip
    merge("hf/model.safetensors", "hf/other.bin")
    assert verify("hf/model.safetensors", "hf/other.bin").same


@every_job
def test_an_existing_output_is_refused_without_overwrite(job, home):
    job("to/out")
    with untouched(home / "to"):
        text = refused(lambda: job("to/out"), "to/out", "exists; pass --overwrite to replace it")
        assert "\n" not in text
    before = content(home / "to")
    job("to/out", overwrite=True)
    assert content(home / "to") == before


def test_what_is_no_checkpoint_is_never_replaced(home):
    Path("to/out").mkdir()
    Path("to/out/mine").write_text("keep")
    Path("to/dangling").symlink_to("nowhere")
    with untouched(home):
        refused(lambda: to_shards("to/out"), "exists")
        refused(lambda: to_shards("to/dangling"), "exists")
        refused(lambda: to_shards("to/dangling", overwrite=True), "is a symlink")
        refused(lambda: to_shards("to/out", overwrite=True), "no checkpoint", "'mine'")
        refused(lambda: to_shards("to/out", overwrite=True, dry_run=True), "no checkpoint")
        refused(lambda: to_shards(""), "--output ''")
    Path("to/out/mine").unlink()
    to_shards("to/out", overwrite=True)
    assert "config.json" in names(Path("to/out"))


@pytest.mark.parametrize("name", ["checkpoint-500", "iter_0000005", "global_step7"])
def test_a_folder_that_holds_other_checkpoints_is_never_replaced(name, home):
    """As a Trainer's folder, which has the last model beside the steps before it."""
    to_shards("to/out")
    Path("to/out", name).mkdir()
    with untouched(home):
        refused(lambda: to_shards("to/out", overwrite=True), "other checkpoints", name)


def test_a_run_of_megatron_with_other_iterations_is_never_replaced(home):
    def job():
        return reshard("hf", "to/run", to="megatron", tp=2, run=RunOptions(overwrite=True))

    job()
    job()
    Path("to/run/iter_0000005/mp_rank_00").mkdir(parents=True)
    with untouched(home):
        refused(job, "other checkpoints", "iter_0000005, release")


def test_a_link_is_not_followed_into_what_it_names(home):
    shutil.copytree("hf", "to/precious")
    Path("to/out").symlink_to("precious")
    Path("to/out.bin").symlink_to("precious/model.safetensors")
    with untouched(home / "to/precious"):
        refused(lambda: to_shards("to/out", overwrite=True), "is a symlink")
        to_bin_file("to/out", overwrite=True)
    assert not Path("to/out.bin").is_symlink()


def test_sources_of_every_form_are_never_touched(home):
    """Not even their times."""
    write_split(home / "split")
    write_split(home / "split-bin", binary=True)
    write_native(home / "native-bin", safe=False)
    before = tree(home)
    for source in ("hf", "split", "split-bin", "native", "native-bin"):
        merge(source, f"to/{source}-hf")
        reshard(source, f"to/{source}-shards", tp=1, pp=2)
        verify(source)
        assert verify(source, f"to/{source}-shards").same
    after = tree(home)
    assert {k: v for k, v in after.items() if k in before and "to" not in Path(k).parts} == {
        k: v for k, v in before.items() if "to" not in Path(k).parts
    }


def test_a_folder_that_no_second_run_can_be_kept_from_is_refused(home, monkeypatch):
    """Locks are missing on some network file systems."""
    monkeypatch.setattr(lock.fcntl, "flock", lambda *_: fail(errno.ENOLCK))
    with untouched(home):
        refused(lambda: to_shards("to/out"), "cannot be locked", os.strerror(errno.ENOLCK))
