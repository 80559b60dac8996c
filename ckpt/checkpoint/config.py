"""From a Hugging Face config.json to a ``Model``: its family, sizes and flags."""

from __future__ import annotations

from collections.abc import Mapping

from .. import families
from ..errors import CheckpointError, raise_all
from ..model.family import Model, evaluate, model_flags, placeholders
from ..move.storage import StoragePath, Where, storage_path
from .function import contradictions, settings
from .json_io import load_json
from .types import ReadOptions

MAX_LAYERS = 10_000  # a config may say any number, and names are made for each


def find_config(folder: Where, options: ReadOptions) -> StoragePath | None:
    """The config file: the user's, else the folder's own, else None."""
    if options.config is not None:
        said = storage_path(options.config)
        path = said / "config.json" if said.is_dir() else said
        if not path.is_file():
            raise CheckpointError(f"--config {options.config}: there is no {path}")
        return path
    own = storage_path(folder) / "config.json"
    return own if own.is_named() else None  # whatever has this name has to be one


def check_config(folder: StoragePath, options: ReadOptions) -> None:
    """The user's config may fill what the folder's own leaves out, and not contradict it.

    CheckpointError names each setting that would change the function, with both values.
    """
    own = folder / "config.json"
    given = find_config(folder, options)
    if options.config is None or given is None or given == own or not own.is_file():
        return
    says = []
    for path in (own, given):
        config = load_json(path, finite=False)
        known = families.is_known(config.get("model_type"))
        says.append(settings(config, load_model(path) if known else None))
    raise_all(
        (
            f"{name} is {one!r:.80} in {own}, {other!r:.80} in {given}"
            for name, (one, other) in contradictions(*says).items()
        ),
        "--config describes another model than the checkpoint's own config.json; leave it out, or "
        "change the checkpoint's own if that is wrong",
    )


def load_model(path: Where, vocab_size: int | None = None) -> Model:
    """The family, sizes and flags that a config.json describes.

    ``vocab_size`` overrides the config's number of true vocabulary rows.
    """
    return model_from(load_json(path, finite=False), str(path), vocab_size)


def model_from(config: Mapping[str, object], path: str, vocab_size: int | None = None) -> Model:
    """The same for a config in memory; ``path`` names it in messages."""
    if config.get("quantization_config") is not None:
        raise CheckpointError(
            f"{path}: the weights are quantized (quantization_config); dequantize them first, "
            "since packed weights and scales cannot be cut by rows"
        )
    family = families.find(config.get("model_type"), str(path))
    sizes = {"one": 1, **evaluate(family, config, str(path))}
    for name in {name for rule in family.rules for name in placeholders(rule.name)}:
        if sizes[name] > MAX_LAYERS:
            raise CheckpointError(f"{path}: {sizes[name]} {name}s; the limit is {MAX_LAYERS}")
    if vocab_size is not None:
        sizes["vocab"] = vocab_size
    return Model(family, config, sizes, model_flags(family, config, str(path)))
