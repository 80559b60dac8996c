"""GLM-4 and GLM-4-0414: gate and up in one tensor, biases of q, k and v, interleaved rotary pairs.

The second one adds a norm after attention and one after the MLP.
"""

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
    fused_gate_up,
    gated_mlp,
    head,
    norm,
    qkv,
    qkv_bias,
)

_FLAGS = {"tie_word_embeddings": False, "attention_bias": True}
_DEFAULTS = {"rms_norm_eps": 1.5625e-07, "hidden_act": "silu", "partial_rotary_factor": 0.5}

_BEFORE = (
    embedding(),
    norm("input_layernorm.weight", M + "input_layernorm.weight"),
    attention_out(),
)
_QKV = (
    qkv(),
    qkv_bias(("attention_bias",)),
    norm("pre_mlp_layernorm.weight", M + "post_attention_layernorm.weight"),
    fused_gate_up(),
    gated_mlp()[1],
)
_AFTER = (final_norm("weight", "model.norm.weight"), *head())
_POST = "post_layernorm.weight"

GLM = Family(
    name="glm",
    model_types=("glm",),
    sizes={**LLAMA_SIZES, "g": "num_key_value_heads|2", "hd": "head_dim|128"},
    flags=_FLAGS,
    rules=(*_BEFORE, *_QKV, *_AFTER),
    function=Function(_DEFAULTS, rotary="interleaved"),
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
)

GLM4 = Family(
    name="glm4",
    model_types=("glm4",),
    sizes=GLM.sizes,
    flags=_FLAGS,
    rules=(
        *_BEFORE,
        norm("self_attention.linear_proj." + _POST, M + "post_self_attn_layernorm.weight"),
        *_QKV,
        norm("mlp.linear_fc2." + _POST, M + "post_mlp_layernorm.weight"),
        *_AFTER,
    ),
    function=Function(
        _DEFAULTS, beyond=("norms after attention and after the MLP",), rotary="interleaved"
    ),
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
)

FAMILIES = (GLM, GLM4)
