"""OLMo 2 and OLMo 3: norms after attention and MLP in place of those before, norms on q and k.

A norm on q, or on k, is over all heads together, so every tp rank holds it whole.
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
    gated_mlp,
    head,
    norm,
    qkv,
    qkv_bias,
)

_BIAS = ("attention_bias",)
_RULES = (
    embedding(),
    attention_out(),
    norm("self_attention.linear_proj.bias", M + "self_attn.o_proj.bias", when=_BIAS),
    norm("self_attention.linear_proj.post_layernorm.weight", M + "post_attention_layernorm.weight"),
    qkv(),
    qkv_bias(_BIAS),
    norm("self_attention.q_layernorm.weight", M + "self_attn.q_norm.weight", "q"),
    norm("self_attention.k_layernorm.weight", M + "self_attn.k_norm.weight", "k"),
    *gated_mlp(),
    norm("mlp.linear_fc2.post_layernorm.weight", M + "post_feedforward_layernorm.weight"),
    final_norm("weight", "model.norm.weight"),
    *head(),
)
_FLAGS = {"tie_word_embeddings": False, "attention_bias": False}
_DEFAULTS = {"rms_norm_eps": 1e-5, "hidden_act": "silu"}
_BEYOND = ("norms after attention and MLP, none before", "norms over all heads of q and k")

OLMO2 = Family(
    name="olmo2",
    model_types=("olmo2",),
    sizes=LLAMA_SIZES,
    flags=_FLAGS,
    rules=_RULES,
    function=Function(_DEFAULTS, beyond=_BEYOND),
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
)

OLMO3 = Family(
    name="olmo3",
    model_types=("olmo3",),
    sizes=LLAMA_SIZES,
    flags=_FLAGS,
    rules=_RULES,
    function=Function(
        {
            **_DEFAULTS, "sliding_window": 4096, "rope_theta": 500000.0,
            "rope_local_base_freq": None,
        },
        beyond=_BEYOND,
        window=4,
    ),
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
)  # fmt: skip

FAMILIES = (OLMO2, OLMO3)
