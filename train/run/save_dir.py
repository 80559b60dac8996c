"""SAVE_DIR: whether a run was there before, and one run at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from shardwright.ckpt.reader import LATEST, follow

from ..config import schema as settings
from ..config.schema import TrainConfig
from ..errors import TrainError
from .metrics import METRICS

LOCK = ".train-ckpt.lock"


def check_unused(config: TrainConfig) -> None:
    """TrainError where another run's results lie in SAVE_DIR that this one does not go on with."""
    saving = config.saving
    if saving.save_dir is None or saving.overwrite:
        return
    folder = Path(saving.save_dir)
    found = earlier(folder)
    if not found or _goes_on(saving.resume, folder):
        return
    raise TrainError(
        f"--save-dir {folder} holds another run ({found[0].name}); go on with it: --resume, name "
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


def lock(folder: Path) -> int:
    """Hold the folder for as long as this process lives; TrainError where another run has it."""
    folder.mkdir(parents=True, exist_ok=True)
    held = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise TrainError(
            f"--save-dir {folder}: another run is writing there; wait for its end, or name "
            "another folder"
        ) from None
    except OSError:
        pass  # a file system without locks
    return held
