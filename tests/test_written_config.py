"""K4: the config.json of an output says the dtype of its weights; transformers loads by it."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from fixtures_safety import edit_json, write_hf
from safetensors.torch import load_file, save_file

from shardwright.ckpt import merge, reshard

BF16, FP32 = torch.bfloat16, torch.float32


def folder(path, of, /, *, odd=None, **config):
    """A Hugging Face folder whose weights are of the type ``of``, one norm of ``odd``."""
    write_hf(path)
    file = path / "model.safetensors"
    weights = {name: tensor.to(of) for name, tensor in load_file(file).items()}
    if odd is not None:
        weights["model.norm.weight"] = weights["model.norm.weight"].to(odd)
    save_file(weights, file, {"format": "pt"})
    edit_json(path / "config.json", **{"torch_dtype": ..., **config})
    return path


def said(path):
    table = json.loads((path / "config.json").read_text())
    return {key: table[key] for key in ("dtype", "torch_dtype") if key in table}


def by_way_of(kind, source, home):
    """``source`` merged, at once or from shards or from Megatron-LM's files."""
    if kind != "hf":
        reshard(source, home / kind, to=kind, tp=2)
        source = home / kind
    merge(source, home / "out")
    return home / "out"


@pytest.mark.parametrize("kind", ["hf", "shards", "megatron", "torch_dist"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_weights_of_fp32_under_a_config_of_bf16_keep_their_bits_in_transformers(
    kind, key, tmp_path
):
    """K4: what training in fp32 added would be rounded away on loading."""
    from transformers import AutoModelForCausalLM

    source = folder(tmp_path / "hf", FP32, **{key: "bfloat16"})
    out = by_way_of(kind, source, tmp_path)
    assert set(said(out).values()) == {"float32"}
    assert kind in ("megatron", "torch_dist") or list(said(out)) == [key], "its own spelling"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch_dtype, which is an old spelling
        model = AutoModelForCausalLM.from_pretrained(out, torch_dtype="auto")
    loaded = model.state_dict()
    for name, tensor in load_file(source / "model.safetensors").items():
        assert loaded[name].dtype == FP32
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("kind", ["hf", "shards"])
@pytest.mark.parametrize(
    ("dtype", "odd", "config"),
    [
        (BF16, None, {"torch_dtype": "bfloat16"}),
        (BF16, FP32, {"dtype": "bfloat16"}),
        (FP32, BF16, {"torch_dtype": "bfloat16"}),  # mixed: some weight is of the dtype
        (FP32, None, {}),
        (BF16, None, {"torch_dtype": "auto"}),
        (BF16, None, {"torch_dtype": None}),
    ],
)
def test_a_config_that_is_no_lie_travels_byte_for_byte(kind, dtype, odd, config, tmp_path):
    source = folder(tmp_path / "hf", dtype, odd=odd, **config)
    text = (source / "config.json").read_text().replace("  ", "\t")  # not as we would write it
    (source / "config.json").write_text(text)
    assert (by_way_of(kind, source, tmp_path) / "config.json").read_text() == text


def test_both_keys_and_the_prefix_of_a_value_are_kept(tmp_path):
    source = folder(tmp_path / "hf", FP32, torch_dtype="torch.bfloat16", dtype="bfloat16")
    merge(source, tmp_path / "out")
    assert said(tmp_path / "out") == {"torch_dtype": "torch.float32", "dtype": "float32"}
    merge(source, tmp_path / "half", dtype="fp16")
    assert said(tmp_path / "half") == {"torch_dtype": "torch.float16", "dtype": "float16"}


def test_a_cast_names_its_dtype_where_the_config_has_none(tmp_path):
    source = folder(tmp_path / "hf", FP32)
    merge(source, tmp_path / "out", dtype="bf16")
    assert said(tmp_path / "out") == {"torch_dtype": "bfloat16"}
