"""Which process this is: torch.distributed, megatron-core's groups, and random numbers.

``initialize`` makes this process one rank of a layout, on a GPU with NCCL or on CPU with gloo,
under torchrun or alone.
"""

from __future__ import annotations

import gc
import os
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.util import find_spec

import numpy as np
import torch
import torch.distributed as dist

from shardwright.ckpt.errors import install

from ..errors import TrainError
from ..patches import graphs
from ..patches.megatron import import_megatron
from .layout import Layout, Place

_PER_STAGE = 100  # megatron's distance between the seeds of two pipeline stages
_made_world = False  # whether `initialize` started torch.distributed, so that `shutdown` ends it
_control: dist.ProcessGroup | None = None  # that of the rank that this process is
_more: list[dist.ProcessGroup] = []  # what `gloo_group` made


@dataclass(frozen=True, slots=True)
class Parallel:
    """What this process is."""

    device: torch.device
    rank: int
    world_size: int
    local_rank: int  # among the ranks of this host
    tp: int  # sizes of the axes
    pp: int
    dp: int
    tp_rank: int  # this process's place along them
    pp_rank: int
    dp_rank: int
    # Every rank, over gloo, for small control messages; never used by the training step itself.
    control_group: dist.ProcessGroup = field(repr=False, compare=False)

    @property
    def place(self) -> Place:
        """This process's place in the layout."""
        return Place(self.tp, self.pp, self.dp, self.tp_rank, self.pp_rank, self.dp_rank)

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.place.is_first_stage

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the output layer, and so the loss."""
        return self.place.is_last_stage


def need_packages() -> None:
    """TrainError with what to install, before any process is started or joins the others."""
    for package in ("megatron", "megatron.core", "transformers"):
        if find_spec(package) is None:
            raise TrainError(f"training: {install(package)}")


def initialize(layout: Layout, *, seed: int | None, timeout_s: float = 600.0) -> Parallel:
    """Make this process one rank of ``layout``; every rank calls it.

    Ranks come from torchrun's environment; without it the world is this process alone. A process
    group that exists already is used, and ``shutdown`` does not destroy it. ``timeout_s`` bounds
    each collective, in seconds. Without a ``seed`` random states stay as they are;
    ``rng.seed_model`` sets those of a model. TrainError if the world does not fit the layout.
    """
    global _control
    need_packages()
    world_size = _world_size()
    dp = layout.data_parallel(world_size)
    local_rank, device = _environment("LOCAL_RANK", 0), take_device()
    if layout.tp > 1:  # megatron overlaps by the order of launches, which this setting keeps
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    timeout = timedelta(seconds=timeout_s)
    _join_world(device, timeout)
    # megatron calls collectives by names that newer torch is about to replace, in every layer
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )
    # its distributed optimizer asks parts of parameters for gradients that they do not have
    warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")
    state = import_megatron("parallel_state")
    if state.model_parallel_is_initialized():
        raise TrainError("this process is a rank of a layout already; call shutdown() first")
    state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        # copies of the data-parallel groups, which only megatron-core's own saving uses
        create_gloo_process_groups=False,
        distributed_timeout_minutes=timeout_s / 60,
    )
    _control = dist.new_group(backend="gloo", timeout=timeout)
    pp_rank = state.get_pipeline_model_parallel_rank()
    if seed is not None:
        _seed_everything(seed + _PER_STAGE * pp_rank)
    return Parallel(
        device=device,
        rank=dist.get_rank(),
        world_size=world_size,
        local_rank=local_rank,
        tp=layout.tp,
        pp=layout.pp,
        dp=dp,
        tp_rank=state.get_tensor_model_parallel_rank(),
        pp_rank=pp_rank,
        dp_rank=state.get_data_parallel_rank(),
        control_group=_control,
    )


def gloo_group(sets: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """A gloo group of the set of ranks that this rank is in, until ``shutdown``.

    The sets are the same on every rank, and all ranks call it. None for a set of one, or none.
    """
    mine = None
    for ranks in sets:
        if len(ranks) > 1:
            made = dist.new_group(list(ranks), backend="gloo")
            if dist.get_rank() in ranks:
                mine = made
                _more.append(made)
    return mine


def shutdown() -> None:
    """Leave the layout, and the world if ``initialize`` made it; every rank calls it."""
    global _made_world, _control
    state = import_megatron("parallel_state")
    graphs.release()
    # megatron forgets its groups without closing them, and each keeps sockets and threads
    groups = [*(state._global_process_group_list or ()), *_more, _control]
    state.destroy_model_parallel()
    gc.collect()  # a model that is gone but not collected still holds its groups, threads and all
    if _made_world and dist.is_initialized():
        dist.destroy_process_group()
    else:
        for group in groups:
            if group is not None:
                dist.destroy_process_group(group)
    _made_world, _control = False, None
    _more.clear()


def _world_size() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    return _environment("WORLD_SIZE", 1) if "RANK" in os.environ else 1


def _environment(name: str, default: int) -> int:
    """A whole number of torchrun's environment."""
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise TrainError(f"{name}={text} in the environment is not a whole number") from None


def take_device() -> torch.device:
    """This rank's GPU, or the CPU with megatron redirected to it; before megatron is imported.

    A second call changes nothing.
    """
    local_rank = _environment("LOCAL_RANK", 0)
    if not torch.cuda.is_available():
        from ..patches import cpu

        cpu.install()
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise TrainError(
            f"local rank {local_rank} has no GPU of its own: {torch.cuda.device_count()} are "
            "visible; start one process per GPU"
        )
    torch.cuda.set_device(local_rank)
    from ..patches import fusions

    fusions.install()
    return torch.device("cuda", local_rank)


def _join_world(device: torch.device, timeout: timedelta) -> None:
    """Start torch.distributed unless it runs: with torchrun's ranks, or alone."""
    global _made_world
    if dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:  # alone: a store in this process needs no port
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    _made_world = True


def _seed_everything(seed: int) -> None:
    """Python's, NumPy's and torch's generators, and megatron's tracker.

    Data-parallel ranks get the same seed, so that they initialize the same weights; tensor-
    parallel ranks differ only inside megatron's tracker.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    import_megatron("tensor_parallel.random").model_parallel_cuda_manual_seed(seed)
