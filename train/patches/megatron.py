"""Imports modules of megatron-core."""

from __future__ import annotations

import functools
import warnings
from importlib import import_module
from types import ModuleType


@functools.cache
def import_megatron(name: str) -> ModuleType:
    """A module of megatron-core, without its warnings that Apex is absent.

    On CPU the redirections of ``cpu.py`` must be installed first: ``core.process.initialize``
    does that.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(f"megatron.core.{name}")
