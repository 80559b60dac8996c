"""Runs somebody's script in this process, as ``python script.py`` would."""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from ..errors import TrainError
from . import stopping
from .launch import ARGUMENTS

_LOOKS_EVERY_S = 1.0


def arguments(argv: Sequence[str]) -> list[str]:
    """The script and what it is given: ``argv``, or what our own launcher hands on."""
    given = os.environ.pop(ARGUMENTS, None)  # processes that the script starts are not ranks
    return list(argv) if argv or given is None else list(json.loads(given))


def run(words: Sequence[str]) -> None:
    """Run ``SCRIPT arguments`` or ``-m MODULE arguments`` as ``__main__``.

    TrainError if there is no such script or module.
    """
    _end_with_the_launcher()
    try:
        _run(words)
    except BaseException as error:
        if not dist.is_initialized() or (isinstance(error, SystemExit) and not error.code):
            raise
        _end(error)


def _run(words: Sequence[str]) -> None:
    if words[0] == "-m":
        if len(words) < 2:
            raise TrainError("-m: name the module to run")
        name = words[1]
        sys.argv[:] = [name, *words[2:]]  # runpy puts the file's name there
        sys.path[0] = os.getcwd()
        if importlib.util.find_spec(name) is None:
            raise TrainError(f"-m {name}: no such module on sys.path")
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    script = Path(words[0])
    if not script.exists():
        raise TrainError(f"{script}: no such script; give its path before its own arguments")
    sys.argv[:] = words
    sys.path[0] = str(script.resolve().parent)  # as `python script.py` does
    runpy.run_path(str(script), run_name="__main__")


def _end(error: BaseException) -> NoReturn:
    """End a rank of others as Python would, but for the last part.

    Python's own end waits for, or aborts on, threads of process groups whose other ranks are gone;
    the launcher would report that in place of the error.
    """
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        if not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    else:
        code = 1
        traceback.print_exception(error)
    atexit._run_exitfuncs()  # a save that is under way is published
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_the_launcher() -> None:
    """A rank whose launcher is gone gets SIGTERM, since nobody else would stop it."""
    if stopping.LAUNCHER not in os.environ:
        return

    def watch() -> None:
        while not stopping.is_orphan():
            threading.Event().wait(_LOOKS_EVERY_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="launcher").start()
