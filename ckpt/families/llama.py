"""Llama 1, 2 and 3, and Mistral: RMSNorm, gated MLP, grouped query attention, no packing."""

from __future__ import annotations

from ..model.family import Family, Function, Part, Rule
from .rows import (
    COLUMN,
    LLAMA_SIZES,
    OLD_BUFFERS,
    D,
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

_BIAS = ("attention_bias",)
_DEFAULTS = {"rms_norm_eps": 1e-6, "hidden_act": "silu"}
MLP_BIAS = (
    Rule(
        D + "mlp.linear_fc1.bias",
        "gate+up",
        (Part(M + "mlp.gate_proj.bias", "gate"), Part(M + "mlp.up_proj.bias", "up")),
        COLUMN,
        groups="glu",
        when=("mlp_bias",),
    ),
    norm("mlp.linear_fc2.bias", M + "mlp.down_proj.bias", when=("mlp_bias",)),
)

LLAMA = Family(
    name="llama",
    model_types=("llama",),
    sizes=LLAMA_SIZES,
    flags={"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False},
    rules=(
        embedding(),
        norm("input_layernorm.weight", M + "input_layernorm.weight"),
        attention_out(),
        norm("self_attention.linear_proj.bias", M + "self_attn.o_proj.bias", when=_BIAS),
        qkv(),
        qkv_bias(_BIAS),
        norm("pre_mlp_layernorm.weight", M + "post_attention_layernorm.weight"),
        *gated_mlp(),
        *MLP_BIAS,
        final_norm("weight", "model.norm.weight"),
        *head(),
    ),
    function=Function(_DEFAULTS),
    ignore=OLD_BUFFERS,
    tied_names={"lm_head.weight": "model.embed_tokens.weight"},
)

MISTRAL = Family(
    name="mistral",
    model_types=("mistral",),
    sizes=LLAMA_SIZES,
    flags={"tie_word_embeddings": False},
    rules=LLAMA.rules,
    function=Function({**_DEFAULTS, "sliding_window": 4096}, window=0),
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
)

FAMILIES = (LLAMA, MISTRAL)
