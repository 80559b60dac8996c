"""Starts a run's local ranks through torch.distributed.run, and stops them gently.

A signal to the launcher becomes a file that the ranks look for after each step: they save and
end by themselves, without the elastic agent's limit of 30 seconds. A second signal ends them at
once. Under torchrun or ``accelerate launch`` a process is a rank already and none of this runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..config import from_options
from ..config.schema import Launch, TrainConfig
from . import network, stopping
from .stopping import STOP_FILE, signals

ARGUMENTS = from_options.OURS  # what a rank that we start is to do, as JSON
# No C++ stack trace if machines do not find each other; the agent unsets it for its ranks.
QUIET_AGENT = ("TORCH_CPP_LOG_LEVEL", "FATAL")


def is_rank() -> bool:
    """Whether a launcher has made this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(config: TrainConfig, argv: Sequence[str]) -> int:
    """Run ``train-ckpt argv`` on every local rank; the exit code, 0 after a gentle stop."""
    return _start(config, "shardwright.tools.train_ckpt", argv, _environment(config))


def launch_script(config: TrainConfig, argv: Sequence[str], said: Mapping[str, str]) -> int:
    """Run ``python -m shardwright.train argv`` on every local rank; the exit code.

    ``said`` are environment variables for the ranks. A signal ends the ranks as it would end the
    script: only the script knows when a step ends.
    """
    return _start(config, "shardwright.train", argv, {**_environment(config), **said}, gentle=False)


def _start(
    config: TrainConfig,
    module: str,
    argv: Sequence[str],
    environment: Mapping[str, str],
    *,
    gentle: bool = True,
) -> int:
    """Run a module on every local rank under the elastic agent; the exit code."""
    launch = config.launch
    count = launch.nproc or max(1, config.world_size // launch.num_machines)
    command = [
        sys.executable, "-m", "shardwright.train.run.agent", f"--nproc-per-node={count}",
        f"--nnodes={launch.num_machines}",
    ]  # fmt: skip
    if launch.num_machines == 1:
        command += ["--standalone"]
    else:
        command += _meeting(launch)
        print(f"waiting for {launch.num_machines} machines to connect to {launch.main_process_ip}:"
              f"{launch.main_process_port}", file=sys.stderr, flush=True)  # fmt: skip
    command += ["-m", module]
    with tempfile.TemporaryDirectory(prefix="shardwright-") as folder:
        stop = Path(folder) / "stop"
        # the agent's parser would take some of our options for its own
        made = {**os.environ, ARGUMENTS: json.dumps(list(argv)), STOP_FILE: str(stop)}
        made.setdefault(*QUIET_AGENT)
        with stopping.alive(Path(folder) / "launcher") as lock:
            return _supervise(command, {**made, **environment, **lock}, stop if gentle else None)


def _meeting(launch: Launch) -> list[str]:
    """How this machine's agent finds the others."""
    ip, port = launch.main_process_ip, launch.main_process_port
    seconds = 60 * launch.timeout_minutes  # torch tries twice
    assert ip is not None
    assert port is not None
    found = [f"--rdzv-backend={launch.rdzv_backend}", f"--local-addr={network.local_address(ip)}"]
    if launch.rdzv_backend == "static":
        return [*found, f"--node-rank={launch.machine_rank}", f"--master-addr={ip}",
                f"--master-port={port}", f"--rdzv-conf=timeout={seconds}"]  # fmt: skip
    # agents number themselves; the name keeps runs apart that use one store, which is on machine
    # 0; torch would recognise that by a host name, which may not resolve
    return [*found, f"--rdzv-endpoint={ip}:{port}", f"--rdzv-id=shardwright-{port}",
            f"--rdzv-conf=is_host={int(network.is_here(ip))},join_timeout={seconds},"
            f"read_timeout={seconds}"]  # fmt: skip


def _environment(config: TrainConfig) -> dict[str, str]:
    """What ranks inherit: one thread each on CPU, and which devices they may use."""
    found = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if config.launch.use_cpu:
        found["CUDA_VISIBLE_DEVICES"] = ""
    elif config.launch.gpu_ids not in (None, "all"):
        found["CUDA_VISIBLE_DEVICES"] = str(config.launch.gpu_ids)
    launch = config.launch
    if launch.num_machines > 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
        assert launch.main_process_ip is not None
        name = network.interface(network.local_address(launch.main_process_ip))
        if name is not None:  # else gloo takes what the host's own name resolves to, often loopback
            found["GLOO_SOCKET_IFNAME"] = name
    if config.launch.accelerate_file is not None:
        found["ACCELERATE_CONFIG_FILE"] = config.launch.accelerate_file
    return found


def _supervise(command: list[str], environment: dict[str, str], stop: Path | None) -> int:
    """Run the agent in a session of its own, so that a terminal's Ctrl-C reaches only us."""
    child = subprocess.Popen(command, env=environment, start_new_session=True)
    asked = 0

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        asked += 1
        if asked == 1 and stop is not None:
            stop.touch()
            with contextlib.suppress(OSError):  # the terminal may be gone
                print("stopping after this step: saving (again: stop at once)", file=sys.stderr)
        else:
            os.killpg(child.pid, signal.SIGTERM)

    before = {s: signal.signal(s, ask) for s in signals()}
    try:
        while True:
            try:
                return 0 if child.wait() == 0 else 1
            except KeyboardInterrupt:
                continue
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
