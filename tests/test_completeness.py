"""Optimizer state is whole or a fault, by one rule for all formats; and nobody asks for what is
not needed.

Sources are packed by independent.py; their outputs are damaged with torch's own classes.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from independent import load_hf, pack_states, stored, write_native
from strategies import raw, write_hf

from shardwright.ckpt import CheckpointError, ReadOptions, RunOptions, merge, reshard, verify
from shardwright.ckpt.reader import read_checkpoint

QUIET = RunOptions(workers=1)
SUMS = RunOptions(workers=1, checksum=True)
CASE = raw("llama", layers=2)
ROWS = ReadOptions(vocab_size=21)
STATE = {
    "param_groups": [
        {"lr": 0.5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": decay, "step": 1000}
        for decay in (0.1, 0.0)
    ]
}
WEIGHTS = {name: x.bfloat16() for name, x in CASE.state.items()}
FULL = {
    "exp_avg": CASE.numbered(1000),
    "exp_avg_sq": CASE.numbered(2000),
    "master": {name: x.float() for name, x in WEIGHTS.items()},
}
DOWN = "model.layers.1.mlp.down_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
FORMS = {
    "shards": {"to": "shards"},
    "shards dp2": {"to": "shards", "dp": 2},
    "megatron": {"to": "megatron", "use_distributed_optimizer": False},
    "megatron distributed": {"to": "megatron", "use_distributed_optimizer": True},
    "torch_dist": {"to": "torch_dist", "use_distributed_optimizer": False},
    "torch_dist distributed": {"to": "torch_dist", "use_distributed_optimizer": True},
}
ONE_OF_EACH = ("megatron", "megatron distributed", "torch_dist", "torch_dist distributed")


def _native(folder: Path, dp: int = 1, **states: dict[str, torch.Tensor]) -> Path:
    """A trainer's checkpoint at tp 2 with so much optimizer state, cut over ``dp`` ranks."""
    weights = stored(CASE.config, WEIGHTS, 2, 1)
    packed = pack_states(CASE.config, states, 2, 1) if states else None
    return write_native(folder, CASE.config, weights, packed, state=STATE, dp=dp, sharded=dp > 1)


def _without(*lacking: str) -> dict[str, dict[str, torch.Tensor]]:
    """All states, but those whose "state/name" is listed."""
    return {
        state: {name: x for name, x in rows.items() if f"{state}/{name}" not in lacking}
        for state, rows in FULL.items()
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training state in every form, each in a folder of its name."""
    root = tmp_path_factory.mktemp("forms")
    source = _native(root / "source", **FULL)
    for name, options in FORMS.items():
        reshard(source, root / name, run=SUMS, **options)
    return root


def _same_weights(root: Path, hf: Path) -> None:
    merge(root, hf, read=ROWS, run=QUIET)
    found = load_hf(hf)
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(found[name], x) for name, x in WEIGHTS.items())


# --- files that only the optimizer needs --------------------------------------------------------


def _apart(root: Path) -> Path:
    """Move the optimizer's blobs of a torch_dist checkpoint to a file of their own."""
    folder = root / "iter_0001000"
    other = Path(shutil.copy(folder / "__0_0.distcp", folder / "__0_1.distcp"))
    content = pickle.loads((folder / ".metadata").read_bytes())
    for index, info in content.storage_data.items():
        if index.fqn.startswith("optimizer."):
            info.relative_path = other.name
    (folder / ".metadata").write_bytes(pickle.dumps(content))
    table = json.loads((root / "checksums.json").read_text())
    del table["files"]["iter_0001000/.metadata"]
    table["files"]["iter_0001000/__0_1.distcp"] = {"size": other.stat().st_size}
    (root / "checksums.json").write_text(json.dumps(table))
    return other


def _truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:5000])


FILES: dict[str, Callable[[Path], Path]] = {
    "shards": lambda root: root / "optimizer_tp_1_pp_0.safetensors",
    "shards dp2": lambda root: root / "optimizer_tp_1_pp_0_dp_1.safetensors",
    "megatron distributed": lambda root: root / "iter_0001000" / "mp_rank_01" / "distrib_optim.pt",
    "torch_dist": _apart,
    "torch_dist distributed": _apart,
}


@pytest.mark.parametrize("how", [Path.unlink, _truncated], ids=["missing", "truncated"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_only_the_optimizer_needs_is_asked_for_only_then(
    name: str, how: Callable[[Path], None], made: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(made / name, tmp_path / name))
    file = FILES[name](root)
    how(file)
    _same_weights(root, tmp_path / "hf")
    assert verify(root, weights_only=True).same
    out = reshard(root, tmp_path / "a", tp=1, weights_only=True, run=QUIET).output
    _same_weights(out, tmp_path / "hf2")
    with pytest.raises(CheckpointError, match=re.escape(file.name)) as caught:
        reshard(root, tmp_path / "b", tp=1, run=QUIET)
    if how is Path.unlink:
        assert "is missing" in str(caught.value)
        assert "--weights-only" in str(caught.value)
    assert not (tmp_path / "b").exists()


def test_a_file_that_weights_need_is_named_with_what_lies_in_it(made: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(made / "torch_dist", tmp_path / "in"))
    _apart(root)
    (root / "iter_0001000" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: is missing; decoder\.\S+ lies in"):
        merge(root, tmp_path / "hf", run=QUIET)


# --- completeness -------------------------------------------------------------------------------


def _in_metadata(root: Path, take: Callable[[str], bool]) -> None:
    path = root / "iter_0001000" / ".metadata"
    content = pickle.loads(path.read_bytes())
    for name in [n for n in content.state_dict_metadata if take(n)]:
        del content.state_dict_metadata[name]
    path.write_bytes(pickle.dumps(content))


def _in_ranks(root: Path, change: Callable[[dict[int, dict[str, object]]], object]) -> None:
    for file in root.glob("iter_0001000/mp_rank_*/model_optim_rng.pt"):
        content = torch.load(file, weights_only=False)
        change(content["optimizer"]["optimizer"]["state"])
        torch.save(content, file)


def _less(root: Path, name: str, states: tuple[str, ...]) -> Path:
    """Take states of one tensor out of all ranks; of all layers of one in torch_dist."""
    if name.startswith("shards"):
        shutil.rmtree(root)
        lacking = _without(*(f"{state}/{DOWN}" for state in states))
        return _native(root, dp=2 if name.endswith("dp2") else 1, **lacking)
    (root / "checksums.json").unlink()
    if name == "megatron":
        _in_ranks(root, lambda table: [table[3].pop(state, None) for state in states])
        return root
    end = "decoder.layers.mlp.linear_fc2.weight"
    keys = {f"optimizer.state.{state}.{end}" for state in states}
    _in_metadata(root, lambda key: key in keys)
    return root


@pytest.mark.parametrize("name", ["shards", "megatron", "torch_dist", "torch_dist distributed"])
def test_a_moment_that_one_tensor_lacks_is_a_fault_and_no_source(
    name: str, made: Path, tmp_path: Path
) -> None:
    root = _less(Path(shutil.copytree(made / name, tmp_path / name)), name, ("exp_avg",))
    found = [f for f in verify(root).findings if f.kind == "optimizer"]
    assert len(found) == 1
    assert re.search(r"exp_avg: lacks [12] of the \d+ tensors that have exp_avg_sq", found[0].text)
    for to in ("shards", "megatron", "torch_dist"):
        with pytest.raises(CheckpointError, match=r"not whole.*--weights-only.*exp_avg: lacks"):
            reshard(root, tmp_path / "out", to=to, run=QUIET)
    assert verify(root, weights_only=True).same
    _same_weights(root, tmp_path / "hf")


@pytest.mark.parametrize("name", ["shards", "shards dp2", "megatron", "torch_dist"])
def test_a_tensor_without_any_state_is_a_fault_where_frozen_ones_would_be_known(
    name: str, made: Path, tmp_path: Path
) -> None:
    states = ("exp_avg", "exp_avg_sq", "master")
    root = _less(Path(shutil.copytree(made / name, tmp_path / name)), name, states)
    found = verify(root)
    if name.startswith("shards"):  # which do not record what was frozen
        assert found.same
        assert any(re.match(r"warning: 1 of \d+ weights have no optim", n) for n in found.notes)
        return
    texts = [f.text for f in found.findings if f.kind == "optimizer"]
    assert any(re.search(r"\d of \d+ weights have no optimizer state, first", t) for t in texts)
    with pytest.raises(CheckpointError, match="have no optimizer state"):
        reshard(root, tmp_path / "out", to="shards", run=QUIET)


@pytest.mark.parametrize("name", ["megatron", "torch_dist", "torch_dist distributed"])
def test_a_run_before_its_first_step_is_whole(name: str, tmp_path: Path) -> None:
    """Masters are there and no moment is: Adam makes them in its first step."""
    source = _native(tmp_path / "source", master=FULL["master"])
    out = reshard(source, tmp_path / "out", run=QUIET, **FORMS[name]).output
    assert verify(out).same


LACKING: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "a moment": (f"exp_avg_sq/{DOWN}",),
    "a master": (f"master/{DOWN}",),
    "all of the embedding": tuple(f"{state}/{EMBEDDING}" for state in FULL),
}
REFUSED = {
    "nothing": (),
    "a moment": tuple(FORMS),
    "a master": tuple(FORMS),
    "all of the embedding": ONE_OF_EACH,
}


@pytest.mark.parametrize("what", LACKING)
def test_what_is_written_can_be_read_and_is_sound(what: str, tmp_path: Path) -> None:
    source = _native(tmp_path / "source", **_without(*LACKING[what]))
    for name, options in FORMS.items():
        out = tmp_path / name
        if name in REFUSED[what]:
            lost = LACKING[what][0].partition("/")[2]
            with pytest.raises(CheckpointError, match=lost):
                reshard(source, out, run=QUIET, **options)
            assert not out.exists()
            continue
        reshard(source, out, run=QUIET, **options)
        assert verify(out).same, name
        assert not [f for f in verify(source, out, read_b=ROWS).findings if f.kind != "state"]


def test_one_rank_that_lacks_a_moment_is_named(made: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(made / "megatron", tmp_path / "in"))
    (root / "checksums.json").unlink()
    file = root / "iter_0001000" / "mp_rank_01" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    del content["optimizer"]["optimizer"]["state"][3]["exp_avg"]
    torch.save(content, file)
    with pytest.raises(CheckpointError, match=r"exp_avg/model\.layers\.\S+"):
        verify(root)


def test_weights_that_no_optimizer_trained_are_whole(tmp_path: Path) -> None:
    hf = write_hf(tmp_path / "hf", CASE)
    for to in ("megatron", "torch_dist"):
        out = reshard(hf, tmp_path / to, to=to, run=QUIET).output
        assert read_checkpoint(out).has_optimizer is False
        assert verify(out).same


# --- frozen weights -------------------------------------------------------------------------------

FROZEN = (EMBEDDING, DOWN)


def _frozen(folder: Path, said: object, dp: int = 1) -> Path:
    """A checkpoint of a run that did not train two weights, and says ``said``."""
    lacking = [f"{state}/{name}" for state in FULL for name in FROZEN]
    made = _native(folder, dp, **_without(*lacking))
    table = json.loads((made / "checkpoint.json").read_text())
    (made / "checkpoint.json").write_text(json.dumps({**table, "frozen": said}))
    return made


def test_frozen_weights_need_no_state_and_others_do(tmp_path: Path) -> None:
    whole = verify(_frozen(tmp_path / "a", list(FROZEN)))
    assert whole.same
    assert not [note for note in whole.notes if "state" in note]
    lost = [f.text for f in verify(_frozen(tmp_path / "b", [EMBEDDING])).findings]
    assert len(lost) == 1
    assert re.search(rf"1 of \d+ weights have no optimizer state, first {DOWN}: it was lost", *lost)
    with pytest.raises(CheckpointError, match=rf"not whole.*{DOWN}: it was lost"):
        reshard(tmp_path / "b", tmp_path / "out", tp=1, run=QUIET)
    apart = [f for f in verify(tmp_path / "a", tmp_path / "b").findings if f.name == "frozen"]
    assert len(apart) == 1


@pytest.mark.parametrize("layout", [{"tp": 1}, {"tp": 1, "pp": 2}, {"dp": 2}], ids=str)
def test_what_was_frozen_travels_to_any_layout(layout: dict[str, int], tmp_path: Path) -> None:
    source = _frozen(tmp_path / "in", list(FROZEN))
    out = reshard(source, tmp_path / "out", run=QUIET, **layout).output
    assert json.loads((out / "checkpoint.json").read_text())["frozen"] == sorted(FROZEN)
    assert verify(out).same
    weights = reshard(source, tmp_path / "w", weights_only=True, run=QUIET, **layout).output
    assert "frozen" not in json.loads((weights / "checkpoint.json").read_text())


@pytest.mark.parametrize("to", ["megatron", "torch_dist"])
def test_formats_that_hold_every_state_refuse_what_was_frozen(to: str, tmp_path: Path) -> None:
    source = _frozen(tmp_path / "in", list(FROZEN))
    with pytest.raises(CheckpointError, match=rf"2 of \d+ weights were frozen, first {EMBEDDING}"):
        reshard(source, tmp_path / "out", to=to, run=QUIET)
    assert reshard(source, tmp_path / "out", to=to, weights_only=True, run=QUIET).output.is_dir()


@pytest.mark.parametrize("name", ["megatron", "torch_dist"])
def test_shards_made_from_formats_that_hold_every_state_say_that_none_was_frozen(
    name: str, made: Path, tmp_path: Path
) -> None:
    out = reshard(made / name, tmp_path / "out", to="shards", run=QUIET).output
    assert json.loads((out / "checkpoint.json").read_text())["frozen"] == []


@pytest.mark.parametrize("said", ["x", [3], ["model.no_such.weight"], {EMBEDDING: 1}], ids=str)
def test_frozen_weights_that_are_none_are_refused(said: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint\.json: frozen "):
        verify(_frozen(tmp_path / "a", said))


def test_the_trainer_says_what_it_froze(tmp_path: Path, monkeypatch) -> None:
    import trainer_save

    from shardwright.train.checkpoint.save import Saver

    held = trainer_save._held(1)
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    held.named[name].requires_grad_(False)
    slots = held.optimizer.slots
    held.optimizer.slots = lambda param: slots(param) if param.requires_grad else []
    monkeypatch.setattr(
        trainer_save.rng,
        "capture",
        lambda stream: ({"torch": torch.zeros(4, dtype=torch.uint8)}, {}),
    )
    for weights_only in (False, True):
        saver = Saver(held, weights_only=weights_only)
        saver.save(tmp_path / f"checkpoint-{1 + weights_only}", 1 + weights_only, {})
        saver.wait()
    said = json.loads((tmp_path / "checkpoint-1" / "checkpoint.json").read_text())["frozen"]
    assert said == [f"model.layers.1.self_attn.{x}_proj.weight" for x in "kqv"]
    assert "frozen" not in json.loads((tmp_path / "checkpoint-2" / "checkpoint.json").read_text())


# --- other optimizers -----------------------------------------------------------------------------

OTHERS = {
    "Adadelta": ("square_avg", "acc_delta"), "amsgrad": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "Adamax": ("exp_avg", "exp_inf"), "RMSprop": ("square_avg", "momentum_buffer", "grad_avg"),
    "Adagrad": ("sum",), "Rprop": ("prev", "step_size"),
}  # fmt: skip


def test_every_state_of_its_weights_shape_of_torchs_optimizers_is_known() -> None:
    from shardwright.ckpt.model.manifest import SLOTS

    weight = torch.nn.Parameter(torch.ones(3, 2))
    made = {
        "Adadelta": torch.optim.Adadelta([weight]),
        "amsgrad": torch.optim.AdamW([weight], amsgrad=True),
        "Adamax": torch.optim.Adamax([weight]), "Rprop": torch.optim.Rprop([weight]),
        "RMSprop": torch.optim.RMSprop([weight], momentum=0.9, centered=True),
        "Adagrad": torch.optim.Adagrad([weight]), "ASGD": torch.optim.ASGD([weight]),
        "NAdam": torch.optim.NAdam([weight]), "RAdam": torch.optim.RAdam([weight]),
    }  # fmt: skip
    for name, optimizer in made.items():
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        state = optimizer.state[weight]
        slots = {k for k, v in state.items() if torch.is_tensor(v) and v.shape == weight.shape}
        assert slots
        assert slots <= set(SLOTS), name
        if name in OTHERS:
            assert slots == set(OTHERS[name])


@pytest.mark.parametrize("name", OTHERS)
def test_what_other_optimizers_keep_travels_under_its_own_name(name: str, tmp_path: Path) -> None:
    states = {slot: CASE.numbered(1000 * (i + 1)) for i, slot in enumerate(OTHERS[name])}
    masters = {"master": FULL["master"]}
    source = _native(tmp_path / "a", **states, **masters)
    at = source
    way = (("shards", 1, 2), ("megatron", 2, 1), ("torch_dist", 1, 1), ("shards", 2, 1))
    for to, tp, pp in way:
        at = reshard(at, tmp_path / f"{to} {tp}", to=to, tp=tp, pp=pp, run=QUIET).output
        assert verify(at).same, to
        if to == "megatron":
            (file,) = at.glob("iter_*/mp_rank_00/model_optim_rng.pt")
            inner = torch.load(file, weights_only=False)["optimizer"]["optimizer"]["state"]
            assert all(set(OTHERS[name]) <= set(row) for row in inner.values())
    found = [f for f in verify(source, at).findings if f.kind not in ("state", "file")]
    assert not found
    held = read_checkpoint(at).manifest
    for slot in states:
        assert held.category(slot)


@pytest.mark.parametrize("name", ["shards", "megatron", "torch_dist"])
def test_a_state_that_cannot_be_cut_is_named_and_the_weights_go_on(
    name: str, made: Path, tmp_path: Path
) -> None:
    """Adafactor's rows and columns."""
    root = Path(shutil.copytree(made / name, tmp_path / name))
    if name == "shards":
        from safetensors.torch import load_file, save_file

        (root / "checkpoint.json").write_text(json.dumps({
            k: v for k, v in json.loads((root / "checkpoint.json").read_text()).items()
            if k != "files"}))  # fmt: skip
        for file in root.glob("optimizer_*"):
            from safetensors import safe_open

            with safe_open(file, "pt") as opened:
                meta = opened.metadata()
            table = load_file(file)
            key = next(k for k in table if k.endswith("linear_fc2.weight"))
            table["row_var/" + key.partition("/")[2]] = torch.zeros(4)
            save_file(table, file, metadata=meta)
    else:
        (root / "checksums.json").unlink()
        if name == "megatron":
            _in_ranks(root, lambda t: [row.update(row_var=torch.zeros(4)) for row in t.values()])
        else:
            _in_metadata_renamed(root, ".exp_avg.", ".row_var.")
    with pytest.raises(CheckpointError, match=r"row_var.*exp_avg_sq, momentum_buffer") as error:
        reshard(root, tmp_path / "out", to="shards", run=QUIET)
    assert len(str(error.value)) < 1500
    reshard(root, tmp_path / "out", to="shards", weights_only=True, run=QUIET)


def _in_metadata_renamed(root: Path, old: str, new: str) -> None:
    (path,) = root.glob("iter_*/.metadata")
    content = pickle.loads(path.read_bytes())
    for table in (content.state_dict_metadata,):
        for key in [k for k in table if old in k]:
            table[key.replace(old, new)] = table.pop(key)
    for index in [k for k in content.storage_data if old in k.fqn]:
        entry = content.storage_data.pop(index)
        content.storage_data[
            type(index)(index.fqn.replace(old, new), index.offset, index.index)
        ] = entry
    path.write_bytes(pickle.dumps(content))
