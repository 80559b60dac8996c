"""``Accelerator.log``: TensorBoard events, where they are asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import TrainError


class Trackers:
    """The trackers that ``log_with`` names: ``tensorboard``, ``all`` (the same) or none."""

    def __init__(self, log_with: Any, project_dir: str | None, tensorboard_dir: str | None) -> None:
        names = [log_with] if isinstance(log_with, str) or log_with is None else list(log_with)
        names = [str(getattr(name, "value", name)) for name in names if name is not None]
        unknown = sorted(set(names) - {"tensorboard", "all"})
        if unknown:
            raise TrainError(f"log_with {', '.join(unknown)}: only tensorboard is supported")
        self.wanted = bool(names) or tensorboard_dir is not None
        self.folder = tensorboard_dir or project_dir
        self._board: Any = None

    def open(
        self,
        project_name: str,
        config: Mapping[str, Any] | None,
        init_kwargs: Mapping[str, Any] | None,
    ) -> None:
        """Start writing below the project's folder."""
        if not self.wanted:
            return
        if self.folder is None:
            raise TrainError("log_with tensorboard needs Accelerator(project_dir=...)")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise TrainError("log_with tensorboard: pip install tensorboard") from error
        options = dict((init_kwargs or {}).get("tensorboard", {}))
        self._board = SummaryWriter(str(Path(self.folder) / project_name), **options)
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
