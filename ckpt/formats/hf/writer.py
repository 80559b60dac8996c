"""Designs Hugging Face checkpoints: one file, or several with an index, and config and tokenizer.
If the family is known, its table says which tensors to write, so a tensor that the source lost is
an error. A model without a table is written as in the source.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import PurePath

from ...model.box import full, row_major
from ...model.design import Design, OutFile
from ...model.family import copies_of
from ...model.file_layout import Spec
from ...model.manifest import (
    Chunk,
    Chunks,
    Manifest,
    SideFile,
    TensorMeta,
    View,
    category_of,
    is_padding,
)
from ...model.placement import shapes_of
from ..writing import WriteRequest, Written, checksums
from .names import INDEX, NAME, SINGLE, container_of, file_names

TO = NAME
TAKES = frozenset({"--safe-serialization", "--max-shard-size", "--from-master"})
WEIGHTS_ONLY = True


def design(request: WriteRequest, root: PurePath) -> Design:
    """The files below ``root``, and the index where there are several."""
    metas, copies = _wanted(request), {}
    if request.source.model is not None:
        copies = copies_of(request.source.model)
    names_of = {**metas, **{name: metas[fqn] for name, fqn in copies.items()}}
    whole = request.whole
    groups = [list(names_of)] if whole.file_name else _split(names_of, whole.max_shard_bytes)
    names = [whole.file_name] if whole.file_name else file_names(len(groups), safe=whole.safe)
    files, chunks, where = [], Chunks(), {}
    for name, fqns in zip(names, groups, strict=True):
        specs = [Spec(fqn, names_of[fqn].dtype, names_of[fqn].shape) for fqn in fqns]
        path = root / name
        layout = container_of(path).layout(specs, {})
        files.append(OutFile(str(path), layout))
        for fqn in fqns:
            meta = names_of[fqn]
            strides = row_major(meta.shape)
            view = View(str(path), layout.offsets[fqn], meta.shape, strides, meta.dtype)
            chunks.add(Chunk(copies.get(fqn, fqn), full(meta.shape), view))
            where[fqn] = name
    index = (_index_file(where, names_of, whole.safe),) if len(groups) > 1 else ()
    return Design(files, Manifest(metas, chunks.by_name, {}, index), notes=_notes(request))


def sides(request: WriteRequest, made: Design, files: Written) -> list[SideFile]:
    """The side files, the index, and digests; none if the output is a single file."""
    if request.whole.file_name:
        return []
    return [*request.sides, *made.manifest.side_files, *checksums(files)]


def _wanted(request: WriteRequest) -> dict[str, TensorMeta]:
    """The logical tensors to write; `plan` reports those that the source lacks."""
    model, metas = request.source.model, request.metas
    if model is None:
        return {f: m for f, m in metas.items() if category_of(f) == "" and not is_padding(f)}
    shapes = shapes_of(model)
    return {
        fqn: TensorMeta(shape, metas[fqn].dtype if fqn in metas else "F32")
        for fqn, shape in shapes.items()
    }


def _notes(request: WriteRequest) -> list[str]:
    source = request.source
    if source.manifest.state or source.has_optimizer or source.random_states:
        return ["optimizer and training state left out: Hugging Face files do not hold them"]
    return []


def _split(metas: Mapping[str, TensorMeta], limit: int | None) -> list[list[str]]:
    """Consecutive tensors in groups of at most ``limit`` bytes; a larger one is a group alone."""
    groups: list[list[str]] = [[]]
    size = 0
    for fqn, meta in metas.items():
        if limit is not None and groups[-1] and size + meta.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(fqn)
        size += meta.nbytes
    return groups


def _index_file(where: Mapping[str, str], metas: Mapping[str, TensorMeta], safe: bool) -> SideFile:
    """transformers' index: sizes from the tensors that are written, keys sorted."""
    table = {
        "metadata": {
            "total_parameters": sum(math.prod(m.shape) for m in metas.values()),
            "total_size": sum(m.nbytes for m in metas.values()),
        },
        "weight_map": dict(sorted(where.items())),
    }
    name = INDEX[SINGLE[0] if safe else SINGLE[1]]
    return SideFile(name, text=json.dumps(table, indent=2, allow_nan=False) + "\n")
