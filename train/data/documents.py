"""What a document is (a text file, a JSONL record), and how its text is cut into pieces.

Memory is bounded by one block of a text file, or one JSONL line.
"""

from __future__ import annotations

import codecs
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import TrainError

PIECE_CHARS = 1 << 18  # a longer document is tokenised in pieces, which bounds memory
BLOCK_BYTES = 1 << 20  # one read
LINE_SUFFIXES = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the files where reading can begin again."""

    file: int = 0  # how many files are before it
    byte: int = 0  # of the file; in a JSONL file the start of a line
    line: int = 0  # lines before it, in a JSONL file


START = Position()
Piece = tuple["str | None", "Position | None"]


def pieces(
    paths: Sequence[Path],
    data_key: str,
    count: Callable[[int], None],
    start: Position = START,
) -> Iterator[Piece]:
    """Text of files in pieces, with None after each document.

    With each comes the position after it; None within a JSONL record, where no reading can begin.
    If ``start`` is inside a document, its next piece comes first.
    """
    for i in range(start.file, len(paths)):
        read = _record_pieces if paths[i].suffix in LINE_SUFFIXES else _text_pieces
        yield from read(paths[i], data_key, count, start if i == start.file else Position(i))


def _record_pieces(
    path: Path, data_key: str, count: Callable[[int], None], start: Position
) -> Iterator[Piece]:
    for text, after in _records(path, data_key, count, start):
        for piece in _cut([text]) if len(text) > PIECE_CHARS else (text,):
            yield piece, None
        yield None, after


def _text_pieces(
    path: Path, data_key: str, count: Callable[[int], None], start: Position
) -> Iterator[Piece]:
    at = start.byte or len(_byte_order_mark(path))
    for piece in _cut(_text(path, count, start.byte)):
        at += len(piece.encode())
        yield piece, Position(start.file, at)
    yield None, Position(start.file + 1)


def _byte_order_mark(path: Path) -> bytes:
    with path.open("rb") as file:
        head = file.read(len(codecs.BOM_UTF8))
    return head if head == codecs.BOM_UTF8 else b""


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


def _text(path: Path, count: Callable[[int], None], start: int = 0) -> Iterator[str]:
    """The text of a file from a byte on, block by block."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    fed, empty = start, start == 0
    for block in blocks(path, start):
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


def blocks(path: Path, start: int = 0) -> Iterator[bytes]:
    """The blocks of a file from a byte on, and an empty one at its end."""
    with path.open("rb") as file:
        file.seek(start)
        while block := file.read(BLOCK_BYTES):
            yield block
    yield b""


def _not_utf8(path: Path, at: int, error: UnicodeDecodeError) -> TrainError:
    byte = error.object[error.start]
    return TrainError(
        f"{path}: byte {at} (0x{byte:02x}) is not UTF-8 ({error.reason}); convert the file, "
        "for example with iconv -t UTF-8"
    )


def _records(
    path: Path, data_key: str, count: Callable[[int], None], start: Position
) -> Iterator[tuple[str, Position]]:
    """The texts of a JSONL file, each with the position after it.

    Blank lines do not count; empty texts are skipped, with a warning.
    """
    at, used, skipped = start.byte, int(start.line > 0), 0
    with path.open("rb") as file:
        file.seek(start.byte)
        for number, line in enumerate(file, start.line + 1):
            if stripped := line.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").strip():
                try:
                    text = _record(f"{path}: line {number}", stripped, data_key)
                except UnicodeDecodeError as error:
                    raise _not_utf8(path, at + line.find(stripped) + error.start, error) from error
                used += bool(text)
                skipped += not text
                if text:
                    yield text, Position(start.file, at + len(line), number)
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
