"""What Accelerate's states say in this process: data-parallel replicas for processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType

from ..config.schema import TrainConfig
from ..core.from_config import groups_of
from ..core.layout import Layout
from ..core.process import Parallel, initialize, shutdown
from ..patches import accelerate as patches
from ..patches.megatron import import_megatron
from .replica import Replica

ASKS = "ACCELERATE_USE_MEGATRON_LM"  # set by `accelerate launch --use_megatron_lm`
_MARK = "_shardwright"  # in Accelerate's state: the world below, as long as the state is ours


@dataclass(frozen=True, slots=True)
class World:
    """The ranks that this process is one of; all Accelerators of a process share it."""

    parallel: Parallel
    replica: Replica
    layout: Layout
    plugin: Any  # that the first Accelerator was given: a script looks into it


_world: World | None = None  # of this process, also after Accelerate's states were reset


def current() -> World | None:
    """The world that Accelerate's state stands for; None before there is one."""
    found = AcceleratorState._shared_state.get(_MARK)
    return found if found is not None and _is_alive() else None


def _is_alive() -> bool:
    return bool(import_megatron("parallel_state").model_parallel_is_initialized())


def join(settings: TrainConfig, plugin: Any, timeout_s: float) -> World:
    """Become one of the ranks of a layout; every rank calls it.

    A process that is a rank already, and whose states were reset, keeps its place or moves.
    """
    global _world
    layout = groups_of(settings)
    if _world is not None and _is_alive():
        if _world.layout == layout:
            return World(_world.parallel, _world.replica, layout, plugin)
        shutdown()
    parallel = initialize(layout, seed=None, timeout_s=timeout_s)
    _world = World(parallel, Replica.of(parallel), layout, plugin)
    return _world


def enter(world: World) -> None:
    """Let Accelerate's states say what they would say with replicas for processes."""
    p = world.parallel
    said = {
        "num_processes": p.dp,
        "process_index": p.dp_rank,
        "local_process_index": p.local_rank,
        "device": p.device,
        "distributed_type": DistributedType.MEGATRON_LM,
    }
    PartialState._shared_state.update(said)
    AcceleratorState._shared_state.update(said)
    AcceleratorState._shared_state.update({"megatron_lm_plugin": world.plugin, _MARK: world})
    group = import_megatron("parallel_state").get_data_parallel_group()
    patches.enter(
        patches.Ranks(p.rank, p.world_size, world.replica.leaders, group, p.control_group)
    )


def leave() -> None:
    """Leave the layout, and let the next Accelerator of this process begin anew."""
    global _world
    patches.leave()
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    if _is_alive():
        shutdown()
    _world = None


@contextlib.contextmanager
def without_megatron() -> Iterator[None]:
    """Accelerate does not look for its own engine: neither at import nor in a constructor."""
    before = os.environ.pop(ASKS, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[ASKS] = before
