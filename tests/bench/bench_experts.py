"""Seconds and memory of planning a move of DeepSeek-V3 from one layout of experts to another.

    python tests/bench/bench_experts.py [--etp 1] [--dir DIR]

Sparse files of true size and real headers: 61 layers of 256 experts, tp 8 pp 16 ep 32, to tp 4 pp 8
ep 64. Opening them and planning are measured apart, in CPU seconds, which other load on the machine
does not change; memory is the peak of the process.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import tempfile
import time
from pathlib import Path

from shardwright.ckpt.checkpoint.config import model_from
from shardwright.ckpt.checkpoint.types import Checkpoint
from shardwright.ckpt.formats.native import writer
from shardwright.ckpt.formats.writing import WriteRequest
from shardwright.ckpt.model.design import Design
from shardwright.ckpt.model.family import Model, build_mesh
from shardwright.ckpt.model.manifest import Manifest, TensorMeta
from shardwright.ckpt.model.placement import shapes_of
from shardwright.ckpt.model.planner import plan, resolve
from shardwright.ckpt.model.target import Target
from shardwright.ckpt.move.files import create
from shardwright.ckpt.move.storage import storage_path
from shardwright.ckpt.reader import read_checkpoint

CONFIG = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "vocab_size": 129280, "n_routed_experts": 256, "n_shared_experts": 1,
    "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False, "num_nextn_predict_layers": 0, "torch_dtype": "bfloat16",
}  # fmt: skip


def request(model: Model, tp: int, counts: list[int], ep: int, etp: int) -> WriteRequest:
    """What the writer of native shards gets, for a layout whose stages have these layers."""
    owned, at = [], 0
    for count in counts:
        owned.append((tuple(range(at, at + count)),))
        at += count
    mesh = build_mesh(model, (("tp", tp), ("pp", len(counts))), tuple(owned), ep=ep, etp=etp)
    metas = {fqn: TensorMeta(shape, "BF16") for fqn, shape in shapes_of(model).items()}
    source = Checkpoint(storage_path("/"), "shards", Manifest({}, {}), model)
    return WriteRequest(source, Target(model, mesh, 1, False, 128, True, 1), metas, {}, True, ())


def write_sparse(made: Design, order: WriteRequest, root: Path) -> None:
    """Files of true size with their headers; data are holes."""
    root.mkdir()
    for file in made.files:
        create(file.path, file.layout)
    sizes = {Path(f.path).name: (f.layout.size_bytes, "") for f in made.files}
    for side in writer.sides(order, made, sizes):
        (root / side.name).write_text(side.text)
    (root / "config.json").write_text(json.dumps(CONFIG))


def peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--etp", type=int, default=1, help="of the source and the target (as tp: 0)")
    made.add_argument("--dir", default=None)
    args = made.parse_args()
    root = Path(tempfile.mkdtemp(dir=args.dir))
    model = model_from(CONFIG, "DeepSeek-V3")
    try:
        first = request(model, 8, [4] * 15 + [1], 32, args.etp or 8)
        write_sparse(writer.design(first, root / "in"), first, root / "in")
        print(f"before opening: {peak_mib()} MiB")
        start = time.process_time()
        source = read_checkpoint(root / "in")
        opened = time.process_time() - start
        chunks = sum(map(len, source.manifest.chunks.values()))
        print(
            f"opened {len(source.files)} files, {chunks} chunks: {opened:.1f} s, {peak_mib()} MiB"
        )
        second = request(source.need_model(), 4, [8] * 7 + [5], 64, args.etp or 4)
        start = time.process_time()
        target = writer.design(second, root / "out")
        designed = time.process_time() - start
        found = resolve(plan(source.manifest, target.manifest))
        planned = time.process_time() - start
        print(
            f"planned {len(found.copies)} copies into {len(target.files)} files: {planned:.1f} s, "
            f"of which {designed:.1f} s for placing them and their headers; {peak_mib()} MiB"
        )
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
