"""Starting ranks: commands on one machine and several, under Slurm's variables and Accelerate.

Slow tests start the real thing: two machines are two network namespaces that a virtual cable
joins, each with its own loopback and no other way to the other one.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from train_runs import Launch, Run, losses, make_place

from shardwright.tools import train_ckpt
from shardwright.train.run import launch, network

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "launch.md").read_text()
BIN = Path(sys.executable).parent


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No launcher, setting or file of the machine reaches a test."""
    for name in list(os.environ):
        launched = name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GLOO_SOCKET_IFNAME")
        if name.startswith(("MEGATRON_LM_", "ACCELERATE_")) or launched:
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / "cache"))


# --- the command that starts ranks -------------------------------------------------------------


@dataclass
class Started:
    """What would have been started."""

    command: list[str]
    environment: dict[str, str]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    """Launches are written down in place of being made."""
    found: list[Started] = []

    def note(command: list[str], environment: dict[str, str], stop: Path) -> int:
        found.append(Started(command, environment))
        return 0

    monkeypatch.setattr(launch, "_supervise", note)
    return found


def _start(place: Path, *words: object, **options: object) -> int:
    argv = Run("out", options=options).argv(make_place(place))
    return train_ckpt.main([*argv, *map(str, words)])


def test_one_machine_needs_no_address(tmp_path: Path, started: list[Started]) -> None:
    assert _start(tmp_path, tp=2, pp=2) == 0
    command = started[0].command
    assert {"--standalone", "--nproc-per-node=4", "--nnodes=1"} <= set(command)
    assert not [word for word in command if word.startswith(("--rdzv", "--master", "--node-rank"))]
    assert "GLOO_SOCKET_IFNAME" not in started[0].environment


def test_machines_that_meet_statically_are_numbered(tmp_path: Path, started: list[Started]) -> None:
    machines = "--num-machines 2 --machine-rank 1 --main-process-ip 127.0.0.1"
    assert _start(tmp_path, *machines.split(), tp=2, pp=2, nproc=2) == 0
    wanted = {
        "--nproc-per-node=2", "--nnodes=2", "--node-rank=1", "--rdzv-backend=static",
        "--master-addr=127.0.0.1", "--master-port=29500", "--local-addr=127.0.0.1",
    }  # fmt: skip
    assert wanted <= set(started[0].command)
    assert started[0].environment["GLOO_SOCKET_IFNAME"] == "lo"


def test_machines_that_meet_by_c10d_number_themselves(
    tmp_path: Path, started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    machines = "--num-machines 2 --main-process-ip 127.0.0.1 --main-process-port 29611 --nproc 2"
    assert _start(tmp_path, *machines.split(), "--rdzv-backend", "c10d", tp=2, pp=2) == 0
    command = started[0].command
    assert {"--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:29611"} <= set(command)
    (conf,) = [word for word in command if word.startswith("--rdzv-conf=")]
    assert conf == "--rdzv-conf=is_host=1,join_timeout=600,read_timeout=600"
    assert [word for word in command if word.startswith("--rdzv-id=")]
    assert not [word for word in command if word.startswith(("--node-rank", "--master"))]
    assert started[0].environment["GLOO_SOCKET_IFNAME"] == "mine", "the user's choice is kept"


def test_the_yaml_of_config_starts_both_machines(tmp_path: Path, started: list[Started]) -> None:
    path = tmp_path / "a.yaml"
    words = "config --yes --tp 2 --pp 2 --num-processes 4 --num-machines 2 --mixed-precision no "
    words += f"--main-process-ip 127.0.0.1 --main-process-port 29622 --output {path}"
    assert train_ckpt.main(words.split()) == 0
    for rank in range(2):
        assert _start(tmp_path, "--config", path, "--machine-rank", rank) == 0
    for rank in range(2):
        assert {f"--node-rank={rank}", "--nproc-per-node=2"} <= set(started[rank].command)
        assert started[rank].environment["ACCELERATE_CONFIG_FILE"] == str(path)


REFUSED = {
    "--num-machines 2 --nproc 2": ["2 machines need the address", "--main-process-ip"],
    "--num-machines 2 --nproc 2 --main-process-ip h --machine-rank 2": ["--machine-rank 2", "0"],
    "--main-process-ip 10.0.0.1": ["--main-process-ip 10.0.0.1", "--num-machines"],
    "--num-machines 2 --nproc 2 --main-process-ip no.such.host.invalid": [
        "--main-process-ip no.such.host.invalid", "no way there",
    ],
    "--num-machines 3 --main-process-ip h": ["4 processes do not divide over 3", "--nproc"],
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_machines_that_cannot_meet_are_one_clear_line(
    words: str, tmp_path: Path, started: list[Started], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _start(tmp_path, *words.split(), tp=2, pp=2) == 1
    lines = capsys.readouterr().err.splitlines()
    said = [line for line in lines if not line.startswith("starting 2 processes ")]
    assert len(said) == 1, said
    assert [part for part in REFUSED[words] if part not in said[0]] == [], said[0]
    assert not started


def test_an_address_has_its_interface() -> None:
    assert network.interface("127.0.0.1") == "lo"
    assert network.interface("203.0.113.77") is None
    assert network.local_address("127.0.0.1") == "127.0.0.1"
    assert network.is_here("127.0.0.1")


# --- the page ----------------------------------------------------------------------------------


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_every_option_on_the_page_exists(capsys: pytest.CaptureFixture[str]) -> None:
    """Of train-ckpt, torchrun and accelerate launch, each by its own parser."""
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    from shardwright.tools import train_ckpt, train_config, train_run

    known = {
        "train-ckpt": train_ckpt.parser(), "train-ckpt config": train_config.parser(),
        "train-ckpt run": train_run.parser(),
        "torchrun": get_args_parser(), "accelerate launch": launch_command_parser(),
    }  # fmt: skip
    text = "\n".join(_blocks("bash")).replace("\\\n", " ")
    seen = set()
    for line in text.splitlines():
        parts = re.split(r"(train-ckpt config|train-ckpt doctor|train-ckpt run|train-ckpt|torchrun|"
                         r"accelerate launch)", line)  # fmt: skip
        for name, words in zip(parts[1::2], parts[2::2], strict=True):
            own = re.split(r" -m | \S+\.py\b|#", words)[0]  # what follows is another's
            flags = set(re.findall(r"(?<=\s)--[\w-]+", own))
            if name == "train-ckpt doctor":
                continue
            lacking = {f for f in flags if f not in known[name]._option_string_actions}
            assert not lacking, f"{name}: {lacking} in {line}"
            seen.add(name)
    assert seen == known.keys()


def test_the_sbatch_file_gives_each_machine_its_number(
    tmp_path: Path, started: list[Started]
) -> None:
    """Run as Slurm runs it: once, with a srun that runs its command on each of two machines."""
    (script,) = [block for block in _blocks("bash") if "#SBATCH" in block]
    place = make_place(tmp_path / "place")
    stub = tmp_path / "bin"
    stub.mkdir()
    # srun gives each task SLURM_NODEID; scontrol names the hosts of the list
    _program(stub / "srun", 'for id in 0 1; do SLURM_NODEID=$id SLURM_PROCID=$id "${@:1}"; done')
    _program(stub / "scontrol", "echo 127.0.0.1; echo 127.0.0.2")
    _program(stub / "train-ckpt", f'printf "%s\\n" "$SLURM_NODEID $*" >> {tmp_path}/said')
    file = tmp_path / "job.sbatch"
    file.write_text(script)
    env = {**os.environ, "PATH": f"{stub}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": "2",
           "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_ID": "4242", "SLURM_NNODES": "2",
           "SLURM_GPUS_ON_NODE": "2"}  # fmt: skip
    done = subprocess.run(
        ["bash", "-eu", file], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "said").read_text().splitlines()
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        words = line.split()
        assert words[0] == str(rank)
        given = dict(itertools.pairwise(words))
        assert given["--machine-rank"] == str(rank)
        assert given["--num-machines"] == "2"
        assert given["--main-process-ip"] == "127.0.0.1"
        machine = [w for flag in ("--num-machines", "--machine-rank", "--main-process-ip",
                                  "--main-process-port") for w in (flag, given[flag])]  # fmt: skip
        assert _start(place, *machine, "--nproc", 2, tp=2, pp=2) == 0
        assert f"--node-rank={rank}" in started[rank].command


def _program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def free_port() -> str:
    """A port at which nobody listens on any address of this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return str(probe.getsockname()[1])


# --- two machines ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machines:
    """How to run a command on each of two machines, and the address of the first."""

    prefixes: tuple[list[str], list[str]]
    address: str


def _ip(*words: str) -> bool:
    command = ["ip", *words]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def machines() -> Iterator[Machines]:
    """Two network namespaces with a cable between them; skips where they cannot be made."""
    names = [f"swtest{os.getpid() % 10000}{end}" for end in "ab"]
    if shutil.which("ip") is None or not _ip("netns", "add", names[0]):
        pytest.skip("network namespaces need root and iproute2")
    try:
        made = _ip("netns", "add", names[1])
        cable = [f"sw{os.getpid() % 10000}{end}" for end in "ab"]
        made = made and _ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        if not made:
            pytest.skip("virtual cables cannot be made here")
        for i, (name, end) in enumerate(zip(names, cable, strict=True)):
            assert _ip("link", "set", end, "netns", name)
            assert _ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", end)
            assert _ip("-n", name, "link", "set", end, "up")
            assert _ip("-n", name, "link", "set", "lo", "up")
        a, b = (["ip", "netns", "exec", name] for name in names)
        yield Machines((a, b), "10.77.0.1")
    finally:
        for name in names:
            _ip("netns", "del", name)


def _on_both(
    machines: Machines, place: Path, name: str, commands: Sequence[Sequence[str]]
) -> list[str]:
    """Run a training of two ranks, one per machine, into ``name``; what each machine said."""
    run = Run(name, options={"tp": 2, "steps": 4, "save_interval": None})
    launches = []
    for i, (prefix, command) in enumerate(zip(machines.prefixes, commands, strict=True)):
        launched = Launch(run, place, [*prefix, *command])
        launched.log.rename(launched.log.with_suffix(f".{i}.log"))
        launched.log = launched.log.with_suffix(f".{i}.log")
        launches.append(launched)
    ended = [launched.end() for launched in launches]
    assert [e.code for e in ended] == [0, 0], "\n".join(e.said for e in ended)
    return [e.said for e in ended]


@pytest.fixture(scope="module")
def on_one(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the same training on one machine."""
    place = make_place(tmp_path_factory.mktemp("one"))
    os.environ["SHARDWRIGHT_CACHE"] = str(place / "cache")
    run = Run("out", options={"tp": 2, "steps": 4, "save_interval": None})
    ended = Launch(run, place).end()
    assert ended.code == 0, ended.said
    return losses(place / "out")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_machines_train_as_one_does(
    backend: str, machines: Machines, tmp_path: Path, on_one: list[float]
) -> None:
    place = make_place(tmp_path)
    common = [sys.executable, "-m", "shardwright.tools.train_ckpt", "--num-machines", "2",
              "--nproc", "1", "--main-process-ip", machines.address, "--rdzv-backend", backend,
              "--main-process-port", free_port()]  # fmt: skip
    commands = [[*common, *(["--machine-rank", str(i)] if backend == "static" else [])]
                for i in range(2)]  # fmt: skip
    _on_both(machines, place, "out", commands)
    assert losses(place / "out") == pytest.approx(on_one, abs=1e-6)
    assert (place / "out" / "latest").read_text().strip() == "checkpoint-4"


@pytest.mark.slow
def test_torchrun_starts_ranks_on_two_machines(
    machines: Machines, tmp_path: Path, on_one: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, port = make_place(tmp_path), free_port()
    commands = []
    for i in range(2):
        cable = f"sw{os.getpid() % 10000}{'ab'[i]}"
        commands.append(
            ["env", f"GLOO_SOCKET_IFNAME={cable}", sys.executable, "-m", "torch.distributed.run",
             "--nnodes=2", "--nproc-per-node=1", f"--node-rank={i}",
             f"--master-addr={machines.address}", f"--master-port={port}",
             "-m", "shardwright.tools.train_ckpt"]
        )  # fmt: skip
    _on_both(machines, place, "out", commands)
    assert losses(place / "out") == pytest.approx(on_one, abs=1e-6)


@pytest.mark.slow
def test_two_agents_meet_on_one_host(tmp_path: Path, on_one: list[float]) -> None:
    """The same without namespaces, for hosts where they cannot be made."""
    place = make_place(tmp_path)
    common = [sys.executable, "-m", "shardwright.tools.train_ckpt", "--num-machines", "2",
              "--nproc", "1", "--main-process-ip", "127.0.0.1",
              "--main-process-port", free_port()]  # fmt: skip
    here = Machines(([], []), "127.0.0.1")
    _on_both(here, place, "out", [[*common, "--machine-rank", str(i)] for i in range(2)])
    assert losses(place / "out") == pytest.approx(on_one, abs=1e-6)


# --- accelerate launch -------------------------------------------------------------------------

GUIDE = """
import json, sys
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel
from shardwright.train import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4,
                                   attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))
rows = torch.arange(16 * 16).remainder(61).reshape(16, 16)
data = [{"input_ids": row, "labels": row} for row in rows]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
losses = []
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(float(loss))
if accelerator.is_main_process:
    plugin = accelerator.state.megatron_lm_plugin
    said = {name: getattr(plugin, name) for name in sys.argv[2:]}
    json.dump({"losses": losses, "world": torch.distributed.get_world_size(), **said},
              open(sys.argv[1], "w"))
accelerator.wait_for_everyone()
"""


def _guide(tmp_path: Path, *flags: str) -> dict[str, Any]:
    """The guide's loop under ``accelerate launch``; its losses, and what its plugin says."""
    script, out = tmp_path / "guide.py", tmp_path / "said.json"
    script.write_text(GUIDE)
    names = ("tp_degree", "pp_degree", "num_micro_batches", "gradient_clipping",
             "use_distributed_optimizer", "sequence_parallelism",
             "recompute_granularity")  # fmt: skip
    command = [str(BIN / "accelerate"), "launch", *flags, str(script), str(out), *names]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


@pytest.mark.slow
def test_accelerate_launch_starts_a_script_from_the_file_that_config_wrote(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    path = tmp_path / "a.yaml"
    words = "config --yes --tp 2 --num-processes 2 --num-micro-batches 2 --recompute full "
    words += f"--clip-grad 0.5 --mixed-precision no --output {path}"
    assert train_ckpt.main(words.split()) == 0
    said = _guide(tmp_path, "--config_file", str(path))
    assert said["world"] == 2
    assert (said["tp_degree"], said["pp_degree"], said["num_micro_batches"]) == (2, 1, 2)
    assert (said["gradient_clipping"], said["recompute_granularity"]) == (0.5, "full")
    assert said["use_distributed_optimizer"] is True
    assert said["sequence_parallelism"] is True
    flags = ["--use_megatron_lm", "--num_processes", "1", "--num_machines", "1",
             "--mixed_precision", "no", "--dynamo_backend", "no", "--megatron_lm_num_micro_batches",
             "2", "--megatron_lm_gradient_clipping", "0.5"]  # fmt: skip
    alone = _guide(tmp_path, *flags)
    assert alone["world"] == 1
    assert said["losses"] == pytest.approx(alone["losses"], abs=1e-4)
