"""On a GPU: what megatron-core otherwise leaves to Transformer Engine and Apex, in plain torch.

megatron-core calls fused kernels of those two packages where they are installed, and falls back
to many small ones. ``install`` puts a function of this file in each empty place that the model
below passes through; ``model/config.py`` then asks for them in megatron's config. Installed
packages are left in place. Nothing here is imported where there is no GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from .megatron import import_megatron
from .table import replace


def install() -> None:
    """Fill the empty places; a second call does nothing."""
    layers = import_megatron("tensor_parallel.layers")
    if not layers._grad_accum_fusion_available:
        # a weight's gradient is added by its own matrix product, not by a pass over memory after
        kernels = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
        replace(layers.__name__, "fused_weight_gradient_mlp_cuda", kernels)
        replace(layers.__name__, "_grad_accum_fusion_available", True)
    rope = import_megatron("models.common.embeddings.rope_utils")
    if rope.fused_apply_rotary_pos_emb is None:
        # one kernel instead of a dozen, and cosines that are computed once
        replace(rope.__name__, "fused_apply_rotary_pos_emb", rotate)
    language = import_megatron("models.common.language_module.language_module")
    if language.te_parallel_cross_entropy is None:
        # reads the logits twice and writes them once; megatron's own holds them in fp32
        replace(language.__name__, "te_parallel_cross_entropy", cross_entropy)
    utils = import_megatron("utils")
    clipping = import_megatron("optimizer.clip_grads")
    if clipping.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        # one kernel for all tensors; the fallback waits for the GPU once per tensor
        replace(clipping.__name__, "l2_norm_impl", l2_norm)
    if clipping.multi_tensor_scale_impl is utils.local_multi_tensor_scale:
        # in place, one kernel for all tensors
        replace(clipping.__name__, "multi_tensor_scale_impl", scale)


def accumulate(x: torch.Tensor, gradient: torch.Tensor, total: torch.Tensor) -> None:
    """total += gradient^T x: [rows, in] and [rows, out] in any type, [out, in] in fp32."""
    if x.dtype != total.dtype and _adds_in_place(total.device):
        torch.addmm(total, gradient.t(), x, out_dtype=total.dtype, out=total)
    elif x.dtype == total.dtype:
        total.addmm_(gradient.t(), x)
    else:
        total.add_(gradient.t() @ x)


_adding: bool | None = None


def _adds_in_place(device: torch.device) -> bool:
    """Whether this torch multiplies bf16 matrices into an fp32 one."""
    global _adding
    if _adding is None:
        total = torch.ones(16, 16, device=device)
        x = total.bfloat16()
        try:
            torch.addmm(total, x, x, out_dtype=total.dtype, out=total)
            _adding = bool((total == 17).all())
        except (RuntimeError, TypeError):
            _adding = False
    return _adding


# --- rotary embedding --------------------------------------------------------------------------


def rotate(t: torch.Tensor, freqs: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotary embedding of [S, B, N, D] by angles [S, 1, 1, R]; the D - R last ones stay."""
    assert not interleaved, "pairs of neighbours are another embedding"
    found = getattr(freqs, "_cos_sin", None)
    if found is None or found[0].dtype != t.dtype:  # megatron keeps the angles of each length
        half = freqs[..., : freqs.shape[-1] // 2].detach()
        found = half.cos().to(t.dtype), half.sin().to(t.dtype)
        freqs._cos_sin = found  # type: ignore[attr-defined]
    rotated: torch.Tensor = _Rotation.apply(t[..., : freqs.shape[-1]], *found)
    rest = t[..., freqs.shape[-1] :]
    return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated


class _Rotation(torch.autograd.Function):
    """Its gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(t, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _rotated_back(gradient, *ctx.saved_tensors), None, None


@torch.compile
def _rotated(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = t.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@torch.compile
def _rotated_back(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = t.chunk(2, -1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), -1)


# --- cross entropy -----------------------------------------------------------------------------


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    group: dist.ProcessGroup,
    capturable: bool = False,
) -> torch.Tensor:
    """Losses [S, B] in fp32 of logits [S, B, V of this tp rank] and labels [S, B]."""
    found: torch.Tensor = _CrossEntropy.apply(logits, labels, group)
    return found


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits as they are, and per token a maximum and a sum."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        own = labels - group.rank() * logits.shape[-1]  # columns of this rank
        if group.size() == 1:
            largest, sums = _largest_and_sums(logits, own)
        else:
            largest = _largest(logits)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            sums = _sums(logits, largest, own)
            dist.all_reduce(sums, group=group)
        total, picked = sums
        ctx.save_for_backward(logits, largest, total, own)
        return total.log() - picked

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _logits_gradient(gradient, *ctx.saved_tensors), None, None


def _plain_largest(logits: torch.Tensor) -> torch.Tensor:
    return logits.amax(-1).float()


def _plain_sums(logits: torch.Tensor, largest: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """[2, S, B]: the sums of exponentials, and each label's logit where this rank has it."""
    total = (logits.float() - largest[..., None]).exp().sum(-1)
    inside = (own >= 0) & (own < logits.shape[-1])
    at = own.clamp(0, logits.shape[-1] - 1)[..., None]
    picked = logits.gather(-1, at).squeeze(-1).float() - largest
    return torch.stack((total, picked.where(inside, 0.0)))


_largest = torch.compile(_plain_largest)
_sums = torch.compile(_plain_sums)


@torch.compile
def _largest_and_sums(logits: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest = _plain_largest(logits)
    return largest, _plain_sums(logits, largest, own)


@torch.compile
def _logits_gradient(
    gradient: torch.Tensor,
    logits: torch.Tensor,
    largest: torch.Tensor,
    total: torch.Tensor,
    own: torch.Tensor,
) -> torch.Tensor:
    share = (logits.float() - largest[..., None]).exp() / total[..., None]
    hit = torch.arange(logits.shape[-1], device=logits.device) == own[..., None]
    return ((share - hit.float()) * gradient[..., None]).to(logits.dtype)


# --- many tensors at once ----------------------------------------------------------------------


def l2_norm(
    chunk: int, flag: object, lists: list[list[torch.Tensor]], per_tensor: bool, *unused: object
) -> tuple[torch.Tensor, None]:
    """The L2 norm [1] of all tensors together, as Apex's multi_tensor_l2norm gives it."""
    norms = torch.stack(torch._foreach_norm(lists[0]))
    return torch.linalg.vector_norm(norms).reshape(1), None


def scale(chunk: int, flag: object, lists: list[list[torch.Tensor]], factor: float) -> None:
    """Copy the first list times a factor into the second, as Apex's multi_tensor_scale does."""
    source, target = lists
    if any(s is not t for s, t in zip(source, target, strict=True)):
        torch._foreach_copy_(target, source)
    torch._foreach_mul_(target, factor)
