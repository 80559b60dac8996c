"""Losses whose gradients are there already: a factor on the loss still reaches them.

A pipeline's schedule runs forward and backward in one, so the gradients of a forward lie in the
buffers before a script has said what it makes of the loss. It is told by autograd: the loss that it
gets is a leaf's, and what a backward pass brings to it is the factor. A forward is run with the
factor of the one before. If the script's is another, the buffers are scaled where they hold nothing
else, or the schedule runs once more with the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core import rng
from ..core.engine import Call, Engine
from ..core.gradients import State
from ..errors import TrainError

_SAME = 1e-9  # relative difference of factors that are the same


@dataclass(eq=False, slots=True)
class Pass:
    """One forward in train mode."""

    call: Call
    random: Any  # megatron's random states before it; None where nothing is drawn
    held: float  # the factor with which its gradients are in the buffers
    wanted: float = 0.0  # the sum of what backward passes brought
    asked: bool = False  # a backward pass came


@dataclass(slots=True)
class Passes:
    """The forwards since gradients were cleared."""

    engine: Engine
    tell: Callable[[str], None]
    weight: float  # the factor that the next loss is expected to get
    inside: list[Pass] = field(default_factory=list)  # not settled
    mixed: bool = False  # the buffers hold settled ones as well
    stale: bool = False  # gradients that a step has used were not cleared by the script
    told: bool = False

    def begin(self) -> float:
        """Called before a forward that computes gradients; the factor that it is to use."""
        gradients = self.engine.gradients
        if gradients.state is State.STEPPED:
            # they have been used; whether the script forgets them as well is seen at the next step
            self.engine.zero_grad()
            self.mixed, self.stale = False, True
        self._settle([one for one in self.inside if one.asked])
        return self.weight

    def add(self, value: float, random: Any, device: torch.device) -> torch.Tensor:
        """Called after it: its loss, for the script."""
        assert self.engine.last is not None
        made = Pass(self.engine.last, random, self.weight)
        self.inside.append(made)
        anchor = torch.zeros((), device=device, requires_grad=True)
        return _Loss.apply(anchor, torch.tensor(value, device=device), lambda c: self._ask(made, c))

    def _ask(self, one: Pass, factor: float) -> None:
        """A backward pass has come to a loss."""
        if one not in self.inside:
            if self.engine.gradients.state in (State.REDUCED, State.STEPPED):
                raise TrainError(
                    "backward: the gradients of this forward are clipped or used by a step "
                    "already; call the model again"
                )
            self.inside.append(one)
        one.wanted += factor
        one.asked = True
        if factor:
            self.weight = factor

    def finish(self) -> None:
        """Called before gradients are reduced: what was not asked for does not count."""
        if self.stale:
            raise TrainError(
                "a second optimizer step, and the gradients of the first were not cleared; call "
                "optimizer.zero_grad() in every step"
            )
        self._settle(list(self.inside))

    def clear(self) -> None:
        """The script forgets gradients; those that a backward pass is still to ask for stay."""
        self.stale = False
        asked = any(one.asked for one in self.inside)
        if self.inside and not self.mixed and not asked:
            return
        self.engine.zero_grad()
        self.mixed = False
        self.inside = [one for one in self.inside if not one.asked]
        for one in self.inside:
            one.held = 0.0

    def after_step(self) -> None:
        """What is in the buffers has been used."""
        self.mixed, self.inside = False, []

    def _settle(self, some: list[Pass]) -> None:
        for one in some:
            self._reach(one)
            self.inside.remove(one)
            self.mixed = True

    def _reach(self, one: Pass) -> None:
        """Make the buffers hold a forward's gradients with the factor that is wanted."""
        apart = one.wanted - one.held
        if abs(apart) <= _SAME * max(abs(one.wanted), abs(one.held)):
            return
        if not self.mixed and self.inside == [one] and one.held:
            if one.wanted:
                self.engine.gradients.scale(one.wanted / one.held)
            else:
                self.engine.zero_grad()
        else:
            self._run_again(one, apart)
        one.held = one.wanted

    def _run_again(self, one: Pass, weight: float) -> None:
        if self.engine.options.overlap:
            raise TrainError(
                "this loss got another factor than the one before it in the same step; with "
                "overlap_grad_reduce its gradients are reduced already; turn that off"
            )
        if not self.told and one.wanted:
            self.told = True
            self.tell(
                "the factors of losses change within a step: the forwards of these losses run "
                "twice; with pp_degree=1 and num_micro_batches=1 they would not"
            )
        with rng.as_of(one.random):
            self.engine.again(one.call, weight)


class _Loss(torch.autograd.Function):
    """A number whose gradient is told."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, value: torch.Tensor, tell: Callable[[float], None]
    ) -> torch.Tensor:
        ctx.tell = tell
        return value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.tell(float(gradient))
        return None, None, None


class _Closed(torch.autograd.Function):
    """Logits that no gradient passes."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise TrainError(
            "backward: a loss made of logits has no gradient where a pipeline or several "
            "micro-batches run, since the schedule's backward pass is over; use the model's loss, "
            "MegatronLMPlugin(custom_loss_function=...), or pp_degree=1 and num_micro_batches=1"
        )


def closed(logits: torch.Tensor) -> torch.Tensor:
    """Logits whose backward pass is refused by name."""
    return _Closed.apply(torch.zeros((), requires_grad=True), logits)
