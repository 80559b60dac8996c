"""``accelerate.Accelerator(...)`` makes one of ours where Megatron-LM is asked for.

So a script that says ``from accelerate import Accelerator`` runs as it is. Subclasses of users
get our methods below their own.
"""

from __future__ import annotations

import os
from typing import Any

import accelerate

from ..config.accelerate_yaml import read_yaml
from ..patches.table import replace
from . import state
from .accelerator import Accelerator

_PLUGIN = "megatron_lm_plugin"
_made: dict[type, type] = {accelerate.Accelerator: Accelerator}


def install() -> None:
    """From now on in this process; twice is as once."""
    replace("accelerate", "Accelerator.__new__", staticmethod(_new))


def _new(cls: type, *args: Any, **kwargs: Any) -> Any:
    """An object whose constructor Python calls next, with the same arguments."""
    if issubclass(cls, Accelerator) or not _asked(kwargs):
        return object.__new__(cls)
    return object.__new__(_ours(cls))


def _ours(cls: type) -> type:
    """``cls`` with our methods in place of Accelerate's own, and a user's before ours."""
    if cls not in _made:
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        _made[cls] = type(cls.__name__, (cls, Accelerator), {**names, "__doc__": cls.__doc__})
    return _made[cls]


def _asked(kwargs: dict[str, Any]) -> bool:
    """Whether the script, the launcher or its file wants Megatron-LM; or an earlier object did."""
    if kwargs.get(_PLUGIN) is not None or state.current() is not None:
        return True
    if os.environ.get(state.ASKS, "").lower() == "true":
        return True
    path = os.environ.get("ACCELERATE_CONFIG_FILE")
    return path is not None and read_yaml(path).get("distributed_type") == "MEGATRON_LM"
