"""The plugin's ``tensorboard_dir``: TensorBoard event files of every step and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.ckpt.errors import install

from ..errors import TrainError


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
