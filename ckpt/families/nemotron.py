"""Nemotron-4 and Minitron: LayerNorm times 1 + w, an MLP of two layers with squared ReLU.

Arcee (AFM) has the same MLP, and RMSNorm.
"""

from __future__ import annotations

from ..model.family import Family, Function
from .llama import LLAMA
from .rows import (
    OLD_BUFFERS,
    PLAIN_SIZES,
    M,
    attention_out,
    embedding,
    final_layer_norm,
    final_norm,
    head,
    layer_norm,
    norm,
    plain_mlp,
    qkv,
    qkv_bias,
)

_BIAS = ("attention_bias",)
_FLAGS = {"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False}
_ATTENTION = (
    attention_out(),
    norm("self_attention.linear_proj.bias", M + "self_attn.o_proj.bias", when=_BIAS),
    qkv(),
    qkv_bias(_BIAS),
)
_MLP = plain_mlp(M + "mlp.up_proj", M + "mlp.down_proj", ("mlp_bias",))

NEMOTRON = Family(
    name="nemotron",
    model_types=("nemotron",),
    sizes=PLAIN_SIZES,
    flags=_FLAGS,
    rules=(
        embedding(),
        *layer_norm("input_layernorm", M + "input_layernorm"),
        *_ATTENTION,
        *layer_norm("pre_mlp_layernorm", M + "post_attention_layernorm"),
        *_MLP,
        *final_layer_norm("model.norm"),
        *head(),
    ),
    norm_offset=1,
    function=Function(
        {"norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5}, layer_norm=True
    ),
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
)

ARCEE = Family(
    name="arcee",
    model_types=("arcee",),
    sizes=PLAIN_SIZES,
    flags=_FLAGS,
    rules=(
        embedding(),
        norm("input_layernorm.weight", M + "input_layernorm.weight"),
        *_ATTENTION,
        norm("pre_mlp_layernorm.weight", M + "post_attention_layernorm.weight"),
        *_MLP,
        final_norm("weight", "model.norm.weight"),
        *head(),
    ),
    function=Function({"rms_norm_eps": 1e-5, "hidden_act": "relu2"}),
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
)

FAMILIES = (NEMOTRON, ARCEE)
