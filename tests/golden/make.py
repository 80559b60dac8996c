"""Makes the checkpoints beside it, which the code of commit 483c253 wrote (format version 1.0).

Run with that commit installed: python tests/golden/make.py. Each folder holds a checkpoint of step
2, and expected.json what the same code said of it: the losses of the steps before and after, and
sha256 of each tensor in one process's layout. The tests resume, reshard and merge them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CONFIG = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 32, "initializer_range": 0.1, "tie_word_embeddings": False,
    "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
TEXT = "".join(f"{i} times {i} is {i * i}; " for i in range(40))[:250]
COMMAND = "--seq-length 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --tp 2 --pp 2"


def script(out: str, resume: str | None = None) -> None:
    """A script's two steps that are saved, or those after a resume; losses go to OUT/losses."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from shardwright.train import Accelerator, MegatronLMPlugin

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    ids = [torch.arange(i, i + 16) * 7 % 256 for i in range(16)]
    rows = [{"input_ids": row, "labels": row} for row in ids]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    plugin = MegatronLMPlugin(tp_degree=2, other_megatron_args={"seed": 1})
    accelerator = Accelerator(megatron_lm_plugin=plugin)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if resume is not None:
        accelerator.load_state(resume)
        loader = accelerator.skip_first_batches(loader, 2)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == 2 and resume is None:
            accelerator.save_state(f"{out}/checkpoint-2")
        if len(losses) == (4 if resume is None else 2):
            break
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        Path(out, "losses").write_text(json.dumps(losses))
    accelerator.end_training()


def ranks(count: int, *arguments: str) -> None:
    """Run this file's ``script`` on ranks of one machine."""
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         f"--nproc-per-node={count}", __file__, *arguments],
        check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every tensor in the safetensors files of a folder, random states left out."""
    from safetensors.torch import load_file

    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        if not path.name.startswith("random_states"):
            for name, tensor in load_file(path).items():
                data = tensor.contiguous().numpy().tobytes()
                found[name] = hashlib.sha256(data).hexdigest()
    return dict(sorted(found.items()))


def expected(checkpoint: Path, losses: list[float], place: Path) -> dict[str, object]:
    """What is recorded beside a checkpoint."""
    from shardwright.ckpt import merge, reshard

    merge(checkpoint, place / "hf")
    reshard(checkpoint, place / "one", tp=1, pp=1)
    return {
        "losses": losses,
        "merged": digests(place / "hf"),
        "resharded": digests(place / "one"),
    }


def main() -> None:
    """Both checkpoints."""
    from shardwright.tools import train_ckpt

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "llama.json").write_text(json.dumps(CONFIG))
        (place / "data.txt").write_text(TEXT)
        said = f"--model {place}/llama.json --data {place}/data.txt {COMMAND}"
        more = f"--save-dir {place}/run --save-interval 2 --steps 4"
        assert train_ckpt.main(f"{said} {more}".split()) == 0
        rows = [json.loads(x) for x in (place / "run/metrics.jsonl").read_text().splitlines()]
        (place / "script").mkdir()
        ranks(2, f"{place}/script")
        losses = json.loads((place / "script/losses").read_text())
        for name, came, seen in (
            ("train_ckpt", place / "run", [row["loss"] for row in rows]),
            ("accelerator", place / "script", losses),
        ):
            shutil.rmtree(HERE / name, ignore_errors=True)
            shutil.copytree(came / "checkpoint-2", HERE / name / "checkpoint-2")
            made = expected(came / "checkpoint-2", seen, place / f"{name}-out")
            (HERE / name / "expected.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    if "RANK" in os.environ:
        script(*sys.argv[1:])
    else:
        main()
