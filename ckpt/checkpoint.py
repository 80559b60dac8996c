"""What every format reads into, and what every format designs an output as.

A ``Checkpoint`` is a manifest plus what it says of model, mesh and layout. A ``Design`` is
an output before it exists: its files and the manifest of where their tensors lie.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from . import families
from .containers.blueprint import Blueprint, Index, Spec
from .containers.files import regular_size
from .errors import CheckpointError
from .family import Family, evaluate, model_flags, placeholders
from .manifest import Manifest, SideFile
from .mesh import Mesh

CHECKSUMS = "checksums.json"  # digests beside an output that has no checkpoint.json
JOURNAL = "shardwright.journal"  # in an output that is being written, or was left unfinished
MAX_DEPTH = 100  # of JSON: what is read here must be writable again without deep recursion
MAX_LAYERS = 10_000  # a config may say any number, and names are made for each

WITHOUT = "pass --weights-only to go on without the optimizer"


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What the user says about a source that its files do not."""

    config: Path | None = None  # folder or file of a Hugging Face config
    layout: Mapping[str, str] = field(default_factory=dict)  # tags that override the file's
    vocab_size: int | None = None  # true rows of the vocabulary
    weights_only: bool = False  # leave optimizer files alone
    iteration: int | None = None  # of a Megatron-LM folder that holds several


@dataclass(frozen=True, slots=True)
class Model:
    """A family with the sizes and flags of one config."""

    family: Family
    config: Mapping[str, object]
    sizes: dict[str, int]
    flags: frozenset[str]


@dataclass(frozen=True, slots=True)
class RankFile:
    """A file of the checkpoint and what the inspect table says of it."""

    path: str
    rank: str  # "tp 0 pp 1", or "" for Hugging Face files
    nbytes: int
    num_tensors: int
    layers: tuple[int, ...] = ()


@dataclass(slots=True)
class Checkpoint:
    """A source: what is where, and what it says about itself."""

    path: Path
    format: str
    manifest: Manifest
    model: Model | None = None
    mesh: Mesh = field(default_factory=lambda: Mesh((("tp", 1), ("pp", 1))))
    dp: int = 1  # data-parallel ranks of the run that saved it
    sharded: bool = False  # the optimizer state is cut over them
    layout: dict[str, str] = field(default_factory=dict)
    step: int | None = None
    padded_vocab: int | None = None
    vocab_multiple: int = 128  # rows are padded to a multiple of this times tp
    files: list[RankFile] = field(default_factory=list)
    # path below this one -> size, xxh3-128 or ""
    digests: dict[str, tuple[int, str]] = field(default_factory=dict)
    tied: list[str] = field(default_factory=list)  # stored names that repeat another tensor
    left_out: list[tuple[str, int]] = field(default_factory=list)  # (reason, bytes), per tensor
    notes: list[str] = field(default_factory=list)  # lines that the user is to see
    random_states: tuple[SideFile, ...] = ()  # per rank; void in another layout
    has_optimizer: bool = False  # optimizer files lie here, whether they were read or not
    unread_optimizer: str = ""  # why optimizer files here cannot be read; "" if nothing speaks so
    config: Path | None = None  # where a model that no family knows is described
    described_by: tuple[str, ...] = ()  # files without tensors that say what is where
    # path -> size, mtime (ns) and inode of what was read, at that time
    seen: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    # What reading put off, since it takes a look into many files:
    doubt: Callable[[], str] | None = None  # why the optimizer state cannot be trusted, or ""
    headers: Callable[[], None] | None = None  # reads every header; CheckpointError if one is bad

    def optimizer_fault(self) -> str:
        """Why optimizer state here cannot be used, "" if it can. A few elements may be read.

        It ends with `WITHOUT`, which says how the commands go on.
        """
        if self.doubt is not None and not self.unread_optimizer:
            self.unread_optimizer = self.doubt()
        self.doubt = None
        return self.unread_optimizer

    def need_model(self) -> Model:
        """The model, for jobs that must know the packing."""
        if self.model is None:
            if self.config is not None:
                load_model(self.config)  # raises with the model types that are known
            raise CheckpointError(
                f"{self.path}: no config.json says which model this is; name its folder with "
                "--config HF_DIR"
            )
        return self.model


class Container(Protocol):
    """Knows bytes: where tensors lie in one file, existing or to be made."""

    def index(self, path: str) -> Index: ...

    def layout(self, specs: Sequence[Spec], metadata: Mapping[str, str]) -> Blueprint: ...


@dataclass(frozen=True, slots=True)
class OutFile:
    """A file to be made."""

    path: str
    blueprint: Blueprint


@dataclass(slots=True)
class Design:
    """An output before it exists."""

    files: list[OutFile]
    manifest: Manifest
    tied: int = 0  # copies of tied tensors that are written in addition
    notes: list[str] = field(default_factory=list)  # what the format cannot hold


def load_json(path: Path, *, finite: bool = True) -> dict[str, object]:
    """A JSON object; anything but an object is refused, and NaN and infinities if ``finite``.

    Python writes them, so a config.json may hold them where no size or flag is meant: there
    they pass, as transformers lets them.
    """

    def refuse(text: str) -> float:
        if not finite:
            return float(text)
        raise CheckpointError(f"{path}: holds the number {text}, which JSON does not have")

    def number_of(text: str) -> float:
        return number if math.isfinite(number := float(text)) else refuse(text)

    regular_size(str(path))
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text, parse_constant=refuse, parse_float=number_of)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, not an object")
    if _is_deep(value):
        raise CheckpointError(f"{path}: holds values inside each other more than {MAX_DEPTH} deep")
    return value


def _is_deep(value: object) -> bool:
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in _children(item)]
        if not level:
            return False
    return True


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def is_file_name(name: object) -> bool:
    """Whether a name that a file mentions is one of the same folder, and no path."""
    if not isinstance(name, str) or name in ("", ".", "..") or re.search(r"[/\\\0]", name):
        return False
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return True


def is_path_below(name: object) -> bool:
    """Whether a name that a file mentions is a path below its folder, spelled in one way only."""
    return isinstance(name, str) and all(is_file_name(part) for part in name.split("/"))


def read_digests(table: object, origin: Path) -> dict[str, tuple[int, str]]:
    """Path below its folder -> (size, xxh3-128 or ""), from the ``files`` of ``origin``."""
    if table is not None and not isinstance(table, dict):
        raise CheckpointError(f"{origin}: files is a {type(table).__name__}, not name -> size")
    found = {}
    for name, row in (table or {}).items():
        if not is_path_below(name):
            raise CheckpointError(f"{origin}: files names {name!r}, no file below its own folder")
        size = row.get("size") if isinstance(row, dict) else None
        mark = row.get("xxh3_128", "") if isinstance(row, dict) else ""
        if type(size) is not int or not isinstance(mark, str):
            raise CheckpointError(
                f"{origin}: the entry of {name!r} in files has no whole number as size, or a "
                "digest that is no text"
            )
        found[name] = (size, mark)
    return found


def find_config(folder: Path, options: ReadOptions) -> Path | None:
    """The config file: the user's, else the folder's own, else None."""
    if options.config is not None:
        path = options.config / "config.json" if options.config.is_dir() else options.config
        if not path.is_file():
            raise CheckpointError(f"--config {options.config}: there is no {path}")
        return path
    own = folder / "config.json"
    return own if own.is_file() else None


def load_model(path: Path, vocab_size: int | None = None) -> Model:
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
