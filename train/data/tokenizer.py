"""How text becomes token ids: the Hugging Face tokenizer of a folder, or bytes where there is none.

transformers is imported when a tokenizer is loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.ckpt.move.files import Files, digest

from ..errors import TrainError

BYTES = "bytes"  # the name of the tokenizer that needs no files
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
    where = Path(str(folder))
    return Tokenizer(f"the tokenizer in {folder}", identity, lambda: load_tokenizer(where))


def _encode_bytes(texts: list[str]) -> list[np.ndarray]:
    return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


def load_tokenizer(folder: Path) -> tuple[Encode, int]:
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
