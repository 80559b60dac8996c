"""Rows of layers with experts: router, experts in every spelling of Hugging Face's files, and
experts that all tokens share.

The experts of a layer are cut by a mesh of their own (``mesh=EXPERT``); router and shared experts
by the mesh of the other tensors. Files hold each expert in tensors of its own, or all experts of a
layer in one. The names in a file say which; what has no such names (shards of another tool) gets
the spelling that the hub's files have.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..model.family import HAS, Axes, Part, Rule
from ..model.mesh import EXPERT, Shard, ShardByIndex
from .rows import COLUMN, LAYER, ROW, D, M, gated_mlp

MOE, DENSE = "moe", "dense"  # kinds of layers
_X = D + "mlp.experts.local_experts.{expert}."
_SPREAD: Axes = {"pp": ShardByIndex("layer"), "ep": ShardByIndex("expert")}
EXPERT_COLUMN: Axes = {"tp": Shard(0), **_SPREAD}
EXPERT_ROW: Axes = {"tp": Shard(1), **_SPREAD}

# gate and up of an expert, of the shared experts together; each family adds what it calls them
EXPERT_SIZES = {"xup": "xgate|0"}
SHARED_SIZES = {"sup": "sgate|0"}


def experts(
    prefix: str = M + "mlp.experts.{expert}.",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    stacked: str = M + "mlp.experts.",
) -> tuple[Rule, ...]:
    """Gated experts, one by one, or stacked as transformers holds them in memory.

    ``prefix`` and ``names`` (gate, up, down) are of single ones, ``stacked`` is the prefix of all.
    """
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    has = HAS + stacked + "gate_up_proj"
    single = (
        expert("linear_fc1.weight", "xgate+xup h", Part(gate, "xgate h"), Part(up, "xup h")),
        expert("linear_fc2.weight", "h xgate", Part(down, "h xgate")),
    )
    together = (
        expert(
            "linear_fc1.weight", "xgate+xup h",
            Part(stacked + "gate_up_proj", "{expert} xgate+xup h"),
        ),
        expert("linear_fc2.weight", "h xgate", Part(stacked + "down_proj", "{expert} h xgate")),
    )  # fmt: skip
    return (
        *(replace(rule, when=("!" + has,)) for rule in single),
        *(replace(rule, when=(has,)) for rule in together),
    )


def expert(name: str, dims: str, *parts: Part) -> Rule:
    """A linear layer of an expert; the first one has gate and up."""
    packed = "+" in dims
    axes = EXPERT_COLUMN if packed else EXPERT_ROW
    groups = "glu" if packed else ""
    return Rule(_X + name, dims, parts, axes, groups=groups, layers=MOE, mesh=EXPERT)


def router(fqn: str = M + "mlp.gate.weight") -> Rule:
    """The router's scores of each expert; every rank has all of it."""
    return Rule(D + "mlp.router.weight", "expert h", (Part(fqn, "expert h"),), LAYER, layers=MOE)


def router_bias(fqn: str = M + "mlp.gate.e_score_correction_bias") -> Rule:
    """What balances the choice of experts: fp32 in every run, and no optimizer trains it."""
    name = D + "mlp.router.expert_bias"
    return Rule(name, "expert", (Part(fqn, "expert"),), LAYER, layers=MOE, buffer=True)


def shared_experts(prefix: str = M + "mlp.shared_expert.", gate: str = "") -> tuple[Rule, ...]:
    """An MLP for all tokens beside the experts; ``gate`` names the weight that scales it."""
    stored = D + "mlp.shared_experts."
    parts = (Part(prefix + "gate_proj.weight", "sgate h"), Part(prefix + "up_proj.weight", "sup h"))
    down = Part(prefix + "down_proj.weight", "h sgate")
    when = ("sgate>0",)
    gates = (Part(gate, "one h"),)
    rules = (
        Rule(stored + "gate_weight", "one h", gates, LAYER, layers=MOE, when=when),
        Rule(
            stored + "linear_fc1.weight", "sgate+sup h", parts, COLUMN, groups="glu", layers=MOE,
            when=when,
        ),
        Rule(stored + "linear_fc2.weight", "h sgate", (down,), ROW, layers=MOE, when=when),
    )  # fmt: skip
    return rules if gate else rules[1:]


def dense_mlp() -> tuple[Rule, ...]:
    """The MLP of layers without experts."""
    return without(gated_mlp())


def without(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Rows of layers without experts."""
    return tuple(replace(rule, layers=DENSE) for rule in rules)
