"""Throughput, memory and save stall of the trainer on GPUs, beside transformers + DDP.

    python tests/bench/bench_gpu.py [--only dp2,tp2] [--save FOLDER] [--plain] [--profile]

A 1.1B Llama (hidden 2048, 16 layers, ffn 8192, 32 heads, 8 KV heads, vocab 32768), bf16,
sequences of 2048, random tokens. Each layout runs in processes of its own; the table is printed
at the end. TFLOP/s per GPU counts 6 x (layer and head parameters) + 6 x layers x hidden x
sequence per token, without recomputation. The first steps, in which kernels are compiled and
layers recorded, do not count. A first save waits here until its host memory is reserved, which a
run does in the background from its start; the time that took is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32768, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "initializer_range": 0.02,
}  # fmt: skip
SEQUENCE = 2048
WARM = 4  # steps that do not count

# name -> layout, micro-batch size, micro-batches per rank
CASES: dict[str, dict[str, Any]] = {
    "dp2": {"distributed": True, "overlap": True, "micro": 4, "count": 4},
    "dp2 micro 8": {"distributed": True, "overlap": True, "micro": 8, "count": 2},
    "tp2": {"tp": 2, "micro": 4, "count": 4},
    "tp2 micro 8": {"tp": 2, "micro": 8, "count": 4},
    "tp2 sp": {"tp": 2, "sp": True, "micro": 4, "count": 4},
    "tp2 sp micro 8": {"tp": 2, "sp": True, "micro": 8, "count": 4},
    "pp2": {"pp": 2, "micro": 2, "count": 8},
    "pp2 micro 4": {"pp": 2, "micro": 4, "count": 8},
    "hf ddp": {"hf": True, "micro": 4, "count": 4},
}


def batches(
    case: dict[str, Any], device: Any, vocab: int = CONFIG["vocab_size"]
) -> list[dict[str, Any]]:
    """Random micro-batches."""
    import torch

    found = []
    for _ in range(case["count"]):
        tokens = torch.randint(0, vocab, (case["micro"], SEQUENCE + 1))
        positions = torch.arange(SEQUENCE).expand(case["micro"], SEQUENCE).contiguous()
        found.append({
            "tokens": tokens[:, :-1].contiguous().to(device),
            "labels": tokens[:, 1:].contiguous().to(device),
            "loss_mask": torch.ones(case["micro"], SEQUENCE).to(device),
            "position_ids": positions.to(device),
        })  # fmt: skip
    return found


def ours(case: dict[str, Any], args: argparse.Namespace) -> dict[str, float]:
    """The trainer's engine."""
    import torch
    import torch.distributed as dist

    from shardwright.ckpt.checkpoint.config import model_from
    from shardwright.train.checkpoint.rank_state import RankState
    from shardwright.train.checkpoint.save import Saver
    from shardwright.train.config.schema import OptimizerSettings
    from shardwright.train.core.engine import Engine, EngineOptions
    from shardwright.train.core.layout import Layout
    from shardwright.train.core.process import initialize
    from shardwright.train.model.options import ModelOptions
    from shardwright.train.run.metrics import flops_per_token

    layout = Layout(case.get("tp", 1), case.get("pp", 1), case.get("sp", False))
    parallel = initialize(layout, seed=1)
    model = model_from(CONFIG, "bench")
    distributed = case.get("distributed", False)
    engine = Engine(
        model, parallel, layout,
        ModelOptions(
            precision="bf16", fused_cross_entropy=True, fusions=not args.plain,
            cuda_graphs=False if args.plain else None,
        ),
        EngineOptions(distributed, case.get("overlap", False)),
    )  # fmt: skip
    engine.attach_optimizer(OptimizerSettings(lr=1e-4))
    saver = Saver(RankState.of(engine), reserve=bool(args.save))
    rows = batches(case, parallel.device)
    times = []
    for _ in range(args.steps):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        engine.zero_grad()
        engine.forward_backward(rows, reduce=True)  # as train-ckpt
        engine.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    tokens = case["micro"] * case["count"] * SEQUENCE * parallel.dp / parallel.world_size
    median = statistics.median(times[WARM:])
    found = {
        "tflops": tokens * flops_per_token(model, SEQUENCE) / median / 1e12,
        "gib": torch.cuda.max_memory_allocated() / 2**30,
        "ms": 1e3 * median,
    }
    if args.profile:
        profile(engine, rows)
    if saver.memory is not None:
        while not saver.memory.ready:
            time.sleep(0.01)
        found["reserve_s"] = saver.memory.seconds
        for number in (1, 2):
            dist.barrier()
            start = time.perf_counter()
            saver.save(Path(args.save) / f"checkpoint-{number}", number, {})
            found[f"stall{number}_s"] = time.perf_counter() - start
            saver.wait()
            found["save_s"] = time.perf_counter() - start
    return found


def profile(engine: Any, rows: list[dict[str, Any]]) -> None:
    """Where the GPU time of a step goes, on each rank: its kernels by the time they take."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        start = time.perf_counter()
        engine.zero_grad()
        engine.forward_backward(rows, reduce=True)  # as train-ckpt
        engine.step()
        torch.cuda.synchronize()
        wall = time.perf_counter() - start
    kernels = [
        (e.name, e.time_range.start, e.time_range.end)
        for e in found.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    ]
    busy = covered([k[1:] for k in kernels])
    computing = covered([k[1:] for k in kernels if "nccl" not in k[0]])
    lines = [
        f"rank {engine.parallel.rank}: step {1e3 * wall:.1f} ms, GPU busy {busy / 1e3:.1f} ms, "
        f"communication that nothing hides {(busy - computing) / 1e3:.1f} ms"
    ]
    table: dict[str, list[float]] = {}
    for name, begin, end in kernels:
        table.setdefault(name, []).append(end - begin)
    for name, times in sorted(table.items(), key=lambda row: -sum(row[1]))[:30]:
        lines.append(f"{sum(times) / 1e3:9.2f} ms {len(times):6d} x  {name[:100]}")
    print("\n".join(lines), flush=True)


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of a union of intervals."""
    total, last = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total


def theirs(case: dict[str, Any], args: argparse.Namespace) -> dict[str, float]:
    """transformers with DDP, SDPA and autocast."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    from shardwright.ckpt.checkpoint.config import model_from
    from shardwright.train.run.metrics import flops_per_token

    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, attn_implementation="sdpa")).cuda()
    wrapped = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rows = batches(case, f"cuda:{rank}")
    times = []
    for _ in range(args.steps):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        for i, row in enumerate(rows):
            wrapped.require_backward_grad_sync = i == len(rows) - 1
            with torch.autocast("cuda", torch.bfloat16):
                loss = wrapped(input_ids=row["tokens"], labels=row["tokens"]).loss / len(rows)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    tokens = case["micro"] * case["count"] * SEQUENCE
    flops = flops_per_token(model_from(CONFIG, "bench"), SEQUENCE)
    return {
        "tflops": tokens * flops / statistics.median(times[WARM:]) / 1e12,
        "gib": torch.cuda.max_memory_allocated() / 2**30,
        "ms": 1e3 * statistics.median(times[WARM:]),
    }


def rank_main(args: argparse.Namespace) -> None:
    case = CASES[args.rank]
    found = theirs(case, args) if case.get("hf") else ours(case, args)
    if os.environ["RANK"] == "0":
        print("RESULT " + json.dumps({"name": args.rank, **found}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # a teardown of NCCL is not what is measured


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--only", default="", help="names of cases, or parts, by comma")
    made.add_argument("--steps", type=int, default=10)
    made.add_argument("--gpus", type=int, default=2)
    made.add_argument("--save", default="", help="folder to time saving in; removed at the end")
    made.add_argument("--plain", action="store_true", help="no fused kernels, no CUDA graphs")
    made.add_argument("--profile", action="store_true", help="print the kernels of a step")
    made.add_argument("--rank", default="", help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.rank:
        rank_main(args)
        return
    wanted = args.only.split(",")
    rows = []
    for name in CASES:
        if not any(name == word if word in CASES else word in name for word in wanted):
            continue
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   f"--nproc-per-node={args.gpus}", __file__,
                   "--rank", name, *sys.argv[1:]]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
        if args.save:
            shutil.rmtree(args.save, ignore_errors=True)
        line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
        if line is None:
            print(f"{name} failed:\n{done.stdout[-1500:]}{done.stderr[-2500:]}", flush=True)
            continue
        if args.profile:
            print(done.stdout, flush=True)
        rows.append(json.loads(line.removeprefix("RESULT ")))
        print(rows[-1], flush=True)
    base = next((row["tflops"] for row in rows if row["name"] == "hf ddp"), None)
    print("\n| layout | micro-batch x count | TFLOP/s per GPU | to HF + DDP | GiB | step ms "
          "| reserving s | first stall s | second stall s | save s |")  # fmt: skip
    print("|---" * 10 + "|")
    for row in rows:
        micro, count = CASES[row["name"]]["micro"], CASES[row["name"]]["count"]
        ratio = f"{row['tflops'] / base:.2f}" if base else "-"
        keys = ("reserve_s", "stall1_s", "stall2_s", "save_s")
        saves = " | ".join(f"{row[k]:.2f}" if k in row else "-" for k in keys)
        print(f"| {row['name']} | {micro} x {count} | {row['tflops']:.0f} | {ratio} "
              f"| {row['gib']:.1f} | {row['ms']:.0f} | {saves} |")  # fmt: skip


if __name__ == "__main__":
    main()
