"""What every format reads into: a manifest, and what it says about model, mesh and layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from ..errors import CheckpointError
from ..model.family import Model
from ..model.file_layout import FileLayout, Index, RecordedChecksum, Spec
from ..model.manifest import Manifest, SideFile
from ..model.mesh import Mesh
from ..move.storage import FileIdentity, StoragePath, Where

Value = TypeVar("Value")
WITHOUT = "pass --weights-only to go on without the optimizer"


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What the user says about one source.

    It adds what the source does not record, and never overrides what it records (``filled``).
    """

    config: Where | None = None  # folder or file of a Hugging Face config
    layout: Mapping[str, str] = field(default_factory=dict)  # tag -> value
    vocab_size: int | None = None  # real rows of the vocabulary
    weights_only: bool = False  # leave optimizer files alone
    iteration: int | None = None  # of a folder that holds several
    format: str | None = None  # NAME of a format, if a folder holds two
    # "config", or "config:FIELD" for one: counts if it contradicts args or the folder's own config
    trust: frozenset[str] = frozenset()
    copy_all: bool = False  # also copy training state and other weights
    follow_links: bool = False  # also copy side files that are links out
    download: bool = False  # fetch a model of the hub that the cache lacks
    drop_vision: bool = False  # take the language model of a model that also sees or hears
    dequantize: bool = False  # read block-scaled 8-bit floats and MXFP4 as bfloat16


def filled(recorded: Value | None, given: Value | None, option: str, origin: str) -> Value | None:
    """What ``origin`` records, else what the user gives with ``option``.

    CheckpointError if both are there and differ: the source counts.
    """
    if recorded is None or given is None or recorded == given:
        return given if recorded is None else recorded
    raise CheckpointError(
        f"{origin} records {recorded}, {option} says {given}; an option only fills what a "
        "checkpoint does not record, so leave it out"
    )


@dataclass(frozen=True, slots=True)
class FileSummary:
    """A file of the checkpoint and what the inspect table says of it."""

    path: str
    rank: str  # "tp 0 pp 1", or "" for Hugging Face files
    nbytes: int
    num_tensors: int
    layers: tuple[int, ...] = ()


@dataclass(slots=True)
class Checkpoint:
    """A source: where its bytes are, and what it says about itself."""

    path: StoragePath
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
    files: list[FileSummary] = field(default_factory=list)
    # path below this one -> size, xxh3-128 or ""
    digests: dict[str, tuple[int, str]] = field(default_factory=dict)
    tied: list[str] = field(default_factory=list)  # stored names that repeat another tensor
    copied: list[str] = field(default_factory=list)  # names of tensors that lie here a second time
    left_out: list[tuple[str, int]] = field(default_factory=list)  # (reason, bytes), per tensor
    notes: list[str] = field(default_factory=list)  # lines for the user
    state_file: str = ""  # that says the training state, for messages
    random_states: tuple[SideFile, ...] = ()  # per rank; void in another layout
    has_optimizer: bool = False  # there are optimizer files, read or not
    # weights that the run did not train, and that so have no optimizer state; None: nothing says
    frozen: frozenset[str] | None = None
    unread_optimizer: str = ""  # why optimizer files here cannot be read; empty if they can
    unknown_model: str = ""  # why its config.json names no family; "" if it does, or there is none
    described_by: tuple[str, ...] = ()  # files without tensors that describe the others
    # path -> identity when it was read, to notice a change
    seen: dict[str, FileIdentity] = field(default_factory=dict)
    # Checks that are done later, since they open many files:
    check_optimizer: Callable[[], str] | None = None  # why it cannot be used; empty if it can
    headers: Callable[[], None] | None = None  # reads every header; CheckpointError if one is bad
    # CRC-32s recorded inside its files, if they are not in a .bin or .pt
    blob_checksums: Callable[[], Iterator[RecordedChecksum]] | None = None

    def optimizer_fault(self) -> str:
        """Why optimizer state here cannot be used; empty if it can. A few elements may be read.

        It ends with `WITHOUT`, which says how the commands go on.
        """
        if self.check_optimizer is not None and not self.unread_optimizer:
            self.unread_optimizer = self.check_optimizer()
        self.check_optimizer = None
        return self.unread_optimizer

    def checksums(self) -> Iterator[RecordedChecksum]:
        """Every CRC-32 of tensors' bytes that its files record, file by file, in rising order."""
        if self.blob_checksums is not None:
            yield from self.blob_checksums()
        for path in dict.fromkeys([*(file.path for file in self.files), *self.described_by]):
            if path.endswith((".bin", ".pt", ".pth")):
                from ..containers import torch_zip

                yield from torch_zip.checksums(self.path.at(path))

    def tied_to(self, fqn: str) -> str:
        """What to add to a message if a tied head differs: it has another name."""
        names = self.model.family.tied_names if self.model is not None else {}
        heads = [name for name in self.tied if names.get(name) == fqn]
        if not heads:
            return ""
        return (
            f"; {heads[0]} is stored beside it and config.json ties the two: "
            '"tie_word_embeddings": false keeps both'
        )

    def need_model(self) -> Model:
        """The model, for jobs that must know the packing."""
        if self.model is None:
            if self.unknown_model:
                raise CheckpointError(self.unknown_model)
            raise CheckpointError(
                f"{self.path}: no config.json says which model this is; name its folder with "
                "--config HF_DIR"
            )
        return self.model


class Container(Protocol):
    """Knows where tensors lie in one file, existing or future."""

    def index(self, where: Where) -> Index: ...

    def layout(self, specs: Sequence[Spec], metadata: Mapping[str, str]) -> FileLayout: ...
