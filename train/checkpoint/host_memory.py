"""Host memory that a GPU copies to at full speed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from ..patches import graphs

_SLAB = 1 << 29  # bytes; a power of two, to which torch rounds what it pins
_LARGE = _SLAB // 8  # tensors above this have memory of their own


class HostMemory:
    """Host memory that a GPU copies to at full speed, allocated once and in the background.

    Pinning takes as long as filling the memory: seconds for a model of a billion parameters.
    One save uses it at a time.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        """``sizes``: the bytes of the tensors of a save, in any order."""
        self._device = device
        self._large: list[torch.Tensor] = []
        self._slabs: list[torch.Tensor] = []
        self._free: list[torch.Tensor] = []  # of the large ones
        self._used: list[int] = []  # bytes of each slab
        self.seconds = 0.0  # that the allocation took
        self._thread = threading.Thread(target=self._allocate, args=(sizes,), daemon=True)
        graphs.wait_for(self._thread)
        self._thread.start()

    def _allocate(self, sizes: Sequence[int]) -> None:
        started = time.monotonic()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a new thread's is the first GPU
        small = sum(_aligned(size) for size in sizes if size <= _LARGE)
        slabs = -(-small // (_SLAB - _LARGE))  # in any order, less than _LARGE stays empty
        try:
            for size in sizes:
                if size > _LARGE:
                    self._large.append(self._pinned(size))
            for _ in range(slabs):
                self._slabs.append(self._pinned(_SLAB))
        except RuntimeError:
            pass  # too little memory: a save that needs it will say so
        self.seconds = time.monotonic() - started

    def _pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    @property
    def ready(self) -> bool:
        """Whether the allocation is over."""
        return not self._thread.is_alive()

    def clear(self) -> None:
        """Forget every tensor; waits for the allocation."""
        self._thread.join()
        self._free = list(self._large)
        self._used = [0] * len(self._slabs)

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """An uninitialized tensor of that shape and type, on which nothing else lies."""
        size = like.numel() * like.element_size()
        return self._bytes(size).view(like.dtype).view(like.shape)

    def _bytes(self, size: int) -> torch.Tensor:
        if size > _LARGE:
            found = next((i for i, x in enumerate(self._free) if x.numel() == size), None)
            return self._free.pop(found) if found is not None else self._pinned(size)
        for i, used in enumerate(self._used):
            if used + size <= _SLAB:
                self._used[i] = used + _aligned(size)
                return self._slabs[i][used : used + size]
        return self._pinned(size)


def _aligned(size: int) -> int:
    return -(-size // 256) * 256


def to_host(tensor: torch.Tensor, memory: HostMemory | None) -> torch.Tensor:
    """A copy in host memory that later steps do not change."""
    if memory is None:
        return tensor.detach().to("cpu", copy=True)
    return memory.take(tensor).copy_(tensor.detach(), non_blocking=True)
