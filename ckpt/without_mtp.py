"""A checkpoint without the layers that predict further tokens (``--drop-mtp``)."""

from __future__ import annotations

import json
from dataclasses import replace

from .checkpoint.json_io import load_json
from .checkpoint.types import Checkpoint
from .errors import CheckpointError
from .model.family import MTP, Model, is_mtp
from .model.manifest import SideFile, category_of
from .model.placement import logical_shapes

_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_REASON = "layers that predict further tokens (--drop-mtp)"


def without_mtp(ckpt: Checkpoint) -> Checkpoint:
    """The same checkpoint without them, their optimizer state and their key in config.json."""
    model = ckpt.need_model()
    rules = [rule for rule in model.rules() if is_mtp(rule)]
    if not rules:
        raise CheckpointError(f"{ckpt.path}: --drop-mtp: it has no layers to drop")
    names = set(logical_shapes(rules, model.sizes, model.layers_of))
    kept, left_out = {}, list(ckpt.left_out)
    for fqn, meta in ckpt.manifest.tensors.items():
        state = category_of(fqn)
        if fqn[len(state) + 1 if state else 0 :] in names:
            left_out.append((_REASON, meta.nbytes))
        else:
            kept[fqn] = meta
    chunks = {fqn: ckpt.manifest.chunks[fqn] for fqn in kept}
    sides = tuple(_without_key(ckpt, side) for side in ckpt.manifest.side_files)
    manifest = replace(ckpt.manifest, tensors=kept, chunks=chunks, side_files=sides)
    mesh = replace(ckpt.mesh, mtp=None)
    return replace(
        ckpt, manifest=manifest, model=_small(model), mesh=mesh, left_out=left_out, copied=[]
    )


def _small(model: Model) -> Model:
    flags = frozenset(flag for flag in model.flags if MTP not in flag)
    config = {**model.config, **{key: 0 for key in _KEYS if key in model.config}}
    return replace(model, config=config, sizes={**model.sizes, MTP: 0}, flags=flags)


def _without_key(ckpt: Checkpoint, side: SideFile) -> SideFile:
    if side.name != "config.json":
        return side
    text = side.text
    table = json.loads(text) if text else load_json(ckpt.path.at(side.source), finite=False)
    table = {**table, **{key: 0 for key in _KEYS if key in table}}
    return SideFile(side.name, text=json.dumps(table, indent=2) + "\n")
