"""GPU memory of the trainer's layouts beside what `plan-layout` estimates.

    python tests/bench/bench_memory.py [--only tp2,pp2] [--model 1B] [--worlds 1,2,4,8]

bf16, sequences of 2048, random tokens, random weights. Every rank of every layout is measured
(``torch.cuda.max_memory_allocated`` over two steps); a row is one pipeline stage, its largest
rank. Ranks share GPUs where there are too few: a process's memory does not depend on it (it does
depend on what the GPU must hold in all). All layouts of one world run in the same processes, each
after the last one's memory was given back. The runs that the estimate was fitted to
(tests/test_plan_layout.py) are not among these.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from bench_gpu import CONFIG as LLAMA
from bench_gpu import batches

MODELS: dict[str, dict[str, Any]] = {
    "llama 1.1B": LLAMA,
    # a slice of the 7B shape: its layers and its head, fewer of them
    "llama 7B, 8 layers": {**LLAMA, "hidden_size": 4096, "intermediate_size": 11008,
                           "num_hidden_layers": 8, "num_key_value_heads": 32,
                           "vocab_size": 32000},
    "qwen3 0.6B": {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
                   "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                   "num_attention_heads": 16, "head_dim": 128, "vocab_size": 151936,
                   "tie_word_embeddings": True},
    "gpt2 medium": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 1024,
                    "n_layer": 24, "n_head": 16, "n_positions": 2048, "vocab_size": 50257},
}  # fmt: skip
SHARDED = {"distributed": True, "overlap": True}

# (model, layout and options, micro-batch, micro-batches) of each world
CASES: dict[int, list[tuple[str, dict[str, Any], int, int]]] = {
    1: [
        ("llama 1.1B", {}, 2, 2),
        ("llama 1.1B", {"recompute": "full"}, 4, 2),
        ("llama 1.1B", {"recompute": "full"}, 16, 2),
        ("llama 1.1B", {"recompute": "selective"}, 4, 2),
        ("llama 7B, 8 layers", {}, 2, 2),
        ("qwen3 0.6B", {}, 2, 2),
        ("gpt2 medium", {}, 4, 2),
        ("gpt2 medium", {"recompute": "full"}, 4, 2),
    ],
    2: [
        ("llama 1.1B", {}, 4, 2),
        ("llama 1.1B", {**SHARDED, "recompute": "full"}, 4, 2),
        ("llama 1.1B", {"tp": 2, "recompute": "full"}, 4, 2),
        ("llama 1.1B", {"tp": 2, "sp": True, "recompute": "full"}, 8, 2),
        ("llama 1.1B", {"pp": 2, "recompute": "full"}, 4, 4),
        ("llama 1.1B", {"pp": 2}, 1, 8),
        ("llama 7B, 8 layers", {"tp": 2}, 2, 2),
        ("llama 7B, 8 layers", {"pp": 2}, 1, 4),
    ],
    4: [
        ("llama 1.1B", {"tp": 2, "pp": 2}, 4, 4),
        ("llama 1.1B", {"tp": 4, "sp": True}, 4, 2),
        ("llama 1.1B", {"pp": 4}, 2, 8),
        ("llama 1.1B", {"tp": 2, **SHARDED}, 4, 2),
        ("llama 1.1B", SHARDED, 2, 2),
        ("qwen3 0.6B", {"tp": 2, "pp": 2}, 2, 4),
    ],
    8: [
        ("llama 1.1B", {"tp": 2, "pp": 2, "sp": True, "distributed": True}, 4, 4),
        ("llama 7B, 8 layers", {"tp": 2, "pp": 2, "sp": True, "distributed": True}, 1, 4),
    ],
}  # fmt: skip


def measured(config: dict[str, Any], given: dict[str, Any], micro: int, count: int) -> int:
    """Bytes of ``max_memory_allocated`` of this rank, whole run."""
    import torch

    from shardwright.ckpt.checkpoint.config import model_from
    from shardwright.train.config.schema import OptimizerSettings
    from shardwright.train.core.engine import Engine, EngineOptions
    from shardwright.train.core.layout import Layout
    from shardwright.train.core.process import initialize, shutdown
    from shardwright.train.model.options import ModelOptions

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert before < 2**26, f"{before} bytes were left by the case before"
    layout = Layout(given.get("tp", 1), given.get("pp", 1), given.get("sp", False))
    parallel = initialize(layout, seed=1)
    distributed, overlap = given.get("distributed", False), given.get("overlap", False)
    engine = Engine(
        model_from(config, "bench"), parallel, layout,
        ModelOptions("bf16", fused_cross_entropy=True, recompute=given.get("recompute", "none")),
        EngineOptions(distributed, overlap),
    )  # fmt: skip
    engine.attach_optimizer(OptimizerSettings(lr=1e-4))
    rows = batches({"micro": micro, "count": count}, parallel.device, config["vocab_size"])
    for _ in range(2):
        engine.zero_grad()
        engine.forward_backward(rows, reduce=True)
        engine.step()
    torch.cuda.synchronize()
    most = torch.cuda.max_memory_allocated()
    del engine, rows
    shutdown()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for each stream, kept by torch
    torch.cuda.empty_cache()
    return most


def rank_main(only: list[str]) -> None:
    import torch
    import torch.distributed as dist
    from gpu_ranks import share

    share()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    control = dist.new_group(backend="gloo")
    world = dist.get_world_size()
    for number, (name, given, micro, count) in enumerate(CASES[world]):
        if only and not any(word in describe(name, given) for word in only):
            continue
        found: list[Any] = [None] * world
        dist.all_gather_object(found, measured(MODELS[name], given, micro, count), group=control)
        if dist.get_rank() == 0:
            print("RESULT " + json.dumps([world, number, found]), flush=True)
    dist.barrier(control)
    sys.stdout.flush()
    os._exit(0)


def estimated(name: str, given: dict[str, Any], micro: int, count: int, world: int) -> list[float]:
    """Bytes of every stage, as `plan-layout` has them."""
    from shardwright.ckpt.checkpoint.config import model_from
    from shardwright.train.planning import estimate

    model = model_from(MODELS[name], name)
    tp, pp = given.get("tp", 1), given.get("pp", 1)
    layout = estimate.RunLayout(
        tp, pp, world // tp // pp, micro=micro, count=count,
        sequence_parallel=given.get("sp", False), distributed=given.get("distributed", False),
        recompute=given.get("recompute", "none"),
    )  # fmt: skip
    shape, weights = estimate.shape_of(model, name), estimate.weights_of(model, tp)
    return [estimate.memory(shape, weights, layout, stage).allocated for stage in range(pp)]


def describe(name: str, given: dict[str, Any]) -> str:
    """A layout in a table."""
    parts = [f"{k}{given[k]}" for k in ("tp", "pp") if k in given]
    parts += ["sequence parallel"] if given.get("sp") else []
    parts += ["distributed optimizer"] if given.get("distributed") else []
    parts += [f"recompute {given['recompute']}"] if "recompute" in given else []
    return f"{name}: {', '.join(parts) or 'nothing split'}"


def table(results: list[list[Any]]) -> None:
    print("\n| model: layout | ranks | micro-batch x count | stage | GiB measured "
          "| GiB estimated | off by |\n" + "|---" * 7 + "|")  # fmt: skip
    for world, number, ranks in results:
        name, given, micro, count = CASES[world][number]
        guesses = estimated(name, given, micro, count, world)
        for stage, guess in enumerate(guesses):
            size = world // len(guesses)  # stages are the outermost ranks
            most = max(ranks[stage * size : (stage + 1) * size])
            print(f"| {describe(name, given)} | {world} | {micro} x {count} | {stage} "
                  f"| {most / 2**30:.2f} | {guess / 2**30:.2f} "
                  f"| {100 * (guess / most - 1):+.1f} % |")  # fmt: skip


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--only", default="", help="parts of names, by comma")
    made.add_argument("--worlds", default="1,2,4,8", help="numbers of ranks, by comma")
    made.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = made.parse_args()
    only = [word for word in args.only.split(",") if word]
    if args.rank:
        rank_main(only)
        return
    results = []
    for world in map(int, args.worlds.split(",")):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   f"--nproc-per-node={world}", __file__, "--rank", *sys.argv[1:]]  # fmt: skip
        ran = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert ran.stdout is not None
        for line in ran.stdout:
            if line.startswith("RESULT "):
                results.append(json.loads(line.removeprefix("RESULT ")))
                print(line.rstrip(), flush=True)
        if ran.wait():
            print(f"{world} ranks ended with {ran.returncode}", flush=True)
    table(results)


if __name__ == "__main__":
    main()
