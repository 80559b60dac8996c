"""The data of a run, tokenised before its ranks have a process group.

Tokenising may take longer than a collective waits. So the launcher does it before it starts ranks,
and under another launcher the first rank of each machine does, while the others wait for it
without a collective.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from shardwright.ckpt.model.family import Model

from ..config.schema import Data, TrainConfig
from ..data.corpus import open_corpus
from ..data.documents import LINE_SUFFIXES
from ..data.indexed import Corpus
from ..errors import TrainError
from .source import Source


@dataclass(frozen=True, slots=True)
class Corpora:
    """What a run trains and evaluates on."""

    train: Corpus
    evaluation: Corpus | None


def open_corpora(config: TrainConfig, source: Source, model: Model) -> Corpora:
    """Open the run's data, tokenised if the cache does not have it yet; TrainError if it is bad."""
    files = (*config.data.files, *config.data.eval_files)
    if config.data.key != Data().key and not any(Path(f).suffix in LINE_SUFFIXES for f in files):
        raise TrainError(
            f"--data-key {config.data.key}: no data file is JSONL ({', '.join(LINE_SUFFIXES)}); "
            "leave it out"
        )

    def opened(files: tuple[str, ...]) -> Corpus:
        return open_corpus(
            files,
            tokenizer_dir=source.folder,
            vocab_size=model.sizes["vocab"],
            cache_dir=_cache_dir(),
            data_key=config.data.key,
            quiet=False,  # only the process that tokenises shows a bar
        )

    evaluation = opened(config.data.eval_files) if config.data.eval_files else None
    return Corpora(opened(config.data.files), evaluation)


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("SHARDWRIGHT_CACHE", str(Path(base) / "shardwright" / "data")))
