"""The life of a step's gradients: empty, local, reduced, stepped.

A backward pass adds to this rank's buffers: gradients are local. Reduced, they are the sum over
all ranks. Reducing twice would add up what is a sum already, so it happens once, when the norm is
asked for or the optimizer steps, however many calls of forward and backward came before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from ..errors import TrainError


class State(Enum):
    """What the gradient buffers hold."""

    EMPTY = "empty"  # zeros
    LOCAL = "local"  # of this rank's micro-batches
    REDUCED = "reduced"  # of all ranks'
    STEPPED = "stepped"  # the same, after the optimizer used them


class Gradients:
    """The gradient buffers of this rank's model chunks."""

    def __init__(
        self, chunks: Sequence[Any], finalize: Callable[[list[Any]], None], overlap: bool
    ) -> None:
        """``finalize`` is megatron-core's ``finalize_model_grads``.

        With ``overlap`` each call of backward starts the reduction itself.
        """
        self.chunks, self.overlap = list(chunks), overlap
        self._finalize = finalize
        self._factor = 1.0  # what the sums are still to be multiplied by
        self.state = State.EMPTY

    def clear(self) -> None:
        """Zero everything: the next step begins."""
        if self.overlap:
            self.reduce()  # what is under way writes to the buffers
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.state, self._factor = State.EMPTY, 1.0

    def begin_backward(self) -> None:
        """Called before a backward pass adds to the buffers; TrainError if it must not."""
        if self.state in (State.REDUCED, State.STEPPED):
            done = "clipped" if self.state is State.REDUCED else "used by the optimizer's step"
            raise TrainError(
                f"a forward pass in train mode, but the gradients before it are {done} already; "
                "call zero_grad() first"
            )
        if self.state is State.LOCAL and self.overlap:
            raise TrainError(
                "a second forward in train mode before the optimizer's step: overlapped reduction "
                "(overlap_grad_reduce) reduces gradients while they are computed; turn it off to "
                "accumulate over several forwards"
            )
        self.state = State.LOCAL

    def scale(self, factor: float) -> None:
        """Multiply everything; while a reduction is under way, as soon as it has ended."""
        if self.state is State.LOCAL and self.overlap:
            self._factor *= factor
        else:
            self._multiply(factor)

    def cut(self, value: float) -> None:
        """Reduce, and bring every number between ``-value`` and ``value``."""
        self.reduce()
        for chunk in self.chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                buffer.grad_data.clamp_(-value, value)

    def _multiply(self, factor: float) -> None:
        for chunk in self.chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                buffer.grad_data.mul_(factor)

    def reduce(self) -> None:
        """Sum over the ranks that share a parameter, unless that is done; a collective."""
        if self.state is not State.LOCAL:
            return  # zeros are their own sum
        timers = self.chunks[0].config.timers
        if timers is not None:  # a part of the schedule, which megatron-core would time
            timers("forward-backward", log_level=1).start()
        self._finalize(self.chunks)
        if timers is not None:
            timers("forward-backward").stop()
        if self._factor != 1.0:
            self._multiply(self._factor)
            self._factor = 1.0
        self.state = State.REDUCED

    def after_step(self) -> None:
        """Called when the optimizer has used the gradients."""
        self.state = State.STEPPED
