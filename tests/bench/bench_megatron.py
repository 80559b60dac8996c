"""Time, CPU seconds and memory of Megatron-LM's formats against `cp` of the same bytes.

    python tests/bench/bench_megatron.py [--gb 2.2] [--runs 5] [--dir DIR]

Whole processes, warm, on a tmpfs (default /dev/shm), medians of interleaved runs. Two sources of
about that size, tp2 pp2, written with torch alone: a random Llama in bf16 ("weights"), and a
smaller one with fp32 masters and moments ("optimizer", seven times its weights). Ratios are to
`cp -r` of the source of the job, in the same run; a merge of the second writes its weights alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from bench_move import measure, print_table, remove, script

H, F, HEADS, GROUPS, VOCAB = 2048, 5632, 32, 4, 32000
QKV = (HEADS + 2 * GROUPS) * 64
LAYER = QKV * H + H * H + 3 * F * H + 2 * H
ENDS = 2 * VOCAB * H


def layers_for(size: float, each: int) -> int:
    """Layers, an even number, of a model whose parameters take ``each`` bytes."""
    return max(2, 2 * round((size / each - ENDS) / LAYER / 2))


def make_source(root: Path, layers: int, optimizer: bool) -> None:
    """Four ranks as Megatron-LM writes them, random values, a rank at a time."""
    import torch

    torch.manual_seed(0)
    replicated: dict[tuple[int, str], list[torch.Tensor]] = {}
    for stage in (0, 1):
        for rank in (0, 1):
            names = {}
            if stage == 0:
                names["embedding.word_embeddings.weight"] = (VOCAB // 2, H)
            for i in range(layers // 2):
                b = f"decoder.layers.{i}."
                names[b + "input_layernorm.weight"] = (H,)
                names[b + "self_attention.linear_proj.weight"] = (H, H // 2)
                names[b + "self_attention.linear_qkv.weight"] = (QKV // 2, H)
                names[b + "pre_mlp_layernorm.weight"] = (H,)
                names[b + "mlp.linear_fc1.weight"] = (F, H)
                names[b + "mlp.linear_fc2.weight"] = (H, F // 2)
            if stage == 1:
                names["decoder.final_layernorm.weight"] = (H,)
                names["output_layer.weight"] = (VOCAB // 2, H)
            values = {}
            for name, shape in names.items():
                kinds = 3 if optimizer else 1
                made = [torch.rand(shape) + 0.5 for _ in range(kinds)]
                if len(shape) == 1:  # equal on tensor-parallel ranks
                    made = replicated.setdefault((stage, name), made)
                values[name] = made
            state = {
                "args": arguments(layers),
                "checkpoint_version": 3.0,
                "iteration": 3,
                "model": {name: made[0].bfloat16() for name, made in values.items()},
            }
            if optimizer:
                state["optimizer"] = optimizer_state(values)
            folder = root / "iter_0000003" / f"mp_rank_{rank:02d}_{stage:03d}"
            folder.mkdir(parents=True)
            torch.save(state, folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("3")


def optimizer_state(values: dict[str, list]) -> dict[str, object]:
    """Float16OptimizerWithFloat16Params: matrices in one group, the rest in another."""
    import torch

    groups = [[n for n, v in values.items() if (v[0].dim() > 1) == many] for many in (True, False)]
    order = groups[0] + groups[1]
    state = {
        i: {"step": torch.tensor(3.0), "exp_avg": values[n][1], "exp_avg_sq": values[n][2]}
        for i, n in enumerate(order)
    }
    described = [
        {"wd_mult": 1.0 - k, "lr_mult": 1.0, "lr": 0.1, "params": [order.index(n) for n in group]}
        for k, group in enumerate(groups)
    ]
    # the weights are these, rounded
    masters = [[values[n][0].bfloat16().float() for n in group] for group in groups]
    return {
        "optimizer": {"state": state, "param_groups": described},
        "fp32_from_fp16_params": masters,
    }


def arguments(layers: int) -> argparse.Namespace:
    """What Megatron-LM keeps of its command line, as far as a model needs it."""
    import torch

    return argparse.Namespace(
        num_layers=layers, hidden_size=H, ffn_hidden_size=F, num_attention_heads=HEADS,
        group_query_attention=True, num_query_groups=GROUPS, kv_channels=64,
        max_position_embeddings=2048, padded_vocab_size=VOCAB, position_embedding_type="rope",
        normalization="RMSNorm", swiglu=True, untie_embeddings_and_output_weights=True,
        add_bias_linear=False, tensor_model_parallel_size=2, pipeline_model_parallel_size=2,
        make_vocab_size_divisible_by=128, params_dtype=torch.bfloat16, bf16=True,
    )  # fmt: skip


def cases(root: Path) -> dict[str, tuple[str, Callable[[str], list[str]]]]:
    """Label -> source, and the command that writes to a given path."""
    reshard, merge = script("reshard"), script("merge-ckpt")

    def copy(name: str) -> tuple[str, Callable[[str], list[str]]]:
        return name, lambda out: ["cp", "-r", str(root / name), out]

    def moved(name: str, *more: str) -> tuple[str, Callable[[str], list[str]]]:
        tail = more or ("--tp", "4", "--pp", "1")
        return name, lambda out: [reshard, str(root / name), "--output", out, *tail]

    def merged(name: str, *more: str) -> tuple[str, Callable[[str], list[str]]]:
        return name, lambda out: [merge, str(root / name), "--output", out, *more]

    four = ("--tp", "4", "--pp", "1")
    return {
        "cp -r of the weights": copy("weights"),
        "torch: merge-ckpt": merged("weights"),
        "torch: reshard to tp4pp1": moved("weights"),
        "torch -> torch_dist": moved("weights", "--to", "torch_dist"),
        "torch_dist: merge-ckpt": merged("weights_dist"),
        "torch_dist -> torch, tp4pp1": moved("weights_dist", "--to", "megatron", *four),
        "torch -> native shards, tp4pp1": moved("weights", "--to", "shards", *four),
        "cp -r with optimizer": copy("optimizer"),
        "torch: reshard to tp4pp1, with optimizer": moved("optimizer"),
        "torch -> torch_dist, with optimizer": moved("optimizer", "--to", "torch_dist"),
        "torch_dist -> torch, tp4pp1, with optimizer": moved(
            "optimizer_dist", "--to", "megatron", *four
        ),
        "torch -> native shards, tp4pp1, with optimizer": moved(
            "optimizer", "--to", "shards", *four
        ),
        "torch: merge-ckpt of its weights": merged("optimizer"),
        "torch: merge-ckpt of its masters": merged("optimizer", "--from-master"),
        "torch_dist: merge-ckpt of its weights": merged("optimizer_dist"),
    }


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--gb", type=float, default=2.2, help="size of a source, 1e9 bytes")
    made.add_argument("--runs", type=int, default=5)
    made.add_argument("--dir", default="/dev/shm" if os.path.isdir("/dev/shm") else None)
    made.add_argument("--only", default="", help="labels that contain this text, and cp")
    args = made.parse_args()
    sizes = {}
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        root = Path(name)
        for kind, each in (("weights", 2), ("optimizer", 14)):
            maker = multiprocessing.get_context("spawn").Process(
                target=make_source,
                args=(root / kind, layers_for(1e9 * args.gb, each), kind == "optimizer"),
            )
            maker.start()
            maker.join()
            measure([script("reshard"), str(root / kind), "--to", "torch_dist",
                     "--output", str(root / f"{kind}_dist")])  # fmt: skip
            sizes[kind] = sum(f.stat().st_size for f in (root / kind).rglob("*") if f.is_file())
        todo = {k: v for k, v in cases(root).items() if args.only in k or k.startswith("cp")}
        results: dict[str, list[tuple[float, float, float]]] = {label: [] for label in todo}
        for _ in range(args.runs):
            for label, (_, command) in todo.items():
                out = str(root / "out")
                results[label].append(measure(command(out)))
                remove(out)
        shutil.rmtree(root / "weights")
    copies = {source: label for label, (source, _) in todo.items() if label.startswith("cp")}
    said = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in sizes.items())
    of = {label: copies[source.removesuffix("_dist")] for label, (source, _) in todo.items()}
    print_table(results, of, said)


if __name__ == "__main__":
    main()
