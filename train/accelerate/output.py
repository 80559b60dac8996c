"""What a call of a prepared model returns: a loss, and logits as soon as they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutput


class Output(CausalLMOutput):
    """transformers' output, whose logits are gathered when they are first read.

    Every rank of the replica reads them, as every rank calls the model.
    """

    _later: Callable[[], torch.Tensor] | None = None

    @classmethod
    def of(cls, loss: torch.Tensor | None, later: Callable[[], torch.Tensor] | None) -> Output:
        """``later`` computes the logits; None where there are none."""
        made = cls(loss=loss)
        object.__setattr__(made, "_later", later)
        return made

    def _gather(self) -> None:
        later = self._later
        if later is not None:
            object.__setattr__(self, "_later", None)
            self["logits"] = later()

    def __getattribute__(self, name: str) -> Any:
        if name in ("logits", "to_tuple", "keys", "items", "values"):
            object.__getattribute__(self, "_gather")()
        return super().__getattribute__(name)

    def __getitem__(self, key: Any) -> Any:
        if key != "loss" and not (key == 0 and "loss" in self):
            self._gather()
        return super().__getitem__(0 if key == 0 and "loss" not in self else key)
