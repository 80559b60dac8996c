"""SAVE_DIR: whether a run was there before, and one run at a time."""

from __future__ import annotations

from pathlib import Path

from shardwright.ckpt.errors import CheckpointError
from shardwright.ckpt.move.lock import OutputLock
from shardwright.ckpt.reader import LATEST, follow

from ..config import schema as settings
from ..config.schema import TrainConfig
from ..errors import TrainError
from .metrics import METRICS

LOCK = ".train-ckpt.lock"


def check_unused(config: TrainConfig) -> None:
    """TrainError if SAVE_DIR holds results of another run that this one does not continue."""
    saving = config.saving
    if saving.save_dir is None or saving.overwrite:
        return
    folder = Path(saving.save_dir)
    found = earlier(folder)
    if not found or _goes_on(saving.resume, folder):
        return
    raise TrainError(
        f"--save-dir {folder} holds another run ({found[0].name}); continue it: --resume, name "
        "another folder, or replace it: --overwrite"
    )


def earlier(folder: Path) -> list[Path]:
    """What an earlier run has left in the folder, checkpoints first."""
    checkpoints = [child for child in folder.glob("checkpoint-*") if is_numbered(child)]
    others = [folder / name for name in (METRICS, LATEST)]
    return sorted(checkpoints) + [path for path in others if path.exists()]


def is_numbered(child: Path) -> bool:
    """Whether a path is one of ``checkpoint-STEP``."""
    return child.name.removeprefix("checkpoint-").isdigit() and child.is_dir()


def _goes_on(resume: str | None, folder: Path) -> bool:
    """Whether the run continues from a checkpoint of this very folder."""
    if resume is None:
        return False
    where = folder if resume == settings.LATEST else Path(str(follow(resume)))
    return folder.resolve() in (where.resolve(), where.resolve().parent)


def lock(folder: Path, *, break_it: bool = False) -> OutputLock:
    """Hold the folder until ``release``, or for as long as this process lives.

    TrainError if another run has it, on this machine or on another one; with ``break_it`` its lock
    is taken over.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held = OutputLock(folder / LOCK, folder, break_it=break_it)
    try:
        held.take()
    except CheckpointError as error:
        raise TrainError(
            f"--save-dir {error}; wait for the end of that run, or name another folder"
        ) from None
    return held
