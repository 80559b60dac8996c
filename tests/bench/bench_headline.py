"""TP2 x PP2 x DP2 with the distributed optimizer and sequence parallelism, and on in other layouts.

    python tests/bench/bench_headline.py --dir FOLDER [--shape 7B|1B|small|tiny] [--ranks 8]

`train-ckpt` from random weights on synthetic tokens, bf16: 20 steps with a checkpoint after the
10th; then from that checkpoint at TP4 x PP2, TP8 and PP8 (half of each with 4 ranks) the same last
ten steps, whose losses are compared; then `reshard` of the last checkpoint, optimizer state
included, to TP4 beside `cp` (whose copy is removed first). 7B is the run for eight GPUs; ranks
share GPUs where there are too few (gpu_ranks.py), and run on CPU without one. Speed and memory are
those that the command's bar shows: of one rank of the last stage.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from bench_move import measure

RANKS = Path(__file__).parents[1] / "gpu_ranks.py"
STEPS, SAVED = 20, 10
# hidden, layers, ffn, heads, key-value heads, sequence
SHAPES = {
    "7B": (4096, 32, 11008, 32, 32, 2048),
    "1B": (2048, 16, 8192, 32, 8, 2048),
    "small": (512, 8, 1408, 8, 8, 512),
    "tiny": (64, 8, 128, 8, 8, 64),
}


def config(shape: str, vocab: int) -> dict[str, object]:
    h, layers, ffn, heads, groups, sequence = SHAPES[shape]
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": h,
        "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": groups, "vocab_size": vocab, "max_position_embeddings": sequence,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "hidden_act": "silu", "initializer_range": 0.02,
    }  # fmt: skip


class Runs:
    """Runs of train-ckpt in one folder."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.root = args, Path(args.dir)
        self.root.mkdir(parents=True)
        h, *_, self.sequence = SHAPES[args.shape]
        vocab = 320 if h < 1024 else 32000
        (self.root / "config.json").write_text(json.dumps(config(args.shape, vocab)))
        words = random.Random(0).choices([f"{i:x}" for i in range(4096)], k=40 * self.sequence)
        (self.root / "data.txt").write_text(" ".join(words))
        self.rows: list[dict[str, object]] = []

    def train(self, name: str, *options: str) -> dict[int, float]:
        """Losses by step; a row for the table."""
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={self.args.ranks}", str(RANKS), "-m",
            "shardwright.tools.train_ckpt", "--model", str(self.root / "config.json"), "--data",
            str(self.root / "data.txt"), "--save-dir", str(self.root / name), "--seq-length",
            str(self.sequence), "--steps", str(STEPS), "--micro-batch-size", "1",
            "--global-batch-size", "16", "--precision", "bf16", "--lr", "1e-4", *options,
        ]  # fmt: skip
        began = time.perf_counter()
        done = subprocess.run(
            command, stderr=subprocess.PIPE, text=True, env={"OMP_NUM_THREADS": "1", **os.environ}
        )
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stderr[-4000:]}")
        lines = (self.root / name / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        shown = re.findall(r"TF/s=([\d.]+), GiB=([\d.]+)", done.stderr) or [("-", "-")]
        self.rows.append({
            "layout": name, "TFLOP/s": max(float(x[0]) for x in shown), "GiB": shown[-1][1],
            "tokens/s": round(statistics.median(x["tokens_per_s"] for x in steps[3:])),
            "whole s": round(time.perf_counter() - began),
        })  # fmt: skip
        print(self.rows[-1], flush=True)
        return {x["step"]: x["loss"] for x in steps}


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--dir", required=True, help="a folder that does not exist; removed after")
    made.add_argument("--shape", choices=SHAPES, default="7B")
    made.add_argument("--ranks", type=int, choices=(4, 8), default=8)
    args = made.parse_args()
    runs, n = Runs(args), args.ranks
    first = f"tp2 pp2 dp{n // 4}"
    losses = runs.train(
        first, "--tp", "2", "--pp", "2", "--distributed-optimizer", "--sequence-parallel",
        "--save-interval", str(SAVED),
    )  # fmt: skip
    saved = str(runs.root / first / f"checkpoint-{SAVED}")
    worst = {}
    for tp, pp in ((n // 2, 2), (n, 1), (1, n)):
        name = f"tp{tp} pp{pp}"
        again = runs.train(name, "--tp", str(tp), "--pp", str(pp), "--resume", saved)
        assert sorted(again) == list(range(SAVED + 1, STEPS + 1)), sorted(again)
        worst[name] = max(abs(again[step] - losses[step]) for step in again)
        shutil.rmtree(runs.root / name)
    last, out = runs.root / first / f"checkpoint-{STEPS}", str(runs.root / "out")
    size = sum(f.stat().st_size for f in last.rglob("*") if f.is_file())
    jobs = {
        "cp -r": ["cp", "-r", str(last), out],
        "reshard": [sys.executable, "-m", "shardwright.tools.reshard", str(last), "--tp", "4",
                    "--pp", "1", "--output", out],
    }  # fmt: skip
    moved = {}
    for name, command in jobs.items():
        moved[name] = measure(command)
        shutil.rmtree(out)
    print("\n| layout | TFLOP/s per GPU | GiB | tokens/s | loss differs by at most |")
    print("|---" * 5 + "|")
    for row in runs.rows:
        differs = f"{worst[str(row['layout'])]:.1e}" if row["layout"] in worst else "-"
        print(
            f"| {row['layout']} | {row['TFLOP/s']} | {row['GiB']} | {row['tokens/s']} | {differs} |"
        )
    print(f"\nlosses {losses[1]:.4f} to {losses[STEPS]:.4f}; checkpoint of {size / 1e9:.2f} GB: "
          + ", ".join(f"{k} {v[0]:.1f} s, {v[2]:.0f} MiB" for k, v in moved.items()))  # fmt: skip
    shutil.rmtree(runs.root)


if __name__ == "__main__":
    main()
