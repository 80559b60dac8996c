"""A process that has torch, transformers and megatron-core imported, and forks itself for tests.

Importing them takes four seconds of CPU, a fork of this process some milliseconds. One such
process serves a whole session of tests; it is started by the first call, and ends with the session.
A call that hangs ends with a stack of every thread of every process of it.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

# Beside torch and megatron-core: what ranks import anyway.
MODULES = (
    "accelerate.commands.config",
    "accelerate.utils.megatron_lm",
    "matplotlib.figure",
    "megatron.core.dist_checkpointing",
    "megatron.core.transformer.attention",
    "pytest",
    "shardwright.ckpt.convert",
    "shardwright.ckpt.formats.hf.reader",
    "shardwright.tools.train_ckpt",
    "shardwright.train.accelerate.accelerator",
    "shardwright.train.run.trainer",
    "torch.utils.tensorboard",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.optimization",
    "transformers.trainer_pt_utils",
)
LONG_S = 600.0  # what has not ended by then is stuck: a busy machine is slow, not wrong
_STACKS_S = 30.0  # before that every process of a call says where it is


def call(target: str, *args: object, log: Path, env: Mapping[str, str] | None = None) -> int | str:
    """Call ``module:function`` with ``args`` (JSON) in a fork with all its output in ``log``.

    Returns 0, or what the call ended with. The fork has the caller's environment and folder.
    """
    question = {
        "target": target, "args": args, "log": str(log), "cwd": os.getcwd(),
        "env": {**os.environ, **(env or {})},
    }  # fmt: skip
    return _the_process().ask(question)


def script(text: str, *argv: str) -> None:
    """In the fork: run a script as ``python -c`` does."""
    sys.argv = ["-c", *argv]
    exec(compile(text, "-c", "exec"), {"__name__": "__main__"})


def watch_for_a_hang() -> None:
    """In a forked process: say where every thread is, shortly before time runs out."""
    faulthandler.dump_traceback_later(LONG_S - _STACKS_S, file=sys.__stderr__)


# --- in the tests ------------------------------------------------------------------------------


class _Process:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for the tests, which then end us
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions, self._answers = self._process.stdin, self._process.stdout
        atexit.register(self._end)

    def ask(self, question: Mapping[str, object]) -> int | str:
        self._questions.write(json.dumps(question).encode() + b"\n")
        pid = self._answer()
        in_time = True
        try:
            in_time = bool(select.select([self._answers], [], [], LONG_S)[0])
        finally:  # a Ctrl-C comes here too
            if not in_time or sys.exc_info()[0] is not None:
                os.killpg(pid, signal.SIGKILL)  # of the group that the fork leads
            code = self._answer()
        return code if in_time else f"no end after {LONG_S:.0f} s"

    def _answer(self) -> int:
        line = self._answers.readline()
        assert line, "the process that forks is gone"
        return int(line)

    def _end(self) -> None:
        self._questions.close()
        self._answers.close()
        self._process.wait(LONG_S)


_made: list[_Process] = []


def _the_process() -> _Process:
    if not _made:
        _made.append(_Process())
    return _made[0]


# --- in the process ----------------------------------------------------------------------------


def _import() -> dict[str, str]:
    """Everything that ranks need; what that has set in the environment."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads do not live through a fork
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    before = dict(os.environ)
    from shardwright.train.patches import cpu
    from shardwright.train.patches.megatron import import_megatron

    cpu.install()
    for name in ("models.gpt", "distributed", "pipeline_parallel", "optimizer"):
        import_megatron(name)
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork would go through all that was imported, and so copy it
    found = {name: text for name, text in os.environ.items() if before.get(name) != text}
    return {"TORCH_CPP_LOG_LEVEL": "ERROR", **found}


def _serve() -> None:
    """Answer questions until the pipe closes: each by a fork's number, then by its exit code."""
    ours = _import()
    for line in sys.stdin:
        question = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _fork(question, ours)
        os.setpgid(pid, pid)
        print(pid, flush=True)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it keeps the number of its group
        os.killpg(pid, signal.SIGKILL)  # what it has left behind
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _fork(question: Mapping, ours: Mapping[str, str]) -> None:
    """Never returns."""
    code = 1
    try:
        output = os.open(question["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for fd in (1, 2):
            os.dup2(output, fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(question["cwd"])
        os.environ.clear()
        os.environ.update({**question["env"], **ours})
        module, function = question["target"].split(":")
        getattr(importlib.import_module(module), function)(*question["args"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
