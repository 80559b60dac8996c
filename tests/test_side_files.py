"""What travels beside the weights, what stays behind and is named, and who may read an output."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import pytest
from fixtures_safety import content, edit_json, refused, write_hf, write_native
from safetensors.torch import load_file

from shardwright.ckpt import ReadOptions, RunOptions, merge, reshard, verify
from shardwright.ckpt.move import tree

TRAINER = (
    "optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_3.pth", "training_args.bin",
    "scaler.pt", "latest", "global_step7/mp_rank_00_model_states.pt", "checkpoint-500/config.json",
    "iter_0000000/mp_rank_00/model_optim_rng.pt", "adapter_model.safetensors",
    "adapter_config.json", "model.gguf", "q4.gguf", "onnx/model.onnx", "tf_model.h5",
    "model.safetensors.bak", "consolidated.00.pth", "common.pt", "distrib_optim.pt",
)  # fmt: skip
TRAVELS = (
    "tokenizer.json", "trainer_state.json", "modeling_x.py", "sub/vocab.model", "zero_to_fp32.py",
    "optimizer.md", "runs/events.out.tfevents.1",
)  # fmt: skip


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with the sources ``hf`` and ``native``."""
    write_hf(tmp_path / "hf", sides=True)
    write_native(tmp_path / "native", random_states=2)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(folder, names, size=10):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode().ljust(size, b"."))


FORMATS = {"hf": "hf", "native": "shards"}
JOBS = {
    "hf": lambda source, out, **how: merge(source, out, **how),
    "shards": lambda source, out, **how: reshard(source, out, to="shards", tp=2, **how),
    "torch_dist": lambda source, out, **how: reshard(source, out, to="torch_dist", tp=1, **how),
}
every_job = pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)


# --- what stays behind ------------------------------------------------------------------------


@every_job
@pytest.mark.parametrize("source", ["hf", "native"])
def test_training_state_other_weights_and_nested_checkpoints_stay_behind_and_are_named(
    source, job, home
):
    """C3, K7: a folder of a trainer would travel whole, uncounted, into every output."""
    put(home / source, (*TRAINER, *TRAVELS))
    report = job(source, "out", read=ReadOptions(format=FORMATS[source]))
    made = content(home / "out")
    assert {name for name in TRAVELS if made.get(name, b"").strip(b".") == name.encode()} == set(
        TRAVELS
    )
    ours = {"iter_0000000/common.pt"}
    assert not {name for name in made if name in TRAINER} - ours
    said = "\n".join(line for line in report.notes if "not copied" in line)
    for name in TRAINER:
        if name != "latest":
            assert any(part in said for part in (name, name.split("/")[0] + "/")), name


@pytest.mark.parametrize("source", ["hf", "native"])
def test_copy_all_takes_them(source, home):
    put(home / source, (*TRAINER, *TRAVELS))
    merge(source, "out", read=ReadOptions(copy_all=True, format=FORMATS[source]))
    made = content(home / "out")
    assert set(TRAINER) | set(TRAVELS) <= made.keys()


def test_an_old_iteration_in_the_source_never_replaces_what_is_written(home):
    """B3: the output was sound, with old weights."""
    reshard("native", "old", to="torch_dist", tp=1)
    for name in ("iter_0000000", "release"):
        shutil.copytree("old/iter_0001000", home / "hf" / name)
    read = ReadOptions(format="hf")
    reshard("hf", "out", to="torch_dist", tp=1, read=read)
    assert verify("hf", "out", weights_only=True, read=read, read_b=ReadOptions()).same
    read = ReadOptions(format="hf", copy_all=True)
    refused(lambda: reshard("hf", "out2", to="torch_dist", tp=1, read=read), "is written there")
    assert not (home / "out2").exists()


def test_what_travels_is_counted_in_dry_run_report_and_space_check(home, monkeypatch):
    put(home / "hf", ["big.txt"], 3_000_000)
    planned = merge("hf", "out", run=RunOptions(dry_run=True))
    done = merge("hf", "out")
    for report in (planned, done):
        assert dict(report.sides)["big.txt"] == 3_000_000
        (line,) = [line for line in report.lines() if line.startswith("beside the weights: ")]
        assert line.endswith("2.86 MiB")
    assert any(line.startswith("  big.txt  ") for line in planned.lines())
    room = os.statvfs(home)
    small = os.statvfs_result((*room[:4], 1_000_000 // room.f_frsize, *room[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    refused(lambda: merge("hf", "out2"), "are needed", "are free")


# --- links ------------------------------------------------------------------------------------


@every_job
def test_a_link_out_of_the_checkpoint_is_not_followed(job, home):
    """A2: the content of any file of the machine would be published."""
    (home / "secret").write_text("key")
    (home / "hf/notes.txt").symlink_to("/etc/passwd")
    (home / "hf/key.txt").symlink_to(home / "secret")
    (home / "hf/gone.txt").symlink_to("/nowhere")
    (home / "hf/inside.txt").symlink_to("config.json")
    report = job("hf", "out")
    made = content(home / "out")
    assert not {"notes.txt", "key.txt", "gone.txt"} & made.keys()
    assert made["inside.txt"] == (home / "hf/config.json").read_bytes()
    (line,) = [line for line in report.notes if "link out of the checkpoint" in line]
    assert "gone.txt, key.txt, notes.txt" in line
    assert "--follow-links" in line
    (home / "hf/gone.txt").unlink()
    job("hf", "out2", read=ReadOptions(follow_links=True))
    assert content(home / "out2")["key.txt"] == b"key"


def test_the_blobs_of_a_hubs_cache_are_followed(home):
    cache = home / "models--a--b"
    snapshot = cache / "snapshots/0123"
    (cache / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    wanted = content(home / "hf")
    for name, data in wanted.items():
        blob = cache / "blobs" / name.replace("/", "-")
        blob.write_bytes(data)
        (snapshot / name).parent.mkdir(exist_ok=True)
        (snapshot / name).symlink_to(os.path.relpath(blob, (snapshot / name).parent))
    report = merge(snapshot, "out")
    assert not [line for line in report.notes if "not copied" in line]
    assert {k: v for k, v in content(home / "out").items() if "model" not in k} == {
        k: v for k, v in wanted.items() if "model" not in k
    }


def test_weights_and_config_that_are_links_are_followed(home):
    """Scratch folders of clusters are made of them."""
    scratch = home / "scratch"
    scratch.mkdir()
    for name in ("config.json", "model.safetensors"):
        (scratch / name).symlink_to(home / "hf" / name)
    merge("scratch", "out")
    assert (home / "out/config.json").read_bytes() == (home / "hf/config.json").read_bytes()
    assert verify("hf", "out").same


def test_a_folder_that_cannot_be_listed_is_an_error(home, monkeypatch):
    """C2: what lay in it would be missing without a word."""
    (home / "hf/sub").mkdir(exist_ok=True)
    real = os.listdir

    def listed(path):
        if str(path).endswith("/sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", listed)
    refused(lambda: merge("hf", "out"), "hf/sub", "Permission denied")


# --- permissions ------------------------------------------------------------------------------


def modes(path: Path) -> dict[str, str]:
    return {
        str(p.relative_to(path)): f"{stat.S_IMODE(p.stat().st_mode):o}"
        for p in (path, *path.rglob("*"))
    }


@every_job
@pytest.mark.parametrize(
    ("mode", "file", "folder"),
    [(0o600, "600", "700"), (0o640, "640", "750"), (0o644, "644", "755"), (0o666, "644", "755")],
)
def test_an_output_is_no_more_readable_than_its_source(mode, file, folder, job, home):
    """A6."""
    (home / "hf/model.safetensors").chmod(mode)
    old = os.umask(0o022)
    try:
        job("hf", "out")
    finally:
        os.umask(old)
    found = modes(home / "out")
    kinds = {name: (home / "out" / name).is_dir() for name in found}
    assert found == {name: folder if is_folder else file for name, is_folder in kinds.items()}


def test_one_file_is_no_more_readable_than_its_source(home):
    (home / "hf/model.safetensors").chmod(0o600)
    merge("hf", "x.safetensors")
    assert stat.S_IMODE((home / "x.safetensors").stat().st_mode) == 0o600


def test_a_side_file_keeps_what_its_readers_could_not(home):
    (home / "hf/secret.txt").write_text("x")
    (home / "hf/secret.txt").chmod(0o600)
    (home / "hf/model.safetensors").chmod(0o644)
    merge("hf", "out")
    assert modes(home / "out")["secret.txt"] == "600"
    assert modes(home / "out")["model.safetensors"] == "644"


def test_files_in_a_folder_that_others_cannot_enter_stay_closed_to_them(home):
    (home / "hf").chmod(0o700)
    merge("hf", "x.safetensors")
    assert stat.S_IMODE((home / "x.safetensors").stat().st_mode) == 0o600


def test_side_files_below_many_folders_inside_each_other_travel(home):
    """G2: `os.walk`, `os.makedirs` and `Path.mkdir` call themselves for each level."""
    deep = home / "hf"
    for _ in range(1200):
        deep = deep / "d"
        os.mkdir(deep)
    (deep / "words.txt").write_text("deep")
    try:
        for run in (None, RunOptions(overwrite=True)):
            reshard("hf", "o", to="shards", run=run)
            assert home.joinpath("o", *["d"] * 1200, "words.txt").read_text() == "deep"
        assert verify("hf", "o").same
    finally:  # pytest's own removal would call itself too
        tree.remove(home / "hf/d")
        tree.remove(home / "o/d")


# --- what a resumed run keeps -----------------------------------------------------------------


@pytest.fixture
def stopped(forge, home):
    """The staging folder of a killed run whose journal names most tensors."""
    argv = ("merge", "native", "--output", "out", "--workers", 1)
    whole = forge.run(*argv, sync=True)["moments"]
    wanted = content(home / "out")
    for path in sorted((home / "out").rglob("*")):
        path.unlink()
    (home / "out").rmdir()
    forge.run(*argv, sync=True, at=whole * 3 // 4)
    return home / ".out.partial/model.safetensors", wanted


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def test_a_flipped_bit_in_what_is_kept_is_never_published(stopped, home):
    """A4: the first tensor of the file was journalled."""
    file, wanted = stopped
    first = min(load_file(file), default=None)
    assert first is not None
    flip(file, int.from_bytes(file.read_bytes()[:8], "little") + 8)
    merge("native", "out", run=RunOptions(resume=True, workers=1))
    assert content(home / "out") == wanted


def test_new_padding_rows_that_were_altered_are_noticed_on_resume(forge, home):
    """A4: nothing is copied there, so comparing with the source does not look at them."""
    argv = ("reshard", "hf", "--tp", 2, "--make-vocab-size-divisible-by", 32)
    argv += ("--output", "out", "--workers", 1)
    whole = forge.run(*argv, sync=True)["moments"]
    wanted = content(home / "out")
    shutil.rmtree(home / "out")
    forge.run(*argv, sync=True, at=whole * 3 // 4)
    file = home / ".out.partial/model_tp_1_pp_0.safetensors"
    table = json.loads(file.read_bytes()[8:][: int.from_bytes(file.read_bytes()[:8], "little")])
    _, stop = table["embedding.word_embeddings.weight"]["data_offsets"]
    end = 8 + int.from_bytes(file.read_bytes()[:8], "little") + stop
    assert not any(file.read_bytes()[end - 64 : end]), "the last row is a new one"
    flip(file, end - 1)
    how = {"tp": 2, "make_vocab_size_divisible_by": 32}
    again = RunOptions(resume=True, workers=1)
    refused(lambda: reshard("hf", "out", run=again, **how), file.name, "padding rows", "start over")
    flip(file, end - 1)
    reshard("hf", "out", run=again, **how)
    assert content(home / "out") == wanted


def test_a_header_that_was_changed_is_not_continued(stopped, home):
    file, wanted = stopped
    flip(file, 20)
    refused(lambda: merge("native", "out", run=RunOptions(resume=True)), "header", "start over")
    merge("native", "out")
    assert content(home / "out") == wanted


@pytest.mark.parametrize("kind", ["link", "hard link"])
def test_a_file_that_became_a_link_is_not_written_through(kind, stopped, home):
    file, _ = stopped
    (home / "mine").write_bytes(file.read_bytes())
    file.unlink()
    (file.symlink_to if kind == "link" else file.hardlink_to)(home / "mine")
    before = (home / "mine").read_bytes()
    refused(lambda: merge("native", "out", run=RunOptions(resume=True)), "start over")
    assert (home / "mine").read_bytes() == before


def test_json_of_the_source_is_never_named_twice(home):
    edit_json(home / "hf/config.json", torch_dtype="float32")
    merge("hf", "out", dtype="bf16")
    assert json.loads((home / "out/config.json").read_text())["torch_dtype"] == "bfloat16"


def test_what_is_no_regular_file_stays_behind_and_is_named(home):
    os.mkfifo("hf/pipe")
    report = merge("hf", "out")
    assert "not copied, no regular file: pipe" in report.notes
    assert "pipe" not in content(home / "out")
