"""Param groups: those of the trainer as Megatron-LM's two, and back.

Megatron-LM trains biases and weights of norms in a group without weight decay (``wd_mult`` 0) and
all others in one with it. It finds the groups of a file by their multipliers, so both are written,
whatever the source has. A note says every value that is another one there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...checkpoint.state import ABSENT, TrainingState
from . import args_codec
from .optimizer import decays

_MULTIPLIERS = ({"wd_mult": 1.0}, {"wd_mult": 0.0})
_GROUP = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
_HYPER = ("lr", "eps", "betas", "momentum", "dampening", "nesterov")
# that change a step of torch's optimizers, and what Megatron-LM's do
_ONLY_TORCH = {"amsgrad": False, "maximize": False}


def made(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Megatron-LM's groups; the source's only one stands for both, with its weight decay."""
    groups = []
    for group in _MULTIPLIERS:
        wanted = bool(group["wd_mult"])
        row = next((r for r in rows if decays(r) == wanted), rows[0] if rows else {})
        kept = {k: v for k, v in row.items() if k in _HYPER}
        if isinstance(kept.get("betas"), list):
            kept["betas"] = tuple(kept["betas"])
        decay = row.get("weight_decay", 0.0) if wanted or len(rows) == 1 else 0.0
        groups.append({**group, **_GROUP, **kept, "weight_decay": decay})
    return groups


def of_chain(groups: list[dict[str, Any]], experts: bool | None) -> list[dict[str, Any]]:
    """The groups of one optimizer of a chain: the experts', all but these, or (None) of a single
    one, which has no groups of experts.

    A source without groups of experts trained them as all matrices.
    """
    if not experts:
        return [group for group in groups if group.get("is_expert_parallel") is not True]
    own = [group for group in groups if group.get("is_expert_parallel") is True]
    return own or [{**group, "is_expert_parallel": True} for group in groups if decays(group)]


def identified(group: dict[str, Any]) -> dict[str, Any]:
    """With all values by which megatron-core tells groups apart: older ones saved fewer."""
    for key, value in {"wd_mult": float(decays(group)), **_GROUP}.items():
        if f"pre_{key}" not in group:
            group.setdefault(key, value)
    return group


def say_changed(
    state: TrainingState, groups: Sequence[Mapping[str, Any]], step: int | None, notes: list[str]
) -> None:
    """Add notes on what ``groups`` of a file say otherwise than the source's."""
    rows = state.groups
    if not rows:
        return
    for i, row in enumerate(rows):
        if "weight_decay" not in row:
            notes.append(f"param_groups[{i}] has no weight_decay: 0.0 stands in Megatron-LM's file")
        notes += [
            f"param_groups[{i}].{key}: {row[key]!r:.80} in the source, {usual} in Megatron-LM"
            for key, usual in _ONLY_TORCH.items()
            if row.get(key, usual) != usual
        ]
    again = tuple(native(_plain(group), step) for group in groups)
    for name, here, there in TrainingState(groups=rows).differences(TrainingState(groups=again)):
        if here != ABSENT or not name.endswith(".weight_decay"):
            notes.append(f"{name}: {here!r:.300} in the source, {there!r:.300} in the file")
    kept = [g["weight_decay"] for g in groups if not decays(g) and g.get("weight_decay")]
    if kept:
        notes.append(
            f"param_groups: biases and weights of norms have weight_decay {kept[0]!r:.80} in the "
            "source; Megatron-LM's scheduler multiplies it by wd_mult 0, so that its next steps "
            "have 0.0 there"
        )


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group as its reader finds it, without what cannot travel."""
    found = {}
    for key, value in group.items():
        try:
            found[key] = args_codec.encode_plain(value)
        except args_codec.Unknown:
            continue
    return found


def native(group: Mapping[str, object], step: int | None) -> dict[str, object]:
    """A group as the trainer's own checkpoints have it."""
    found: dict[str, object] = {} if step is None else {"step": step}
    for key in ("lr", "weight_decay", "eps", "momentum", "wd_mult", "lr_mult"):
        if isinstance(group.get(key), (int, float)):
            found[key] = group[key]
    betas = group.get("betas")
    sides = betas.get("$tuple") if isinstance(betas, dict) else betas
    if isinstance(sides, list):
        found["betas"] = sides
    return found
