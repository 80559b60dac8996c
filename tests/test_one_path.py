"""Every output goes one way: a request, a design that is checked, a stage, one rename."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from fixtures_safety import content, refused, write_hf, write_native

from shardwright.ckpt import ReadOptions, RunOptions, merge, plan, reshard
from shardwright.ckpt.formats import writers
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
    less, order = request_without(ckpt, lost)
    made = writers()["hf"].design(order, home / "out")
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
