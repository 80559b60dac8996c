"""What the trainer's saves hold: both spellings, frozen stages, and a script's own model."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import failing_calls
import pytest
import torch
import trainer_save
from fixtures_safety import LONG_S, content, names, refused
from train_helpers import launch

from shardwright.ckpt import open_checkpoint, reshard, verify
from shardwright.train.core.optim import OptimizerView
from shardwright.train.errors import TrainError

TESTS = Path(__file__).resolve().parent


def saved(folder: str) -> dict[str, Any]:
    """In two ranks, a pipeline stage each: saves of all kinds, below ``folder``."""
    from train_runs import CONFIGS
    from transformers import AutoConfig, AutoModelForCausalLM

    from shardwright.ckpt.checkpoint.config import model_from
    from shardwright.train.checkpoint import hf_output, meeting
    from shardwright.train.checkpoint import original as originals
    from shardwright.train.checkpoint import save as save_module
    from shardwright.train.checkpoint.hf_weights import take
    from shardwright.train.checkpoint.load import load
    from shardwright.train.checkpoint.rank_state import RankState
    from shardwright.train.checkpoint.save import Saver
    from shardwright.train.config.schema import OptimizerSettings
    from shardwright.train.core.engine import Engine, EngineOptions
    from shardwright.train.core.layout import Layout
    from shardwright.train.core.process import initialize
    from shardwright.train.model.options import ModelOptions

    place, said = Path(folder), []
    layout = Layout(pp=2)
    parallel = initialize(layout, seed=1)
    config = CONFIGS["shallow"]
    model = model_from(config, "x")
    torch.manual_seed(3)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    sides = [_config(config)] if parallel.rank == 0 else []

    def held_of(**options: Any) -> tuple[Any, RankState]:
        engine = Engine(model, parallel, layout, ModelOptions(), EngineOptions(), **options)
        engine.attach_optimizer(OptimizerSettings())
        held = RankState.of(engine)
        take(theirs, held)
        return engine, held

    engine, held = held_of()
    saver = Saver(held, log=said.append, pointer=None)
    for name, safe in (("safe", True), ("bin", False)):
        saver.save(place / name, 3, {}, sides, safe=safe, into=True)
        assert (place / name).is_dir(), "it is there on return"
        (place / name / f"rank{parallel.rank}.txt").write_text("mine")
        saver.wait()
    before = {k: p.detach().clone() for k, p in engine.named.items()}
    for param in engine.named.values():
        param.data.zero_()
    load(place / "bin", held)
    assert all(torch.equal(p, before[k]) for k, p in engine.named.items())

    # a Hugging Face model in a folder of the user's, in many files and then in one
    out = place / "model"
    if parallel.rank == 0:
        out.mkdir()
        (out / "notes.txt").write_text("mine")
        (out / "config.json").write_text("{}")
    how: dict[str, Any] = {"safe": True, "log": said.append}
    hf_output.save_model(held, out, 3, sides, max_shard_bytes=20_000, **how)
    parts = sorted(child.name for child in out.glob("model-*")) if parallel.rank == 0 else []
    hf_output.save_model(held, out, 3, sides, max_shard_bytes=10**9, **how)
    model_refused = ""
    if parallel.rank == 0:
        (place / "theirs").mkdir()
        (place / "theirs/pytorch_model.bin").write_text("mine")
    try:
        hf_output.save_model(held, place / "theirs", 3, sides, max_shard_bytes=10**9, **how)
    except TrainError as error:
        model_refused = str(error)

    # the script's own model
    original = originals.Original(theirs, held)
    shapes = {n: (tuple(p.shape), id(p)) for n, p in theirs.named_parameters()}
    original.release()
    bytes_held = sum(p.untyped_storage().nbytes() for p in theirs.parameters())
    assert {n: (tuple(p.shape), id(p)) for n, p in theirs.named_parameters()} == shapes
    refused = []
    for use in (
        lambda: theirs.save_pretrained(place / "never"),
        lambda: theirs(input_ids=torch.zeros(1, 4, dtype=torch.long)),
    ):
        try:
            use()
        except TrainError as error:
            refused.append(str(error))
    for param in engine.named.values():
        param.data.mul_(2)  # trained
    original.fill()
    if parallel.rank == 0:
        theirs.save_pretrained(place / "trained")
    meetings, alone = meeting.Meetings(held), []
    for _ in range(3):
        meetings.meet("together")
    meeting.WAIT_SECONDS = 0.3
    for goes_on in (False, True):
        try:
            if parallel.rank == 0:
                meetings.meet("unwrap_model")
            elif goes_on:
                meetings.announce("wait_for_everyone")
            else:
                meetings._notes.next()
        except TrainError as error:
            alone.append(str(error))

    # the first stage is frozen
    _, frozen = held_of(trained=lambda name: "layers.1." in name or "final" in name)
    other = Saver(frozen, log=said.append)
    other.save(place / "frozen", 0, {"param_groups": [{"lr": 0.1}]}, sides)
    other.wait()
    found = load(place / "frozen", frozen)

    # the process ends while a save is under way: no collective any more
    saver.save(place / "ended", 4, {}, sides, into=True)
    saver.end()
    if parallel.rank == 1:
        save_module.write_files = _fails
    saver.save(place / "lost", 5, {}, sides, into=True)
    lost = ""
    try:
        saver.end()
    except TrainError as error:
        lost = str(error)
    return {
        "said": said, "refused": refused, "alone": alone, "bytes": bytes_held, "lost": lost,
        "optimizer": found.optimizer, "parts": parts, "model_refused": model_refused,
    }  # fmt: skip


def _fails(files: Any) -> None:
    raise OSError(28, "No space left on device")


def _config(config: Any) -> Any:
    from shardwright.ckpt.model.manifest import SideFile

    return SideFile("config.json", text=json.dumps(dict(config)))


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, list[Any]]:
    place = tmp_path_factory.mktemp("saves")
    return place, launch("test_saves:saved", 2, place / "ranks", str(place))


def test_bin_files_have_the_guides_names_and_the_values_of_the_safetensors(ran):
    place = ran[0]
    files = [name for name in names(place / "bin") if name.endswith(".bin")]
    assert files == [
        "optimizer_tp_0_pp_0.bin", "optimizer_tp_0_pp_1.bin",
        "pytorch_model_tp_0_pp_0.bin", "pytorch_model_tp_0_pp_1.bin",
    ]  # fmt: skip
    report = verify(place / "safe", place / "bin")
    assert report.differences == []
    for name in files:
        found = torch.load(place / "bin" / name, weights_only=True)
        assert found
        assert all(isinstance(value, torch.Tensor) for value in found.values())
    assert verify(place / "bin").differences == []  # their CRC-32s and digests as well


def test_a_script_may_write_into_the_folder_as_soon_as_save_returns(ran):
    place = ran[0]
    for name in ("safe", "bin"):
        assert {"rank0.txt", "rank1.txt", "checkpoint.json"} <= set(names(place / name))
        assert not [child for child in names(place / name) if child.startswith(".")]
    assert "latest" not in names(place / "ranks")


def test_no_pointer_is_written_beside_a_scripts_folder(ran):
    assert (ran[0] / "latest").read_text() == "frozen\n"  # the command's way, in this test


def test_a_saved_model_replaces_the_one_that_was_saved_there_and_nothing_else(ran):
    from safetensors.torch import load_file

    place, ranks = ran
    out = place / "model"
    assert len(ranks[0]["parts"]) > 1
    assert names(out) == [".shardwright.files", "config.json", "model.safetensors", "notes.txt"]
    assert (out / "config.json").read_text() == "{}"
    assert any("config.json: stays as it is" in line for line in ranks[0]["said"])
    logical, found = open_checkpoint(place / "safe"), load_file(out / "model.safetensors")
    assert all(torch.equal(tensor, logical[name].torch()) for name, tensor in found.items())
    for rank in ranks:
        assert "holds pytorch_model.bin, which save_model has not written" in rank["model_refused"]
    assert names(place / "theirs") == ["pytorch_model.bin"]


def test_an_original_holds_no_weights_and_says_so_until_it_gets_the_trained_ones(ran):
    from safetensors.torch import load_file

    place, (first, second) = ran
    assert first["bytes"] < 1000
    for rank in (first, second):
        assert len(rank["refused"]) == 2
        assert "LlamaForCausalLM.state_dict: this model holds no weights" in rank["refused"][0]
        assert "unwrap_model" in rank["refused"][1]
    assert not (place / "never/model.safetensors").exists()
    trained = load_file(place / "trained/model.safetensors")
    logical = open_checkpoint(place / "safe")
    assert trained.keys() == {name for name in logical if "/" not in name}
    for name, tensor in trained.items():
        assert torch.equal(tensor, logical[name].torch() * 2), name


def test_a_call_of_one_rank_alone_ends_with_an_error(ran):
    first, second = ran[1]
    assert "unwrap_model: was not called on rank 1 within" in first["alone"][0]
    assert "while rank 1 is at wait_for_everyone" in first["alone"][1]
    assert second["alone"] == []


def test_a_process_that_ends_publishes_what_every_rank_has_written_without_a_collective(ran):
    place, (first, second) = ran
    assert verify(place / "ended").differences == []
    ended = open_checkpoint(place / "ended")
    assert ended.step == 4
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(ended[name].torch(), open_checkpoint(place / "safe")[name].torch() * 2)
    assert "lost could not be written (rank 1: [Errno 28] No space left on device)" in first["lost"]
    assert second["lost"] == ""
    assert not (place / "lost/checkpoint.json").exists()


SCRIPT = """
import os, signal, sys, threading, time
from pathlib import Path
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup, which ignores it
import trainer_save
from shardwright.train.checkpoint import rank_files, save

write = save.write_files
save.write_files = lambda files: (time.sleep(1), write(files))[1]
how, folder = sys.argv[1], Path(sys.argv[2])
trainer_save.save(folder, 1, wait=False)
assert not (folder / "checkpoint-1/checkpoint.json").exists()
print("begun", flush=True)
if how == "exception":
    raise KeyError("of the script")
if how == "exit":
    sys.exit(3)
if how == "stuck":  # in a call that lets no handler run: a collective whose other ranks are gone
    import ctypes
    while True:
        ctypes.CDLL(None).sem_wait(ctypes.create_string_buffer(64))
threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("how", "number", "code"),
    [("exception", 0, 1), ("exit", 0, 3), ("wait", signal.SIGTERM, -signal.SIGTERM),
     ("stuck", signal.SIGTERM, -signal.SIGTERM), ("wait", signal.SIGHUP, -signal.SIGHUP),
     ("wait", signal.SIGINT, -signal.SIGINT)],
)  # fmt: skip
def test_an_exception_an_exit_and_a_signal_publish_the_save_under_way(how, number, code, tmp_path):
    argv = [sys.executable, "-c", SCRIPT, how, str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as run:
        assert run.stdout.readline() == "begun\n", run.stderr.read()
        if number:
            run.send_signal(number)
        _, errors = run.communicate(timeout=LONG_S)
    assert run.returncode == code, errors
    assert names(tmp_path / "run") == ["checkpoint-1", "latest"]
    (tmp_path / "run/checkpoint-1/config.json").write_text(json.dumps(trainer_save.CONFIG))
    assert verify(tmp_path / "run/checkpoint-1").differences == []


def test_a_save_that_is_lost_at_the_end_of_a_process_is_told_by_its_exit_code(tmp_path):
    script = SCRIPT.replace("write(files))[1]", "os.stat('/nothing/there'))[1]")
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"}
    script = script[: script.index('if how == "exception"')]
    done = subprocess.run(
        [sys.executable, "-c", script, "end", str(tmp_path / "run")], env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "checkpoint-1 could not be written (rank 0: [Errno 2]" in done.stderr
    assert names(tmp_path) == []


def test_a_checkpoint_whose_first_stage_is_frozen_is_read_by_everything(ran, tmp_path):
    place, ranks = ran
    assert "optimizer_tp_0_pp_0.safetensors" in names(place / "frozen")
    assert verify(place / "frozen").differences == []
    assert all(rank["optimizer"] for rank in ranks)
    reshard(place / "frozen", tmp_path / "one", tp=2, pp=1)
    logical, whole = open_checkpoint(tmp_path / "one"), open_checkpoint(place / "frozen")
    assert set(logical) == set(whole)
    moments = {name for name in whole if name.startswith("exp_avg/")}
    assert "exp_avg/model.layers.1.mlp.down_proj.weight" in moments
    assert not [name for name in moments if "layers.0" in name or "embed" in name]


def test_a_save_before_the_first_step_leaves_sgd_with_dampening_as_it_is():
    def stepped(*, saved: bool) -> list[float]:
        weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
        inner = torch.optim.SGD([weight], lr=0.1, momentum=0.9, dampening=0.5)
        view = OptimizerView(SimpleNamespace(optimizer=inner))
        for gradient in (0.5, 0.25):
            if saved:
                view.init_state()
            weight.grad = torch.full((2,), gradient)
            inner.step()
        return weight.tolist()

    assert stepped(saved=True) == stepped(saved=False)


def test_an_older_checkpoint_without_the_empty_file_of_a_frozen_stage_is_read(ran, tmp_path):
    shutil.copytree(ran[0] / "frozen", tmp_path / "old")
    (tmp_path / "old/optimizer_tp_0_pp_0.safetensors").unlink()
    refused(lambda: verify(tmp_path / "old"), "optimizer_tp_0_pp_0.safetensors: is missing")
    said = json.loads((tmp_path / "old/checkpoint.json").read_text())
    del said["files"]["optimizer_tp_0_pp_0.safetensors"]
    (tmp_path / "old/checkpoint.json").write_text(json.dumps(said))
    assert verify(tmp_path / "old").differences == []
    reshard(tmp_path / "old", tmp_path / "one", tp=1, pp=1)
    assert set(open_checkpoint(tmp_path / "one")) == set(open_checkpoint(ran[0] / "frozen"))


@pytest.mark.parametrize("name", ["close", "stat", "fstat", "read"])
def test_a_call_that_fails_in_one_save_is_our_error_and_harms_no_later_one(
    name: str, tmp_path: Path
) -> None:
    """Found by ``make torture``: a pipe that could not be closed broke every save after it."""
    trainer_save.save(tmp_path / "wanted", 2)
    wanted = content(tmp_path / "wanted/checkpoint-2")
    with failing_calls.watched() as counts:
        trainer_save.save(tmp_path / "run", 1)
    opened = len(os.listdir("/proc/self/fd"))
    for at in range(counts[name]):
        shutil.rmtree(tmp_path / "run")
        with failing_calls.watched(name, at, errno.EIO), suppress(*trainer_save.ERRORS):
            trainer_save.save(tmp_path / "run", 1)
        assert len(os.listdir("/proc/self/fd")) == opened, at
        trainer_save.save(tmp_path / "run", 2)
        assert content(tmp_path / "run/checkpoint-2") == wanted
