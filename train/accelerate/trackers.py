"""``Accelerator.log`` and the plugin's ``tensorboard_dir``: TensorBoard event files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.ckpt.errors import install

from ..errors import TrainError


class Trackers:
    """What a script logs: ``log_with`` names ``tensorboard``, ``all`` (the same) or nothing."""

    def __init__(self, log_with: Any, project_dir: str | None) -> None:
        given = [log_with] if isinstance(log_with, str) or log_with is None else list(log_with)
        names = [str(getattr(name, "value", name)) for name in given if name is not None]
        unknown = sorted(set(names) - {"tensorboard", "all"})
        if unknown:
            raise TrainError(f"log_with {', '.join(unknown)}: only tensorboard is supported")
        self.wanted, self.folder = bool(names), project_dir
        self._board: Any = None

    def open(
        self,
        project_name: str,
        config: Mapping[str, Any] | None,
        init_kwargs: Mapping[str, Any] | None,
    ) -> None:
        """Start writing below the project's folder."""
        unknown = sorted(set(init_kwargs or {}) - {"tensorboard"})
        if unknown:
            raise TrainError(f"init_kwargs for {', '.join(unknown)}: only tensorboard is supported")
        if not self.wanted:
            return
        if self.folder is None:
            raise TrainError("log_with tensorboard needs Accelerator(project_dir=...)")
        options = dict((init_kwargs or {}).get("tensorboard", {}))
        self._board = _writer(str(Path(self.folder) / project_name), options)
        if config:
            self._board.add_text("config", json.dumps(dict(config), indent=2, default=str))

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Numbers become scalars, text becomes text."""
        if self._board is None:
            return
        for key, value in values.items():
            if isinstance(value, str):
                self._board.add_text(key, value, step)
            elif isinstance(value, Mapping):
                self._board.add_scalars(key, dict(value), step)
            else:
                self._board.add_scalar(key, float(value), step)
        self._board.flush()

    def close(self) -> None:
        """Finish the files."""
        if self._board is not None:
            self._board.close()
            self._board = None


class StepLog:
    """What ``tensorboard_dir`` asks for: every optimizer step, and every evaluation.

    An evaluation is what was run between ``model.eval()`` and the next ``model.train()``.
    """

    def __init__(self, folder: str | None, *, writes: bool) -> None:
        self._board = _writer(folder, {}) if folder is not None and writes else None
        self._losses: list[float] = []
        self._eval_losses: list[float] = []

    def loss(self, value: float, training: bool) -> None:
        """The loss of a forward."""
        if self._board is not None:
            (self._losses if training else self._eval_losses).append(value)

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        """An optimizer step; its loss is the mean of the forwards since the last."""
        if self._board is None:
            return
        for key, value in {**_mean("loss", self._losses), **numbers}.items():
            self._board.add_scalar(key, value, step)
        self._board.flush()
        self._losses = []

    def evaluated(self, step: int) -> None:
        """The end of an evaluation, if there was one."""
        if self._board is not None:
            for key, value in _mean("eval_loss", self._eval_losses).items():
                self._board.add_scalar(key, value, step)
        self._eval_losses = []

    def close(self, step: int) -> None:
        """Finish the files."""
        self.evaluated(step)
        if self._board is not None:
            self._board.close()
            self._board = None


def _mean(name: str, values: list[float]) -> dict[str, float]:
    return {name: sum(values) / len(values)} if values else {}


def _writer(folder: str, options: dict[str, Any]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise TrainError(f"TensorBoard event files: {install('tensorboard')}") from error
    return SummaryWriter(folder, **options)
