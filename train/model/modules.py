"""Modules of our own in megatron-core's layers, and the attention masks that they take.

``Norm`` may run on a part of the sequence, and ``CoreAttention`` never holds the matrix of scores.

Shapes: B batch, S sequence, N query heads and G KV heads of this rank, D head size.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ..patches.megatron import import_megatron

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class Norm(torch.nn.Module):
    """RMSNorm or LayerNorm over the last dim, whose input may be a part of the sequence.

    Its parameters carry ``sequence_parallel``: megatron then adds their gradients over tp.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object
    ) -> None:
        super().__init__()
        self.shape, self.eps = (hidden_size,), eps
        self.zero_centered = config.layernorm_zero_centered_gamma  # multiply by 1 + weight
        device = torch.cuda.current_device()
        fill = functools.partial(torch.full, self.shape, dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(fill(0.0 if self.zero_centered else 1.0))
        self.bias = torch.nn.Parameter(fill(0.0)) if config.normalization == "LayerNorm" else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The normed input, in its shape and type."""
        if self.zero_centered:  # 1 + weight has more digits than a small weight's own type
            return self._norm(x.float(), 1 + self.weight.float()).to(x.dtype)
        return self._norm(x, self.weight)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return F.rms_norm(x, self.shape, weight, self.eps)
        return F.layer_norm(x, self.shape, weight, self.bias.to(x.dtype), self.eps)


class CoreAttention(torch.nn.Module):
    """Causal attention by ``scaled_dot_product_attention``; takes megatron's place of it.

    ``windows`` has one entry per layer of the model, ``softcap`` bounds the scores by tanh, and
    ``by_layer`` divides them by the 1-based layer number.
    """

    def __init__(
        self,
        *,
        config: TransformerConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        windows: tuple[int | None, ...],
        softcap: float | None = None,
        by_layer: bool = False,
        **unused: object,
    ) -> None:
        super().__init__()
        scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.scale = scale / layer_number if by_layer else scale
        self.window = windows[layer_number - 1]
        self.softcap = softcap
        self.dropout = config.attention_dropout
        self.sequence_parallel = config.sequence_parallel

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **unused: object,
    ) -> torch.Tensor:
        """[S, B, N x D] from a query of [S, B, N, D] and key and value of [S, B, G, D].

        ``attention_mask`` is None, or true where a key is hidden from a query in addition to
        causality: [B, 1, 1, S] for padding, or [B, 1, S, S].
        """
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [B, N or G, S, D]
        visible, blind = self._visible(q.shape[2], q.device, attention_mask), None
        if attention_mask is not None and visible is not None:
            # a row without keys has no softmax; as in transformers' SDPA its result is zero
            blind = ~visible.any(-1, keepdim=True)  # [B, 1, S, 1]: padding before the text
            visible = visible | blind
        dropout = self.dropout if self.training else 0.0
        with self._rng(dropout):
            if self.softcap is not None:
                out = self._capped(q, k, v, visible, dropout)
            else:
                out = self._attend(q, k, v, visible, dropout)
        if blind is not None:
            out = out.masked_fill(blind, 0.0)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _rng(self, dropout: float) -> contextlib.AbstractContextManager[object]:
        """The random state for heads that differ between tp ranks.

        With sequence parallelism megatron runs the whole block in it.
        """
        if not dropout or self.sequence_parallel:
            return contextlib.nullcontext()
        return import_megatron("tensor_parallel").get_cuda_rng_tracker().fork()

    def _visible(
        self, length: int, device: torch.device, hidden: torch.Tensor | None
    ) -> torch.Tensor | None:
        """[1 or B, 1, S, S], true where a query sees a key; None for plain causality."""
        window = self.window if self.window is not None and self.window < length else None
        if window is None and hidden is None and self.softcap is None:
            return None
        at = torch.arange(length, device=device)
        distance = at[:, None] - at[None, :]
        seen = distance >= 0
        if window is not None:
            seen = seen & (distance < window)
        if hidden is None:
            return seen[None, None]
        return seen & ~hidden

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        visible: torch.Tensor | None,
        dropout: float,
    ) -> torch.Tensor:
        grouped = q.shape[1] != k.shape[1]
        if visible is not None and grouped:  # the kernels that take a mask take no groups
            k, v = self._expand(q, k), self._expand(q, v)
            grouped = False
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=visible,
            dropout_p=dropout,
            is_causal=visible is None,
            scale=self.scale,
            enable_gqa=grouped,
        )

    def _capped(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        visible: torch.Tensor | None,
        dropout: float,
    ) -> torch.Tensor:
        """Attention whose scores go through tanh: no fused kernel does this; they are kept."""
        assert self.softcap is not None
        assert visible is not None
        scores = q @ self._expand(q, k).transpose(2, 3) * self.scale  # [B, N, S, S]
        scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.float().masked_fill(~visible, -torch.inf)
        weights = F.dropout(scores.softmax(-1).to(q.dtype), dropout)
        return weights @ self._expand(q, v)

    @staticmethod
    def _expand(q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """[B, G, S, D] with each KV head repeated for its N / G query heads."""
        return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def padding_mask(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """A Hugging Face ``attention_mask`` as the model takes it.

    From [B, S] with 1 for tokens to [B, 1, 1, S] with true for padding; None where all are
    tokens, so that the fast causal path is taken. Reads the values, which waits for a GPU.
    """
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return ~attention_mask.bool()[:, None, None, :]


def hidden_keys(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Either form of an attention mask, [B, S] or [B, 1, S, S], as the model takes it."""
    return mask.bool() if mask is not None and mask.dim() == 4 else padding_mask(mask)
