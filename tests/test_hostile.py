"""Broken and hostile input: one clear error that names what is wrong, and nothing is written.

"kind A" to "kind M" are the kinds of public failure reports that the project's case list orders;
a test whose docstring names one stands for it.
"""

import argparse
import contextlib
import ctypes
import json
import math
import os
import pickle
import resource
import shutil
import socket
import struct
import sys
import time
import types
import zipfile
from dataclasses import replace
from pathlib import Path

import independent
import pytest
import torch
from fixtures_safety import (
    case,
    content,
    edit_header,
    edit_json,
    edit_tensors,
    names,
    refused,
    untouched,
    write_hf,
    write_native,
    write_split,
)
from safetensors.torch import load_file, save_file

from shardwright.ckpt import (
    ReadOptions,
    RunOptions,
    convert,
    merge,
    open_checkpoint,
    reshard,
    verify,
)
from shardwright.tools import inspect_ckpt, merge_ckpt, verify_ckpt
from shardwright.tools import reshard as reshard_tool

pytestmark = pytest.mark.timeout(300)  # a pipe that is opened, a number that is counted up to

NORM = "decoder.layers.1.input_layernorm.weight"
RANK = "native/model_tp_1_pp_0.safetensors"
MOMENTS = "native/optimizer_tp_1_pp_0.safetensors"


@pytest.fixture(autouse=True)
def little_memory():
    """No claim of a file makes us take gigabytes: that would be a MemoryError here."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    statm = Path("/proc/self/statm")
    if statm.exists():
        size = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with the sources ``hf`` and ``native``; outputs go to ``to``."""
    write_hf(tmp_path / "hf")
    write_native(tmp_path / "native")
    (tmp_path / "to").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rejected(source, *words, lines=1, moments=False):
    """Every way to use a source ends in one error with these words, and writes nothing.

    ``moments``: the fault is in optimizer files, which a merge does not read.
    """
    ways = [
        lambda: reshard(source, "to/shards", tp=2, pp=1),
        lambda: verify(source),
        lambda: dict(open_checkpoint(source)),
    ]
    if not moments:
        ways += [lambda: merge(source, "to/hf"), lambda: merge(source, "to/one.safetensors")]
    with untouched(Path("to")):
        texts = [refused(way, *words) for way in ways]
    assert all(text.count("\n") < lines for text in texts) or lines == 0, texts[0]
    return texts[0]


def weights_rejected(source, *words):
    """The same for what only a job with the weights can notice."""
    with untouched(Path("to")):
        texts = [
            refused(lambda: reshard(source, "to/shards", tp=2, pp=1), *words),
            refused(lambda: merge(source, "to/hf"), *words),
        ]
    verdict = verify(source)
    assert not verdict.same
    return texts[0]


# --- rank files -------------------------------------------------------------------------------


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("kind", ["model", "optimizer"])
@pytest.mark.parametrize("rank", [(0, 0), (1, 1)])
def test_a_missing_rank_file_is_named(rank, kind, safe, home):
    """kind A, kind I: completeness by the mesh, not by what is there."""
    write_native(home / "x", safe=safe)
    path = independent.rank_files(home / "x", kind)[rank]
    path.unlink()
    said = home / "x", f"{path.name}: is missing", "tp=2 pp=2"
    rejected("x", *said, moments=kind == "optimizer")


def test_all_missing_rank_files_are_named_at_once(home):
    Path("native/model_tp_0_pp_1.safetensors").unlink()
    Path("native/model_tp_1_pp_1.safetensors").unlink()
    rejected("native", "model_tp_0_pp_1", "model_tp_1_pp_1", lines=3)


@pytest.mark.parametrize(
    "stray", ["model_tp_2_pp_0", "model_tp_0_pp_0_dp_0", "optimizer_tp_0_pp_2"]
)
def test_a_rank_file_too_many_is_named(stray, home):
    kind = stray.split("_")[0]
    shutil.copy(f"native/{kind}_tp_0_pp_0.safetensors", f"native/{stray}.safetensors")
    rejected("native", stray, "no rank of the mesh", moments=kind == "optimizer")


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("kind", ["model", "optimizer"])
@pytest.mark.parametrize("pair", [((0, 0), (1, 0)), ((0, 1), (1, 1))])
def test_two_swapped_rank_files_are_noticed(pair, kind, safe, home):
    """kind I: the wrong shard of the right shape."""
    write_native(home / "x", safe=safe)
    a, b = (independent.rank_files(home / "x", kind)[rank] for rank in pair)
    a.rename("aside")
    b.rename(a)
    Path("aside").rename(b)
    said = a.name, b.name, "swapped", '"tp": 1', '"tp": 0'
    rejected("x", *said, lines=3, moments=kind == "optimizer")


def test_two_swapped_shares_of_the_optimizer_are_noticed(home):
    write_native(home / "x", dp=2, sharded=True)
    a, b = (home / f"x/optimizer_tp_0_pp_1_dp_{d}.safetensors" for d in (0, 1))
    a.rename("aside")
    b.rename(a)
    Path("aside").rename(b)
    rejected("x", a.name, b.name, "swapped", lines=0, moments=True)


def test_swapped_files_are_noticed_without_checkpoint_json_too(home):
    write_native(home / "x", optimizer=False)
    (home / "x/checkpoint.json").unlink()
    a, b = (home / f"x/model_tp_{t}_pp_0.safetensors" for t in (0, 1))
    a.rename("aside")
    b.rename(a)
    Path("aside").rename(b)
    rejected("x", a.name, b.name, "swapped", lines=3)


@pytest.mark.parametrize("safe", [True, False])
def test_files_of_another_step_are_noticed(safe, home):
    """kind I: a torn save of two steps."""
    write_native(home / "x", safe=safe, step=1000)
    write_native(home / "y", safe=safe, step=900)
    path = independent.rank_files(home / "y", "model")[1, 0]
    shutil.copy(path, home / "x" / path.name)
    rejected("x", path.name, "says step 900", "say 1000")


@pytest.mark.parametrize("said", ['{"tp": 4, "pp": 1, "dp": 1}', "{}", "not JSON", "[" * 100_000])
def test_files_of_another_mesh_are_noticed(said, home):
    def change(table):
        table["__metadata__"]["mesh"] = said

    edit_header(home / RANK, change)
    rejected("native", Path(RANK).name, "says mesh", '"tp": 2')


def test_a_rank_in_two_spellings_is_refused(home):
    shutil.copy(RANK, "native/model_tp_01_pp_0.safetensors")
    rejected("native", "model_tp_01_pp_0", "model_tp_1_pp_0", "same rank")


def test_safetensors_and_bin_side_by_side_are_refused(home):
    path = Path("native/pytorch_model_tp_0_pp_0.bin")
    path.write_bytes(b"")
    rejected("native", path, "model_tp_0_pp_0.safetensors", "same rank")
    path.rename("native/pytorch_model_tp_9_pp_0.bin")
    rejected("native", "mixes two spellings", "pytorch_model_tp_9_pp_0.bin")


@pytest.mark.parametrize(
    "axes", ["tp_0_pp_0_zz_0", "pp_0_tp_0", "xx_0", "tp_0", "tp_0_pp_0_dp_0_dp_0"]
)
def test_unknown_axes_in_a_name_are_refused(axes, home):
    shutil.copy(RANK, f"native/model_{axes}.safetensors")
    rejected("native", f"model_{axes}")


@pytest.mark.parametrize("tp", [12, 102])
def test_ranks_are_numbers(tp, home):
    """kind I: tp_10 beside tp_2, 99 before 101."""
    made = case(heads=(tp, tp), head_dim=1, hidden=3, ffn=tp, layers=1, vocab=tp)
    write_native(home / "x", tp, 1, made=made, multiple=1)
    merge("x", "to/one.safetensors")
    independent.assert_same(load_file("to/one.safetensors"), made.state)


# --- tensors ----------------------------------------------------------------------------------


def test_an_unknown_tensor_of_a_rank_file_is_named_with_its_shape(home):
    """kind A: nothing is left out in silence."""
    edit_tensors(home / RANK, lambda t: t.update({"decoder.layers.0.extra": torch.ones(3, 2)}))
    rejected("native", RANK, "decoder.layers.0.extra: unknown tensor of shape [3, 2]")


def test_a_missing_tensor_of_a_rank_file_is_named(home):
    """kind A."""
    edit_tensors(home / RANK, lambda t: t.pop(NORM))
    rejected("native", RANK, f"{NORM}: missing")


def test_a_layer_of_another_stage_is_named(home):
    """kind E: global layer numbers in every key."""

    def change(tensors):
        tensors[NORM.replace(".1.", ".3.")] = tensors.pop(NORM)

    edit_tensors(home / RANK, change)
    said = "layers.3.input_layernorm.weight: unknown", f"{NORM}: missing"
    rejected("native", RANK, *said, lines=3)


def test_every_fault_is_listed_at_once(home):
    """kind K: all unknown keys in one go."""

    def change(tensors):
        for layer in (0, 1):
            key = f"decoder.layers.{layer}.mlp.linear_fc2.weight"
            tensors[key.replace("fc2", "fc9")] = tensors.pop(key)

    edit_tensors(home / RANK, change)
    text = rejected("native", "4 faults", lines=5)
    assert text.count("unknown tensor") == text.count("missing") == 2


@pytest.mark.parametrize("key", ["exp_avg/nowhere", "exp_max/" + NORM, NORM, "/", ""])
def test_an_unknown_optimizer_tensor_is_named(key, home):
    edit_tensors(home / MOMENTS, lambda t: t.update({key: torch.ones(16)}))
    rejected("native", MOMENTS, f"{key}: unknown optimizer tensor", moments=True)


def test_a_moment_that_one_rank_lacks_is_named(home):
    edit_tensors(home / MOMENTS, lambda t: t.pop("exp_avg/decoder.layers.1.mlp.linear_fc2.weight"))
    text = refused(lambda: reshard("native", "to/x", tp=1), "model.layers.1.mlp.down_proj.weight")
    assert "hole" in text
    assert names(Path("to")) == []


@pytest.mark.parametrize("shape", [(5,), (16, 1), (0,), ()])
def test_a_wrong_shape_is_named_with_both(shape, home):
    edit_tensors(home / RANK, lambda t: t.update({NORM: torch.ones(shape)}))
    rejected("native", RANK, NORM, f"shape {list(shape)}", "needs [16]")


@pytest.mark.parametrize("split", [False, True])
def test_unknown_missing_and_misshapen_tensors_of_hugging_face_files_are_named(split, home):
    made = case()
    del made.state["model.norm.weight"]
    made.state["model.layers.0.self_attn.q_proj.weight"] = torch.ones(16, 24)
    made.state["model.layers.9.input_layernorm.weight"] = torch.ones(16)
    if split:
        write_split(home / "x", made=made)
    else:
        import strategies

        strategies.write_hf(home / "x", made)
    rejected(
        "x", "model.norm.weight: missing (shape [16] is needed)", "q_proj.weight: shape [16, 24]",
        "[24, 16]", "model.layers.9.input_layernorm.weight: unknown tensor of shape [16]", lines=4,
    )  # fmt: skip


def test_ranks_of_two_dtypes_are_named_with_both(home):
    """kind G: no rank is cast to fit another."""
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    edit_tensors(home / RANK, lambda t: t.update({name: t[name].to(torch.bfloat16)}))
    rejected("native", name, "BF16", "F32", lines=0)


def test_a_tensor_in_two_files_is_named_with_both(home):
    write_split(home / "x")
    a, b = (home / f"x/model-0000{i}-of-00003.safetensors" for i in (1, 2))
    name = "model.norm.weight"
    for path in (a, b):
        edit_tensors(path, lambda t: t.update({name: torch.ones(16)}))
    text = rejected("x", name, lines=0)
    assert any(path.name in text for path in (a, b))


# --- replicas ---------------------------------------------------------------------------------


def drifted(folder, variant, name, change=lambda x: x.view(-1).__setitem__(1, -5.0), **options):
    """A native checkpoint whose rank (1, last) holds another ``name`` than rank 0."""
    write_native(folder, made=case(variant), **options)
    kind = "optimizer" if "/" in name else "model"
    files = independent.rank_files(folder, kind)
    for rank in sorted(files, reverse=True):
        if name in load_file(files[rank]):
            edit_tensors(files[rank], lambda t: change(t[name]))
            return files[rank].name
    raise AssertionError(f"{name} is nowhere")


@pytest.mark.parametrize(
    ("variant", "name", "fqn"),
    [
        ("llama", NORM, "model.layers.1.input_layernorm.weight"),
        ("llama", "decoder.final_layernorm.weight", "model.norm.weight"),
        ("llama-bias", "decoder.layers.2.self_attention.linear_proj.bias",
         "model.layers.2.self_attn.o_proj.bias"),
        ("llama-bias", "decoder.layers.0.mlp.linear_fc2.bias", "model.layers.0.mlp.down_proj.bias"),
        ("qwen3", "decoder.layers.0.self_attention.k_layernorm.weight",
         "model.layers.0.self_attn.k_norm.weight"),
        ("gpt2", "embedding.position_embeddings.weight", "transformer.wpe.weight"),
        ("gemma2", "decoder.layers.3.mlp.linear_fc2.post_layernorm.weight",
         "model.layers.3.post_feedforward_layernorm.weight"),
        ("llama-tied", "output_layer.weight", "model.embed_tokens.weight"),
        ("gemma", "output_layer.weight", "model.embed_tokens.weight"),
    ],
)  # fmt: skip
def test_replicas_that_differ_are_an_error_with_both_values_and_files(variant, name, fqn, home):
    """kind D, kind F: norms, row biases, positions, and the copy of a tied embedding."""
    file = drifted(home / "x", variant, name)
    text = weights_rejected("x", f"replicas differ: {fqn}: 1 element differs", "-5.0", file,
                            "max abs difference", "--replicas first")  # fmt: skip
    assert text.count("\n") == 0
    assert text.count(str(home / "x")) == 2
    first = RunOptions(compare_replicas=False)
    report = merge("x", "to/first", run=first)
    assert any("not compared" in line for line in report.lines())
    independent.assert_same(independent.load_hf(home / "to/first"), case(variant).state)


def test_moments_of_replicas_that_differ_are_an_error(home):
    """kind D."""
    drifted(home / "x", "llama", "exp_avg_sq/" + NORM)
    refused(lambda: reshard("x", "to/x", tp=1), "exp_avg_sq/model.layers.1.input_layernorm.weight")
    merge("x", "to/hf")  # which holds no moments
    assert not verify("x").same


@pytest.mark.parametrize("value", [float("nan"), -0.0])
def test_replicas_are_compared_by_their_bits(value, home):
    """kind D: a NaN is not another NaN, -0.0 is not 0.0."""

    def change(x):
        x.view(torch.int32)[4] = torch.tensor(value).view(torch.int32) + (value != value)

    made = case()
    made.state["model.norm.weight"][4] = abs(value)
    write_native(home / "x", made=made)
    path = home / "x/model_tp_1_pp_1.safetensors"
    edit_tensors(path, lambda t: change(t["decoder.final_layernorm.weight"]))
    weights_rejected("x", "model.norm.weight: 1 element differs")


@pytest.mark.parametrize("variant", ["llama-tied", "gpt2"])
def test_a_head_that_differs_from_its_tied_embedding_is_an_error(variant, home):
    """kind F: a stale head."""
    made = case(variant)
    table = "transformer.wte.weight" if variant == "gpt2" else "model.embed_tokens.weight"
    made.state["lm_head.weight"] = made.state[table].clone()
    import strategies

    strategies.write_hf(home / "same", made)
    report = merge("same", "to/same")
    assert "tied copies of the embedding: 1" in report.lines()
    made.state["lm_head.weight"][20, 3] = 0
    strategies.write_hf(home / "x", made)
    weights_rejected("x", f"replicas differ: {table}", "[20, 3]")


def test_all_replicas_that_differ_are_listed(home):
    write_native(home / "x")
    for layer in (2, 3):
        name = f"decoder.layers.{layer}.input_layernorm.weight"
        edit_tensors(home / "x/model_tp_1_pp_1.safetensors", lambda t, n=name: t[n].add_(1))
    text = weights_rejected("x", "2 faults")
    assert text.count("16 elements differ") == 2


# --- safetensors headers ----------------------------------------------------------------------


def _rows(table):
    return [row for name, row in table.items() if name != "__metadata__"]


def field(name, value):
    """Set one field of the second tensor."""

    def change(table):
        _rows(table)[1][name] = value

    return change


def raw(old, new):
    """Replace text of the header once."""

    def change(table):
        text = json.dumps(table)
        assert old in text
        return text.replace(old, new, 1)

    return change


def overlapping(table):
    a, b = _rows(table)[:2]
    a["data_offsets"], b["data_offsets"] = [
        [n - a["data_offsets"][0] for n in row["data_offsets"]] for row in (a, b)
    ]
    size = a["data_offsets"][1] - a["data_offsets"][0]
    b["data_offsets"] = [size - 4, b["data_offsets"][1] - b["data_offsets"][0] + size - 4]


def hole(table):
    last = max(_rows(table), key=lambda row: row["data_offsets"][1])
    last["data_offsets"] = [n + 8 for n in last["data_offsets"]]


def twice(table):
    """The same key twice: which of both counts is the reader's choice, so none may."""
    text = json.dumps(table)
    name, row = next((n, r) for n, r in table.items() if n != "__metadata__")
    return text[:-1] + ", " + json.dumps({name: row})[1:]


def renamed(new):
    def change(table):
        name = next(n for n in table if n != "__metadata__")
        table[new] = table.pop(name)

    return change


HEADERS = {
    "overlap": (overlapping, "overlaps"),
    "hole": (hole, ""),
    "reversed": (field("data_offsets", [8, 0]), "data_offsets [8, 0]"),
    "past the end": (field("data_offsets", [1 << 40, (1 << 40) + 64]), ""),
    "huge offsets": (field("data_offsets", [2**63, 2**63 + 64]), "whole numbers"),
    "negative offsets": (field("data_offsets", [-64, 0]), "whole numbers of at least 0"),
    "one offset": (field("data_offsets", [0]), "data_offsets [0]"),
    "three offsets": (field("data_offsets", [0, 1, 2]), "data_offsets [0, 1, 2]"),
    "offsets of text": (field("data_offsets", "ab"), "data_offsets 'ab'"),
    "fractions": (field("data_offsets", [0.0, 64.0]), "[0.0, 64.0]"),
    "booleans": (field("data_offsets", [False, True]), "[False, True]"),
    "null": (field("data_offsets", None), "None"),
    "shape too large": (field("shape", [1 << 20]), "needs 4194304 bytes"),
    "shape overflow": (field("shape", [2**62, 2**62]), "needs"),
    "shape that wraps to its size": (field("shape", [2**32, 2**32, 4]), "needs"),
    "negative shape": (field("shape", [-4, -4]), "shape [-4, -4]"),
    "shape of booleans": (field("shape", [True, 16]), "shape [True, 16]"),
    "shape of fractions": (field("shape", [16.0]), "shape [16.0]"),
    "shape of text": (field("shape", "16"), "shape '16'"),
    "empty but overflowing": (field("shape", [0, 2**62, 2**62]), ""),
    "too many dims": (field("shape", [1] * 70 + [16]), ""),
    "no shape": (lambda t: _rows(t)[1].pop("shape") and None, "needs exactly dtype"),
    "one key more": (field("stride", [1]), "needs exactly dtype"),
    "unknown dtype": (field("dtype", "F33"), "dtype 'F33'"),
    "lower case dtype": (field("dtype", "f32"), "dtype 'f32'"),
    "sub-byte dtype": (field("dtype", "F4"), "dtype 'F4'"),
    "other dtype": (field("dtype", "F64"), "of F64 needs"),
    "dtype of a number": (field("dtype", 7), "dtype 7"),
    "dtype of a list": (field("dtype", ["F32"]), "dtype ['F32']"),
    "row of text": (lambda t: t.update(dict.fromkeys(list(t)[1:2], "x")), "got 'x'"),
    "row of null": (lambda t: t.update(dict.fromkeys(list(t)[1:2])), "got None"),
    "NaN": (raw('"shape": [', '"shape": [NaN, '), "NaN"),
    "Infinity": (raw('"shape": [', '"shape": [Infinity, '), "Infinity"),
    "-Infinity": (raw('"data_offsets": [', '"data_offsets": [-Infinity, '), "-Infinity"),
    "1e999": (raw('"shape": [', '"shape": [1e999, '), "shape"),
    "a number of 5000 digits": (raw('"shape": [', '"shape": [' + "9" * 5000 + ", "), ""),
    "a key twice": (twice, "twice"),
    "a field twice": (raw('"dtype": "F32"', '"dtype": "F32", "dtype": "F32"'), "twice"),
    "a list": (lambda t: "[]", "not an object"),
    "a number": (lambda t: "5", "not an object"),
    "no JSON": (lambda t: '{"a": ', "not JSON"),
    "no text": (lambda t: b'{"a\xff": 1}', "not JSON"),
    "a byte order mark": (lambda t: "\ufeff" + json.dumps(t), "not JSON"),
    "deep": (lambda t: "[" * 100_000, "not JSON"),
    "deep objects": (lambda t: '{"a":' * 100_000, "not JSON"),
    "metadata of numbers": (lambda t: t.update(__metadata__={"a": 1}), "__metadata__"),
    "metadata of text": (lambda t: t.update(__metadata__="pt"), "__metadata__"),
    "a name that is no text": (renamed("\ud800"), ""),
    "empty": (lambda t: b"", ""),
}


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("where", ["hf", "unknown", "rank", "optimizer", "part"])
def test_a_header_that_lies_is_refused(where, name, home):
    """Names the file; nothing that it claims is allocated or read."""
    change, says = HEADERS[name]
    if where == "unknown":
        Path("hf/config.json").unlink()
    if where == "part":
        write_split(home / "x")
    path = {"hf": "hf/model.safetensors", "unknown": "hf/model.safetensors", "rank": RANK,
            "optimizer": MOMENTS, "part": "x/model-00002-of-00003.safetensors"}[where]  # fmt: skip
    edit_header(home / path, change)
    if where == "unknown":  # resharding would need a config
        with untouched(Path("to")):
            for way in (lambda: merge("hf", "to/x"), lambda: verify("hf")):
                text = refused(way, home / path, says)
        assert "\n" not in text
        return
    text = rejected(Path(path).parent, home / path, says, lines=0, moments=where == "optimizer")
    assert len(text) < 2000


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**62, 2**63, 2**64 - 1])
def test_a_header_length_that_lies_is_refused(length, home):
    path = home / RANK
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    rejected("native", path)


def test_a_key_twice_among_many_is_found_at_once(home):
    """Neither the header's length nor the place of the fault makes reading slow."""

    def change(table):
        rows = ", ".join(f'"{n}": {{}}' for n in range(50_000))
        return '{"x": {}, ' + rows + ', "x": {}}'

    edit_header(home / RANK, change)
    started = time.process_time()
    refused(lambda: verify("native"), RANK, "'x' twice")
    assert time.process_time() - started < 5


def test_long_layer_numbers_are_names_like_any_other(home):
    """No number of 5,000 digits is made of them."""
    name = "decoder.layers." + "9" * 5000 + ".input_layernorm.weight"
    edit_tensors(home / RANK, lambda t: t.update({name: torch.ones(16)}))
    rejected("native", RANK, "unknown tensor")
    Path("native/checkpoint.json").unlink()
    rejected("native", "999")


# --- truncated files --------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 100, "half", "all but one"])
@pytest.mark.parametrize(
    "path",
    ["hf/model.safetensors", "bin/pytorch_model.bin", RANK, MOMENTS,
     "native-bin/pytorch_model_tp_0_pp_1.bin", "native-bin/optimizer_tp_1_pp_0.bin",
     "dp/optimizer_tp_0_pp_0_dp_1.safetensors", "split/model-00003-of-00003.safetensors",
     "split/model.safetensors.index.json", "native/checkpoint.json", "hf/config.json",
     "native/config.json"],
)  # fmt: skip
def test_a_truncated_file_is_named(path, keep, home):
    """kind I: zero-byte and torn files."""
    write_hf(home / "bin", binary=True)
    write_split(home / "split")
    write_native(home / "native-bin", safe=False)
    write_native(home / "dp", dp=2, sharded=True)
    file = home / path
    size = file.stat().st_size
    os.truncate(file, {"half": size // 2, "all but one": size - 1}.get(keep, keep))
    rejected(file.parent, file, lines=0, moments="optimizer" in path)


@pytest.mark.parametrize("path", ["hf/model.safetensors", RANK, "bin/pytorch_model.bin"])
def test_a_file_with_bytes_too_many_is_named(path, home):
    write_hf(home / "bin", binary=True)
    with (home / path).open("ab") as file:
        file.write(b"\0" * 8)
    rejected((home / path).parent, home / path)


# --- checkpoint.json --------------------------------------------------------------------------

TABLES = {
    "newer version": ({"format_version": "2.0"}, "format_version 2.0"),
    "version of a number": ({"format_version": 2}, "format_version 2"),
    "version of null": ({"format_version": None}, "format_version"),
    "version of a list": ({"format_version": ["1"]}, "format_version"),
    "mesh of a list": ({"mesh": [2, 2]}, "mesh is [2, 2]"),
    "mesh of zero": ({"mesh": {"tp": 0, "pp": 2}}, "mesh is"),
    "negative mesh": ({"mesh": {"tp": -2, "pp": 2}}, "mesh is"),
    "mesh of booleans": ({"mesh": {"tp": True, "pp": 2}}, "mesh is"),
    "mesh of text": ({"mesh": {"tp": "2", "pp": 2}}, "mesh is"),
    "mesh of fractions": ({"mesh": {"tp": 2.0, "pp": 2}}, "mesh is"),
    "unknown axis": ({"mesh": {"tp": 2, "pp": 2, "zz": 1}}, "unknown axes ['zz']"),
    "smaller mesh": ({"mesh": {"tp": 2, "pp": 1}}, "no rank of the mesh"),
    "larger mesh": ({"mesh": {"tp": 4, "pp": 2}}, "is missing"),
    "huge mesh": ({"mesh": {"tp": 10**9, "pp": 10**9}}, "tp is 1000000000"),
    "huge dp": ({"mesh": {"tp": 2, "pp": 2, "dp": 10**12}}, ""),
    "stages of text": ({"pp_layers": "22"}, "pp_layers is '22'"),
    "too few stages": ({"pp_layers": [4]}, "pp_layers [4]"),
    "too many stages": ({"pp_layers": [2, 1, 1]}, "pp_layers [2, 1, 1]"),
    "too few layers": ({"pp_layers": [2, 1]}, "3 layers"),
    "negative layers": ({"pp_layers": [5, -1]}, "5, -1"),
    "layers of booleans": ({"pp_layers": [True, 3]}, "pp_layers is"),
    "layers of fractions": ({"pp_layers": [2.0, 2.0]}, "pp_layers is"),
    "huge layers": ({"pp_layers": [10**30, 4 - 10**30]}, ""),
    "moved layers": ({"pp_layers": [3, 1]}, "missing"),
    "layers listed twice": ({"pp_layers": [[0, 1], [1, 2]]}, "pp_layers [[0, 1], [1, 2]]"),
    "layers listed and counted": ({"pp_layers": [[0, 1], 2]}, "pp_layers is [[0, 1], 2]"),
    "layers listed as booleans": ({"pp_layers": [[False, True], [2, 3]]}, "pp_layers is"),
    "stages exchanged": ({"pp_layers": [[2, 3], [0, 1]]}, "missing"),
    "layers of lists": ({"pp_layers": [[[0]], [1, 2, 3]]}, "pp_layers is"),
    "no stages": ({"pp_layers": []}, "pp_layers []"),
    "another family": ({"family": "gpt2"}, "family 'gpt2'"),
    "family of a list": ({"family": []}, "family []"),
    "unknown tag": ({"layout": {"zkv": "per_group"}}, "unknown layout tag 'zkv'"),
    "unknown packing": ({"layout": {"qkv": "per_moon"}}, "qkv='per_moon'"),
    "packing of a number": ({"layout": {"qkv": 0}}, "qkv=0"),
    "packing of a list": ({"layout": {"qkv": ["flat"]}}, "qkv=['flat']"),
    "other norm": ({"layout": {"norm": "zero_centered"}}, "norm='zero_centered'"),
    "interleaved rotary": ({"layout": {"rotary": "interleaved"}}, "rotary='interleaved'"),
    "layout of text": ({"layout": "flat"}, "layout is 'flat'"),
    "no vocabulary": ({"vocab_size": 0}, "vocab_size is 0"),
    "negative vocabulary": ({"vocab_size": -21}, "vocab_size is -21"),
    "vocabulary of booleans": ({"vocab_size": True}, "vocab_size is True"),
    "vocabulary of text": ({"vocab_size": "21"}, "vocab_size is '21'"),
    "vocabulary of fractions": ({"vocab_size": 21.0}, "vocab_size is 21.0"),
    "huge vocabulary": ({"vocab_size": 10**12}, "vocab_size is 1000000000000, "),
    "dtype of a list": ({"dtype": ["bfloat16"]}, "dtype ['bfloat16'] is no text"),
    "dtype of null": ({"dtype": None}, "dtype None is no text"),
    "unknown dtype": ({"dtype": "fp12"}, "dtype 'fp12'"),
    "family of null": ({"family": None}, "family None"),
    "version of a fraction": ({"format_version": 1.0}, "format_version 1.0"),
    "padded vocabulary of text": ({"padded_vocab_size": "24"}, "padded_vocab_size is '24'"),
    "padded vocabulary of zero": ({"padded_vocab_size": 0}, "padded_vocab_size is 0"),
    "step of text": ({"step": "1000"}, "step"),
    "step of fractions": ({"step": 1000.5}, "step"),
    "negative step": ({"step": -1}, "step"),
    "step of booleans": ({"step": True}, "step"),
    "multiple of text": ({"make_vocab_size_divisible_by": "4"}, "make_vocab_size_divisible_by"),
    "multiple of zero": ({"make_vocab_size_divisible_by": 0}, "make_vocab_size_divisible_by"),
    "multiple of booleans": ({"make_vocab_size_divisible_by": True}, "_divisible_by is True"),
    "files of a list": ({"files": ["a"]}, "files"),
    "file of a number": ({"files": {"a": 5}}, "'a'"),
    "size of text": ({"files": {"config.json": {"size": "5"}}}, "config.json"),
    "size of booleans": ({"files": {"config.json": {"size": True}}}, "config.json"),
    "another size": ({"files": {"config.json": {"size": 5}}}, "says 5 bytes"),
    "a file that is gone": ({"files": {"gone": {"size": 5}}}, "gone: is missing"),
    "a digest of a number": ({"files": {"config.json": {"size": 5, "xxh3_128": 5}}}, "config.json"),
    "files outside": ({"files": {"../hf/config.json": {"size": 0}}}, "../hf/config.json"),
    "files elsewhere": ({"files": {"/etc/passwd": {"size": 0}}}, "/etc/passwd"),
    "files with a NUL": ({"files": {"a\0b": {"size": 0}}}, "files"),
    "files that are no text": ({"files": {"\ud800": {"size": 0}}}, "files"),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_a_checkpoint_json_that_lies_is_refused(name, home):
    changes, says = TABLES[name]
    edit_json(home / "native/checkpoint.json", **changes)
    text = rejected("native", home / "native", says, lines=0)
    assert len(text) < 4000


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_json_does_not_have_are_refused(number, home):
    """kind H: what is copied on must be readable there."""
    path = home / "native/checkpoint.json"
    path.write_text(path.read_text()[:-1] + f', "extra": [{number}]}}')
    rejected("native", path, number)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("source", ["native", "hf"])
def test_such_numbers_of_a_config_travel_where_no_size_is_meant(source, number, home):
    """Python writes them into config.json, and transformers reads them."""
    path = home / source / "config.json"
    text = path.read_text()[:-1] + f', "extra": [{number}]}}'
    path.write_text(text)
    merge(source, "to/same")
    assert Path("to/same/config.json").read_text() == text
    reshard(source, "to/cast", tp=2, pp=1, dtype="fp16", weights_only=True)
    want = {**json.loads(text), "torch_dtype": "float16"}
    assert repr(json.loads(Path("to/cast/config.json").read_text())) == repr(want)
    config = json.loads(text)
    path.write_text(json.dumps({**config, "num_hidden_layers": float(number)}))
    rejected(source, path, "num_hidden_layers")


@pytest.mark.parametrize("number", [65537, 10**9, 10**30])
def test_a_number_of_ranks_beyond_reason_is_refused_at_once(number, home):
    with untouched(Path("to")):
        refused(lambda: reshard("native", "to/x", dp=number), f"--dp {number}: the limit is 65536")
        refused(lambda: reshard("native", "to/x", tp=number), f"--tp {number}")
        refused(lambda: reshard("native", "to/x", pp=number), f"--pp {number}")


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_state_that_json_cannot_hold_is_refused_before_anything_is_written(
    number, home, monkeypatch
):
    read = convert.read_checkpoint

    def spoiled(*args):
        found = read(*args)
        state = {**found.manifest.state, "schedule": {"lr": number}}
        return replace(found, manifest=replace(found.manifest, state=state))

    monkeypatch.setattr(convert, "read_checkpoint", spoiled)
    with untouched(Path("to")):
        for dry in (True, False):
            run = RunOptions(dry_run=dry)
            refused(
                lambda run=run: reshard("native", "to/x", tp=1, run=run),
                "checkpoint.json: schedule cannot",
            )


def test_a_linked_folder_that_is_left_behind_is_said(home):
    (home / "more").mkdir()
    (home / "more/notes.txt").write_text("x")
    for source in ("hf", "native"):
        (home / source / "extra").symlink_to(home / "more")
        report = merge(source, f"to/{source}")
        assert f"{home / source / 'extra'}: a linked folder, not copied" in report.notes
        assert not Path(f"to/{source}/extra").exists()


def test_a_petabyte_of_one_repeated_element_is_not_compared_for_ever(home):
    torch.save({"x": torch.ones(1).expand(1 << 48)}, "x.bin")
    torch.save({"x": torch.ones(1).expand(1 << 48)}, "y.bin")
    refused(lambda: verify("x.bin", "y.bin"), "x.bin: x: 4 bytes stand for", "contiguous()")
    refused(lambda: verify("x.bin"), "x.bin: x: 4 bytes stand for", "contiguous()")
    torch.save({"x": torch.ones(1).expand(1 << 10)}, "z.bin")
    assert verify("z.bin", "z.bin").same


@pytest.mark.parametrize("depth", [150, 400, 900, 3000, 100_000])
@pytest.mark.parametrize("path", ["native/checkpoint.json", "native/config.json", "hf/config.json"])
def test_deep_json_is_refused(path, depth, home):
    text = (home / path).read_text()
    (home / path).write_text(text[:-1] + ', "data": ' + "[" * depth + "]" * depth + "}")
    rejected((home / path).parent, home / path)


@pytest.mark.parametrize("text", ["", "[]", "null", '"x"', "{", "{}}", "\xff", "\0"])
@pytest.mark.parametrize("path", ["native/checkpoint.json", "native/config.json", "hf/config.json"])
def test_json_that_is_no_object_is_refused(path, text, home):
    (home / path).write_bytes(text.encode("latin-1"))
    rejected((home / path).parent, home / path)


def test_state_that_looks_odd_is_kept_as_it_is(home):
    """Schedule, cursor and values of groups are the trainer's; nothing of them is touched."""
    state = {"schedule": {"lr": [1e-300, -0.0, 2**70], "\u2603\ud800": None, "deep": [[[[{}]]]]},
             "data": "text", "param_groups": [{"betas": [0.9, 0.999]}, {"odd": True}]}  # fmt: skip
    edit_json(home / "native/checkpoint.json", **state)
    reshard("native", "to/x", tp=1, pp=2)
    said = json.loads(Path("to/x/checkpoint.json").read_text())
    assert {key: said[key] for key in state} == state
    assert verify("native", "to/x").same


def test_param_groups_that_are_no_groups_are_refused(home):
    edit_json(home / "native/checkpoint.json", param_groups=[{"betas": [0.9, 0.999]}, True])
    rejected(home / "native", "param_groups holds values that are not groups")


# --- config.json ------------------------------------------------------------------------------

CONFIGS = {
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "unknown model": ({"model_type": "mystery"}, "'mystery' has no family table"),
    "no model": ({"model_type": ...}, "model_type None"),
    "model of a list": ({"model_type": []}, "model_type []"),
    "model of an object": ({"model_type": {}}, "model_type {}"),
    "model of a number": ({"model_type": 5}, "model_type 5"),
    "no layers": ({"num_hidden_layers": ...}, "needs num_hidden_layers"),
    "no hidden size": ({"hidden_size": None}, "needs hidden_size"),
    "text": ({"hidden_size": "16"}, "hidden_size is '16'"),
    "fraction": ({"hidden_size": 16.0}, "hidden_size is 16.0"),
    "zero": ({"num_attention_heads": 0}, "num_attention_heads is 0"),
    "negative": ({"num_key_value_heads": -2}, "num_key_value_heads is -2"),
    "boolean": ({"num_key_value_heads": True}, "num_key_value_heads is True"),
    "list": ({"vocab_size": [21]}, ""),
    "flag of text": ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
    "flag of a number": ({"attention_bias": 0}, "attention_bias is 0"),
    "uneven heads": ({"head_dim": ..., "num_attention_heads": 5}, "not whole"),
    "wider": ({"intermediate_size": 32}, "32"),
    "other heads": ({"num_attention_heads": 2}, "shape"),
    "fewer layers": ({"num_hidden_layers": 2}, "layers"),
    "more layers": ({"num_hidden_layers": 6}, "layers"),
    "more stages than layers": ({"num_hidden_layers": 1}, "layers"),
    "huge layers": ({"num_hidden_layers": 10**15}, ""),
    "huge KV heads": ({"num_key_value_heads": 10**9}, ""),
    "huge heads": ({"num_attention_heads": 10**9, "num_key_value_heads": 10**9}, ""),
    "huge head": ({"head_dim": 2**61}, ""),
    "a number beyond 64 bits": ({"hidden_size": 10**40}, ""),
    "tied": ({"tie_word_embeddings": True}, ""),
}


@pytest.mark.parametrize("source", ["hf", "native", "foreign"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_lies_is_refused(name, source, home):
    """kind H: sizes come from the config and are held against the tensors."""
    changes, says = CONFIGS[name]
    if source == "foreign":
        made = case()
        ranks = independent.stored(made.config, made.state, 2, 2, multiple=4)
        independent.write_foreign(home / "foreign", ranks)
        shutil.copy("hf/config.json", "foreign/config.json")
    edit_json(home / source / "config.json", **changes)
    if name == "tied":  # the head is then a copy of the embedding, and is none
        weights_rejected(source, "replicas differ", "model.embed_tokens.weight: 336 elements")
        return
    if source == "hf" and "model_type" in changes:  # may pass as it is, but not as shards
        refused(lambda: reshard("hf", "to/x", tp=1), home / "hf", says)
        return
    if source == "hf" and says == "layers":
        says = "model.layers."
    text = rejected(source, home / source, says, lines=0)
    assert len(text) < 6000


def test_shards_without_a_config_say_which_option_names_one(home):
    """kind H."""
    Path("native/config.json").unlink()
    rejected("native", home / "native", "has no config.json", "--config")
    assert verify("native", read=ReadOptions(Path("hf"))).same


@pytest.mark.parametrize("config", ["nowhere", "native/checkpoint.json", "to", "pipe", "loop"])
def test_a_config_option_that_is_none_is_refused(config, home):
    os.mkfifo("pipe")
    Path("loop").symlink_to("loop")
    with untouched(Path("to")):
        refused(lambda: merge("native", "to/x", config=config))
        refused(lambda: verify("native", read=ReadOptions(Path(config))))


def test_what_travels_along_is_the_same_to_the_byte(home):
    """kind H: nothing of a config is rewritten unless a cast is asked for."""
    text = '{"rope_theta": 500000.0,\r\n "rope_scaling": {"factor": 8, "x": [1e400, null]},'
    text = text.replace("1e400", "1e40") + Path("hf/config.json").read_text()[1:]
    Path("hf/config.json").write_bytes(text.encode())
    reshard("hf", "to/x", tp=2, pp=2)
    merge("to/x", "to/y")
    for name in ("to/x", "to/y"):
        assert Path(name, "config.json").read_bytes() == text.encode()
    merge("to/x", "to/z", dtype="bf16")
    cast = json.loads(Path("to/z/config.json").read_text())
    assert cast == {**json.loads(text), "torch_dtype": "bfloat16"}


# --- an index ---------------------------------------------------------------------------------

INDICES = {
    "parent": ("../../etc/passwd", "'../../etc/passwd'"),
    "parent alone": ("..", "'..'"),
    "itself": (".", "'.'"),
    "nothing": ("", "''"),
    "absolute": ("/etc/passwd", "'/etc/passwd'"),
    "below": ("sub/model-00001-of-00003.safetensors", "sub/"),
    "backslash": ("..\\x.safetensors", "x.safetensors"),
    "a NUL": ("model\0.safetensors", "index.json"),
    "no text": ("\ud800.safetensors", "index.json"),
    "too long": ("x" * 5000 + ".safetensors", "xxx"),
    "a number": (5, "5"),
    "null": (None, "None"),
    "a list": (["model-00001-of-00003.safetensors"], "model-00001"),
    "an object": ({}, "{}"),
    "a missing file": ("model-00009-of-00003.safetensors", "is missing"),
    "a folder": ("folder.safetensors", "folder.safetensors"),
    "a pipe": ("pipe.safetensors", "pipe.safetensors"),
    "a socket": ("socket.safetensors", "socket.safetensors"),
    "a loop": ("loop.safetensors", "loop.safetensors"),
    "a device": ("null.safetensors", "null.safetensors"),
    "the index": ("model.safetensors.index.json", "index.json"),
    "the config": ("config.json", "config.json"),
}


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("name", INDICES)
def test_an_index_that_names_no_part_is_refused(name, binary, home, monkeypatch):
    """Nothing outside of the folder is opened, and nothing that would wait for a writer."""
    value, says = INDICES[name]
    write_split(home / "x", binary=binary)
    index = next((home / "x").glob("*.index.json"))
    for kind in ("folder", "pipe", "socket", "loop", "null"):
        path = home / "x" / f"{kind}.safetensors"
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            monkeypatch.chdir(home / "x")
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(path.name)
            monkeypatch.chdir(home)
        else:
            path.symlink_to(path.name if kind == "loop" else "/dev/null")
    table = json.loads(index.read_text())["weight_map"]
    table["model.norm.weight"] = value
    edit_json(index, weight_map=table)
    text = rejected("x", home / "x", lines=0)
    assert says in text


@pytest.mark.parametrize(
    "table", [..., None, [], {}, "x", 5, {"model.norm.weight": "model-00001-of-00003.safetensors"}]
)
def test_an_index_without_a_map_is_refused(table, home):
    write_split(home / "x")
    edit_json(home / "x/model.safetensors.index.json", weight_map=table)
    rejected("x", home / "x", "index", lines=0)


def test_index_and_parts_must_name_the_same_tensors(home):
    """kind A: an index that lists keys of no file, and files with keys of no index."""
    write_split(home / "x")
    index = home / "x/model.safetensors.index.json"
    table = json.loads(index.read_text())["weight_map"]
    part = table.pop("model.norm.weight")
    other = table["model.embed_tokens.weight"]
    table["model.layers.7.ghost"] = other
    edit_json(index, weight_map=table)
    rejected("x", "index and files disagree", f"{other}: lacks model.layers.7.ghost",
             f"{part}: holds model.norm.weight", lines=4)  # fmt: skip


@pytest.mark.parametrize("what", ["loop", "dangling", "pipe", "folder", "missing"])
def test_an_index_that_is_no_file_is_refused(what, home):
    write_split(home / "x")
    index = home / "x/model.safetensors.index.json"
    index.unlink()
    for part in (home / "x").glob("model-*"):
        part.rename(home / part.name) if what != "missing" else None
    place(index, what)
    rejected("x", home / "x")


# --- what is no file --------------------------------------------------------------------------


def place(path, what):
    """Put something that is no regular file at ``path``."""
    if what == "loop":
        path.symlink_to(path.name)
    elif what == "dangling":
        path.symlink_to("nowhere")
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "linked pipe":
        os.mkfifo(path.parent.parent / "the-pipe")
        path.symlink_to(path.parent.parent / "the-pipe")
    elif what == "device":
        path.symlink_to("/dev/zero")
    elif what == "folder":
        path.mkdir()


@pytest.mark.parametrize("what", ["loop", "dangling", "pipe", "linked pipe", "device", "folder"])
@pytest.mark.parametrize(
    "path",
    ["hf/model.safetensors", "bin/pytorch_model.bin", RANK, MOMENTS,
     "native-bin/pytorch_model_tp_0_pp_0.bin", "native-bin/optimizer_tp_1_pp_1.bin",
     "split/model-00002-of-00003.safetensors"],
)  # fmt: skip
def test_weights_that_are_no_file_are_refused_and_not_waited_for(path, what, home):
    write_hf(home / "bin", binary=True)
    write_split(home / "split")
    write_native(home / "native-bin", safe=False)
    file = home / path
    file.unlink()
    place(file, what)
    rejected(file.parent, file.parent, lines=0, moments="optimizer" in path)


@pytest.mark.parametrize("what", ["loop", "dangling", "pipe", "linked pipe", "device", "folder"])
@pytest.mark.parametrize("path", ["native/checkpoint.json", "native/config.json"])
def test_tables_that_are_no_file_are_refused_and_not_waited_for(path, what, home):
    """The folder is then foreign, or lacks a config; neither passes in silence."""
    file = home / path
    file.unlink()
    place(file, what)
    rejected("native", home / "native", lines=0)


@pytest.mark.parametrize("what", ["loop", "dangling"])
def test_a_link_to_nothing_beside_the_weights_is_named(what, home):
    """kind H: a tokenizer that cannot be copied is not left out in silence."""
    place(home / "hf/tokenizer.json", what)
    rejected("hf", home / "hf/tokenizer.json")


@pytest.mark.parametrize("what", ["pipe", "device", "linked pipe"])
def test_what_is_no_file_beside_the_weights_is_not_waited_for(what, home):
    place(home / "hf/tokenizer.json", what)
    merge("hf", "to/x")
    assert "tokenizer.json" not in names(Path("to/x"))


def test_a_loop_of_folders_is_not_walked(home):
    Path("hf/again").symlink_to(".")
    Path("hf/sub").mkdir()
    Path("hf/sub/up").symlink_to("..")
    merge("hf", "to/x")
    assert verify("hf", "to/x").same


@pytest.mark.parametrize(
    "path", ["loop", "/dev/null", "/dev/zero", "pipe", "nowhere", "to", "socket", "hf/config.json",
             "x" * 300, "a\0b", "~nobody-of-that-name/x"]
)  # fmt: skip
def test_a_source_that_is_no_checkpoint_is_refused(path, home):
    Path("loop").symlink_to("loop")
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")
    rejected(path)


@contextlib.contextmanager
def ordinary_rights():
    """Root for a while without the right to pass over permissions (this thread and its own)."""
    if os.geteuid():
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    head = struct.pack("<Ii", 0x20080522, 0)
    saved = ctypes.create_string_buffer(24)
    if not hasattr(libc, "capget") or libc.capget(head, saved):
        pytest.skip("cannot give up root's rights")
    words = list(struct.unpack("<6I", saved.raw))
    words[0] &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    if libc.capset(head, struct.pack("<6I", *words)):
        pytest.skip("cannot give up root's rights")
    try:
        yield
    finally:
        assert libc.capset(head, saved.raw) == 0


@pytest.mark.parametrize(
    "path", ["hf/model.safetensors", "hf", "hf/config.json", RANK, MOMENTS, "native",
             "native/checkpoint.json", "bin/pytorch_model.bin"]
)  # fmt: skip
def test_what_may_not_be_read_is_named(path, home):
    write_hf(home / "bin", binary=True)
    file = home / path
    mode = file.stat().st_mode
    file.chmod(0)
    try:
        with ordinary_rights():
            source = path.partition("/")[0]
            refused(lambda: reshard(source, "to/x", tp=1), file, "Permission denied")
            refused(lambda: verify(source), file, "Permission denied")
    finally:
        file.chmod(mode)
    assert names(Path("to")) == []


def test_a_side_file_that_may_not_be_read_is_named_and_nothing_is_written(home):
    Path("hf/tokenizer.json").write_text("{}")
    Path("hf/tokenizer.json").chmod(0)
    with ordinary_rights(), untouched(Path("to")):
        refused(lambda: merge("hf", "to/x"), "tokenizer.json", "Permission denied")


def test_a_folder_that_may_not_be_written_is_named(home):
    Path("to").chmod(0o500)
    with ordinary_rights(), untouched(Path("to")):
        refused(lambda: merge("hf", "to/x"), "to/.x.partial", "Permission denied")


# --- latest -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", ".", "..", "../native", "/etc", "nowhere", "a\0b", "x" * 300, "sub/native", "\xff",
             "file", "loop"]
)  # fmt: skip
def test_a_latest_that_names_no_folder_beside_it_is_refused(text, home):
    """kind I: a tracker that points nowhere."""
    Path("save").mkdir()
    Path("save/latest").write_bytes(text.encode("latin-1"))
    Path("save/file").write_text("")
    Path("save/loop").symlink_to("loop")
    rejected("save", "latest")


def test_latest_wins_over_a_newer_folder(home):
    """kind I: a durable step 10 beside an unfinished step 20."""
    write_native(home / "save/checkpoint-10", step=10)
    Path("save/checkpoint-20").mkdir()
    Path("save/latest").write_text("checkpoint-10\n")
    assert open_checkpoint("save").step == 10
    Path("save/latest").write_text("checkpoint-20\n")
    rejected("save", "checkpoint-20", "no checkpoint here")


@pytest.mark.parametrize(
    ("name", "says"),
    [("latest_checkpointed_iteration.txt", "iter_0000001: is not there"),
     ("mp_rank_00", "no checkpoint here"), (".metadata", "a checkpoint of PyTorch's own")],
)  # fmt: skip
def test_the_format_found_is_named_where_it_is_not_read(name, says, home):
    """kind I."""
    Path("x").mkdir()
    Path("x", name).write_text("1")
    rejected("x", home / "x", says)


# --- pickles ----------------------------------------------------------------------------------


class Call:
    """Pickles as a call of a function."""

    def __init__(self, func, *args):
        self.call = func, args

    def __reduce__(self):
        return self.call


CALLS = {
    "os.system": Call(os.system, "touch pwned"),
    "eval": Call(eval, "open('pwned', 'w')"),
    "exec": Call(exec, "open('pwned', 'w')"),
    "open": Call(open, "pwned", "w"),
    "getattr": Call(getattr, Call(__import__, "os"), "system"),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("where", ["hf", "model", "optimizer", "foreign", "part"])
def test_a_pickle_that_calls_something_is_refused_and_nothing_runs(where, name, home):
    """kind L: no code of a checkpoint ever runs."""
    if where == "hf":
        write_hf(home / "x", binary=True)
    elif where == "part":
        write_split(home / "x", binary=True)
    elif where == "foreign":
        made = case()
        ranks = independent.stored(made.config, made.state, 2, 2, multiple=4)
        independent.write_foreign(home / "x", ranks)
        shutil.copy("hf/config.json", "x/config.json")
    else:
        write_native(home / "x", safe=False)
    pattern = {
        "hf": "pytorch_model.bin",
        "part": "*-00002-of-*.bin",
        "foreign": "*_tp_0_pp_1.bin",
        "model": "pytorch_model_tp_1_pp_0.bin",
        "optimizer": "optimizer_tp_1_pp_0.bin",
    }
    (path,) = (home / "x").glob(pattern[where])
    tensors = torch.load(path, weights_only=True)
    for bad in ({**tensors, "x": CALLS[name]}, {CALLS[name]: 1}, CALLS[name]):
        torch.save(bad, path)
        rejected("x", path, "nothing was executed", moments=where == "optimizer")
    path.write_bytes(pickle.dumps(CALLS[name]))
    rejected("x", path, "bare pickle", moments=where == "optimizer")
    assert not Path("pwned").exists()


def test_a_zip_bomb_is_refused(home):
    """A pickle of 64 GiB of zeros that takes 64 MB of disk would be; here one of 1 GiB."""
    write_hf(home / "x", binary=True)
    path = home / "x/pytorch_model.bin"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("archive/data.pkl", "w", force_zip64=True) as file:
            for _ in range(64):
                file.write(bytes(1 << 20))
        archive.writestr("archive/version", "3\n")
    rejected("x", path, "compressed")


def test_objects_of_absent_libraries_are_read_past(home, monkeypatch):
    """kind L: arguments pickled beside the weights, and the library that they need is absent."""
    module = types.ModuleType("megatron.core.enums")
    module.ModelType = type("ModelType", (), {"__module__": "megatron.core.enums"})
    made = case()
    ranks = independent.stored(made.config, made.state, 2, 1, multiple=4)
    Path("x").mkdir()
    shutil.copy("hf/config.json", "x/config.json")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "megatron.core.enums", module)
        for (t, p), tensors in ranks.items():
            args = argparse.Namespace(tp=2, kind=module.ModelType(), dtype=torch.bfloat16)
            whole = {"model": tensors, "args": args, "iteration": 7, "rng_state": [(1, b"x")]}
            torch.save(whole, f"x/pytorch_model_tp_{t}_pp_{p}.bin")
    merge("x", "to/y")
    independent.assert_same(independent.load_hf(home / "to/y"), made.state)


@pytest.mark.parametrize("binary", [True, False])
def test_a_tensor_of_a_few_bytes_that_claims_a_petabyte_is_refused(binary, home):
    """Strides of 0 are legal in a .bin file; no disk holds what is then to be written."""
    Path("x").mkdir()
    torch.save({"x": torch.ones(1).expand(1 << 48)}, "x/pytorch_model.bin")
    if not binary:
        Path("x/pytorch_model.bin").unlink()
        save_file({"x": torch.ones(1)}, "x/model.safetensors")
        edit_header(home / "x/model.safetensors", lambda t: t["x"].update(shape=[1 << 48]))
    with untouched(Path("to")):
        said = "4 bytes stand for 1125899906842624" if binary else "needs 1125899906842624"
        refused(lambda: merge("x", "to/y"), said)
        refused(lambda: merge("x", "to/y.bin"), said)


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06" + bytes(18), b"\x80\x02}.", b"not a zip"])
def test_bin_files_of_another_kind_are_refused(content, home):
    write_native(home / "x", safe=False)
    path = home / "x/pytorch_model_tp_0_pp_0.bin"
    path.write_bytes(content)
    rejected("x", path)


# --- legal, and kept --------------------------------------------------------------------------


def odd_tensors():
    """Tensors that other tools trip over, all legal."""
    fused = torch.arange(24.0).reshape(6, 4)
    return {
        "scalar": torch.tensor(7.0),
        "empty": torch.empty(0),
        "empty.2": torch.empty(3, 0, 2, dtype=torch.bfloat16),
        "half": torch.tensor([1.5], dtype=torch.float16),
        "one": torch.ones(1, 1, 1, dtype=torch.int8),
        "ids": torch.arange(5),
        "mask": torch.tensor([True, False]),
        "float8": torch.arange(6, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "complex": torch.tensor([1 + 2j, 3 - 4j]),
        "a/b": fused[:, 1:3],
        "\u2603 name": fused.t(),
        "": torch.tensor(3, dtype=torch.uint8),
        "not a number": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


@pytest.mark.parametrize("config", [None, {"model_type": "mystery"}])
@pytest.mark.parametrize("binary", [False, True])
def test_odd_tensors_pass_through_every_way(binary, config, home):
    """kind A, kind M: scalars, empty ones, views, any dtype."""
    tensors = odd_tensors()
    Path("x").mkdir()
    if config:
        Path("x/config.json").write_text(json.dumps(config))
    if binary:
        torch.save(tensors, "x/pytorch_model.bin")
    else:
        save_file({k: t.contiguous() for k, t in tensors.items()}, "x/model.safetensors")
    merge("x", "to/folder")
    merge("x", "to/one.safetensors")
    merge("x", "to/one.bin")
    merge("x", "to/parts", max_shard_size=16, safe_serialization=not binary)
    for name in ("folder", "one.safetensors", "one.bin", "parts"):
        assert verify("x", f"to/{name}").same
        independent.assert_same(independent.load_hf(home / "to" / name), tensors)
        assert verify(f"to/{name}").same
    opened = open_checkpoint("to/parts")
    assert all(independent.same_bytes(opened[name].torch(), t) for name, t in tensors.items())


def test_unaligned_offsets_and_a_loose_header_are_read(home):
    """kind M: what older writers made, down to missing metadata."""
    data = torch.arange(11, dtype=torch.float32)
    table = {
        "b": {"shape": [8], "data_offsets": [3, 35], "dtype": "F32"},
        "a": {"dtype": "U8", "data_offsets": [0, 3], "shape": [3]},
        "c": {"dtype": "F64", "shape": [], "data_offsets": [35, 43]},
    }
    head = ("\n " + json.dumps(table, indent=1) + "   ").encode()
    assert len(head) % 8
    body = bytes([1, 2, 3]) + data[:8].numpy().tobytes() + struct.pack("<d", 2.5)
    Path("x").mkdir()
    Path("x/model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + body)
    merge("x", "to/y")
    independent.assert_same(
        load_file("to/y/model.safetensors"),
        {"a": torch.tensor([1, 2, 3], dtype=torch.uint8), "b": data[:8],
         "c": torch.tensor(2.5, dtype=torch.float64)},
    )  # fmt: skip
    merge("x", "to/z.bin", dtype="bf16")
    assert torch.equal(torch.load("to/z.bin")["b"], data[:8].to(torch.bfloat16))
    assert independent.load_metadata(home / "to/y/model.safetensors") == {"format": "pt"}


def test_a_file_without_tensors_is_a_file(home):
    Path("x").mkdir()
    save_file({}, "x/model.safetensors")
    merge("x", "to/y")
    merge("x", "to/y.bin")
    assert load_file("to/y/model.safetensors") == torch.load("to/y.bin") == {}


def test_rank_files_with_unaligned_offsets_are_read(home):
    for path in Path("native").glob("model*"):
        edit_header(path, lambda table: json.dumps(table) + " " * (1 + len(json.dumps(table)) % 2))
    merge("native", "to/y")
    independent.assert_same(independent.load_hf(home / "to/y"), case().state)


def test_names_that_are_no_text_are_kept_and_shown(home, capsys):
    """File names are bytes; messages show what cannot be printed."""
    odd = os.fsdecode(b"caf\xe9\xff")
    Path("hf").rename(odd)
    Path(odd, odd).write_bytes(b"side")
    assert reshard_tool.main([odd, "--tp", "2", "--pp", "1", "--output", f"to/{odd}"]) == 0
    assert Path("to", odd, odd).read_bytes() == b"side"
    assert merge_ckpt.main([f"to/{odd}", "--output", f"to/{odd}-hf", "--verify"]) == 0
    assert verify_ckpt.main([odd, f"to/{odd}-hf"]) == 0
    assert inspect_ckpt.main([f"to/{odd}"]) == 0
    assert inspect_ckpt.main([f"to/{odd}", "--json"]) == 0
    assert content(Path("to", odd + "-hf", odd)) == b"side"
    assert "caf" in capsys.readouterr().out
    assert merge_ckpt.main([f"to/{odd}", "--output", f"to/{odd}-hf"]) == 1
    assert "exists" in capsys.readouterr().err


# --- at the command line ----------------------------------------------------------------------


def break_step(home):
    edit_json(home / "native/checkpoint.json", step=5)


def break_rank(home):
    (home / RANK).unlink()


def break_header(home):
    edit_header(home / RANK, field("data_offsets", [8, 0]))


def break_pipe(home):
    (home / RANK).unlink()
    os.mkfifo(home / RANK)


def break_folder(home):
    (home / RANK).unlink()
    (home / RANK).mkdir()


def break_replica(home):
    edit_tensors(home / RANK, lambda t: t[NORM].add_(1))


@pytest.mark.parametrize(
    "damage", [break_step, break_rank, break_header, break_pipe, break_folder, break_replica],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_a_command_says_it_in_one_error_and_ends_with_code_1_or_2_of_verify(damage, home, capsys):
    damage(home)
    calls = [
        (reshard_tool, ["native", "--tp", "1", "--pp", "1", "--output", "to/x"]),
        (merge_ckpt, ["native", "--output", "to/x"]),
        (verify_ckpt, ["native", "hf"]),
        (verify_ckpt, ["native"]),
    ]
    if damage is not break_replica:
        calls.append((inspect_ckpt, ["native"]))
    with untouched(home):
        for tool, argv in calls:
            different = damage is break_replica and tool is verify_ckpt
            assert tool.main(argv) == (2 if tool is verify_ckpt and not different else 1)
            said = capsys.readouterr()
            if different:
                assert "differs: model.layers.1.input_layernorm.weight" in said.out
                continue
            assert said.out == ""
            assert said.err.startswith("error: ")
            assert "Traceback" not in said.err
            assert "native" in said.err
