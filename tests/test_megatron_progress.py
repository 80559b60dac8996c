"""Where a run of Megatron-LM's says how far it was: what each version of it writes.

megatron-core 0.20 has no common.pt: what belongs to no rank is the object ``common_state``. One
such checkpoint was written by megatron-core 0.20 itself; others are golden ones of today's form,
turned into it with torch's own classes.
"""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from test_megatron import CONFIG, _edit, _llama, _small
from test_megatron_dist import DPRESHARD, FULL, _loaded, _Unpickler
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from shardwright.ckpt import CheckpointError, merge, open_checkpoint, reshard, verify
from shardwright.ckpt.reader import read_checkpoint
from shardwright.tools import inspect_ckpt, merge_ckpt, verify_ckpt
from shardwright.tools import reshard as reshard_command


@pytest.fixture(scope="session")
def core020(golden: Path) -> Path:
    folder = golden.with_name("golden-core020")
    if not folder.is_dir():
        pytest.skip(f"{folder} does not exist")
    return folder


def test_a_checkpoint_of_core_0_20_equals_what_torch_itself_reads(core020: Path) -> None:
    stored, found = _loaded(core020), open_checkpoint(core020)
    for layer in range(4):
        at = f"model.layers.{layer}."
        fc2 = stored["decoder.layers.mlp.linear_fc2.weight"][layer]
        assert torch.equal(found[at + "mlp.down_proj.weight"].torch(), fc2)
        gate, up = stored["decoder.layers.mlp.linear_fc1.weight"][layer].chunk(2)
        assert torch.equal(found[at + "mlp.gate_proj.weight"].torch(), gate)
        assert torch.equal(found[at + "mlp.up_proj.weight"].torch(), up)
        norm = stored["decoder.layers.self_attention.linear_qkv.layer_norm_weight"][layer]
        assert torch.equal(found[at + "input_layernorm.weight"].torch(), norm)
    assert torch.equal(found["lm_head.weight"].torch(), stored["output_layer.weight"])
    assert len([name for name in found if "/" not in name]) == 39
    assert found.step == 3


def test_every_command_takes_a_checkpoint_of_core_0_20(
    core020: Path, tmp_path: Path, capsys
) -> None:
    assert inspect_ckpt.main([str(core020)]) == 0
    assert verify_ckpt.main([str(core020)]) == 0
    assert merge_ckpt.main([str(core020), "--output", str(tmp_path / "hf")]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_key_value_heads"] == 2
    assert verify(core020, tmp_path / "hf", weights_only=True).same
    for to in ("torch_dist", "megatron", "shards"):
        argv = [str(core020), "--to", to, "--tp", "2", "--pp", "2", "--output", str(tmp_path / to)]
        assert reshard_command.main(argv) == 0
        assert verify(core020, tmp_path / to).same
    capsys.readouterr()


def _as_core020(source: Path, folder: Path) -> Path:
    """The same checkpoint with common.pt as an object of the metadata, as core 0.20 saves it."""
    shutil.copytree(source, folder)
    (inner,) = folder.glob("iter_*")
    for file in inner.iterdir():
        file.chmod(0o644)
    inner.chmod(0o755)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its enums' class imports all of megatron-core
        common = torch.load(inner / "common.pt", weights_only=False)
    with (inner / ".metadata").open("rb") as opened:
        metadata: Any = _Unpickler(opened).load()
    torch.save([common], inner / "__9_9.distcp")
    name = "common_state/shard_0_1"
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    size = (inner / "__9_9.distcp").stat().st_size
    metadata.storage_data[MetadataIndex(name)] = _StorageInfo("__9_9.distcp", 0, size)
    metadata.planner_data = None
    (inner / ".metadata").write_bytes(pickle.dumps(metadata))
    (inner / "common.pt").unlink()
    (inner / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    return folder


@pytest.mark.parametrize("name", [FULL, DPRESHARD, "llama_bf16_tp2pp2_torch_dist"])
def test_the_optimizer_of_core_0_20s_form_is_that_of_the_older_form(
    name: str, golden: Path, tmp_path: Path
) -> None:
    made = _as_core020(golden / name, tmp_path / "made")
    verdict = verify(golden / name, made)
    assert verdict.same, verdict.differences
    assert {"exp_avg", "master"} <= {n.partition("/")[0] for n in open_checkpoint(made)}
    ours, theirs = (read_checkpoint(path).manifest.state for path in (made, golden / name))
    assert ours == theirs
    reshard(made, tmp_path / "classic", to="megatron", tp=1, pp=1)
    assert verify(golden / name, tmp_path / "classic").same


def test_without_common_state_the_error_names_what_is_missing(
    core020: Path, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    shutil.copytree(core020, made)
    file = made / "iter_0000003" / ".metadata"
    content = file.read_bytes()
    file.parent.chmod(0o755)
    file.chmod(0o644)
    file.write_bytes(content.replace(b"common_state/shard_0_1", b"kommon_state/shard_0_1"))
    with pytest.raises(
        CheckpointError, match=r"common.pt: is missing, and .metadata names no object"
    ):
        open_checkpoint(made)


# --- the iteration -------------------------------------------------------------------------------


def _without(root: Path, **more: object) -> Path:
    """The one rank's file without its iteration, with ``more`` in it."""

    def change(file: dict[str, object]) -> None:
        del file["iteration"]
        file.update(more)

    _edit(root, "mp_rank_00", change)
    return root


def test_old_files_say_total_iters(tmp_path: Path) -> None:
    found = read_checkpoint(_without(_small(tmp_path, 1, 1), total_iters=77))
    assert found.step == found.manifest.state["step"] == 77
    assert not any("iteration" in note or "total_iters" in note for note in found.notes)


def test_bridge_says_it_in_train_state(tmp_path: Path) -> None:
    root = _without(_small(tmp_path, 1, 1))
    said = {"step": torch.tensor(78, dtype=torch.int32), "do_train": torch.tensor(True),
            "consumed_train_samples": torch.tensor(624, dtype=torch.int32)}  # fmt: skip
    torch.save(said, root / "iter_0000005" / "train_state.pt")
    assert read_checkpoint(root).step == 78


def test_the_folders_number_counts_where_no_file_says_one(tmp_path: Path) -> None:
    found = read_checkpoint(_without(_small(tmp_path, 1, 1)))
    assert found.step == 5
    assert any("name no iteration: it is 5, as the folder's name says" in n for n in found.notes)


@pytest.mark.parametrize("to", ["megatron", "torch_dist"])
def test_weights_without_a_step_become_a_release(to: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = tmp_path / "hf"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    save_file(_llama(), source / "model.safetensors")
    made, again = tmp_path / "made", tmp_path / "again"
    reshard(source, made, to=to, tp=1, pp=1)
    for folder in (made, again):
        if folder is again:
            reshard(made, again, to="torch_dist" if to == "megatron" else "megatron")
        assert (folder / "latest_checkpointed_iteration.txt").read_text() == "release"
        assert sorted(c.name for c in folder.iterdir() if c.is_dir()) == ["release"]
        assert read_checkpoint(folder).step is None
    merge(again, tmp_path / "back")
    assert verify(source, tmp_path / "back").same


# --- ranks ------------------------------------------------------------------------------------


def _exchange(root: Path, one: str, two: str) -> None:
    (inner,) = root.glob("iter_*")
    (inner / one).rename(inner / "other")
    (inner / two).rename(inner / one)
    (inner / "other").rename(inner / two)


@pytest.mark.parametrize("two", ["mp_rank_01_000", "mp_rank_00_001", "mp_rank_01_001"])
@pytest.mark.parametrize("ours", [False, True])
def test_exchanged_rank_folders_are_refused(two: str, ours: bool, golden: Path, tmp_path) -> None:
    source, root = golden / "llama_bf16_tp2pp2_torch", tmp_path / "in"
    if ours:
        reshard(source, root, tp=2, pp=2, dp=3, use_distributed_optimizer=True)
    else:
        shutil.copytree(source, root)
    read_checkpoint(root)
    _exchange(root, "mp_rank_00_000", two)
    with pytest.raises(CheckpointError, match="contradict the folders") as caught:
        read_checkpoint(root)
    assert two in str(caught.value)


def test_a_copy_in_place_of_another_rank_is_refused(golden: Path, tmp_path: Path) -> None:
    root = tmp_path / "in"
    shutil.copytree(golden / "llama_bf16_tp2pp2_torch", root)
    (inner,) = root.glob("iter_*")
    shutil.rmtree(inner / "mp_rank_01_000")
    shutil.copytree(inner / "mp_rank_00_000", inner / "mp_rank_01_000")
    with pytest.raises(CheckpointError, match="contradict the folders"):
        read_checkpoint(root)


def test_files_say_their_rank_as_megatron_counts(tmp_path: Path) -> None:
    reshard(_small(tmp_path / "in"), tmp_path / "out", tp=2, pp=2, dp=2)
    ranks = {}
    for file in (tmp_path / "out").rglob("model_optim_rng.pt"):
        ranks[file.parent.name] = torch.load(file, weights_only=False)["args"].rank
    assert ranks == {"mp_rank_00_000": 0, "mp_rank_01_000": 1, "mp_rank_00_001": 4,
                     "mp_rank_01_001": 5}  # fmt: skip


def test_ranks_that_all_say_0_say_nothing(golden: Path) -> None:
    read_checkpoint(golden / "gpt2_fp32_tp2pp2_torch__convertpy_to_tp1pp4_torch")
