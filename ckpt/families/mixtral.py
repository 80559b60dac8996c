"""Mixtral, MiniMax-M2 and OLMoE: every layer has experts, as wide as the config's MLP."""

from __future__ import annotations

from ..model.family import Family, Function
from ..model.layer_kinds import alike
from .expert_rows import EXPERT_SIZES, MOE, experts, router, router_bias
from .llama import LLAMA
from .rows import (
    LLAMA_SIZES,
    OLD_BUFFERS,
    M,
    attention_out,
    embedding,
    final_norm,
    head,
    norm,
    qkv,
    qkv_bias,
)

_BIAS = ("attention_bias",)
_B = M + "block_sparse_moe."
_SIZES = {key: value for key, value in LLAMA_SIZES.items() if key not in ("gate", "up")} | {
    "xgate": "intermediate_size",
    **EXPERT_SIZES,
}

MIXTRAL = Family(
    name="mixtral",
    model_types=("mixtral",),
    sizes={**_SIZES, "expert": "num_local_experts|num_experts"},
    flags={"tie_word_embeddings": False},
    rules=(
        embedding(),
        norm("input_layernorm.weight", M + "input_layernorm.weight"),
        attention_out(),
        qkv(),
        norm("pre_mlp_layernorm.weight", M + "post_attention_layernorm.weight"),
        router(_B + "gate.weight"),
        *experts(_B + "experts.{expert}.", ("w1", "w3", "w2"), _B + "experts."),
        final_norm("weight", "model.norm.weight"),
        *head(),
    ),
    function=Function(
        {"rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 1000000.0}, window=0
    ),
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
    kinds=(alike(MOE),),
)

OLMOE = Family(
    name="olmoe",
    model_types=("olmoe",),
    sizes={**_SIZES, "expert": "num_experts|num_local_experts"},
    flags={"tie_word_embeddings": False, "attention_bias": False},
    rules=(
        embedding(),
        norm("input_layernorm.weight", M + "input_layernorm.weight"),
        attention_out(),
        norm("self_attention.linear_proj.bias", M + "self_attn.o_proj.bias", when=_BIAS),
        qkv(),
        qkv_bias(_BIAS),
        norm("self_attention.q_layernorm.weight", M + "self_attn.q_norm.weight", "q"),
        norm("self_attention.k_layernorm.weight", M + "self_attn.k_norm.weight", "k"),
        norm("pre_mlp_layernorm.weight", M + "post_attention_layernorm.weight"),
        router(),
        *experts(),
        final_norm("weight", "model.norm.weight"),
        *head(),
    ),
    function=Function(
        {"rms_norm_eps": 1e-5, "hidden_act": "silu"}, {"clip_qkv": (None,)},
        ("norms over all heads of q and k",),
    ),
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
    kinds=(alike(MOE),),
)  # fmt: skip

MINIMAX_M2 = Family(
    name="minimax_m2",
    model_types=("minimax_m2",),
    sizes={**_SIZES, "expert": "num_local_experts|num_experts"},
    flags={"tie_word_embeddings": False},
    rules=(
        embedding(),
        norm("input_layernorm.weight", M + "input_layernorm.weight"),
        attention_out(),
        qkv(),
        norm("self_attention.q_layernorm.weight", M + "self_attn.q_norm.weight", "q"),
        norm("self_attention.k_layernorm.weight", M + "self_attn.k_norm.weight", "k"),
        norm("pre_mlp_layernorm.weight", M + "post_attention_layernorm.weight"),
        router(_B + "gate.weight"),
        router_bias(_B + "e_score_correction_bias"),
        *experts(_B + "experts.{expert}.", ("w1", "w3", "w2"), _B + "experts."),
        final_norm("weight", "model.norm.weight"),
        *head(),
    ),
    function=Function(
        {"rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 5000000.0},
        beyond=("norms over all heads of q and k",),
    ),
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
    kinds=(alike(MOE),),
)

FAMILIES = (MIXTRAL, MINIMAX_M2, OLMOE)
