"""Quantised tensors of Hugging Face files as bfloat16 ones, which are computed while they are read.

Two forms are known, by the names in the files: blocks of 8-bit floats with a scale each
(``NAME`` beside ``NAME_scale_inv``: DeepSeek-V3, Kimi-K2, MiniMax-M2), and MXFP4 (``NAME_blocks``
beside ``NAME_scales``: GPT-OSS). The second one is stored ``[E, out, in]`` and meant
``[E, in, out]``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...errors import CheckpointError, raise_all
from ...model.box import row_major
from ...model.file_layout import Entry, Index
from ...move.computed import GROUP, BlockScaled, ComputedFile, Mxfp4, Recipe, Stored

_FLOAT8 = ("F8_E4M3", "F8_E5M2")
_SCALE, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"
_SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
_ACTIVATIONS = (".activation_scale", ".input_scale")
CONFIG = "quantization_config"


@dataclass(slots=True)
class Plain:
    """Tensors without quantisation, each with the file that it lies in."""

    entries: list[tuple[str, Entry]] = field(default_factory=list)
    left_out: list[tuple[str, int]] = field(default_factory=list)  # reason, bytes
    computed: int = 0


def without_config(config: Mapping[str, object]) -> dict[str, object]:
    """A config of dequantized weights."""
    return {key: value for key, value in config.items() if key != CONFIG}


def is_quantized(indices: Sequence[Index]) -> bool:
    """Whether some tensor is of one of the two forms."""
    names = {name for index in indices for name in index.entries}
    return any(
        name + _SCALE in names or name.removesuffix(_BLOCKS) + _SCALES in names
        for name in names
        if not name.endswith(_SCALES)
    )


def dequantized(indices: Sequence[Index], config: Mapping[str, object], origin: str) -> Plain:
    """Every tensor of the files as a plain one; CheckpointError with all that cannot be."""
    where = {name: (i.path, entry) for i in indices for name, entry in i.entries.items()}
    made, faults, block = Plain(), [], _block(config, origin)
    for index in indices:
        for name, entry in index.entries.items():
            stem = name.removesuffix(_BLOCKS)
            try:
                if _is_scale(name, where):
                    continue
                if name.endswith(_ACTIVATIONS):
                    reason = "a scale of activations, which dequantized weights do not need"
                    made.left_out.append((reason, 0))
                elif stem != name and stem + _SCALES in where:
                    made.entries.append(_mxfp4(index.path, entry, stem, *where[stem + _SCALES]))
                    made.computed += 1
                elif entry.dtype in _FLOAT8:
                    scale = where.get(name + _SCALE)
                    made.entries.append(_float8(index.path, entry, scale, block))
                    made.computed += 1
                else:
                    made.entries.append((index.path, entry))
            except CheckpointError as error:
                faults.append(str(error))
    raise_all(faults, f"{origin}: cannot be dequantized")
    if not made.computed:
        raise CheckpointError(
            f"{origin}: --dequantize: no tensor is quantized in a form that is known "
            f"(NAME{_SCALE} beside 8-bit floats, NAME{_BLOCKS} and NAME{_SCALES}); leave it out"
        )
    return made


def _is_scale(name: str, where: Mapping[str, object]) -> bool:
    """Whether a tensor is read together with another one."""
    for end, of in ((_SCALE, ""), (_SCALES, _BLOCKS)):
        if name.endswith(end) and name.removesuffix(end) + of in where:
            return True
    return False


def _block(config: Mapping[str, object], origin: str) -> tuple[int, int] | None:
    """Elements that share a scale, as a config says them; None if it does not."""
    table = config.get(CONFIG)
    said = table.get("weight_block_size") if isinstance(table, dict) else None
    if said is None:
        return None
    if not isinstance(said, list) or [type(x) for x in said] != [int, int] or min(said) < 1:
        raise CheckpointError(f"{origin}: weight_block_size is {said!r:.80}, not two sizes")
    return said[0], said[1]


def _stored(path: str, entry: Entry) -> Stored:
    if entry.strides != row_major(entry.shape):
        raise CheckpointError(f"{path}: {entry.name}: its elements are not one after another")
    return Stored(path, entry.offset_bytes, entry.dtype, math.prod(entry.shape))


def _entry(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> Entry:
    return Entry(name, "BF16", shape, strides, 0)


def _float8(
    path: str, entry: Entry, scale: tuple[str, Entry] | None, block: tuple[int, int] | None
) -> tuple[str, Entry]:
    """Matrices of 8-bit floats; the scales' shape must be that of their blocks."""
    if scale is None:
        raise CheckpointError(f"{path}: {entry.name}: {entry.dtype} without {entry.name}{_SCALE}")
    file, grid = scale
    if len(entry.shape) < 2 or 0 in entry.shape or grid.dtype not in _SCALE_TYPES:
        raise CheckpointError(
            f"{path}: {entry.name}: {entry.dtype} {list(entry.shape)} with a scale of "
            f"{grid.dtype} {list(grid.shape)}, no matrix and its blocks"
        )
    *lead, rows, columns = entry.shape
    single = math.prod(grid.shape) == math.prod(lead)  # one scale for each matrix
    shape = (*lead, 1, 1) if single else grid.shape
    fits = [
        size
        for size in (block, (128, 128), _even(rows, columns, shape))
        if size and shape == (*lead, -(-rows // size[0]), -(-columns // size[1]))
    ]
    if not fits:
        raise CheckpointError(
            f"{path}: {entry.name}: {list(entry.shape)} with scales {list(grid.shape)}, which are "
            f"no blocks of {'x'.join(map(str, block or (128, 128)))}"
        )
    recipe = BlockScaled(
        _stored(path, entry), _stored(file, grid), rows, columns, fits[0], (shape[-2], shape[-1])
    )
    return _computed(path, entry.name, recipe), _entry(
        entry.name, entry.shape, row_major(entry.shape)
    )


def _even(rows: int, columns: int, grid: tuple[int, ...]) -> tuple[int, int] | None:
    """Blocks of equal size that give a grid of scales; None if there are none."""
    if len(grid) < 2 or 0 in grid or rows % grid[-2] or columns % grid[-1]:
        return None
    return rows // grid[-2], columns // grid[-1]


def _mxfp4(path: str, entry: Entry, name: str, file: str, scales: Entry) -> tuple[str, Entry]:
    """``[E, out, in / 32, 16]`` bytes as ``[E, in, out]`` numbers."""
    fits = len(entry.shape) == 4 and entry.shape[3] == GROUP // 2
    if not fits or {entry.dtype, scales.dtype} != {"U8"} or scales.shape != entry.shape[:3]:
        raise CheckpointError(
            f"{path}: {entry.name}: {entry.dtype} {list(entry.shape)} with scales {scales.dtype} "
            f"{list(scales.shape)}, not U8 [E, out, groups, 16] with U8 [E, out, groups]"
        )
    experts, out, groups, _ = entry.shape
    size = groups * GROUP
    recipe = Mxfp4(_stored(path, entry), _stored(file, scales))
    strides = (out * size, 1, size)
    return _computed(path, name, recipe), _entry(name, (experts, size, out), strides)


def _computed(path: str, name: str, recipe: Recipe) -> str:
    return ComputedFile(path, name, recipe)
