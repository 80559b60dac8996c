"""What Accelerate's own functions must know where several ranks are one replica of the model.

For Accelerate a process is a data-parallel rank. Here it is one rank of a replica: the others are
its *peers*. So the state's numbers are those of data parallelism, and what acts once in a process
acts on the first rank of a replica alone. Nothing changes before ``enter`` and after ``leave``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from .table import replace


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among all ranks."""

    rank: int
    world_size: int
    leaders: Sequence[int]  # the first rank of each replica, in the order of replicas
    data_parallel: dist.ProcessGroup = field(repr=False)  # ranks of the same place in a replica
    control: dist.ProcessGroup = field(repr=False)  # every rank, over gloo

    @property
    def is_leader(self) -> bool:
        """Whether this is the first rank of its replica."""
        return self.rank in self.leaders


_ranks: Ranks | None = None
_alone = False  # leaders are in a collective without their peers
_installed = False


def enter(ranks: Ranks) -> None:
    """From now on Accelerate's functions go by this layout."""
    global _ranks
    _install()
    _ranks = ranks


def leave() -> None:
    """Accelerate is as it was."""
    global _ranks
    _ranks = None


@contextlib.contextmanager
def leaders_alone() -> Iterator[None]:
    """In the block the leaders call functions of Accelerate, and their peers do not."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def wait(ranks: Ranks) -> None:
    """A barrier of every rank, as long as there are collectives."""
    if dist.is_initialized():
        dist.barrier(group=ranks.control)


def _install() -> None:
    global _installed
    if _installed:
        return
    _installed = True
    from accelerate import logging, state
    from accelerate.utils import operations, random

    for name, new in (
        ("is_main_process", lambda self, ranks: ranks.rank == 0),
        ("is_local_main_process", lambda self, ranks: self.local_process_index == 0),
        (
            "is_last_process",
            lambda self, ranks: ranks.is_leader and self.process_index == self.num_processes - 1,
        ),
        # asked by decorators: whether another process may act instead; for a peer one does
        ("use_distributed", lambda self, ranks: len(ranks.leaders) > 1 or not ranks.is_leader),
    ):
        old = getattr(state.PartialState, name).fget
        replace("accelerate.state", f"PartialState.{name}", property(_either(old, new)))
    _replace_methods(state.PartialState, logging.MultiProcessAdapter)
    for module in (operations, random):
        if isinstance(module.torch, _Torch):  # pragma: no cover
            continue
        replace(module.__name__, "torch", _Torch())


def _either(old: Callable[..., Any], new: Callable[..., Any]) -> Callable[[Any], Any]:
    """A property's function: Accelerate's own, or the layout's where there is one."""

    def get(self: Any) -> Any:
        return old(self) if _ranks is None else new(self, _ranks)

    return get


def _replace_methods(state: Any, adapter: Any) -> None:
    wait_for_everyone, on_process, log = state.wait_for_everyone, state.on_process, adapter.log

    def wait_here(self: Any) -> None:
        if _ranks is None:
            wait_for_everyone(self)
        else:
            wait(_ranks)

    def on_one(self: Any, function: Any = None, process_index: int | None = None) -> Any:
        if function is not None and _ranks is not None and not _ranks.is_leader:
            return _nothing
        return on_process(self, function, process_index)

    def log_once(self: Any, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        if _ranks is None or _ranks.is_leader:
            return log(self, level, msg, *args, **kwargs)
        loud, self.logger = self.logger, _Silent(self.logger)
        try:
            return log(self, level, msg, *args, **kwargs)  # it may wait for the others
        finally:
            self.logger = loud

    replace("accelerate.state", "PartialState.wait_for_everyone", wait_here)
    replace("accelerate.state", "PartialState.on_process", on_one)
    replace("accelerate.logging", "MultiProcessAdapter.log", log_once)


class _Silent:
    """A logger that says nothing."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def log(self, *args: object, **kwargs: object) -> None:
        """Nothing."""


def _nothing(*args: object, **kwargs: object) -> None:
    return None


class _Torch:
    """torch, for a module whose collectives mean data-parallel ranks by processes."""

    def __init__(self) -> None:
        self.distributed = _Distributed()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Distributed:
    """torch.distributed: gathers and sums run over replicas, and a leader's values reach all."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def _over_replicas(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if _ranks is not None:
                kwargs.setdefault("group", _ranks.data_parallel)
            return function(*args, **kwargs)

        return call

    @property
    def all_gather(self) -> Callable[..., Any]:
        return self._over_replicas(dist.all_gather)

    @property
    def all_gather_into_tensor(self) -> Callable[..., Any]:
        return self._over_replicas(dist.all_gather_into_tensor)

    @property
    def all_gather_object(self) -> Callable[..., Any]:
        return self._over_replicas(dist.all_gather_object)

    @property
    def all_reduce(self) -> Callable[..., Any]:
        return self._over_replicas(dist.all_reduce)

    def broadcast(self, tensor: torch.Tensor, src: int = 0, **kwargs: Any) -> Any:
        return dist.broadcast(tensor, **_from_leader(src), **kwargs)

    def broadcast_object_list(self, objects: list[Any], src: int = 0, **kwargs: Any) -> Any:
        return dist.broadcast_object_list(objects, **_from_leader(src), **kwargs)


def _from_leader(replica: int) -> dict[str, Any]:
    """From which rank, and in which group, a broadcast of a replica's values goes out.

    Only the first rank of a replica has what a script computes on its main process alone.
    """
    if _ranks is None:
        return {"src": replica}
    return {
        "src": _ranks.leaders[replica],
        "group": _ranks.data_parallel if _alone else None,
    }
