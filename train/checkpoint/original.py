"""The transformers model that a script prepared: it holds no weights while the engine trains them.

Its parameters keep their shapes and cost no memory. Asked for its weights it raises, rather than
giving those from before training; `fill` puts the trained ones in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ..errors import TrainError
from . import hf_weights
from .rank_state import RankState

_ASKED = ("state_dict", "forward")  # methods that give weights, or use them


class Original:
    """A transformers model whose weights are in the engine's hands."""

    def __init__(self, module: Any, held: RankState) -> None:
        self.module, self.held = module, held
        self.filled = True

    def release(self) -> None:
        """Free the memory of its weights; on a GPU the cached memory is given back by torch."""
        for tensor in self._tensors().values():
            nan = torch.full((), float("nan"), dtype=tensor.dtype, device=tensor.device)
            tensor.data = nan.expand(tensor.shape)
            tensor.grad = None
        for name in _ASKED:
            setattr(self.module, name, self._refusal(name))
        self.filled = False

    def fill(self) -> Any:
        """The model with the trained weights, in its own types; a collective of all ranks."""
        found = hf_weights.collect(self.held)
        for name, tensor in self._tensors().items():
            tensor.data = found[name].to(tensor.device, tensor.dtype)
        self.filled = True
        return self.module

    def _tensors(self) -> dict[str, Any]:
        """Its parameters and buffers that are weights, by logical name; a tied head counts once."""
        for name in _ASKED:
            self.module.__dict__.pop(name, None)
        return hf_weights.logical_tensors(self.module, self.held.model, own=True)

    def _refusal(self, name: str) -> Callable[..., NoReturn]:
        kind = type(self.module).__name__

        def refuse(*_: object, **__: object) -> NoReturn:
            raise TrainError(
                f"{kind}.{name}: this model holds no weights, since the prepared one trains them; "
                "take accelerator.unwrap_model(model), which every rank must call"
            )

        return refuse
