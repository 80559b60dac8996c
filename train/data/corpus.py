"""Text becomes a megatron indexed dataset, once, in a cache folder.

Decides what identifies data: the tokens themselves, wherever they lie and however they were made.
Memory is bounded by ``BATCH_CHARS`` of text and its tokens, and one JSONL line, beside megatron's
own list of document lengths. Sequences and their order are left to ``samples``. megatron-core is
imported when it is needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from shardwright.ckpt.errors import CheckpointError
from shardwright.ckpt.move.files import Files, digest
from shardwright.ckpt.move.progress import Progress
from shardwright.ckpt.move.publish import OutputTransaction, check_unchanged, snapshot
from shardwright.ckpt.move.storage import FileIdentity

from ..errors import TrainError
from . import documents
from .indexed import Corpus, Identity, check_header, import_megatron, read_indexed
from .tokenizer import Tokenizer, find_tokenizer

LAYOUT = 1  # of the cache; another number makes every run tokenise again
BATCH_CHARS = 1 << 20  # text in one call of the tokenizer: 150 MB there, and work for several cores
MAX_SEQUENCE = 1 << 30  # tokens; megatron counts them in int32, so a longer document is split
SETTLED_SECONDS = 2.0  # a younger file may change again without a change of its times
TOKENS, SUMMARY = "tokens", "data.json"


def open_corpus(
    files: Sequence[str | os.PathLike[str]],
    *,
    tokenizer_dir: str | os.PathLike[str] | None,
    vocab_size: int,
    cache_dir: str | os.PathLike[str],
    data_key: str = "text",
    rank: int = 0,
    barrier: Callable[[], None] = lambda: None,
    quiet: bool = True,
) -> Corpus:
    """The corpus of text files, JSONL files or one indexed dataset's prefix.

    Every rank calls this. Rank 0 tokenises while the others wait in ``barrier``, which must be
    as patient as that takes; then each opens the cache, or, on a machine that does not share it,
    makes its own. A fault in the data is raised on every rank.
    """
    if rank != 0:
        barrier()
    try:
        corpus = _open(files, tokenizer_dir, vocab_size, Path(cache_dir), data_key, quiet)
    except Exception as error:
        if rank == 0:
            barrier()  # so that the others meet the same fault, and none waits
        if isinstance(error, CheckpointError):
            raise TrainError(str(error)) from error
        raise
    if rank == 0:
        barrier()
    return corpus


def _open(
    files: Sequence[str | os.PathLike[str]],
    tokenizer_dir: str | os.PathLike[str] | None,
    vocab_size: int,
    cache: Path,
    data_key: str,
    quiet: bool,
) -> Corpus:
    paths = [Path(file) for file in files]
    if not paths:
        raise TrainError("no data files; pass --data FILE ...")
    _make_cache(cache)
    prefix = _prefix(paths)
    if prefix is not None:
        corpus = _scan(prefix, cache)
        check_vocabulary(corpus.max_token, f"the indexed dataset {prefix}", vocab_size)
        return corpus
    tokenizer = find_tokenizer(tokenizer_dir, vocab_size)
    seen = snapshot(str(path) for path in paths)
    job = _Job(paths, seen, data_key, tokenizer, vocab_size, quiet)
    folder = cache / _key(job, cache)
    _build_once(folder, job)
    found = _summary(folder)
    assert found is not None, folder
    check_vocabulary(found.max_token, tokenizer.name, vocab_size)
    return found


def check_vocabulary(max_token: int, name: str, vocab_size: int) -> None:
    """Raise unless every id has a row in the model's embedding."""
    if max_token >= vocab_size:
        raise TrainError(
            f"{name} gives token id {max_token}, but the model's vocabulary has {vocab_size} ids "
            f"(0 to {vocab_size - 1}); use the tokenizer that belongs to the model"
        )


def _prefix(paths: Sequence[Path]) -> Path | None:
    """The prefix of an indexed dataset, where that is what was given."""
    found = [path for path in map(_as_prefix, paths) if path is not None]
    if not found:
        for path in paths:
            _check_file(path)
        return None
    for end in (".idx", ".bin"):
        if not Path(f"{found[0]}{end}").is_file():
            raise TrainError(
                f"{found[0]}{end}: no such file; an indexed dataset has a .bin and .idx"
            )
    if len(set(found)) > 1 or len(found) < len(paths):
        raise TrainError(
            f"{found[0]} is an indexed dataset, which must be the only data, but {len(paths)} "
            "were given; merge indexed datasets into one first (Megatron-LM: merge_datasets.py)"
        )
    return found[0]


def _as_prefix(path: Path) -> Path | None:
    if path.suffix in (".bin", ".idx"):
        return path.with_suffix("")
    pair = (Path(f"{path}.idx"), Path(f"{path}.bin"))
    return path if not path.exists() and any(half.exists() for half in pair) else None


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise TrainError(f"{path}: is a folder; name the files in it")
    try:
        size = path.stat().st_size
    except OSError as error:
        raise TrainError(f"{path}: {error.strerror}; pass a text or JSONL file") from error
    if size == 0:
        raise TrainError(f"{path}: is empty (0 bytes); leave it out of --data")


def _make_cache(cache: Path) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainError(f"{cache}: cannot be the data cache ({error.strerror})") from error


@dataclass(frozen=True, slots=True)
class _Job:
    """Text to tokenise, and everything that decides the result."""

    paths: Sequence[Path]
    seen: dict[str, FileIdentity]  # the files' sizes, times and inodes before they were first read
    data_key: str
    tokenizer: Tokenizer
    vocab_size: int
    quiet: bool


def _key(job: _Job, cache: Path) -> str:
    """The name of the cached dataset: content, tokenizer and options, never a path."""

    def read() -> list[str]:
        with Files() as opened:
            return [digest(str(path), opened) for path in job.paths]

    marks = _remembered("content", job.paths, cache, read)
    kinds = [path.suffix in documents.LINE_SUFFIXES for path in job.paths]
    sizes = [job.seen[str(path)][0] for path in job.paths]
    data_key = job.data_key if any(kinds) else None
    options = [data_key, _dtype(job.vocab_size).__name__, documents.PIECE_CHARS, MAX_SEQUENCE]
    return _hash([LAYOUT, kinds, sizes, marks, job.tokenizer.identity, options])


def _dtype(vocab_size: int) -> Any:
    """megatron's choice (DType.optimal_dtype), without importing it."""
    return np.uint16 if vocab_size < 65500 else np.int32


def _hash(value: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value).encode())


def _remembered(
    what: str, paths: Sequence[Path], cache: Path, read: Callable[[], list[Any]]
) -> list[Any]:
    """What ``read`` finds in the files, kept for as long as their sizes and times stay.

    A start with hundreds of gigabytes of data then reads them once, not on every rank. As in
    git's index, files changed a moment ago are not trusted: clocks of file systems are coarse.
    """
    now = time.time()
    stats = [(str(path.resolve()), path.stat()) for path in paths]
    marks = [(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for name, s in stats]
    memo = cache / f"{what}-{_hash(marks)}.json"
    with contextlib.suppress(OSError, json.JSONDecodeError):
        return list(json.loads(memo.read_text()))
    before = snapshot(str(path) for path in paths)
    found = read()
    check_unchanged(before)
    if max(max(s.st_mtime, s.st_ctime) for _, s in stats) < now - SETTLED_SECONDS:
        with contextlib.suppress(OSError):  # a cache of another user: only time is lost
            _write(memo, json.dumps(found))
    return found


def _write(path: Path, text: str) -> None:
    """Replace a small file at once; several processes may."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def _build_once(folder: Path, job: _Job) -> None:
    """Publish ``folder`` unless it is there whole; runs at the same time wait for the first."""
    if _summary(folder) is not None:
        return
    lock = folder.parent / f".{folder.name}.lock"
    try:
        with lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            if _summary(folder) is None:
                with OutputTransaction(folder, overwrite=True, is_ours=lambda _: True) as stage:
                    _tokenise(stage.path, job)
                    stage.publish()
    except OSError as error:
        raise TrainError(f"{folder.parent}: cannot write the data cache: {error}") from error


def _summary(folder: Path) -> Corpus | None:
    """The cached dataset, if it is whole."""
    try:
        found = json.loads((folder / SUMMARY).read_text())
        for name, size in found.pop("files").items():
            if (folder / name).stat().st_size != size:
                return None
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return Corpus(prefix=str(folder / TOKENS), **found)


def _tokenise(stage: Path, job: _Job) -> None:
    """Write the dataset and its summary; memory holds one batch."""
    encode, eod = job.tokenizer.load()
    total = sum(job.seen[str(path)][0] for path in job.paths)
    with (
        Progress(total, "tokenise", quiet=job.quiet) as progress,
        contextlib.closing(_DatasetWriter(stage / TOKENS, job, eod)) as writer,
    ):
        for batch in _batches(documents.pieces(job.paths, job.data_key, progress.add)):
            texts = [piece for piece in batch if piece is not None]
            rows = iter(encode(texts) if texts else [])  # transformers fails on an empty list
            for piece in batch:
                if piece is None:
                    writer.end_document()
                else:
                    writer.add(next(rows))
        corpus = writer.finish()
    check_unchanged(job.seen)
    names = [f"{TOKENS}.bin", f"{TOKENS}.idx"]
    summary = {**asdict(corpus), "files": {n: (stage / n).stat().st_size for n in names}}
    del summary["prefix"]
    (stage / SUMMARY).write_text(json.dumps(summary))


class _DatasetWriter:
    """megatron's builder, fed in pieces: one sequence per document, however long."""

    def __init__(self, prefix: Path, job: _Job, eod: int) -> None:
        import_megatron()
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self.prefix, self.job, self.dtype = prefix, job, _dtype(job.vocab_size)
        self.builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=self.dtype)
        self.eod = np.array([eod], dtype=np.int64)
        self.identity = Identity()
        self.length = 0  # tokens of the sequence that is being written

    def add(self, ids: np.ndarray) -> None:
        """Append to the document."""
        if not len(ids):
            return
        if self.length + len(ids) > MAX_SEQUENCE:
            self._end_sequence()
        self.identity.add(ids)
        check_vocabulary(self.identity.max_token, self.job.tokenizer.name, self.job.vocab_size)
        self.builder.data_file.write(ids.astype(self.dtype).tobytes())
        self.length += len(ids)

    def _end_sequence(self) -> None:
        self.builder.sequence_lengths.append(self.length)
        self.length = 0

    def end_document(self) -> None:
        """Append the end-of-document token."""
        self.add(self.eod)
        self._end_sequence()
        self.builder.end_document()

    def close(self) -> None:
        """Close the .bin, as after a fault."""
        self.builder.data_file.close()

    def finish(self) -> Corpus:
        """Write the .idx."""
        lengths = np.array(self.builder.sequence_lengths, dtype=np.int32)
        documents = len(self.builder.document_indices) - 1
        self.builder.finalize(f"{self.prefix}.idx")
        return self.identity.corpus(str(self.prefix), lengths, documents)


def _batches(pieces: Iterable[str | None]) -> Iterator[list[str | None]]:
    batch: list[str | None] = []
    chars = 0
    for piece in pieces:
        batch.append(piece)
        chars += len(piece or "") + 1  # 1: a million empty texts are a batch too
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _scan(prefix: Path, cache: Path) -> Corpus:
    """Check an indexed dataset's files against each other, and read every token once."""
    check_header(prefix)
    paths = [Path(f"{prefix}.idx"), Path(f"{prefix}.bin")]

    def read() -> list[Any]:
        found = read_indexed(prefix)
        return [found.identity, found.tokens, found.documents, found.max_token]

    return Corpus(str(prefix), *_remembered("indexed", paths, cache, read))
