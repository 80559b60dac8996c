"""Text becomes a megatron indexed dataset, once, in a cache folder.

Decides what a document is (a text file, a JSONL record), how its text is cut and tokenised, and
what identifies data: the tokens themselves, wherever they lie and however they were made. Memory
is bounded by ``BATCH_CHARS`` of text and its tokens, and one JSONL line, beside megatron's own list
of document lengths. Sequences and their order are left to `data.py`. megatron-core and
transformers are imported when they are needed.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from shardwright.ckpt.errors import CheckpointError
from shardwright.ckpt.move.files import Files, digest
from shardwright.ckpt.move.progress import Progress
from shardwright.ckpt.move.publish import OutputTransaction, Seen, check_unchanged, snapshot

from ..errors import TrainError

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

LAYOUT = 1  # of the cache; another number makes every run tokenise again
PIECE_CHARS = 1 << 18  # a longer document is tokenised in pieces, which bounds memory
BATCH_CHARS = 1 << 20  # text in one call of the tokenizer: 150 MB there, and work for several cores
BLOCK_BYTES = 1 << 20  # one read
MAX_SEQUENCE = 1 << 30  # tokens; megatron counts them in int32, so a longer document is split
SETTLED_SECONDS = 2.0  # a younger file may change again without a change of its times
INDEX_HEADER_BYTES = 34  # magic 9, version 8, dtype 1, numbers of sequences and documents 8 each
TOKENS, SUMMARY = "tokens", "data.json"
BYTES = "bytes"  # the name of the tokenizer that needs no files
LINE_SUFFIXES = {".jsonl", ".ndjson"}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "*.tiktoken",
)


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


# What the user gave


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


# Tokenizers


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """How text becomes ids; ``load`` gives (encode, end-of-document id) and may take seconds."""

    name: str  # for messages
    identity: str  # of the files and libraries that decide the ids
    load: Callable[[], tuple[Encode, int]]


Encode = Callable[[list[str]], "list[np.ndarray]"]


def find_tokenizer(folder: str | os.PathLike[str] | None, vocab_size: int) -> Tokenizer:
    """The Hugging Face tokenizer in ``folder``, or bytes where there is none.

    The files decide: transformers makes an empty GPT-2 tokenizer, which encodes any text to
    nothing, of a folder with a config alone.
    """
    files: set[Path] = set()
    if folder is not None:
        if not Path(folder).is_dir():
            raise TrainError(f"{folder}: no such folder; it should hold the model's tokenizer")
        files = {path for name in TOKENIZER_FILES for path in Path(folder).glob(name)}
    if not files:
        eod = 256 if vocab_size > 256 else 0
        return Tokenizer(BYTES, f"{BYTES} {eod}", lambda: (_encode_bytes, eod))
    with Files() as opened:
        marks = {path.name: digest(str(path), opened) for path in sorted(files)}
    libraries = {name: version(name) for name in ("tokenizers", "transformers")}
    identity = json.dumps([marks, libraries])
    return Tokenizer(f"the tokenizer in {folder}", identity, lambda: _load(Path(str(folder))))


def _encode_bytes(texts: list[str]) -> list[np.ndarray]:
    return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


def _load(folder: Path) -> tuple[Encode, int]:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise TrainError(f"{folder}: its tokenizer does not load: {error}") from error

    def encode(texts: list[str]) -> list[np.ndarray]:
        rows = tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # it warns of texts longer than the model's positions
        )["input_ids"]
        return [np.asarray(row, dtype=np.int64) for row in rows]

    if not len(encode(["a text"])[0]):
        raise TrainError(f"{folder}: its tokenizer has no vocabulary; a file of it is missing")
    if tokenizer.eos_token_id is None:
        raise TrainError(
            f"{folder}: its tokenizer has no end-of-sequence token to set documents apart; "
            'name one as "eos_token" in tokenizer_config.json'
        )
    return encode, int(tokenizer.eos_token_id)


# The cache


def _make_cache(cache: Path) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainError(f"{cache}: cannot be the data cache ({error.strerror})") from error


@dataclass(frozen=True, slots=True)
class _Job:
    """Text to tokenise, and everything that decides the result."""

    paths: Sequence[Path]
    seen: dict[str, Seen]  # the files' sizes, times and inodes before they were first read
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
    kinds = [path.suffix in LINE_SUFFIXES for path in job.paths]
    sizes = [job.seen[str(path)][0] for path in job.paths]
    data_key = job.data_key if any(kinds) else None
    options = [data_key, _dtype(job.vocab_size).__name__, PIECE_CHARS, MAX_SEQUENCE]
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
                options = {"single": False, "overwrite": True, "resume": False, "private": True}
                with OutputTransaction(folder, "", **options) as stage:
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


# Building


def _tokenise(stage: Path, job: _Job) -> None:
    """Write the dataset and its summary; memory holds one batch."""
    encode, eod = job.tokenizer.load()
    total = sum(job.seen[str(path)][0] for path in job.paths)
    with (
        Progress(total, "tokenise", quiet=job.quiet) as progress,
        contextlib.closing(_Writer(stage / TOKENS, job, eod)) as writer,
    ):
        for batch in _batches(_pieces(job, progress.add)):
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


class _Writer:
    """megatron's builder, fed in pieces: one sequence per document, however long."""

    def __init__(self, prefix: Path, job: _Job, eod: int) -> None:
        import_megatron()
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self.prefix, self.job, self.dtype = prefix, job, _dtype(job.vocab_size)
        self.builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=self.dtype)
        self.eod = np.array([eod], dtype=np.int64)
        self.identity = _Identity()
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


class _Identity:
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


def _pieces(job: _Job, count: Callable[[int], None]) -> Iterator[str | None]:
    """Text in pieces, with None after each document."""
    for path in job.paths:
        if path.suffix in LINE_SUFFIXES:
            documents: Iterable[Iterable[str]] = ([t] for t in _records(path, job.data_key, count))
        else:
            documents = [_text(path, count)]
        for document in documents:
            yield from _cut(document)
            yield None


def _cut(texts: Iterable[str]) -> Iterator[str]:
    """A document's text in pieces of at most ``PIECE_CHARS``, cut at line ends."""
    rest = ""
    for text in texts:
        rest += text
        while len(rest) > PIECE_CHARS:
            at = _cut_at(rest, PIECE_CHARS)
            yield rest[:at]
            rest = rest[at:]
    if rest:
        yield rest


def _cut_at(text: str, limit: int) -> int:
    """Where to cut, above 0 and at most ``limit``: before a newline that follows a letter or digit.

    The pre-tokenizers of GPT-2, Llama 3, Qwen and their like split there anyway, so the ids are
    those of the whole text. Failing that before any newline, and in an endless line at the limit.
    """
    at = last = text.rfind("\n", 1, limit)
    while at > 0:
        if text[at - 1].isalnum():
            return at
        at = text.rfind("\n", 1, at)
    return last if last > 0 else limit


def _text(path: Path, count: Callable[[int], None]) -> Iterator[str]:
    """The text of a file, block by block."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    fed, empty = 0, True
    for block in _blocks(path):
        pending = len(decoder.getstate()[0])  # bytes of a character that the last block cut
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise _not_utf8(path, fed - pending + error.start, error) from error
        text = text.removeprefix("\ufeff") if fed == 0 else text
        fed += len(block)
        count(len(block))
        empty &= not text
        yield text
    if empty:
        raise TrainError(f"{path}: is empty (no text after the byte-order mark)")


def _blocks(path: Path) -> Iterator[bytes]:
    """The blocks of a file, and an empty one at its end."""
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block
    yield b""


def _not_utf8(path: Path, at: int, error: UnicodeDecodeError) -> TrainError:
    byte = error.object[error.start]
    return TrainError(
        f"{path}: byte {at} (0x{byte:02x}) is not UTF-8 ({error.reason}); convert the file, "
        "for example with iconv -t UTF-8"
    )


def _records(path: Path, data_key: str, count: Callable[[int], None]) -> Iterator[str]:
    """The texts of a JSONL file; blank lines do not count, empty texts are skipped and said."""
    at = used = skipped = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if stripped := line.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").strip():
                try:
                    text = _record(f"{path}: line {number}", stripped, data_key)
                except UnicodeDecodeError as error:
                    raise _not_utf8(path, at + line.find(stripped) + error.start, error) from error
                used += bool(text)
                skipped += not text
                if text:
                    yield text
            at += len(line)
            count(len(line))
    if not used:
        raise TrainError(f"{path}: is empty (no line with text under {data_key!r})")
    if skipped:
        warnings.warn(f"{path}: {skipped} lines with an empty text were skipped", stacklevel=2)


def _record(where: str, line: bytes, data_key: str) -> str:
    try:
        record = json.loads(line.decode())
    except json.JSONDecodeError as error:
        raise TrainError(f"{where} is not JSON (column {error.colno}: {error.msg})") from error
    if not isinstance(record, dict):
        raise TrainError(f"{where} is a JSON {type(record).__name__}, not an object")
    if data_key not in record:
        keys = ", ".join(sorted(record)) or "none"
        raise TrainError(f"{where} has no key {data_key!r} (its keys: {keys}); pass --data-key")
    text = record[data_key]
    if not isinstance(text, str):
        raise TrainError(f"{where}: {data_key!r} is a {type(text).__name__}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TrainError(
            f"{where}: {data_key!r} holds half a surrogate pair (\\u{ord(text[error.start]):04x})"
        ) from error
    return text


# An indexed dataset that is there already


def _scan(prefix: Path, cache: Path) -> Corpus:
    """Check an indexed dataset's files against each other, and read every token once."""
    _check_header(prefix)
    paths = [Path(f"{prefix}.idx"), Path(f"{prefix}.bin")]

    def read() -> list[Any]:
        found = _read_indexed(prefix)
        return [found.identity, found.tokens, found.documents, found.max_token]

    return Corpus(str(prefix), *_remembered("indexed", paths, cache, read))


def _check_header(prefix: Path) -> None:
    """Refuse what megatron's reader would meet with an assertion or a bare struct error."""
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


def _read_indexed(prefix: Path) -> Corpus:
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
    identity = _Identity()
    for block in _blocks(Path(f"{prefix}.bin")):
        ids = np.frombuffer(block, dtype=index.dtype)
        if len(ids):
            if ids.min() < 0 or ids.max() >= 1 << 31:
                raise TrainError(f"{prefix}.bin: holds {ids.min()} to {ids.max()}, not token ids")
            identity.add(ids)
    return identity.corpus(str(prefix), lengths, len(index.document_indices) - 1)


def import_megatron() -> None:
    """Import megatron-core's datasets without its warnings of packages that are optional."""
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
            raise TrainError(
                f"training needs {error.name}; run: pip install 'shardwright[train]'"
            ) from error
