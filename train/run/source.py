"""Where a run's model comes from: ``--model``, ``--resume``, and what lies in those folders."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from shardwright.ckpt.checkpoint.config import load_model, model_from
from shardwright.ckpt.checkpoint.types import ReadOptions
from shardwright.ckpt.errors import CheckpointError
from shardwright.ckpt.hub import model_path
from shardwright.ckpt.model.family import Model
from shardwright.ckpt.reader import follow, is_checkpoint, read_checkpoint

from ..checkpoint.load import describes_itself
from ..config import schema as settings
from ..config.schema import TrainConfig
from ..errors import TrainError


@dataclass(frozen=True, slots=True)
class Source:
    """Where the model comes from."""

    config: Path  # config.json; where the model is described by the checkpoint, its folder
    folder: Path | None  # its folder, for tokenizer and side files
    weights: Path | None  # a checkpoint to load; None starts from random weights
    resumes: bool  # the checkpoint is one of a run, with its optimizer and data cursor
    described: str | None = None  # text of a config.json that Megatron-LM's args make

    def model(self) -> Model:
        """The model; CheckpointError for one that no family knows."""
        if self.described is None:
            return load_model(self.config)
        return model_from(json.loads(self.described), str(self.config))

    def reading(self) -> ReadOptions:
        """How to read the weights: a folder without a config is believed to be of this model."""
        own = self.described is not None or self.weights is None
        if own or (self.weights / "config.json").is_file():  # type: ignore[operator]
            return ReadOptions()
        return ReadOptions(config=self.config)


def find_source(config: TrainConfig) -> Source:
    """Resolve --resume and --model; TrainError says what is missing."""
    resume = config.saving.resume
    if resume == settings.LATEST:
        if config.saving.save_dir is None:
            raise TrainError("--resume without a folder takes the latest in --save-dir; name one")
        if not (Path(config.saving.save_dir) / "latest").exists():
            raise TrainError(
                f"--resume: {config.saving.save_dir} has no checkpoint yet; leave --resume out"
            )
        resume = config.saving.save_dir
    if resume is not None:
        where = Path(follow(resume))
        model = _config_file(config.model.path) if config.model.path else where / "config.json"
        if not model.is_file():
            return Source(where, where, where, resumes=True, described=_described(where))
        return Source(model, where, where, resumes=True)
    assert config.model.path is not None
    folder = Path(model_path(config.model.path))
    if folder.is_dir() and describes_itself(folder):
        where = Path(follow(folder))
        return Source(where, where, where, resumes=False, described=_described(where))
    path = _config_file(config.model.path)
    if not folder.is_dir():
        return Source(path, None, None, resumes=False)  # a config alone: random weights, bytes
    has_weights = is_checkpoint(path.parent)
    return Source(path, path.parent, path.parent if has_weights else None, resumes=False)


def _described(where: Path) -> str:
    """The text of the config.json that a checkpoint of Megatron-LM makes of its args."""
    if not describes_itself(where):
        raise TrainError(f"{where}: has no config.json; name the model with --model")
    try:
        sides = read_checkpoint(where, ReadOptions(weights_only=True)).manifest.side_files
    except CheckpointError as error:
        raise TrainError(f"{error} (here --model names a config)") from error
    return next(side.text for side in sides if side.name == "config.json")


def _config_file(text: str) -> Path:
    path = Path(model_path(text))
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise TrainError(f"--model {text}: there is no {file}")
    return file.resolve()
