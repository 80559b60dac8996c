"""What a document is (a text file, a JSONL record), and how its text is cut into pieces.

Memory is bounded by one block of a text file, or one JSONL line.
"""

from __future__ import annotations

import codecs
import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ..errors import TrainError

PIECE_CHARS = 1 << 18  # a longer document is tokenised in pieces, which bounds memory
BLOCK_BYTES = 1 << 20  # one read
LINE_SUFFIXES = {".jsonl", ".ndjson"}


def pieces(
    paths: Iterable[Path], data_key: str, count: Callable[[int], None]
) -> Iterator[str | None]:
    """Text of files in pieces, with None after each document."""
    for path in paths:
        if path.suffix in LINE_SUFFIXES:
            documents: Iterable[Iterable[str]] = ([t] for t in _records(path, data_key, count))
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

    The pre-tokenizers of GPT-2, Llama 3, Qwen and similar ones split there anyway, so the ids are
    those of the whole text. Without such a newline: before any newline; without any: at the limit.
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
    for block in blocks(path):
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


def blocks(path: Path) -> Iterator[bytes]:
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
        raise TrainError(
            f"{where} has no key {data_key!r} (its keys: {keys}); name one with --data-key"
        )
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
