"""Tiny models that the tests convert: raw Hugging Face fixtures, transformers models, head counts.

Raw fixtures are written name by name as their model files spell them, from a config alone, so
they need neither transformers nor the tables under test. Every element of a fixture is unique:
a lost, doubled or swapped row is visible by exact comparison.

Shapes: H hidden, n query heads, g KV heads, d head size, F MLP width, L layers, V vocabulary.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from hypothesis import strategies as st
from safetensors.torch import save_file

MESHES = list(itertools.product((1, 2, 3, 4), repeat=2))  # (tp, pp)

# variant -> model_type and the config keys that tell it from the family's plain form
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "gpt2": ("gpt2", {}),
    "phi3": ("phi3", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
}
_TIED = ("gpt2", "gemma", "gemma2")  # where the config is silent


@dataclass(frozen=True)
class Case:
    """A Hugging Face checkpoint in memory."""

    name: str
    config: dict[str, object]
    state: dict[str, torch.Tensor]
    sizes: dict[str, int]  # H, n, g, d, F, L, V
    side_files: dict[str, bytes] = field(default_factory=dict)

    def numbered(self, start: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        """Tensors of the same names and shapes with the unique values start, start + 1, ..."""
        return number({k: tuple(v.shape) for k, v in self.state.items()}, start, dtype)

    def cast(self, dtype: torch.dtype) -> Case:
        """The same model in another dtype; values beyond its precision are no longer unique."""
        return replace(self, state={k: v.to(dtype) for k, v in self.state.items()})


def number(
    shapes: dict[str, tuple[int, ...]], start: int, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Tensors whose elements count on from ``start`` over all of them."""
    found = {}
    for name, shape in shapes.items():
        count = math.prod(shape)
        found[name] = torch.arange(start, start + count, dtype=dtype).reshape(shape)
        start += count
    assert start < 2**24, "float32 no longer tells neighbours apart"
    return found


def raw(
    variant: str,
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 6,
    hidden: int = 16,
    ffn: int = 24,
    layers: int = 5,
    vocab: int = 21,
    start: int = 1,
    **config: object,
) -> Case:
    """The fixture of cases.md (its head size is not hidden / heads) in the form of ``variant``."""
    model_type, extra = VARIANTS[variant]
    sizes = {"H": hidden, "n": heads[0], "g": heads[1], "d": head_dim,
             "F": ffn, "L": layers, "V": vocab}  # fmt: skip
    if model_type == "gpt2":  # heads share the hidden size; no grouped queries
        sizes.update(H=heads[0] * head_dim, g=heads[0])
    table = {**_config(model_type, sizes), **extra, **config}
    table.setdefault("tie_word_embeddings", model_type in _TIED)
    return Case(variant, table, number(shapes(table, sizes), start), sizes)


def heads24(variant: str, **config: object) -> Case:
    """24 query and 12 KV heads, 12 layers: every mesh of tp, pp in 1..4 is valid."""
    return raw(variant, heads=(24, 12), head_dim=2, hidden=8, ffn=24, layers=12, vocab=21, **config)


def _config(model_type: str, s: dict[str, int]) -> dict[str, object]:
    if model_type == "gpt2":
        return {"model_type": "gpt2", "n_embd": s["H"], "n_head": s["n"], "n_layer": s["L"],
                "n_inner": s["F"], "n_positions": 7, "vocab_size": s["V"],
                "torch_dtype": "float32"}  # fmt: skip
    return {"model_type": model_type, "hidden_size": s["H"], "num_attention_heads": s["n"],
            "num_key_value_heads": s["g"], "head_dim": s["d"], "intermediate_size": s["F"],
            "num_hidden_layers": s["L"], "vocab_size": s["V"],
            "torch_dtype": "float32"}  # fmt: skip


def shapes(config: dict[str, object], s: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model's files, spelled by hand for each family."""
    if config["model_type"] == "gpt2":
        return _gpt2_shapes(s)
    return _llama_shapes(config, s)


def _llama_shapes(config: dict[str, object], s: dict[str, int]) -> dict[str, tuple[int, ...]]:
    kind = config["model_type"]
    H, d, F, V = s["H"], s["d"], s["F"], s["V"]
    q, kv = s["n"] * d, s["g"] * d
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, H)}
    for i in range(s["L"]):
        m = f"model.layers.{i}."
        out[m + "input_layernorm.weight"] = (H,)
        if kind == "phi3":
            out[m + "self_attn.qkv_proj.weight"] = (q + 2 * kv, H)
        else:
            for x, rows in (("q", q), ("k", kv), ("v", kv)):
                out[f"{m}self_attn.{x}_proj.weight"] = (rows, H)
                if kind == "qwen2" or config.get("attention_bias"):
                    out[f"{m}self_attn.{x}_proj.bias"] = (rows,)
        out[m + "self_attn.o_proj.weight"] = (H, q)
        if config.get("attention_bias"):
            out[m + "self_attn.o_proj.bias"] = (H,)
        if kind == "qwen3":
            out[m + "self_attn.q_norm.weight"] = out[m + "self_attn.k_norm.weight"] = (d,)
        out[m + "post_attention_layernorm.weight"] = (H,)
        if kind == "gemma2":
            out[m + "pre_feedforward_layernorm.weight"] = (H,)
            out[m + "post_feedforward_layernorm.weight"] = (H,)
        if kind == "phi3":
            out[m + "mlp.gate_up_proj.weight"] = (2 * F, H)
            out[m + "mlp.down_proj.weight"] = (H, F)
        else:
            for x, shape in (("gate", (F, H)), ("up", (F, H)), ("down", (H, F))):
                out[f"{m}mlp.{x}_proj.weight"] = shape
                if config.get("mlp_bias"):
                    out[f"{m}mlp.{x}_proj.bias"] = shape[:1]
    out["model.norm.weight"] = (H,)
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (V, H)
    return out


def _gpt2_shapes(s: dict[str, int]) -> dict[str, tuple[int, ...]]:
    H, F = s["H"], s["F"]
    out: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (s["V"], H),
        "transformer.wpe.weight": (7, H),
    }
    for i in range(s["L"]):
        m = f"transformer.h.{i}."
        for name, shape in (
            ("ln_1", (H,)), ("attn.c_attn", (H, 3 * H)), ("attn.c_proj", (H, H)),
            ("ln_2", (H,)), ("mlp.c_fc", (H, F)), ("mlp.c_proj", (F, H)),
        ):  # fmt: skip
            out[f"{m}{name}.weight"] = shape
            out[f"{m}{name}.bias"] = shape[-1:]
    out["transformer.ln_f.weight"] = out["transformer.ln_f.bias"] = (H,)
    return out


SIDE_FILES = {
    "tokenizer.json": b'{"version": "1.0"}\r\n',
    "generation_config.json": b'{"eos_token_id": 2}',
    "chat_template.jinja": "{{ messages }} \u2603".encode(),
    "modeling_own.py": b"raise SystemExit('no code of a checkpoint ever runs')\n",
    "nested/vocab.txt": b"a\nb\n\xff\x00",
}


def write_hf(folder: Path, case: Case, *, binary: bool = False, sides: bool = False) -> Path:
    """A Hugging Face folder of one weights file, by plain library calls."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(case.config))
    if binary:
        torch.save(case.state, folder / "pytorch_model.bin")
    else:
        save_file(case.state, folder / "model.safetensors", {"format": "pt"})
    for name, data in SIDE_FILES.items() if sides else ():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


# --- transformers -----------------------------------------------------------------------------


def tiny_model(variant: str, *, seed: int = 0, **config: object):
    """A random transformers model of ``variant``; biases and norms are random as well."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, extra = VARIANTS[variant]
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 37}
    if model_type == "gpt2":
        shape = {"n_embd": 24, "n_head": 12, "n_layer": 4, "n_positions": 32}
    else:
        shape = {"hidden_size": 24, "num_attention_heads": 12, "num_key_value_heads": 6,
                 "head_dim": 4, "intermediate_size": 36, "num_hidden_layers": 4,
                 "max_position_embeddings": 32}  # fmt: skip
    made = AutoConfig.for_model(model_type, **{**tokens, **shape, **extra, **config})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(made)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


# --- hypothesis -------------------------------------------------------------------------------


@st.composite
def head_counts(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(n, g, d, tp): heads in whole groups, and a tp of any kind, valid or not."""
    g = draw(st.integers(1, 6))
    n = g * draw(st.integers(1, 4))
    return n, g, draw(st.integers(1, 6)), draw(st.integers(1, 12))


def is_valid_tp(n: int, g: int, d: int, tp: int) -> bool:
    """The issue's statement of which tp a model with these heads can have."""
    return n % tp == 0 and (g % tp == 0 or tp % g == 0) and (n + 2 * g) * d % tp == 0


@st.composite
def valid_head_counts(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(n, g, d, tp) with a valid tp, larger than g as often as smaller."""
    n, g, d, _ = draw(head_counts())
    return n, g, d, draw(st.sampled_from([t for t in range(1, 25) if is_valid_tp(n, g, d, t)]))
