"""Gemma, Gemma 2 and 3: tied head, any head size, norms stored zero-centred (times 1 + w).

Gemma 2 adds a norm after attention and one after the MLP; their stored names are those of
Megatron-Bridge, since a plain GPTModel has no such tensors. Gemma 3 adds norms on q and k, and
other rotary frequencies in layers with a window.
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
_ATTENTION = (
    norm("input_layernorm.weight", M + "input_layernorm.weight"),
    attention_out(),
    norm("self_attention.linear_proj.bias", M + "self_attn.o_proj.bias", when=_BIAS),
)
_QKV = (qkv(), qkv_bias(_BIAS))
_SCALED = ("embeddings scaled by sqrt(hidden size)",)
_FLAGS = {"tie_word_embeddings": True, "attention_bias": False}

GEMMA = Family(
    name="gemma",
    model_types=("gemma",),
    sizes={**LLAMA_SIZES, "hd": "head_dim|256"},  # the config class's default
    flags=_FLAGS,
    rules=(
        embedding(),
        *_ATTENTION,
        *_QKV,
        norm("pre_mlp_layernorm.weight", M + "post_attention_layernorm.weight"),
        *gated_mlp(),
        final_norm("weight", "model.norm.weight"),
        *head(),
    ),
    norm_offset=1,
    function=Function({"rms_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"}, beyond=_SCALED),
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
)

GEMMA2 = Family(
    name="gemma2",
    model_types=("gemma2",),
    sizes={**LLAMA_SIZES, "hd": "head_dim|256"},
    flags=_FLAGS,
    rules=(
        embedding(),
        *_ATTENTION,
        norm(
            "self_attention.linear_proj.post_layernorm.weight",
            M + "post_attention_layernorm.weight",
        ),
        *_QKV,
        norm("pre_mlp_layernorm.weight", M + "pre_feedforward_layernorm.weight"),
        *gated_mlp(),
        norm("mlp.linear_fc2.post_layernorm.weight", M + "post_feedforward_layernorm.weight"),
        final_norm("weight", "model.norm.weight"),
        *head(),
    ),
    norm_offset=1,
    function=Function(
        {
            "rms_norm_eps": 1e-6,
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 256,
        },
        beyond=(*_SCALED, "norms after attention and after the MLP"),
        window=2,
    ),
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
)

GEMMA3 = Family(
    name="gemma3",
    model_types=("gemma3_text",),
    # files on the hub leave out what is the config class's default
    sizes={
        **GEMMA2.sizes, "n": "num_attention_heads|8", "g": "num_key_value_heads|4",
        "vocab": "vocab_size|262208",
    },
    flags=_FLAGS,
    rules=(
        *GEMMA2.rules[:-3],
        norm("self_attention.q_layernorm.weight", M + "self_attn.q_norm.weight", "hd"),
        norm("self_attention.k_layernorm.weight", M + "self_attn.k_norm.weight", "hd"),
        *GEMMA2.rules[-3:],
    ),
    norm_offset=1,
    function=Function(
        {
            "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
            "query_pre_attn_scalar": 256, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
            "use_bidirectional_attention": False,
        },
        plain={"use_bidirectional_attention": (False, None)},
        beyond=GEMMA2.function.beyond,
        window=6,
    ),
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
)  # fmt: skip

FAMILIES = (GEMMA, GEMMA2, GEMMA3)
