"""DeepSeek V2 and V3 (Kimi K2, Moonlight) and GLM-4.7-Flash: latent attention, experts, MTP.

The first layers are dense. V3's router has a bias, and its files may hold MTP layers.
"""

from __future__ import annotations

from ..model.family import Family, Function, Rule
from ..model.layer_kinds import dense_first, listed
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
from .rows import OLD_BUFFERS, M, embedding, final_norm, head, norm

_KINDS = (listed("mlp_layer_types", {"dense": DENSE, "sparse": MOE}, dense_first),)
MOE_SIZES = {
    "gate": "intermediate_size",
    "up": "intermediate_size",
    "vocab": "vocab_size",
    "expert": "n_routed_experts|num_experts|num_local_experts",
    "xgate": "moe_intermediate_size",
    **EXPERT_SIZES,
    "sgate": "n_shared_experts*moe_intermediate_size|0",
    **SHARED_SIZES,
}


def _rules(*attention: Rule, bias: bool) -> tuple[Rule, ...]:
    return (
        embedding(),
        norm("input_layernorm.weight", M + "input_layernorm.weight"),
        *attention,
        norm("pre_mlp_layernorm.weight", M + "post_attention_layernorm.weight"),
        *dense_mlp(),
        router(),
        *((router_bias(),) if bias else ()),
        *experts(),
        *shared_experts(M + "mlp.shared_experts."),
        final_norm("weight", "model.norm.weight"),
        *head(),
    )


# megatron-core normalises the scores of the chosen experts where a sigmoid gives them
SIGMOID = {"norm_topk_prob": (True,)}
_BEYOND = ("latent attention", "experts chosen by groups")

DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    model_types=("deepseek_v2",),
    sizes={**MLA_SIZES, **MOE_SIZES},
    flags={"tie_word_embeddings": False},
    rules=_rules(*latent_attention(), bias=False),
    function=Function({"rms_norm_eps": 1e-6, "hidden_act": "silu"}, beyond=_BEYOND),
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
    kinds=_KINDS,
)

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    model_types=("deepseek_v3", "kimi_k2", "glm4_moe_lite"),
    sizes={**MLA_SIZES, **MOE_SIZES, **MTP_SIZES},
    flags={"tie_word_embeddings": False},
    rules=with_mtp(_rules(*latent_attention(), bias=True)),
    function=Function(
        {"rms_norm_eps": 1e-6, "hidden_act": "silu", "norm_topk_prob": True}, SIGMOID
    ),
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
    kinds=_KINDS,
    copies=MTP_COPIES,
)

FAMILIES = (DEEPSEEK_V2, DEEPSEEK_V3)
