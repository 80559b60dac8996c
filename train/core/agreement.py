"""Makes all ranks know the same numbers: losses, reports, faults, logits.

Every function is a collective of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..patches.megatron import import_megatron
from .process import Parallel


def over_dp(parallel: Parallel, value: float) -> float:
    """The sum of a number over the data-parallel ranks."""
    if parallel.dp == 1:  # a GPU need not be waited for
        return value
    box = torch.tensor([value], dtype=torch.float64, device=parallel.device)
    dist.all_reduce(box, group=import_megatron("parallel_state").get_data_parallel_group())
    return float(box.item())


def loss(parallel: Parallel, losses: Sequence[Mapping[str, Any]]) -> tuple[float, torch.Tensor]:
    """The sum of the last stages' losses, and this rank's part of it [1]."""
    state = import_megatron("parallel_state")
    box = torch.zeros(1, dtype=torch.float64, device=parallel.device)
    if parallel.is_last_stage:
        box += sum(one["sum"].double() for one in losses)
    mine = box.clone()
    if parallel.is_last_stage:
        dist.all_reduce(box, group=state.get_data_parallel_group())
    if parallel.pp > 1:
        group = state.get_pipeline_model_parallel_group()
        dist.broadcast(box, dist.get_global_rank(group, parallel.pp - 1), group=group)
    return float(box.item()), mine


def own_loss(
    parallel: Parallel, losses: Sequence[Mapping[str, Any]], total: float
) -> tuple[float, float, torch.Tensor]:
    """The mean loss of this data-parallel rank, the mean of those of all ranks, this rank's [1].

    ``total`` is what this rank's losses are divided by. A rank with a total of 0 has nothing to
    predict: it is left out of the mean, which it gets for its own.
    """
    state = import_megatron("parallel_state")
    box = torch.zeros(2, dtype=torch.float64, device=parallel.device)
    mine = box[:1].clone()
    if parallel.is_last_stage:
        if total:
            mine += sum(one["sum"].double() for one in losses) / total
        every = torch.cat((mine, torch.full_like(mine, float(total > 0))))
        dist.all_reduce(every, group=state.get_data_parallel_group())
        mean = every[:1] / every[1:].clamp_min(1)
        box = torch.cat((mine if total else mean, mean))
    if parallel.pp > 1:
        group = state.get_pipeline_model_parallel_group()
        dist.broadcast(box, dist.get_global_rank(group, parallel.pp - 1), group=group)
    own, whole = box.tolist()
    return own, whole, mine


def reports(
    parallel: Parallel, losses: Sequence[Mapping[str, Any]], total: float, own: bool = False
) -> dict[str, float]:
    """The means of what a custom loss reported, keys and values; over all ranks, or this one's."""
    state = import_megatron("parallel_state")
    box: list[dict[str, float]] = [{}]
    if parallel.is_last_stage:
        names = sorted(losses[0]["reported"])
        sums = [sum(one["reported"][name].double() for one in losses) for name in names]
        if names:
            row = torch.stack(sums).to(parallel.device)
            if not own:
                dist.all_reduce(row, group=state.get_data_parallel_group())
            box = [dict(zip(names, (row / total).tolist(), strict=True))]
    if parallel.pp > 1:
        group = state.get_pipeline_model_parallel_group()
        last = dist.get_global_rank(group, parallel.pp - 1)
        dist.broadcast_object_list(box, last, group=group)
    return box[0]


def first_faulty(parallel: Parallel, mine: Sequence[torch.Tensor]) -> int | None:
    """The first rank that has a number that is not finite; None where no rank has one.

    Finite parts may have an infinite sum: then no rank is to blame.
    """
    world = parallel.world_size
    bad = not all(bool(torch.isfinite(tensor).all()) for tensor in mine)
    box = torch.tensor([parallel.rank if bad else world])
    dist.all_reduce(box, op=dist.ReduceOp.MIN, group=parallel.control_group)
    return int(box.item()) if int(box.item()) < world else None


def whole_logits(
    parallel: Parallel, parts: Sequence[torch.Tensor], length: int, vocab: int
) -> torch.Tensor:
    """[rows, length, vocab] on every rank of the replica, from the last stage's parts.

    A part is [b, s, padded vocab of its tp rank]; other stages have none.
    """
    state = import_megatron("parallel_state")
    found, shape = None, [0, 0, 0]
    if parts:
        mine = torch.cat(list(parts))[:, :length].contiguous()
        every = [torch.empty_like(mine) for _ in range(parallel.tp)]
        dist.all_gather(every, mine, group=state.get_tensor_model_parallel_group())
        found = torch.cat(every, -1)[..., :vocab].float().contiguous()
        shape = list(found.shape)
    if parallel.pp == 1:
        assert found is not None
        return found
    group = state.get_pipeline_model_parallel_group()
    last = dist.get_global_rank(group, parallel.pp - 1)
    box = torch.tensor(shape, device=parallel.device)
    dist.broadcast(box, last, group=group)
    if found is None:
        found = torch.empty(box.tolist(), device=parallel.device)
    dist.broadcast(found, last, group=group)
    return found
