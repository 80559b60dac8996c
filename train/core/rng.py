"""Random states of one rank, as tensors and JSON only: no pickle, nothing to trust.

Python's, NumPy's, torch's CPU generator, the device's, and megatron's tracked ones (one per
named region, such as the tensor-parallel dropout).

Outside those regions a model draws from the device's default state. In a script that state is the
script's own, so there a model's passes run in a tracked state, `model_stream`.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator, Mapping

import numpy as np
import torch

_PER_STAGE = 100  # between the seeds of two pipeline stages, as at the start of a run
_STREAM = "data-parallel-rng"  # megatron's name of a state that all ranks of a stage share
_USED = "stream"  # key in the metadata: the model drew from the stream, not from the default


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """torch's states outside megatron's tracker are afterwards what they were."""
    cpu = torch.get_rng_state()
    device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if device is not None:
            torch.cuda.set_rng_state(device)


def seed_model(seed: int, pp_rank: int) -> None:
    """Seed megatron's tracked states, those of tensor-parallel ranks apart, and no others."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    with kept():
        model_parallel_cuda_manual_seed(seed + _PER_STAGE * pp_rank)


def model_states() -> dict[str, object]:
    """megatron's tracked states as they are now."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return {
        name: state.clone() if isinstance(state, torch.Tensor) else state
        for name, state in get_cuda_rng_tracker().get_states().items()
    }


@contextlib.contextmanager
def as_of(states: dict[str, object] | None) -> Iterator[None]:
    """The model draws what it drew from these states, and goes on from where it is afterwards."""
    if states is None:
        yield
        return
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker, now = get_cuda_rng_tracker(), model_states()
    tracker.set_states(dict(states))
    try:
        with model_stream():
            yield
    finally:
        tracker.set_states(now)


@contextlib.contextmanager
def model_stream() -> Iterator[None]:
    """What is drawn from the default state comes from a tracked one."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork(_STREAM):
        yield


def capture(stream: bool = False) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """This process's random states as (tensors, text metadata).

    ``stream``: the model's passes ran in `model_stream`.
    """
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    tensors = {
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        tensors["device"] = torch.cuda.get_rng_state().cpu()
    for name, state in get_cuda_rng_tracker().get_states().items():
        tensors[f"tracker/{name}"] = _as_tensor(state)
    meta = {
        "python": json.dumps([version, gauss]),
        "numpy": json.dumps([str(kind), int(position), int(has_gauss), float(cached)]),
    }
    return tensors, meta | ({_USED: "yes"} if stream else {})


def restore(
    tensors: Mapping[str, torch.Tensor], meta: Mapping[str, str], *, stream: bool = False
) -> None:
    """Put back what ``capture`` gave. ``stream``: the model's passes run in `model_stream`."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    version, gauss = json.loads(meta["python"])
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    kind, position, has_gauss, cached = json.loads(meta["numpy"])
    keys = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state((kind, keys, position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    if torch.cuda.is_available() and "device" in tensors:
        torch.cuda.set_rng_state(tensors["device"])
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        if kind == "tracker":
            states[name] = _like(states.get(name), tensor)
    if stream and _USED not in meta and _STREAM in states:  # continue what the model drew from
        default = tensors["device" if torch.cuda.is_available() else "torch"]
        states[_STREAM] = _like(states[_STREAM], default)
    tracker.set_states(states)


def reseed(seed: int, step: int, rank: int) -> None:
    """Fresh states for another layout, a function of (seed, step, rank) alone."""
    mixed = (seed * 1_000_003 + step * 1_009 + rank) % (1 << 31)
    random.seed(mixed)
    np.random.seed(mixed)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.manual_seed(mixed)
    # what the tp ranks of a stage draw together, such as dropout of whole activations
    stage = parallel_state.get_pipeline_model_parallel_rank()
    shared = seed * 1_000_003 + step * 1_009 + _PER_STAGE * stage
    model_parallel_cuda_manual_seed(shared % (1 << 31))


def _as_tensor(state: object) -> torch.Tensor:
    """A tracked state: a byte tensor, or a generator that holds one."""
    if isinstance(state, torch.Generator):
        return state.get_state().cpu()
    assert isinstance(state, torch.Tensor)
    return state.cpu()


def _like(old: object, tensor: torch.Tensor) -> object:
    if isinstance(old, torch.Generator):
        old.set_state(tensor)
        return old
    return tensor
