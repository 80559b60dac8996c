"""A Hugging Face config.json: the ``Model`` that it describes, and its text for an output."""

from __future__ import annotations

import json
from collections.abc import Mapping

from .. import families
from ..errors import CheckpointError, raise_all
from ..model.dtypes import CASTABLE, TO_TORCH, dtype_named
from ..model.family import Model, evaluate, model_flags, placeholders, size_flags
from ..model.manifest import SideFile, TensorMeta, category_of, is_padding
from ..model.target import main_dtype
from ..move.storage import StoragePath, Where, storage_path
from .function import contradictions, settings
from .json_io import load_json
from .types import Checkpoint, ReadOptions

_INNER = ("text_config", "llm_config", "language_config")
# what a wrapper's config says for the language model in it too, unless that one says it
_SHARED = ("tie_word_embeddings", "torch_dtype", "dtype", "quantization_config", "pad_token_id",
           "bos_token_id", "eos_token_id")  # fmt: skip
MAX_LAYERS = 10_000  # a config may claim any number, and each layer needs names


def find_config(folder: Where, options: ReadOptions) -> StoragePath | None:
    """The config file: the user's, else the folder's, else None."""
    if options.config is not None:
        said = storage_path(options.config)
        path = said / "config.json" if said.is_dir() else said
        if not path.is_file():
            raise CheckpointError(f"--config {options.config}: there is no {path}")
        return path
    own = storage_path(folder) / "config.json"
    return own if own.is_named() else None  # anything of this name must be a config


def check_config(folder: StoragePath, options: ReadOptions) -> list[str]:
    """The user's config may add what the folder's config lacks, and must not contradict it.

    CheckpointError names each setting that would change the function, with both values. Returns
    a line for each contradiction that ``--trust`` accepts: the user's config counts.
    """
    own = folder / "config.json"
    given = find_config(folder, options)
    if options.config is None or given is None or given == own or not own.is_file():
        return []
    says = []
    for path in (own, given):
        config = read_config(path, options)
        known = families.is_known(config.get("model_type"))
        says.append(settings(config, model_from(config, str(path)) if known else None))
    rows = {
        name: f"{name} is {one!r:.80} in {own}, {other!r:.80} in {given}"
        for name, (one, other) in contradictions(*says).items()
    }
    trusted = {name for name in rows if {"config", f"config:{name}"} & options.trust}
    fields = " ".join(f"--trust 'config:{name}'" for name in rows if name not in trusted)
    raise_all(
        [row for name, row in rows.items() if name not in trusted],
        "--config describes another model than the checkpoint's own config.json",
        hint=f"leave --config out or, if the checkpoint's own is wrong: {fields} (--trust config "
        "accepts all)",
    )
    return [f"{rows[name]}: --config is taken (--trust)" for name in rows if name in trusted]


def language_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """The config of the language model: ``config``, or a part of it if that one has a table."""
    if families.is_known(config.get("model_type")):
        return config
    for key in _INNER:
        inner = config.get(key)
        if isinstance(inner, dict) and families.is_known(inner.get("model_type")):
            return {**{key: config[key] for key in _SHARED if key in config}, **inner}
    return config


def read_config(path: Where, options: ReadOptions) -> Mapping[str, object]:
    """The config of the language model; of dequantized weights if they are to be dequantized."""
    config = language_config(load_json(path, finite=False))
    dropped = ("quantization_config",) if options.dequantize else ()
    return {key: value for key, value in config.items() if key not in dropped}


def load_model(path: Where, vocab_size: int | None = None) -> Model:
    """The family, sizes and flags that a config.json describes.

    ``vocab_size`` overrides the config's number of real vocabulary rows.
    """
    return model_from(load_json(path, finite=False), str(path), vocab_size)


def model_from(config: Mapping[str, object], path: str, vocab_size: int | None = None) -> Model:
    """The same for a config in memory; ``path`` names it in messages."""
    config = language_config(config)
    if config.get("quantization_config") is not None:
        raise CheckpointError(
            f"{path}: the weights are quantized (quantization_config), and packed weights and "
            "scales cannot be cut by rows; --dequantize (of reshard and merge-ckpt) reads 8-bit "
            "floats with weight_scale_inv and MXFP4 as bfloat16; dequantize other kinds first"
        )
    family = families.find(config.get("model_type"), str(path))
    sizes = {"one": 1, **evaluate(family, config, str(path))}
    for name in {name for rule in family.rules for name in placeholders(rule.name)}:
        if sizes[name] > MAX_LAYERS:
            raise CheckpointError(f"{path}: {sizes[name]} {name}s; the limit is {MAX_LAYERS}")
    if vocab_size is not None:
        sizes["vocab"] = vocab_size
    layers = sizes["layer"]
    kinds = zip(*(each(config, layers, str(path)) for each in family.kinds), strict=True)
    flags = model_flags(family, config, str(path)) | size_flags(family, sizes)
    return Model(family, config, sizes, flags, tuple(map(frozenset, kinds)))


# --- for an output ----------------------------------------------------------------------------


def with_config(ckpt: Checkpoint, metas: Mapping[str, TensorMeta], dtype: str) -> list[SideFile]:
    """What travels along, with a config.json that says what is written.

    ``metas`` are the tensors with the dtypes to write, ``dtype`` the one that was asked for, or "".
    transformers loads a model in its config's dtype, so an old one would undo a cast, or a
    training in fp32; rows that --vocab-size cut are not in the weights any more.
    """
    changed = []
    for side in ckpt.manifest.side_files:
        if side.name == "config.json":
            if side.text:
                table = json.loads(side.text)
            else:
                table = load_json(ckpt.path.at(side.source), finite=False)
            new = {**table, **_dtype_keys(table, metas, dtype)}
            if ckpt.model is not None and ckpt.model.config.get("vocab_size") != (
                vocab := ckpt.model.sizes["vocab"]
            ):
                new["vocab_size"] = vocab
            if new != table:
                side = SideFile(side.name, text=json.dumps(new, indent=2) + "\n")
        changed.append(side)
    return changed


def _dtype_keys(
    table: Mapping[str, object], metas: Mapping[str, TensorMeta], dtype: str
) -> dict[str, str]:
    """The keys of a config that name another dtype than the weights will have, made right.

    A mixed checkpoint keeps what its config says as long as some weight is of that dtype.
    """
    keys = [key for key in ("dtype", "torch_dtype") if key in table]
    weights = {f: m for f, m in metas.items() if category_of(f) == "" and not is_padding(f)}
    found = {meta.dtype for meta in weights.values()}
    if not dtype:
        said = {key: dtype_named(table[key]) for key in keys}
        keys = [key for key in keys if said[key] in CASTABLE and said[key] not in found]
        dtype = main_dtype(weights)
        if dtype not in CASTABLE:  # packed weights, which a config describes otherwise
            return {}
    else:
        keys = keys or ["torch_dtype"]
    prefix = {key: "torch." if str(table.get(key)).startswith("torch.") else "" for key in keys}
    return {key: prefix[key] + TO_TORCH[dtype] for key in keys}
