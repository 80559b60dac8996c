"""Whether optimizer state is complete: what some weights have and others lack."""

from __future__ import annotations

from .checkpoint.types import Checkpoint
from .model.dtypes import HALF
from .model.manifest import STATES, category_of, is_padding
from .model.placement import buffers_of

_PAIR = ("exp_avg", "exp_avg_sq")  # Adam's moments: it keeps both for a tensor, or none


def incomplete_states(ckpt: Checkpoint) -> tuple[list[str], list[str]]:
    """(faults, warnings) of optimizer state that some weights have and others lack.

    A weight with only one of Adam's two moments is a fault. So is a half-precision one with moments
    and no master, if others have a master. Other states may exist for some weights only (Muon has
    momentum for matrices). A weight without any was frozen, or its state was lost: a warning if
    files do not record which weights the run trained.
    """
    weights, held = _held(ckpt)
    moments = set().union(*(have for state, have in held.items() if state != "master"))
    faults = []
    for state, other in (_PAIR, _PAIR[::-1]):
        lost = [f for f in weights if f in held[other] and f not in held[state]]
        if held[state] and lost:
            faults.append(
                f"{ckpt.path}: {state}: lacks {len(lost)} of the {len(held[other])} tensors that "
                f"have {other}, first {lost[0]}"
            )
    half = [f for f in weights if ckpt.manifest.tensors[f].dtype in HALF]
    lost = [f for f in half if f in moments and f not in held["master"]]
    if held["master"] and lost:
        faults.append(
            f"{ckpt.path}: master: lacks {len(lost)} of the {len(half)} half-precision weights, "
            f"first {lost[0]}"
        )
    stated, trained = (moments, weights) if moments else (held["master"], half)
    bare = [f for f in trained if f not in stated and f not in (ckpt.frozen or ())]
    if not bare or not stated:
        return faults, []
    text = f"{len(bare)} of {len(trained)} weights have no optimizer state, first {bare[0]}"
    if ckpt.frozen is not None:
        return [*faults, f"{ckpt.path}: {text}: it was lost"], []
    return faults, [f"warning: {text}: they were frozen, or it was lost"]


def frozen_faults(ckpt: Checkpoint) -> list[str]:
    """Weights without optimizer state because they were frozen, as a fault for formats that hold
    the state of every weight.
    """
    weights, held = _held(ckpt)
    stated = set().union(*held.values())
    bare = [f for f in weights if f not in stated and f in (ckpt.frozen or ())]
    if not bare or not stated:
        return []
    return [
        f"{ckpt.path}: {len(bare)} of {len(weights)} weights were frozen, first {bare[0]}; this "
        "format holds the state of every weight"
    ]


def _held(ckpt: Checkpoint) -> tuple[list[str], dict[str, set[str]]]:
    """The trained weights, and for each optimizer state the weights that have it."""
    names = [f for f in ckpt.manifest.tensors if not is_padding(f)]
    held = {s: {f[len(s) + 1 :] for f in names if category_of(f) == s} for s in STATES}
    buffers = buffers_of(ckpt.model) if ckpt.model is not None else ()
    return [f for f in names if category_of(f) == "" and f not in buffers], held
