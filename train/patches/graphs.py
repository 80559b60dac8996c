"""On a GPU: the layers of a pipeline stage as CUDA graphs.

At small micro-batches a layer's kernels end sooner than Python launches the next ones. So after
two ordinary calls the forward and the backward pass through all layers of a chunk are recorded
once and from then on replayed, one launch each. Collectives of tensor parallelism are recorded
with them. A recorded backward pass adds to the gradient buffers itself, so that no hook of a
parameter runs; therefore this excludes what hangs on such hooks (overlapped reduction), what
draws random numbers (dropout), and recomputation.

Between a micro-batch's forward and backward pass others may run (pipeline parallelism): each that
is under way at the same time needs a recording of its own, since a recording has fixed memory.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..errors import TrainError
from .megatron import import_megatron

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer

_ORDINARY = 2  # calls before a recording: kernels are compiled and communicators made in them
_awaited: list[threading.Thread] = []


def wait_for(thread: threading.Thread) -> None:
    """Record nothing before that thread ends: it allocates memory that the GPU can reach.

    An allocation may wait for the GPU. If that waits in a recorded collective for another rank,
    which cannot launch while it allocates, both wait for ever, and no timeout sees it.
    """
    _awaited.append(thread)


_live: weakref.WeakSet[LayerGraphs] = weakref.WeakSet()


def release() -> None:
    """Drop all recordings of this process; none is made again.

    When a communicator is destroyed, NCCL waits until every recording that uses it is gone.
    """
    for replayed in list(_live):
        replayed.release()


def obstacle(config: TransformerConfig, interleaved: bool, overlap: bool) -> str | None:
    """Why layers cannot be recorded; None if they can."""
    if config.hidden_dropout or config.attention_dropout:
        return "dropout draws random numbers"
    if config.recompute_granularity is not None:
        return "activations are recomputed"
    if interleaved:
        return "pipeline stages are interleaved"
    if overlap:
        return "gradient reduction overlaps with the backward pass"
    return None


@dataclass(eq=False, slots=True)
class _Recording:
    """One micro-batch's way through the layers, with fixed memory."""

    x: torch.Tensor
    y: torch.Tensor
    x_gradient: torch.Tensor
    y_gradient: torch.Tensor
    forward: Callable[[], None]
    backward: Callable[[], None]
    kept: Sequence[object]  # memory that the recording refers to
    reset: Callable[[], None]  # after which it cannot be replayed
    user: weakref.ref[_User] | None = None  # the pass between forward and backward

    @property
    def busy(self) -> bool:
        """Whether a backward pass may still come: one whose graph is gone does not."""
        return self.user is not None and self.user() is not None


class _User:
    """What lives as long as the graph of a pass."""


@dataclass(slots=True)
class _Call:
    """What a recording depends on."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    given: Mapping[str, Any]  # the layers' other arguments

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Call)
            and (self.shape, self.dtype) == (other.shape, other.dtype)
            and all(self.given[key] is other.given[key] for key in self.given)
        )


@dataclass(eq=False)
class LayerGraphs:
    """Takes the place of the layers' forward methods, and falls back to them."""

    layers: Sequence[TransformerLayer]
    most: int  # micro-batches under way at once
    needed: bool = False  # raise if recording fails, instead of a warning
    ordinary: list[Callable[..., Any]] = field(default_factory=list)
    recordings: list[_Recording] = field(default_factory=list)
    call: _Call | None = None  # that which is recorded, or will be
    count: int = 0  # calls of the schedule that it has been seen in
    seen: bool = False  # in this call of the schedule
    replaying: bool = False  # whether the first layer has run all of them
    failed: bool = False  # a recording: none is tried again

    def __post_init__(self) -> None:
        _live.add(self)
        for i, layer in enumerate(self.layers):
            self.ordinary.append(layer.forward)
            layer.forward = functools.partial(self._forward, i)

    def prepare(self, micro_batches: int, alone: bool = True) -> None:
        """Before each training call of the schedule: record what the last calls did.

        ``alone``: no backward pass of an earlier call is to come.
        """
        for recording in self.recordings if alone else ():
            recording.user = None
        self.count += self.seen
        self.seen = False
        if self.call is not None and not self.recordings and self.count >= _ORDINARY:
            while _awaited:
                _awaited.pop().join()
            try:
                for _ in range(min(self.most, micro_batches)):
                    self.recordings.append(self._record(self.call))
            except Exception as error:
                if self.needed:
                    raise
                warnings.warn(
                    f"CUDA graphs: these layers cannot be recorded ({error}); training "
                    "continues without them",
                    stacklevel=2,
                )
                self.recordings.clear()
                self.failed = True

    def release(self) -> None:
        """Drop the recordings; from now on the layers run as they are."""
        self.failed = True
        if self.recordings and torch.cuda.is_available():
            torch.cuda.synchronize()  # a replay may still run
        for recording in self.recordings:
            recording.reset()
        self.recordings.clear()

    def _forward(self, index: int, hidden_states: torch.Tensor, **given: Any) -> Any:
        if index == 0:
            recording = self._free(hidden_states, given)
            self.replaying = recording is not None
            if recording is not None:
                return _Replay.apply(hidden_states, recording), None
        elif self.replaying:
            return hidden_states, given.get("context")
        return self.ordinary[index](hidden_states=hidden_states, **given)

    def _free(self, x: torch.Tensor, given: Mapping[str, Any]) -> _Recording | None:
        """A recording that may be replayed for this call, if any."""
        if self.failed or not (torch.is_grad_enabled() and x.requires_grad):
            return None
        if not self.layers[0].training:
            return None
        if any(v is not None for k, v in given.items() if k != "rotary_pos_emb"):
            return None  # a mask, which differs from call to call
        call = _Call(x.shape, x.dtype, x.device, given)
        if self.call is None or (call != self.call and not self.recordings):
            self.call, self.count = call, 0
        if call != self.call:
            return None
        self.seen = True
        return next((r for r in self.recordings if not r.busy), None)

    def _record(self, call: _Call) -> _Recording:
        x = torch.zeros(call.shape, dtype=call.dtype, device=call.device, requires_grad=True)
        recorder = _Recorder()
        y = x

        def forward() -> torch.Tensor:
            nonlocal y
            y = x
            for layer in self.ordinary:
                y, _ = layer(hidden_states=y, **call.given)
            return y

        def backward() -> torch.Tensor:
            gradients = torch.autograd.grad(y, [x, *parameters], y_gradient, allow_unused=True)
            for parameter, gradient in zip(parameters, gradients[1:], strict=True):
                if gradient is not None:  # else its own matrix product has added it
                    parameter.main_grad.add_(gradient)  # type: ignore[attr-defined]
            return gradients[0]

        with _stand_ins(self.layers) as parameters:
            fixed_y, replay_forward = recorder.record(forward)
            y_gradient = torch.zeros_like(fixed_y)
            x_gradient, replay_backward = recorder.record(backward)
        buffers = import_megatron("parallel_state").get_global_memory_buffer().buffer
        kept = [call, *buffers.values()]
        return _Recording(
            x.detach(), fixed_y.detach(), x_gradient, y_gradient, replay_forward, replay_backward,
            kept, recorder.reset,
        )  # fmt: skip


class _Recorder:
    """Makes CUDA graphs that share memory: they must be replayed in the order of recording."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: list[torch.cuda.CUDAGraph] = []

    def record(
        self, function: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        """What the function returned, and how to run its kernels again."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads (NCCL's, that of a save) may use the GPU meanwhile
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            result = function()
        self.graphs.append(graph)
        return result, graph.replay

    def reset(self) -> None:
        """Give up the graphs and what they hold."""
        for graph in self.graphs:
            graph.reset()


class _Replay(torch.autograd.Function):
    """The layers' passes from a recording."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, recording: _Recording) -> torch.Tensor:
        recording.x.copy_(x)
        recording.forward()
        ctx.recording, ctx.user = recording, _User()
        recording.user = weakref.ref(ctx.user)
        return recording.y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        recording = ctx.recording
        if recording.user is None or recording.user() is not ctx.user:
            raise TrainError(
                "a second backward pass through the same forward pass: CUDA graphs keep nothing "
                "for it; leave retain_graph out, or call the model again"
            )
        recording.y_gradient.copy_(gradient)
        recording.backward()
        recording.user = None
        # the memory is the next forward pass's as well, and the gradient may still be sent then
        return recording.x_gradient.clone(), None


@contextlib.contextmanager
def _stand_ins(layers: Sequence[torch.nn.Module]) -> Iterator[list[torch.nn.Parameter]]:
    """Replace the parameters that get gradients with others over the same memory.

    autograd binds a parameter to the stream on which it was first used, which is not the one
    that records. Without ``grad_added_to_main_grad`` megatron makes no gradient for a weight
    whose product adds to the gradient buffer.
    """
    places = [
        (module._parameters, name, parameter)
        for layer in layers
        for module in layer.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad
    ]
    made = []
    for table, name, parameter in places:
        other = torch.nn.Parameter(parameter.detach())
        other.__dict__.update(parameter.__dict__)
        other.__dict__.pop("grad_added_to_main_grad", None)
        table[name] = other
        made.append(other)
    try:
        yield made
    finally:
        for table, name, parameter in places:
            table[name] = parameter
