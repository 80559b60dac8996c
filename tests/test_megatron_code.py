"""What a file says is never code in the files that are written.

Whoever loads a `.pt` of Megatron-LM does it with ``torch.load(weights_only=False)``, which calls
whatever the file names. So each test writes a value that a name or a call could hide in, lets a
process of its own load the outputs in that way, and reads every pickle's opcodes with pickletools.
"""

from __future__ import annotations

import io
import json
import pickletools
import re
import sys
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm
from safetensors.torch import save_file
from test_megatron import CONFIG, GPT2, _edit, _gpt2, _llama, _small

from shardwright.ckpt import CheckpointError, reshard
from shardwright.ckpt.containers import pickle_writer
from shardwright.ckpt.containers.pickles import Global, Stub
from shardwright.ckpt.reader import read_checkpoint

ALLOWED = re.compile(
    r"torch (\w+Storage|Size|float\d+|bfloat16|u?int\d+|bool)|torch\.storage UntypedStorage"
    r"|torch\._utils _rebuild_tensor_v[23]|torch\.serialization _get_layout"
    r"|torch\.distributed\.checkpoint\.(metadata \w+|filesystem _StorageInfo)"
    r"|collections OrderedDict|argparse Namespace|__builtin__ set|_codecs encode"
)
LOADS = """
import pathlib, pickle, sys, torch
for name in sys.argv[1:]:
    if name.endswith(".metadata"):
        pickle.loads(pathlib.Path(name).read_bytes())
    else:
        torch.load(name, weights_only=False)
"""


def _evil(canary: Path) -> list[object]:
    """JSON values that once became a global, a call, or a line of their own in a pickle."""
    run = f"touch {canary}"
    return [
        {"$enum": "os.system", "value": run},
        {"$enum": "builtins.exec", "value": f"open({str(canary)!r}, 'w')"},
        {"$dtype": f"float32\ncos\nsystem\n(V{run}\ntR."},
        {"$tuple": [{"$enum": "os.system", "value": run}]},
        {"$set": [{"$dtype": f"x\ncos\nsystem\nV{run}\n\x85R"}]},
        {"$dict": [[1, {"$path": run}]]},
        {"$namespace": {"__class__": {"$enum": "os.system", "value": run}}},
        f"silu\ncos\nsystem\n(V{run}\ntR.",
    ]


def _two(i: int, values: list[object]) -> list[tuple[int, object]]:
    """Two of the values with their numbers: others for every ``i``, so that each has its turn."""
    return [(j, values[j]) for j in (i % len(values), (i + 3) % len(values))]


def _pickles(root: Path) -> Iterator[tuple[str, bytes]]:
    """Every pickle below a folder: of zips, of blobs inside others' files, and bare ones."""
    for file in sorted(f for f in root.rglob("*") if f.is_file()):
        data = file.read_bytes()
        if file.name == ".metadata":
            yield str(file), data
        elif file.suffix in (".pt", ".bin"):
            yield from _of_zip(str(file), data)
        elif file.suffix == ".distcp":
            places = (m.start() for m in re.finditer(rb"PK\x03\x04", data))
            starts = [at for at in places if b"data.pkl" in data[at : at + 64]]
            for start, stop in zip(starts, [*starts[1:], len(data)], strict=True):
                yield from _of_zip(f"{file} at {start}", data[start:stop])


def _of_zip(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        found = [n for n in archive.namelist() if n.endswith(".pkl")]
        assert found, name
        for member in found:
            yield f"{name}: {member}", archive.read(member)


def _check_names(root: Path) -> int:
    """Every global that a pickle names is of the closed list; how many pickles there were."""
    count = 0
    for name, data in _pickles(root):
        count += 1
        for op, arg, _ in pickletools.genops(data):
            assert op.name not in ("INST", "OBJ", "STACK_GLOBAL", "NEWOBJ_EX", "EXT1"), name
            if op.name == "GLOBAL":
                assert ALLOWED.fullmatch(str(arg)), (name, arg)
    return count


def _check_loads(roots: list[Path], canary: Path) -> None:
    """A process that trusts the files runs nothing."""
    found = (f for root in roots for f in root.rglob("*"))
    files = [f for f in found if f.suffix in (".pt", ".bin") or f.name == ".metadata"]
    assert files
    log = canary.with_suffix(".log")
    code = warm.call("warm:script", LOADS, *map(str, files), log=log)
    assert not canary.exists()
    assert code == 0, log.read_text()[-2000:]


def _hf(folder: Path, config: dict[str, object]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = _gpt2() if config["model_type"] == "gpt2" else _llama()
    save_file(tensors, folder / "model.safetensors")
    return folder


def _refused(source: Path, out: Path, to: str) -> str:
    """Write ``out``; or why not, and then nothing is there."""
    options = {"safe_serialization": False} if to in ("shards", "hf") else {}
    layout = {} if to == "hf" else {"tp": 1, "pp": 1}
    try:
        reshard(source, out, to=to, **layout, **options)
    except CheckpointError as error:
        assert not out.exists()
        return str(error)
    return ""


KEYS = (
    "rope_theta", "rms_norm_eps", "initializer_range", "max_position_embeddings", "hidden_act",
    "partial_rotary_factor", "rope_parameters", "rope_scaling", "sliding_window", "torch_dtype",
    "rope_parameters.rope_theta", "rope_parameters.partial_rotary_factor", "rope_scaling.factor",
    "attention_bias", "bos_token_id", "attention_dropout",
)  # fmt: skip
GPT2_KEYS = ("layer_norm_epsilon", "activation_function", "initializer_range", "resid_pdrop")


@pytest.mark.parametrize("to", ["megatron", "torch_dist", "shards", "hf"])
def test_no_value_of_a_config_becomes_code(to, tmp_path) -> None:
    canary, made = tmp_path / "canary", []
    sides = [(CONFIG, key) for key in KEYS] + [(GPT2, key) for key in GPT2_KEYS]
    for i, (config, key) in enumerate(sides):
        for j, value in _two(i, _evil(canary))[:1]:
            outer, _, inner = key.partition(".")
            said = {"rope_type": "llama3", inner: value} if inner else value
            source = _hf(tmp_path / f"hf{i}.{j}", {**config, outer: said})
            out = tmp_path / f"out{i}.{j}"
            refused = _refused(source, out, to)
            if refused:
                assert "config" in refused
                continue
            made.append(out)
            assert _check_names(out)
    assert made  # a key that no arg takes over is copied in config.json, as it is
    _check_loads(made, canary)


@pytest.mark.parametrize("to", ["megatron", "torch_dist"])
def test_no_value_of_checkpoint_json_becomes_code(to, golden, tmp_path) -> None:
    """Args that went through shards lie there as JSON, which anybody can write."""
    canary, made = tmp_path / "canary", []
    shards = tmp_path / "shards"
    reshard(golden / "llama_bf16_tp2pp2_torch", shards, to="shards")
    said = json.loads((shards / "checkpoint.json").read_text())
    places = (("args", "params_dtype"), ("args", "a b"), ("opt_param_scheduler", "max_lr"),
              ("optimizer", "step"), ("num_floating_point_operations_so_far",))  # fmt: skip
    for i, place in enumerate(places):
        for j, value in _two(i, _evil(canary)):
            edited = json.loads(json.dumps(said))
            table = edited["megatron"]
            for key in place[:-1]:
                table = table[key]
            table[place[-1]] = value
            (shards / "checkpoint.json").write_text(json.dumps(edited))
            out = tmp_path / f"out{i}.{j}"
            refused = _refused(shards, out, to)
            if refused:
                assert "megatron." in refused
                continue
            made.append(out)
            assert _check_names(out)
    _check_loads(made, canary)


def run_command(text: str) -> None:
    raise AssertionError(f"{text} was run")


class _Hook:
    """Pickles as a call of a function of megatron-core."""

    def __reduce__(self) -> tuple[object, ...]:
        return run_command, ("touch /nowhere",)


@pytest.mark.parametrize("to", ["megatron", "torch_dist"])
def test_a_call_inside_a_scheduler_is_dropped_by_name(to, tmp_path, monkeypatch) -> None:
    module = types.ModuleType("megatron.core.utils")
    module.run_command = run_command  # type: ignore[attr-defined]
    monkeypatch.setattr(run_command, "__module__", module.__name__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    source = _small(tmp_path / "source", 1, 1)
    scheduler = {"max_lr": 0.5, "num_steps": 3, "hook": _Hook()}
    _edit(source, "mp_rank_00", lambda file: file.update(opt_param_scheduler=scheduler))
    ckpt = read_checkpoint(source)
    assert any(
        "opt_param_scheduler.hook (megatron.core.utils.run_command)" in n for n in ckpt.notes
    )
    assert ckpt.manifest.state["megatron"]["opt_param_scheduler"] == {"max_lr": 0.5, "num_steps": 3}
    reshard(source, tmp_path / "made", to=to)
    assert _check_names(tmp_path / "made")


@pytest.mark.parametrize(
    "value",
    [
        Global("os", "system"),
        Global("torch", "float32\ncos\nsystem"),
        Stub("os", "system", ("true",)),
        Stub("torch", "float32", ("called",)),
        Stub("argparse", "Namespace\ncos\nsystem", ()),
        Stub("megatron.core.enums", "ModelType", (1,)),
    ],
)
def test_the_pickle_writer_names_nothing_outside_its_list(value) -> None:
    with pytest.raises(AssertionError, match="may not be"):
        pickle_writer.dumps({"x": [value]})
