"""Makes megatron-core 0.16 run on CPU: its requests for CUDA are redirected, gloo's gaps filled.

megatron-core asks for ``device="cuda"``, CUDA streams and CUDA's random state by name. None of
that decides what it computes, so ``install`` answers each request with the CPU's counterpart.
It changes this process until it ends, so it is only for processes that train on CPU; nothing here
is imported where a GPU is used.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from ..errors import TrainError
from .megatron import import_megatron
from .table import replace

_CPU = torch.device("cpu")
# Sends that may be under way at once. A pipeline schedule has a handful; older ones are waited
# for, which costs nothing, since their receivers have long moved on.
_SENDS = 64

_mode: _CudaMeansCpu | None = None


def install() -> None:
    """Install every redirection; a second call does nothing.

    Must run before megatron is imported, in the thread that will train. TrainError where
    megatron is there already; an ``assert`` where there is a GPU.
    """
    global _mode
    if _mode is not None:
        return
    assert not torch.cuda.is_available(), "the CPU redirections are for machines without a GPU"
    if "megatron.core" in sys.modules:
        raise TrainError(
            "megatron.core was imported before training on CPU was set up, so it is bound to "
            "CUDA already; call shardwright.train first"
        )
    _turn_off_compilation()
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # the ranks of one host would fight over its cores
    _redirect_cuda()
    _redirect_collectives()
    _mode = _CudaMeansCpu()
    _mode.__enter__()  # never left: it holds for the rest of the process
    _redirect_megatron()


def _turn_off_compilation() -> None:
    """No torch.compile: megatron decorates small functions with it, and each would call g++."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if "torch._dynamo" in sys.modules:  # it has read the variable already
        sys.modules["torch._dynamo"].config.disable = True


class _CudaMeansCpu(TorchFunctionMode):
    """Turns ``device="cuda"`` into the CPU in every torch call, and names types as CUDA does."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # gradient clipping and the optimizers compare with "torch.cuda.FloatTensor"
            return str(func(args[0])).replace("torch.", "torch.cuda.", 1)
        if any(_is_cuda(value) for value in args):
            args = [_CPU if _is_cuda(value) else value for value in args]
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": _CPU}
            if kwargs.get("pin_memory"):  # pinning needs a CUDA driver
                kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **(kwargs or {}))


def _is_cuda(value: object) -> bool:
    if isinstance(value, str):
        return value.startswith("cuda")
    return isinstance(value, torch.device) and value.type == "cuda"


class _Idle:
    """A CUDA stream, event or stream context on which nothing is ever pending."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __enter__(self) -> _Idle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: object) -> float:
        return 0.0  # milliseconds

    def __getattr__(self, name: str) -> Callable[..., _Idle]:
        if name.startswith("_"):  # protocols that Python asks objects about
            raise AttributeError(name)
        return lambda *args, **kwargs: self  # wait_stream, synchronize, record_event -> an event


def _nothing(*args: object, **kwargs: object) -> None:
    pass


def _zero(*args: object, **kwargs: object) -> int:
    return 0


def _get_rng_state(device: object = "cuda") -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: object = "cuda") -> None:
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would call the patched one


def _redirect_cuda() -> None:
    """``torch.cuda``: one device, which is the CPU, with one stream and the CPU's random state."""
    idle = _Idle()
    cuda = {
        "current_device": lambda: _CPU,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "reset_peak_memory_stats": _nothing,
        "Stream": _Idle,
        "Event": _Idle,
        "stream": lambda stream: idle,
        "current_stream": lambda device=None: idle,
        "default_stream": lambda device=None: idle,
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "manual_seed": _manual_seed,
        "manual_seed_all": _manual_seed,
        **dict.fromkeys(
            ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
            _zero,
        ),
    }
    for name, stand_in in cuda.items():
        replace("torch.cuda", name, stand_in)
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"):
        replace("torch.cuda.random", name, cuda[name])
    for name in ("range_push", "range_pop", "mark"):
        replace("torch.cuda.nvtx", name, _nothing)


def _redirect_collectives() -> None:
    """``torch.distributed``: what NCCL does and gloo does not."""
    for name, make in {
        "isend": _isend_of_a_copy,
        "all_to_all_single": _all_to_all_with_lists,
        "all_gather": _uneven_all_gather,
        "reduce_scatter": _uneven_reduce_scatter,
    }.items():
        redirected = make(_directly(getattr(dist, name)))
        replace("torch.distributed", name, redirected)
        # P2POp compares its operation with the name in this module
        replace("torch.distributed.distributed_c10d", name, redirected)


def _directly(collective: Callable[..., object]) -> Callable[..., object]:
    """A collective that does not go through our mode, which would call its redirection again."""

    def call(*args: object, **kwargs: object) -> object:
        with torch._C.DisableTorchFunction():
            return collective(*args, **kwargs)

    return call


def _isend_of_a_copy(isend: Callable[..., object]) -> Callable[..., object]:
    """Send a copy, and keep it until it is sent.

    The pipeline schedules free a tensor's storage as soon as its send is queued. NCCL's stream
    order makes that safe; gloo would send what is in that memory later.
    """
    under_way: deque[tuple[object, torch.Tensor]] = deque()

    def send(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        copy = tensor.detach().clone()
        work = isend(copy, *args, **kwargs)
        under_way.append((work, copy))
        while under_way and under_way[0][0].is_completed():  # type: ignore[attr-defined]
            under_way.popleft()
        if len(under_way) > _SENDS:
            under_way.popleft()[0].wait()  # type: ignore[attr-defined]
        return work

    return send


def _all_to_all_with_lists(all_to_all: Callable[..., object]) -> Callable[..., object]:
    """Give split sizes as lists: megatron passes tensors and arrays, which gloo refuses."""

    def exchange(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *args: object,
        **kwargs: object,
    ) -> object:
        sizes = [
            None if split is None else [int(n) for n in split]
            for split in (output_split_sizes, input_split_sizes)
        ]
        return all_to_all(output, input.contiguous(), *sizes, *args, **kwargs)

    return exchange


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The tensor with zero rows added to dim 0."""
    extra = tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])
    return torch.cat((tensor.detach(), extra))


def _uneven_all_gather(all_gather: Callable[..., object]) -> Callable[..., object]:
    """Gather parts that differ in dim 0: gloo wants equal ones, so the short ones are padded."""

    def gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, *args: object, **kwargs: object
    ) -> object:
        rows = {part.shape[0] if part.dim() else 1 for part in tensor_list}
        if len(rows) == 1:
            return all_gather(tensor_list, tensor, *args, **kwargs)
        whole = [part.new_empty(max(rows), *part.shape[1:]) for part in tensor_list]
        work = all_gather(whole, _padded(tensor, max(rows)), *args, **kwargs)
        assert work is None, "an uneven all_gather cannot be asynchronous here"
        for part, gathered in zip(tensor_list, whole, strict=True):
            part.copy_(gathered[: part.shape[0]])
        return None

    return gather


def _uneven_reduce_scatter(reduce_scatter: Callable[..., object]) -> Callable[..., object]:
    """Reduce and scatter parts that differ in dim 0, padded as in ``_uneven_all_gather``."""

    def scatter(
        output: torch.Tensor, input_list: list[torch.Tensor], *args: object, **kwargs: object
    ) -> object:
        rows = {part.shape[0] if part.dim() else 1 for part in input_list}
        if len(rows) == 1:
            return reduce_scatter(output, input_list, *args, **kwargs)
        whole = output.new_empty(max(rows), *output.shape[1:])
        parts = [_padded(part, max(rows)) for part in input_list]
        work = reduce_scatter(whole, parts, *args, **kwargs)
        assert work is None, "an uneven reduce_scatter cannot be asynchronous here"
        output.copy_(whole[: output.shape[0]])
        return None

    return scatter


def _redirect_megatron() -> None:
    """megatron's own two accessors of CUDA's random state, and a name that it forgot."""
    random, moe_utils = (
        import_megatron(name) for name in ("tensor_parallel.random", "transformer.moe.moe_utils")
    )

    def get_state(
        device: object = "cuda", clone: bool = False, graph_safe: bool = False
    ) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    replace(random.__name__, "_get_cuda_rng_state", get_state)
    replace(random.__name__, "_set_cuda_rng_state", set_state)
    # Its tracker warns each time the CPU's state changes while CUDA's is forked: here always.
    logging.getLogger(random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 uses it without Transformer Engine
        replace(moe_utils.__name__, "te_general_gemm", None)
