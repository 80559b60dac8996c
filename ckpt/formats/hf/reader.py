"""Hugging Face checkpoints: one file or several with an index, ``.safetensors`` or ``.bin``.

Logical names are this format's names, so reading makes one chunk per tensor. If the config names a
family, names, shapes and the tied head are checked against its table. Without a family (another
model, a bare file) tensors are copied as they are.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from ...checkpoint.config import (
    check_config,
    find_config,
    language_config,
    model_from,
    read_config,
)
from ...checkpoint.json_io import CHECKSUMS, load_json, read_digests
from ...checkpoint.types import Checkpoint, FileSummary, ReadOptions
from ...errors import CheckpointError, raise_all
from ...families import is_known
from ...families.known import nearest
from ...model.box import full
from ...model.dtypes import CASTABLE, ITEMSIZE
from ...model.family import Model, canonical, with_tensors
from ...model.file_layout import Entry, Index
from ...model.manifest import PADDING, Chunk, Chunks, Manifest, SideFile, TensorMeta, View
from ...model.placement import shapes_of
from ...move.progress import human
from ...move.storage import StoragePath
from ..side_files import left_behind, resolve, side_files
from . import quantized, wrapped
from .names import INDEX, NAME, SINGLE, SPLIT, container_of


def sniff(path: StoragePath) -> bool:
    """Whether ``path`` is a weights file or a folder that transformers would open."""
    if path.is_file():
        return path.suffix in (".safetensors", ".bin", ".pt", ".pth")
    names = (*SINGLE, *INDEX.values())
    return any((path / n).is_file() or (path / n).is_symlink() for n in names) or any(
        SPLIT.fullmatch(child.name) for child in path.iterdir()
    )


def read(path: StoragePath, options: ReadOptions) -> Checkpoint:
    """The checkpoint at a folder or file; raises with every fault of names and shapes."""
    _check_options(path, options)
    folder = path if path.is_dir() else path.parent
    config = find_config(folder, options)
    trusted = check_config(folder, options)
    indices = list(_indices(path))
    _check_plain(config, indices)
    plain = _plain(path, config, indices, options)
    model = _model(config, options)
    if model is not None and not options.dequantize and quantized.is_quantized(indices):
        raise CheckpointError(f"{path}: the weights are quantized; --dequantize reads them as bf16")
    beside = wrapped.towers(entry for _, entry in plain.entries)
    inside = config is not None and _is_wrapper(config)
    if beside and inside and not options.drop_vision:
        model = None
    result = Checkpoint(path, NAME, Manifest({}, {}), model)
    result.notes += trusted
    if config is None:
        result.notes.append(
            f"{path}: no config.json, so names and shapes are not checked (--config HF_DIR)"
        )
    if model is None and config is not None:
        result.unknown_model = _unknown_model(config, beside, plain, options)
        why = "parts beside the language model" if inside else "no family table for this model"
        result.notes.append(f"{config}: {why}; tensors pass as they are")
    chunks = Chunks()
    metas: dict[str, TensorMeta] = {}
    prefix = _prefix(result, plain)
    for file, entry in plain.entries:
        _add(result, chunks, metas, file, entry, prefix, drop=options.drop_vision)
    result.left_out += plain.left_out
    for index in indices:
        result.files.append(FileSummary(index.path, "", index.size_bytes, len(index.entries)))
        if not index.extra:
            continue
        from ...containers.tensor_names import no_tensors  # only .bin files have such values

        if behind := no_tensors(index.extra):
            result.notes.append(f"{index.path}: not copied, no tensors: {', '.join(behind)}")
    if model is not None:
        result.model = model = with_tensors(model, [*metas, *result.copied])
        if options.vocab_size is not None:
            _cut_vocabulary(result, chunks, metas, options.vocab_size)
        _check_against(model, metas, path)
    sides = side_files(folder, options) if path.is_dir() else ()
    if inside and model is not None:
        sides = _own_config(sides, model.config)
    elif config is not None and options.dequantize:
        sides = _own_config(sides, quantized.without_config(load_json(config, finite=False)))
    read = [file.path for file in result.files]
    result.notes += left_behind(folder, options, read) if path.is_dir() else []
    result.manifest = Manifest(metas, chunks.by_name, {}, sides)
    if (folder / CHECKSUMS).is_file() and path.is_dir():
        table = load_json(folder / CHECKSUMS)
        result.digests = read_digests(table.get("files"), folder / CHECKSUMS)
    return result


def _check_options(path: StoragePath, options: ReadOptions) -> None:
    """Refuse options that have no meaning for Hugging Face files."""
    if options.layout:
        tags = ", ".join(f"{tag}={value}" for tag, value in options.layout.items())
        raise CheckpointError(
            f"{path}: --layout {tags}: Hugging Face files are not packed by a layout; leave it out"
        )
    if options.iteration is not None:
        raise CheckpointError(
            f"{path}: --iteration {options.iteration}: Hugging Face files record no iteration; "
            "leave it out"
        )


def _add(
    result: Checkpoint,
    chunks: Chunks,
    metas: dict[str, TensorMeta],
    path: str,
    entry: Entry,
    prefix: tuple[str, str],
    *,
    drop: bool,
) -> None:
    """One tensor of a file as a chunk, under its logical name."""
    fqn = entry.name
    if result.model is not None:
        family = result.model.family
        if drop and (tower := wrapped.tower_of(fqn)):
            nbytes = math.prod(entry.shape) * ITEMSIZE[entry.dtype]
            result.left_out.append((f"{tower}: not of the language model (--drop-vision)", nbytes))
            return
        if fqn.startswith(prefix[0]):
            fqn = prefix[1] + fqn[len(prefix[0]) :]
        reason = next((r for p, r in family.ignore.items() if re.fullmatch(p, fqn)), None)
        if reason is not None:
            nbytes = math.prod(entry.shape) * ITEMSIZE[entry.dtype]
            result.left_out.append((reason, nbytes))
            return
        fqn = family.logical(fqn)
        if "tie_word_embeddings" in result.model.flags and fqn in family.tied_names:
            result.tied.append(fqn)
            fqn = family.tied_names[fqn]
    original = canonical(result.model, fqn) if result.model is not None else None
    if original is not None:
        result.copied.append(fqn)
        fqn = original
    meta = TensorMeta(entry.shape, entry.dtype)
    table = result.model is not None and fqn in result.model.family.tied_names.values()
    copies = result.model is not None and fqn in result.model.family.copies.values()
    repeats = fqn in metas and not (result.tied and table) and not (result.copied and copies)
    if metas.setdefault(fqn, meta) != meta or repeats:
        other = chunks.by_name[fqn][0].view.file
        raise CheckpointError(
            f"{path}: {entry.name}: {entry.dtype} {list(entry.shape)} is also in {other} as "
            f"{metas[fqn].dtype} {list(metas[fqn].shape)}"
        )
    view = View(path, entry.offset_bytes, entry.shape, entry.strides, entry.dtype)
    chunks.add(Chunk(fqn, full(entry.shape), view))


def _cut_vocabulary(
    result: Checkpoint, chunks: Chunks, metas: dict[str, TensorMeta], vocab: int
) -> None:
    """Rows from ``vocab`` on are padding, as in shards, which keep them; merge drops them."""
    model = result.need_model()
    rules = model.rules()
    padded = {part.fqn for rule in rules if rule.pad for part in rule.parts}
    for fqn in [
        f for f in metas if f in padded and len(metas[f].shape) and metas[f].shape[0] > vocab
    ]:
        rows, *rest = metas[fqn].shape
        parts = {fqn: (0, vocab), PADDING + fqn: (vocab, rows - vocab)}
        held = chunks.by_name.pop(fqn)
        for name, (first, count) in parts.items():
            shape = (count, *rest)
            metas[name] = TensorMeta(shape, metas[fqn].dtype, elastic=name != fqn)
            start = (first, *(0 for _ in rest))
            for chunk in held:
                chunks.add(Chunk(name, full(shape), chunk.view.narrow(start, shape)))
        result.notes.append(
            f"{result.path}: {fqn}: rows {vocab} to {rows - 1} are padding (--vocab-size {vocab})"
        )


def _check_against(model: Model, metas: dict[str, TensorMeta], path: StoragePath) -> None:
    """Names and shapes must be those of the family's table; all faults at once.

    Puts ``metas`` into the table's order, in which outputs are written.
    """
    wanted = shapes_of(model)
    own = model.config.get("vocab_size") == model.sizes["vocab"]
    said = "the config says" if own else f"the config and --vocab-size {model.sizes['vocab']} say"
    faults = chain(
        (
            f"{fqn}: missing (shape {list(shape)} is needed)"
            for fqn, shape in wanted.items()
            if fqn not in metas
        ),
        (_fault(fqn, meta, wanted.get(fqn), said) for fqn, meta in metas.items()),
    )
    wrapper = _wrapper(model, metas, wanted)
    raise_all(
        filter(None, faults), wrapper or f"{path}: not the {model.family.name} model of its config"
    )
    padding = {fqn: meta for fqn, meta in metas.items() if meta.elastic}
    ordered = {fqn: metas[fqn] for fqn in wanted} | padding
    metas.clear()
    metas.update(ordered)


def _fault(fqn: str, meta: TensorMeta, wanted: tuple[int, ...] | None, said: str) -> str:
    """What is wrong with a tensor; empty if nothing is, and for rows that --vocab-size cut off."""
    if meta.elastic:
        return ""
    if wanted is None:
        return f"{fqn}: unknown tensor of shape {list(meta.shape)}"
    if meta.shape != wanted:
        return f"{fqn}: shape {list(meta.shape)}, {said} {list(wanted)}"
    if meta.dtype not in CASTABLE:
        return (
            f"{fqn}: {meta.dtype} and no scale: quantized weights under a config that says "
            "nothing of it; dequantize the weights first"
        )
    return ""


_WRAPPERS = {
    "_orig_mod.": "torch.compile",
    "module.": "DistributedDataParallel or DeepSpeed",
    "_fsdp_wrapped_module.": "FSDP",
    "base_model.model.": "peft",
}


def _wrapper(
    model: Model, metas: Mapping[str, TensorMeta], wanted: Mapping[str, tuple[int, ...]]
) -> str:
    """What to say first if all names have a wrapper's prefix; "" if they have none."""
    for prefix, of in _WRAPPERS.items():
        inner = [fqn.removeprefix(prefix) for fqn in metas if fqn.startswith(prefix)]
        if len(inner) == len(metas) and any(fqn in wanted for fqn in inner):
            return (
                f"every name begins with {prefix!r}, which {of} puts around a model "
                f"({next(iter(metas))}); save the model inside it, or take the prefix off the "
                "names of its state_dict"
            )
    return ""


def _check_plain(config: StoragePath | None, indices: Sequence[Index]) -> None:
    """Refuse a quantization_config in a folder with weights that are not quantized."""
    if config is None:
        return
    table = load_json(config, finite=False)
    said = table.get("quantization_config") if is_known(table.get("model_type")) else None
    kinds = {entry.dtype for index in indices for entry in index.entries.values()}
    if said is not None and kinds <= set(CASTABLE):
        raise CheckpointError(
            f"{config}: has a quantization_config, and the weights are plain "
            f"({', '.join(sorted(kinds))}); take the key out if they were dequantized"
        )


def _model(config: StoragePath | None, options: ReadOptions) -> Model | None:
    """The model of the config; None if there is no table for it."""
    if config is None:
        return None
    kind = language_config(load_json(config, finite=False)).get("model_type")
    if kind is None or (isinstance(kind, str) and not is_known(kind)):
        return None
    return model_from(read_config(config, options), str(config), options.vocab_size)


def _plain(
    path: StoragePath, config: StoragePath | None, indices: Sequence[Index], options: ReadOptions
) -> quantized.Plain:
    """Every tensor with its file, dequantized if the options say so."""
    if not options.dequantize:
        entries = [(index.path, e) for index in indices for e in index.entries.values()]
        return quantized.Plain(entries)
    table = {} if config is None else load_json(config, finite=False)
    return quantized.dequantized(indices, table, str(path))


def _unknown_model(
    config: StoragePath,
    beside: Sequence[wrapped.Tower],
    plain: quantized.Plain,
    options: ReadOptions,
) -> str:
    """The error of a job that must know how a model is packed."""
    names = [entry.name for _, entry in plain.entries]
    try:
        model_from(read_config(config, options), str(config))
    except CheckpointError as error:
        return f"{error}. {_compared(names)}" if names else str(error)
    parts = ", ".join(f"{t.name} ({t.tensors} tensors, {human(t.nbytes)})" for t in beside)
    return (
        f"{config}: the model has parts beside its language model, which no table describes: "
        f"{parts}; --drop-vision leaves them out and takes the language model alone"
    )


def _compared(names: Sequence[str]) -> str:
    """What a table for these tensors could begin with."""
    family, more = nearest(names)
    if not more:
        return f"Each of its tensors has a name that {family} has too, so compare the two"
    rest = f" and {len(more) - 12} more" if len(more) > 12 else ""
    shown = ", ".join(f"{name:.200}" for name in more[:12])
    return f"The nearest is {family}, which has no {shown}{rest}"


def _prefix(result: Checkpoint, plain: quantized.Plain) -> tuple[str, str]:
    """The prefix of a wrapped language model's names, and what stands for it; a note says so."""
    if result.model is None:
        return "", ""
    names = [entry.name for _, entry in plain.entries]
    prefix, alone = wrapped.prefix_of(names, shapes_of(result.model))
    if prefix:
        result.notes.append(f"{result.path}: the language model's names without {prefix!r}")
    return prefix, alone


def _is_wrapper(config: StoragePath) -> bool:
    """Whether the config is that of a model around a language model that has a table."""
    table = load_json(config, finite=False)
    return language_config(table) is not table


def _own_config(sides: tuple[SideFile, ...], config: Mapping[str, object]) -> tuple[SideFile, ...]:
    """The side files, with the config of what is read in place of the folder's."""
    text = json.dumps(config, indent=2) + "\n"
    return tuple(
        SideFile(side.name, text=text) if side.name == "config.json" else side for side in sides
    )


def _indices(path: StoragePath) -> Iterator[Index]:
    """The index of every weights file, in the order of their names."""
    if path.is_file():
        yield container_of(path).index(path)
        return
    for single, index in INDEX.items():
        if (path / single).is_named():
            file = resolve(path, single, path)
            yield container_of(file).index(file)
            return
        if (path / index).is_named():
            yield from _split_indices(path, path / index)
            return
    parts = sorted(c.name for c in path.iterdir() if SPLIT.fullmatch(c.name))
    raise CheckpointError(f"{path}: holds {parts[0]} but no index that names the parts")


def _split_indices(folder: StoragePath, index: StoragePath) -> Iterator[Index]:
    """The parts that an index names; they must hold what it says."""
    table = load_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise CheckpointError(f"{index}: has no weight_map")
    faults = []
    for name in sorted({n if isinstance(n, str) else repr(n) for n in table.values()}):
        file = resolve(folder, name, index)
        part = container_of(file).index(file)
        said = {fqn for fqn, where in table.items() if where == name}
        lacking = said - set(part.entries)
        faults += [f"{file}: lacks {fqn}, which {index.name} places there" for fqn in lacking]
        for fqn in set(part.entries) - said:
            where = f"places in {table[fqn]}" if fqn in table else "does not name"
            faults.append(f"{file}: holds {fqn}, which {index.name} {where}")
        yield part
    raise_all(sorted(faults), "index and files disagree")
