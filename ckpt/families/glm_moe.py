"""GLM-4.5 and dots.llm1: grouped-query attention with DeepSeek V3's experts; GLM has MTP layers."""

from __future__ import annotations

from ..model.family import Family, Function, Rule
from ..model.layer_kinds import dense_first, listed
from .deepseek import MOE_SIZES, SIGMOID
from .expert_rows import DENSE, MOE, dense_mlp, experts, router, router_bias, shared_experts
from .llama import LLAMA
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

_KINDS = (listed("mlp_layer_types", {"dense": DENSE, "sparse": MOE}, dense_first),)


def _rules(*, norms: tuple[str, ...], out_bias: bool) -> tuple[Rule, ...]:
    bias = ("attention_bias",)
    out = norm("self_attention.linear_proj.bias", M + "self_attn.o_proj.bias", when=bias)
    q, k = (
        norm(f"self_attention.{x}_layernorm.weight", f"{M}self_attn.{x}_norm.weight", "hd", norms)
        for x in "qk"
    )
    return (
        embedding(),
        norm("input_layernorm.weight", M + "input_layernorm.weight"),
        attention_out(),
        *((out,) if out_bias else ()),
        qkv(),
        qkv_bias(bias),
        q,
        k,
        norm("pre_mlp_layernorm.weight", M + "post_attention_layernorm.weight"),
        *dense_mlp(),
        router(),
        router_bias(),
        *experts(),
        *shared_experts(M + "mlp.shared_experts."),
        final_norm("weight", "model.norm.weight"),
        *head(),
    )


GLM4_MOE = Family(
    name="glm4_moe",
    model_types=("glm4_moe",),
    sizes={**LLAMA_SIZES, **MOE_SIZES, **MTP_SIZES},
    flags={"tie_word_embeddings": False, "attention_bias": False, "use_qk_norm": False},
    rules=with_mtp(_rules(norms=("use_qk_norm",), out_bias=False)),
    function=Function(
        {
            "rms_norm_eps": 1e-5, "hidden_act": "silu", "partial_rotary_factor": 0.5,
            "norm_topk_prob": True,
        },
        SIGMOID,
    ),
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
    kinds=_KINDS,
    copies=MTP_COPIES,
)  # fmt: skip

DOTS1 = Family(
    name="dots1",
    model_types=("dots1",),
    sizes={**LLAMA_SIZES, **MOE_SIZES},
    flags={"tie_word_embeddings": False, "attention_bias": False},
    rules=_rules(norms=(), out_bias=True),
    function=Function(
        {
            "rms_norm_eps": 1e-6, "hidden_act": "silu", "sliding_window": 4096,
            "norm_topk_prob": False,
        },
        SIGMOID,
    ),
    ignore=OLD_BUFFERS,
    tied_names=LLAMA.tied_names,
    kinds=_KINDS,
)  # fmt: skip

FAMILIES = (GLM4_MOE, DOTS1)
