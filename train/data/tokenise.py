"""Text becomes the files of an indexed dataset; a later run continues where a killed one stopped.

Every ``SAVE_SECONDS`` the tokens so far are synced, and ``progress.json`` says how far they go: a
position in the text, and the sizes of the files. A run that continues cuts the files to these sizes
and reads the tokens again for their hash.

Memory is bounded by ``BATCH_CHARS`` of text and its tokens, one JSONL line, and a number for each
document, as in megatron's own builder. megatron-core is imported when the index is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardwright.ckpt.move import tree
from shardwright.ckpt.move.progress import Progress
from shardwright.ckpt.move.publish import OutputTransaction, check_unchanged
from shardwright.ckpt.move.storage import FileIdentity

from ..errors import TrainError
from . import documents
from .documents import START, Position
from .indexed import Corpus, Identity, import_megatron
from .tokenizer import Tokenizer

BATCH_CHARS = 1 << 20  # text in one call of the tokenizer: 150 MB there, and work for several cores
MAX_SEQUENCE = 1 << 30  # tokens; megatron counts them in int32, so a longer document is split
SAVE_SECONDS = 10.0  # a killed run loses at most this much work
TOKENS, SUMMARY = "tokens", "data.json"
_PROGRESS, _LENGTHS, _ENDS = "progress.json", "lengths", "ends"  # while it is unfinished


@dataclass(frozen=True, slots=True)
class Job:
    """Text to tokenise, and everything that decides the result."""

    paths: Sequence[Path]
    seen: dict[str, FileIdentity]  # the files' sizes, times and inodes before they were first read
    data_key: str
    tokenizer: Tokenizer
    vocab_size: int
    quiet: bool

    @property
    def dtype(self) -> Any:
        """megatron's choice (DType.optimal_dtype), without importing it."""
        return np.uint16 if self.vocab_size < 65500 else np.int32

    def bytes_before(self, at: Position) -> int:
        """Bytes of text before a position."""
        before = self.paths[: at.file]
        return sum(self.seen[str(path)][0] for path in before) + at.byte


def check_vocabulary(max_token: int, name: str, vocab_size: int) -> None:
    """Raise unless every id has a row in the model's embedding."""
    if max_token >= vocab_size:
        raise TrainError(
            f"{name} gives token id {max_token}, but the model's vocabulary has {vocab_size} ids "
            f"(0 to {vocab_size - 1}); use the tokenizer that belongs to the model"
        )


def tokenise(output: OutputTransaction, job: Job) -> None:
    """Write the dataset and its summary into the output's staging folder."""
    encode, eod = job.tokenizer.load()
    total = sum(job.seen[str(path)][0] for path in job.paths)
    with (
        contextlib.closing(_DatasetWriter(output, job, eod)) as writer,
        Progress(total, "tokenise", quiet=job.quiet) as progress,
    ):
        progress.add(job.bytes_before(writer.start))
        pieces = documents.pieces(job.paths, job.data_key, progress.add, writer.start)
        for batch, after in _batches(pieces):
            texts = [piece for piece in batch if piece is not None]
            rows = iter(encode(texts) if texts else [])  # transformers fails on an empty list
            for piece in batch:
                if piece is None:
                    writer.end_document()
                else:
                    writer.add(next(rows))
            writer.save_if_due(after)
        corpus = writer.finish()
    check_unchanged(job.seen)
    names = [f"{TOKENS}.bin", f"{TOKENS}.idx"]
    summary = {**asdict(corpus), "files": {n: (output.path / n).stat().st_size for n in names}}
    del summary["prefix"]
    (output.path / SUMMARY).write_text(json.dumps(summary))


_Batch = tuple[list[str | None], Position | None]


def _batches(pieces: Iterable[tuple[str | None, Position | None]]) -> Iterator[_Batch]:
    """Pieces in batches, each with the position after it; None where none can continue there."""
    batch: list[str | None] = []
    chars, after = 0, None
    for piece, after in pieces:
        batch.append(piece)
        chars += len(piece or "") + 1  # 1: a million empty texts are a batch too
        if chars >= BATCH_CHARS:
            yield batch, after
            batch, chars = [], 0
    if batch:
        yield batch, after


class _DatasetWriter:
    """The files of an indexed dataset, fed in pieces: one sequence per document, however long."""

    def __init__(self, output: OutputTransaction, job: Job, eod: int) -> None:
        self.output, self.job, self.folder = output, job, output.path
        self.eod = np.array([eod], dtype=np.int64)
        self.identity = Identity()
        self.lengths: list[int] = []  # tokens of each sequence
        self.ends: list[int] = [0]  # sequences before each document, and in all
        self.length = 0  # tokens of the sequence that is being written
        self.start = START
        self._saved_at = time.monotonic()
        self._saved = [0, 0]  # lengths and ends that are in their files
        self._is_begun = False
        saved = _read_progress(self.folder) if output.continued else None
        mode = "r+b" if saved else "wb"
        self._files: list[BinaryIO] = [
            (self.folder / name).open(mode)  # type: ignore[misc]
            for name in (f"{TOKENS}.bin", _LENGTHS, _ENDS)
        ]
        if saved is not None:
            try:
                self._continue(saved)
            except BaseException:
                self.close()
                raise

    def _continue(self, saved: _Saved) -> None:
        """Take over what a killed run saved."""
        for file, size in zip(self._files, saved.sizes, strict=True):
            file.truncate(size)
        lengths, ends = (np.fromfile(file, dtype=np.int64) for file in self._files[1:])
        self.lengths, self.ends = lengths.tolist(), [0, *ends.tolist()]
        self._saved = [len(self.lengths), len(self.ends) - 1]
        for block in documents.blocks(self.folder / f"{TOKENS}.bin"):
            if block:
                self.identity.add(np.frombuffer(block, dtype=self.job.dtype))
        for file in self._files:
            file.seek(0, os.SEEK_END)
        self.length, self.start = saved.length, saved.position

    def add(self, ids: np.ndarray) -> None:
        """Append to the document."""
        if not len(ids):
            return
        if self.length + len(ids) > MAX_SEQUENCE:
            self._end_sequence()
        self.identity.add(ids)
        check_vocabulary(self.identity.max_token, self.job.tokenizer.name, self.job.vocab_size)
        self._files[0].write(ids.astype(self.job.dtype).tobytes())
        self.length += len(ids)

    def _end_sequence(self) -> None:
        self.lengths.append(self.length)
        self.length = 0

    def end_document(self) -> None:
        """Append the end-of-document token."""
        self.add(self.eod)
        self._end_sequence()
        self.ends.append(len(self.lengths))

    def save_if_due(self, after: Position | None) -> None:
        """Sync the tokens up to ``after``, and record that, every ``SAVE_SECONDS``."""
        if after is None or time.monotonic() - self._saved_at < SAVE_SECONDS:
            return
        check_unchanged(self.job.seen)  # else what is saved could be of two contents
        rows = (self.lengths, self.ends[1:])
        for i, (file, row) in enumerate(zip(self._files[1:], rows, strict=True)):
            file.write(np.array(row[self._saved[i] :], dtype=np.int64).tobytes())
            self._saved[i] = len(row)
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        sizes = tuple(file.tell() for file in self._files)
        saved = _Saved(after, sizes, self.length)
        tree.replace_file(self.folder / _PROGRESS, json.dumps(asdict(saved)).encode())
        if not self._is_begun:
            self.output.begin()
            self._is_begun = True
        self._saved_at = time.monotonic()

    def close(self) -> None:
        """Close the files, as after a fault."""
        for file in self._files:
            file.close()

    def finish(self) -> Corpus:
        """Write the .idx, and remove what only an unfinished dataset has."""
        import_megatron()
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self.close()
        prefix = self.folder / TOKENS
        builder = IndexedDatasetBuilder(os.devnull, dtype=self.job.dtype)  # the .bin is there
        builder.sequence_lengths, builder.document_indices = self.lengths, self.ends
        builder.finalize(f"{prefix}.idx")
        for name in (_PROGRESS, _LENGTHS, _ENDS):
            (self.folder / name).unlink(missing_ok=True)
        lengths = np.array(self.lengths, dtype=np.int32)
        return self.identity.corpus(str(prefix), lengths, len(self.ends) - 1)


@dataclass(frozen=True, slots=True)
class _Saved:
    """How far an unfinished dataset goes."""

    position: Position
    sizes: tuple[int, ...]  # bytes of the tokens, the lengths and the ends
    length: int  # tokens of the sequence that is being written


def _read_progress(folder: Path) -> _Saved | None:
    """What a killed run saved; None if it saved nothing, or not all of it is there."""
    try:
        said = json.loads((folder / _PROGRESS).read_text())
        saved = _Saved(Position(**said["position"]), tuple(said["sizes"]), said["length"])
        names = (f"{TOKENS}.bin", _LENGTHS, _ENDS)
        have = [(folder / name).stat().st_size for name in names]
        whole = all(size <= now for size, now in zip(saved.sizes, have, strict=True))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return saved if whole else None
