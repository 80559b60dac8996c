"""megatron-core built from the args that we write computes what transformers computes, or the
write is refused by the name of what args cannot say.

The model is built by Megatron-LM's own rule: every field of TransformerConfig takes the arg of its
name. Nothing that reads or writes checkpoints in the other process is ours (megatron_loads.py).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from megatron_computes import Computed

from shardwright.ckpt import CheckpointError, reshard

BASE: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64, "rms_norm_eps": 1e-3,
    "max_position_embeddings": 32, "rope_theta": 5e5, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "initializer_range": 0.2,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 8}  # fmt: skip
LLAMA = {**BASE, "model_type": "llama"}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32,
        "vocab_size": 64, "layer_norm_epsilon": 1e-3, "initializer_range": 0.2,
        "activation_function": "gelu_new", "bos_token_id": None, "eos_token_id": None,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": {**BASE, "model_type": "mistral", "sliding_window": None},
    "qwen2": {**BASE, "model_type": "qwen2"},
    "qwen3": {**BASE, "model_type": "qwen3"},
    "phi3": {**BASE, "model_type": "phi3"},
    "gpt2": GPT2,
}
MODELS: dict[str, dict[str, Any]] = {
    **FAMILIES,
    "tied": {**LLAMA, "tie_word_embeddings": True},
    "biases": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama3": {**LLAMA, "rope_scaling": LLAMA3},
    "linear": {**LLAMA, "rope_scaling": LINEAR},
    "window": {**BASE, "model_type": "mistral", "sliding_window": 5},
    "exact gelu": {**GPT2, "activation_function": "gelu"},
}
LAYOUTS = {"tp2": (2, 1), "pp2": (1, 2), "tp2 pp2": (2, 2)}
SPREAD = ("tied", "gpt2", "qwen3")  # families that are computed in these layouts too
SCALINGS = (LLAMA3, {**LLAMA3, "low_freq_factor": 2.0}, {**LLAMA3, "factor": 2.0}, LINEAR, YARN,
            {"rope_type": "dynamic", "factor": 2.0})  # fmt: skip
# field -> (what a refusal calls it, other values); of every family but GPT-2
FIELDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "hidden_act": ("activation", ("gelu", "relu", "gelu_pytorch_tanh")),
    "rms_norm_eps": ("norm epsilon", (1e-1,)),
    "rope_theta": ("rope theta", (50.0, 1234.5)),
    "rope_scaling": ("rope scaling", SCALINGS),
    "partial_rotary_factor": ("rotated part of a head", (0.5,)),
    "head_dim": ("head size", (16,)),
    "num_key_value_heads": ("key and value heads", (1, 4)),
    "num_attention_heads": ("query heads", (2,)),
    "intermediate_size": ("MLP size", (40,)),
    "tie_word_embeddings": ("tie_word_embeddings", (True,)),
    "attention_bias": ("tensors", (True,)),
    "mlp_bias": ("tensors", (True,)),
    "sliding_window": ("attention window", (5, 1000)),
    "use_sliding_window": ("attention window", (True,)),
    "attn_logit_softcapping": ("softcapping", (20.0,)),
    "final_logit_softcapping": ("softcapping", (20.0,)),
    "query_pre_attn_scalar": ("query_pre_attn_scalar", (4,)),
    "attention_multiplier": ("attention_multiplier", (0.5,)),
    "logits_scaling": ("logits_scaling", (2.0,)),
    "initializer_range": ("", (0.1,)),
    "attention_dropout": ("", (0.1,)),
    "pretraining_tp": ("", (2,)),
    "use_cache": ("", (False,)),
}
GPT2_FIELDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "activation_function": ("activation", ("gelu", "relu", "silu", "gelu_fast", "tanh")),
    "layer_norm_epsilon": ("norm epsilon", (1e-1,)),
    "n_inner": ("MLP size", (40,)),
    "n_head": ("query heads", (2,)),
    "scale_attn_weights": ("scale_attn_weights", (False,)),
    "scale_attn_by_inverse_layer_idx": ("inverse_layer_idx", (True,)),
    "reorder_and_upcast_attn": ("", (True,)),
    "tie_word_embeddings": ("tie_word_embeddings", (False,)),
    "attn_pdrop": ("", (0.1,)),
}
MORE = {  # combinations that only one family has
    "qwen2, windows of all layers": (
        {**FAMILIES["qwen2"], "use_sliding_window": True, "sliding_window": 5,
         "max_window_layers": 0}, "attention window"),
    "qwen2, windows of some layers": (
        {**FAMILIES["qwen2"], "use_sliding_window": True, "sliding_window": 5,
         "max_window_layers": 1}, "attention window"),
    "qwen3, windows of some layers": (
        {**FAMILIES["qwen3"], "use_sliding_window": True, "sliding_window": 5,
         "layer_types": ["sliding_attention", "full_attention"]}, "attention window"),
    "phi3, long": ({**FAMILIES["phi3"], "rope_scaling": LONG}, "rope scaling"),
    "gemma": ({**BASE, "model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}, "embeddings"),
    "gemma2": ({**BASE, "model_type": "gemma2"}, "softcapping"),
}  # fmt: skip


def _variants() -> dict[str, tuple[dict[str, Any], str]]:
    """Every family with one field changed: name -> (config, what a refusal calls the field)."""
    found = dict(MORE)
    for family, config in FAMILIES.items():
        for field, (called, values) in (GPT2_FIELDS if family == "gpt2" else FIELDS).items():
            if (family, field) == ("phi3", "rope_scaling"):
                continue  # transformers takes longrope alone
            for i, value in enumerate(values):
                found[f"{family}, {field} {i}"] = ({**config, field: value}, called)
    return found


VARIANTS = _variants()
REFUSED = re.compile(  # all others are computed
    r"\w+, (hidden_act|\w+_logit_softcapping|query_pre_attn_scalar|attention_multiplier"
    r"|logits_scaling) \d"
    r"|(?!phi3)\w+, (rope_scaling [145]|partial_rotary_factor \d)"
    r"|(llama|qwen3), attention_bias \d|llama, mlp_bias \d"
    r"|gpt2, (activation_function [124]|scale_attn_(weights|by_inverse_layer_idx) \d)"
    r"|qwen[23], windows of some layers|phi3, long|gemma2?"
)


@pytest.fixture(autouse=True)
def _megatron() -> None:
    pytest.importorskip("megatron.core")


def test_megatron_core_built_from_our_args_gives_transformers_logits(tmp_path: Path) -> None:
    made = Computed(tmp_path)
    for name, said in MODELS.items():
        made.model(name, said)
        for to in ("megatron", "torch_dist"):
            made.write(name, to)
            for tp, pp in LAYOUTS.values() if name in SPREAD else ():
                made.write(name, to, tp, pp)
    assert made.differing() == []
    for name, family in (("llama3", "llama"), ("linear", "llama"), ("window", "mistral"),
                         ("exact gelu", "gpt2")):  # fmt: skip
        apart = (made.logits[name] - made.logits[family]).abs().max()
        assert apart > 1e-4 * made.logits[family].abs().max(), "a setting that changes nothing"


def _refusal(source: Path, made: Computed) -> str:
    """Why a model is refused, in both formats; "" where it was written."""
    try:
        made.write(source.name, "megatron")
    except CheckpointError as error:
        with pytest.raises(CheckpointError, match="--allow-incomplete-args"):
            reshard(source, source.parent / "out", to="torch_dist")
        return str(error)
    return ""


def test_a_changed_field_is_computed_or_refused_by_name(tmp_path: Path) -> None:
    made = Computed(tmp_path)
    refused, unnamed = [], []
    for name, (said, called) in VARIANTS.items():
        why = _refusal(made.model(name, said), made)
        if why:
            refused.append(name)
            lacks = re.search(r"from them: (.*)\. Pass --allow-incomplete-args", why)
            if lacks is None or not called or called not in lacks[1]:
                unnamed.append(f"{name}: {why}")
    assert unnamed == []
    assert made.differing() == []
    assert refused == [name for name in VARIANTS if REFUSED.fullmatch(name)]
