"""Families with experts: files of transformers through random layouts and back, equal logits, and
what transformers does not load (MTP layers) kept or dropped by name.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from independent import Tensors, assert_same, load_hf
from megatron_computes import Computed
from safetensors.torch import load_file, save_file

from shardwright.ckpt import CheckpointError, RunOptions, merge, reshard
from shardwright.ckpt.checkpoint.config import load_model
from shardwright.ckpt.model.placement import shapes_of
from shardwright.ckpt.reader import read_checkpoint

QUIET = RunOptions(workers=1)
E, LAYERS, H = 4, 4, 24
BASE: dict[str, Any] = {
    "hidden_size": H, "intermediate_size": 36, "num_hidden_layers": LAYERS, "vocab_size": 64,
    "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 4,
    "max_position_embeddings": 32, "initializer_range": 0.2, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None, "num_experts_per_tok": 2,
}  # fmt: skip
ROUTED = {"n_routed_experts": E, "moe_intermediate_size": 12, "n_group": 1, "topk_group": 1,
          "first_k_dense_replace": 1, "n_shared_experts": 1}  # fmt: skip
MLA = {**ROUTED, "num_key_value_heads": 12, "q_lora_rank": 12, "kv_lora_rank": 8,
       "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4, "head_dim": 2}  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """A variant of a family."""

    kind: str
    config: dict[str, Any] = field(default_factory=dict)
    tps: tuple[int, ...] = (1, 2, 3, 6)

    def save(self, folder: Path, dtype: torch.dtype = torch.float32) -> Tensors:
        """A random model of transformers; returns its tensors."""
        torch.manual_seed(0)
        config = transformers.CONFIG_MAPPING[self.kind](**{**BASE, **self.config})
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.data = torch.randn_like(buffer)
        model.save_pretrained(folder)
        return load_hf(folder)


TINY = {
    "mixtral": Tiny("mixtral", {"num_local_experts": E}),
    "qwen2_moe": Tiny(
        "qwen2_moe",
        {"num_experts": E, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 24,
         "decoder_sparse_step": 2},
    ),
    "qwen3_moe": Tiny(
        "qwen3_moe", {"num_experts": E, "moe_intermediate_size": 12, "mlp_only_layers": [2]}
    ),
    "minimax_m2": Tiny("minimax_m2", {"num_local_experts": E}),
    "llama4": Tiny(
        "llama4_text",
        {"num_local_experts": E, "intermediate_size": 12, "intermediate_size_mlp": 36,
         "interleave_moe_layer_step": 2, "num_experts_per_tok": 1},
    ),
    "granitemoe": Tiny("granitemoe", {"num_local_experts": E, "head_dim": 2}),
    "granitemoe shared": Tiny(
        "granitemoeshared",
        {"num_local_experts": E, "head_dim": 2, "shared_intermediate_size": 24},
    ),
    "olmoe": Tiny("olmoe", {"num_experts": E, "head_dim": 2}),
    "deepseek_v3": Tiny("deepseek_v3", MLA),
    "deepseek_v3 no lora": Tiny("deepseek_v3", {**MLA, "q_lora_rank": None}),
    "deepseek_v2": Tiny("deepseek_v2", {**MLA, "n_shared_experts": 2, "q_lora_rank": None}),
    "glm4_moe_lite": Tiny("glm4_moe_lite", MLA),
    "glm4_moe": Tiny("glm4_moe", {**ROUTED, "use_qk_norm": True}),
    "glm4_moe air": Tiny("glm4_moe", {**ROUTED, "attention_bias": True}),
    "dots1": Tiny("dots1", ROUTED),
}  # fmt: skip


def layout(rng: random.Random, tps: tuple[int, ...]) -> dict[str, Any]:
    """A random layout that every tiny model allows."""
    found: dict[str, Any] = {"tp": rng.choice(tps), "ep": rng.choice((1, 2, 4)),
                             "etp": rng.choice((1, 2, 3, 6, None))}  # fmt: skip
    stages = ({"pp": 1}, {"pp": 2}, {"pp": 2, "vpp": 2}, {"pp_layers": (1, 3)},
              {"pp": 2, "pp_layout": "E|ttt|t|L"})  # fmt: skip
    return found | rng.choice(stages)


def logits(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    with torch.no_grad():
        return model(torch.arange(20).reshape(2, 10)).logits


@pytest.mark.parametrize("name", TINY)
def test_transformers_files_come_back_the_same_over_random_layouts(name, tmp_path):
    tiny = TINY[name]
    state = tiny.save(tmp_path / "hf")
    at, rng = tmp_path / "hf", random.Random(name)
    for i in range(3):
        chosen = layout(rng, tiny.tps)
        reshard(at, tmp_path / f"{i}", run=QUIET, make_vocab_size_divisible_by=1, **chosen)
        at = tmp_path / f"{i}"
    merge(at, tmp_path / "back", run=QUIET)
    assert_same(load_hf(tmp_path / "back"), state)
    assert torch.equal(logits(tmp_path / "back"), logits(tmp_path / "hf"))


@pytest.mark.parametrize("name", TINY)
def test_the_table_counts_the_parameters_that_transformers_has(name, tmp_path):
    tiny = TINY[name]
    config = transformers.CONFIG_MAPPING[tiny.kind](**{**BASE, **tiny.config})
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    buffers = sum(b.numel() for n, b in model.named_buffers() if "correction_bias" in n)
    said = sum(
        math.prod(shape) for shape in shapes_of(load_model(tmp_path / "config.json")).values()
    )
    assert said == sum(p.numel() for p in model.parameters()) + buffers


COMPUTED = {
    name: TINY[name] for name in ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "glm4_moe air")
}
COMPUTED |= {
    "dots1": Tiny("dots1", {**ROUTED, "norm_topk_prob": True}),
    "granitemoe": Tiny(
        "granitemoeshared",
        {**TINY["granitemoe shared"].config, "attention_multiplier": 2**-0.5},
    ),
    "qwen2_moe normed": Tiny("qwen2_moe", {**TINY["qwen2_moe"].config, "norm_topk_prob": True}),
}


def test_megatron_core_computes_from_our_args_what_transformers_computes(tmp_path):
    pytest.importorskip("megatron.core")
    computed = Computed(tmp_path)
    for name, tiny in COMPUTED.items():
        computed.model(name, {**BASE, **tiny.config, "model_type": tiny.kind})
        computed.write(name, "megatron", 1, 1)
    assert computed.differing() == []


def test_scores_that_megatron_core_normalises_are_refused_where_the_model_does_not(tmp_path):
    TINY["dots1"].save(tmp_path / "hf")
    with pytest.raises(CheckpointError, match="norm_topk_prob False"):
        reshard(tmp_path / "hf", tmp_path / "out", to="megatron", run=QUIET)


def test_groups_of_experts_that_megatron_core_scores_otherwise_are_refused(tmp_path):
    grouped = {"n_group": 2, "topk_group": 2}
    for name, each in (("two", 4), ("one", 2)):
        tiny = Tiny("glm4_moe", {**ROUTED, **grouped, "num_experts_per_tok": each})
        tiny.save(tmp_path / name)
    reshard(tmp_path / "two", tmp_path / "out", to="megatron", run=QUIET)
    with pytest.raises(CheckpointError, match=r"scored by their best 2 \(megatron-core: by 1\)"):
        reshard(tmp_path / "one", tmp_path / "other", to="megatron", run=QUIET)


# --- roles ---------------------------------------------------------------------------------------

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def test_a_cast_leaves_the_routers_bias_in_its_dtype(tmp_path):
    state = TINY["deepseek_v3"].save(tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "a", tp=2, dtype="bf16", run=QUIET)
    merge(tmp_path / "a", tmp_path / "back", run=QUIET)
    made = load_hf(tmp_path / "back")
    assert torch.equal(made[BIAS], state[BIAS])
    assert made[BIAS].dtype == torch.float32
    name = "model.layers.1.mlp.gate.weight"
    assert torch.equal(made[name], state[name].to(torch.bfloat16))


# --- MTP -----------------------------------------------------------------------------------------


def with_mtp(folder: Path) -> Tensors:
    """A tiny DeepSeek-V3 with an MTP layer, as the hub's files hold it: behind the model's."""
    state = TINY["deepseek_v3"].save(folder)
    m, last = f"model.layers.{LAYERS}.", f"model.layers.{LAYERS - 1}."
    layer = {n.replace(last, m): x + 1 for n, x in state.items() if n.startswith(last)}
    more = {"enorm.weight": (H,), "hnorm.weight": (H,), "eh_proj.weight": (H, 2 * H),
            "shared_head.norm.weight": (H,)}  # fmt: skip
    layer |= {m + name: torch.randn(shape) for name, shape in more.items()}
    layer[m + "embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
    layer[m + "shared_head.head.weight"] = state["lm_head.weight"].clone()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    save_file(state | layer, folder / "model.safetensors", {"format": "pt"})
    return state | layer


def test_mtp_layers_and_their_copies_are_kept_in_every_layout(tmp_path):
    state = with_mtp(tmp_path / "hf")
    at = tmp_path / "hf"
    for i, options in enumerate(({"tp": 2, "pp": 2, "ep": 2, "etp": 1},
                                 {"tp": 3, "pp": 2, "pp_layout": "Ett|t|tm|L"},
                                 {"tp": 1, "pp": 1, "ep": 4})):  # fmt: skip
        reshard(at, tmp_path / f"{i}", run=QUIET, make_vocab_size_divisible_by=1, **options)
        at = tmp_path / f"{i}"
    merge(at, tmp_path / "back", run=QUIET)
    assert_same(load_hf(tmp_path / "back"), state)


def test_mtp_layers_lie_on_their_stage_with_the_embedding_and_without_the_last_norm(tmp_path):
    state = with_mtp(tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "a", pp=4, pp_layout="Ettt|t|m|L", run=QUIET,
            make_vocab_size_divisible_by=1)  # fmt: skip
    held = [load_file(tmp_path / "a" / f"model_tp_0_pp_{p}.safetensors") for p in range(4)]
    word, norm = "embedding.word_embeddings.weight", "decoder.final_layernorm.weight"
    assert [word in rank for rank in held] == [True, False, True, False]
    assert [norm in rank for rank in held] == [False, True, False, False]
    assert [any(n.startswith("mtp.") for n in rank) for rank in held] == [False, False, True, False]
    assert set(held[3]) == {"output_layer.weight"}
    projection = held[2]["mtp.layers.0.eh_proj.weight"]
    assert torch.equal(projection, state[f"model.layers.{LAYERS}.eh_proj.weight"])
    assert json.loads((tmp_path / "a" / "checkpoint.json").read_text())["pp_layout"] == "Ettt|t|m|L"


def test_a_copy_that_differs_from_its_original_is_an_error(tmp_path):
    state = with_mtp(tmp_path / "hf")
    state[f"model.layers.{LAYERS}.embed_tokens.weight"][3] += 1
    save_file(state, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="replicas differ"):
        reshard(tmp_path / "hf", tmp_path / "a", tp=2, run=QUIET)


def test_drop_mtp_leaves_the_layers_out_and_says_so(tmp_path):
    state = with_mtp(tmp_path / "hf")
    report = reshard(tmp_path / "hf", tmp_path / "a", tp=2, run=QUIET, drop_mtp=True)
    assert any("--drop-mtp" in line for line in report.lines())
    merge(tmp_path / "a", tmp_path / "back", run=QUIET)
    m = f"model.layers.{LAYERS}."
    assert_same(load_hf(tmp_path / "back"), {n: x for n, x in state.items() if not n.startswith(m)})
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 0
    reshard(tmp_path / "hf", tmp_path / "b", tp=2, run=QUIET)
    reshard(tmp_path / "b", tmp_path / "c", tp=1, run=QUIET, drop_mtp=True)
    assert not [n for n in read_checkpoint(tmp_path / "c").manifest.tensors if m in n]
