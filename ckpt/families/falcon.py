"""Falcon: q, k and v of each KV group in one tensor; three arrangements of norms.

Falcon-7B and -40B have attention and MLP side by side: behind one norm, or behind one each
(``num_ln_in_parallel_attn``, which is 2 in the new architecture if the config is silent).
"""

from __future__ import annotations

from ..model.family import Family, Function, Rule
from .rows import (
    OLD_BUFFERS,
    PLAIN_SIZES,
    attention_out,
    embedding,
    final_layer_norm,
    fused_qkv,
    head,
    layer_norm,
    norm,
    plain_mlp,
)

_H = "transformer.h.{layer}."
_EMBEDDING = "transformer.word_embeddings.weight"
_BIAS = ("bias",)
_NEW, _PARALLEL, _NORMS = "new_decoder_architecture", "parallel_attn", "num_ln_in_parallel_attn"
_ONE_NORM = (
    ("!" + _PARALLEL,),
    (_PARALLEL, "!" + _NEW, f"!{_NORMS}==2"),
    (_PARALLEL, _NEW, f"!{_NORMS}==2", f"!{_NORMS}==null"),
)
_TWO_NORMS = ((_PARALLEL, f"{_NORMS}==2"), (_PARALLEL, _NEW, f"{_NORMS}==null"))


def _norms(name: str, fqn: str, cases: tuple[tuple[str, ...], ...]) -> tuple[Rule, ...]:
    """The rows of one norm, for each of the cases in which a layer has it."""
    return tuple(rule for when in cases for rule in layer_norm(name, fqn, when=when))


FALCON = Family(
    name="falcon",
    model_types=("falcon",),
    sizes={
        **PLAIN_SIZES,
        "layer": "num_hidden_layers|n_layer",
        "h": "hidden_size|n_embed",
        "n": "num_attention_heads|n_head",
        "g": f"{_NEW}?num_kv_heads|{_NEW}?n_head_kv|{_NEW}?n|multi_query?1|n",
        "hd": "h/n",
        "f": "ffn_hidden_size|4*h",
    },
    flags={
        "tie_word_embeddings": True, "bias": False, _NEW: False, "multi_query": True,
        _PARALLEL: True, f"{_NORMS}==2": False, f"{_NORMS}==null": False,
    },
    rules=(
        embedding(_EMBEDDING),
        *_norms("input_layernorm", _H + "input_layernorm", _ONE_NORM),
        *_norms("input_layernorm", _H + "ln_attn", _TWO_NORMS),
        attention_out(_H + "self_attention.dense.weight"),
        norm("self_attention.linear_proj.bias", _H + "self_attention.dense.bias", when=_BIAS),
        *fused_qkv(_H + "self_attention.query_key_value", _BIAS),
        *_norms("pre_mlp_layernorm", _H + "ln_mlp", _TWO_NORMS),
        *_norms("pre_mlp_layernorm", _H + "post_attention_layernorm", _ONE_NORM[:1]),
        *plain_mlp(_H + "mlp.dense_h_to_4h", _H + "mlp.dense_4h_to_h", _BIAS),
        *final_layer_norm("transformer.ln_f"),
        *head(_EMBEDDING),
    ),
    function=Function(
        {"layer_norm_epsilon": 1e-5, "activation": "gelu", "alibi": False, _PARALLEL: True},
        plain={_PARALLEL: (False,), "alibi": (False,)},
        layer_norm=True,
    ),
    ignore=OLD_BUFFERS,
    prefixes={"h.": "transformer.h."},
    tied_names={"lm_head.weight": _EMBEDDING},
)  # fmt: skip

FAMILIES = (FALCON,)
