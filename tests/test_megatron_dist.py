"""Megatron-LM's distributed checkpoints (torch_dist) are read: every form of optimizer state.

Golden files were written by Megatron-LM itself. Hostile ones are copies whose ``.metadata`` was
changed with torch's own classes.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from independent import Tensors, load_hf
from torch.distributed.checkpoint.metadata import Metadata

from shardwright.ckpt import (
    CheckpointError,
    ReadOptions,
    convert,
    merge,
    open_checkpoint,
    reshard,
    verify,
)
from shardwright.ckpt.reader import read_checkpoint
from shardwright.tools import inspect_ckpt, merge_ckpt, verify_ckpt
from shardwright.tools import reshard as reshard_command

TWINS = ("gpt2_fp32_tp2pp2", "llama8_fp32_tp2pp2vpp2", "llama_bf16_tp2pp2")  # trained twice
DP = "llama_bf16_tp1pp2dp2_distopt_"
DPRESHARD, FULL, V013 = (f"{DP}{form}_torch_dist" for form in ("dpreshard", "fullyreshard", "v013"))
SOURCES = (*(f"{twin}_torch_dist" for twin in TWINS), DPRESHARD, FULL, V013)
ORACLES = (
    "gpt2_fp32_tp2pp2_torch_dist__to_tp1pp1_torch",
    "gpt2_fp32_tp2pp2_torch_dist__to_tp4pp1_torch",
    f"{DPRESHARD}__to_tp1pp2dp1_torch",
    f"{FULL}__to_tp1pp1dp1_torch",
    f"{FULL}__to_tp2pp1dp2_torch",
    f"{V013}__to_tp2pp1dp1_torch",
    "llama8_fp32_tp2pp2vpp2_torch_dist__to_tp1pp1_torch",
    "llama_bf16_tp2pp2_torch_dist__to_tp1pp1_torch",
    "llama_bf16_tp2pp2_torch_dist__to_tp1pp4_torch",
    "llama_bf16_tp2pp2_torch_dist__to_tp4pp1_torch",
)
CONVERTED = (
    "gpt2_fp32_tp2pp2_torch__convertpy_to_tp1pp4_torch",
    "llama_bf16_tp2pp2_torch__convertpy_to_tp1pp1_torch",
    "llama_bf16_tp2pp2_torch__convertpy_to_tp2pp1_torch",
)
TRUE_ROWS = {"gpt2": 234, "llama8": 251, "llama": 251}
TENSORS = {"gpt2": 52, "llama8": 75, "llama": 39}  # weights of the model
SHIFTED = "optimizer.state.param.decoder.layers.mlp.linear_fc2.weight"
STACKED = "decoder.layers.mlp.linear_fc2.weight"


def _model(name: str) -> str:
    return name.partition("_")[0]


def _tensors(name: str) -> int:
    """With the padding rows of the tables, of which an untied model has two."""
    return _states(name) * (TENSORS[_model(name)] + (1 if name.startswith("gpt2") else 2))


def _rows_of(name: str) -> ReadOptions:
    return ReadOptions(vocab_size=TRUE_ROWS[_model(name)])


def _states(name: str) -> int:
    """Moments and, of bfloat16 weights, masters beside each weight."""
    return 4 if "bf16" in name else 3


# --- Megatron-LM's own files -------------------------------------------------------------------


@pytest.mark.parametrize("oracle", ORACLES)
def test_a_source_equals_what_megatron_made_of_it_optimizer_included(
    golden: Path, oracle: str
) -> None:
    source = oracle.partition("__to_")[0]
    verdict = verify(
        golden / source, golden / oracle, read=_rows_of(source), read_b=_rows_of(source)
    )
    assert verdict.same, verdict.differences
    assert verdict.tensors == _tensors(source)


@pytest.mark.parametrize("twin", TWINS)
def test_a_source_equals_the_classic_save_of_the_same_training(golden: Path, twin: str) -> None:
    """Same layout, so even the padding rows."""
    verdict = verify(golden / f"{twin}_torch_dist", golden / f"{twin}_torch")
    assert verdict.same, verdict.differences
    assert verdict.tensors == _states(twin) * TENSORS[_model(twin)]


@pytest.mark.parametrize("oracle", CONVERTED)
def test_a_source_equals_what_convert_py_made_of_its_twin(golden: Path, oracle: str) -> None:
    source = oracle.partition("__")[0] + "_dist"
    verdict = verify(golden / source, golden / oracle, weights_only=True)
    assert verdict.same, verdict.differences


@pytest.mark.parametrize("form", [FULL, V013])
def test_forms_of_one_optimizer_are_equal(golden: Path, form: str) -> None:
    """The runs of the two megatron-core versions differ, so V013 only against itself."""
    other = DPRESHARD if form == FULL else f"{V013}__to_tp2pp1dp1_torch"
    assert verify(golden / other, golden / form).same


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if module.startswith("megatron"):  # the plan of the save, of no use
            return type(name, (), {"__setstate__": lambda *_: None})
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: object, **more: object) -> Metadata:
        content = (Path(self.path) / ".metadata").read_bytes()
        found: Metadata = _Unpickler(io.BytesIO(content)).load()
        return found


def _loaded(root: Path) -> Tensors:
    """The stored tensors, whole."""
    reader = _Reader(_iteration(root))
    stored = {
        key: torch.empty(meta.size, dtype=meta.properties.dtype)
        for key, meta in reader.read_metadata().state_dict_metadata.items()
        if hasattr(meta, "size")
    }
    dcp.load(stored, storage_reader=reader, no_dist=True)
    return stored


def _iteration(root: Path) -> Path:
    return root / "iter_0000003"


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_equals_what_torch_itself_reads(golden: Path, name: str) -> None:
    """torch.distributed.checkpoint loads the stored tensors whole."""
    stored = _loaded(golden / name)
    found = open_checkpoint(golden / name)
    gpt2 = name.startswith("gpt2")
    down = "transformer.h.{}.mlp.c_proj.weight" if gpt2 else "model.layers.{}.mlp.down_proj.weight"
    for layer in range(8 if name.startswith("llama8") else 4):
        fqn = down.format(layer)
        for state in ("", "exp_avg", "exp_avg_sq"):
            key = f"optimizer.state.{state}.{STACKED}" if state else STACKED
            if key not in stored:
                continue  # in flat buffers
            wanted = stored[key][layer].reshape(32, -1)
            wanted = wanted.T if gpt2 else wanted
            assert torch.equal(found[f"{state}/{fqn}" if state else fqn].torch(), wanted), fqn
    table_name = "transformer.wte.weight" if gpt2 else "model.embed_tokens.weight"
    assert torch.equal(found[table_name].torch(), stored["embedding.word_embeddings.weight"])


@pytest.mark.parametrize("name", SOURCES)
def test_masters_round_to_the_weights_in_every_element(golden: Path, name: str) -> None:
    found = open_checkpoint(golden / name)
    weights = [fqn for fqn in found if "/" not in fqn]
    assert len(weights) == TENSORS[_model(name)]
    for fqn in weights:
        if "bf16" in name:
            assert torch.equal(found["master/" + fqn].torch().bfloat16(), found[fqn].torch()), fqn
        else:
            assert "master/" + fqn not in found


@pytest.mark.parametrize("name", SOURCES)
def test_nothing_of_a_file_is_left_without_an_account(golden: Path, name: str) -> None:
    ckpt = read_checkpoint(golden / name)
    assert not ckpt.optimizer_fault()
    assert ckpt.has_optimizer
    reasons = {reason for reason, _ in ckpt.left_out}
    assert {"_extra_state holds no weights",
            "random states belong to the ranks of the saving run"} <= reasons  # fmt: skip
    assert not any("of unknown use" in note for note in ckpt.notes)
    assert [side.name for side in ckpt.manifest.side_files] == ["config.json"]
    assert (ckpt.format, ckpt.step) == ("torch_dist", 3)


@pytest.mark.parametrize("name", SOURCES)
def test_hyperparameters_step_and_schedule_are_carried(golden: Path, name: str) -> None:
    state = read_checkpoint(golden / name).manifest.state
    optimizer = state["megatron"]["optimizer"]
    assert optimizer["step"] == 3
    assert sorted(group["wd_mult"] for group in optimizer["param_groups"]) == [0.0, 1.0]
    assert {group["lr"] for group in state["param_groups"]} == {0.001}
    assert state["schedule"]["num_steps"] == 3
    assert len(state["megatron"]["args"]) > 500
    json.dumps(state, allow_nan=False)


@pytest.mark.parametrize("twin", TWINS)
def test_the_merged_model_is_that_of_the_classic_twin(
    golden: Path, tmp_path: Path, twin: str
) -> None:
    for form in ("torch", "torch_dist"):
        merge(golden / f"{twin}_{form}", tmp_path / form)
    wanted, found = load_hf(tmp_path / "torch"), load_hf(tmp_path / "torch_dist")
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], x) for name, x in wanted.items())
    texts = [
        json.loads((tmp_path / f / "config.json").read_text()) for f in ("torch", "torch_dist")
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("tp_pp_dp", [(4, 1, 1), (1, 4, 1), (2, 2, 2)])
def test_every_form_becomes_shards_of_another_layout(
    golden: Path, tmp_path: Path, name: str, tp_pp_dp: tuple[int, int, int]
) -> None:
    tp, pp, dp = tp_pp_dp
    options = _rows_of(name)
    reshard(golden / name, tmp_path / "out", to="shards", read=options, tp=tp, pp=pp, dp=dp)
    verdict = verify(golden / name, tmp_path / "out", read=options, read_b=options)
    assert verdict.same, verdict.differences
    assert verdict.tensors == _tensors(name)


def test_weights_only_leaves_the_optimizer(golden: Path) -> None:
    for name in SOURCES:
        ckpt = read_checkpoint(golden / name, ReadOptions(weights_only=True))
        assert not any("/" in fqn for fqn in ckpt.manifest.tensors), name


def test_slices_read_across_chunks(golden: Path) -> None:
    """fc1 was saved by two tensor-parallel ranks, gate and up apart."""
    found = open_checkpoint(golden / "llama_bf16_tp2pp2_torch_dist")
    for state in ("", "exp_avg/", "master/"):
        for fqn in ("model.layers.3.mlp.up_proj.weight", "model.layers.1.self_attn.k_proj.weight"):
            tensor = found[state + fqn]
            whole = tensor.torch()
            rows, columns = whole.shape
            assert torch.equal(torch.as_tensor(tensor[3 : rows - 2, 5:columns]), whole[3:-2, 5:])


def test_the_mesh_of_the_saving_run_is_known(golden: Path) -> None:
    ckpt = read_checkpoint(golden / "llama8_fp32_tp2pp2vpp2_torch_dist")
    assert (ckpt.mesh.size("tp"), ckpt.mesh.size("pp")) == (2, 2)
    assert ckpt.mesh.owned["pp"] == ((0, 1, 4, 5), (2, 3, 6, 7))
    ckpt = read_checkpoint(golden / FULL)
    assert (ckpt.mesh.size("pp"), ckpt.dp, ckpt.sharded) == (2, 2, True)


def test_the_commands_read_torch_dist_folders(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(golden / FULL)
    assert inspect_ckpt.main([source]) == 0
    assert "format      torch_dist, family llama" in capsys.readouterr().out
    assert verify_ckpt.main([source]) == 0
    assert verify_ckpt.main([source, f"{source}/iter_0000003"]) == 0
    shards = str(tmp_path / "shards")
    words = [source, "--tp", "2", "--pp", "1", "--to", "shards", "--output", shards]
    assert reshard_command.main(words) == 0
    assert verify_ckpt.main([source, shards]) == 0
    assert json.loads((tmp_path / "shards" / "checkpoint.json").read_text())["step"] == 3
    assert merge_ckpt.main([source, "--output", str(tmp_path / "hf"), "--vocab-size", "251"]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == 251


# --- what is wrong is named --------------------------------------------------------------------


def _copy(golden: Path, into: Path, name: str = FULL) -> Path:
    root = into / "in"
    shutil.copytree(golden / name, root)
    for path in [root, *root.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return root


def _edit(root: Path, change: Callable[[Metadata], object]) -> None:
    path = _iteration(root) / ".metadata"
    content = pickle.loads(path.read_bytes())
    change(content)
    path.write_bytes(pickle.dumps(content))


def _replaced(root: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The first blob of ``name`` again at the end of its file, changed."""

    def repoint(content: Metadata) -> None:
        index = next(i for i in content.storage_data if i.fqn == name)
        info = content.storage_data[index]
        path = _iteration(root) / info.relative_path
        data = path.read_bytes()
        stored = torch.load(io.BytesIO(data[info.offset : info.offset + info.length]))
        out = io.BytesIO()
        torch.save(change(stored), out)
        path.write_bytes(data + out.getvalue())
        content.storage_data[index] = replace(info, offset=len(data), length=len(out.getvalue()))

    _edit(root, repoint)


def _unfinished(root: Path) -> None:
    (_iteration(root) / "metadata.json").unlink()


def _of_backend(name: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        text = json.dumps({"sharded_backend": name, "sharded_backend_version": 1})
        (_iteration(root) / "metadata.json").write_text(text)

    change.__name__ = name
    return change


def _torch_alone(root: Path) -> None:
    _unfinished(root)
    (_iteration(root) / "common.pt").unlink()


def _no_common(root: Path) -> None:
    (_iteration(root) / "common.pt").unlink()


def _no_metadata(root: Path) -> None:
    (_iteration(root) / ".metadata").unlink()


def _no_file(root: Path) -> None:
    (_iteration(root) / "__1_1.distcp").unlink()


def _truncated(root: Path) -> None:
    path = _iteration(root) / "__1_1.distcp"
    path.write_bytes(path.read_bytes()[:-700])


def _zeroed(root: Path) -> None:
    path = _iteration(root) / "__1_1.distcp"
    path.write_bytes(bytes(path.stat().st_size))


def _half_metadata(root: Path) -> None:
    path = _iteration(root) / ".metadata"
    path.write_bytes(path.read_bytes()[:20_000])


def _half_common(root: Path) -> None:
    path = _iteration(root) / "common.pt"
    path.write_bytes(path.read_bytes()[:9_000])


def _path_of(place: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        def point(content: Metadata) -> None:
            index, info = next(iter(content.storage_data.items()))
            content.storage_data[index] = replace(info, relative_path=place)

        shutil.copy(_iteration(root) / "__0_0.distcp", root / "outside.distcp")
        _edit(root, point)

    change.__name__ = f"at {place.replace('/', '|')}"
    return change


def _chunk_removed(root: Path) -> None:
    _edit(root, lambda m: m.state_dict_metadata[STACKED].chunks.pop())


def _blob_removed(root: Path) -> None:
    def remove(content: Metadata) -> None:
        index = next(i for i in content.storage_data if i.fqn == STACKED)
        del content.storage_data[index]

    _edit(root, remove)


def _overlapping(root: Path) -> None:
    """As many elements as the shape has, some of them twice."""

    def twice(content: Metadata) -> None:
        chunks = content.state_dict_metadata[STACKED].chunks
        chunks[1] = chunks[0]

    _edit(root, twice)


def _overlapping_in_part(root: Path) -> None:
    """Two halves of the table, of which one is moved onto the other."""

    def shift(content: Metadata) -> None:
        name = "optimizer.state.exp_avg.embedding.word_embeddings.weight"
        (chunk,) = content.state_dict_metadata[name].chunks
        size = torch.Size([128, 32])
        index = next(i for i in content.storage_data if i.fqn == name)
        info = content.storage_data.pop(index)
        path = _iteration(root) / info.relative_path
        out = io.BytesIO()
        torch.save(torch.ones(size), out)
        data = path.read_bytes()
        path.write_bytes(data + 2 * out.getvalue())
        chunks = []
        for at, row in enumerate((0, 96)):
            offset = torch.Size([row, 0])
            chunks.append(replace(chunk, offsets=offset, sizes=size))
            content.storage_data[replace(index, offset=offset)] = replace(
                info, offset=len(data) + at * len(out.getvalue()), length=len(out.getvalue())
            )
        content.state_dict_metadata[name].chunks = chunks

    _edit(root, shift)


def _outside(root: Path) -> None:
    def shift(content: Metadata) -> None:
        chunk = content.state_dict_metadata[STACKED].chunks[0]
        chunk.offsets = torch.Size([9, *chunk.offsets[1:]])

    _edit(root, shift)


def _of_another_shape(root: Path) -> None:
    _replaced(root, STACKED, lambda x: x.reshape(-1))


def _of_another_dtype(root: Path) -> None:
    _replaced(root, STACKED, lambda x: x.float())


def _renamed(root: Path) -> None:
    def rename(content: Metadata) -> None:
        table = content.state_dict_metadata
        table["decoder.odd.weight"] = table.pop("decoder.final_layernorm.weight")
        for index in [i for i in content.storage_data if i.fqn == "decoder.final_layernorm.weight"]:
            info = content.storage_data.pop(index)
            content.storage_data[replace(index, fqn="decoder.odd.weight")] = info

    _edit(root, rename)


def _one_less(root: Path) -> None:
    _edit(root, lambda m: m.state_dict_metadata.pop("decoder.final_layernorm.weight"))


def _no_embedding(root: Path) -> None:
    _edit(root, lambda m: m.state_dict_metadata.pop("embedding.word_embeddings.weight"))


def _no_table(root: Path) -> None:
    (_iteration(root) / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))


def _negative(root: Path) -> None:
    def point(content: Metadata) -> None:
        index, info = next(iter(content.storage_data.items()))
        content.storage_data[index] = replace(info, offset=-5)

    _edit(root, point)


FAULTS: list[tuple[Callable[[Path], None], str]] = [
    (_unfinished, r"iter_0000003: an unfinished save \(metadata\.json.*--iteration N"),
    (_of_backend("zarr"), r"metadata\.json: sharded_backend is 'zarr'.*--ckpt-format torch_dist"),
    (_of_backend("fsdp_dtensor"), "sharded_backend is 'fsdp_dtensor', which is not read"),
    (_torch_alone, r"holds \.metadata and no common\.pt: a checkpoint of PyTorch's own"),
    (_no_common, r"common\.pt: "),
    (_no_metadata, r"\.metadata: "),
    (_no_file, r"__1_1\.distcp: "),
    (_truncated, r"__1_1\.distcp: .*bytes; the file is truncated"),
    (_zeroed, r"__1_1\.distcp: "),
    (_half_metadata, r"\.metadata: "),
    (_half_common, r"common\.pt: "),
    (_path_of("../outside.distcp"), r"lies in '\.\./outside\.distcp', no file beside it"),
    (_path_of("/etc/passwd"), "lies in '/etc/passwd', no file beside it"),
    (_path_of(".."), r"lies in '\.\.', no file beside it"),
    (_chunk_removed, rf"{STACKED}: its chunks have 9216 elements, its shape.* has 12288"),
    (_blob_removed, rf"{STACKED}: chunk \[1, 32, 96\] at \[\d, 0, 0\]: no file holds it"),
    (_overlapping, rf"{STACKED}: two chunks lie at \[\d, 0, 0\]"),
    (_overlapping_in_part, r"exp_avg\.embedding.*: its chunks overlap, and leave out as much"),
    (_outside, r"at \[9, 0, 0\]: outside of \[4, 32, 96\]"),
    (_of_another_shape, r"holds BF16 \[3072\], \.metadata says BF16 \[1, 32, 96\]"),
    (_of_another_dtype, r"holds F32 \[1, 32, 96\], \.metadata says BF16"),
    (_renamed, r"decoder\.odd\.weight: unknown tensor of shape \[32\]"),
    (_one_less, r"decoder\.final_layernorm\.weight: missing"),
    (_no_embedding, r"\.metadata: names no embedding\.word_embeddings\.weight"),
    (_no_table, r"\.metadata: is not a Metadata"),
    (_negative, "bytes -5 to"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), FAULTS, ids=[c.__name__ for c, _ in FAULTS])
def test_a_fault_is_named_and_nothing_is_written(
    golden: Path, tmp_path: Path, change: Callable[[Path], None], says: str
) -> None:
    root = _copy(golden, tmp_path)
    change(root)
    for use in (
        lambda: [tensor.torch() for tensor in open_checkpoint(root).values()],
        lambda: verify(root),
        lambda: reshard(root, tmp_path / "out", tp=2, pp=1, to="shards"),
    ):
        with pytest.raises(CheckpointError, match=re.compile(says, re.DOTALL)):
            use()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return (Path.touch, (Path("executed"),))


@pytest.mark.parametrize("where", [".metadata", "common.pt"])
def test_an_unknown_global_is_named_and_never_executed(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    root = _copy(golden, tmp_path)
    monkeypatch.chdir(tmp_path)
    if where == ".metadata":
        _edit(root, lambda m: setattr(m, "planner_data", _Evil()))
    else:
        path = _iteration(root) / where
        torch.save({"iteration": 3, "odd": _Evil()}, path)
    with pytest.raises(CheckpointError, match=rf"{where}.*refused, nothing was executed"):
        read_checkpoint(root)
    assert not (tmp_path / "executed").exists()


# --- optimizers that cannot be trusted ---------------------------------------------------------


def _refused_but_for_weights(root: Path, says: str) -> None:
    ckpt = read_checkpoint(root)
    assert re.search(says, ckpt.optimizer_fault()), ckpt.optimizer_fault()
    with pytest.raises(CheckpointError, match="--weights-only"):
        reshard(root, root.parent / "out", tp=1, pp=1, to="shards")
    assert not (root.parent / "out").exists()
    reshard(root, root.parent / "out", tp=2, pp=1, to="shards", read=ReadOptions(weights_only=True))
    assert verify(root, root.parent / "out", weights_only=True).same


def test_masters_shifted_against_the_weights_leave_the_optimizer_unread(
    golden: Path, tmp_path: Path
) -> None:
    root = _copy(golden, tmp_path)
    _replaced(root, SHIFTED, lambda x: x.flatten().roll(1).view(x.shape))
    _refused_but_for_weights(root, "down_proj.*shifted against the weights.*--weights-only")


def test_shifted_masters_are_no_weights_to_export_and_no_sound_checkpoint(
    golden: Path, tmp_path: Path
) -> None:
    root = _copy(golden, tmp_path)
    _replaced(root, SHIFTED, lambda x: x.flatten().roll(1).view(x.shape))
    with pytest.raises(CheckpointError, match=r"shifted against the weights.*--from-master"):
        merge(root, tmp_path / "hf", from_master=True)
    assert not (tmp_path / "hf").exists()
    assert not verify(root).same
    assert verify(root, weights_only=True).same


@pytest.mark.parametrize("name", [".metadata", "common.pt", "metadata.json", "__0_0.distcp"])
def test_a_save_over_what_was_read_is_noticed(
    golden: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = _copy(golden, tmp_path)
    real = convert.read_checkpoint

    def read(*args):
        found = real(*args)
        file = _iteration(root) / name
        file.write_bytes(bytes(file.read_bytes()))
        return found

    monkeypatch.setattr(convert, "read_checkpoint", read)
    with pytest.raises(CheckpointError, match=rf"{name}: changed while it was read"):
        reshard(root, tmp_path / "out", to="shards", tp=1, pp=1)
    assert not (tmp_path / "out").exists()


def test_two_tensors_share_no_bytes(golden: Path, tmp_path: Path) -> None:
    root = _copy(golden, tmp_path)

    def twice(content: Metadata) -> None:
        one, other, *_ = [i for i in content.storage_data if i.fqn == STACKED]
        content.storage_data[one] = content.storage_data[other]

    _edit(root, twice)
    with pytest.raises(CheckpointError, match=rf"{STACKED} is said to lie at bytes .* damaged"):
        read_checkpoint(root)


def test_masters_of_flat_buffers_are_compared_as_well(golden: Path, tmp_path: Path) -> None:
    root = _copy(golden, tmp_path, DPRESHARD)
    name = ("optimizer.distributed.dp_group_idx_1.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)"
            ".bucket_idx_0.param")  # fmt: skip
    _replaced(root, name, torch.neg)
    _refused_but_for_weights(root, "shifted against the weights")


def _buckets_lost(content: Metadata) -> None:
    for name in [n for n in content.state_dict_metadata if "dp_group_idx_1.gbuf" in n]:
        del content.state_dict_metadata[name]


def _bucket_cut(content: Metadata) -> None:
    for name, meta in content.state_dict_metadata.items():
        if "dp_group_idx_1.gbuf" in name:
            kept = [c for c in meta.chunks if c.offsets[0] + c.sizes[0] <= 8192]
            meta.chunks, meta.size = kept, torch.Size([sum(c.sizes[0] for c in kept)])


def _bucket_renumbered(content: Metadata) -> None:
    for table in (content.state_dict_metadata,):
        for name in [n for n in table if "dp_group_idx_1.gbuf" in n]:
            table[name.replace("dp_group_idx_1", "dp_group_idx_1.odd")] = table[name]
    for index in [i for i in content.storage_data if "dp_group_idx_1.gbuf" in i.fqn]:
        moved = replace(index, fqn=index.fqn.replace("dp_group_idx_1", "dp_group_idx_1.odd"))
        content.storage_data[moved] = replace(content.storage_data[index], length=0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_buckets_lost, "buffer 0 of tp 0 pp 1 is missing"),
        (_bucket_cut, r"buckets of \[8192\] elements fit no"),
        (_bucket_renumbered, "optimizer state of an unknown form"),
    ],
)
def test_flat_buffers_that_do_not_fit_are_said(
    golden: Path, tmp_path: Path, change: Callable[[Metadata], object], says: str
) -> None:
    root = _copy(golden, tmp_path, DPRESHARD)
    _edit(root, change)
    _refused_but_for_weights(root, says)


# --- which folder ------------------------------------------------------------------------------


def test_iteration_picks_one_and_an_unfinished_newest_is_not_taken(
    golden: Path, tmp_path: Path
) -> None:
    root = _copy(golden, tmp_path)
    shutil.copytree(_iteration(root), root / "iter_0000009")
    (root / "iter_0000009" / "metadata.json").unlink()
    assert verify(root, golden / FULL).same  # the tracker still says 3
    with pytest.raises(CheckpointError, match="iter_0000009: an unfinished save"):
        read_checkpoint(root, ReadOptions(iteration=9))
    (root / "latest_checkpointed_iteration.txt").write_text("9")
    assert verify(root, golden / FULL, read=ReadOptions(iteration=3)).same


def test_a_folder_without_its_tracker_asks_for_an_iteration(golden: Path, tmp_path: Path) -> None:
    root = _copy(golden, tmp_path)
    (root / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(CheckpointError, match="is missing; name an iteration with --iteration N"):
        read_checkpoint(root)
    assert verify(root, golden / FULL, read=ReadOptions(iteration=3)).same


def test_the_folder_of_verl_is_read(golden: Path, tmp_path: Path) -> None:
    shutil.copytree(golden / FULL / "iter_0000003", tmp_path / "actor" / "dist_ckpt")
    assert verify(tmp_path / "actor", golden / FULL).same


# --- other forms, written by torch.distributed.checkpoint --------------------------------------


def _numbered(stored: Tensors) -> Tensors:
    """Layers apart, as models of mixed layers are saved."""
    out = {}
    for name, x in stored.items():
        prefix, stacked, rest = name.partition("decoder.layers.")
        rows = {f"{prefix}{stacked}{i}.{rest}": x[i].clone() for i in range(4)} if stacked else {}
        out.update(rows or {name: x})
    return out


def _halved(stored: Tensors) -> Tensors:
    """Gate and up apart, as two stored tensors."""
    out = {}
    for name, x in stored.items():
        if name.endswith("linear_fc1.weight"):
            gate, up = x.chunk(2, dim=-2)
            out |= {name + "_w": gate.clone(), name + "_v": up.clone()}
        else:
            out[name] = x
    return out


def _chained(stored: Tensors) -> Tensors:
    return {re.sub(r"^optimizer\.state", "chained_0.optimizer.state", n): x
            for n, x in stored.items()}  # fmt: skip


@pytest.mark.parametrize("form", [_numbered, _halved, lambda x: _halved(_numbered(x)), _chained])
def test_other_forms_hold_the_same_tensors(
    golden: Path, tmp_path: Path, form: Callable[[Tensors], Tensors]
) -> None:
    made = form(_loaded(golden / FULL))
    root = tmp_path / "in"
    writer = dcp.FileSystemWriter(_iteration(root))
    dcp.save(made, storage_writer=writer, no_dist=True)
    for name in ("common.pt", "metadata.json"):
        shutil.copy(_iteration(golden / FULL) / name, _iteration(root) / name)
    verdict = verify(_iteration(root), golden / FULL)
    assert verdict.same, verdict.differences
    assert verdict.tensors == _states(FULL) * TENSORS["llama"]
