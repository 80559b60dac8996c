"""The corpus of a run: text that is tokenised once, in a cache folder, or an indexed dataset.

Decides what identifies data: the tokens themselves, in any folder and however they were made.
``tokenise`` makes the files; sequences and their order are left to ``samples``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from shardwright.ckpt.errors import CheckpointError, InUse
from shardwright.ckpt.move.files import Files, digest
from shardwright.ckpt.move.publish import OutputTransaction, check_unchanged, snapshot

from ..errors import TrainError
from . import documents, tokenise
from .indexed import Corpus, check_header, read_indexed
from .tokenise import SUMMARY, TOKENS, Job, check_vocabulary
from .tokenizer import find_tokenizer

LAYOUT = 1  # of the cache; another number makes every run tokenise again
SETTLED_SECONDS = 2.0  # a younger file may change again without a change of its times
WAIT_SECONDS = 1.0  # between two looks at what another machine tokenises


def open_corpus(
    files: Sequence[str | os.PathLike[str]],
    *,
    tokenizer_dir: str | os.PathLike[str] | None,
    vocab_size: int,
    cache_dir: str | os.PathLike[str],
    data_key: str = "text",
    quiet: bool = True,
) -> Corpus:
    """The corpus of text files, JSONL files or one indexed dataset's prefix.

    Every rank may call this. The first one tokenises, however long that takes; the others wait
    for it without a collective, so that no timeout ends them, and then open the cache. On a machine
    that does not share it one of the ranks there makes its own.
    """
    try:
        return _open(files, tokenizer_dir, vocab_size, Path(cache_dir), data_key, quiet)
    except CheckpointError as error:
        raise TrainError(str(error)) from error


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
    job = Job(paths, seen, data_key, tokenizer, vocab_size, quiet)
    folder = cache / _key(job, cache)
    _build_once(folder, job)
    found = _summary(folder)
    assert found is not None, folder
    check_vocabulary(found.max_token, tokenizer.name, vocab_size)
    return found


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


def _key(job: Job, cache: Path) -> str:
    """The name of the cached dataset: content, tokenizer and options, never a path."""

    def read() -> list[str]:
        with Files() as opened:
            return [digest(str(path), opened) for path in job.paths]

    marks = _remembered("content", job.paths, cache, read)
    kinds = [path.suffix in documents.LINE_SUFFIXES for path in job.paths]
    sizes = [job.seen[str(path)][0] for path in job.paths]
    data_key = job.data_key if any(kinds) else None
    options = [data_key, job.dtype.__name__, documents.PIECE_CHARS, tokenise.MAX_SEQUENCE]
    return _hash([LAYOUT, kinds, sizes, marks, job.tokenizer.identity, options])


def _hash(value: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value).encode())


def _remembered(
    what: str, paths: Sequence[Path], cache: Path, read: Callable[[], list[Any]]
) -> list[Any]:
    """What ``read`` finds in the files, kept for as long as their sizes and times stay.

    A start with hundreds of gigabytes of data then reads them once, not on every rank: the others
    wait. As in git's index, files changed a moment ago are not trusted: clocks of file systems are
    coarse.
    """
    now = time.time()
    stats = [(str(path.resolve()), path.stat()) for path in paths]
    marks = [(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for name, s in stats]
    memo = cache / f"{what}-{_hash(marks)}.json"
    with contextlib.suppress(OSError, json.JSONDecodeError):
        return list(json.loads(memo.read_text()))
    with _alone(memo):
        return _read_and_remember(memo, paths, stats, now, read)


def _read_and_remember(
    memo: Path,
    paths: Sequence[Path],
    stats: Sequence[tuple[str, os.stat_result]],
    now: float,
    read: Callable[[], list[Any]],
) -> list[Any]:
    with contextlib.suppress(OSError, json.JSONDecodeError):
        return list(json.loads(memo.read_text()))  # of the rank that was waited for
    before = snapshot(str(path) for path in paths)
    found = read()
    check_unchanged(before)
    if max(max(s.st_mtime, s.st_ctime) for _, s in stats) < now - SETTLED_SECONDS:
        with contextlib.suppress(OSError):  # a cache of another user: only time is lost
            _write(memo, json.dumps(found))
    return found


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until no other process of this machine makes ``path``; without locks at once."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a cache of another user, or no locks: time is lost
            held = stack.enter_context((path.parent / f".{path.name}.lock").open("w"))
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _write(path: Path, text: str) -> None:
    """Replace a small file at once; several processes may."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def _build_once(folder: Path, job: Job) -> None:
    """Publish ``folder`` unless it is there whole; runs at the same time wait for the first.

    A killed run's tokens are kept, and the next run continues after them.
    """
    try:
        with _alone(folder):
            while _summary(folder) is None:
                with contextlib.suppress(InUse):  # on a machine where our lock means nothing
                    _build(folder, job)
                    return
                time.sleep(WAIT_SECONDS)
    except OSError as error:
        raise TrainError(f"{folder.parent}: cannot write the data cache: {error}") from error


def _build(folder: Path, job: Job) -> None:
    with OutputTransaction(
        folder, folder.name, overwrite=True, resume=True, is_ours=lambda _: True
    ) as output:
        try:
            tokenise.tokenise(output, job)
        except (TrainError, CheckpointError):
            output.resume = False  # for other data: nobody would continue from here
            raise
        output.publish()


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


def _scan(prefix: Path, cache: Path) -> Corpus:
    """Check an indexed dataset's files against each other, and read every token once."""
    check_header(prefix)
    paths = [Path(f"{prefix}.idx"), Path(f"{prefix}.bin")]

    def read() -> list[Any]:
        found = read_indexed(prefix)
        return [found.identity, found.tokens, found.documents, found.max_token]

    return Corpus(str(prefix), *_remembered("indexed", paths, cache, read))
