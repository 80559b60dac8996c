"""Language models inside of models that also see: found by the prefix of their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from independent import assert_same, load_hf
from safetensors.torch import save_file
from strategies import tiny_model

from shardwright.ckpt import CheckpointError, ReadOptions, RunOptions, merge, reshard
from shardwright.ckpt.formats.hf.wrapped import tower_of
from shardwright.tools.merge_ckpt import main

QUIET, DROP = RunOptions(workers=1), ReadOptions(drop_vision=True)
TEXT: dict[str, Any] = {
    "hidden_size": 24, "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 4,
    "intermediate_size": 36, "num_hidden_layers": 4, "vocab_size": 64,
    "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
EYE = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1,
       "intermediate_size": 16, "image_size": 8, "patch_size": 4}  # fmt: skip
TOKENS = torch.arange(1, 19).reshape(2, 9)


def gemma3() -> Any:
    return transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(
        text_config={**TEXT, "model_type": "gemma3_text"},
        vision_config={**EYE, "model_type": "siglip_vision_model"}, mm_tokens_per_image=4,
    ))  # fmt: skip


def llava() -> Any:
    return transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**EYE, "model_type": "clip_vision_model", "projection_dim": 8},
    ))  # fmt: skip


def saved(make: Any, folder: Path) -> Any:
    """A random model, and its folder as transformers writes it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make().eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=TOKENS).logits


def loaded(folder: Path) -> Any:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@pytest.mark.parametrize("make", [gemma3, llava])
def test_the_language_model_is_taken_out_and_computes_the_same(make, tmp_path):
    model = saved(make, tmp_path / "hf")
    state = load_hf(tmp_path / "hf")
    own = {name.removeprefix("language_model."): x for name, x in state.items()
           if name.startswith("language_model.")}  # fmt: skip
    made = reshard(tmp_path / "hf", tmp_path / "a", tp=2, pp=2, read=DROP, run=QUIET)
    merge(tmp_path / "a", tmp_path / "out", run=QUIET)
    assert_same(load_hf(tmp_path / "out"), own)
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(model))
    dropped = [line for line in made.lines() if "--drop-vision" in line]
    counts = {part: sum(name.startswith(part + ".") for name in state)
              for part in ("vision_tower", "multi_modal_projector")}  # fmt: skip
    assert sum(counts.values()) == len(state) - len(own)
    assert len(dropped) == 2
    for part, count in counts.items():
        assert any(part in line and str(count) in line for line in dropped), dropped


def test_without_the_option_the_other_parts_are_refused_by_name_and_pass_through_a_merge(tmp_path):
    saved(llava, tmp_path / "hf")
    with pytest.raises(CheckpointError, match="--drop-vision") as error:
        reshard(tmp_path / "hf", tmp_path / "a", tp=2, run=QUIET)
    assert "multi_modal_projector (4 tensors, " in str(error.value)
    assert "vision_tower (" in str(error.value)
    merge(tmp_path / "hf", tmp_path / "out", run=QUIET)
    assert_same(load_hf(tmp_path / "out"), load_hf(tmp_path / "hf"))
    config = (tmp_path / "hf" / "config.json").read_text()
    assert (tmp_path / "out" / "config.json").read_text() == config


@pytest.mark.parametrize(
    ("prefix", "instead", "head"),
    [
        ("model.language_model.", "model.", "lm_head."),
        ("language_model.model.", "model.", "language_model.lm_head."),
        ("model.text_model.", "model.", "lm_head."),
    ],
)
@pytest.mark.parametrize("wrapper", [True, False])
def test_every_spelling_of_the_prefix_is_found(prefix, instead, head, wrapper, tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "plain")
    state = load_hf(tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(
        json.dumps({"model_type": "some_vlm", "text_config": config} if wrapper else config)
    )
    renamed = {
        prefix + name.removeprefix(instead)
        if name.startswith(instead)
        else head + name.removeprefix("lm_head."): x
        for name, x in state.items()
    }
    save_file(renamed, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    reshard(tmp_path / "hf", tmp_path / "a", tp=2, run=QUIET)
    merge(tmp_path / "a", tmp_path / "out", run=QUIET)
    assert_same(load_hf(tmp_path / "out"), state)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.visual.blocks.0.attn.qkv.weight", "model.visual"),
        ("visual.patch_embed.proj.weight", "visual"),
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight", "vision_tower"),
        ("model.vision_tower.encoder.layers.0.mlp.fc1.weight", "model.vision_tower"),
        ("model.multi_modal_projector.linear_1.weight", "model.multi_modal_projector"),
        ("model.connector.modality_projection.proj.weight", "model.connector"),
        ("image_newline", "image_newline"),
        ("audio_tower.layers.0.self_attn.q_proj.weight", "audio_tower"),
        ("model.embed_audio.embedding_projection.weight", "model.embed_audio"),
        ("model.layers.0.self_attn.q_proj.weight", ""),
        ("language_model.model.norm.weight", ""),
        ("lm_head.weight", ""),
        ("mtp.layers.0.mlp.gate.weight", ""),
        ("visualizer.weight", ""),
    ],
)
def test_vision_and_audio_parts_are_known_by_their_names(name, part):
    assert tower_of(name) == part


def test_the_command_takes_the_option_and_the_language_model_alone(tmp_path, capsys):
    saved(llava, tmp_path / "hf")
    out = tmp_path / "out"
    assert main([str(tmp_path / "hf"), "--drop-vision", "--output", str(out)]) == 0
    assert "vision_tower: not of the language model" in capsys.readouterr().out
    assert not any("vision" in name for name in load_hf(out))
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"
