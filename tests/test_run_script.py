"""Scripts that say ``from accelerate import Accelerator``: run as they are, with our ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from train_helpers import launch

from shardwright.tools import train_ckpt, train_run

SCRIPT = """
import json, os, sys
from accelerate import Accelerator
from accelerate.utils import MegatronLMPlugin

class Mine(Accelerator):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.greeting = "hello"

def main():
    plugin = MegatronLMPlugin(tp_degree=2) if "--plugin" in sys.argv else None
    made = Mine(megatron_lm_plugin=plugin) if plugin else Mine()
    again = Accelerator()
    said = [type(made).__name__, made.greeting, made.num_processes, again.num_processes,
            str(made.distributed_type), isinstance(made, Accelerator), __name__, sys.argv[1:],
            sys.path[0]]
    rank = os.environ.get("RANK", "0")
    open(f"{sys.argv[1]}.{rank}", "w").write(json.dumps(said))
    if "--fail_here" in sys.argv:
        raise RuntimeError("nothing is left to try")

main()
"""


def _write(folder: Path) -> Path:
    path = folder / "my_script.py"
    path.write_text(SCRIPT)
    return path


def run_here(words: list[str], environment: dict[str, str]) -> int:
    """One rank of the tests below."""
    import os

    from shardwright.train.accelerate import factory
    from shardwright.train.run import script

    os.environ.update(environment)
    factory.install()
    factory.install()
    script.run(words)
    return 0


MEGATRON = "DistributedType.MEGATRON_LM"


@pytest.mark.parametrize(
    ("world", "words", "environment", "processes", "kind"),
    [
        (2, ["--plugin"], {}, 1, MEGATRON),
        (4, [], {"ACCELERATE_USE_MEGATRON_LM": "true", "MEGATRON_LM_TP_DEGREE": "2"}, 2, MEGATRON),
        (2, [], {"ACCELERATE_USE_CPU": "true"}, 2, "DistributedType.MULTI_CPU"),
    ],
    ids=["the script asks", "the launcher asks", "nobody asks"],
)
def test_a_script_gets_our_accelerator_where_megatron_is_asked_for(
    world, words, environment, processes, kind, tmp_path
) -> None:
    script, out = _write(tmp_path), str(tmp_path / "said")
    launch("test_run_script:run_here", world, tmp_path / "ranks", [str(script), out, *words],
           environment)  # fmt: skip
    for rank in range(world):
        name, greeting, mine, again, type_, is_theirs, run_name, argv, path = json.loads(
            Path(f"{out}.{rank}").read_text()
        )
        assert (name, greeting, is_theirs) == ("Mine", "hello", True)
        assert mine == again == processes
        assert type_ == kind
        assert (run_name, argv, path) == ("__main__", [out, *words], str(tmp_path))


def run_schedule() -> list[float]:
    """A script's own scheduler beside a launcher's ``lr_decay_iters``: the rates of two steps."""
    import os

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    os.environ |= {"ACCELERATE_USE_MEGATRON_LM": "true", "MEGATRON_LM_LR_DECAY_ITERS": "320000"}
    from shardwright.train import Accelerator

    accelerator = Accelerator(cpu=True)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=32,
    ))  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    rates = []
    for _ in range(2):
        ids = torch.ones(1, 8, dtype=torch.long)
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        rates += schedule.get_last_lr()
    return rates


def test_a_scripts_scheduler_overrides_the_launchers_with_a_line(tmp_path) -> None:
    assert launch("test_run_script:run_schedule", 1, tmp_path) == [[0.5, 0.25]]
    said = (tmp_path / "output.txt").read_text()
    assert "MEGATRON_LM_LR_DECAY_ITERS: the script's own scheduler overrides it" in said


def test_what_follows_the_script_is_its_own() -> None:
    words = ["--tp", "2", "--main_process_port=29501", "s.py", "--learning_rate", "1", "--tp", "9"]
    assert train_run.split(words) == (words[:3], words[3:])
    assert train_run.spelled(words) == ["--tp", "2", "--main-process-port=29501", *words[3:]]
    assert train_ckpt.spelled(["run", *words])[1:] == train_run.spelled(words)
    assert train_ckpt.spelled(["--seq_length", "8"]) == ["--seq-length", "8"]
    module = ["--sequence_parallel", "-m", "pack.age", "-x"]
    assert train_run.split(module) == (module[:1], module[1:])


@pytest.mark.parametrize("words", [[], ["--tp", "2"], ["-m"]])
def test_no_script_is_a_usage_error(words, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        train_ckpt.main(["run", *words])
    assert stopped.value.code == 2
    assert "name the script" in capsys.readouterr().err


def _start(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    script = _write(folder)
    command = [sys.executable, "-m", "shardwright", "train", "run", "--tp", "2", "--nproc", "2",
               str(script), str(folder / "said"), "--learning_rate", *words]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def test_train_ckpt_run_starts_the_ranks_of_a_script(tmp_path) -> None:
    done = _start(tmp_path, "1e-4", "--fail_here")
    assert done.returncode == 1
    assert "RuntimeError: nothing is left to try" in done.stderr
    assert "aborted" not in done.stderr
    for rank in range(2):
        said = json.loads((tmp_path / f"said.{rank}").read_text())
        assert said[2:5] == [1, 1, MEGATRON]
        assert said[7] == [str(tmp_path / "said"), "--learning_rate", "1e-4", "--fail_here"]
