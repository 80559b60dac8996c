"""Rows of layers that predict further tokens (MTP), as DeepSeek's files number them.

They are whole layers behind the model's own, of the kind of its last layer, with two norms, a
projection and a last norm around them. Files of Hugging Face may lack them, whatever the config
says: the names in a file decide (``HAS_MTP``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..model.family import HAS, MTP, MTP_LAYER, Axes, Part, Rule
from ..model.mesh import Shard, ShardByIndex
from .rows import FIRST, LAST, D, M

_M = "model.layers.{" + MTP_LAYER + "}."
_D = "mtp.layers.{" + MTP + "}."
HAS_MTP = HAS + _M + "enorm.weight"
MTP_SIZES = {"mtp": "num_nextn_predict_layers|0", "hh": "2*h"}
# the files repeat embedding and head
MTP_COPIES = {
    _M + "embed_tokens.weight": "model.embed_tokens.weight",
    _M + "shared_head.head.weight": "lm_head.weight",
}
ON = {"pp": "mtp"}
_WHEN = (HAS_MTP,)


def mtp_layers(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rows of the MTP layers of a family whose rows are ``rules``."""
    column: Axes = {"tp": Shard(0)}
    around = (
        Rule(_D + "enorm.weight", "h", (Part(_M + "enorm.weight", "h"),), {}, ON),
        Rule(_D + "hnorm.weight", "h", (Part(_M + "hnorm.weight", "h"),), {}, ON),
        Rule(_D + "eh_proj.weight", "h hh", (Part(_M + "eh_proj.weight", "h hh"),), column, ON),
    )
    norm = Part(_M + "shared_head.norm.weight", "h")
    last = Rule(_D + "final_layernorm.weight", "h", (norm,), {}, ON)
    inner = [_moved(rule) for rule in rules if rule.name.startswith(D)]
    made = (*around, *inner, last)
    return tuple(replace(rule, when=(*rule.when, *_WHEN)) for rule in made)


def _moved(rule: Rule) -> Rule:
    """A layer's row as that of an MTP layer, which is on one stage."""
    axes = {a: at for a, at in rule.axes.items() if at != ShardByIndex("layer")}
    parts = tuple(replace(p, fqn=p.fqn.replace(M, _M, 1)) for p in rule.parts)
    when = tuple(flag.replace(HAS + M, HAS + _M) for flag in rule.when)
    name = _D + "transformer_layer." + rule.name.removeprefix(D)
    return replace(rule, name=name, axes=axes, parts=parts, when=when, on=ON)


def with_mtp(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """All rows of a model: those of its MTP layers, their copy of the embedding, and the last norm,
    which lies with the last layer if MTP layers follow.
    """
    found: list[Rule] = []
    for rule in rules:
        if rule.name.startswith("decoder.final_layernorm.") and rule.on == LAST:
            found.append(replace(rule, when=(*rule.when, "!" + HAS_MTP)))
            found.append(replace(rule, on={"pp": "last_index"}, when=(*rule.when, HAS_MTP)))
        else:
            found.append(rule)
        if rule.name == "embedding.word_embeddings.weight" and rule.on == FIRST:
            found.append(replace(rule, on=ON, when=(*rule.when, HAS_MTP, "pp>1")))
    at = next(i for i, r in enumerate(found) if r.name == "output_layer.weight")
    found[at:at] = mtp_layers(found)
    return tuple(found)
