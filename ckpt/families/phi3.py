"""Phi-3: Hugging Face's files hold q, k, v in one tensor, and gate, up in one tensor."""

from __future__ import annotations

from ..model.family import Family, Function, Part, Rule
from .llama import LLAMA
from .rows import (
    COLUMN,
    HEADS,
    LLAMA_SIZES,
    OLD_BUFFERS,
    D,
    M,
    attention_out,
    embedding,
    final_norm,
    fused_gate_up,
    gated_mlp,
    head,
    norm,
)

PHI3 = Family(
    name="phi3",
    model_types=("phi3",),
    sizes=LLAMA_SIZES,
    flags={"tie_word_embeddings": False},
    rules=(
        embedding(),
        norm("input_layernorm.weight", M + "input_layernorm.weight"),
        attention_out(),
        Rule(
            D + "self_attention.linear_qkv.weight",
            "q+k+v h",
            (Part(M + "self_attn.qkv_proj.weight", "q+k+v h"),),
            COLUMN,
            groups="qkv",
            checks=HEADS,
        ),
        norm("pre_mlp_layernorm.weight", M + "post_attention_layernorm.weight"),
        fused_gate_up(),
        gated_mlp()[1],
        final_norm("weight", "model.norm.weight"),
        *head(),
    ),
    function=Function(
        {"rms_norm_eps": 1e-5, "hidden_act": "silu", "partial_rotary_factor": 1.0}, window=0
    ),
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
)

FAMILIES = (PHI3,)
