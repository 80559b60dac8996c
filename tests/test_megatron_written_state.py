"""What megatron-core's optimizers ask for beside moments is in the files that are written."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import warm
from independent import stored
from test_megatron import CONFIG, _args, _llama, _save
from test_megatron_dist import DPRESHARD, _copy, _edit
from test_megatron_dist_out import _by_torch
from torch.distributed.checkpoint.metadata import Metadata

from shardwright.ckpt import open_checkpoint, reshard


def test_the_distributed_optimizer_of_an_fp32_model_finds_its_masters(
    golden: Path, tmp_path: Path
) -> None:
    """They repeat the weights; megatron-core asks for one of each weight, whatever its dtype."""
    source = golden / "gpt2_fp32_tp2pp2_torch_dist"
    reshard(source, tmp_path / "made", to="torch_dist", use_distributed_optimizer=True)
    found = _by_torch(tmp_path / "made" / "iter_0000003")
    weights = {name: x for name, x in found.items() if not name.startswith("optimizer.")}
    assert len(weights) > 10
    for name, weight in weights.items():
        assert torch.equal(found[f"optimizer.state.param.{name}"], weight), name


# --- the loss scale ------------------------------------------------------------------------------

SCALE = {"scale": 1.5 * 2**14, "growth_tracker": 37, "hysteresis_tracker": 1}
FORMS: dict[str, dict[str, object]] = {
    "classic": {"to": "megatron", "tp": 2, "pp": 2},
    "classic, flat": {"to": "megatron", "tp": 2, "pp": 1, "use_distributed_optimizer": True},
    "torch_dist": {"to": "torch_dist"},
    "torch_dist, sharded": {"to": "torch_dist", "use_distributed_optimizer": True},
}
# Loads every file's loss scale into megatron-core's own scaler and says what it then has.
LOADS = """
import json, sys
import torch
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
found = []
for path in sys.argv[1:]:
    stored = torch.load(path, weights_only=False)["optimizer"]["grad_scaler"]
    scaler = DynamicGradScaler(2.0**16, 1.0, 2.0, 0.5, 1000, 2)
    kinds = [{k: (str(getattr(v, "dtype", type(v))), list(getattr(v, "shape", [])))
              for k, v in table.items()} for table in (stored, scaler.state_dict())]
    assert kinds[0] == kinds[1], kinds
    assert list(stored) == list(scaler.state_dict())
    scaler.load_state_dict(stored)
    table = scaler.state_dict()
    found.append({**table, "scale": table["scale"].item()})
print(json.dumps(found))
"""


def _half(root: Path, scaler: dict[str, object] | None, **more: object) -> Path:
    """A run in fp16 with Megatron-LM's plain optimizer, as one rank saves it."""
    (weights,) = stored(CONFIG, _llama(), 1, 1, multiple=8).values()
    weights = {name: x.half() for name, x in weights.items()}
    decays = [[n for n, x in weights.items() if (x.dim() > 1) == flag] for flag in (True, False)]
    flat = [name for group in decays for name in group]
    groups = [{"wd_mult": float(flag), "lr_mult": 1.0, "lr": 0.5, "step": 7,
               "params": [flat.index(n) for n in group]}
              for flag, group in zip((1, 0), decays, strict=True)]  # fmt: skip
    state = {i: {"exp_avg": weights[n].float() + 1, "exp_avg_sq": weights[n].float() + 2}
             for i, n in enumerate(flat)}  # fmt: skip
    optimizer: dict[str, object] = {
        "optimizer": {"state": state, "param_groups": groups},
        "fp32_from_fp16_params": [[weights[n].float() for n in group] for group in decays],
    }
    if scaler is not None:
        optimizer["grad_scaler"] = scaler
    args = _args(1, 1, params_dtype=torch.float16, fp16=True, **more)
    return _save(root, {"mp_rank_00": {"model": weights}}, args, optimizer=optimizer)


def _of_megatron(**more: object) -> dict[str, object]:
    return {**SCALE, "scale": torch.tensor([SCALE["scale"]]), **more}


def _stored(made: Path) -> list[Path]:
    """The files in which an optimizer's scalars lie."""
    return sorted([*made.glob("*/mp_rank_*/model_optim_rng.pt"), *made.glob("*/common.pt")])


def _scalers(made: Path) -> list[object]:
    found = [torch.load(path, weights_only=False)["optimizer"] for path in _stored(made)]
    return [optimizer.get("grad_scaler") for optimizer in found]


def test_megatron_core_loads_the_loss_scale_of_every_form(tmp_path: Path) -> None:
    """Its types, shapes and order are those of megatron-core's own state_dict."""
    source = _half(tmp_path / "in", _of_megatron())
    paths = []
    for i, options in enumerate(FORMS.values()):
        reshard(source, tmp_path / f"{i}", **options)
        paths += _stored(tmp_path / f"{i}")
    reshard(source, tmp_path / "shards", to="shards", tp=2, pp=1)  # as plain JSON between
    reshard(tmp_path / "shards", tmp_path / "again", to="megatron", tp=1, pp=1)
    paths += _stored(tmp_path / "again")
    assert len(paths) == 4 + 2 + 1 + 1 + 1
    log = tmp_path / "log"
    code = warm.call("warm:script", LOADS, *map(str, paths), log=log)
    assert code == 0, log.read_text()[-4000:]
    assert json.loads(log.read_text().splitlines()[-1]) == [SCALE] * len(paths)


@pytest.mark.parametrize("form", FORMS)
def test_the_written_loss_scale_is_read_again(tmp_path: Path, form: str) -> None:
    source = _half(tmp_path / "in", _of_megatron())
    reshard(source, tmp_path / "made", **FORMS[form])
    found = open_checkpoint(tmp_path / "made").state["megatron"]["optimizer"]["grad_scaler"]
    assert found == SCALE


@pytest.mark.parametrize(("patience", "wanted"), [(None, 2), (5, 5)])
def test_counters_that_the_source_lacks_start_anew(
    tmp_path: Path, patience: int | None, wanted: int
) -> None:
    """megatron-core asks for both; args say how many overflows in a row it bears."""
    more = {} if patience is None else {"hysteresis": patience}
    source = _half(tmp_path / "in", {"scale": torch.tensor([1024.0])}, **more)
    reshard(source, tmp_path / "made", to="megatron", tp=1, pp=1)
    (scaler,) = _scalers(tmp_path / "made")
    assert scaler == {
        "scale": torch.tensor([1024.0]), "growth_tracker": 0, "hysteresis_tracker": wanted,
    }  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scaler", [None, {}])
def test_a_constant_loss_scale_and_none_stay_what_they_are(
    tmp_path: Path, form: str, scaler: dict[str, object] | None
) -> None:
    source = _half(tmp_path / "in", scaler)
    reshard(source, tmp_path / "made", **FORMS[form])
    assert set(map(repr, _scalers(tmp_path / "made"))) == {repr(scaler)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [0.0, -8.0, float("inf")])
def test_a_loss_scale_that_none_can_be_is_left_out_and_said_once(
    tmp_path: Path, form: str, scale: float
) -> None:
    source = _half(tmp_path / "in", _of_megatron(scale=torch.tensor([scale])))
    report = reshard(source, tmp_path / "made", **FORMS[form])
    said = f"grad_scaler left out: its scale is {scale!r}, no float32 above 0"
    assert report.lines().count(said) == 1
    assert set(_scalers(tmp_path / "made")) == {None}


def test_the_loss_scale_beside_flat_buffers_is_read(golden: Path, tmp_path: Path) -> None:
    """megatron-core keeps it as an object there, as it does the hyperparameters."""
    root = _copy(golden, tmp_path, DPRESHARD)
    prefix = "optimizer.distributed.dp_group_idx_0."

    def add(content: Metadata) -> None:
        index = next(i for i in content.storage_data if i.fqn == f"{prefix}optimizer/shard_0_1")
        info = content.storage_data[index]
        path = root / "iter_0000003" / info.relative_path
        out = io.BytesIO()
        torch.save([_of_megatron()], out)
        data = path.read_bytes()
        path.write_bytes(data + out.getvalue())
        name = f"{prefix}grad_scaler/shard_0_1"
        content.state_dict_metadata[name] = content.state_dict_metadata[index.fqn]
        content.storage_data[replace(index, fqn=name)] = replace(
            info, offset=len(data), length=len(out.getvalue())
        )

    _edit(root, add)
    found = open_checkpoint(root).state["megatron"]["optimizer"]
    assert found["grad_scaler"] == SCALE
    assert found["step"] == 3
