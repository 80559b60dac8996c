"""The common issues of a run: each is provoked in real ranks, and its advice is in the output.

``SITUATIONS`` are command lines with faults that one set of ranks runs in turn, as a launcher would
start them. Those that only a launcher can show, or only a machine with GPUs, come after.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from train_runs import Launch, Run, command, in_ranks, make_place

from shardwright.tools import train_ckpt
from shardwright.train.doctor import doctor
from shardwright.train.errors import LOST_A_RANK, WAITED_TOO_LONG
from shardwright.train.run import agent, launch

SHORT = {"save_dir": None, "save_interval": None}
SLOW = {**SHORT, "steps": 9}  # the 8th step is slow: 7 say what is usual
HEADED = {**SHORT, "pp": 2, "global_batch_size": 32, "seq_length": 32}
KNOWN = {**SHORT, "pp": 2, "global_batch_size": 16}
SITUATIONS = {
    "no memory": Run("m", world=2, options={**SHORT, "pp": 2}, fault="no memory at first"),
    "bubble": Run("b", options={**SHORT, "pp": 4}),
    "a heavy last stage": Run("h", "deep", world=2, options=HEADED, fault="known costs"),
    "a split": Run("k", "deep", world=2, options=KNOWN, fault="known costs"),
    "a better split": Run(
        "k", "deep", world=2, options={**KNOWN, "pp_layers": "6,2"}, fault="known costs"
    ),
    "slow data": Run("sd", options={**SLOW, "tp": 2}, fault="slow data"),
    "slow stage": Run("ss", world=2, options={**SLOW, "pp": 2}, fault="slow forward"),
    "slow tp rank": Run("st", world=4, options={**SLOW, "tp": 2}, fault="slow forward"),
    "slow network": Run("sn", world=2, options=SLOW, fault="slow network"),
    "slow disk": Run("disk", world=1, fault="slow disk", options={"steps": 4}),
    "full disk": Run("full", world=2, options={"tp": 2}, fault="full disk"),
    "nan": Run("nan", world=2, options={**SHORT, "tp": 2, "lr": 1e30, "clip_grad": 0}),
    "a rank stays away": Run("away", world=2, options={"pp": 2}, fault="comes late"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_place(tmp_path_factory.mktemp("issues"))
    llama = json.loads((made / "llama.json").read_text())
    deep = {**llama, "num_hidden_layers": 8}
    (made / "deep.json").write_text(json.dumps(deep))
    return made


@pytest.fixture(scope="module")
def ended(place: Path) -> Mapping[str, list[Any]]:
    """For each situation what its ranks ended with and said."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWRIGHT_CACHE", str(place / "cache"))
        found = in_ranks(place / "ranks", [command(run, place) for run in SITUATIONS.values()])
    return dict(zip(SITUATIONS, found, strict=True))


def _said(ended: Mapping[str, list[Any]], name: str, code: int = 0) -> str:
    """What all ranks said, one after the other."""
    assert {rank["code"] for rank in ended[name]} == {code}, ended[name]
    return "\n".join(rank["said"] for rank in ended[name])


def _lacking(said: str, *parts: str) -> str:
    """What was said, where a part of it is missing."""
    missing = [part for part in parts if part not in said]
    return f"{missing} not in: {said}" if missing else ""


# --- memory ------------------------------------------------------------------------------------


def test_a_first_stage_without_memory_names_smaller_micro_batches_and_fewer_layers(ended):
    first, other = ended["no memory"]
    assert first["code"] == 1
    assert not _lacking(
        first["said"],
        "error: step 3: rank 0 (stage 1 of 2) is out of memory in the forward and backward",
        "4194304.00 GiB more asked for; micro-batch 2 x 2, sequences of 16",
        "more, smaller micro-batches: --micro-batch-size 1 instead of 2",
        "the first of 2 stages holds 2 at a time",
        "--pp-layers 1,3 instead of 2,2",
        "--recompute full",
    )
    assert other["code"] in (LOST_A_RANK, WAITED_TOO_LONG)
    assert "out of memory" not in other["said"]


# --- pipelines ---------------------------------------------------------------------------------


def test_a_bubble_is_measured_and_answered_with_more_micro_batches_or_fewer_stages(ended):
    said = _said(ended, "bubble")
    assert not _lacking(
        said, "pp=4 with 2 micro-batches makes 60% unavoidable",
        "more micro-batches: 27 (--global-batch-size 54) lower it to 10%", "less PP: --pp 2",
    )  # fmt: skip
    (measured,) = re.findall(r"stages waited (\d+)% of the step", said)
    assert 50 <= int(measured) < 100, "60 % of a schedule whose passes are all alike"


def test_a_heavy_last_stage_is_named_with_a_split_that_gives_it_fewer_layers(ended):
    said = _said(ended, "a heavy last stage")
    (stages,) = re.findall(r"seconds of computing per stage: ([\d.e-]+), ([\d.e-]+)", said)
    assert float(stages[1]) == 2 * float(stages[0]), "4 layers; 4 layers and an output layer of 4"
    assert "stage 2 makes the others wait" in said
    (split,) = re.findall(r"--pp-layers (\d),(\d) instead of 4,4", said)
    assert int(split[0]) > 4
    assert int(split[0]) + int(split[1]) == 8
    assert "more micro-batches" not in said, "16 of them leave a bubble of 6 %"


def test_a_split_that_weighs_the_output_layer_is_not_complained_of(ended):
    said = _said(ended, "a split")
    assert re.search(r"--pp-layers (6,2|5,3) instead of 4,4: the output layer costs [2-5]", said)
    assert "makes the others wait" not in _said(ended, "a better split")


# --- slow steps --------------------------------------------------------------------------------


def _slow(said: str) -> list[str]:
    """The lines about step 8, which is slow; there are no others."""
    lines = said.replace("\r", "\n").splitlines()
    (at,) = [i for i, line in enumerate(lines) if re.match(r"step \d+ took", line)]
    head = lines[at]
    found = re.match(r"step 8 took ([\d.]+) s, usual are ([\d.e-]+) s: ", head)
    assert found, head
    assert float(found[1]) >= 1.6
    assert float(found[2]) < 0.6 * float(found[1])
    rest = [line.strip() for line in lines[at + 1 : at + 8]]
    ours = [line for line in rest if line.startswith(("warning", "note", "fix"))]
    return [head, *ours]


def test_a_rank_that_waits_for_its_data_is_named_though_its_tp_neighbour_took_as_long(ended):
    head, *advice = _slow(_said(ended, "slow data"))
    assert re.search(r"data 1\.\d+ s \(usually [\d.e-]+\), forward and backward", head)
    assert len(advice) == 2, advice
    assert re.match(r"warning  straggler: rank 1 worked 1\.\d+ s .*more in data", advice[0])
    assert "SHARDWRIGHT_CACHE" in advice[1]


def test_a_rank_that_computes_slowly_once_is_named_and_stages_are_not_blamed(ended):
    head, *advice = _slow(_said(ended, "slow stage"))
    assert re.search(r"forward and backward 1\.\d+ s", head)
    assert len(advice) == 2, advice
    assert re.match(r"warning  straggler: rank 1 worked 1\.\d+ s .*more in computing", advice[0])
    assert "nvidia-smi" in advice[1]


def test_tensor_parallel_ranks_that_are_slow_together_are_named_together(ended):
    _, *advice = _slow(_said(ended, "slow tp rank"))
    assert "straggler: each of ranks 0,1, which wait for each other" in advice[0], advice


def test_a_step_in_which_no_rank_worked_longer_is_the_networks(ended):
    _, *advice = _slow(_said(ended, "slow network"))
    assert advice[0].startswith("warning  network: no rank worked more than"), advice
    assert "train-ckpt doctor" in advice[1]


# --- disks -------------------------------------------------------------------------------------


def test_saves_that_hold_training_up_are_said_with_seconds_and_speed(ended):
    said = _said(ended, "slow disk")
    found = re.search(r"training waited ([\d.]+) s before step 4 could be saved: the checkpoint "
                      r"before took ([\d.]+) s \([\d.]+ MB/s", said)  # fmt: skip
    assert found, said
    assert 1.0 <= float(found[1]) <= float(found[2])
    assert "--save-interval" in said


def test_a_full_disk_is_said_by_every_rank_with_the_rank_that_met_it(ended, place):
    said = [rank["said"] for rank in ended["full disk"]]
    assert {rank["code"] for rank in ended["full disk"]} == {1}
    for one in said:
        if "error: " in one:
            assert not _lacking(one, "full/checkpoint-4 could not be written (rank 1: [Errno 28] "
                                "No space left on device", "keep fewer checkpoints")  # fmt: skip
    assert (place / "full" / "latest").read_text().strip() == "checkpoint-2"


def test_the_doctor_measures_a_slow_disk_and_finds_one_too_small(tmp_path, capsys, monkeypatch):
    place = make_place(tmp_path)
    huge = json.loads((place / "llama.json").read_text())
    huge |= {"hidden_size": 2**17, "intermediate_size": 2**19, "num_hidden_layers": 2**13}
    (place / "huge.json").write_text(json.dumps(huge))
    said = ["doctor", *Run("out").argv(place), "--no-exchange"]
    monkeypatch.setattr(doctor, "SLOW_DISK", 1e15)  # any disk is slow
    assert train_ckpt.main(said) == 0
    slow = capsys.readouterr().out
    assert not _lacking(slow, "warning  disk", "MB/s written and synced", "--save-interval")
    assert train_ckpt.main([*said, "--model", str(place / "huge.json")]) == 1
    assert not _lacking(capsys.readouterr().out, "problem  disk", "room for", "--keep-last")


# --- numbers that are not, vocabularies, links -------------------------------------------------


def test_a_loss_that_is_not_finite_is_answered_with_rate_warmup_and_clipping(ended):
    said = _said(ended, "nan", 1)
    assert not _lacking(said, "is nan", "Lower the learning rate", "--lr-warmup-steps",
                        "--clip-grad 1.0", "the last checkpoint is none")  # fmt: skip


@pytest.mark.parametrize(
    ("vocab", "level", "fix"),
    [(259, "warning", "make_vocab_size_divisible_by=64"), (50257, "note", "padding rows never")],
)
def test_the_doctor_says_how_a_vocabulary_is_padded(vocab, level, fix, tmp_path, capsys):
    place = make_place(tmp_path)
    llama = json.loads((place / "llama.json").read_text())
    (place / "padded.json").write_text(json.dumps({**llama, "vocab_size": vocab}))
    said = Run("out", "padded", options={"tp": 4}).argv(place)
    assert train_ckpt.main(["doctor", *said, "--no-exchange", "--json"]) == 0
    (found,) = [f for f in json.loads(capsys.readouterr().out) if f["subject"] == "vocabulary"]
    assert found["level"] == level
    assert not _lacking(json.dumps(found), f"{vocab} rows", "tp=4: padded to", fix)


# --- ranks that do not come --------------------------------------------------------------------


def test_ranks_that_wait_in_vain_say_where_and_how_long_and_what_to_do(ended):
    waited, away = ended["a rank stays away"]
    assert waited["code"] == WAITED_TOO_LONG
    assert not _lacking(
        waited["said"], "rank 0: step 4, forward and backward: waited 5 s for another rank",
        "look for the first error above", "py-spy dump", "--timeout-minutes 30",
        "NCCL_DEBUG=INFO", "GLOO_SOCKET_IFNAME",
    )  # fmt: skip
    assert away["code"] in (LOST_A_RANK, WAITED_TOO_LONG)


def test_a_rank_that_did_not_come_is_no_rank_that_was_killed_from_outside():
    late, gone = WAITED_TOO_LONG, LOST_A_RANK
    assert agent._cause({0: late, 1: -9, 2: late}) == (0, late)
    assert agent._missing({0: late, 1: -9, 2: late}).startswith(
        "ranks 0, 2 waited too long for rank 1, which did not answer"
    )
    assert agent._missing({4: late}) == "rank 4 waited too long for another rank"
    assert agent._cause({0: gone, 1: -9}) == (1, -9)
    assert agent._cause({0: late, 1: 1, 2: -15}) == (1, 1), "it failed while others waited"


@pytest.mark.parametrize("rank", [0, 1])
def test_machines_that_do_not_meet_end_with_one_line(rank):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # a port at which nobody listens
        meeting = [f"--node-rank={rank}", "--master-addr=127.0.0.1",
                   f"--master-port={held.getsockname()[1]}"]  # fmt: skip
        if rank == 0:  # it listens there itself
            held.close()
        done = subprocess.run(
            [sys.executable, "-m", "shardwright.train.run.agent", "--nproc-per-node=1",
             "--nnodes=2", *meeting, "--rdzv-backend=static", "--rdzv-conf=timeout=2",
             "-m", "nothing"],
            capture_output=True, text=True, check=False, timeout=600,
            env=dict([*os.environ.items(), launch.QUIET_AGENT]),
        )  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert not _lacking(line, "error: the machines did not find each other", "imed out after",
                        "--main-process-ip", "open that port in the firewalls")  # fmt: skip


# --- slow: the same through the launcher -------------------------------------------------------


@pytest.mark.slow
def test_a_launch_names_the_rank_that_stayed_away(tmp_path, monkeypatch):
    place = make_place(tmp_path)
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(place / "cache"))
    options = {**SHORT, "tp": 2, "pp": 2}
    ended = Launch(Run("away", options=options, fault="stays away"), place).end()
    assert ended.code == 1
    assert "ranks 0, 2, 3 waited too long for rank 1, which did not answer" in ended.errors[0]
    assert ended.said.count("py-spy dump") == 1, "the launcher says it once"
    assert "host memory" not in ended.said
    assert "Traceback" not in ended.said
