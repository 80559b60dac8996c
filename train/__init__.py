"""The trainer: Hugging Face Accelerate's Megatron API, and train-ckpt's loop.

    from shardwright.train import Accelerator, MegatronLMPlugin

Names are imported when they are first used, so that a command's ``--help`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .accelerate.accelerator import Accelerator
    from .accelerate.schedulers import MegatronLMDummyScheduler
    from .config.plugin import MegatronLMPlugin
    from .errors import TrainError

_HOMES = {
    "Accelerator": "accelerate.accelerator",
    "MegatronLMDummyScheduler": "accelerate.schedulers",
    "MegatronLMPlugin": "config.plugin",
    "TrainError": "errors",
}

__all__ = ["Accelerator", "MegatronLMDummyScheduler", "MegatronLMPlugin", "TrainError"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shardwright.ckpt.errors import install, is_extra

    try:
        value: object = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if not is_extra(error.name):
            raise
        text = f"shardwright.train.{name}: {install(error.name or '')}"
        raise ModuleNotFoundError(text, name=error.name) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
