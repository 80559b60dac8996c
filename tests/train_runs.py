"""Runs of the trainer for tests: many command lines in one set of ranks, and real launches.

``in_ranks`` starts four processes once (``train_helpers.launch``) and lets them be worlds of one,
two or four ranks in turn, each of which does one job: a ``train-ckpt`` command line, or a function
of this file. A run then takes a second instead of the ten or more that starting ranks takes.

`Launch` is the real command in processes of its own. Run as a script this file is that command
with ranks that do what `FAULTS` says.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import errno
import gc
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from train_helpers import launch
from warm import LONG_S

SIZES = {
    "vocab_size": 259,  # bytes, an end of document, and two more: padded in every layout
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
CONFIGS: Mapping[str, Mapping[str, object]] = {
    "llama": {"model_type": "llama", **SIZES},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True, **SIZES},
    "gpt2": {  # a tied head, biases, learned positions, and dropout in every place
        "model_type": "gpt2",
        "vocab_size": 259,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 64,
        "initializer_range": 0.1,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
    },
    "shallow": {"model_type": "llama", **SIZES, "num_hidden_layers": 2},
}
CALM = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
SEQ_LENGTH = 16
TEXT = "".join(f"{i} times {i} is {i * i}; " for i in range(40))[:250]  # 15 samples of an epoch
EVAL_TEXT = "".join(f"{i} and {i} are {i + i}; " for i in range(40))[:200]


@dataclasses.dataclass(frozen=True)
class Run:
    """One command line of train-ckpt, in a world of ``world`` ranks; it saves into ``name``."""

    name: str
    model: str = "llama"  # a file or folder in the place of the runs, without .json
    world: int = 4
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    resume: str | None = None  # a checkpoint in the place of the runs
    stop_at: int | None = None  # the step after which it is asked to stop
    fault: str | None = None

    def argv(self, place: Path) -> list[str]:
        """The command line, where ``place`` holds models, data and all that runs save."""
        return command_line(place, self.name, self.model, self.resume, self.options)


def command_line(
    place: Path,
    name: str,
    model: str = "llama",
    resume: str | None = None,
    options: Mapping[str, object] | None = None,
) -> list[str]:
    """A short training on `TEXT` that saves every two steps."""
    config = place / f"{model}.json"
    said: dict[str, object] = {
        "model": config if config.exists() else place / model,
        "data": place / "data.txt",
        "seq_length": SEQ_LENGTH,
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "steps": 6,
        "lr": 1e-2,
        "save_dir": place / name,
        "save_interval": 2,
        "resume": place / resume if resume is not None else False,
        **(options or {}),
    }
    found = []
    for key, value in said.items():
        if value is not False and value is not None:
            found += ["--" + key.replace("_", "-")] + ([] if value is True else [str(value)])
    return found


def make_place(place: Path) -> Path:
    """A folder with the models' configs and the data."""
    place.mkdir(parents=True, exist_ok=True)
    for name, config in CONFIGS.items():
        (place / f"{name}.json").write_text(json.dumps(config))
    (place / "data.txt").write_text(TEXT)
    (place / "eval.txt").write_text(EVAL_TEXT)
    return place


def hf_model(place: Path, name: str, dtype: torch.dtype = torch.float32, **changes: object) -> Path:
    """A random Hugging Face model of a config, with random norms and biases, saved as ``name``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**CONFIGS[name.split("-")[0]], **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
    model.to(dtype).save_pretrained(place / name)
    return place / name


# --- what a run left ---------------------------------------------------------------------------


def rows(folder: Path) -> list[dict[str, float]]:
    """metrics.jsonl without the speed."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(x).items() if k != "tokens_per_s"} for x in lines]


def losses(folder: Path, after: int = 0) -> list[float]:
    """The training losses of the steps after ``after``."""
    return [row["loss"] for row in rows(folder) if "loss" in row and row["step"] > after]


def cursor(checkpoint: Path) -> dict[str, Any]:
    """The data cursor in a checkpoint."""
    return json.loads((checkpoint / "checkpoint.json").read_text())["data"]


def random_states(checkpoint: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Each rank's random state."""
    from safetensors.torch import load_file

    return {file.name: load_file(file) for file in checkpoint.glob("random_states_*")}


# --- in the ranks ------------------------------------------------------------------------------

Job = tuple[int, str, Mapping[str, object]]  # ranks, function below, its arguments as JSON


def in_ranks(folder: Path, jobs: Sequence[Job]) -> list[list[Any]]:
    """For each job what its ranks returned, in the order of ranks."""
    found = launch("train_runs:serve", 4, folder, str(folder), jobs)
    return [
        [rank[i] for rank in found[:world]]  # type: ignore[index]
        for i, (world, _, _) in enumerate(jobs)
    ]


def job(run: Run, place: Path) -> Job:
    """A run as a job."""
    return run.world, "train", {"argv": run.argv(place), "stop_at": run.stop_at}


def command(run: Run, place: Path) -> Job:
    """A run with its fault as a job whose ranks return what the command says."""
    return run.world, "train_command", {"argv": run.argv(place), "fault": run.fault}


def serve(folder: str, jobs: Sequence[Job]) -> list[object]:
    """In a rank: what every job returned; None for those of fewer ranks."""
    rank, found = int(os.environ["RANK"]), []
    gc.freeze()  # the collection at a run's end need not look at every module again
    for i, (world, name, arguments) in enumerate(jobs):
        if rank >= world:
            found.append(None)
            continue
        if rank == 0:
            print(f"job {i} at {time.monotonic():.1f} s: {name} {arguments}", flush=True)
        os.environ.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        store = f"file://{folder}/store_{i}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
        found.append(globals()[name](**arguments))
        dist.destroy_process_group()
    return found


def _config(argv: Sequence[str]):
    from shardwright.train.config import cli as config_options
    from shardwright.train.config import from_options

    parser = argparse.ArgumentParser()
    config_options.options(parser)
    return from_options.from_options(parser.parse_args(argv))


def train(argv: Sequence[str], stop_at: int | None = None) -> str:
    """What a rank of ``train-ckpt`` does; the error that it ended with, or nothing."""
    from shardwright.ckpt import CheckpointError
    from shardwright.train.errors import TrainError
    from shardwright.train.run import trainer as loop

    if stop_at is not None:
        _patch(loop.Trainer, "_asked_to_stop", lambda trainer: trainer.step >= stop_at)
    _draw_nothing()
    try:
        loop.main(_config(argv))
        return ""
    except (TrainError, CheckpointError) as error:
        _leave()
        return f"{type(error).__name__}: {error}"
    finally:
        _restore()


def train_command(argv: Sequence[str], fault: str | None = None) -> dict[str, Any]:
    """A rank of the command itself, as a launcher starts it: its exit code and what it said."""
    from shardwright.tools import train_ckpt

    def leave(code: int) -> None:
        raise SystemExit(code)

    _patch(os, "_exit", leave)  # this process has more jobs to do
    _patch(train_ckpt, "time", argparse.Namespace(sleep=lambda seconds: None))  # nobody ends it
    _draw_nothing()
    if fault is not None:
        FAULTS[fault]()
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code: object = train_ckpt.main(argv)
        except SystemExit as end:
            code = end.code
        finally:
            _restore()
    _leave()
    print(said.getvalue(), flush=True)
    return {"code": code, "said": said.getvalue()}


def _draw_nothing() -> None:
    """A curve takes longer than a run of these does; those of real launches are looked at."""
    from shardwright.train.run import metrics

    _patch(metrics, "draw_curve", lambda folder: None)


def train_poisoned(argv: Sequence[str], rank: int, after: int) -> str:
    """The same where a weight of a rank becomes NaN after a step."""

    def poison(trainer):
        with torch.no_grad():
            trainer.engine.named["decoder.layers.0.input_layernorm.weight"][0] = torch.nan

    _before_step(after, rank, poison)
    return train(argv)


def _leave() -> None:
    from shardwright.train.core.process import shutdown
    from shardwright.train.patches.megatron import import_megatron

    if import_megatron("parallel_state").model_parallel_is_initialized():
        shutdown()


@dataclasses.dataclass(frozen=True)
class Setup:
    """An engine of its own: a model folder in a layout."""

    folder: str
    tp: int = 1
    pp: int = 1
    sequence_parallel: bool = False
    distributed: bool = False
    precision: str = "fp32"
    weight_decay: float = 0.0

    def engine(self):
        """The engine, with the folder's weights loaded as a fine-tuning run loads them."""
        from shardwright.ckpt.checkpoint.config import load_model
        from shardwright.train.checkpoint.load import load
        from shardwright.train.checkpoint.rank_state import RankState
        from shardwright.train.config.schema import OptimizerSettings
        from shardwright.train.core.engine import Engine, EngineOptions
        from shardwright.train.core.layout import Layout
        from shardwright.train.core.process import initialize
        from shardwright.train.model.options import ModelOptions

        layout = Layout(self.tp, self.pp, self.sequence_parallel)
        options = ModelOptions(precision=self.precision, **CALM)  # type: ignore[arg-type]
        made = Engine(
            load_model(Path(self.folder) / "config.json"),
            initialize(layout, seed=3),
            layout,
            options,
            EngineOptions(distributed_optimizer=self.distributed),
        )
        made.attach_optimizer(OptimizerSettings(lr=LR, weight_decay=self.weight_decay))
        load(self.folder, RankState.of(made), weights_only=True)
        return made


LR = 1e-2
STEPS = 2  # optimizer steps that are compared with torch's


def batches(vocab: int) -> list[dict[str, torch.Tensor]]:
    """Four micro-batches of two rows; in some the loss of tokens is masked, more in each."""
    random = torch.Generator().manual_seed(11)
    found = []
    for i in range(4):
        text = torch.randint(0, vocab, (2, SEQ_LENGTH + 1), generator=random)
        mask = torch.ones(2, SEQ_LENGTH)
        mask[0, : 3 * i] = 0
        at = torch.arange(SEQ_LENGTH).expand(2, -1)
        found.append(
            {
                "tokens": text[:, :-1].contiguous(),
                "labels": text[:, 1:].contiguous(),
                "loss_mask": mask,
                "position_ids": at.contiguous(),
            }
        )
    return found


def steps_from(setup: Mapping[str, Any]) -> dict[str, list[float]]:
    """Some steps from a Hugging Face model: loss and gradient norm of each."""
    engine = Setup(**setup).engine()
    p = engine.parallel
    mine = batches(engine.model.sizes["vocab"])[p.dp_rank :: p.dp]
    found: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    for _ in range(STEPS):
        engine.zero_grad()
        found["loss"].append(engine.forward_backward(mine)[0])
        found["grad_norm"].append(engine.step().grad_norm)
    _leave()
    return found


def idle_step(setup: Mapping[str, Any]) -> dict[str, bool]:
    """A step without gradients after weights were loaded: whether each weight is what it was."""
    engine = Setup(**setup).engine()
    before = {name: p.detach().clone() for name, p in engine.named.items()}
    engine.zero_grad()
    engine.step()
    found = {name: torch.equal(before[name], p) for name, p in engine.named.items()}
    _leave()
    return found


def loaded(setup: Mapping[str, Any], source: str) -> dict[str, Any]:
    """What a rank holds of weights, masters and moments after a script's ``load_state``."""
    from shardwright.train.checkpoint.load import load
    from shardwright.train.checkpoint.rank_state import RankState

    engine = Setup(**setup).engine()
    held = RankState.of(engine)
    found = load(source, held)
    tensors = {h.live.key: h.tensor.clone() for h in [*held.weights(), *held.moments()]}
    _leave()
    return {"step": found.step, "optimizer": found.optimizer, "tensors": tensors}


def save_slowly(argv: Sequence[str], save_dir: str) -> dict[str, Any]:
    """Two saves whose writers wait until they are let go, with a step after each call."""
    import threading

    from shardwright.train.checkpoint import save
    from shardwright.train.run import trainer as loop

    trainer = loop.Trainer(_config(argv))
    folder = Path(save_dir)
    gate, held_up = threading.Event(), []
    write, wait = save.write_files, save.Saver.wait

    def wait_and_write(files):
        assert gate.wait(LONG_S)
        return write(files)

    def let_go_and_wait(saver):
        if saver.is_writing:
            held_up.append(saver)
            gate.set()
        wait(saver)

    def seen() -> dict[str, Any]:
        latest = folder / "latest"
        return {
            "latest": latest.read_text().strip() if latest.exists() else None,
            "complete": sorted(child.name for child in folder.glob("checkpoint-*")),
        }

    found: dict[str, Any] = {}
    save.write_files, save.Saver.wait = wait_and_write, let_go_and_wait
    try:
        trainer._one_step(1.0)
        trainer._save()
        found["first call back"] = seen()
        trainer._one_step(1.0)
        found["published early"] = trainer.saver.poll()
        found["while writing"] = seen()
        dist.barrier()
        trainer._save()
        found["held up"] = len(held_up) == 1
        found["second call back"] = seen()
        trainer.saver.wait()
        found["end"] = seen()
    finally:
        save.write_files, save.Saver.wait = write, wait
    trainer.metrics.close()
    _leave()
    return found


# --- real launches -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ended:
    """A launch that is over."""

    code: int
    said: str  # stdout and stderr together

    @property
    def errors(self) -> list[str]:
        """Its lines that say what was wrong."""
        return [line for line in self.said.splitlines() if line.startswith("error: ")]


class Launch:
    """``train-ckpt`` as a user starts it; with the run's fault its ranks are this file's."""

    def __init__(self, run: Run, place: Path, command: Sequence[str] = ()) -> None:
        self.folder, self.log = place / run.name, place / f"{run.name}.log"
        if not command:
            command = [sys.executable, "-m", "shardwright.tools.train_ckpt"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if run.fault is not None:
            command = [sys.executable, __file__]
            paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
            env |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), FAULT: run.fault}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *run.argv(place)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )

    def wait_for_steps(self, count: int) -> None:
        """Return as soon as the metrics have that many steps."""
        file, deadline = self.folder / "metrics.jsonl", time.monotonic() + LONG_S
        while not file.exists() or file.read_text().count('"loss"') < count:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def wait_for_words(self, words: str) -> None:
        """Return as soon as it has said them."""
        deadline = time.monotonic() + LONG_S
        while words not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def end(self) -> Ended:
        """Wait for the end; whatever still runs then is killed."""
        try:
            code = self.process.wait(LONG_S)
            return Ended(code, self.log.read_text())
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end after {LONG_S} s: {self.log.read_text()}") from None
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)  # the session that was started above
                self.process.wait()


# --- ranks that fail ---------------------------------------------------------------------------

FAULT = "TRAIN_RUNS_FAULT"


_patched: list[tuple[Any, str, Any]] = []  # what `_patch` replaced


def _patch(owner: Any, name: str, value: object) -> None:
    """Replace an attribute until `_restore`."""
    _patched.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def _restore() -> None:
    while _patched:
        setattr(*_patched.pop())


def _before_step(when: int, rank: int, act: Callable[[Any], None]) -> None:
    """Let a rank do something before the step after ``when``."""
    from shardwright.train.run import trainer as loop

    step = loop.Trainer._one_step

    def patched(trainer, *args):
        if trainer.step == when and trainer.parallel.rank == rank:
            act(trainer)
        step(trainer, *args)

    _patch(loop.Trainer, "_one_step", patched)


def _killed_while_saving() -> None:
    """Rank 3 is killed after step 5, while all ranks write the checkpoint of step 4."""
    from shardwright.train.checkpoint import save

    write = save.write_files

    def never_ends(files):
        found = write(files)
        if "checkpoint-4" in str(files.folder):
            time.sleep(2 * LONG_S)
        return found

    _patch(save, "write_files", never_ends)
    _before_step(5, 3, lambda trainer: os.kill(os.getpid(), signal.SIGKILL))


def _exits() -> None:
    """Rank 1 ends without a word after step 4, as a library's exit() would end it."""
    _before_step(4, 1, lambda trainer: os._exit(7))


def _raises() -> None:
    """Rank 1 meets a bug after step 4."""

    def die(trainer):
        raise RuntimeError("the bug of rank 1")

    _before_step(4, 1, die)


def _no_memory() -> None:
    """Rank 1 asks for more memory than there is after step 2."""
    _before_step(2, 1, lambda trainer: torch.empty(1 << 50))


def _no_memory_at_first() -> None:
    """The same in a pass of rank 0, the first stage; its process lives on, so others wait."""
    from shardwright.train.core import engine

    _wait_briefly(2, 5.0)
    _in_call(0, engine, "forward_step", lambda: torch.empty(1 << 50), when=2)


def _wait_briefly(when: int, seconds: float) -> None:
    """From the step after ``when`` on collectives give up after ``seconds``.

    Not from the start: on a busy machine ranks that are well wait for each other as long.
    """
    from torch.distributed import distributed_c10d as c10d

    timeout, wait = datetime.timedelta(seconds=seconds), dist.Work.wait

    def briefly(work, *given):
        """What one rank sends another keeps the time with which the two were connected."""
        try:
            work.get_future()  # collectives have one
        except RuntimeError:
            given = (timeout,)
        return wait(work, *given)

    def shorten(trainer):
        for group in c10d._world.pg_map:
            c10d._set_pg_timeout(timeout, group)
        _patch(dist.Work, "wait", briefly)

    _before_step(when, int(os.environ["RANK"]), shorten)


def _stays_away() -> None:
    """Rank 1 enters no collective after step 3."""
    _wait_briefly(3, 20.0)
    _before_step(3, 1, lambda trainer: time.sleep(2 * LONG_S))


def _comes_late() -> None:
    """Rank 1 enters no collective after step 3 until rank 0 has given up."""
    from shardwright.train.run import trainer as loop

    def wait(trainer):
        deadline = time.monotonic() + LONG_S
        while not (trainer.save_dir / "gave up").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    _wait_briefly(3, 5.0)
    _before_step(3, 1, wait)
    step = loop.Trainer._one_step

    def patched(trainer, *args):
        try:
            step(trainer, *args)
        except RuntimeError:
            (trainer.save_dir / "gave up").touch()
            raise

    _patch(loop.Trainer, "_one_step", patched)


def _is_patient() -> None:
    """Ranks but the first leave its error to it however long it takes, not for ten seconds."""
    from shardwright.tools import train_ckpt

    sleep = time.sleep
    _patch(train_ckpt, "time", argparse.Namespace(sleep=lambda seconds: sleep(2 * LONG_S)))


def _holds_still() -> None:
    """No rank takes another step after the first."""
    _before_step(1, int(os.environ["RANK"]), lambda trainer: time.sleep(2 * LONG_S))


def _in_call(rank: int, owner: Any, name: str, act: Callable[[], object], when: int) -> None:
    """A rank does something in its first call of a function in the step after ``when``."""
    call = getattr(owner, name)
    due: list[bool] = []

    def patched(*args, **named):
        if due:
            due.clear()
            act()
        return call(*args, **named)

    _patch(owner, name, patched)
    _before_step(when, rank, lambda trainer: due.append(True))


class _Clock:
    """A clock that only moves when it is told to: no verdict hangs on how busy a machine is."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleep = time.sleep

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter

    def advance(self, seconds: float) -> None:
        self.now += seconds


def _clock() -> _Clock:
    """The clock of everything that measures a step, a phase, a pass or a save."""
    from shardwright.train.checkpoint import save
    from shardwright.train.run import trainer as loop
    from shardwright.train.run import watch

    made = _Clock()
    for module in (watch, loop, save):
        _patch(module, "time", made)
    return made


def _costs(clock: _Clock, of_layer: float, of_head: float) -> None:
    """What a pass forward takes on this rank: seconds of each layer, and of the output layer."""
    from shardwright.train.core import engine

    step = engine.forward_step

    def slow(run, batches, chunk):
        model = chunk.module
        clock.advance(of_layer * len(model.decoder.layers) + of_head * model.post_process)
        return step(run, batches, chunk)

    _patch(engine, "forward_step", slow)


def _slow_once(calls: Mapping[int, tuple[Any, str]]) -> None:
    """A function takes 1.6 s once, by rank, when it is known what a usual step takes."""
    clock = _clock()
    for rank, (owner, name) in calls.items():
        _in_call(rank, owner, name, lambda: clock.advance(1.6), when=7)
    _costs(clock, 0.01, 0.0)


def _slow_data() -> None:
    """Rank 1 waits for its samples once; its tp neighbour waits for it in its pass."""
    from shardwright.train.core import engine
    from shardwright.train.data import samples as data

    _slow_once({0: (engine, "forward_step"), 1: (data.Batches, "__next__")})


def _slow_forward() -> None:
    """Rank 1 computes slowly once; a tp neighbour waits within its pass, others outside of it."""
    from shardwright.train.core import engine
    from shardwright.train.patches.megatron import import_megatron

    computes = (engine, "forward_step")
    waits = (import_megatron("distributed"), "finalize_model_grads")
    with_tp = int(os.environ["WORLD_SIZE"]) == 4
    _slow_once({0: computes if with_tp else waits, 1: computes, 2: waits, 3: waits})


def _slow_network() -> None:
    """No rank works longer, but once gradients take long to be exchanged."""
    from shardwright.train.patches.megatron import import_megatron

    grads = (import_megatron("distributed"), "finalize_model_grads")
    _slow_once(dict.fromkeys(range(4), grads))


def _known_costs() -> None:
    """Passes forward take 10 ms for each layer, and for the output layer as long as for four."""
    _costs(_clock(), 0.01, 0.04)


def _slow_disk() -> None:
    """A rank's files of a checkpoint take 2 s longer than the steps until the next one."""
    import threading

    from shardwright.train.checkpoint import save

    clock, write, wait, gate = _clock(), save.write_files, save.Saver.wait, threading.Event()

    def slow(files):
        assert gate.wait(LONG_S)
        clock.advance(2.0)
        return write(files)

    def waiting(saver):
        gate.set()
        wait(saver)
        gate.clear()

    _patch(save, "write_files", slow)
    _patch(save.Saver, "wait", waiting)
    _costs(clock, 0.01, 0.0)


def _full_disk() -> None:
    """Rank 1 finds no room for its files of step 4."""
    from shardwright.train.checkpoint import save

    write = save.write_files

    def full(files):
        if os.environ["RANK"] == "1" and "checkpoint-4" in str(files.folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(files.folder))
        return write(files)

    _patch(save, "write_files", full)


FAULTS: Mapping[str, Callable[[], None]] = {
    "killed while saving": _killed_while_saving,
    "exits": _exits,
    "raises": _raises,
    "no memory": _no_memory,
    "no memory at first": _no_memory_at_first,
    "stays away": _stays_away,
    "comes late": _comes_late,
    "holds still": _holds_still,
    "is patient": _is_patient,
    "slow data": _slow_data,
    "slow forward": _slow_forward,
    "slow network": _slow_network,
    "known costs": _known_costs,
    "slow disk": _slow_disk,
    "full disk": _full_disk,
}


def _main() -> int:
    """The launcher, whose ranks are this file too; or such a rank."""
    from shardwright.tools import train_ckpt

    if "RANK" in os.environ:
        FAULTS[os.environ[FAULT]]()
        return train_ckpt.main()
    from shardwright.train.run import launch as launcher

    supervise = launcher._supervise

    def of_ours(command: list[str], environment: dict[str, str], stop: Path) -> int:
        assert command[-2:] == ["-m", "shardwright.tools.train_ckpt"]
        return supervise([*command[:-2], __file__], environment, stop)

    launcher._supervise = of_ours
    return train_ckpt.main()


if __name__ == "__main__":
    sys.exit(_main())
