"""Checkpoints of an older release still load, and the state beside their tensors keeps its meaning.

tests/golden holds two, of format version 1.0, with what the code that wrote them said of them.
"""

from __future__ import annotations

import json
import math

import pytest
from golden.make import COMMAND, CONFIG, HERE, TEXT, digests
from train_helpers import launch
from train_runs import in_ranks

from shardwright.ckpt import merge, reshard, verify
from shardwright.ckpt.checkpoint.state import VERSION, TrainingState
from shardwright.ckpt.errors import CheckpointError
from shardwright.ckpt.reader import read_checkpoint
from shardwright.train.checkpoint import training_state
from shardwright.train.errors import TrainError

WRITERS = ("train_ckpt", "accelerator")


def _expected(name: str) -> dict[str, object]:
    return json.loads((HERE / name / "expected.json").read_text())


# --- old checkpoints ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_an_old_checkpoint_is_resharded_and_merged_to_the_bytes_of_its_time(name, tmp_path):
    source = HERE / name / "checkpoint-2"
    assert verify(source).differences == []
    reshard(source, tmp_path / "one", tp=1, pp=1)
    merge(source, tmp_path / "hf")
    expected = _expected(name)
    assert digests(tmp_path / "one") == expected["resharded"]
    assert digests(tmp_path / "hf") == expected["merged"]


def test_train_ckpt_goes_on_from_an_old_checkpoint_with_the_losses_of_its_time(tmp_path):
    (tmp_path / "llama.json").write_text(json.dumps(CONFIG))
    (tmp_path / "data.txt").write_text(TEXT)
    argv = (
        f"--model {tmp_path}/llama.json --data {tmp_path}/data.txt {COMMAND} --steps 4 "
        f"--save-dir {tmp_path}/run --resume {HERE}/train_ckpt/checkpoint-2"
    )
    job = (4, "train_command", {"argv": argv.split(), "fault": None})
    ((*ended,),) = in_ranks(tmp_path / "ranks", [job])
    assert [rank["code"] for rank in ended] == [0] * 4, ended
    assert "other settings" not in "".join(rank["said"] for rank in ended)
    rows = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [3, 4]
    losses = _expected("train_ckpt")["losses"]
    assert [row["loss"] for row in rows] == pytest.approx(losses[2:], rel=1e-6)


def test_a_script_goes_on_from_an_old_checkpoint_with_the_losses_of_its_time(tmp_path):
    source = str(HERE / "accelerator/checkpoint-2")
    launch("golden.make:script", 2, tmp_path / "ranks", str(tmp_path), source)
    losses = json.loads((tmp_path / "losses").read_text())
    assert losses == pytest.approx(_expected("accelerator")["losses"][2:], rel=1e-6)


@pytest.mark.parametrize("name", WRITERS)
def test_the_state_of_an_old_checkpoint_has_the_keys_of_the_schema(name):
    state = training_state.from_json(read_checkpoint(HERE / name / "checkpoint-2").manifest.state)
    assert state["param_groups"][0]["step"] == 2
    if name == "train_ckpt":
        assert state["schedule"]["num_steps"] == 2
        assert state["data"]["consumed_samples"] == 8
    else:
        assert [one["last_epoch"] for one in state["schedule"]] == [2]
        assert len(state["data"]["loaders"]) == 1


# --- the schema --------------------------------------------------------------------------------


def test_numbers_that_json_lacks_come_back():
    state = {"schedule": [{"best": math.inf, "worst": -math.inf, "seen": [1, 2.5, None, True]}]}
    text = json.dumps(training_state.to_json(state), allow_nan=False)
    assert training_state.from_json(json.loads(text)) == state
    nan = training_state.to_json({"data": {"x": math.nan}})
    assert math.isnan(training_state.from_json(nan)["data"]["x"])


def test_a_later_version_of_the_schema_is_refused():
    state = training_state.to_json({"schedule": {"style": "linear"}})
    assert TrainingState.of(state).schedule == {"style": "linear"}
    with pytest.raises(CheckpointError, match=f"state_version {VERSION + 1}"):
        TrainingState.of({**state, "state_version": VERSION + 1})


def test_what_json_cannot_hold_is_named_before_anything_is_written():
    with pytest.raises(TrainError) as error:
        training_state.to_json({"schedule": [{"on": object(), "by": {1: 2}}]})
    assert "schedule[0].on is a object" in str(error.value)
    assert "schedule[0].by: the key 1 is a int" in str(error.value)
