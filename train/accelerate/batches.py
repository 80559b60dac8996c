"""A script's batch as the engine's micro-batches, in the shape of Megatron's get_batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..core.losses import MicroBatch, described
from ..errors import TrainError
from .loader import IGNORED


def listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def as_engine_batch(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Labels shifted, -100 masked.

    Position i predicts token i + 1, so the last position never counts.
    """
    tokens = batch["input_ids"]
    labels = batch.get("labels")
    labels = torch.full_like(tokens, IGNORED) if labels is None else labels.to(tokens.device)
    if labels.shape != tokens.shape:
        raise TrainError(
            f"labels of shape {tuple(labels.shape)} for input_ids of {tuple(tokens.shape)}; give "
            "one label per token, unshifted"
        )
    shifted = torch.full_like(labels, IGNORED)
    shifted[:, :-1] = labels[:, 1:]
    return from_tuple(
        (
            tokens,
            shifted.clamp_min(0),
            (shifted != IGNORED).float(),
            batch.get("attention_mask"),
            batch.get("position_ids"),
        )
    )


def from_tuple(given: Any) -> dict[str, torch.Tensor]:
    """A micro-batch of what Megatron's get_batch gives, in its order; labels are shifted."""
    names = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
    if not isinstance(given, tuple) or len(given) != len(names):
        raise TrainError(
            f"custom_get_batch_function must return ({', '.join(names)}), not {described(given)}"
        )
    made = dict(zip(names, given, strict=True))
    tokens, mask = made["tokens"], made["attention_mask"]
    if made["position_ids"] is None:
        counted = torch.arange(tokens.shape[1], device=tokens.device)
        made["position_ids"] = counted.expand(tokens.shape)
    if mask is not None and mask.dim() not in (2, 4):
        raise TrainError(
            f"an attention_mask of shape {tuple(mask.shape)}; give [rows, sequence], 1 for a token "
            "and 0 for padding"
        )
    return {name: value for name, value in made.items() if value is not None}


def padded(batch: Mapping[str, torch.Tensor], multiple: int) -> MicroBatch:
    """The sequence padded to a multiple (sequence parallelism); what is added does not count."""
    short = -batch["tokens"].shape[1] % multiple
    made = dict(batch)
    mask = made.pop("attention_mask", None)
    if short:
        made = {k: torch.nn.functional.pad(v, (0, short)) for k, v in made.items()}
    if mask is not None and short:
        by_key = mask.dim() == 4  # true where a key is hidden; else 1 for a token
        mask = torch.nn.functional.pad(
            mask, (0, short, 0, short) if by_key else (0, short), value=int(by_key)
        )
    if mask is not None:
        made["attention_mask"] = mask
    return {key: value.contiguous() for key, value in made.items()}
