"""Every output goes one way: a request, a checked design, one staging folder, one rename."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch
from fixtures_safety import content, refused, write_hf, write_native

from shardwright.ckpt import ReadOptions, RunOptions, merge, plan, reshard
from shardwright.ckpt.formats import writer
from shardwright.ckpt.formats.writing import WriteRequest
from shardwright.ckpt.reader import read_checkpoint

QUIET = RunOptions()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with the sources ``hf`` and ``native``."""
    write_hf(tmp_path / "hf", sides=True)
    write_native(tmp_path / "native", random_states=2)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- Hugging Face is a format like the others -------------------------------------------------


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("native", {}),
        ("native", {"dtype": "bf16"}),
        ("native", {"max_shard_size": 4096}),
        ("native", {"max_shard_size": 4096, "safe_serialization": False, "dtype": "fp16"}),
        ("hf", {"read": ReadOptions(vocab_size=20)}),
        ("hf", {"safe_serialization": False}),
        ("hf", {"run": RunOptions(checksum=True)}),
    ],
)
def test_reshard_to_hf_and_merge_give_identical_bytes(source, options, home):
    merge(source, "a", **options)
    reshard(source, "b", to="hf", **options)
    assert content(home / "a") == content(home / "b")


def test_reshard_to_one_hugging_face_file_is_merge_to_it(home):
    merge("native", "a/x.safetensors")
    reshard("native", "b/x.safetensors", to="hf")
    assert content(home / "a") == content(home / "b")
    assert list(content(home / "a")) == ["x.safetensors"]


def test_the_default_output_of_hf_is_one_name_for_both_commands(home):
    assert merge("native").output == home / "native-hf"
    assert reshard("hf", to="hf").output == home / "hf-hf"
    assert reshard("hf", tp=2).output == home / "hf-tp2-pp1"


def cached(home, source):
    """``source`` as a model in Hugging Face's cache: a snapshot of links to blobs."""
    repo = home / "cache/hub/models--org--tiny"
    snapshot = repo / "snapshots" / ("0a" * 20)
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for number, file in enumerate(sorted(p for p in source.iterdir() if p.is_file())):
        file.rename(repo / "blobs" / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot


@pytest.mark.parametrize("name", ["", "model.safetensors"])
def test_a_model_of_the_cache_is_written_into_the_current_folder(name, home, monkeypatch):
    """I3: beside its snapshot it would be a snapshot to Hugging Face's tools."""
    shutil.copy(home / "hf/config.json", home / "config.json")
    source = cached(home, home / "hf")
    read = ReadOptions(config=home / "config.json") if name else None
    (home / "work").mkdir()
    monkeypatch.chdir(home / "work")
    before = sorted((home / "cache").rglob("*"))
    assert reshard(source / name, tp=2, read=read).output == home / "work/tiny-tp2-pp1"
    assert merge(source / name, read=read).output == home / "work/tiny-hf"
    assert sorted((home / "cache").rglob("*")) == before


def test_an_output_is_named_after_the_link_that_was_typed(home):
    """I3."""
    (home / "store").mkdir()
    (home / "hf").rename(home / "store/0a0b0c")
    (home / "mine").mkdir()
    (home / "mine/llama").symlink_to(home / "store/0a0b0c")
    assert reshard("mine/llama", tp=2).output == home / "mine/llama-tp2-pp1"
    assert reshard("mine/llama/", to="hf").output == home / "mine/llama-hf"
    assert sorted(p.name for p in (home / "store").iterdir()) == ["0a0b0c"]
    (home / "one").symlink_to("mine/llama/model.safetensors")
    read = ReadOptions(config=home / "store/0a0b0c/config.json")
    assert reshard("one", tp=1, read=read).output == home / "one-tp1-pp1"
    linked = cached(home, home / "store/0a0b0c")
    (home / "short").symlink_to(linked)
    assert reshard("short", tp=1).output == home / "short-tp1-pp1", "a link out of the cache too"


def test_a_checkpoint_of_a_linked_save_folder_is_named_by_way_of_the_link(home):
    (home / "run").mkdir()
    (home / "native").rename(home / "run/checkpoint-10")
    (home / "run/latest").write_text("checkpoint-10\n")
    (home / "it").symlink_to("run")
    assert merge("it").output == home / "it/checkpoint-10-hf"
    said = merge("run", run=RunOptions(dry_run=True))
    assert said.output == home / "run/checkpoint-10-hf", "the same place"


def request_without(ckpt, *names, **fields):
    """A request whose source has lost tensors on the way."""
    tensors = {f: m for f, m in ckpt.manifest.tensors.items() if f not in names}
    chunks = {f: c for f, c in ckpt.manifest.chunks.items() if f not in names}
    manifest = dataclasses.replace(ckpt.manifest, tensors=tensors, chunks=chunks)
    less = dataclasses.replace(ckpt, manifest=manifest)
    return less, WriteRequest(less, None, tensors, {}, True, (), **fields)


def test_a_tensor_that_the_source_lost_is_an_error_toward_hf_too(home):
    """C1: coverage is proved against the family's table, not against the source itself."""
    ckpt = read_checkpoint("native", ReadOptions(weights_only=True))
    lost = "model.layers.2.mlp.down_proj.weight"
    less, request = request_without(ckpt, lost)
    made = writer("hf").design(request, home / "out")
    refused(lambda: plan(less.manifest, made.manifest), lost, "missing in the source")


def test_a_model_without_a_table_is_written_as_it_is(home):
    torch.save({"a.weight": torch.arange(6.0), "b": torch.ones(2, 3)}, home / "x.bin")
    merge("x.bin", "out")
    assert list(content(home / "out")) == ["model.safetensors"]


@pytest.mark.parametrize(
    ("options", "word"),
    [({"max_shard_size": 4096}, "--max-shard-size"), ({"from_master": True}, "--from-master")],
)
def test_options_of_hf_are_refused_for_formats_of_ranks(options, word, home):
    refused(lambda: reshard("native", "out", tp=1, **options), word, "shards")


# --- what the report says ---------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, -5])
@pytest.mark.parametrize("source", ["hf", "native"])
def test_a_vocabulary_without_rows_is_refused(source, rows, home):
    """C1: embedding and head would be dropped."""
    read = ReadOptions(vocab_size=rows)
    refused(lambda: merge(source, "out", read=read), f"--vocab-size {rows}", "at least 1")
    refused(lambda: reshard(source, "out", tp=1, read=read), f"--vocab-size {rows}")


def test_a_dry_run_does_not_say_that_replicas_were_compared(home):
    """B6."""
    planned = merge("native", "out", run=RunOptions(dry_run=True)).lines()
    done = merge("native", "out").lines()
    assert [line.partition(", ")[2] for line in planned if "replicas" in line] == ["to be compared"]
    assert [line.partition(", ")[2] for line in done if "replicas" in line] == ["compared, equal"]


def test_one_file_is_called_one_file(home):
    """I4."""
    assert ": 1 file, " in merge("native", "out").lines()[0]
    assert ": 2 files, " in reshard("hf", "two", tp=2).lines()[0]
