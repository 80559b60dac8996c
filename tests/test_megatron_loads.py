"""megatron-core loads what is written; its models give Megatron-LM's logits, its optimizers hold
Megatron-LM's state.

Each case writes a golden checkpoint in another layout or form, lets megatron-core load that by its
own means in a layout of its own (megatron_loads.py), and compares with what Megatron-LM itself made
of the same training run. Both sides are read by torch.load alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from independent import (
    GOLDEN_CONFIGS,
    Tensors,
    megatron_files,
    megatron_optimizer,
    megatron_weights,
    numbered_globally,
    write_native,
)
from test_megatron import TRUE_ROWS
from test_megatron_out import _flat_groups, _flat_spans, _same

from shardwright.ckpt import ReadOptions, merge, reshard

LLAMA, GPT2, LLAMA8 = "llama_bf16_tp2pp2", "gpt2_fp32_tp2pp2", "llama8_fp32_tp2pp2vpp2"
FUSED, FLAT = "llama_bf16_tp2pp2_fusedadam_torch", "llama_bf16_tp2pp1dp2_distopt_torch"
DP = "llama_bf16_tp1pp2dp2_distopt_"  # of one training run: dpreshard and fullyreshard
FULL = f"{DP}fullyreshard_torch_dist"
WHOLE = {name: f"{name}_torch_dist__to_tp1pp1_torch" for name in (LLAMA, GPT2, LLAMA8)}

# How far logits may lie from those that Megatron-LM computed. Where both cut the tensors over
# equally many ranks every product and sum is the same, and on one CPU the difference is 0. Over
# other numbers of ranks, or by another CPU's kernels, sums are rounded elsewhere: Megatron-LM's own
# logits of one model at tp 1, 2 and 4 differ by 1.5e-7 in fp32, and in bf16 by 2**-8, the unit in
# the last place of logits between 0.5 and 1, which the largest here are.
TOLERANCE = {"fp32": 1e-6, "bf16": 2 * 2**-8}


@dataclass(frozen=True)
class Case:
    """One checkpoint written, and one load of it by megatron-core."""

    name: str
    source: str  # a golden folder; "hf:" and "native:" before it make it that first
    to: str  # what is written: megatron or torch_dist
    layout: dict[str, int]  # of the load; the classic format is written in it
    options: dict[str, object] = field(default_factory=dict)  # of what is written
    optimizer: str | None = None  # megatron-core's: plain or distributed
    fused_adam: bool = False  # as where Apex is installed; always with the distributed one
    oracle: str | None = None  # Megatron-LM's own files in the layout of the load
    logits: str | None = None  # whose logits the model must compute
    vocab: int | None = None  # padded rows of the model that loads; else what args say

    @property
    def rows(self) -> int:
        """True rows of the vocabulary."""
        return TRUE_ROWS[self.source.partition(":")[2].partition("_")[0]]


def at(tp: int = 1, pp: int = 1, dp: int = 1, vpp: int = 1) -> dict[str, int]:
    return {"tp": tp, "pp": pp, "dp": dp, "vpp": vpp}


def classic(name: str, source: str, layout: dict[str, int], **more: Any) -> Case:
    asked = {k: n for k, n in layout.items() if k in ("tp", "pp") or n > 1}
    options = {**asked, **more.pop("options", {})}
    return Case(name, source, "megatron", layout, options, **_with_logits(more))


def dist(name: str, source: str, layout: dict[str, int], **more: Any) -> Case:
    return Case(name, source, "torch_dist", layout, **_with_logits(more))


def _with_logits(more: dict[str, Any]) -> dict[str, Any]:
    return {"logits": more.get("oracle"), **more}


PLAIN: dict[str, Any] = {"optimizer": "plain"}
SPREAD: dict[str, Any] = {"optimizer": "distributed", "fused_adam": True}
SHARDED = {"use_distributed_optimizer": True}
WHOLE_PARAMETERS = {"use_distributed_optimizer": False}
CASES = [
    # torch_dist, with the optimizers that keep whole parameters
    dist("dist-llama-tp1", f"{LLAMA}_torch", at(), options={"tp": 4, "pp": 1},
         oracle=WHOLE[LLAMA], **PLAIN),
    dist("dist-llama-tp4", f"{LLAMA}_torch_dist", at(4), options={"tp": 1, "pp": 1},
         oracle=f"{LLAMA}_torch_dist__to_tp4pp1_torch", **PLAIN),
    dist("dist-llama-pp4", WHOLE[LLAMA], at(1, 4), oracle=f"{LLAMA}_torch_dist__to_tp1pp4_torch",
         logits=WHOLE[LLAMA], **PLAIN),
    dist("dist-llama-tp2pp2", f"{LLAMA}_torch_dist__to_tp4pp1_torch", at(2, 2),
         oracle=f"{LLAMA}_torch", **PLAIN),
    dist("dist-llama-weights", f"{LLAMA}_torch_dist", at(2), options={"tp": 4, "pp": 1,
         "weights_only": True}, oracle=f"{LLAMA}_torch__convertpy_to_tp2pp1_torch",
         logits=f"{LLAMA}_torch"),
    dist("dist-llama-fused", FUSED, at(2, 2), options={"tp": 1, "pp": 1}, fused_adam=True,
         oracle=FUSED, logits=f"{LLAMA}_torch", **PLAIN),
    dist("dist-gpt2-tp1", f"{GPT2}_torch", at(), options={"tp": 4, "pp": 1,
         "make_vocab_size_divisible_by": 4}, oracle=WHOLE[GPT2], **PLAIN),
    dist("dist-gpt2-tp2pp2", f"{GPT2}_torch_dist__to_tp4pp1_torch", at(2, 2), vocab=240,
         oracle=f"{GPT2}_torch", **PLAIN),
    # 240 rows are stored, and the model has 256: megatron-core adds the rest itself
    dist("dist-gpt2-rows", f"{GPT2}_torch_dist", at(4), vocab=256,
         oracle=f"{GPT2}_torch_dist__to_tp4pp1_torch", **PLAIN),
    dist("dist-llama8-tp1", f"{LLAMA8}_torch", at(), oracle=WHOLE[LLAMA8], **PLAIN),
    dist("dist-llama8-vpp", WHOLE[LLAMA8], at(2, 2, vpp=2), oracle=f"{LLAMA8}_torch", **PLAIN),
    # torch_dist, with the distributed optimizer
    dist("dist-full-tp1", FULL, at(), options={"tp": 2, "pp": 1, "dp": 2},
         oracle=f"{FULL}__to_tp1pp1dp1_torch", logits=f"{DP}dpreshard_torch_dist", **SPREAD),
    dist("dist-full-tp2dp2", FULL, at(2, dp=2), oracle=f"{FULL}__to_tp2pp1dp2_torch",
         logits=f"{DP}dpreshard_torch_dist", **SPREAD),
    dist("dist-v013", f"{DP}v013_torch_dist", at(2), logits=None,
         oracle=f"{DP}v013_torch_dist__to_tp2pp1dp1_torch", **SPREAD),
    dist("dist-dpreshard-dp1", f"{DP}dpreshard_torch_dist", at(1, 2),
         oracle=f"{DP}dpreshard_torch_dist__to_tp1pp2dp1_torch", logits=f"{DP}dpreshard_torch_dist",
         **SPREAD),
    # what Megatron-LM itself refuses: over tp and pp from the form that only dp may change
    dist("dist-dpreshard-tp2", f"{DP}dpreshard_torch_dist", at(2, dp=2),
         oracle=f"{FULL}__to_tp2pp1dp2_torch", logits=f"{DP}dpreshard_torch_dist",
         **SPREAD),
    dist("dist-flat-dp1", FLAT, at(2), options={"tp": 1, "pp": 2}, oracle=FLAT, **SPREAD),
    # the classic format
    classic("llama-tp1", f"{LLAMA}_torch", at(), oracle=WHOLE[LLAMA], **PLAIN),
    classic("llama-tp2", f"{LLAMA}_torch_dist", at(2), logits=f"{LLAMA}_torch", **PLAIN),
    classic("llama-tp4", f"{LLAMA}_torch_dist", at(4),
            oracle=f"{LLAMA}_torch_dist__to_tp4pp1_torch", **PLAIN),
    classic("llama-pp4", f"{LLAMA}_torch", at(1, 4), logits=WHOLE[LLAMA],
            oracle=f"{LLAMA}_torch_dist__to_tp1pp4_torch", **PLAIN),
    classic("llama-tp2pp2", WHOLE[LLAMA], at(2, 2), oracle=f"{LLAMA}_torch", **PLAIN),
    classic("fused-tp2pp2", FUSED, at(2, 2), fused_adam=True, oracle=FUSED,
            logits=f"{LLAMA}_torch", **PLAIN),
    classic("gpt2-tp1", f"{GPT2}_torch_dist", at(), oracle=WHOLE[GPT2], **PLAIN),
    classic("gpt2-tp2", f"{GPT2}_torch", at(2), logits=f"{GPT2}_torch", **PLAIN),
    classic("gpt2-tp4", f"{GPT2}_torch", at(4), oracle=f"{GPT2}_torch_dist__to_tp4pp1_torch",
            **PLAIN),
    classic("llama8-tp1", f"{LLAMA8}_torch_dist", at(), oracle=WHOLE[LLAMA8], **PLAIN),
    classic("llama8-vpp", WHOLE[LLAMA8], at(2, 2, vpp=2), oracle=f"{LLAMA8}_torch", **PLAIN),
    classic("full-tp1", FULL, at(), options=SHARDED, oracle=f"{FULL}__to_tp1pp1dp1_torch",
            logits=f"{DP}dpreshard_torch_dist", **SPREAD),
    classic("full-tp2dp2", FULL, at(2, dp=2), oracle=f"{FULL}__to_tp2pp1dp2_torch",
            logits=f"{DP}dpreshard_torch_dist", **SPREAD),
    # from Hugging Face: logits of true rows alone, since padding rows are zero
    classic("hf-llama-tp2", f"hf:{LLAMA}_torch", at(2), logits=f"{LLAMA}_torch",
            options={"make_vocab_size_divisible_by": 16}),
    classic("hf-gpt2-tp2pp2", f"hf:{GPT2}_torch", at(2, 2), logits=f"{GPT2}_torch",
            options={"make_vocab_size_divisible_by": 8}),
    dist("hf-dist-llama-tp1", f"hf:{LLAMA}_torch_dist", at(), logits=WHOLE[LLAMA],
         options={"make_vocab_size_divisible_by": 16}),
    dist("hf-dist-gpt2-tp1", f"hf:{GPT2}_torch", at(), logits=WHOLE[GPT2],
         options={"make_vocab_size_divisible_by": 8}),
    dist("hf-dist-llama8-vpp", f"hf:{LLAMA8}_torch", at(2, 2, vpp=2), logits=f"{LLAMA8}_torch",
         options={"make_vocab_size_divisible_by": 16}),
    # from one form of optimizer to the other
    dist("dist-plain-to-flat", f"{LLAMA}_torch", at(1, dp=2), options=SHARDED,
         oracle=WHOLE[LLAMA], **SPREAD),
    dist("dist-flat-to-plain", FULL, at(), options={"dp": 1, **WHOLE_PARAMETERS},
         oracle=f"{FULL}__to_tp1pp1dp1_torch", logits=f"{DP}dpreshard_torch_dist", **PLAIN),
    classic("flat-to-plain", FULL, at(), options={"dp": 1, **WHOLE_PARAMETERS},
            oracle=f"{FULL}__to_tp1pp1dp1_torch", logits=f"{DP}dpreshard_torch_dist", **PLAIN),
    classic("plain-to-flat", f"{LLAMA}_torch", at(dp=2), options=SHARDED,
            oracle=WHOLE[LLAMA], **SPREAD),
    # the same with parameters of fp32, virtual stages, and an embedding in a bucket of its own
    *(
        made(f"{head}{model}-to-flat", source, layout, options=SHARDED, oracle=oracle, **SPREAD)
        for head, made in (("", classic), ("dist-", dist))
        for model, source, layout, oracle in (
            ("llama8-vpp", WHOLE[LLAMA8], at(2, 2, vpp=2), f"{LLAMA8}_torch"),
            ("gpt2-tp2pp2", f"{GPT2}_torch_dist", at(2, 2), f"{GPT2}_torch"),
        )
    ),
    # from shards as the trainer writes them
    classic("native-tp1", f"native:{LLAMA}_torch", at(), oracle=WHOLE[LLAMA], fused_adam=True,
            **PLAIN),
    dist("native-dist-tp1", f"native:{LLAMA}_torch", at(), oracle=WHOLE[LLAMA], fused_adam=True,
         **PLAIN),
]  # fmt: skip
TO_FLAT = [c for c in CASES if c.name.endswith("plain-to-flat")]
TO_PLAIN = [c for c in CASES if c.name.endswith("flat-to-plain")]
FP32_TO_FLAT = [c for c in CASES if c.name.endswith("-to-flat") and c not in TO_FLAT]
CROSSED = TO_FLAT + TO_PLAIN + FP32_TO_FLAT
SAME_FORM = [c for c in CASES if c.oracle and c.optimizer and c not in CROSSED]
NATIVE_GROUPS = [
    {"step": 3, "lr": 0.25, "weight_decay": decay, "betas": [0.5, 0.75], "eps": 0.125}
    for decay in (0.5, 0.0)
]


def _of(cases: list[Case], **wanted: Any) -> pytest.MarkDecorator:
    found = [c for c in cases if all(getattr(c, k) == v for k, v in wanted.items())]
    return pytest.mark.parametrize("case", found, ids=[c.name for c in found])


def _native(case: Case, golden: Path, folder: Path) -> Path:
    """Megatron-LM's ranks as the trainer would have saved them."""
    source = golden / case.source.partition(":")[2]
    return write_native(
        folder,
        GOLDEN_CONFIGS["llama"],
        numbered_globally(megatron_weights(source), 4),
        numbered_globally(megatron_optimizer(source), 4),
        step=3,
        multiple=16,
        state={"param_groups": NATIVE_GROUPS},
    )


def _written(case: Case, golden: Path, folder: Path) -> Path:
    """The iteration's folder of the case."""
    kind, _, name = case.source.rpartition(":")
    source = golden / name
    if kind == "hf":
        merge(source, folder / "hf", read=ReadOptions(vocab_size=case.rows))
        source = folder / "hf"
    elif kind == "native":
        source = _native(case, golden, folder / "native")
    reshard(source, folder / "made", to=case.to, **case.options)
    (found,) = [p for p in (folder / "made").iterdir() if p.is_dir()]
    return found


class Loaded:
    """What the ranks of all cases hold."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, case: Case) -> dict[tuple[int, int, int], dict[str, Any]]:
        """(t, p, d) -> the rank's content; the ranks' own words where they failed."""
        folder, size, found = self.folder / case.name, case.layout, {}
        said = [path.read_text() for path in sorted(folder.glob("rank_*.txt"))]
        assert not said, "\n".join(said)
        for rank in range(size["tp"] * size["pp"] * size["dp"]):
            path = folder / f"rank_{rank}.pt"
            assert path.is_file(), "not run, since another case of this layout failed"
            outer, t = divmod(rank, size["tp"])
            p, d = divmod(outer, size["dp"])
            found[t, p, d] = torch.load(path, weights_only=True)
        return found


@pytest.fixture(scope="module")
def loaded(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """All cases, written by us and loaded by megatron-core in one process and its forks."""
    folder = tmp_path_factory.mktemp("loads")
    jobs = []
    for case in CASES:
        (folder / case.name).mkdir()
        jobs.append({
            "name": case.name,
            "kind": case.to,
            "folder": str(_written(case, golden, folder / case.name)),
            "layout": case.layout,
            "optimizer": case.optimizer,
            "fused_adam": case.fused_adam,
            "vocab": case.vocab,
            "tokens": str(golden / "forward" / f"{case.logits}.pt") if case.logits else None,
        })  # fmt: skip
    (folder / "jobs.json").write_text(json.dumps(jobs))
    log = folder / "log"
    code = warm.call("megatron_loads:main", str(folder / "jobs.json"), str(folder), log=log)
    assert code == 0, log.read_text()[-4000:]
    return Loaded(folder)


@_of(CASES, to="torch_dist")
def test_megatron_core_asks_for_all_that_is_written_and_for_nothing_else(case, loaded) -> None:
    for said in loaded(case).values():
        assert said["absent"] == said["unasked"] == []


@_of([c for c in CASES if c.oracle])
def test_the_weights_of_each_rank_are_those_of_megatrons_own_conversion(
    case, loaded, golden
) -> None:
    """Padding rows included."""
    wanted = megatron_files(golden / case.oracle)
    for (t, p, _), said in loaded(case).items():
        theirs = wanted[t, p]
        heads = [k for k in theirs if k.startswith("model")]
        assert heads == list(said["model"])
        for head in heads:
            assert list(_same(said["model"][head], theirs[head], f"{t},{p}.{head}")) == []


@_of([c for c in CASES if c.logits and not c.source.startswith("hf:")])
def test_the_model_computes_megatrons_logits(case, loaded, golden) -> None:
    assert _gap(case, loaded, golden, slice(None)) <= _bound(case)


@_of([c for c in CASES if c.source.startswith("hf:")])
def test_the_model_computes_megatrons_logits_from_hugging_face(case, loaded, golden) -> None:
    assert _gap(case, loaded, golden, slice(case.rows)) <= _bound(case)


def _bound(case: Case) -> float:
    assert case.logits is not None
    return TOLERANCE[case.logits.split("_")[1]]


def _gap(case: Case, loaded: Loaded, golden: Path, rows: slice) -> float:
    wanted = torch.load(golden / "forward" / f"{case.logits}.pt", weights_only=True)["logits"]
    wanted = wanted[..., rows]
    assert wanted.std() > 0.1
    found = [s["logits"] for s in loaded(case).values() if s["logits"] is not None]
    assert len(found) == case.layout["tp"] * case.layout["dp"]
    return max((logits[..., rows] - wanted).abs().max().item() for logits in found)


@_of([c for c in SAME_FORM if not c.source.startswith("native:")], optimizer="plain")
def test_a_plain_optimizer_holds_megatrons_state(case, loaded, golden) -> None:
    """Masters, moments, step and hyperparameters: what it would save is what Megatron-LM saved."""
    wanted = megatron_files(golden / case.oracle)
    bf16 = "bf16" in case.oracle
    for (t, p, _), said in loaded(case).items():
        assert said["class"] == ("Float16OptimizerWithFloat16Params" if bf16 else "FP32Optimizer")
        assert list(_same(said["optimizer"], wanted[t, p]["optimizer"], f"{t},{p}")) == []
        for head, weights in said["model"].items():  # parameter by parameter, not only in order
            masters = _state(said["named"][head], "master")
            held = {k: x for k, x in weights.items() if isinstance(x, torch.Tensor)}
            assert masters.keys() == held.keys()
            assert all(torch.equal(masters[k].to(x.dtype), x) for k, x in held.items())


def _state(named: Mapping[str, torch.Tensor], state: str) -> Tensors:
    return {k.removeprefix(f"{state}/"): x for k, x in named.items() if k.startswith(f"{state}/")}


@_of(SAME_FORM, optimizer="distributed")
def test_a_distributed_optimizer_holds_megatrons_state(case, loaded, golden) -> None:
    """Its flat buffers but for the gaps between parameters, its step and hyperparameters.

    The groups hold ``bias_correction`` too, which a fused Adam's step reads; the oracles' lack it.
    """
    wanted = megatron_files(golden / case.oracle)
    for file in wanted.values():
        for group in _flat_groups(file):
            group.setdefault("bias_correction", True)
    for (t, p, d), said in loaded(case).items():
        assert said["class"] == "DistributedOptimizer"
        assert list(_same(said["optimizer"], wanted[t, p]["optimizer"], f"{t},{p}")) == []
        if d > 0:
            assert said["flat"] is None  # the first data-parallel rank gathers
            continue
        theirs = _flat_file(golden / case.oracle, t, p)
        mine = _flat_values(said["flat"])
        assert mine["numel_unpadded"] == theirs["numel_unpadded"]
        for start, stop in _flat_spans(wanted[t, p], torch.bfloat16):
            for key in ("param", "exp_avg", "exp_avg_sq"):
                assert torch.equal(mine[key][start:stop], theirs[key][start:stop])


def _flat_values(content: Mapping[Any, Any]) -> Mapping[str, Any]:
    (values,) = content[0].values()
    return values


def _flat_file(folder: Path, t: int, p: int) -> Mapping[str, Any]:
    (one,) = [
        path for path in folder.glob("*/mp_rank_*/distrib_optim.pt")
        if path.parent.name in (f"mp_rank_{t:02d}", f"mp_rank_{t:02d}_{p:03d}")
    ]  # fmt: skip
    return _flat_values(torch.load(one, weights_only=True))


def _by_name(flat: Mapping[str, Any], file: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The parameters of a flat buffer, under the names that independent.megatron_optimizer has."""
    weights = {k: x for k, x in file["model"].items() if isinstance(x, torch.Tensor)}
    spans = _flat_spans(dict(file), torch.bfloat16)
    for (name, weight), (start, stop) in zip(reversed(weights.items()), spans, strict=True):
        for key, state in (("param", "master"), ("exp_avg",) * 2, ("exp_avg_sq",) * 2):
            yield f"{state}/{name}", flat[key][start:stop].view(weight.shape)


@_of(TO_FLAT)
def test_a_plain_optimizers_state_is_loaded_by_a_distributed_one(case, loaded, golden) -> None:
    wanted = megatron_optimizer(golden / case.oracle)
    files = megatron_files(golden / case.oracle)
    for (t, p, d), said in loaded(case).items():
        assert said["class"] == "DistributedOptimizer"
        assert [g["step"] for g in said["optimizer"]["optimizer"]["param_groups"]] == [3, 3]
        if d == 0:
            found = dict(_by_name(_flat_values(said["flat"]), files[t, p]))
            assert list(_same(found, wanted[t, p], f"{t},{p}")) == []


@_of(FP32_TO_FLAT)
def test_fp32_parameters_and_virtual_stages_reach_a_distributed_optimizer(case, loaded) -> None:
    """What it holds of each parameter is what a plain one holds that loaded the oracle's equal."""
    plain = next(
        c for c in SAME_FORM
        if (c.oracle, c.layout, c.optimizer) == (case.oracle, case.layout, "plain")
    )  # fmt: skip
    wanted = loaded(plain)
    for rank, said in loaded(case).items():
        assert said["class"] == "DistributedOptimizer"
        assert list(_same(said["named"], wanted[rank]["named"], str(rank))) == []
        assert [g["step"] for g in said["optimizer"]["optimizer"]["param_groups"]] == [3, 3]


@_of(TO_PLAIN)
def test_a_distributed_optimizers_state_is_loaded_by_a_plain_one(case, loaded, golden) -> None:
    files = megatron_files(golden / case.oracle)
    for (t, p, _), said in loaded(case).items():
        wanted = dict(_by_name(_flat_file(golden / case.oracle, t, p), files[t, p]))
        assert list(_same(said["named"]["model"], wanted, f"{t},{p}")) == []
        # torch's Adam has its step beside the moments, and cannot go on without it
        states = said["optimizer"]["optimizer"]["state"].values()
        assert {state["step"].item() for state in states} == {3.0}


@_of([c for c in CASES if c.source.startswith("native:")])
def test_the_trainers_state_is_loaded_by_megatrons_optimizer(case, loaded, golden) -> None:
    wanted = megatron_optimizer(golden / case.oracle)
    for (t, p, _), said in loaded(case).items():
        assert list(_same(said["named"]["model"], wanted[t, p], f"{t},{p}")) == []
        groups = said["optimizer"]["optimizer"]["param_groups"]
        for group, trained in zip(groups, NATIVE_GROUPS, strict=True):
            assert {k: group[k] for k in trained} == {**trained, "betas": (0.5, 0.75)}
