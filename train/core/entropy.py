"""Cross entropy over a vocabulary that is cut over the tp ranks, for graphs that a script keeps.

megatron-core's own overwrites the logits, and in its backward pass what it has saved. So a script
could neither use the logits nor go backward twice (``retain_graph``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..patches.megatron import import_megatron


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Losses [b, s] of logits [b, s, vocabulary of this tp rank] and labels [b, s]."""
    return _Entropy.apply(logits, labels)


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        state = import_megatron("parallel_state")
        group = state.get_tensor_model_parallel_group()
        width = logits.shape[-1]
        here = labels - width * state.get_tensor_model_parallel_rank()
        inside = (here >= 0) & (here < width)
        here = here.clamp(0, width - 1)[..., None]
        highest = logits.detach().float().amax(-1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        shifted = logits.detach().float() - highest[..., None]
        # logits of rows that only fill up the vocabulary are -inf
        picked = shifted.gather(-1, here)[..., 0].masked_fill(~inside, 0.0)
        portion = shifted.exp_()
        total = portion.sum(-1)
        both = torch.stack((total, picked))
        dist.all_reduce(both, group=group)
        total, picked = both
        ctx.save_for_backward(portion.div_(total[..., None]), here, inside)
        ctx.dtype = logits.dtype
        return total.log() - picked

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        portion, here, inside = ctx.saved_tensors
        found = portion * gradient[..., None]
        found.scatter_add_(-1, here, -(gradient * inside)[..., None])
        return found.to(ctx.dtype), None
