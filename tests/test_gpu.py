"""The trainer on GPUs: layouts agree with one rank, checkpoints go from layout to layout.

Run by torchrun this file is a rank of a world of one, two, four or eight, which does all jobs of
that world. The tests look at what the ranks found. Where there are fewer GPUs than ranks, ranks
share them (gpu_ranks.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_ranks import share
from train_runs import CALM, batches, hf_model

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1200),  # the first test compiles kernels for many shapes
    pytest.mark.skipif(GPUS == 0, reason="there is no CUDA device"),
]

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
        "num_key_value_heads": 4, "initializer_range": 0.02}  # fmt: skip
MODELS: Mapping[str, Mapping[str, object]] = {  # a config of train_runs, with changes
    "llama": WIDE,
    "qwen3": {},  # norms of queries and keys, a tied head
    "gpt2": {},  # biases everywhere, GELU, learned positions
}
PLAIN = {"fusions": False, "cuda_graphs": False}
STEPS = 6
SAVED = 3  # the step after which a checkpoint is written

# What two ranks do with the llama model: name -> layout and options.
PAIRS: Mapping[str, Mapping[str, object]] = {
    "tp2": {"tp": 2},
    "tp2-plain": {"tp": 2, **PLAIN},
    "tp2-sequence": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "pp2-plain": {"pp": 2, **PLAIN},
    "dp2-distributed": {"distributed": True, "overlap": True},
    "dp2-distributed-graphs": {"distributed": True, "cuda_graphs": True},
}
# The same of four ranks and of eight.
MANY: Mapping[int, Mapping[str, Mapping[str, object]]] = {
    4: {
        "tp2-pp2": {"tp": 2, "pp": 2},
        "tp4-sequence": {"tp": 4, "sequence_parallel": True},
        "tp2-dp2": {"tp": 2, "distributed": True, "overlap": True},
        "pp4-recompute": {"pp": 4, "recompute": "full"},
    },
    8: {
        "tp2-pp2-dp2": {"tp": 2, "pp": 2, "sequence_parallel": True, "distributed": True},
    },
}
LAYOUTS = {**PAIRS, **MANY[4], **MANY[8]}
REPLAYED = {"tp2": 1, "tp2-sequence": 1, "pp2": 2, "dp2-distributed-graphs": 1, "tp2-pp2": 2,
            "tp4-sequence": 1, "tp2-pp2-dp2": 2}  # fmt: skip
# Overlap leaves weights to be gathered with the next forward pass: a save has to know.
SAVED_AT = {
    "tp2": {"tp": 2, "fusions": False},
    "dp2-distributed": {"distributed": True, "overlap": True, "fusions": False},
}
RESUMED = {
    "pp2": {"pp": 2, "fusions": False},
    "dp2-distributed": {"distributed": True, "overlap": True, "fusions": False},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    """What the jobs of every world gave, by name."""
    place = tmp_path_factory.mktemp("gpu")
    for name, changes in MODELS.items():
        hf_model(place, name, **changes)
    made: dict[str, Any] = {}
    for world in (1, 2, *MANY):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   f"--nproc-per-node={world}", __file__, str(place)]  # fmt: skip
        log = place / f"log-{world}.txt"
        with log.open("w") as output:
            ranks = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
            try:
                code: object = ranks.wait(500)
            except subprocess.TimeoutExpired:
                code = "no end after 500 s"
            finally:
                if ranks.poll() is None:
                    os.killpg(ranks.pid, signal.SIGKILL)  # the session that was started above
        assert code == 0, f"{world} ranks: {code}\n{log.read_text()[-6000:]}"
        made |= json.loads((place / f"found-{world}.json").read_text())
    return made


def _close(losses: list[float], others: list[float]) -> None:
    """Equal to the rounding of bf16."""
    assert losses == pytest.approx(others, abs=2e-2)


@pytest.mark.parametrize("model", MODELS)
def test_fused_and_replayed_training_is_the_plain_one(found, model) -> None:
    plain, fast = found[f"{model}-plain"], found[f"{model}-fast"]
    assert fast["recordings"] == [1]
    _close(fast["losses"], plain["losses"])
    assert fast["norms"] == pytest.approx(plain["norms"], rel=5e-2)
    assert plain["losses"][-1] < plain["losses"][0] - 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_as_one_rank_does(found, layout) -> None:
    one, two = found["llama-plain"], found[layout]
    _close(two["losses"], one["losses"])
    assert two["norms"] == pytest.approx(one["norms"], rel=5e-2)
    assert sum(two["recordings"]) == REPLAYED.get(layout, 0)  # on the first stage


@pytest.mark.parametrize("layout", SAVED_AT)
def test_a_save_holds_the_step_at_which_it_was_asked_for(found, layout) -> None:
    """Though training went on while it was written."""
    saved = found[f"save-{layout}"]
    assert saved["published_early"] is False
    assert saved["differ"] == []
    assert saved["tensors"] > 50
    assert max(saved["stalls"]) < 1.0
    _close(saved["losses"], found[layout]["losses"])


@pytest.mark.parametrize("layout", RESUMED)
def test_another_layout_goes_on_from_a_checkpoint(found, layout) -> None:
    resumed = found[f"resume-{layout}"]
    assert resumed["step"] == SAVED
    _close(resumed["losses"], found["save-tp2"]["losses"][SAVED:])


# --- in a rank ---------------------------------------------------------------------------------


def main(place: Path) -> None:
    """All jobs of this number of ranks, and what they gave into a file."""
    import faulthandler

    import torch.distributed as dist

    faulthandler.dump_traceback_later(240, repeat=True)  # where a rank stands that does not go on
    on_gpu = torch.cuda.is_available()  # on CPU the jobs run too, which shows them to be right
    if on_gpu:
        share()
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        from shardwright.train.patches import cpu

        cpu.install()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    made: dict[str, Any] = {}
    if dist.get_world_size() == 1:
        for model in MODELS:
            say(model)
            made[f"{model}-plain"] = train(place / model, PLAIN)
            made[f"{model}-fast"] = train(place / model, {"cuda_graphs": on_gpu})
    folder = place / "llama"
    if dist.get_world_size() in MANY:
        for name, options in MANY[dist.get_world_size()].items():
            say(name)
            made[name] = train(folder, options)
    elif dist.get_world_size() == 2:
        for name, options in PAIRS.items():
            say(name)
            made[name] = train(folder, options)
        for name, options in SAVED_AT.items():
            say(f"save {name}")
            made[f"save-{name}"] = save(folder, place / name, options)
        for name, options in RESUMED.items():
            say(f"resume {name}")
            made[f"resume-{name}"] = resume(place / "tp2" / f"checkpoint-{SAVED}", options)
    if dist.get_rank() == 0:
        (place / f"found-{dist.get_world_size()}.json").write_text(json.dumps(made))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # without NCCL's teardown, which waits for nothing of ours


def say(line: str) -> None:
    """For the log of the ranks: where they are, and since when."""
    print(f"{time.perf_counter():.1f} s: {line}", flush=True)


def engine_of(folder: Path, options: Mapping[str, Any], weights: bool = True) -> Any:
    """An engine in a layout, with the weights of a Hugging Face folder."""
    from shardwright.ckpt.checkpoint.config import load_model
    from shardwright.train.checkpoint.load import load
    from shardwright.train.checkpoint.rank_state import RankState
    from shardwright.train.config.schema import OptimizerSettings
    from shardwright.train.core.engine import Engine, EngineOptions
    from shardwright.train.core.layout import Layout
    from shardwright.train.core.process import initialize
    from shardwright.train.model.options import ModelOptions

    given = dict(options)
    distributed, overlap = given.pop("distributed", False), given.pop("overlap", False)
    kinds = ("tp", "pp", "sequence_parallel")
    given["fused_cross_entropy"] = given.get("fusions", True)
    layout = Layout(**{kind: given.pop(kind) for kind in kinds if kind in given})
    made = Engine(
        load_model(folder / "config.json"),
        initialize(layout, seed=3, timeout_s=120.0),
        layout,
        ModelOptions("bf16", **CALM, **given),  # type: ignore[arg-type]
        EngineOptions(distributed_optimizer=distributed, overlap=overlap),
    )
    made.attach_optimizer(OptimizerSettings(lr=2e-3))
    if weights:
        load(folder, RankState.of(made), weights_only=True)
    return made


def steps(engine: Any, count: int) -> dict[str, Any]:
    """Optimizer steps over the same rows."""
    p = engine.parallel
    rows = [{k: v.to(p.device) for k, v in row.items()} for row in batches(259)[p.dp_rank :: p.dp]]
    found: dict[str, Any] = {"losses": [], "norms": []}
    for _ in range(count):
        engine.zero_grad()
        found["losses"].append(engine.forward_backward(rows)[0])
        found["norms"].append(engine.step().grad_norm)
    found["recordings"] = [len(replayed.recordings) for replayed in engine.graphs]
    return found


def train(folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    from shardwright.train.core.process import shutdown

    found = steps(engine_of(folder, options), STEPS)
    shutdown()
    return found


def save(folder: Path, save_dir: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Save while training goes on, and compare with copies made at that step."""
    import torch.distributed as dist

    from shardwright.ckpt.model.manifest import SideFile
    from shardwright.train.checkpoint.load import load
    from shardwright.train.checkpoint.rank_state import RankState
    from shardwright.train.checkpoint.save import Saver
    from shardwright.train.core.process import shutdown

    engine = engine_of(folder, options)
    held = RankState.of(engine)
    saver = Saver(held)
    found = steps(engine, SAVED)
    if saver.memory is not None:
        saver.memory.clear()  # a run has done many steps before its first save
    held.settle()
    copies = {h.live.key: h.tensor.cpu().clone() for h in held.weights() + held.moments()}
    sides = [SideFile("config.json", str(folder / "config.json"))]
    saver.save(save_dir / f"checkpoint-{SAVED}", SAVED, {}, sides)
    stalls = [saver.stalled_s]
    found["published_early"] = (save_dir / f"checkpoint-{SAVED}").exists()
    more = steps(engine, STEPS - SAVED)
    for key in ("losses", "norms"):
        found[key] += more[key]
    saver.wait()
    saver.save(save_dir / f"checkpoint-{STEPS}", STEPS, {}, sides)
    stalls.append(saver.stalled_s)
    saver.wait()
    shutdown()
    other = engine_of(folder, options, weights=False)
    again = RankState.of(other)
    load(save_dir / f"checkpoint-{SAVED}", again)
    differ = [
        h.live.key
        for h in again.weights() + again.moments()
        if not torch.equal(h.tensor.cpu(), copies[h.live.key])
    ]
    every: list[Any] = [None, None]
    dist.all_gather_object(every, differ)
    shutdown()
    differ = [key for keys in every for key in keys]
    return found | {"stalls": stalls, "tensors": len(copies), "differ": differ}


def resume(checkpoint: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """The steps after a checkpoint, in a layout of its own."""
    from shardwright.train.checkpoint.load import load
    from shardwright.train.checkpoint.rank_state import RankState
    from shardwright.train.core.process import shutdown

    engine = engine_of(checkpoint, options, weights=False)
    loaded = load(checkpoint, RankState.of(engine))
    engine.view.set_step(loaded.step)
    found = steps(engine, STEPS - SAVED)
    shutdown()
    return found | {"step": loaded.step}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
