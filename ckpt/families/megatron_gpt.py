"""Decoders of Megatron-LM that no model of transformers is: any mix of grouped-query or latent
attention, norms on q and k, biases of q, k and v, dense layers and layers with experts, shared
experts and MTP layers.

Its config.json is made from args (formats/megatron/args.py), with the keys that transformers'
models have; `model_type` is ours, so transformers refuses to load a merge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..model.family import Family, Function, Rule
from ..model.layer_kinds import listed
from .expert_rows import (
    DENSE,
    EXPERT_SIZES,
    MOE,
    SHARED_SIZES,
    dense_mlp,
    experts,
    router,
    router_bias,
    shared_experts,
)
from .llama import LLAMA
from .mla_rows import MLA_SIZES, latent_attention
from .mtp_rows import MTP_COPIES, MTP_SIZES, with_mtp
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

_LATENT, _GROUPED = ("kl>0",), ("!kl>0",)
_MLA = {
    symbol: text.removesuffix("|0") + "|0"
    for symbol, text in MLA_SIZES.items()
    if symbol not in LLAMA_SIZES
}


def _dense(config: Mapping[str, object], layers: int, origin: str) -> tuple[str, ...]:
    return ((MOE if config.get("num_experts") else DENSE),) * layers


def _when(flags: tuple[str, ...], *rules: Rule) -> tuple[Rule, ...]:
    return tuple(replace(rule, when=(*rule.when, *flags)) for rule in rules)


def _shared() -> tuple[Rule, ...]:
    """Shared experts with a gate and without."""
    prefix = M + "mlp.shared_expert."
    gate, *rest = shared_experts(prefix, M + "mlp.shared_expert_gate.weight")
    return (*_when(("shared_expert_gate",), gate), *rest)


_RULES = (
    embedding(),
    norm("input_layernorm.weight", M + "input_layernorm.weight"),
    *_when(_GROUPED, attention_out(), qkv(), qkv_bias(("qkv_bias",))),
    *_when(
        (*_GROUPED, "use_qk_norm"),
        norm("self_attention.q_layernorm.weight", M + "self_attn.q_norm.weight", "hd"),
        norm("self_attention.k_layernorm.weight", M + "self_attn.k_norm.weight", "hd"),
    ),
    *_when(_LATENT, *latent_attention()),
    norm("pre_mlp_layernorm.weight", M + "post_attention_layernorm.weight"),
    *dense_mlp(),
    router(),
    *_when(("router_bias",), router_bias()),
    *experts(),
    *_shared(),
    final_norm("weight", "model.norm.weight"),
    *head(),
)

MEGATRON_GPT = Family(
    name="megatron_gpt",
    model_types=("megatron_gpt",),
    sizes={
        **LLAMA_SIZES,
        **_MLA,
        "expert": "num_experts|0",
        "xgate": "moe_intermediate_size|0",
        **EXPERT_SIZES,
        "sgate": "shared_expert_intermediate_size|0",
        **SHARED_SIZES,
        **MTP_SIZES,
    },
    flags={
        "tie_word_embeddings": False, "qkv_bias": False, "use_qk_norm": False,
        "router_bias": False, "shared_expert_gate": False,
    },
    rules=with_mtp(_RULES),
    function=Function({"rms_norm_eps": 1e-5, "hidden_act": "silu"}),
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
    kinds=(listed("mlp_layer_types", {"dense": DENSE, "sparse": MOE}, _dense),),
    copies=MTP_COPIES,
)  # fmt: skip

FAMILIES = (MEGATRON_GPT,)
