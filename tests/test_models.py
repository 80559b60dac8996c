"""Hugging Face checkpoints in and out: transformers models, casts, files beside the weights."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import strategies
import torch
from independent import (
    CONVERTED,
    GOLDEN_CONFIGS,
    GOLDEN_MULTIPLES,
    ORACLES,
    assert_same,
    assert_same_ranks,
    files_of,
    load_hf,
    load_ranks,
    load_tensors,
    megatron_weights,
    numbered_globally,
    pack_states,
    same_bytes,
    stored,
    write_foreign,
    write_native,
)
from safetensors import safe_open
from safetensors.torch import save_file
from strategies import SIDE_FILES, VARIANTS, raw, tiny_model, write_hf

from shardwright.ckpt import (
    CheckpointError,
    ReadOptions,
    RunOptions,
    merge,
    open_checkpoint,
    reshard,
    verify,
)

QUIET = RunOptions(workers=1)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def from_folder(folder: Path):
    """The model that transformers makes of a folder; unexpected or missing names are an error."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@torch.no_grad()
def logits(model) -> torch.Tensor:
    tokens = torch.arange(2 * 9).reshape(2, 9) % 37
    return model(tokens).logits


# --- the models themselves ----------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_models_logits_are_equal_after_tp2pp2_tp3pp1_and_merge(variant, tmp_path):
    model = tiny_model(variant)
    model.save_pretrained(tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "a", tp=2, pp=2, run=QUIET)
    reshard(tmp_path / "a", tmp_path / "b", tp=3, pp=1, run=QUIET)
    merge(tmp_path / "b", tmp_path / "out", run=QUIET)
    assert_same(load_hf(tmp_path / "out"), load_hf(tmp_path / "hf"))
    before = logits(model)
    assert before.std() > 0.01
    assert torch.equal(logits(from_folder(tmp_path / "out")), before)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_real_models_packed_rows_equal_an_independent_construction(variant, tmp_path):
    tiny_model(variant).save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config.setdefault("tie_word_embeddings", VARIANTS[variant][0] in ("gpt2", "gemma", "gemma2"))
    state = load_hf(tmp_path / "hf")
    for tp, pp in ((2, 2), (3, 4), (4, 1)):
        if variant != "gpt2" and tp == 4:
            continue  # 6 KV heads
        made = tmp_path / f"{tp}{pp}"
        reshard(tmp_path / "hf", made, tp=tp, pp=pp, run=QUIET)
        assert_same_ranks(load_ranks(made), stored(config, state, tp, pp))


@pytest.mark.parametrize("variant", ["llama", "qwen2-tied", "gpt2"])
def test_a_bf16_model_stays_bf16_and_generates_the_same(variant, tmp_path):
    model = tiny_model(variant).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "a", tp=2, pp=2, run=QUIET)
    merge(tmp_path / "a", tmp_path / "out", run=QUIET)
    again = from_folder(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    assert torch.equal(logits(again), logits(model))


# --- casts --------------------------------------------------------------------------------------


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """All bit patterns of a 16-bit type; of wider ones the edges of narrower types, and noise."""
    half = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    if dtype in (torch.float16, torch.bfloat16):
        return half.to(torch.int16).view(dtype)
    rng = torch.Generator().manual_seed(0)
    noise = torch.randint(-(2**31), 2**31, (2**16,), generator=rng).to(torch.int32)
    # Exactly at, just above and just below half-way between two bf16 values, then fp16 values.
    edges = [(half << 16) + low for low in (0, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    fp16 = half.to(torch.int16).view(torch.float16).float().view(torch.int32)
    edges += [fp16 + low for low in (0xFFF, 0x1000, 0x1001)]
    single = torch.cat([noise, *edges]).view(torch.float32)
    if dtype == torch.float32:
        return single
    wide = single.double()
    # Just above a half-way point in double, exactly on it in single precision: rounds twice.
    return torch.cat([wide, wide * (1 + 2**-40), wide * 1e30])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_casts_are_torchs_bit_for_bit(source, target, tmp_path):
    """NaN stays NaN; its payload is not compared: torch's vector and scalar paths differ in it."""
    x = every_value(source)
    save_file({"x": x, "odd": x[:7].clone()}, tmp_path / "in.safetensors", {"format": "pt"})
    merge(tmp_path / "in.safetensors", tmp_path / "out.safetensors", dtype=target, run=QUIET)
    found, wanted = load_tensors(tmp_path / "out.safetensors")["x"], x.to(DTYPES[target])
    assert found.dtype == wanted.dtype
    number = ~x.isnan()
    assert 0 < (~number).sum() < 2**17
    assert same_bytes(found[number], wanted[number])
    assert found[~number].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tool", ["merge", "reshard"])
def test_a_cast_reaches_every_weight_and_the_config_says_it(tool, dtype, tmp_path):
    case = raw("qwen2", layers=4)
    hf = write_hf(tmp_path / "hf", case)
    wanted = {name: x.to(DTYPES[dtype]) for name, x in case.state.items()}
    if tool == "merge":
        merge(hf, tmp_path / "out", dtype=dtype, run=QUIET)
        assert_same(load_hf(tmp_path / "out"), wanted)
    else:
        reshard(hf, tmp_path / "out", tp=2, pp=2, dtype=dtype, run=QUIET)
        assert_same_ranks(load_ranks(tmp_path / "out"), stored(case.config, wanted, 2, 2))
        table = json.loads((tmp_path / "out" / "checkpoint.json").read_text())
        assert "torch." + table["dtype"] == str(DTYPES[dtype])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {**case.config, "torch_dtype": str(DTYPES[dtype]).removeprefix("torch.")}


def test_transformers_opens_a_cast_model_in_its_new_dtype(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "hf")
    merge(tmp_path / "hf", tmp_path / "out", dtype="bf16", run=QUIET)
    again = from_folder(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    assert_same(again.state_dict(), model.to(torch.bfloat16).state_dict())


def test_a_cast_leaves_optimizer_state_and_integers_alone(tmp_path):
    case = raw("llama", layers=4)
    values = {"exp_avg": case.numbered(100_000), "master": case.numbered(200_000)}
    native = write_native(
        tmp_path / "a",
        case.config,
        stored(case.config, case.state, 1, 1),
        pack_states(case.config, values, 1, 1),
    )
    reshard(native, tmp_path / "b", tp=1, dtype="bf16", run=QUIET)
    optimizer = load_tensors(tmp_path / "b" / "optimizer_tp_0_pp_0.safetensors")
    assert {x.dtype for x in optimizer.values()} == {torch.float32}
    odd = {"w": torch.ones(3), "ids": torch.arange(5), "flags": torch.tensor([True, False])}
    save_file(odd, tmp_path / "odd.safetensors")
    merge(tmp_path / "odd.safetensors", tmp_path / "odd-out.safetensors", dtype="bf16", run=QUIET)
    found = load_tensors(tmp_path / "odd-out.safetensors")
    assert_same(found, {**odd, "w": torch.ones(3, dtype=torch.bfloat16)})


@pytest.mark.parametrize(
    ("source", "dtype", "said"),
    [
        (torch.float32, "fp16", "float16"),
        (torch.bfloat16, "fp16", "float16"),
        (torch.float64, "fp16", "float16"),
        (torch.float32, "bf16", "bfloat16"),
        (torch.float64, "bf16", "bfloat16"),
        (torch.float64, "fp32", "float32"),
    ],
)
def test_values_that_a_smaller_type_cannot_hold_are_counted_in_the_report(
    source, dtype, said, tmp_path
):
    """C4: for every pair of types, not for fp16 alone."""
    to = getattr(torch, said)
    most, wide = torch.finfo(to).max, torch.finfo(source).max
    x = torch.tensor([1.0, most / 2, wide, -wide, -float("inf"), float("nan"), wide], dtype=source)
    wanted = int((x.isfinite() & x.to(to).isinf()).sum())
    assert wanted == 3
    save_file({"x": x.reshape(7, 1)}, tmp_path / "in.safetensors", {"format": "pt"})
    report = merge(tmp_path / "in.safetensors", tmp_path / "out.bin", dtype=dtype, run=QUIET)
    lines = [line for line in report.lines() if "became infinite" in line]
    assert lines == [f"warning: x: 3 finite values became infinite in {said}"]


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_infinities_and_nans_of_the_source_are_no_overflows(dtype, tmp_path):
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), -float("nan"), 60000.0])
    save_file({"x": x.double()}, tmp_path / "in.safetensors", {"format": "pt"})
    report = merge(tmp_path / "in.safetensors", tmp_path / "out.bin", dtype=dtype, run=QUIET)
    assert not [line for line in report.lines() if "infinite" in line]


@pytest.mark.parametrize("dtype", ["int8", "fp8", "bf17", ""])
def test_a_dtype_that_is_no_cast_is_refused(dtype, tmp_path):
    hf = write_hf(tmp_path / "hf", raw("llama"))
    with pytest.raises(CheckpointError, match=f"--dtype {dtype}: "):
        merge(hf, tmp_path / "out", dtype=dtype, run=QUIET)


def test_mixed_dtypes_are_kept_and_never_evened_out(tmp_path):
    """Reshapes never cast: an fp32 norm in a bf16 model stays fp32 through every layout."""
    case = raw("llama", layers=4)
    state = {name: x if "norm" in name else x.to(torch.bfloat16) for name, x in case.state.items()}
    hf = write_hf(tmp_path / "hf", replace(case, state=state))
    reshard(hf, tmp_path / "a", tp=2, pp=2, run=QUIET)
    assert_same_ranks(load_ranks(tmp_path / "a"), stored(case.config, state, 2, 2))
    merge(tmp_path / "a", tmp_path / "out", run=QUIET)
    assert_same(load_hf(tmp_path / "out"), state)


def test_parts_of_one_fused_tensor_in_two_dtypes_are_refused_with_the_way_out(tmp_path):
    case = raw("llama", layers=4)
    name = "model.layers.2.self_attn.k_proj.weight"
    state = {**case.state, name: case.state[name].to(torch.bfloat16)}
    hf = write_hf(tmp_path / "hf", replace(case, state=state))
    with pytest.raises(CheckpointError, match="differ in dtype") as error:
        reshard(hf, tmp_path / "out", tp=2, run=QUIET)
    assert "decoder.layers.2.self_attention.linear_qkv.weight" in str(error.value)
    assert "--dtype" in str(error.value)
    reshard(hf, tmp_path / "out", tp=2, dtype="fp32", run=QUIET)
    wanted = {k: x.float() for k, x in state.items()}
    assert_same_ranks(load_ranks(tmp_path / "out"), stored(case.config, wanted, 2, 1))


# --- files of a Hugging Face folder -------------------------------------------------------------


@pytest.mark.parametrize("safe", [True, False])
def test_a_split_checkpoint_has_a_true_index_and_opens_in_transformers(safe, tmp_path):
    model = tiny_model("qwen2")
    model.save_pretrained(tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "a", tp=2, pp=2, run=QUIET)
    limit = 20_000
    merge(
        tmp_path / "a", tmp_path / "out", max_shard_size=limit, safe_serialization=safe, run=QUIET
    )
    stem, end = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    index = json.loads((tmp_path / "out" / f"{stem}.{end}.index.json").read_text())
    parts = sorted(path.name for path in (tmp_path / "out").glob(f"*.{end}"))
    assert parts == [f"{stem}-{i + 1:05d}-of-{len(parts):05d}.{end}" for i in range(len(parts))]
    assert len(parts) > 3
    held = {name: part for part in parts for name in load_tensors(tmp_path / "out" / part)}
    assert index["weight_map"] == held
    assert list(index["weight_map"]) == sorted(held)
    tensors = load_hf(tmp_path / "out")
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    assert index["metadata"]["total_parameters"] == sum(x.numel() for x in tensors.values())
    for part in parts:
        sizes = [x.nbytes for x in load_tensors(tmp_path / "out" / part).values()]
        assert sum(sizes) <= limit or len(sizes) == 1
    assert_same(tensors, load_hf(tmp_path / "hf"))
    assert torch.equal(logits(from_folder(tmp_path / "out")), logits(model))


def test_a_limit_that_all_weights_fit_gives_one_file_without_index(tmp_path):
    hf = write_hf(tmp_path / "hf", raw("llama"))
    merge(hf, tmp_path / "out", max_shard_size=10**9, run=QUIET)
    assert sorted(files_of(tmp_path / "out")) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("name", ["out.safetensors", "out.bin"])
def test_an_output_with_an_ending_is_one_file_and_nothing_beside_it(name, tmp_path):
    case = raw("llama")
    hf = write_hf(tmp_path / "hf", case, sides=True)
    merge(hf, tmp_path / "made" / name, run=QUIET)
    assert [path.name for path in (tmp_path / "made").iterdir()] == [name]
    assert_same(load_tensors(tmp_path / "made" / name), case.state)
    with pytest.raises(CheckpointError, match="--max-shard-size needs a folder"):
        merge(hf, tmp_path / "again" / name, max_shard_size=1000, run=QUIET)


def test_every_safetensors_file_says_that_it_is_pytorchs(tmp_path):
    """Loaders of other tools refuse a file without that entry, or guess its framework."""
    hf = write_hf(tmp_path / "hf", raw("llama"))
    merge(hf, tmp_path / "split", max_shard_size=4000, run=QUIET)
    merge(hf, tmp_path / "one.safetensors", run=QUIET)
    for path in (*(tmp_path / "split").glob("*.safetensors"), tmp_path / "one.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
        header = int.from_bytes(path.read_bytes()[:8], "little")
        assert header % 8 == 0


def test_all_other_files_travel_byte_for_byte_through_shards_and_back(tmp_path):
    case = raw("llama", layers=4)
    hf = write_hf(tmp_path / "hf", case, sides=True)
    for stale in ("optimizer.pt", "tf_model.h5"):  # weights and state in other frameworks' spelling
        (hf / stale).write_bytes(b"x")
    reshard(hf, tmp_path / "a", tp=2, pp=2, run=QUIET)
    reshard(tmp_path / "a", tmp_path / "b", tp=1, pp=1, run=QUIET)
    merge(tmp_path / "b", tmp_path / "out", run=QUIET)
    config = (hf / "config.json").read_bytes()
    for folder in ("a", "b", "out"):
        found = files_of(tmp_path / folder)
        sides = {k: v for k, v in found.items() if "tp_" not in k and k != "model.safetensors"}
        sides.pop("checkpoint.json", None)
        assert sides == {**SIDE_FILES, "config.json": config}


def test_the_config_option_replaces_what_its_folder_also_has_once_it_is_trusted(tmp_path):
    case = raw("llama", layers=4)
    hf = write_hf(tmp_path / "hf", case, sides=True)
    reshard(hf, tmp_path / "a", tp=2, pp=2, run=QUIET)
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "config.json").write_text(json.dumps({**case.config, "rope_theta": 500000.0}))
    (newer / "tokenizer.json").write_bytes(b"another")
    for source in ("hf", "a"):
        with pytest.raises(
            CheckpointError, match=r"rope theta is 10000\.0 .* 500000\.0 in .*--trust"
        ):
            merge(tmp_path / source, tmp_path / "out", config=newer, run=QUIET)
    for number, trust in enumerate(("config", "config:rope theta")):
        read = ReadOptions(config=newer, trust=frozenset({trust}))
        out = tmp_path / f"out{number}"
        report = merge(tmp_path / "a", out, read=read, run=QUIET)
        assert any("rope theta is 10000.0" in line for line in report.notes)
        found = files_of(out)
        assert json.loads(found["config.json"])["rope_theta"] == 500000.0
        assert found["tokenizer.json"] == b"another"
        assert found["chat_template.jinja"] == SIDE_FILES["chat_template.jinja"]
        assert_same(load_hf(out), case.state)
    read = ReadOptions(config=newer / "config.json", trust=frozenset({"config"}))
    merge(tmp_path / "a", tmp_path / "file", read=read, run=QUIET)
    found = files_of(tmp_path / "file")
    assert json.loads(found["config.json"])["rope_theta"] == 500000.0
    assert found["tokenizer.json"] == SIDE_FILES["tokenizer.json"]


def test_a_config_option_that_leads_nowhere_is_refused(tmp_path):
    hf = write_hf(tmp_path / "hf", raw("llama"))
    with pytest.raises(CheckpointError, match="--config"):
        merge(hf, tmp_path / "out", config=tmp_path / "absent", run=QUIET)


def in_parts(folder: Path, case: strategies.Case, binary: bool) -> Path:
    """A checkpoint in three parts with an index, by plain library calls."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(case.config))
    stem, end = ("pytorch_model", "bin") if binary else ("model", "safetensors")
    names, table = sorted(case.state), {}
    for part in range(3):
        name = f"{stem}-{part + 1:05d}-of-00003.{end}"
        tensors = {k: case.state[k] for k in names[part::3]}
        table.update(dict.fromkeys(tensors, name))
        if binary:
            torch.save(tensors, folder / name)
        else:
            save_file(tensors, folder / name, {"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": table}
    (folder / f"{stem}.{end}.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("parts", [False, True])
def test_one_file_or_parts_of_either_spelling_are_read(parts, binary, tmp_path):
    case = raw("llama-bias", layers=4)
    write = in_parts if parts else write_hf
    source = write(tmp_path / "hf", case, binary=binary)
    reshard(source, tmp_path / "out", tp=2, pp=2, run=QUIET)
    assert_same_ranks(load_ranks(tmp_path / "out"), stored(case.config, case.state, 2, 2))
    merge(source, tmp_path / "one.safetensors", run=QUIET)
    assert_same(load_tensors(tmp_path / "one.safetensors"), case.state)


@pytest.mark.parametrize("binary", [False, True])
def test_the_links_of_hugging_faces_cache_are_followed(binary, tmp_path):
    """snapshots/REVISION/NAME -> ../../blobs/HASH, whose names have no ending."""
    case = raw("llama", layers=4)
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in in_parts(tmp_path / "plain", case, binary).iterdir():
        blob = blobs / f"{hash(path.name) & 0xFFFFFFFF:08x}"
        os.replace(path, blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    reshard(snapshot, tmp_path / "out", tp=2, pp=2, run=QUIET)
    assert_same_ranks(load_ranks(tmp_path / "out"), stored(case.config, case.state, 2, 2))
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    (tmp_path / "link").symlink_to(snapshot)
    report = merge(tmp_path / "link", run=QUIET)
    assert report.output == tmp_path / "link-hf"
    assert_same(load_hf(report.output), case.state)


def test_tensors_that_share_one_storage_in_a_bin_file_are_read_each_with_its_view(tmp_path):
    """A view of a fused tensor, a transpose, and a tied head as torch.save stores them."""
    case = raw("llama-tied", layers=4)
    fused = torch.cat([case.state[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"])
    views = dict(zip("qkv", fused.split((24, 12, 12)), strict=True))
    state = dict(case.state)
    for x, view in views.items():
        state[f"model.layers.0.self_attn.{x}_proj.weight"] = view
    name = "model.layers.1.mlp.down_proj.weight"
    state[name] = state[name].T.contiguous().T
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    hf = write_hf(tmp_path / "hf", replace(case, state=state), binary=True)
    reshard(hf, tmp_path / "out", tp=2, pp=2, run=QUIET)
    assert_same_ranks(load_ranks(tmp_path / "out"), stored(case.config, case.state, 2, 2))


def test_a_model_without_a_family_table_passes_through_merge_as_it_is(tmp_path):
    """Nothing is packed on the way from Hugging Face to Hugging Face; 0-d and 0-size included."""
    state = {
        "backbone.weight": torch.arange(24.0).reshape(4, 6),
        "scale": torch.tensor(7.0),
        "empty": torch.zeros(0, 3),
        "counts": torch.arange(5),
        "mask": torch.tensor([True, False]),
        "small": torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn),
    }
    source = tmp_path / "hf"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "mamba"}')
    save_file(state, source / "model.safetensors", {"format": "pt"})
    report = merge(source, tmp_path / "out", max_shard_size=60, run=QUIET)
    assert any("no family table" in line for line in report.lines())
    assert_same(load_hf(tmp_path / "out"), state)
    assert verify(source, tmp_path / "out").same
    merge(tmp_path / "out", tmp_path / "back.bin", run=QUIET)
    assert_same(load_tensors(tmp_path / "back.bin"), state)


def test_a_bare_file_merges_without_any_config(tmp_path):
    case = raw("llama")
    torch.save(case.state, tmp_path / "weights.pt")
    report = merge(tmp_path / "weights.pt", run=QUIET)
    assert report.output == tmp_path / "weights-hf"
    assert_same(load_hf(report.output), case.state)


def test_a_bare_file_with_a_named_config_becomes_shards(tmp_path):
    case = raw("llama", layers=4)
    hf = write_hf(tmp_path / "hf", case)
    save_file(case.state, tmp_path / "weights.safetensors")
    read = ReadOptions(hf)
    report = reshard(tmp_path / "weights.safetensors", tp=2, pp=2, read=read, run=QUIET)
    assert report.output == tmp_path / "weights-tp2-pp2"
    assert_same_ranks(load_ranks(report.output), stored(case.config, case.state, 2, 2))


def test_fp8_weights_without_scales_are_refused(tmp_path):
    case = raw("llama", layers=4)
    name = "model.layers.1.mlp.up_proj.weight"
    state = {**case.state, name: case.state[name].to(torch.float8_e4m3fn)}
    hf = write_hf(tmp_path / "hf", replace(case, state=state))
    with pytest.raises(CheckpointError, match=rf"{name}: F8_E4M3 and no scale: quantized weights"):
        merge(hf, tmp_path / "out", run=QUIET)


# --- masters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True])
def test_masters_are_exported_in_fp32_in_the_weights_place(sharded, tmp_path):
    case = raw("llama-tied", layers=4)
    masters = case.numbered(300_000)
    weights = {name: x.to(torch.bfloat16) for name, x in case.state.items()}
    config = {**case.config, "torch_dtype": "bfloat16"}
    values = {"master": masters, "exp_avg": case.numbered(100_000)}
    native = write_native(
        tmp_path / "a",
        config,
        stored(config, weights, 2, 2),
        pack_states(config, values, 2, 2),
        dp=2,
        sharded=sharded,
    )
    merge(native, tmp_path / "out", from_master=True, run=QUIET)
    assert_same(load_hf(tmp_path / "out"), masters)
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said == {**config, "torch_dtype": "float32"}
    merge(native, tmp_path / "cast", from_master=True, dtype="bf16", run=QUIET)
    assert_same(load_hf(tmp_path / "cast"), {k: x.bfloat16() for k, x in masters.items()})


def test_masters_that_are_not_there_are_not_replaced_by_weights(tmp_path):
    case = raw("llama", layers=4)
    values = {"master": {k: x for k, x in case.state.items() if "norm" not in k}}
    native = write_native(
        tmp_path / "a",
        case.config,
        stored(case.config, case.state, 2, 2),
        pack_states(case.config, values, 2, 2),
    )
    merge(native, tmp_path / "out", from_master=True, run=QUIET)  # an fp32 norm is its own
    assert_same(load_hf(tmp_path / "out"), case.state)
    hf = write_hf(tmp_path / "hf", case)
    with pytest.raises(CheckpointError, match="have no master"):
        merge(hf, tmp_path / "no", from_master=True, run=QUIET)
    assert not (tmp_path / "no").exists()


# --- Python's view ------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["llama-bias", "gpt2", "phi3"])
def test_an_open_checkpoint_gives_the_models_tensors_whatever_the_layout(variant, tmp_path):
    case = raw(variant, heads=(4, 4), layers=4).cast(torch.bfloat16)
    hf = write_hf(tmp_path / "hf", case)
    reshard(hf, tmp_path / "a", tp=4, pp=2, run=QUIET)
    for path in (hf, tmp_path / "a"):
        opened = open_checkpoint(path)
        names = [name for name in opened if not name.startswith("padding/")]
        assert_same({name: opened[name].torch() for name in names}, case.state)


# --- Megatron's own files -----------------------------------------------------------------------


@pytest.fixture(params=ORACLES)
def megatron_shards(request, golden, tmp_path) -> tuple[str, Path]:
    """Shards that Megatron-LM trained and saved, under the third-party file names."""
    folder = write_foreign(tmp_path / "foreign", megatron_weights(golden / request.param))
    config = GOLDEN_CONFIGS[request.param.partition("_")[0]]
    (folder / "config.json").write_text(json.dumps(config))
    return request.param, folder


def test_shards_of_megatron_become_what_megatron_itself_makes_of_them(
    megatron_shards, golden, tmp_path
):
    """Every layout that Megatron resharded to, tp 4 > 2 KV groups and new padding rows included."""
    name, folder = megatron_shards
    multiple = GOLDEN_MULTIPLES[name]
    for (tp, pp), oracle in (ORACLES[name] | CONVERTED[name]).items():
        out = tmp_path / f"{tp}{pp}"
        reshard(folder, out, tp=tp, pp=pp, make_vocab_size_divisible_by=multiple, run=QUIET)
        wanted = numbered_globally(megatron_weights(golden / f"{name}{oracle}"), layers=4)
        assert_same_ranks(load_ranks(out), wanted)


def test_transformers_computes_megatrons_logits_from_megatrons_shards(
    megatron_shards, golden, tmp_path
):
    name, folder = megatron_shards
    merge(folder, tmp_path / "hf", run=QUIET)
    said = torch.load(golden / "forward" / f"{name}.pt", weights_only=True)
    with torch.no_grad():
        found = from_folder(tmp_path / "hf")(said["tokens"]).logits.float()
    wanted = said["logits"].float()[..., : found.shape[-1]]
    gap = (found - wanted).abs().max().item()
    assert wanted.std() > 0.1
    assert gap < (
        1e-5 if name.startswith("gpt2") else 2**-5
    )  # bf16 rounds differently in the two models
