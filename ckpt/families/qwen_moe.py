"""Qwen2 and Qwen3 with experts: some layers may be dense; Qwen2's have an expert for all tokens."""

from __future__ import annotations

from dataclasses import replace

from ..model.family import Family
from ..model.layer_kinds import listed, sparse_steps
from .expert_rows import (
    DENSE,
    EXPERT_SIZES,
    MOE,
    SHARED_SIZES,
    dense_mlp,
    experts,
    router,
    shared_experts,
)
from .llama import LLAMA
from .qwen import QWEN2, QWEN3
from .rows import M

_KINDS = (listed("mlp_layer_types", {"dense": DENSE, "sparse": MOE}, sparse_steps),)
_EXPERTS = {
    "expert": "num_experts|num_local_experts",
    "xgate": "moe_intermediate_size",
    **EXPERT_SIZES,
}
_QKV_BIAS = ("qkv_bias",)
_MLP = ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")


def _with_experts(family: Family, name: str, sizes: dict[str, str], shared: bool) -> Family:
    """The rows of a dense family, with experts after its MLP."""
    rules = [rule for rule in family.rules if not rule.name.endswith(_MLP)]
    if shared:
        rules = [replace(r, when=_QKV_BIAS) if r.name.endswith(".bias") else r for r in rules]
    at = next(i for i, rule in enumerate(rules) if rule.name.startswith("decoder.final_layernorm"))
    gate = M + "mlp.shared_expert_gate.weight"
    rules[at:at] = [
        *dense_mlp(), router(), *experts(), *(shared_experts(gate=gate) if shared else ()),
    ]  # fmt: skip
    return replace(
        family, name=name, model_types=(name,), sizes=sizes, rules=tuple(rules), kinds=_KINDS,
        flags={**family.flags, **({"qkv_bias": True} if shared else {})},
    )  # fmt: skip


QWEN2_MOE = _with_experts(
    QWEN2,
    "qwen2_moe",
    {**QWEN2.sizes, **_EXPERTS, "sgate": "shared_expert_intermediate_size|0", **SHARED_SIZES},
    shared=True,
)
QWEN3_MOE = _with_experts(QWEN3, "qwen3_moe", {**QWEN3.sizes, **_EXPERTS}, shared=False)
QWEN3_MOE = replace(QWEN3_MOE, sizes={**QWEN3_MOE.sizes, "hd": LLAMA.sizes["hd"]})

FAMILIES = (QWEN2_MOE, QWEN3_MOE)
