"""Quantised weights of Hugging Face files, read as bfloat16: equal to transformers' own functions.

Shapes: R x C elements share a scale; G groups of 32 elements of MXFP4.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from independent import Tensors, assert_same, load_hf, same_bytes
from safetensors.torch import save_file
from strategies import tiny_model
from test_expert_families import TINY as EXPERTS
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from shardwright.ckpt import (
    CheckpointError,
    ReadOptions,
    RunOptions,
    merge,
    open_checkpoint,
    reshard,
    verify,
)
from shardwright.ckpt.move import computed

QUIET, READ = RunOptions(workers=1), ReadOptions(dequantize=True)
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def every_float8(*shape: int) -> torch.Tensor:
    """All codes, in turn, NaN left out."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    return codes.repeat(-(-torch.Size(shape).numel() // len(codes)))[: torch.Size(shape).numel()] \
        .reshape(shape).view(FP8)  # fmt: skip


def folder(path: Path, tensors: Tensors, config: dict[str, Any], parts: int = 1) -> Path:
    """A Hugging Face folder of one file or several, by plain library calls."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    if parts == 1:
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return path
    where = {}
    for i in range(parts):
        file = f"model-{i + 1:05d}-of-{parts:05d}.safetensors"
        save_file({n: tensors[n] for n in names[i::parts]}, path / file, {"format": "pt"})
        where |= dict.fromkeys(names[i::parts], file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return path


MYSTERY = {"model_type": "mystery", "quantization_config": {"quant_method": "fp8"}}
SCALES = {
    "fp32": lambda *shape: random(*shape, seed=1).abs() * 3e-3 + 1e-6,
    "bf16": lambda *shape: (random(*shape, seed=1).abs() + 0.1).to(BF16),
    "e8m0": lambda *shape: torch.randint(
        100, 140, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    ).view(torch.float8_e8m0fnu),
    "bytes": lambda *shape: torch.randint(
        1, 255, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    ),
}


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(
    ("shape", "grid"),
    [((256, 384), (2, 3)), ((40, 24), (5, 3)), ((40, 24), (1, 1)), ((3, 32, 48), (3, 2, 3)),
     ((96, 1000), (3, 5)), ((1, 7), (1, 7))],
)  # fmt: skip
def test_blocks_of_8_bit_floats_are_those_of_transformers(shape, grid, scales, tmp_path):
    weight, scale = every_float8(*shape), SCALES[scales](*grid)
    hf = folder(tmp_path / "hf", {"w": weight, "w_scale_inv": scale}, MYSTERY, parts=2)
    merge(hf, tmp_path / "out", read=READ, run=QUIET)
    wanted = Fp8Dequantize(None)._dequantize_one(weight, scale, BF16)
    found = load_hf(tmp_path / "out")
    assert found.keys() == {"w"}
    assert found["w"].dtype == BF16
    assert same_bytes(found["w"], wanted)
    assert wanted.float().unique().numel() > 4


@pytest.mark.parametrize(("rows", "columns"), [(576, 200), (130, 128), (5, 300), (129, 1)])
def test_blocks_at_the_edges_may_be_smaller(rows, columns, tmp_path):
    """DeepSeek-V3's kv_a_proj has 576 rows, which transformers' function does not take."""
    weight = every_float8(rows, columns)
    scale = random(-(-rows // 128), -(-columns // 128)).abs() + 0.01
    hf = folder(tmp_path / "hf", {"w": weight, "w_scale_inv": scale}, {
        **MYSTERY, "quantization_config": {"weight_block_size": [128, 128]}})  # fmt: skip
    merge(hf, tmp_path / "out", read=READ, run=QUIET)
    whole = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    assert same_bytes(load_hf(tmp_path / "out")["w"], (weight.float() * whole).to(BF16))


@pytest.mark.parametrize(("experts", "out", "groups"), [(2, 6, 3), (1, 64, 40), (3, 1, 1)])
def test_mxfp4_is_that_of_transformers_and_turned(experts, out, groups, tmp_path):
    blocks = torch.arange(experts * out * groups * 16).to(torch.uint8).reshape(
        experts, out, groups, 16)  # fmt: skip
    scales = (torch.arange(experts * out * groups) * 7 % 253 + 1).to(torch.uint8).reshape(
        experts, out, groups)  # fmt: skip
    hf = folder(tmp_path / "hf", {"w_blocks": blocks, "w_scales": scales}, MYSTERY, parts=2)
    merge(hf, tmp_path / "out", read=READ, run=QUIET)
    found = load_hf(tmp_path / "out")
    assert found.keys() == {"w"}
    assert found["w"].shape == (experts, groups * 32, out)
    assert same_bytes(found["w"], convert_moe_packed_tensors(blocks, scales).contiguous())


@pytest.mark.parametrize("step", [1, 7, 64, 1 << 16])
@pytest.mark.parametrize("budget", [1 << 14, 50_001, 32 << 20])
def test_any_part_is_computed_alone_in_any_steps(step, budget, tmp_path, monkeypatch):
    monkeypatch.setattr(computed, "STEP", step)
    tensors = {
        "a": every_float8(40, 24), "a_scale_inv": random(5, 3).abs(),
        "b_blocks": torch.arange(2 * 5 * 2 * 16).to(torch.uint8).reshape(2, 5, 2, 16),
        "b_scales": torch.full((2, 5, 2), 126, dtype=torch.uint8),
    }  # fmt: skip
    hf = folder(tmp_path / "hf", tensors, MYSTERY)
    whole = {
        "a": Fp8Dequantize(None)._dequantize_one(tensors["a"], tensors["a_scale_inv"], BF16),
        "b": convert_moe_packed_tensors(tensors["b_blocks"], tensors["b_scales"]),
    }
    merge(hf, tmp_path / "out", read=READ, run=RunOptions(workers=1, memory_budget=budget))
    assert_same(load_hf(tmp_path / "out"), {k: x.contiguous() for k, x in whole.items()})
    opened = open_checkpoint(hf, dequantize=True)
    for name, at in (("a", (slice(3, 29), slice(5, 6))), ("b", (1, slice(9, 50), slice(2, 5)))):
        assert torch.equal(torch.from_numpy(opened[name][at]), whole[name][at].float())


# --- models ------------------------------------------------------------------------------------


def quantized_llama(tmp_path: Path, block: int) -> tuple[Path, Tensors]:
    """A tiny model with quantised linear layers, and the weights that they stand for."""
    tiny_model("llama").to(BF16).save_pretrained(tmp_path / "plain")
    stored, state = quantized(load_hf(tmp_path / "plain"), block)
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [block, block]}
    return folder(tmp_path / "hf", stored, config), state


def quantized(state: Tensors, block: int) -> tuple[Tensors, Tensors]:
    """Projections as 8-bit floats with a scale for each square block, and what they stand for."""
    state, stored = dict(state), {}
    for name, x in state.items():
        if "_proj" not in name:
            stored[name] = x
            continue
        rows, columns = (-(-size // block) for size in x.shape)
        scale = random(rows, columns, seed=len(stored)).abs() + 0.05
        wide = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[
            : x.shape[0], : x.shape[1]
        ]
        stored[name] = (x.float() / wide).clamp(-448, 448).to(FP8)
        stored[name + "_scale_inv"] = scale
        state[name] = (stored[name].float() * wide).to(BF16)
    return stored, state


def test_a_quantized_model_goes_through_layouts_and_computes_as_its_bf16_weights(tmp_path):
    hf, state = quantized_llama(tmp_path, 8)
    with pytest.raises(CheckpointError, match="--dequantize"):
        reshard(hf, tmp_path / "a", tp=2, run=QUIET)
    reshard(hf, tmp_path / "a", tp=3, pp=2, read=READ, run=RunOptions())
    merge(tmp_path / "a", tmp_path / "out", run=QUIET)
    assert_same(load_hf(tmp_path / "out"), state)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((tmp_path / "plain" / "config.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == BF16
    assert verify(hf, tmp_path / "out", read=READ, run=QUIET).same
    reshard(hf, tmp_path / "wide", to="hf", dtype="fp32", read=READ, run=QUIET)
    assert_same(load_hf(tmp_path / "wide"), {k: x.float() for k, x in state.items()})


def test_experts_and_latent_attention_in_8_bit_floats_are_read(tmp_path):
    plain = EXPERTS["deepseek_v3"].save(tmp_path / "plain", BF16)
    stored, state = quantized(plain, 4)
    assert any("experts.3.down_proj.weight_scale_inv" in name for name in stored)
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [4, 4]}
    hf = folder(tmp_path / "hf", stored, config, parts=3)
    reshard(hf, tmp_path / "a", tp=2, ep=2, read=READ, run=QUIET)
    merge(tmp_path / "a", tmp_path / "out", run=QUIET)
    assert_same(load_hf(tmp_path / "out"), state)


def test_quantized_weights_under_a_config_that_says_nothing_are_refused_with_the_hint(tmp_path):
    hf, state = quantized_llama(tmp_path, 12)
    (hf / "config.json").write_text((tmp_path / "plain" / "config.json").read_text())
    with pytest.raises(CheckpointError, match="--dequantize reads them as bf16"):
        reshard(hf, tmp_path / "a", tp=2, run=QUIET)
    merge(hf, tmp_path / "out", read=READ, run=QUIET)
    assert_same(load_hf(tmp_path / "out"), state)


def test_an_unknown_model_passes_as_it_is_without_the_option(tmp_path):
    tensors = {"w": every_float8(8, 8), "w_scale_inv": random(1, 1).abs(), "n": random(3)}
    hf = folder(tmp_path / "hf", tensors, MYSTERY)
    merge(hf, tmp_path / "out", run=QUIET)
    assert_same(load_hf(tmp_path / "out"), tensors)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == MYSTERY
    merge(hf, tmp_path / "bf16", read=READ, run=QUIET)
    assert set(load_hf(tmp_path / "bf16")) == {"w", "n"}
    assert json.loads((tmp_path / "bf16" / "config.json").read_text()) == {"model_type": "mystery"}


WRONG: dict[str, tuple[Tensors, str]] = {
    "no scale": ({"w": every_float8(8, 8)}, "F8_E4M3 without w_scale_inv"),
    "wrong grid": (
        {"w": every_float8(8, 9), "w_scale_inv": random(2, 2).abs()}, "which are no blocks of"),
    "a vector": ({"w": every_float8(8), "w_scale_inv": random(1).abs()}, "no matrix"),
    "scales of whole numbers": (
        {"w": every_float8(8, 8), "w_scale_inv": torch.ones(1, 1, dtype=torch.int32)}, "I32"),
    "blocks of another shape": (
        {"w_blocks": torch.zeros(2, 3, 8, dtype=torch.uint8),
         "w_scales": torch.zeros(2, 3, dtype=torch.uint8)}, "groups, 16"),
    "scales of another shape": (
        {"w_blocks": torch.zeros(2, 3, 4, 16, dtype=torch.uint8),
         "w_scales": torch.zeros(2, 3, 5, dtype=torch.uint8)}, "groups, 16"),
    "nothing": ({"w": torch.ones(3)}, "no tensor is quantized"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_dequantized_is_refused_by_name(name, tmp_path):
    tensors, says = WRONG[name]
    hf = folder(tmp_path / "hf", tensors, {"model_type": "mystery"})
    with pytest.raises(CheckpointError, match=says):
        merge(hf, tmp_path / "out", read=READ, run=QUIET)


def test_options_of_hugging_face_files_are_refused_for_other_formats(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "a", tp=2, run=QUIET)
    for option in ("dequantize", "drop_vision"):
        with pytest.raises(CheckpointError, match="is about files of Hugging Face"):
            reshard(tmp_path / "a", tmp_path / "b", tp=1, run=QUIET, **{option: True})


def test_a_damaged_weight_or_scale_is_found_by_the_checksums_of_the_source(tmp_path):
    tensors = {"w": every_float8(8, 8), "w_scale_inv": random(1, 1).abs()}
    hf = folder(tmp_path / "made", tensors, MYSTERY, parts=2)
    merge(hf, tmp_path / "hf", max_shard_size=8, checksum=True, run=QUIET)
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) == 2
    for file in files:
        good = file.read_bytes()
        file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(CheckpointError, match="is damaged"):
            merge(tmp_path / "hf", tmp_path / "out", read=READ, run=QUIET)
        file.write_bytes(good)
    merge(tmp_path / "hf", tmp_path / "out", read=READ, run=QUIET)
