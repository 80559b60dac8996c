"""Throughput, memory and save stall of the trainer on GPUs, beside transformers + DDP.

    python tests/bench/bench_gpu.py [--only dp2] [--steps 8] [--gpus 2]

A 1.1B Llama (hidden 2048, 16 layers, ffn 8192, 32 heads, 8 KV heads, vocab 32768), bf16,
sequences of 2048, random tokens. Each layout runs in processes of its own; the table is printed
at the end. TFLOP/s per GPU counts 6 x (layer and head parameters) + 6 x layers x hidden x
sequence per token, without recomputation.
"""

from __future__ import annotations

import argparse
import json
import os
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


def batches(case: dict[str, Any], device: Any) -> list[dict[str, Any]]:
    """Random micro-batches."""
    import torch

    found = []
    for _ in range(case["count"]):
        tokens = torch.randint(0, CONFIG["vocab_size"], (case["micro"], SEQUENCE + 1))
        positions = torch.arange(SEQUENCE).expand(case["micro"], SEQUENCE).contiguous()
        found.append({
            "tokens": tokens[:, :-1].contiguous().to(device),
            "labels": tokens[:, 1:].contiguous().to(device),
            "loss_mask": torch.ones(case["micro"], SEQUENCE).to(device),
            "position_ids": positions.to(device),
        })  # fmt: skip
    return found


def ours(case: dict[str, Any], steps: int, save: str) -> dict[str, float]:
    """The trainer's engine."""
    import torch
    import torch.distributed as dist

    from shardwright.ckpt.checkpoint import model_from
    from shardwright.train import optim
    from shardwright.train.engine import Engine, EngineOptions
    from shardwright.train.metrics import flops_per_token
    from shardwright.train.model import ModelOptions
    from shardwright.train.parallel import Layout, initialize
    from shardwright.train.state import Saver

    layout = Layout(case.get("tp", 1), case.get("pp", 1), case.get("sp", False))
    parallel = initialize(layout, seed=1)
    model = model_from(CONFIG, "bench")
    distributed = case.get("distributed", False)
    engine = Engine(
        model, parallel, layout,
        ModelOptions(precision="bf16", fused_cross_entropy=True),
        EngineOptions(distributed, case.get("overlap", False)),
    )  # fmt: skip
    engine.attach_optimizer(
        optim.OptimizerSpec(
            lr=1e-4, precision="bf16", distributed=distributed,
            overlap_param_gather=distributed and case.get("overlap", False),
        )
    )  # fmt: skip
    rows = batches(case, parallel.device)
    times = []
    for step in range(steps):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        engine.zero_grad()
        engine.forward_backward(rows)
        engine.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        if os.environ.get("BENCH_PROFILE") and step == steps - 2:
            profile(engine, rows)
    tokens = case["micro"] * case["count"] * SEQUENCE * parallel.dp / parallel.world_size
    found = {
        "tflops": tokens * flops_per_token(model, SEQUENCE) / statistics.median(times[2:]) / 1e12,
        "gib": torch.cuda.max_memory_allocated() / 2**30,
        "ms": 1e3 * statistics.median(times[2:]),
    }
    if save:
        saver = Saver(engine.rank_state())
        start = time.perf_counter()
        saver.save(Path(save) / "checkpoint-1", 1, {})
        found["stall_s"] = time.perf_counter() - start
        saver.wait()
        found["save_s"] = time.perf_counter() - start
        start = time.perf_counter()
        saver.save(Path(save) / "checkpoint-2", 2, {})
        found["stall2_s"] = time.perf_counter() - start
        saver.wait()
    return found


def profile(engine: Any, rows: list[dict[str, Any]]) -> None:
    """Where a step's GPU time goes, on rank 0."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        engine.zero_grad()
        engine.forward_backward(rows)
        engine.step()
        torch.cuda.synchronize()
    if engine.parallel.rank == 0:
        table = found.key_averages().table(sort_by="self_cuda_time_total", row_limit=35)
        print("\n".join(line[:60] + line[-110:] for line in table.splitlines()), flush=True)


def theirs(case: dict[str, Any], steps: int) -> dict[str, float]:
    """transformers with DDP, SDPA and autocast."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    from shardwright.ckpt.checkpoint import model_from
    from shardwright.train.metrics import flops_per_token

    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, attn_implementation="sdpa")).cuda()
    wrapped = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rows = batches(case, f"cuda:{rank}")
    times = []
    for _ in range(steps):
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
        "tflops": tokens * flops / statistics.median(times[2:]) / 1e12,
        "gib": torch.cuda.max_memory_allocated() / 2**30,
        "ms": 1e3 * statistics.median(times[2:]),
    }


def rank_main(name: str, steps: int, save: str) -> None:
    case = CASES[name]
    found = theirs(case, steps) if case.get("hf") else ours(case, steps, save)
    if os.environ["RANK"] == "0":
        print("RESULT " + json.dumps({"name": name, **found}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # a teardown of NCCL is not what is measured


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--only", default="", help="cases whose name contains one of these, by comma")
    made.add_argument("--steps", type=int, default=8)
    made.add_argument("--gpus", type=int, default=2)
    made.add_argument("--save", default="", help="folder to time saving in")
    made.add_argument("--rank", default="", help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.rank:
        rank_main(args.rank, args.steps, args.save)
        return
    wanted = args.only.split(",")
    rows = []
    for name in CASES:
        if not any(word in name for word in wanted):
            continue
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   f"--nproc-per-node={args.gpus}", __file__, "--rank", name, "--steps",
                   str(args.steps), "--save", args.save]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
        line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
        if line is None:
            print(f"{name} failed:\n{done.stdout[-1500:]}{done.stderr[-2500:]}", flush=True)
            continue
        if os.environ.get("BENCH_PROFILE"):
            print(done.stdout, flush=True)
        rows.append(json.loads(line.removeprefix("RESULT ")))
        print(rows[-1], flush=True)
    base = next((row["tflops"] for row in rows if row["name"] == "hf ddp"), None)
    print("\n| layout | TFLOP/s per GPU | to HF + DDP | GiB | step ms | save stall s | save s |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        ratio = f"{row['tflops'] / base:.2f}" if base else "-"
        saves = [f"{row[k]:.2f}" if k in row else "-" for k in ("stall2_s", "save_s")]
        print(f"| {row['name']} | {row['tflops']:.0f} | {ratio} | {row['gib']:.1f} | "
              f"{row['ms']:.0f} | {saves[0]} | {saves[1]} |")  # fmt: skip


if __name__ == "__main__":
    main()
