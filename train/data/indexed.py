"""A tokenised corpus as megatron's indexed dataset, and what identifies it: its tokens."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from shardwright.ckpt.errors import install, is_extra

from ..errors import TrainError
from .documents import blocks

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDataset


INDEX_HEADER_BYTES = 34  # magic 9, version 8, dtype 1, numbers of sequences and documents 8 each


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokenised data: a megatron indexed dataset, and what identifies it."""

    prefix: str  # of the .bin and .idx
    identity: str  # xxh3-128 of the tokens and document lengths, in hex
    tokens: int  # end-of-document tokens included
    documents: int
    max_token: int

    def indexed(self) -> IndexedDataset:
        """megatron's reader, which maps the files."""
        import_megatron()
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        return IndexedDataset(self.prefix)

    def __str__(self) -> str:
        return f"{self.identity} ({self.tokens:,} tokens in {self.documents:,} documents)"


class Identity:
    """Hashes ids as int32, so that the width in which they are stored does not matter."""

    def __init__(self) -> None:
        self.state = xxhash.xxh3_128()
        self.max_token = -1
        self.tokens = 0

    def add(self, ids: np.ndarray) -> None:
        self.state.update(np.ascontiguousarray(ids, dtype="<i4").data)
        self.max_token = max(self.max_token, int(ids.max()))
        self.tokens += len(ids)

    def corpus(self, prefix: str, lengths: np.ndarray, documents: int) -> Corpus:
        self.state.update(np.ascontiguousarray(lengths, dtype="<i4").data)
        mark = self.state.hexdigest()
        return Corpus(prefix, mark, self.tokens, documents, self.max_token)


def check_header(prefix: Path) -> None:
    """Refuse a header at which megatron's reader would fail with an assertion or a struct error."""
    path, size = f"{prefix}.idx", os.path.getsize(f"{prefix}.idx")
    with open(path, "rb") as file:
        head = file.read(INDEX_HEADER_BYTES)
    if len(head) < INDEX_HEADER_BYTES or head[:17] != b"MMIDIDX\x00\x00" + b"\x01" + bytes(7):
        raise TrainError(f"{path}: is not the index of a megatron indexed dataset (version 1)")
    if head[17] not in (1, 2, 3, 4, 5, 8):
        raise TrainError(f"{path}: holds dtype code {head[17]}, which is not one of integers")
    sequences, documents = np.frombuffer(head, "<u8", 2, 18).tolist()
    need = INDEX_HEADER_BYTES + 12 * sequences + 8 * documents
    if size < need:
        raise TrainError(f"{path}: has {size} bytes where its header says {need}; it is cut off")
    if not sequences or not os.path.getsize(f"{prefix}.bin"):
        raise TrainError(f"{prefix}.bin: is empty ({sequences} sequences)")


def read_indexed(prefix: Path) -> Corpus:
    import_megatron()
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    index = IndexedDataset(str(prefix)).index
    lengths = index.sequence_lengths.astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)]) * index.dtype_size
    size = os.path.getsize(f"{prefix}.bin")
    if not np.array_equal(starts[:-1], index.sequence_pointers) or starts[-1] != size:
        raise TrainError(
            f"{prefix}.bin: has {size} bytes, and {prefix}.idx lists {starts[-1]} of consecutive "
            "sequences; the two files do not belong together"
        )
    identity = Identity()
    for block in blocks(Path(f"{prefix}.bin")):
        ids = np.frombuffer(block, dtype=index.dtype)
        if len(ids):
            if ids.min() < 0 or ids.max() >= 1 << 31:
                raise TrainError(f"{prefix}.bin: holds {ids.min()} to {ids.max()}, not token ids")
            identity.add(ids)
    return identity.corpus(str(prefix), lengths, len(index.document_indices) - 1)


def import_megatron() -> None:
    """Import megatron-core's datasets without its warnings about optional packages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import megatron.core.datasets.gpt_dataset
            import megatron.core.datasets.helpers_cpp  # noqa: F401
        except ModuleNotFoundError as error:
            if error.name == "megatron.core.datasets.helpers_cpp":
                raise TrainError(
                    "this megatron-core has no compiled megatron.core.datasets.helpers_cpp; "
                    "install a wheel of it (there are some for Linux and Python 3.10 to 3.13)"
                ) from error
            if not is_extra(error.name):
                raise
            raise TrainError(f"training: {install(error.name or '')}") from error
