"""Rows of multi-head latent attention: projections to a small latent space and up from it.

The columns of every tensor have the same order in Hugging Face's files and in megatron-core: it
is the kernel that pairs rotary dims. Projections into the latent space are cut over tp by
megatron-core's local layers, and whole on each rank with TransformerEngine's (``WHOLE_DOWN``);
our own shards hold them whole.
"""

from __future__ import annotations

from dataclasses import replace

from ..model.family import WHOLE_DOWN, Check, Part, Rule
from .rows import COLUMN, LAYER, ROW, D, M, norm

# n heads of dn dims without and dr dims with positions, values of dv dims; latent ql and kl
MLA_SIZES = {
    "layer": "num_hidden_layers",
    "h": "hidden_size",
    "n": "num_attention_heads",
    "g": "n",
    "dn": "qk_nope_head_dim",
    "dr": "qk_rope_head_dim",
    "dv": "v_head_dim",
    "hd": "dn+dr",
    "ql": "q_lora_rank|0",
    "kl": "kv_lora_rank",
    "kd": "kl+dr",
    "mq": "dn+dr*n",
    "mkv": "dn+dv*n",
    "av": "n*dv",
}
_A = M + "self_attn."
_S = D + "self_attention."
_HEADS = (Check("{n} attention heads do not divide over tp={tp}", "n", "tp"),)


def latent_attention() -> tuple[Rule, ...]:
    """Every tensor of the attention but the norm before it."""
    low, plain = ("ql>0",), ("!ql>0",)
    return (
        Rule(_S + "linear_proj.weight", "h av", (Part(_A + "o_proj.weight", "h av"),), ROW),
        Rule(
            _S + "linear_q_proj.weight", "mq h", (Part(_A + "q_proj.weight", "mq h"),), COLUMN,
            when=plain, checks=_HEADS,
        ),
        *_down("linear_q_down_proj.weight", "ql h", "q_a_proj.weight", low),
        Rule(
            _S + "linear_q_up_proj.weight", "mq ql", (Part(_A + "q_b_proj.weight", "mq ql"),),
            COLUMN, when=low, checks=_HEADS,
        ),
        *_down("linear_kv_down_proj.weight", "kd h", "kv_a_proj_with_mqa.weight", ()),
        Rule(
            _S + "linear_kv_up_proj.weight", "mkv kl", (Part(_A + "kv_b_proj.weight", "mkv kl"),),
            COLUMN, checks=_HEADS,
        ),
        norm("self_attention.q_layernorm.weight", _A + "q_a_layernorm.weight", "ql", low),
        norm("self_attention.kv_layernorm.weight", _A + "kv_a_layernorm.weight", "kl"),
    )  # fmt: skip


def _down(name: str, dims: str, fqn: str, when: tuple[str, ...]) -> tuple[Rule, Rule]:
    rule = Rule(_S + name, dims, (Part(_A + fqn, dims),), COLUMN)
    return (
        replace(rule, when=(*when, "!" + WHOLE_DOWN)),
        replace(rule, axes=LAYER, when=(*when, WHOLE_DOWN)),
    )
