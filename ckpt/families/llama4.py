"""Llama 4's language model: experts stacked as [expert, in, out], one expert for all tokens.

Each n-th layer has experts; the others have an MLP of a width of their own.
"""

from __future__ import annotations

from ..model.family import Family, Function, Part
from ..model.layer_kinds import each_nth
from .expert_rows import EXPERT_SIZES, SHARED_SIZES, expert, router, shared_experts, without
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

_F = M + "feed_forward."
_BIAS = ("attention_bias",)

LLAMA4 = Family(
    name="llama4",
    model_types=("llama4_text",),
    sizes={
        **LLAMA_SIZES,
        "gate": "intermediate_size_mlp|0",
        "up": "intermediate_size_mlp|0",
        "expert": "num_local_experts|num_experts",
        "xgate": "intermediate_size",
        **EXPERT_SIZES,
        "sgate": "intermediate_size|0",
        **SHARED_SIZES,
    },
    flags={"tie_word_embeddings": False, "attention_bias": False},
    rules=(
        embedding(),
        norm("input_layernorm.weight", M + "input_layernorm.weight"),
        attention_out(),
        norm("self_attention.linear_proj.bias", M + "self_attn.o_proj.bias", when=_BIAS),
        qkv(),
        qkv_bias(_BIAS),
        norm("pre_mlp_layernorm.weight", M + "post_attention_layernorm.weight"),
        *without(gated_mlp(_F)),
        router(_F + "router.weight"),
        expert(
            "linear_fc1.weight", "xgate+xup h",
            Part(_F + "experts.gate_up_proj", "{expert} h xgate+xup"),
        ),
        expert("linear_fc2.weight", "h xgate", Part(_F + "experts.down_proj", "{expert} xgate h")),
        *shared_experts(_F + "shared_expert."),
        final_norm("weight", "model.norm.weight"),
        *head(),
    ),
    function=Function(
        {"rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 500000.0},
        beyond=("L2 norms of q and k in some layers", "attention in chunks of the sequence"),
        rotary="interleaved",
    ),
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
    kinds=(each_nth("moe_layers", "interleave_moe_layer_step"),),
)  # fmt: skip

FAMILIES = (LLAMA4,)
