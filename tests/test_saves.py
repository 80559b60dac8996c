"""What the trainer's saves hold: both spellings, frozen stages, and a script's own model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures_safety import names, refused
from train_helpers import launch

from shardwright.ckpt import open_checkpoint, reshard, verify
from shardwright.train.core.optim import OptimizerView
from shardwright.train.errors import TrainError


def saved(folder: str) -> dict[str, Any]:
    """In two ranks, a pipeline stage each: saves of all kinds, below ``folder``."""
    from train_runs import CONFIGS
    from transformers import AutoConfig, AutoModelForCausalLM

    from shardwright.ckpt.checkpoint.config import model_from
    from shardwright.train.checkpoint import original as originals
    from shardwright.train.checkpoint.hf_weights import take
    from shardwright.train.checkpoint.load import load
    from shardwright.train.checkpoint.rank_state import RankState
    from shardwright.train.checkpoint.save import Saver
    from shardwright.train.config.schema import OptimizerSettings
    from shardwright.train.core.engine import Engine, EngineOptions
    from shardwright.train.core.layout import Layout
    from shardwright.train.core.process import initialize
    from shardwright.train.model.options import ModelOptions

    place, said = Path(folder), []
    layout = Layout(pp=2)
    parallel = initialize(layout, seed=1)
    config = CONFIGS["shallow"]
    model = model_from(config, "x")
    torch.manual_seed(3)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    sides = [_config(config)] if parallel.rank == 0 else []

    def held_of(**options: Any) -> tuple[Any, RankState]:
        engine = Engine(model, parallel, layout, ModelOptions(), EngineOptions(), **options)
        engine.attach_optimizer(OptimizerSettings())
        held = RankState.of(engine)
        take(theirs, held)
        return engine, held

    engine, held = held_of()
    saver = Saver(held, log=said.append, pointer=None)
    for name, safe in (("safe", True), ("bin", False)):
        saver.save(place / name, 3, {}, sides, safe=safe, into=True)
        assert (place / name).is_dir(), "it is there on return"
        (place / name / f"rank{parallel.rank}.txt").write_text("mine")
        saver.wait()
    before = {k: p.detach().clone() for k, p in engine.named.items()}
    for param in engine.named.values():
        param.data.zero_()
    load(place / "bin", held)
    assert all(torch.equal(p, before[k]) for k, p in engine.named.items())

    # the script's own model
    original = originals.Original(theirs, held)
    shapes = {n: (tuple(p.shape), id(p)) for n, p in theirs.named_parameters()}
    original.release()
    bytes_held = sum(p.untyped_storage().nbytes() for p in theirs.parameters())
    assert {n: (tuple(p.shape), id(p)) for n, p in theirs.named_parameters()} == shapes
    refused = []
    for use in (
        lambda: theirs.save_pretrained(place / "never"),
        lambda: theirs(input_ids=torch.zeros(1, 4, dtype=torch.long)),
    ):
        try:
            use()
        except TrainError as error:
            refused.append(str(error))
    for param in engine.named.values():
        param.data.mul_(2)  # trained
    original.fill()
    if parallel.rank == 0:
        theirs.save_pretrained(place / "trained")
    meetings = originals.Meetings(held)
    meetings.meet("together")
    originals.MEET_SECONDS = 0.3
    alone = ""
    if parallel.rank == 0:
        try:
            meetings.meet("unwrap_model(model)")
        except TrainError as error:
            alone = str(error)

    # the first stage is frozen
    _, frozen = held_of(trained=lambda name: "layers.1." in name or "final" in name)
    other = Saver(frozen, log=said.append)
    other.save(place / "frozen", 0, {"param_groups": [{"lr": 0.1}]}, sides)
    other.wait()
    found = load(place / "frozen", frozen)
    return {"said": said, "refused": refused, "alone": alone, "bytes": bytes_held,
            "optimizer": found.optimizer}  # fmt: skip


def _config(config: Any) -> Any:
    from shardwright.ckpt.model.manifest import SideFile

    return SideFile("config.json", text=json.dumps(dict(config)))


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, list[Any]]:
    place = tmp_path_factory.mktemp("saves")
    return place, launch("test_saves:saved", 2, place / "ranks", str(place))


def test_bin_files_have_the_guides_names_and_the_values_of_the_safetensors(ran):
    place = ran[0]
    files = [name for name in names(place / "bin") if name.endswith(".bin")]
    assert files == [
        "optimizer_tp_0_pp_0.bin", "optimizer_tp_0_pp_1.bin",
        "pytorch_model_tp_0_pp_0.bin", "pytorch_model_tp_0_pp_1.bin",
    ]  # fmt: skip
    report = verify(place / "safe", place / "bin")
    assert report.differences == []
    for name in files:
        found = torch.load(place / "bin" / name, weights_only=True)
        assert found
        assert all(isinstance(value, torch.Tensor) for value in found.values())
    assert verify(place / "bin").differences == []  # their CRC-32s and digests as well


def test_a_script_may_write_into_the_folder_as_soon_as_save_returns(ran):
    place = ran[0]
    for name in ("safe", "bin"):
        assert {"rank0.txt", "rank1.txt", "checkpoint.json"} <= set(names(place / name))
        assert not [child for child in names(place / name) if child.startswith(".")]
    assert "latest" not in names(place / "ranks")


def test_no_pointer_is_written_beside_a_scripts_folder(ran):
    assert (ran[0] / "latest").read_text() == "frozen\n"  # the command's way, in this test


def test_an_original_holds_no_weights_and_says_so_until_it_gets_the_trained_ones(ran):
    from safetensors.torch import load_file

    place, (first, second) = ran
    assert first["bytes"] < 1000
    for rank in (first, second):
        assert len(rank["refused"]) == 2
        assert "LlamaForCausalLM.state_dict: this model holds no weights" in rank["refused"][0]
        assert "unwrap_model" in rank["refused"][1]
    assert not (place / "never/model.safetensors").exists()
    trained = load_file(place / "trained/model.safetensors")
    logical = open_checkpoint(place / "safe")
    assert trained.keys() == {name for name in logical if "/" not in name}
    for name, tensor in trained.items():
        assert torch.equal(tensor, logical[name].torch() * 2), name


def test_a_call_of_one_rank_alone_ends_with_an_error(ran):
    first, second = ran[1]
    assert "was not called on rank 1, within" in first["alone"]
    assert second["alone"] == ""


def test_a_checkpoint_whose_first_stage_is_frozen_is_read_by_everything(ran, tmp_path):
    place, ranks = ran
    assert "optimizer_tp_0_pp_0.safetensors" in names(place / "frozen")
    assert verify(place / "frozen").differences == []
    assert all(rank["optimizer"] for rank in ranks)
    reshard(place / "frozen", tmp_path / "one", tp=2, pp=1)
    logical, whole = open_checkpoint(tmp_path / "one"), open_checkpoint(place / "frozen")
    assert set(logical) == set(whole)
    moments = {name for name in whole if name.startswith("exp_avg/")}
    assert "exp_avg/model.layers.1.mlp.down_proj.weight" in moments
    assert not [name for name in moments if "layers.0" in name or "embed" in name]


def test_a_save_before_the_first_step_leaves_sgd_with_dampening_as_it_is():
    def stepped(*, saved: bool) -> list[float]:
        weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
        inner = torch.optim.SGD([weight], lr=0.1, momentum=0.9, dampening=0.5)
        view = OptimizerView(SimpleNamespace(optimizer=inner))
        for gradient in (0.5, 0.25):
            if saved:
                view.init_state()
            weight.grad = torch.full((2,), gradient)
            inner.step()
        return weight.tolist()

    assert stepped(saved=True) == stepped(saved=False)


def test_an_older_checkpoint_without_the_empty_file_of_a_frozen_stage_is_read(ran, tmp_path):
    shutil.copytree(ran[0] / "frozen", tmp_path / "old")
    (tmp_path / "old/optimizer_tp_0_pp_0.safetensors").unlink()
    refused(lambda: verify(tmp_path / "old"), "optimizer_tp_0_pp_0.safetensors: is missing")
    said = json.loads((tmp_path / "old/checkpoint.json").read_text())
    del said["files"]["optimizer_tp_0_pp_0.safetensors"]
    (tmp_path / "old/checkpoint.json").write_text(json.dumps(said))
    assert verify(tmp_path / "old").differences == []
    reshard(tmp_path / "old", tmp_path / "one", tp=1, pp=1)
    assert set(open_checkpoint(tmp_path / "one")) == set(open_checkpoint(ran[0] / "frozen"))
