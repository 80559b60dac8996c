"""Seed-OSS: Llama's tensors, with biases of q, k and v."""

from __future__ import annotations

from ..model.family import Family, Function
from .llama import LLAMA, MLP_BIAS
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

SEED_OSS = Family(
    name="seed_oss",
    model_types=("seed_oss",),
    sizes={**LLAMA_SIZES, "hd": "head_dim|128"},
    flags={
        "tie_word_embeddings": False, "attention_bias": True, "attention_out_bias": False,
        "mlp_bias": False,
    },
    rules=(
        embedding(),
        norm("input_layernorm.weight", M + "input_layernorm.weight"),
        attention_out(),
        norm(
            "self_attention.linear_proj.bias",
            M + "self_attn.o_proj.bias",
            when=("attention_out_bias",),
        ),
        qkv(),
        qkv_bias(("attention_bias",)),
        norm("pre_mlp_layernorm.weight", M + "post_attention_layernorm.weight"),
        *gated_mlp(),
        *MLP_BIAS,
        final_norm("weight", "model.norm.weight"),
        *head(),
    ),
    function=Function({"rms_norm_eps": 1e-6, "hidden_act": "silu"}),
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
)  # fmt: skip

FAMILIES = (SEED_OSS,)
