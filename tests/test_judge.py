"""The judge is judged: one thing at a time is changed in a checkpoint of each format.

``verify-ckpt A B`` must say so and name where; and it must be silent on what means the same.
Changes are made with plain torch, json and file operations, never with the code under test.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from independent import pack_states, stored, write_native
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from strategies import raw, write_hf

from shardwright.ckpt import (
    CheckpointError,
    ReadOptions,
    RunOptions,
    Verdict,
    merge,
    reshard,
    verifier,
    verify,
)
from shardwright.ckpt.reader import read_checkpoint
from shardwright.tools import verify_ckpt

QUIET = RunOptions(workers=1)
ROWS = ReadOptions(vocab_size=21)
SCHEDULE = {
    "style": "constant", "lr": 0.125, "min_lr": 0.125, "warmup_steps": 0, "decay_steps": 0,
    "num_steps": 7,
}  # fmt: skip
HEAD = "lm_head.weight"
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    """One model with two moments as native shards (both spellings), HF and Megatron's formats."""
    root = tmp_path_factory.mktemp("made")
    case = raw("llama", layers=2, ffn=16)
    moments = {"exp_avg": case.numbered(100_000), "exp_avg_sq": case.numbered(200_000)}
    groups = [{"lr": 0.125, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0, "step": 7}]
    places = {}
    for name, safe in (("safe", True), ("bin", False)):
        places[name] = write_native(
            root / name,
            case.config,
            stored(case.config, case.state, 2, 1, multiple=4),
            pack_states(case.config, moments, 2, 1, multiple=4),
            safe=safe,
            step=7,
            multiple=4,
            state={"param_groups": groups, "schedule": SCHEDULE},
            layout={"qkv": "per_group", "glu": "per_rank", "norm": "plain", "rotary": "half"},
            vocab_size=21,
        )
    places["hf"] = write_hf(root / "hf", case)
    for to in ("megatron", "torch_dist"):
        places[to] = reshard(places["safe"], root / to, to=to, tp=2, run=QUIET).output
    return places


def copy_of(made, name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[name], tmp_path / "changed"))


def judged(a: Path, b: Path, **options) -> Verdict | str:
    """The verdict, or the refusal of a side that cannot be read."""
    try:
        return verify(a, b, run=QUIET, **options)
    except CheckpointError as error:
        return str(error)


# --- changes of tensors, in the two containers --------------------------------------------------


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the flat tensors of a file, everything else of it kept."""
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        change(tensors)
        save_file({k: x.contiguous() for k, x in tensors.items()}, path, metadata)
        return
    extra = _extra_record(path)
    tensors = torch.load(path, weights_only=True)
    change(tensors)
    torch.save(tensors, path)
    import zipfile

    with zipfile.ZipFile(path, "a") as archive:
        stem = archive.namelist()[0].split("/")[0]
        archive.writestr(f"{stem}/shardwright.json", extra)


def _extra_record(path: Path) -> bytes:
    import zipfile

    with zipfile.ZipFile(path) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("shardwright.json")]
        return archive.read(name)


def _value(tensors, name):
    tensors[name] = tensors[name].clone()
    tensors[name].view(-1)[3] += 1


def _name(tensors, name):
    tensors[name + "x"] = tensors.pop(name)


def _dtype(tensors, name):
    tensors[name] = tensors[name].to(torch.bfloat16)


def _shape(tensors, name):
    tensors[name] = tensors[name][:-1].clone()


CHANGES = {"value": _value, "name": _name, "dtype": _dtype, "shape": _shape}
FC2 = "decoder.layers.1.mlp.linear_fc2.weight"
NATIVE = {"safe": "model_tp_1_pp_0.safetensors", "bin": "pytorch_model_tp_1_pp_0.bin"}
MOMENTS = {"safe": "optimizer_tp_1_pp_0.safetensors", "bin": "optimizer_tp_1_pp_0.bin"}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("spelling", NATIVE)
def test_a_changed_tensor_of_native_shards_is_named(spelling, what, made, tmp_path):
    b = copy_of(made, spelling, tmp_path)
    edit(b / NATIVE[spelling], lambda tensors: CHANGES[what](tensors, FC2))
    for pair in ((made[spelling], b), (b, made[spelling]), (made["hf"], b)):
        _names(judged(*pair), "layers.1.mlp", what, weights_only=pair[0] == made["hf"])


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("spelling", MOMENTS)
def test_a_changed_moment_of_native_shards_is_named(spelling, what, made, tmp_path):
    b = copy_of(made, spelling, tmp_path)
    key = f"exp_avg_sq/{FC2}"
    edit(b / MOMENTS[spelling], lambda tensors: CHANGES[what](tensors, key))
    _names(judged(made[spelling], b), "layers.1.mlp", what)
    assert verify(made[spelling], b, weights_only=True, run=QUIET).same


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_tensor_of_a_hugging_face_folder_is_named(what, made, tmp_path):
    b = copy_of(made, "hf", tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    edit(b / "model.safetensors", lambda tensors: CHANGES[what](tensors, name))
    _names(judged(made["hf"], b), name, what)
    (b / "config.json").unlink()  # without a config every name and shape is taken as it is
    alone = Path(shutil.copytree(made["hf"], tmp_path / "alone"))
    (alone / "config.json").unlink()
    _names(judged(alone, b), name, what)


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_tensor_of_a_megatron_rank_is_named(what, made, tmp_path):
    b = copy_of(made, "megatron", tmp_path)
    (path,) = b.glob("iter_*/mp_rank_01*/model_optim_rng.pt")
    content = torch.load(path, weights_only=False)
    CHANGES[what](content["model"], FC2)
    torch.save(content, path)
    _names(judged(made["megatron"], b, read=ROWS, read_b=ROWS), "layers.1.mlp", what)


def test_a_changed_byte_of_a_distributed_checkpoint_is_named(made, tmp_path):
    """A value alone: names, types and shapes of a .distcp lie in one pickle beside the blobs."""
    b = copy_of(made, "torch_dist", tmp_path)
    value = load_file(made["hf"] / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    needle = value[5].numpy().tobytes()
    for path in b.glob("iter_*/*.distcp"):
        data = bytearray(path.read_bytes())
        at = data.find(needle)
        if at >= 0:
            data[at + 2] ^= 1
            path.write_bytes(data)
            break
    else:
        raise AssertionError("no blob holds the tensor")
    found = judged(made["torch_dist"], b, read=ROWS, read_b=ROWS)
    _names(found, "model.layers.1.mlp.down_proj.weight", "value")


def _names(found: Verdict | str, part: str, what: str, weights_only: bool = False) -> None:
    """A value is compared, all else may be refused when it is read; both name the tensor."""
    if isinstance(found, str):
        assert what != "value", found
        assert part in found
        return
    assert not found.same
    rows = [f for f in found.findings if part in f.name]
    assert rows, found.differences
    if what == "value":
        (row,) = rows
        assert (row.kind, row.elements) == ("values", 1)
        assert row.layer == 1
    if not weights_only and what == "value":
        assert len(found.findings) == 1, found.differences


# --- changes beside the tensors -----------------------------------------------------------------


def _json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"param_groups": [{"lr": 0.25, "step": 7}]}, "state param_groups"),
        ({"schedule": {**SCHEDULE, "lr": 0.5}}, "state schedule.lr: 0.125 and 0.5"),
        ({"data": {"cursor": 4}}, "state data.cursor: 3 and 4"),
        ({"layout": {"qkv": "flat"}}, "self_attn"),
        ({"layout": {"glu": "flat"}}, "mlp."),
    ],
)
def test_a_changed_line_of_checkpoint_json_is_named(changes, part, made, tmp_path):
    a = Path(shutil.copytree(made["safe"], tmp_path / "a"))
    _json(a / "checkpoint.json", data={"cursor": 3})
    b = Path(shutil.copytree(a, tmp_path / "b"))
    assert verify(a, b, run=QUIET).same
    _json(b / "checkpoint.json", **changes)
    found = verify(a, b, run=QUIET)
    assert any(part in line for line in found.differences), found.differences


@pytest.mark.parametrize("name", ["safe", "hf"])
@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"rope_theta": 8e6}, "config: rope theta"),
        ({"rms_norm_eps": 1e-3}, "config: norm epsilon"),
        ({"hidden_act": "gelu"}, "config: activation"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "config: rope scaling"),
    ],
)
def test_a_changed_config_is_named(name, changes, part, made, tmp_path):
    b = copy_of(made, name, tmp_path)
    _json(b / "config.json", **changes)
    (line,) = verify(made[name], b, run=QUIET).differences
    assert line.startswith(part)


def test_what_reading_a_side_said_is_said_by_the_comparison(made, tmp_path):
    b = copy_of(made, "safe", tmp_path)
    shutil.copy(made["hf"] / "model.safetensors", b)
    verdict = verify(made["safe"], b, run=QUIET)
    assert verdict.same
    assert any("of the format hf, not read" in note for note in verdict.notes), verdict.notes


def test_a_config_key_of_one_side_is_said(made, tmp_path):
    """No family here looks at it, so that it is no difference; code of the model's own might."""
    b = copy_of(made, "hf", tmp_path)
    _json(b / "config.json", logits_scaling=8.0)
    verdict = verify(made["hf"], b, run=QUIET)
    assert verdict.same
    assert "config keys of one side only, not compared: logits_scaling" in verdict.notes


def test_a_changed_arg_of_megatron_is_named(made, tmp_path):
    """Without a config.json args alone say what the model is."""
    a = Path(shutil.copytree(made["megatron"], tmp_path / "a"))
    (a / "config.json").unlink()
    for number, (key, value, part) in enumerate(
        (("rotary_base", 8_000_000, "rope theta"), ("norm_epsilon", 1e-3, "norm epsilon"))
    ):
        b = Path(shutil.copytree(a, tmp_path / f"b{number}"))
        for path in b.glob("iter_*/mp_rank_*/model_optim_rng.pt"):
            content = torch.load(path, weights_only=False)
            setattr(content["args"], key, value)
            if key == "norm_epsilon":
                content["args"].layernorm_epsilon = value
            torch.save(content, path)
        found = judged(a, b, read=ROWS, read_b=ROWS)
        said = found if isinstance(found, str) else "\n".join(found.differences)
        assert part in said, said


def test_a_changed_step_is_named(made, tmp_path):
    b = copy_of(made, "safe", tmp_path)
    _json(b / "checkpoint.json", step=8)
    said = judged(made["safe"], b)
    assert isinstance(said, str)  # the rank files say 7
    assert "says step 7" in said
    b = Path(shutil.copytree(made["megatron"], tmp_path / "later"))
    for path in b.glob("iter_*/mp_rank_*/model_optim_rng.pt"):
        content = torch.load(path, weights_only=False)
        content["iteration"] = content["args"].iteration = 8
        torch.save(content, path)
    (folder,) = b.glob("iter_*")
    folder.rename(b / "iter_0000008")
    (b / TRACKER).write_text("8")
    found = judged(made["megatron"], b, read=ROWS, read_b=ROWS)
    said = found if isinstance(found, str) else "\n".join(found.differences)
    assert "step: 7 and 8" in said


def _arg(content: dict) -> None:
    content["args"].rotary_base = 500_000


def _schedule(content: dict) -> None:
    content["opt_param_scheduler"]["max_lr"] = 9.0


def _rate(content: dict) -> None:
    content["optimizer"]["param_groups"][0]["lr"] = 9.0


@pytest.mark.parametrize(
    ("change", "part"),
    [(_arg, "args.rotary_base"), (_schedule, "opt_param_scheduler"), (_rate, "param group")],
)
def test_a_rank_of_another_run_is_refused_by_what_it_says(change, part, made, tmp_path):
    b = copy_of(made, "megatron", tmp_path)
    (path,) = b.glob("iter_*/mp_rank_01*/model_optim_rng.pt")
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)
    said = judged(made["megatron"], b, read=ROWS, read_b=ROWS)
    assert isinstance(said, str)
    assert "mp_rank_01" in said
    assert part in said
    assert "different saves" in said


def test_an_optimizer_fault_is_named_before_the_holes_that_follow_from_it(made, monkeypatch):
    def partly(where, options):
        ckpt = read_checkpoint(where, options)
        ckpt.manifest.chunks[f"exp_avg/{HEAD}"] = []
        ckpt.unread_optimizer = "the second rank's optimizer cannot be read"
        return ckpt

    monkeypatch.setattr(verifier, "read_checkpoint", partly)
    assert verify(made["safe"], run=QUIET).differences == [
        "the second rank's optimizer cannot be read"
    ]


@pytest.mark.parametrize("name", ["safe", "bin", "megatron"])
def test_exchanged_ranks_are_named(name, made, tmp_path):
    b = copy_of(made, name, tmp_path)
    if name == "megatron":
        (parent,) = b.glob("iter_*")
        one, two = sorted(p for p in parent.iterdir() if p.name.startswith("mp_rank_"))
    else:
        one, two = b / NATIVE[name].replace("tp_1", "tp_0"), b / NATIVE[name]
    one.rename(b / "aside")
    two.rename(one)
    (b / "aside").rename(two)
    found = judged(made[name], b, read=ROWS, read_b=ROWS)
    if isinstance(found, str):  # a file that says its own rank
        assert "rank" in found
        return
    assert not found.same


def test_a_missing_moment_and_a_missing_kind_of_state_are_named(made, tmp_path):
    b = copy_of(made, "safe", tmp_path)
    for rank in (0, 1):
        path = b / f"optimizer_tp_{rank}_pp_0.safetensors"
        edit(path, lambda tensors: tensors.pop(f"exp_avg_sq/{FC2}"))
    (found,) = verify(made["safe"], b, run=QUIET).findings
    assert (found.kind, found.name) == ("missing", "exp_avg_sq/model.layers.1.mlp.down_proj.weight")
    (line,) = verify(b, run=QUIET).differences
    assert "exp_avg_sq: lacks 1 of the" in line
    with pytest.raises(CheckpointError, match="exp_avg_sq: lacks 1 of the"):
        reshard(b, tmp_path / "x", tp=1, run=QUIET)
    for rank in (0, 1):
        path = b / f"optimizer_tp_{rank}_pp_0.safetensors"
        edit(path, lambda tensors: tensors.pop(f"exp_avg/{FC2}"))
    alone = verify(b, run=QUIET)
    assert alone.same
    assert any("1 of 21 weights have no optimizer state" in note for note in alone.notes)
    reshard(b, tmp_path / "x", tp=1, run=QUIET)
    with pytest.raises(CheckpointError, match="not whole"):
        reshard(b, tmp_path / "y", tp=1, to="megatron", run=QUIET)


# --- what means the same ------------------------------------------------------------------------


def test_formats_layouts_splits_and_padding_of_one_model_are_equal(made, tmp_path):
    """Every pair of formats; files split, ranks more and fewer, padding rows on one side."""
    others = {
        "tp4": reshard(made["safe"], tmp_path / "tp4", tp=4, run=QUIET).output,
        "wide": reshard(
            made["safe"], tmp_path / "wide", tp=1, make_vocab_size_divisible_by=64, run=QUIET
        ).output,
        "split": merge(made["safe"], tmp_path / "split", max_shard_size=4000, run=QUIET).output,
        "one": merge(made["safe"], tmp_path / "one.bin", run=QUIET).output,
    }
    places = {**made, **others}
    untrained = {"hf", "split", "one"}
    for a in places:
        for b in ("safe", "hf", "megatron", "torch_dist", "wide"):
            says = [ROWS if n in ("megatron", "torch_dist") else None for n in (a, b)]
            only = bool({a, b} & untrained)
            found = verify(
                places[a], places[b], read=says[0], read_b=says[1], weights_only=only, run=QUIET
            )
            assert found.same, (a, b, found.differences)


def test_the_order_of_keys_and_of_tensors_is_silent(made, tmp_path):
    b = copy_of(made, "safe", tmp_path)
    for name in ("checkpoint.json", "config.json"):
        table = json.loads((b / name).read_text())
        (b / name).write_text(json.dumps(dict(reversed(table.items())), indent=7))
    for path in b.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        for number, key in enumerate(sorted(tensors, reverse=True)):
            tensors[key] = tensors.pop(key)
            assert number >= 0
        save_file(tensors, path, metadata)
    assert verify(made["safe"], b, run=QUIET).same


def test_a_config_with_other_spellings_and_harmless_keys_is_silent(made, tmp_path):
    b = copy_of(made, "hf", tmp_path)
    _json(b / "config.json", use_cache=False, transformers_version="4.0", hidden_act="swish")
    assert verify(made["hf"], b, run=QUIET).same


def test_the_command_says_what_the_judge_found(made, tmp_path, capsys):
    b = copy_of(made, "safe", tmp_path)
    edit(b / NATIVE["safe"], lambda tensors: _value(tensors, FC2))
    assert verify_ckpt.main([str(made["safe"]), str(b)]) == 1
    out = capsys.readouterr().out
    assert "differs: model.layers.1.mlp.down_proj.weight: 1 of 256 elements differs" in out
    assert out.splitlines()[-1].startswith("different: 1 tensors")


@pytest.mark.parametrize("to", ["megatron", "torch_dist"])
def test_what_a_format_has_no_place_for_is_a_difference_that_says_so(to, tmp_path):
    """`state data: only in A` named neither the value nor the reason."""
    case = raw("llama", layers=2)
    values = {s: case.numbered(1000) for s in ("exp_avg", "exp_avg_sq")}
    source = write_native(
        tmp_path / "a", case.config, stored(case.config, case.state, 2, 1),
        pack_states(case.config, values, 2, 1),
        state={"data": {"cursor": 3}, "param_groups": [{"lr": 0.25, "step": 7}]},
    )  # fmt: skip
    out = reshard(source, tmp_path / "b", to=to, tp=1).output
    for pair in ((source, out), (out, source)):
        (line,) = [x for x in verify(*pair).differences if x.startswith("state data")]
        assert line == (
            f'state data: only in {source}: {{"cursor": 3}}; this was to be expected, the format '
            f"{to} has no place for it (--weights-only compares the weights alone)"
        )
    assert verify(source, source).same
