"""What a call of a prepared model returns: a loss, and logits as soon as they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutput

from ..errors import TrainError


class Output(CausalLMOutput):
    """transformers' output, whose logits are gathered when they are first read.

    Every rank of the replica reads them, as every rank calls the model.
    """

    _later: Callable[[], torch.Tensor] | None = None
    _is_made = False  # some releases of transformers read every field in the constructor

    @classmethod
    def of(cls, loss: torch.Tensor | None, later: Callable[[], torch.Tensor] | None) -> Output:
        """``later`` computes the logits; None where they were not kept."""
        made = cls(loss=loss)
        object.__setattr__(made, "_later", later)
        object.__setattr__(made, "_is_made", True)
        return made

    def _gather(self) -> None:
        later = self._later
        if later is not None:
            object.__setattr__(self, "_later", None)
            self["logits"] = later()

    def _need(self) -> None:
        self._gather()
        if "logits" not in self:
            raise TrainError(
                "logits of a training batch with labels, where a pipeline or several "
                "micro-batches run: MegatronLMPlugin(return_logits=True) keeps them; they carry "
                "no gradients"
            )

    def __getattribute__(self, name: str) -> Any:
        if name == "logits" and object.__getattribute__(self, "_is_made"):
            object.__getattribute__(self, "_need")()
        elif name in ("to_tuple", "keys", "items", "values"):
            object.__getattribute__(self, "_gather")()
        return super().__getattribute__(name)

    def __getitem__(self, key: Any) -> Any:
        if key == "logits" and self._later is not None:
            self._gather()
        elif key == 0 and "loss" in self:  # a loss needs no logits
            return super().__getitem__("loss")
        return super().__getitem__(key)
