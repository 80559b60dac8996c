"""A language model inside of another model: the prefix of its names, and the parts beside it.

A model that also sees or hears has the config of its language model in ``text_config``, and the
language model's names behind a prefix. The other parts (vision and audio towers, projectors) are
not cut by any table: they are named, and left out where the user asks for it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...model.dtypes import ITEMSIZE
from ...model.file_layout import Entry

# The prefix of the language model's names -> what stands there in the language model alone.
_PREFIXES = (
    ("language_model.", ""),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("text_model.", ""),
)
_TOWER = re.compile(
    r"((?:model\.)?(?:vision_tower|vision_model|vision_encoder|vision_embed_tokens|visual|vision"
    r"|vision_projection|vision_adapter|embed_vision|image_newline|multi_modal_projector"
    r"|multimodal_projector|mm_projector|connector|aligner|audio_tower|audio_model|audio_encoder"
    r"|audio_projection|audio_projector|audio|embed_audio|speech_encoder|mlp1))(?:\..+)?"
)


@dataclass(frozen=True, slots=True)
class Tower:
    """A part that is not of the language model."""

    name: str
    tensors: int
    nbytes: int


def tower_of(name: str) -> str:
    """The part that a tensor belongs to, for example ``model.vision_tower``; "" for none."""
    match = _TOWER.fullmatch(name)
    return match[1] if match else ""


def towers(entries: Iterable[Entry]) -> list[Tower]:
    """The parts beside the language model, as their names in the files say."""
    found: dict[str, list[int]] = {}
    for entry in entries:
        if name := tower_of(entry.name):
            found.setdefault(name, []).append(math.prod(entry.shape) * ITEMSIZE[entry.dtype])
    return [Tower(name, len(sizes), sum(sizes)) for name, sizes in sorted(found.items())]


def prefix_of(names: Iterable[str], wanted: Mapping[str, object]) -> tuple[str, str]:
    """The prefix that most names of the language model have, and what stands there without it.

    Two empty texts where the names are those of the language model alone.
    """
    have = list(names)
    if not any(name.startswith(prefix) for prefix, _ in _PREFIXES for name in have):
        return "", ""
    plain = sum(name in wanted and not name.startswith("lm_head.") for name in have)
    counts = {
        (prefix, alone): sum(
            name.startswith(prefix) and alone + name[len(prefix) :] in wanted for name in have
        )
        for prefix, alone in _PREFIXES
    }
    best = max(counts, key=counts.__getitem__)
    return best if counts[best] > plain else ("", "")
