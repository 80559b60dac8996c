"""CONTRIBUTING.md's recipes, followed to the letter on a copy of the package."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the packages that checkpoints need, under the names that they are installed by."""
    compiled = shutil.ignore_patterns("__pycache__")  # other processes may be writing there
    shutil.copytree(ROOT / "shardwright", tmp_path / "lib" / "shardwright", ignore=compiled)
    for name in ("ckpt", "tools"):
        shutil.copytree(ROOT / name, tmp_path / "lib" / "shardwright" / name, ignore=compiled)
    return tmp_path / "lib"


def snippet(path: str) -> str:
    """The code block that follows the mention of ``path``."""
    match = re.search(rf"`{re.escape(path)}`[^`]*```python\n(.*?)```", TEXT, re.DOTALL)
    assert match, f"CONTRIBUTING.md has no code for {path}"
    return match[1]


def run(package: Path, code: str, *words: str) -> str:
    """Run code with the copy in place of the installed package."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(package)!r}); {code}", *words],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tool(name: str) -> str:
    """Code that runs one of the commands."""
    return f"from shardwright.tools.{name} import main; sys.exit(main(sys.argv[1:]))"


def unique(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Tensors in which no value occurs twice."""
    start, made = 0, {}
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        made[name] = np.arange(start, start + count, dtype=np.float32).reshape(shape)
        start += count
    return made


def write_hf(folder: Path, config: dict[str, object], shapes: dict[str, tuple[int, ...]]) -> None:
    """A Hugging Face folder by plain calls."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(unique(shapes), folder / "model.safetensors", {"format": "pt"})


def same_tensors(a: Path, b: Path) -> bool:
    """Whether two safetensors files hold the same names and bytes."""
    x, y = load_file(a), load_file(b)
    return x.keys() == y.keys() and all(np.array_equal(x[k], y[k]) for k in x)


def test_the_family_recipe_gives_a_family_that_reshards_and_merges(
    package: Path, tmp_path: Path
) -> None:
    path = "ckpt/families/helium.py"
    (package / "shardwright" / path).write_text(snippet(path))
    config = {"model_type": "helium", "head_dim": 4, "hidden_size": 16, "intermediate_size": 24,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
              "vocab_size": 20, "tie_word_embeddings": True}  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (20, 16), "model.norm.weight": (16,)
    }  # fmt: skip
    for i in (0, 1):
        m = f"model.layers.{i}."
        shapes |= {m + "input_layernorm.weight": (16,), m + "self_attn.q_proj.weight": (16, 16),
                   m + "self_attn.k_proj.weight": (8, 16), m + "self_attn.v_proj.weight": (8, 16),
                   m + "self_attn.o_proj.weight": (16, 16), m + "mlp.gate_proj.weight": (24, 16),
                   m + "post_attention_layernorm.weight": (16,), m + "mlp.up_proj.weight": (24, 16),
                   m + "mlp.down_proj.weight": (16, 24)}  # fmt: skip
    write_hf(tmp_path / "hf", config, shapes)
    run(package, tool("reshard"), str(tmp_path / "hf"), "--tp", "2", "--pp", "2")
    assert "helium" in run(package, tool("inspect_ckpt"), str(tmp_path / "hf-tp2-pp2"))
    run(package, tool("merge_ckpt"), str(tmp_path / "hf-tp2-pp2"), "--output", str(tmp_path / "x"))
    assert same_tensors(tmp_path / "hf/model.safetensors", tmp_path / "x/model.safetensors")


def test_the_format_recipe_gives_a_format_that_is_read_written_and_merged(
    package: Path, tmp_path: Path
) -> None:
    for name in ("reader", "writer"):
        path = package / f"shardwright/ckpt/formats/npy/{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.with_name("__init__.py").touch()
        path.write_text(snippet(f"ckpt/formats/npy/{name}.py"))
    known = package / "shardwright/ckpt/formats/__init__.py"
    lines = snippet("ckpt/formats/__init__.py")
    text, count = re.subn(
        r"^_READERS = \(.*?\)\n.*?_WRITERS = {.*?}\n", lines, known.read_text(), flags=re.M | re.S
    )
    assert count == 1
    known.write_text(text)
    tensors = unique({"a": (3, 4), "b": (5,)})
    (tmp_path / "arrays").mkdir()
    for name, array in tensors.items():
        np.save(tmp_path / "arrays" / f"{name}.npy", array)
    one = tmp_path / "one.safetensors"
    run(package, tool("merge_ckpt"), str(tmp_path / "arrays"), "--output", str(one))
    found = load_file(one)
    assert found.keys() == tensors.keys()
    assert all(np.array_equal(found[k], tensors[k]) for k in tensors)
    back = tmp_path / "back"
    run(package, tool("reshard"), str(one), "--to", "npy", "--output", str(back))
    assert {file.name for file in back.iterdir()} == {"a.npy", "b.npy"}
    assert all(np.array_equal(np.load(back / f"{k}.npy"), tensors[k]) for k in tensors)


def test_the_axis_recipe_gives_an_axis_that_files_are_split_over(
    package: Path, tmp_path: Path
) -> None:
    line = snippet("ckpt/model/mesh.py")
    mesh = package / "shardwright/ckpt/model/mesh.py"
    text, count = re.subn(r"^AXES\b.*\n", line, mesh.read_text(), flags=re.MULTILINE)
    assert count == 1
    mesh.write_text(text)
    path = "ckpt/families/groups.py"
    (package / "shardwright" / path).write_text(snippet(path))
    config = {"model_type": "groups", "num_hidden_layers": 2, "num_groups": 4,
              "hidden_size": 4, "intermediate_size": 6, "vocab_size": 8}  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,)
    }  # fmt: skip
    shapes |= {f"model.layers.{i}.groups.{e}.weight": (6, 4) for i in (0, 1) for e in range(4)}
    write_hf(tmp_path / "hf", config, shapes)
    run(package, tool("reshard"), str(tmp_path / "hf"), "--tp", "2", "--pp", "2", "--gp", "2")
    shards = tmp_path / "hf-tp2-pp2-gp2"
    held = load_file(shards / "model_tp_1_pp_0_gp_1.safetensors")
    full = unique(shapes)["model.layers.0.groups.2.weight"]
    assert np.array_equal(held["decoder.layers.0.mlp.groups.2.weight"], full[3:])
    assert "decoder.layers.0.mlp.groups.0.weight" not in held
    run(package, tool("reshard"), str(shards), "--tp", "1", "--pp", "1", "--gp", "4",
        "--output", str(tmp_path / "more"))  # fmt: skip
    run(package, tool("merge_ckpt"), str(tmp_path / "more"), "--output", str(tmp_path / "x"))
    assert same_tensors(tmp_path / "hf/model.safetensors", tmp_path / "x/model.safetensors")
