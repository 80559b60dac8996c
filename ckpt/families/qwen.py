"""Qwen2 (QKV bias) and Qwen3 (norms on q and k): the Llama rows with small additions."""

from __future__ import annotations

from ..model.family import Family, Function
from .llama import LLAMA
from .rows import (
    LLAMA_SIZES,
    OLD_BUFFERS,
    M,
    attention_out,
    embedding,
    final_norm,
    gated_mlp,
    head,
    norm,
    qkv,
    qkv_bias,
)

_FUNCTION = Function(
    {
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "use_sliding_window": False,
        "sliding_window": 4096, "max_window_layers": 28,
    },
    window=0,
)  # fmt: skip

QWEN2 = Family(
    name="qwen2",
    model_types=("qwen2",),
    sizes=LLAMA_SIZES,
    flags={"tie_word_embeddings": False},
    rules=(
        embedding(),
        norm("input_layernorm.weight", M + "input_layernorm.weight"),
        attention_out(),
        qkv(),
        qkv_bias(),
        norm("pre_mlp_layernorm.weight", M + "post_attention_layernorm.weight"),
        *gated_mlp(),
        final_norm("weight", "model.norm.weight"),
        *head(),
    ),
    function=_FUNCTION,
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
)

QWEN3 = Family(
    name="qwen3",
    model_types=("qwen3",),
    sizes={**LLAMA_SIZES, "hd": "head_dim|128"},  # the config class's default is no quotient
    flags={"tie_word_embeddings": False, "attention_bias": False},
    rules=(
        embedding(),
        norm("input_layernorm.weight", M + "input_layernorm.weight"),
        attention_out(),
        norm(
            "self_attention.linear_proj.bias",
            M + "self_attn.o_proj.bias",
            when=("attention_bias",),
        ),
        qkv(),
        qkv_bias(("attention_bias",)),
        norm("self_attention.q_layernorm.weight", M + "self_attn.q_norm.weight", "hd"),
        norm("self_attention.k_layernorm.weight", M + "self_attn.k_norm.weight", "hd"),
        norm("pre_mlp_layernorm.weight", M + "post_attention_layernorm.weight"),
        *gated_mlp(),
        final_norm("weight", "model.norm.weight"),
        *head(),
    ),
    function=_FUNCTION,
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
)

FAMILIES = (QWEN2, QWEN3)
