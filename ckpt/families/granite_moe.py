"""Granite with experts: all of a layer in one tensor, and an MLP for all tokens beside them."""

from __future__ import annotations

from dataclasses import replace

from ..model.family import Family, Function, Part, Rule
from ..model.layer_kinds import alike
from .expert_rows import EXPERT_SIZES, MOE, SHARED_SIZES, expert, router
from .granite import GRANITE
from .llama import LLAMA
from .rows import COLUMN, ROW, D, M

_B, _S = M + "block_sparse_moe.", M + "shared_mlp."
_MLP = ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight", "mlp.linear_fc1.bias",
        "mlp.linear_fc2.bias")  # fmt: skip
_STORED = D + "mlp.shared_experts."
_SHARED = ("sgate>0",)

_ROWS = (
    router(_B + "router.layer.weight"),
    expert(
        "linear_fc1.weight", "xgate+xup h",
        Part(_B + "input_linear.weight", "{expert} xgate+xup h"),
    ),
    expert("linear_fc2.weight", "h xgate", Part(_B + "output_linear.weight", "{expert} h xgate")),
    Rule(
        _STORED + "linear_fc1.weight", "sgate+sup h",
        (Part(_S + "input_linear.weight", "sgate+sup h"),), COLUMN, groups="glu", layers=MOE,
        when=_SHARED,
    ),
    Rule(
        _STORED + "linear_fc2.weight", "h sgate", (Part(_S + "output_linear.weight", "h sgate"),),
        ROW, layers=MOE, when=_SHARED,
    ),
)  # fmt: skip
_dense = [rule for rule in GRANITE.rules if not rule.name.endswith(_MLP)]
_at = next(i for i, rule in enumerate(_dense) if rule.name.startswith("decoder.final_layernorm."))

GRANITE_MOE = replace(
    GRANITE,
    name="granitemoe",
    model_types=("granitemoe", "granitemoeshared"),
    sizes={
        **{key: value for key, value in LLAMA.sizes.items() if key not in ("gate", "up")},
        "expert": "num_local_experts|num_experts",
        "xgate": "intermediate_size",
        **EXPERT_SIZES,
        "sgate": "shared_intermediate_size|0",
        **SHARED_SIZES,
    },
    flags={key: value for key, value in GRANITE.flags.items() if key != "mlp_bias"},
    rules=(*_dense[:_at], *_ROWS, *_dense[_at:]),
    function=Function(GRANITE.function.defaults, GRANITE.function.plain),
    kinds=(alike(MOE),),
)

FAMILIES: tuple[Family, ...] = (GRANITE_MOE,)
