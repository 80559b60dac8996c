"""Time, CPU seconds and memory of reshard and merge against `cp` and the naive way.

    make bench        or        python tests/bench/bench_move.py [--gb 2.2] [--runs 5] [--dir DIR]

Whole processes, warm, on a tmpfs (default /dev/shm): a random Llama in bf16, medians of
interleaved runs. `cp` copies the bytes of the source. The naive way loads every shard,
concatenates with torch and saves with safetensors, as most converters do.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SHAPE = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32,
         "num_key_value_heads": 4, "vocab_size": 32000, "model_type": "llama",
         "tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"]}  # fmt: skip
LAYER_BYTES = 2 * (2048 * 2048 * 2 + 2048 * 256 * 2 + 3 * 2048 * 5632 + 2 * 2048)
VOCAB_BYTES = 2 * 2 * 32000 * 2048


def tensor_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of the model."""
    h, f, kv, v = 2048, 5632, 256, 32000
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, h)}
    for i in range(layers):
        m = f"model.layers.{i}."
        shapes |= {
            m + "input_layernorm.weight": (h,), m + "self_attn.q_proj.weight": (h, h),
            m + "self_attn.k_proj.weight": (kv, h), m + "self_attn.v_proj.weight": (kv, h),
            m + "self_attn.o_proj.weight": (h, h), m + "post_attention_layernorm.weight": (h,),
            m + "mlp.gate_proj.weight": (f, h), m + "mlp.up_proj.weight": (f, h),
            m + "mlp.down_proj.weight": (h, f),
        }  # fmt: skip
    return {**shapes, "model.norm.weight": (h,), "lm_head.weight": (v, h)}


def make_model(folder: Path, layers: int) -> None:
    """A random checkpoint, written without the code under test; finite bf16 values."""
    folder.mkdir()
    config = {**SHAPE, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    header, at = {"__metadata__": {"format": "pt"}}, 0
    shapes = tensor_shapes(layers)
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    import numpy as np  # in a process of its own: a child's peak RSS counts its parent's

    rng = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for shape in shapes.values():
            bits = rng.integers(0, 1 << 16, math.prod(shape), np.uint16) & 0xBFFF
            file.write(bits.tobytes())


NAIVE = """
import glob, json, os, sys, torch
from safetensors.torch import load_file, save_file
src, dst, layers = sys.argv[1], sys.argv[2], int(sys.argv[3])
r = {(t, p): load_file(f"{src}/model_tp_{t}_pp_{p}.safetensors") for t in (0, 1) for p in (0, 1)}
full = {}
for p in (0, 1):
    for name in r[0, p]:
        parts = [r[t, p][name] for t in (0, 1)]
        if "layernorm" in name:
            full[name] = parts[0]
        elif "linear_proj" in name or "linear_fc2" in name:
            full[name] = torch.cat(parts, 1)
        elif "linear_fc1" in name:
            halves = [x.chunk(2) for x in parts]
            full[name] = torch.cat([h[0] for h in halves] + [h[1] for h in halves])
        else:
            full[name] = torch.cat(parts)
out = {}
for name, x in full.items():
    if "linear_qkv" in name:
        g = x.view(4, 10, 64, 2048)
        out[name + ".q"] = g[:, :8].reshape(-1, 2048)
        out[name + ".k"] = g[:, 8].reshape(-1, 2048)
        out[name + ".v"] = g[:, 9].reshape(-1, 2048)
    else:
        out[name] = x.contiguous()
os.makedirs(dst)
save_file({k: v.contiguous() for k, v in out.items()}, dst + "/model.safetensors")
"""


def measure(command: list[str]) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and peak RSS in MiB of a process that must succeed."""
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{command} failed with {child.returncode}")
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def script(name: str) -> str:
    """A console script of this interpreter."""
    return str(Path(sysconfig.get_path("scripts")) / name)


def cases(root: Path, layers: int) -> dict[str, Callable[[str], list[str]]]:
    """Label -> command that writes to a given path."""
    src, binary, recorded = str(root / "src"), str(root / "srcbin"), str(root / "srcsum")
    unchecked = "--no-verify-source"
    reshard, merge = script("reshard"), script("merge-ckpt")
    return {
        "cp -r": lambda out: ["cp", "-r", src, out],
        "reshard tp2pp2 -> tp4pp1": lambda out: [
            reshard, src, "--tp", "4", "--pp", "1", "--output", out],
        "merge-ckpt to one file": lambda out: [merge, src, "--output", out + ".safetensors"],
        "reshard, --checksum": lambda out: [
            reshard, src, "--tp", "4", "--pp", "1", "--output", out, "--checksum"],
        "merge-ckpt, --checksum": lambda out: [
            merge, src, "--output", out + ".safetensors", "--checksum"],
        "reshard to .bin": lambda out: [
            reshard, src, "--tp", "4", "--pp", "1", "--output", out, "--no-safe-serialization"],
        "merge-ckpt to .bin": lambda out: [merge, src, "--output", out + ".bin"],
        "reshard .bin -> .bin, source's CRCs checked": lambda out: [
            reshard, binary, "--tp", "4", "--pp", "1", "--output", out],
        "reshard .bin -> .bin, not checked": lambda out: [
            reshard, binary, "--tp", "4", "--pp", "1", "--output", out, unchecked],
        "reshard, source's digests checked": lambda out: [
            reshard, recorded, "--tp", "4", "--pp", "1", "--output", out],
        "reshard of the same, not checked": lambda out: [
            reshard, recorded, "--tp", "4", "--pp", "1", "--output", out, unchecked],
        "merge-ckpt, source's digests checked": lambda out: [
            merge, recorded, "--output", out + ".safetensors"],
        "naive: load, cat, save_file": lambda out: [
            sys.executable, "-c", NAIVE, src, out, str(layers)],
    }  # fmt: skip


def remove(path: str) -> None:
    """Whatever a case wrote."""
    for name in (path, path + ".safetensors", path + ".bin"):
        if os.path.isdir(name):
            shutil.rmtree(name)
        elif os.path.exists(name):
            os.unlink(name)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--gb", type=float, default=2.2, help="size of the model, 1e9 bytes")
    made.add_argument("--runs", type=int, default=5)
    made.add_argument("--dir", default="/dev/shm" if os.path.isdir("/dev/shm") else None)
    made.add_argument("--only", default="", help="labels that contain this text, and cp")
    args = made.parse_args()
    layers = max(2, round((args.gb * 1e9 - VOCAB_BYTES) / LAYER_BYTES))
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        root = Path(name)
        maker = multiprocessing.get_context("spawn").Process(
            target=make_model, args=(root / "hf", layers + layers % 2)
        )
        maker.start()
        maker.join()
        forms = {"src": [], "srcbin": ["--no-safe-serialization"], "srcsum": ["--checksum"]}
        for out, more in forms.items():
            measure([script("reshard"), str(root / "hf"), "--tp", "2", "--pp", "2",
                     "--output", str(root / out), *more])  # fmt: skip
        size = sum(f.stat().st_size for f in (root / "src").iterdir())
        shutil.rmtree(root / "hf")
        todo = {k: v for k, v in cases(root, layers).items() if args.only in k or k == "cp -r"}
        results: dict[str, list[tuple[float, float, float]]] = {label: [] for label in todo}
        for _ in range(args.runs):
            for label, command in todo.items():
                out = str(root / "out")
                results[label].append(measure(command(out)))
                remove(out)
    print_table(results, dict.fromkeys(results, "cp -r"), f"{size / 1e9:.2f} GB")


def print_table(
    results: dict[str, list[tuple[float, float, float]]], copies: dict[str, str], said: str
) -> None:
    """One row a case: medians, and the ratio to its ``copies``, a case of the same run."""
    runs = len(next(iter(results.values())))
    print(f"{said}, medians of {runs} interleaved runs, {os.cpu_count()} cores\n")
    print("| job | wall s | ratio to cp | CPU s | peak RSS MiB |\n" + "|---" * 5 + "|")
    for label, rows in results.items():
        wall, cpu, rss = (statistics.median(column) for column in zip(*rows, strict=True))
        base = results[copies[label]]
        ratio = statistics.median(r[0] / b[0] for r, b in zip(rows, base, strict=True))
        print(f"| {label} | {wall:.2f} | {ratio:.2f} | {cpu:.2f} | {rss:.0f} |")


if __name__ == "__main__":
    main()
