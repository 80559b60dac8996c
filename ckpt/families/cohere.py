"""Cohere (Command R): one LayerNorm without bias, attention and MLP side by side, scaled logits."""

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

_BIAS, _QK_NORM = ("attention_bias",), ("use_qk_norm",)

COHERE = Family(
    name="cohere",
    model_types=("cohere",),
    sizes=LLAMA_SIZES,
    flags={"tie_word_embeddings": True, "attention_bias": False, "use_qk_norm": False},
    rules=(
        embedding(),
        norm("input_layernorm.weight", M + "input_layernorm.weight"),
        attention_out(),
        norm("self_attention.linear_proj.bias", M + "self_attn.o_proj.bias", when=_BIAS),
        qkv(),
        qkv_bias(_BIAS),
        norm("self_attention.q_layernorm.weight", M + "self_attn.q_norm.weight", "n hd", _QK_NORM),
        norm("self_attention.k_layernorm.weight", M + "self_attn.k_norm.weight", "g hd", _QK_NORM),
        *gated_mlp(),
        final_norm("weight", "model.norm.weight"),
        *head(),
    ),
    function=Function(
        {
            "layer_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 500000.0,
            "logit_scale": 0.0625, "use_qk_norm": False,
        },
        plain={"logit_scale": (1,), "use_qk_norm": (False, None)},
        beyond=("attention and MLP side by side", "LayerNorm without bias"),
        layer_norm=True,
        rotary="interleaved",
    ),
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
)  # fmt: skip

FAMILIES = (COHERE,)
