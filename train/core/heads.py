"""The input of the output layer, kept so that logits can be had after a loss, at no cost before.

A loss is computed without giving logits out. A script may still ask for them. They are computed
from what entered the output layer, which autograd keeps anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..patches.megatron import import_megatron
from .process import Parallel


@dataclass(frozen=True, slots=True)
class Head:
    """What entered the output layer in one micro-batch."""

    layer: torch.nn.Module
    hidden: torch.Tensor  # [s, b, h], with its graph where there is one
    weight: torch.Tensor | None  # the embedding's, if the head is tied

    def logits(self) -> torch.Tensor:
        """[b, s, vocabulary of this tp rank]; a collective of the tp ranks."""
        found, _ = self.layer(self.hidden, weight=self.weight, runtime_gather_output=None)
        return found.transpose(0, 1)


class Heads:
    """Those of the micro-batches since the last ``take``."""

    def __init__(self, last_chunk: torch.nn.Module) -> None:
        self._found: list[Head] = []
        self.keeps = False
        layer = getattr(last_chunk, "output_layer", None)
        if layer is not None:  # only the last stage has one
            layer.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, layer: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self.keeps:
            self._found.append(Head(layer, args[0], kwargs.get("weight")))

    def take(self) -> list[Head]:
        """What was kept; then it is forgotten."""
        found, self._found = self._found, []
        return found


def whole(parallel: Parallel, parts: Sequence[torch.Tensor], vocab: int) -> Any:
    """[rows, s, vocab] with its graph, on every tp rank of a model of one stage.

    A part is [b, s, padded vocabulary of this tp rank].
    """
    mine = torch.cat(list(parts)).contiguous()
    gather = import_megatron("tensor_parallel").gather_from_tensor_model_parallel_region
    return gather(mine)[..., :vocab].float()
