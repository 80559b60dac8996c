"""Models of the trainer against transformers, in every layout, on CPU with gloo."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from train_helpers import (
    IGNORED,
    Batch,
    Tensors,
    launch,
    load_weights,
    logits,
    micro_batches,
    overwrite,
    run_step,
)

from shardwright.ckpt import CheckpointError, RunOptions, merge, reshard
from shardwright.ckpt.checkpoint.config import load_model
from shardwright.train.core.layout import Layout
from shardwright.train.core.process import Parallel, initialize, shutdown
from shardwright.train.errors import TrainError
from shardwright.train.model.build import build, stored_name, stored_parameters
from shardwright.train.model.config import transformer_config
from shardwright.train.model.modules import padding_mask
from shardwright.train.model.options import ModelOptions

VOCAB = 61  # divides by nothing that a vocabulary is padded to
MULTIPLE = 16
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 2.0,
    "high_freq_factor": 8.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500.0,
}

# variant -> config; together they use every row of every family table
VARIANTS: Mapping[str, Mapping[str, object]] = {
    "llama": {"model_type": "llama"},
    "llama-biases": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
    },
    "llama-attention-bias": {
        "model_type": "llama",
        "attention_bias": True,
        "rope_parameters": LLAMA3,
    },
    "mistral": {"model_type": "mistral", "sliding_window": 5, "head_dim": 16},
    "qwen2": {  # one KV head: fewer than tp ranks
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 2,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "rms_norm_eps": 1e-5},
    "phi3": {
        "model_type": "phi3",
        "rope_parameters": {
            "rope_theta": 1e4,
            "rope_type": "default",
            "partial_rotary_factor": 0.5,
        },
        "sliding_window": 7,
        "pad_token_id": 0,
    },
    "gemma": {"model_type": "gemma", "head_dim": 16},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 16,
        "sliding_window": 5,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 64,
        "initializer_range": 0.1,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}

LAYOUTS: Mapping[str, Mapping[str, object]] = {
    "tp1pp1": {},
    "tp2pp1": {"tp": 2},
    "tp2pp1-sp": {"tp": 2, "sequence_parallel": True},
    "tp1pp2": {"pp": 2},
    "tp2pp2": {"tp": 2, "pp": 2},
    "tp2pp2-sp": {"tp": 2, "pp": 2, "sequence_parallel": True},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model in a layout; ``masked`` adds the logits of padded batches."""

    name: str
    variant: str
    layout: Mapping[str, object]
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    multiple: int = MULTIPLE
    masked: bool = False

    @property
    def shards(self) -> str:
        """The folder of rank files that this case reads; interleaving does not change them."""
        return (
            f"{self.variant}-{self.layout.get('tp', 1)}-{self.layout.get('pp', 1)}-{self.multiple}"
        )


MATRIX = [
    Case(f"{variant}-{name}", variant, layout, masked=name == "tp2pp1-sp")
    for name, layout in LAYOUTS.items()
    for variant in VARIANTS
]
TP2PP2 = LAYOUTS["tp2pp2"]
SPECIAL = [
    Case("virtual stages", "llama", {"pp": 2, "virtual_pp_layers": 1}),
    Case("virtual stages, tied", "gpt2", {**TP2PP2, "virtual_pp_layers": 1}),
    Case("uneven stages", "gemma2", {**TP2PP2, "pp_layers": [3, 1]}),
    Case("an empty stage", "qwen2", {**TP2PP2, "pp_layers": [4, 0]}),
    Case("four stages", "qwen3", {"pp": 4}),
    Case("four tp ranks, two KV heads", "llama", {"tp": 4}),
    Case("padding of a whole tp rank", "llama", TP2PP2, multiple=64),
    Case("more padding, tied", "gpt2", {"tp": 2}, multiple=64),
    Case("recompute core attention", "llama", TP2PP2, {"recompute": "selective"}),
    Case("recompute layers", "gemma2", LAYOUTS["tp2pp2-sp"], {"recompute": "full"}),
    Case(
        "recompute blocks, inputs split over tp",
        "gpt2",
        TP2PP2,
        {
            "recompute": "full",
            "recompute_method": "block",
            "recompute_num_layers": 1,
            "distribute_saved_activations": True,
        },
    ),
    Case("deterministic", "llama", TP2PP2, {"deterministic": True}),
]
# Dropout in every place: recomputation must draw the same numbers again.
DROPOUT = {"attention_dropout": 0.2, "hidden_dropout": 0.2}
DROPPED = [
    Case(
        f"dropout {layout} {recompute}",
        "gpt2",
        LAYOUTS[layout],
        {**DROPOUT, "recompute": recompute},
    )
    for layout in ("tp2pp2", "tp2pp2-sp")
    for recompute in ("none", "selective", "full")
]
CASES = {case.name: case for case in (*MATRIX, *SPECIAL, *DROPPED)}


def config_of(variant: str) -> dict[str, object]:
    given = VARIANTS[variant]
    return {**(SIZES if given["model_type"] != "gpt2" else {}), **given}


def hf_model(variant: str):
    """A random transformers model; norms and biases are random as well."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**config_of(variant), attn_implementation="eager")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def padded_batches() -> list[Batch]:
    """Micro-batches with padding at the end, at the start, and none."""
    masks = torch.ones(3, 2, 12, dtype=torch.int64)
    masks[0, 0, 7:] = 0
    masks[0, 1, 10:] = 0
    masks[1, 1, :4] = 0
    batches = micro_batches(VOCAB, count=3, seed=1)
    return [dataclasses.replace(b, mask=m) for b, m in zip(batches, masks, strict=True)]


# --- in the ranks -----------------------------------------------------------------------------


def run_cases(folder: str) -> dict[str, dict[str, object]]:
    """Every case in this rank; cases of one layout share its groups, which are slow to make."""
    torch.distributed.init_process_group("gloo")
    found = {}
    for _, cases in itertools.groupby(
        CASES.values(), lambda c: (c.layout, c in DROPPED and c.name)
    ):
        group = list(cases)
        parallel = initialize(layout_of(group[0]), seed=3)
        for case in group:
            found[case.name] = run_case(case, Path(folder), parallel)
        shutdown()
    return {
        **found,
        "others": {**uneven_collectives(), **refusals(Path(folder)), **fused(Path(folder))},
    }


def _key(case: Case) -> object:
    return case.name if case in DROPPED else case.layout


def layout_of(case: Case) -> Layout:
    stages = case.layout.get("pp_layers")
    return Layout(**{**case.layout, "pp_layers": tuple(stages) if stages else None})


def run_case(case: Case, folder: Path, parallel: Parallel) -> dict[str, object]:
    shards = folder / case.shards
    model = load_model(shards / "config.json")
    options = ModelOptions(vocab_multiple=case.multiple, **case.options)
    chunks = build(model, parallel.place, layout_of(case), options, parallel.device)
    initial = {name: p.detach().clone() for c in chunks for name, p in stored_parameters(c).items()}
    load_weights(chunks, shards, parallel.tp_rank)
    mine = {name: p for chunk in chunks for name, p in stored_parameters(chunk).items()}
    result: dict[str, object] = {
        "rank": (parallel.tp_rank, parallel.pp_rank, parallel.dp_rank),
        "shapes": {name: tuple(p.shape) for name, p in mine.items()},
        "initial": initial if case.variant == "llama" else {},
        "logits": logits(chunks, micro_batches(VOCAB)),
        "masked": logits(chunks, padded_batches()) if case.masked else [],
    }
    result["loss"], result["gradients"] = run_step(chunks, micro_batches(VOCAB))
    torch.use_deterministic_algorithms(False)
    return result


def uneven_collectives() -> dict[str, object]:
    """What mixtures of experts send: parts whose sizes differ between ranks."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    sizes = [3, 0, 1, 2]
    parts = [torch.empty(n, 2) for n in sizes]
    torch.distributed.all_gather(parts, torch.full((sizes[rank], 2), float(rank)))
    mine = torch.empty(sizes[rank], 2)
    torch.distributed.reduce_scatter(mine, [torch.full((n, 2), 1.0 + rank) for n in sizes])
    out = torch.empty(sizes[rank] * world)
    torch.distributed.all_to_all_single(
        out,
        torch.arange(float(sum(sizes))) + 10 * rank,
        torch.tensor([sizes[rank]] * world),  # tensors, as megatron passes them
        torch.tensor(sizes),
    )
    return {"gathered": torch.cat(parts), "reduced": mine, "exchanged": out, "sizes": sizes}


def refusals(folder: Path) -> dict[str, object]:
    """The messages of layouts and options that four ranks cannot have."""
    found: dict[str, object] = {}
    uneven = ModelOptions(recompute="full", recompute_num_layers=3)
    model = load_model(folder / CASES["llama-tp1pp2"].shards / "config.json")
    parallel = initialize(Layout(pp=2), seed=0)
    with pytest.raises(TrainError) as error:
        build(model, parallel.place, Layout(pp=2), uneven, parallel.device)
    shutdown()
    found["recompute"] = str(error.value)
    for name, layout in {"three": Layout(tp=3), "eight": Layout(tp=2, pp=4)}.items():
        with pytest.raises(TrainError) as error:
            initialize(layout, seed=0)
        found[name] = str(error.value)
    initialize(Layout(tp=2), seed=0)
    with pytest.raises(TrainError) as error:
        initialize(Layout(), seed=0)
    shutdown()
    return {**found, "twice": str(error.value)}


def fused(folder: Path) -> dict[str, object]:
    """Losses and gradients in bfloat16 with and without the fused cross entropy."""
    case, found = CASES["gpt2-tp2pp1"], {}
    for name, use in (("plain", False), ("fused", True)):
        parallel = initialize(layout_of(case), seed=3)
        model = load_model(folder / case.shards / "config.json")
        options = ModelOptions("bf16", fused_cross_entropy=use, vocab_multiple=MULTIPLE)
        chunks = build(model, parallel.place, layout_of(case), options, parallel.device)
        load_weights(chunks, folder / case.shards, parallel.tp_rank)
        loss, gradients = run_step(chunks, micro_batches(VOCAB))
        found[name] = (loss, gradients)
        assert {p.dtype for p in chunks[0].parameters()} == {torch.bfloat16}
        shutdown()
    return found


def alone() -> dict[str, object]:
    """A process without torchrun: a world of its own, ended by shutdown, and a second one."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name)
    found = []
    for _ in range(2):
        parallel = initialize(Layout(), seed=1)
        found.append((str(parallel.device), parallel.world_size, parallel.dp, parallel.tp_rank))
        assert parallel.is_first_stage
        assert parallel.is_last_stage
        assert torch.distributed.get_backend(parallel.control_group) == "gloo"
        shutdown()
        assert not torch.distributed.is_initialized()
    return {"found": found}


# --- what transformers says -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Reference:
    """One variant in transformers: logits of each micro-batch, mean loss, its gradients."""

    logits: list[torch.Tensor]
    masked: list[torch.Tensor]
    loss: float
    gradients: Tensors  # by the names of the file


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> dict[str, Reference]:
    folder = tmp_path_factory.mktemp("hf")
    return {variant: _reference(hf_model(variant), folder / variant) for variant in VARIANTS}


def _reference(model, folder: Path) -> Reference:
    batches = micro_batches(VOCAB)
    found = [model(b.tokens).logits for b in batches]
    labels = torch.cat([b.labels.flatten() for b in batches])
    loss = F.cross_entropy(
        torch.cat([x.flatten(0, 1) for x in found]), labels, ignore_index=IGNORED
    )
    loss.backward()
    with torch.no_grad():
        masked = [model(b.tokens, attention_mask=b.mask).logits for b in padded_batches()]
    model.save_pretrained(folder)
    names = load_file(folder / "model.safetensors")
    gradients = {name: p.grad for name, p in model.named_parameters() if name in names}
    assert set(gradients) == set(names)
    return Reference([x.detach() for x in found], masked, loss.item(), gradients)


@pytest.fixture(scope="module")
def outcome(references, tmp_path_factory) -> dict[str, list[dict]]:
    """Case -> each rank's result, from one launch of four ranks."""
    hf = tmp_path_factory.getbasetemp() / "hf0"
    folder = tmp_path_factory.mktemp("ranks")
    for case in CASES.values():
        if not (folder / case.shards).exists():
            tp, pp = case.layout.get("tp", 1), case.layout.get("pp", 1)
            reshard(
                hf / case.variant,
                folder / case.shards,
                tp=tp,
                pp=pp,
                make_vocab_size_divisible_by=case.multiple,
                run=RunOptions(workers=1),
            )
    found = launch("test_train_model:run_cases", 4, folder, str(folder))
    return {name: [{**rank[name], "folder": folder} for rank in found] for name in found[0]}


# --- claims -----------------------------------------------------------------------------------

EXACT = [*MATRIX, *SPECIAL]


def ids(case: Case) -> str:
    return case.name


def first_replicas(ranks: list[dict]) -> list[dict]:
    return [rank for rank in ranks if rank["rank"][2] == 0]


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", MATRIX, ids=ids)
def test_parameters_have_the_names_and_shapes_of_the_rank_files(case, outcome):
    for rank in outcome[case.name]:
        tp, pp, _ = rank["rank"]
        file = rank["folder"] / case.shards / f"model_tp_{tp}_pp_{pp}.safetensors"
        with safe_open(file, "pt") as stored:
            wanted = {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
        assert rank["shapes"] == wanted


@pytest.mark.parametrize("case", EXACT, ids=ids)
def test_logits_are_those_of_transformers(case, outcome, references):
    last = [rank for rank in outcome[case.name] if rank["logits"]]
    assert last
    for rank in last:
        for found, wanted in zip(rank["logits"], references[case.variant].logits, strict=True):
            assert close(found[..., :VOCAB], wanted)
            assert (found[..., VOCAB:] == -torch.inf).all()


@pytest.mark.parametrize("case", [case for case in MATRIX if case.masked], ids=ids)
def test_padding_tokens_are_hidden_from_the_others(case, outcome, references):
    for rank in outcome[case.name]:
        wanted = references[case.variant].masked
        for batch, found, right in zip(padded_batches(), rank["masked"], wanted, strict=True):
            real = batch.mask == 1
            assert close(found[real][..., :VOCAB], right[real])
            assert found[..., :VOCAB].isfinite().all()


@pytest.mark.parametrize("case", EXACT, ids=ids)
def test_the_loss_is_that_of_transformers(case, outcome, references):
    losses = [rank["loss"] for rank in outcome[case.name] if rank["loss"] is not None]
    assert losses
    assert losses == pytest.approx([references[case.variant].loss] * len(losses), abs=1e-5)


@pytest.mark.parametrize("case", EXACT, ids=ids)
def test_merged_gradients_are_those_of_transformers(case, outcome, references, tmp_path):
    ranks = first_replicas(outcome[case.name])
    shutil.copytree(ranks[0]["folder"] / case.shards, tmp_path / "gradients")
    for file in (tmp_path / "gradients").glob("model_*.safetensors"):
        tp_rank = int(file.name.split("_")[2])
        parts = [rank["gradients"] for rank in ranks if rank["rank"][0] == tp_rank]
        overwrite(file, {name: x for part in parts for name, x in part.items()})
    merge(tmp_path / "gradients", tmp_path / "merged", run=RunOptions(workers=1))
    found = load_file(tmp_path / "merged" / "model.safetensors")
    wanted = references[case.variant].gradients
    assert set(found) == set(wanted)
    assert [name for name in wanted if not close(found[name], wanted[name])] == []


@pytest.mark.parametrize("layout", ["tp2pp2", "tp2pp2-sp"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_repeats_dropout(layout, recompute, outcome):
    plain, again = (outcome[f"dropout {layout} {kind}"] for kind in ("none", recompute))
    for one, other in zip(plain, again, strict=True):
        assert one["loss"] == other["loss"]
        for name, gradient in one["gradients"].items():
            assert close(gradient, other["gradients"][name]), name


def test_the_loss_does_not_depend_on_padded_rows(outcome):
    for some, more in (
        ("llama-tp2pp2", "padding of a whole tp rank"),
        ("gpt2-tp2pp1", "more padding, tied"),
    ):
        for one, other in zip(outcome[some], outcome[more], strict=True):
            assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)


def test_weights_start_as_hugging_face_draws_them(outcome):
    for rank in outcome["llama-tp2pp2"]:
        rows = VOCAB - rank["rank"][0] * 32  # of 64 padded ones on two ranks
        for name, weight in rank["initial"].items():
            if weight.dim() == 1:
                assert (weight == 1).all()  # norms
                continue
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                assert not weight[rows:].any()
                weight = weight[:rows]
            assert float(weight.std()) == pytest.approx(0.1, rel=0.1), name


def test_replicas_start_alike(outcome):
    by_place = {}
    for rank in outcome["llama-tp2pp1"]:
        by_place.setdefault(rank["rank"][0], []).append(rank["initial"])
    for one, other in by_place.values():
        assert all(torch.equal(one[name], other[name]) for name in one)
    qkv = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert not torch.equal(by_place[0][0][qkv], by_place[1][0][qkv])


def test_dropout_drops(outcome, references):
    losses = [r["loss"] for r in outcome["dropout tp2pp2 none"] if r["loss"] is not None]
    assert len(set(losses)) == 1
    assert abs(losses[0] - references["gpt2"].loss) > 1e-3


def test_the_fused_cross_entropy_is_the_plain_one(outcome):
    for rank in outcome["others"]:
        (loss, plain), (same, fused) = rank["plain"], rank["fused"]
        assert loss == pytest.approx(same, rel=1e-6)
        for name, gradient in plain.items():
            assert torch.allclose(gradient, fused[name], rtol=0.02, atol=1e-3), name


def test_collectives_of_unequal_parts(outcome):
    sizes = outcome["others"][0]["sizes"]
    gathered = torch.tensor([[float(r)] * 2 for r, n in enumerate(sizes) for _ in range(n)])
    starts = [sum(sizes[:r]) for r in range(4)]
    for rank, found in enumerate(outcome["others"]):
        assert torch.equal(found["gathered"], gathered)
        assert torch.equal(found["reduced"], torch.full((sizes[rank], 2), 1.0 + 2 + 3 + 4))
        wanted = [starts[rank] + i + 10 * r for r in range(4) for i in range(sizes[rank])]
        assert found["exchanged"].tolist() == wanted


def test_a_world_that_does_not_fit_is_refused(outcome):
    for rank in outcome["others"]:
        assert rank["three"].startswith("4 processes do not divide into replicas of tp=3 x pp=1")
        assert "start a multiple of 8" in rank["eight"]
        assert "call shutdown() first" in rank["twice"]
        assert "recompute_num_layers=3 does not divide the 2 layers" in rank["recompute"]


def test_a_process_alone_needs_no_launcher(tmp_path):
    (result,) = launch("test_train_model:alone", 1, tmp_path)
    assert result == {"found": [("cpu", 1, 1, 0)] * 2}


def test_the_cpu_cannot_be_set_up_after_megatron(tmp_path):
    script = "import megatron.core; from shardwright.train.patches import cpu; cpu.install()"
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False
    )
    assert "TrainError: megatron.core was imported before" in run.stderr


# --- what needs no ranks ----------------------------------------------------------------------


def test_layers_are_split_evenly_unless_named():
    assert Layout(pp=2).owned(4) == ((0, 1), (2, 3))
    assert Layout(pp=3, pp_layers=(2, 0, 3)).owned(5) == ((0, 1), (), (2, 3, 4))
    assert Layout().chunks(3) == ((range(3),),)


def test_virtual_stages_go_round():
    layout = Layout(pp=2, virtual_pp_layers=2)
    assert layout.chunks(8) == ((range(2), range(4, 6)), (range(2, 4), range(6, 8)))
    assert layout.owned(8) == ((0, 1, 4, 5), (2, 3, 6, 7))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tp": 0}, "tp=0: must be at least 1"),
        ({"sequence_parallel": True}, "tp is 1"),
        ({"pp": 2, "pp_layers": (1, 2, 3)}, "3 numbers of layers (1,2,3) for pp=2"),
        ({"virtual_pp_layers": 1}, "pp is 1"),
        ({"pp": 2, "pp_layers": (2, 2), "virtual_pp_layers": 1}, "are all of one size"),
        ({"pp": 2, "virtual_pp_layers": 0}, "must be at least 1"),
    ],
)
def test_impossible_layouts_are_refused(given, says):
    with pytest.raises(TrainError, match=re.escape(says)):
        Layout(**given)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (Layout(pp=3), "4 layers do not divide over pp=3"),
        (Layout(pp=2, pp_layers=(1, 2)), "names 3 layers, the model has 4"),
        (Layout(pp=2, virtual_pp_layers=3), "4 layers do not divide over pp=2 with 3 layers"),
    ],
)
def test_layers_that_do_not_divide_are_refused(layout, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        layout.owned(4)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"precision": "fp16"}, "precision='fp16': must be one of fp32, bf16"),
        ({"recompute": "half"}, "must be one of none, selective, full"),
        ({"recompute_num_layers": 2}, "recompute is none, not full"),
        ({"recompute": "selective", "recompute_method": "block"}, "recompute is selective"),
        ({"distribute_saved_activations": True}, "recompute is none, not full"),
        ({"fused_cross_entropy": True}, "use it with precision bf16"),
        ({"vocab_multiple": 0}, "vocab_multiple=0: must be at least 1"),
        ({"recompute": "full", "recompute_num_layers": 0}, "must be at least 1"),
    ],
)
def test_options_that_exclude_each_other_are_refused(given, says):
    with pytest.raises(TrainError, match=re.escape(says)):
        ModelOptions(**given)


def config(tmp_path: Path, variant: str, changes: Mapping[str, object]):
    """What `transformer_config` makes of a variant with changes, in a layout of tp 2."""
    (tmp_path / "config.json").write_text(json.dumps({**config_of(variant), **changes}))
    model = load_model(tmp_path / "config.json")
    return transformer_config(model, Layout(tp=2), ModelOptions())


@pytest.mark.parametrize(
    ("variant", "changes", "says"),
    [
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
            "cannot express this llama: rotary embeddings of type 'yarn'",
        ),
        (
            "qwen2",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            "rotary embeddings of type 'dynamic'",
        ),
        ("mistral", {"hidden_act": "quick_gelu"}, "the activation 'quick_gelu' (hidden_act;"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("qwen3", {"layer_types": ["linear_attention"] * 4}, "layers of the type 'linear_"),
        ("qwen3", {"layer_types": ["full_attention"]}, "transformers cannot read this qwen3"),
    ],
)
def test_what_megatron_cannot_express_is_refused_by_name(tmp_path, variant, changes, says):
    with pytest.raises(TrainError, match=re.escape(says)):
        config(tmp_path, variant, changes)


def test_heads_that_tp_does_not_divide_are_refused(tmp_path):
    changes = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}
    with pytest.raises(CheckpointError, match="3 query heads do not divide over tp=2"):
        config(tmp_path, "qwen3", changes)


def test_stored_names_have_global_layer_numbers():
    name = "decoder.layers.{}.mlp.linear_fc1.weight"
    assert stored_name(name.format(1), 10) == name.format(11)
    assert stored_name("decoder.final_layernorm.weight", 10) == "decoder.final_layernorm.weight"
    assert stored_name("output_layer.weight", 10) == "output_layer.weight"


def test_a_mask_of_tokens_alone_is_no_mask():
    assert padding_mask(None) is None
    assert padding_mask(torch.ones(2, 3, dtype=torch.int64)) is None
    hidden = padding_mask(torch.tensor([[1, 1, 0], [1, 1, 1]]))
    assert hidden.shape == (2, 1, 1, 3)
    assert hidden.flatten().tolist() == [False, False, True, False, False, False]
