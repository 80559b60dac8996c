"""File names of Hugging Face checkpoints, as transformers writes and looks for them."""

from __future__ import annotations

import re
from pathlib import PurePath

from ...checkpoint.types import Container
from ...containers import safetensors
from ...move.storage import StoragePath

NAME = "hf"
# In the order in which transformers looks for them.
SINGLE = ("model.safetensors", "pytorch_model.bin")
INDEX = {name: name + ".index.json" for name in SINGLE}
SPLIT = re.compile(r"(model|pytorch_model)-\d{5}-of-(\d{5})\.(safetensors|bin)")


def container_of(path: StoragePath | PurePath) -> Container:
    """The container of a file, by its ending."""
    if path.suffix == ".safetensors":
        return safetensors
    from ...containers import torch_zip  # with pickles and more, which few runs need

    return torch_zip


def file_names(count: int, *, safe: bool) -> list[str]:
    """The weights files of a checkpoint of ``count`` files."""
    if count == 1:
        return [SINGLE[0] if safe else SINGLE[1]]
    stem, end = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    return [f"{stem}-{i + 1:05d}-of-{count:05d}.{end}" for i in range(count)]
