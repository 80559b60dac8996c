"""Phi-1, Phi-1.5 and Phi-2: one LayerNorm a layer, attention and MLP side by side, all biases."""

from __future__ import annotations

from ..model.family import Family, Function, Part, Rule
from ..model.mesh import Shard
from .llama import LLAMA
from .rows import (
    LAST,
    OLD_BUFFERS,
    PLAIN_SIZES,
    M,
    attention_out,
    embedding,
    final_layer_norm,
    head,
    layer_norm,
    norm,
    plain_mlp,
    qkv,
    qkv_bias,
)

_QK_NORM = ("qk_layernorm",)

PHI = Family(
    name="phi",
    model_types=("phi",),
    sizes=PLAIN_SIZES,
    flags={"tie_word_embeddings": False, "qk_layernorm": False},
    rules=(
        embedding(),
        *layer_norm("input_layernorm", M + "input_layernorm"),
        attention_out(M + "self_attn.dense.weight"),
        norm("self_attention.linear_proj.bias", M + "self_attn.dense.bias"),
        qkv(),
        qkv_bias(),
        *layer_norm("self_attention.q_layernorm", M + "self_attn.q_layernorm", "hd", _QK_NORM),
        *layer_norm("self_attention.k_layernorm", M + "self_attn.k_layernorm", "hd", _QK_NORM),
        *plain_mlp(M + "mlp.fc1", M + "mlp.fc2"),
        *final_layer_norm("model.final_layernorm"),
        *head(),
        Rule(
            "output_layer.bias",
            "vocab",
            (Part("lm_head.bias", "vocab"),),
            {"tp": Shard(0)},
            LAST,
            pad="vocab",
        ),
    ),
    function=Function(
        {
            "layer_norm_eps": 1e-5, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5,
            "qk_layernorm": False,
        },
        plain={"qk_layernorm": (False,)},
        beyond=("attention and MLP side by side",),
        layer_norm=True,
    ),
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
)  # fmt: skip

FAMILIES = (PHI,)
