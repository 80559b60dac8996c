"""``train-ckpt`` as processes: signals, ranks that die, and what it refuses.

Real launches come first; the runs that they are compared with, and the refusals that only ranks
can make, are then made by one set of ranks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_runs import Ended, Job, Launch, Run, hf_model, in_ranks, job, losses, make_place, rows

from shardwright.ckpt import RunOptions, verify
from shardwright.tools import train_ckpt
from shardwright.train.run import metrics

QUIET = RunOptions(quiet=True, workers=1)
TP2 = {"tp": 2, "save_interval": None, "lr_decay_style": "constant", "steps": 100_000}
TP2PP2 = {"tp": 2, "pp": 2}

# What only a rank can find out: name -> (run, what its error says).
REFUSED: Mapping[str, tuple[Run, list[str]]] = {
    "a checkpoint of a shallower model": (
        Run("r1", world=2, options={"tp": 2}, resume="shallow"),
        ["shallow/checkpoint-0", "layer is 2, this run has 4", "another model"],
    ),
    "a checkpoint of another family": (
        Run("r2", world=2, options={"pp": 2}, resume="other"),
        ["other/checkpoint-0", "gpt2", "llama"],
    ),
    "an empty data file": (
        Run("r3", world=2, options={"tp": 2, "data": "empty.txt"}),
        ["empty.txt", "is empty"],
    ),
    "less data than a sequence": (
        Run("r4", world=1, options={"data": "short.txt"}),
        ["has 6 tokens", "needs 17"],
    ),
    "other data than the checkpoint's": (
        Run("r5", world=1, options={"data": "eval.txt"}, resume="whole/checkpoint-2"),
        ["another order of samples", "pass the same data"],
    ),
    "another seed than the checkpoint's": (
        Run("r6", world=1, options={"seed": 5}, resume="whole/checkpoint-2"),
        ["--seed 1234 in the checkpoint, 5 now"],
    ),
    "an optimizer that the checkpoint has no state of": (
        Run(
            "r7",
            world=1,
            options={"optimizer": "sgd", "sgd_momentum": 0.9},
            resume="whole/checkpoint-2",
        ),
        ["has no momentum_buffer"],
    ),
    "a checkpoint that was cut": (
        Run("r8", world=2, options={"tp": 2}, resume="cut"),
        ["model_tp_0_pp_0.safetensors", "bytes"],
    ),
    # Each rank checks its share of the files, and all end with what any of them found.
    "a checkpoint whose weights have a flipped bit": (
        Run("r11", world=2, options={"tp": 2}, resume="flipped model"),
        ["flipped model", "damaged", "model_tp_0_pp_0.safetensors", "--no-verify-source"],
    ),
    "a checkpoint whose moments have a flipped bit": (
        Run("r12", world=2, options={"tp": 2}, resume="flipped optimizer"),
        ["flipped optimizer", "damaged", "optimizer_tp_0_pp_0.safetensors", "--no-verify-source"],
    ),
    "an optimizer that cannot be read": (
        Run("r10", world=1, resume="bare"),
        ["optimizer_tp_0_pp_0.safetensors", "are not read", "MEGATRON_LM_NO_LOAD_OPTIM=true"],
    ),
    "a vocabulary that the data exceed": (
        Run("r9", "narrow", world=1),
        ["token id", "100 ids"],
    ),
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Where everything is; the real launches; what the ranks of each job returned."""

    place: Path
    ended: Mapping[str, Ended]
    returned: Mapping[str, list[Any]]

    def __truediv__(self, name: str) -> Path:
        return self.place / name


def _latest(folder: Path) -> int:
    return int((folder / "latest").read_text().strip().removeprefix("checkpoint-"))


# Under nohup there is none to close, and a run does not end with it.
_CLOSED = signal.SIGTERM if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else signal.SIGHUP


def _launches(place: Path) -> dict[str, Ended]:
    """What is started as a user starts it; one after the other, since two cores are few."""
    found = {}
    for name, number, resume in [
        ("ctrl-c", signal.SIGINT, None),
        ("term", signal.SIGTERM, "signals"),
        ("closed terminal", _CLOSED, "signals"),
    ]:
        before = len(rows(place / "signals")) if resume else 0
        launch = Launch(Run("signals", options=TP2, resume=resume), place)
        launch.wait_for_steps(before + 2)
        launch.process.send_signal(number)
        found[name] = launch.end()
    found["killed"] = Launch(
        Run("killed", options=TP2PP2, fault="killed while saving"), place
    ).end()
    refused, _ = REFUSED["a checkpoint of a shallower model"]
    refused = dataclasses.replace(refused, fault="is patient")
    found["refused"] = Launch(refused, place).end()
    return found


def _jobs(place: Path) -> dict[str, Job]:
    """What the launches are compared with, and refusals."""
    stop_at = _latest(place / "signals")
    runs = [
        Run("whole", options=TP2PP2),
        Run("unkilled", options=TP2PP2, resume="killed"),
        Run("unsignalled", world=2, options=TP2, stop_at=stop_at),
        Run("blown", options={**TP2PP2, "steps": 2}),
        Run("blown", options={**TP2PP2, "lr": 1e30}, resume="blown"),
        Run("done", world=1, options={"steps": 2}),
        Run("done", world=1, options={"steps": 1}, resume="done"),
        Run("bad weight", "poisoned", world=2, options={"pp": 2}),
    ]
    jobs = {f"{i} {run.name}": job(run, place) for i, run in enumerate(runs)}
    argv = Run("dp2", world=2).argv(place)
    jobs["poisoned"] = (2, "train_poisoned", {"argv": argv, "rank": 1, "after": 2})
    for name, (run, _) in REFUSED.items():
        options = {**run.options}
        if "data" in options:
            options["data"] = place / str(options["data"])
        jobs[name] = job(dataclasses.replace(run, options=options), place)
    return jobs


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Outcome:
    place = make_place(tmp_path_factory.mktemp("commands"))
    (place / "empty.txt").write_text("")
    (place / "short.txt").write_text("short")
    llama = json.loads((place / "llama.json").read_text())
    (place / "narrow.json").write_text(json.dumps({**llama, "vocab_size": 100}))
    poisoned = hf_model(place, "llama-bad")
    poisoned.rename(place / "poisoned")
    weights = load_file(place / "poisoned" / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(weights, place / "poisoned" / "model.safetensors", {"format": "pt"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWRIGHT_CACHE", str(place / "cache"))
        first = [
            Run("shallow", "shallow", 1, stop_at=0),
            Run("other", "gpt2", 1, stop_at=0),
            Run("cut", "llama", 1, stop_at=0),
        ]
        assert in_ranks(place / "ranks before", [job(run, place) for run in first]) == [[""]] * 3
        for kind in ("model", "optimizer"):
            damaged = place / f"flipped {kind}"
            shutil.copytree(place / "cut" / "checkpoint-0", damaged)
            _flip_last_byte(damaged / f"{kind}_tp_0_pp_0.safetensors")
        bare = place / "bare"
        shutil.copytree(place / "cut" / "checkpoint-0", bare)
        (bare / "checkpoint.json").unlink()
        save_file({"of": torch.zeros(2)}, bare / "optimizer_tp_0_pp_0.safetensors")
        cut = place / "cut" / "checkpoint-0" / "model_tp_0_pp_0.safetensors"
        os.truncate(cut, cut.stat().st_size - 100)
        ended = _launches(place)
        jobs = _jobs(place)
        returned = dict(zip(jobs, in_ranks(place / "ranks", list(jobs.values())), strict=True))
    return Outcome(place, ended, returned)


def _flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _job(made: Outcome, name: str) -> list[str]:
    """What the ranks of the last job of that name returned."""
    return [said for key, said in made.returned.items() if key.partition(" ")[2] == name][-1]


# --- signals -----------------------------------------------------------------------------------


def test_signals_end_a_run_well_with_a_checkpoint(made):
    steps = [len(losses(made / "signals")), _latest(made / "signals")]
    assert steps[0] == steps[1] < 100_000
    for name in ("ctrl-c", "term", "closed terminal"):
        ended = made.ended[name]
        assert ended.code == 0, ended.said
        assert "stopping after this step" in ended.said
        assert "which is saved; continue with --resume" in ended.said
        assert "Traceback" not in ended.said
    saved = sorted(child.name for child in (made / "signals").glob("checkpoint-*"))
    assert len(saved) == 3


def test_a_run_that_signals_stopped_goes_on_to_the_bit(made):
    assert _job(made, "unsignalled") == ["", ""]
    assert rows(made / "signals") == rows(made / "unsignalled")
    assert verify(made / "signals", made / "unsignalled", run=QUIET).differences == []


def test_a_resume_that_has_nothing_to_do_leaves_the_checkpoint(made):
    assert _job(made, "done") == [""]
    saved = json.loads((made / "done" / "checkpoint-2" / "checkpoint.json").read_text())
    assert saved["schedule"]["decay_steps"] == 2


def test_a_run_leaves_curves_and_metrics(made):
    folder = made / "signals"
    assert (folder / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert list(row) == ["step", "loss", "lr", "grad_norm", "tokens_per_s"]
    assert all(shown in made.ended["term"].said for shown in ("tok/s=", "TF/s=", "GiB=", "norm="))


@pytest.mark.parametrize("steps", [1, 6, 60])
def test_a_loss_curve_has_whole_steps_and_shows_short_runs(steps, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **named: drawn.append(figure))
    rows = [{"step": i, "loss": 5.0 / i} for i in range(1, steps + 1)]
    text = "".join(json.dumps(row) + "\n" for row in [*rows, {"step": steps, "eval_loss": 2.0}])
    (tmp_path / "metrics.jsonl").write_text(text)
    metrics.draw_curve(tmp_path)
    (axes,) = drawn[0].axes
    assert all(tick == int(tick) for tick in axes.get_xticks())
    line, _ = axes.get_lines()
    assert list(line.get_xdata()) == list(range(1, steps + 1))
    assert (line.get_marker() == "") == (steps == 60)
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["training", "validation"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("optimizer step", "loss (nats per token)")


# --- ranks that die ----------------------------------------------------------------------------


def test_a_rank_killed_during_a_save_ends_the_run_and_leaves_the_last_good_checkpoint(made):
    ended = made.ended["killed"]
    assert ended.code == 1
    assert ended.errors == ["error: rank 3 ended by signal 9"], ended.said
    assert "Traceback" not in ended.said
    assert len(losses(made / "killed")) >= 5  # 5 before; the resumed run has written on
    assert "saved" in ended.said
    assert "checkpoint-4" not in ended.said.replace(".checkpoint-4", "")


def test_a_run_goes_on_from_the_last_good_checkpoint_to_the_bit(made):
    assert _job(made, "whole") == _job(made, "unkilled") == [""] * 4
    assert rows(made / "unkilled") == rows(made / "whole")[2:]
    assert verify(made / "unkilled", made / "whole", run=QUIET).differences == []
    assert _latest(made / "killed") == 2
    assert [child.name for child in (made / "killed").glob("checkpoint-*")] == ["checkpoint-2"]


# --- numbers that are not ----------------------------------------------------------------------


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_last_checkpoint(made):
    said = _job(made, "blown")
    assert len(set(said)) == 1
    assert "step 4: the loss is nan" in said[0] or "the gradient norm is" in said[0], said[0]
    assert str(made / "blown" / "checkpoint-2") in said[0]
    assert _latest(made / "blown") == 2
    assert [child.name for child in (made / "blown").glob("checkpoint-*")] == ["checkpoint-2"]
    assert verify(made / "blown", run=QUIET).differences == []


def test_a_bad_weight_is_found_in_the_first_step(made):
    for said in _job(made, "bad weight"):
        assert said.startswith("TrainError: step 1: the loss is nan (first on rank 1 of 2)"), said
        assert "the last checkpoint is none" in said


def test_the_rank_that_has_the_fault_is_named(made):
    for said in made.returned["poisoned"]:
        assert said.startswith("TrainError: step 3: the loss is nan (first on rank 1 of 2)"), said
        assert str(made / "dp2" / "checkpoint-2") in said


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_ranks_refuse_with_one_line(name, made):
    run, parts = REFUSED[name]
    said = made.returned[name]
    assert len(said) == run.world
    for line in said:
        assert line, "it ran"
        assert "\n" not in line
        assert [part for part in parts if part not in line] == [], line


def test_a_launch_says_a_refusal_once(made):
    ended = made.ended["refused"]
    assert ended.code == 1
    assert len(ended.errors) == 1, ended.said
    assert "another model" in ended.errors[0]
    # a CUDA build of torch that finds a toolkit and no driver says so in each process
    lines = [line for line in ended.said.splitlines() if "No CUDA runtime" not in line]
    said = [line for line in lines if not line.startswith("starting ")]
    assert len(said) == 1, ended.said


BEFORE_RANKS: Mapping[str, tuple[dict[str, object], list[str]]] = {
    "heads": ({"tp": 3}, ["4 query heads do not divide over tp=3; tp can be 1, 2, 4"]),
    "world": ({"tp": 2, "pp": 2, "nproc": 6}, ["6 processes do not divide", "= 4"]),
    "stages": ({"pp": 3}, ["4 layers do not divide over pp=3", "--pp-layers"]),
    "named stages": ({"pp": 2, "pp_layers": "1,2"}, ["3 layers", "has 4"]),
    "long sequences": ({"seq_length": 65}, ["65", "64 positions"]),
    "batch": ({"global_batch_size": 5}, ["global batch 5", "micro-batch 2"]),
    "batch of ranks": ({"tp": 2, "nproc": 8}, ["global batch 4", "4 data-parallel ranks"]),
    "sequence parallel": ({"tp": 2, "sequence_parallel": True, "seq_length": 15}, ["15", "tp=2"]),
    "no such data": ({"data": "/nowhere/data.txt"}, ["/nowhere/data.txt"]),
    "no such model": ({"model": "/nowhere/model"}, ["/nowhere/model"]),
    "nothing to resume": ({"resume": True}, ["no checkpoint yet"]),
    "no steps": ({"steps": None}, ["--steps"]),
    "no such checkpoint": ({"resume": "/nowhere/checkpoint-3"}, ["/nowhere/checkpoint-3"]),
    "interval without folder": ({"save_dir": None}, ["--save-interval 2: there is no --save-dir"]),
}


@pytest.mark.parametrize("name", BEFORE_RANKS)
def test_contradictions_are_refused_before_a_rank_starts(name, tmp_path, capsys, monkeypatch):
    place = make_place(tmp_path)
    options, parts = BEFORE_RANKS[name]
    monkeypatch.setattr(
        "shardwright.train.run.launch.launch", lambda *args: pytest.fail("it started")
    )
    assert train_ckpt.main(Run("out", options=options).argv(place)) == 1
    lines = capsys.readouterr().err.splitlines()
    said = [line for line in lines if not line.startswith("starting ")]
    assert len(said) == 1, said
    assert said[0].startswith("error: ")
    assert [part for part in parts if part not in said[0]] == [], said[0]
    assert not (place / "out").exists()


# --- slow: more ways to die --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "wanted"),
    [("exits", "error: rank 1 ended with exit code 7"), ("raises", "the bug of rank 1")],
)
@pytest.mark.parametrize("options", [TP2PP2, {"tp": 4}, {"nproc": 4}], ids=str)
def test_a_rank_that_ends_takes_all_with_it(fault, wanted, options, tmp_path, monkeypatch):
    place = make_place(tmp_path)
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(place / "cache"))
    if "nproc" in options:
        options = {**options, "micro_batch_size": 1}
    ended = Launch(Run("out", options=options, fault=fault), place).end()
    assert ended.code == 1
    assert wanted in ended.said
    assert ended.said.count("Traceback") == (fault == "raises")
    assert _latest(place / "out") == 2


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tmp_path, monkeypatch):
    place = make_place(tmp_path)
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(place / "cache"))
    launch = Launch(Run("out", options=TP2PP2, fault="holds still"), place)
    launch.wait_for_steps(1)
    launch.process.send_signal(signal.SIGINT)
    launch.wait_for_words("stopping after this step")
    launch.process.send_signal(signal.SIGINT)
    ended = launch.end()
    assert ended.code == 1
    assert "Traceback" not in ended.said
    assert not list((place / "out").glob("checkpoint-*"))


@pytest.mark.slow
def test_torchrun_starts_ranks_and_its_workers_save_on_sigterm(tmp_path, monkeypatch):
    place = make_place(tmp_path)
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(place / "cache"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = Run("out", options=TP2)
    launch = Launch(run, place, [*torchrun, "-m", "shardwright.tools.train_ckpt"])
    launch.wait_for_steps(2)
    launch.process.send_signal(signal.SIGTERM)
    launch.end()
    assert _latest(place / "out") == len(losses(place / "out"))
    assert verify(place / "out", run=QUIET).differences == []
