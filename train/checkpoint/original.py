"""The transformers model that a script prepared: it holds no weights while the engine trains them.

Its parameters keep their shapes and cost no memory. Asked for its weights it raises, rather than
giving those from before training; `fill` puts the trained ones in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..core.notes import Notes
from ..errors import TrainError
from . import hf_weights
from .rank_state import RankState

MEET_SECONDS = 120.0  # so long a call waits for the other ranks to make it too
_ASKED = ("state_dict", "forward")  # methods that give weights, or use them


class Meetings:
    """Calls that all ranks make together; one that some ranks leave out ends with an error."""

    def __init__(self, held: RankState) -> None:
        self.held, self._notes = held, Notes("meeting")

    def meet(self, call: str) -> None:
        """TrainError if not every rank calls ``call`` now."""
        world = dist.get_world_size(self.held.control) if dist.is_initialized() else 1
        absent = self._notes.absent(self.held.rank, world, MEET_SECONDS)
        if absent:
            listed = ", ".join(map(str, absent[:8])) + (" and more" if len(absent) > 8 else "")
            raise TrainError(
                f"{call}: was not called on rank {listed}, within {MEET_SECONDS:.0f} seconds. It "
                "gathers what all ranks hold: call it on every rank, outside of "
                "`if accelerator.is_main_process`"
            )


class Original:
    """A transformers model whose weights are in the engine's hands."""

    def __init__(self, module: torch.nn.Module, held: RankState) -> None:
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

    def fill(self) -> torch.nn.Module:
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
