"""Shapes of models that ``--params`` names: known ones, and one made for any other size."""

from __future__ import annotations

import math
import re
from typing import Any

from ..errors import TrainError

LEAST, MOST = 100_000_000, 10_000_000_000_000  # parameters that a shape is made for
_VOCABULARY = 128_256  # of the shapes that are made
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)([KMBT]?)", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def _llama(
    h: int, layers: int, heads: int, groups: int, f: int, vocab: int = 32_000, tied: bool = False
) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": h, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": groups, "intermediate_size": f,
        "vocab_size": vocab, "max_position_embeddings": 4096, "tie_word_embeddings": tied,
    }  # fmt: skip


def _gpt(h: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "n_embd": h, "n_layer": layers, "n_head": heads,
        "vocab_size": 50257, "n_positions": 2048, "resid_pdrop": 0.0,
    }  # fmt: skip


# --params -> (whose shape it is, a config)
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "1B": ("Llama 3.2 1B", _llama(2048, 16, 32, 8, 8192, _VOCABULARY, True)),
    "3B": ("Llama 3.2 3B", _llama(3072, 28, 24, 8, 8192, _VOCABULARY, True)),
    "7B": ("Llama 2 7B", _llama(4096, 32, 32, 32, 11008)),
    "8B": ("Llama 3.1 8B", _llama(4096, 32, 32, 8, 14336, _VOCABULARY)),
    "13B": ("Llama 2 13B", _llama(5120, 40, 40, 40, 13824)),
    "20B": ("a GPT of GPT-NeoX-20B's sizes", _gpt(6144, 44, 64)),
    "40B": ("Megatron's GPT of 39.1B", _gpt(8192, 48, 64)),
    "70B": ("Llama 2 70B", _llama(8192, 80, 64, 8, 28672)),
    "175B": ("GPT-3 175B", _gpt(12288, 96, 96)),
    "405B": ("Llama 3.1 405B", _llama(16384, 126, 128, 8, 53248, _VOCABULARY)),
}


def shape_of_size(size: str) -> tuple[str, dict[str, Any]]:
    """(what it is taken as, a config) of a size such as 8B, 1.5b, 500M, 2T or 8e9.

    TrainError where it is no size.
    """
    if size.upper() in SHAPES:
        return SHAPES[size.upper()]
    count = _count(size)
    if count is None or not LEAST <= count <= MOST:
        raise TrainError(
            f"--params {size:.40}: not a size from 100M to 10T; write it as 8B, 1.5B, 500M or 2T"
        )
    return _nearest(count)


def _count(size: str) -> float | None:
    """The number of parameters that a text names."""
    match = _SIZE.fullmatch(size.strip())
    if match is not None:
        return float(match[1]) * _UNITS[match[2].upper()]
    try:
        return float(size) if re.fullmatch(r"\d+(\.\d+)?e\d{1,2}", size.strip()) else None
    except ValueError:
        return None


def _nearest(count: float) -> tuple[str, dict[str, Any]]:
    """A Llama of about ``count`` parameters: 8 KV heads, an MLP of 3.5 times the hidden size.

    Layers come in fours, which most pipelines divide; a layer is about 110 times as wide as there
    are layers, as in Llama 3.
    """
    head = 128 if count > 1.5e9 else 64
    best: tuple[float, int, int] | None = None
    for h in range(8 * head, 40 * 1024 + 1, 8 * head):
        matrices = 2 * h * h + 2 * h * 8 * head + 3 * h * (7 * h // 2)
        left = count - 2 * _VOCABULARY * h * (0.5 if count < 4e9 else 1)
        for layers in {max(4, 4 * round(left / matrices / 4)), 4}:
            made = count - left + layers * matrices
            off = 3 * abs(made - count) / count + 0.1 * abs(math.log(h / layers / 110))
            if best is None or off < best[0]:
                best = off, h, layers
    assert best is not None
    _, h, layers = best
    config = _llama(h, layers, h // head, 8, 7 * h // 2, _VOCABULARY, count < 4e9)
    return f"a Llama of {layers} layers of {h}", config
