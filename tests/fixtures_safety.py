"""What the safety tests share: tiny checkpoints, whole trees as values, and a process to kill.

Imports nothing heavy at the top: ``Forge`` starts this file as a program whose forks must be
quick and free of threads. Checkpoints are written by independent.py and strategies.py, which
do not use the code under test.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import itertools
import json
import math
import os
import pkgutil
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

MiB = 1 << 20
LONG_S = 300.0  # what takes as long as this is stuck: no verdict on how busy a machine is


# --- whole trees as values --------------------------------------------------------------------


def tree(path: Path) -> dict[str, tuple[object, ...]]:
    """Everything at and below ``path``: kind, mode, time and content; links are not followed."""
    found: dict[str, tuple[object, ...]] = {}
    for child in [path, *sorted(path.rglob("*"))] if path.is_dir() else [path]:
        info = child.lstat()
        if stat.S_ISLNK(info.st_mode):
            content: object = os.readlink(child)
        else:
            content = child.read_bytes() if stat.S_ISREG(info.st_mode) else ""
        mark = () if stat.S_ISDIR(info.st_mode) else (info.st_mtime_ns,)
        found[str(child.relative_to(path.parent))] = (info.st_mode, *mark, content)
    return found


def content(path: Path) -> dict[str, bytes] | bytes | None:
    """The bytes of a file or of every file of a folder; None where nothing is."""
    if path.is_dir():
        return {
            str(file.relative_to(path)): file.read_bytes()
            for file in sorted(path.rglob("*"))
            if not file.is_dir()
        }
    return path.read_bytes() if os.path.lexists(path) else None


def names(folder: Path) -> list[str]:
    """The names in a folder, hidden ones too."""
    return sorted(os.listdir(folder))


# --- tiny checkpoints -------------------------------------------------------------------------

META = {"start": 1, "layers": 4}


def case(variant: str = "llama", **options):
    """The tiny model of the safety tests: 4 layers, 4 query and 2 KV heads of size 6."""
    import strategies

    return strategies.raw(variant, **{**META, **options})


def _made_once(write: Callable[..., Path]) -> Callable[..., Path]:
    """The same folder again is the same bytes again: most of a short test was to make them."""
    made: dict[str, dict[str, bytes]] = {}

    @functools.wraps(write)
    def written(folder: Path, *args: object, **options: object) -> Path:
        try:
            key = json.dumps([args, options])
        except TypeError:  # a model of the test's own
            return write(folder, *args, **options)
        if key not in made:
            write(folder, *args, **options)
            made[key] = content(folder)  # type: ignore[assignment]
            return folder
        folder.mkdir(parents=True)
        for name, data in made[key].items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
        return folder

    return written


@_made_once
def write_hf(folder: Path, variant: str = "llama", *, binary=False, sides=False, **options) -> Path:
    """A Hugging Face folder of one file."""
    import strategies

    return strategies.write_hf(folder, case(variant, **options), binary=binary, sides=sides)


def write_split(folder: Path, *, parts: int = 3, binary: bool = False, made=None) -> Path:
    """A Hugging Face folder of several files with an index."""
    import torch
    from safetensors.torch import save_file

    made = made or case()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(made.config))
    stem, end = ("pytorch_model", "bin") if binary else ("model", "safetensors")
    where = {}
    for part in range(parts):
        file = f"{stem}-{part + 1:05d}-of-{parts:05d}.{end}"
        keys = list(made.state)[part::parts]
        where.update(dict.fromkeys(keys, file))
        share = {key: made.state[key] for key in keys}
        if binary:
            torch.save(share, folder / file)
        else:
            save_file(share, folder / file, {"format": "pt"})
    total = sum(x.numel() * x.element_size() for x in made.state.values())
    table = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / f"{stem}.{end}.index.json").write_text(json.dumps(table))
    return folder


@_made_once
def write_native(folder: Path, tp: int = 2, pp: int = 2, *, made=None, optimizer=True, **options):
    """Native shards, with optimizer state unless told otherwise."""
    import independent

    made = made or case()
    multiple = options.setdefault("multiple", 4)
    weights = independent.stored(made.config, made.state, tp, pp, multiple=multiple)
    moments = None
    if optimizer:
        states = {"exp_avg": made.numbered(1_000_000), "exp_avg_sq": made.numbered(2_000_000)}
        moments = independent.pack_states(made.config, states, tp, pp, multiple=multiple)
        options.setdefault("state", {"schedule": {"lr": 0.125}, "data": {"cursor": [7, 9]}})
    return independent.write_native(folder, made.config, weights, moments, **options)


def edit_json(path: Path, **changes) -> None:
    """Set keys of a JSON object; ``...`` removes one."""
    table = json.loads(path.read_text())
    for key, value in changes.items():
        if value is ...:
            table.pop(key)
        else:
            table[key] = value
    path.write_text(json.dumps(table))


def edit_header(path: Path, change) -> None:
    """Rewrite a safetensors header by ``change(table)``, which may return raw text instead."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    table = json.loads(raw[8 : 8 + length])
    text = change(table)
    head = (text if isinstance(text, (str, bytes)) else json.dumps(table)) or "{}"
    head = head.encode() if isinstance(head, str) else head
    path.write_bytes(len(head).to_bytes(8, "little") + head + raw[8 + length :])


def edit_tensors(path: Path, change) -> None:
    """Rewrite a safetensors file by ``change(tensors)``; its metadata stays."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata)


# --- a process to kill ------------------------------------------------------------------------


class Forge:
    """A process that has the product loaded; every run is a fork of it.

    A run can be ended at its n-th *moment*: a call that changes files, in the middle of it
    where it has a middle (half of the bytes are written).
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Forge:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(LONG_S)

    def _ask(self, **question: object) -> dict:
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, tool: str, *argv: object, **how: object) -> int:
        """Fork a run; see ``_instrument`` for ``how``. Returns its process id."""
        words = [str(word) for word in argv]
        return self._ask(do="start", tool=tool, argv=words, how=how, cwd=os.getcwd())["pid"]

    def wait(self, pid: int) -> dict:
        """{"code": exit code or -signal, "moments": how many there were, "text": output}."""
        return self._ask(do="wait", pid=pid)

    def run(self, tool: str, *argv: object, **how: object) -> dict:
        """``start`` and ``wait``."""
        return self.wait(self.start(tool, *argv, **how))


def _serve() -> None:
    """Answer questions until the pipe closes."""
    # Everything that a run imports, so that a fork need not.
    from shardwright.ckpt import convert, families, formats, jobs, verifier  # noqa: F401
    from shardwright.ckpt.move import compare, executor, publish, seal  # noqa: F401
    from shardwright.tools import merge_ckpt, reshard, verify_ckpt

    for package in (families, formats):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            importlib.import_module(module.name)
    # what is imported where it is used; another user may not read the interpreter's own files
    for name in (
        "ctypes",
        "difflib",
        "hashlib",
        "secrets",
        "socket",
        "tqdm",
        "traceback",
        "xxhash",
    ):
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork would go through all of it, and so copy it
    tools = {"reshard": reshard, "merge": merge_ckpt, "verify": verify_ckpt}
    reports: dict[int, int] = {}
    for line in sys.stdin:
        question = json.loads(line)
        if question["do"] == "start":
            if question["tool"] not in tools:  # a module beside this one, with a main
                tools[question["tool"]] = importlib.import_module(question["tool"])
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.chdir(question["cwd"])
                _fork(tools[question["tool"]].main, question["argv"], question["how"], writer)
            os.close(writer)
            reports[pid] = reader
            answer = {"pid": pid}
        else:
            with os.fdopen(reports.pop(question["pid"])) as report:
                text = report.read()
            _, status = os.waitpid(question["pid"], 0)
            said, mark, moments = text.rpartition("\nmoments ")
            answer = {"code": os.waitstatus_to_exitcode(status), "text": said if mark else text,
                      "moments": int(moments) if mark else None}  # fmt: skip
        print(json.dumps(answer), flush=True)


def _fork(main, argv: list[str], how: dict, writer: int) -> None:
    """A run, with all that it prints in the pipe; never returns."""
    sys.stdout = sys.stderr = open(writer, "w", encoding="utf-8")  # noqa: SIM115
    code = 99
    try:
        _live_apart(how.pop("view", ""), how.pop("uid", None))
        counter = _instrument(**how)
        code = main(argv)
        print(f"\nmoments {next(counter)}", flush=True)
    except SystemExit as error:
        code = int(error.code or 0)
    finally:
        if code == 99:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


_NEW_MOUNTS, _NEW_PIDS = 0x00020000, 0x20000000  # of unshare(2)
_BIND, _PRIVATE = 0x1000, 0x4000 | 0x40000  # of mount(2): the second for all below


def _live_apart(view: str, uid: int | None) -> None:
    """Put this process into mounts and process numbers of its own, where the current folder is
    seen as ``view`` too, and it works there; and give it to the user ``uid``.

    It stands for a client of a network file system, or a container with a shared volume.
    """
    if view:
        libc = ctypes.CDLL(None, use_errno=True)
        here = os.getcwd().encode()
        for call in (
            lambda: libc.unshare(_NEW_MOUNTS | _NEW_PIDS),
            lambda: libc.mount(None, b"/", None, _PRIVATE, None),
            lambda: libc.mount(here, view.encode(), None, _BIND, None),
        ):
            if call():
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        pid = os.fork()  # only children get the new numbers
        if pid:
            _, status = os.waitpid(pid, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        os.chdir(view)
    if uid is not None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)


def _instrument(
    at: int = -1,
    action: str = "kill",
    sync: bool = False,
    gate: str = "",
    exchange: bool = True,
    flock: bool = True,
) -> Iterator[int]:
    """Do ``action`` at moment ``at``; the counter's next value is the number of moments.

    ``sync`` makes every unit durable and journalled at once. ``gate`` is a path for the action
    "pause": it is made, and the run goes on once it is gone. ``exchange`` False stands for a
    system that cannot swap two folders in one step, ``flock`` False for one whose locks are each
    client's own.
    """
    from shardwright.ckpt import jobs
    from shardwright.ckpt.move import lock, publish, storage

    counter = itertools.count()
    noticed = _notice_signals()
    # a suite that runs in the background of a script inherits an ignored Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
    jobs.SYNC_SECONDS = -1.0 if sync else math.inf  # moments do not depend on the machine's load
    if not flock:
        lock.fcntl = type("NoLocks", (), {**vars(fcntl), "flock": staticmethod(lambda *_: None)})
    if not exchange:
        ctypes.CDLL = lambda *_, **__: None

    def moment(half=lambda: None) -> None:
        if next(counter) != at:
            return
        half()
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "pause":
            Path(gate).touch()
            while os.path.exists(gate):
                time.sleep(0.005)
        else:
            number = getattr(signal, action)
            os.kill(os.getpid(), number)
            if threading.current_thread() is not threading.main_thread():
                # the main thread needs a turn to see it
                assert not callable(signal.getsignal(number)) or noticed.wait(LONG_S)

    def around(module, name: str, half=lambda *_: None) -> None:
        call = getattr(module, name)

        def counted(*args, **kwargs):
            moment(lambda: half(call, *args))
            return call(*args, **kwargs)

        setattr(module, name, counted)

    around(storage, "PWRITE", lambda call, fd, data, at: call(fd, data[: len(data) // 2], at))
    if storage.KERNEL_COPY is not None:
        around(storage, "KERNEL_COPY", lambda call, a, b, n, i, j: call(a, b, n // 2, i, j))
    around(os, "write", lambda call, fd, data: call(fd, data[: len(data) // 2]))
    around(os, "ftruncate", lambda call, fd, size: call(fd, size // 2))
    around(shutil, "copyfile", lambda call, a, b: Path(b).write_bytes(Path(a).read_bytes()[1:]))
    os.fsync = lambda fd: None  # SIGKILL loses nothing that was written: no need for a disk
    for name in ("fsync", "rename", "replace", "unlink", "mkdir", "rmdir"):
        around(os, name)
    around(publish, "_exchange")
    return counter


def _notice_signals() -> threading.Event:
    """An event that every handler sets that is installed from now on, when it is called."""
    noticed, install = threading.Event(), signal.signal

    def noticing(number, handler):
        def call(*args):
            noticed.set()
            return handler(*args)

        return install(number, call if callable(handler) else handler)

    signal.signal = noticing
    return noticed


# --- refusals ---------------------------------------------------------------------------------


def refused(call, *words: object) -> str:
    """The one error of a call, which must say all of ``words``."""
    import pytest

    from shardwright.ckpt import CheckpointError

    with pytest.raises(CheckpointError) as caught:
        call()
    text = str(caught.value)
    lacking = [word for word in words if str(word) not in text]
    assert not lacking, f"{lacking} not in: {text}"
    return text


@contextlib.contextmanager
def untouched(*paths: Path) -> Iterator[None]:
    """What lies at these paths is the same afterwards, to the byte and the time."""
    before = [tree(path) for path in paths]
    yield
    assert [tree(path) for path in paths] == before


if __name__ == "__main__":
    _serve()
