"""Models of the trainer against transformers, in every layout, on CPU with gloo."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from train_helpers import IGNORED, Batch, Tensors, launch, load_weights, logits, micro_batches, run_step

from shardwright.ckpt import CheckpointError, RunOptions, merge, reshard
from shardwright.ckpt.checkpoint import load_model
from shardwright.ckpt.family import Family
from shardwright.train.errors import TrainError
from shardwright.train.model import ModelOptions, build, stored_name, stored_parameters, transformer_config
from shardwright.train.parallel import Layout, Parallel, initialize, shutdown

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
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
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
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
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
        return f"{self.variant}-{self.layout.get('tp', 1)}-{self.layout.get('pp', 1)}-{self.multiple}"


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
    Case(f"dropout {layout} {recompute}", "gpt2", LAYOUTS[layout], {**DROPOUT, "recompute": recompute})
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


def run_cases(folder: str, names: list[str]) -> dict[str, dict[str, object]]:
    """Every case in this rank; cases of one layout share its process groups."""
    torch.distributed.init_process_group("gloo")
    by_layout: dict[str, list[Case]] = {}
    for name in names:
        case = CASES[name]
        by_layout.setdefault(json.dumps(case.layout), []).append(case)
    found = {}
    for text, cases in by_layout.items():
        given = json.loads(text)
        layout = Layout(**{**given, "pp_layers": tuple(given.get("pp_layers", ())) or None})
        for case in cases:
            parallel = initialize(layout, seed=3)
            found[case.name] = run_case(case, Path(folder), layout, parallel)
            shutdown()
    return found


def run_case(case: Case, folder: Path, layout: Layout, parallel: Parallel) -> dict[str, object]:
    shards = folder / case.shards
    model = load_model(shards / "config.json")
    options = ModelOptions(vocab_multiple=case.multiple, **case.options)
    chunks = build(model, parallel, layout, options)
    load_weights(chunks, shards, parallel.tp_rank)
    mine = {name: p for chunk in chunks for name, p in stored_parameters(chunk).items()}
    result: dict[str, object] = {
        "rank": (parallel.tp_rank, parallel.pp_rank, parallel.dp_rank),
        "shapes": {name: tuple(p.shape) for name, p in mine.items()},
        "logits": logits(chunks, micro_batches(VOCAB)),
        "masked": logits(chunks, padded_batches()) if case.masked else [],
    }
    result["loss"], result["gradients"] = run_step(chunks, micro_batches(VOCAB))
    torch.use_deterministic_algorithms(False)
    return result


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
    found = launch("test_train_model:run_cases", 4, folder, str(folder), list(CASES), timeout_s=500)
    return {
        name: [{**rank[name], "folder": folder} for rank in found]  # type: ignore[index]
        for name in CASES
    }


# --- claims -----------------------------------------------------------------------------------

EXACT = [*MATRIX, *SPECIAL]


def ids(case: Case) -> str:
    return case.name


def first_replicas(ranks: list[dict]) -> list[dict]:
    return [rank for rank in ranks if rank["rank"][2] == 0]


def overwrite(file: Path, tensors: Tensors) -> None:
    """Put other values of the same type and shape into a safetensors file."""
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            data[start + begin : start + end] = tensors[name].numpy().tobytes()
    file.write_bytes(data)


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


def test_dropout_drops(outcome, references):
    losses = [r["loss"] for r in outcome["dropout tp2pp2 none"] if r["loss"] is not None]
    assert len(set(losses)) == 1
    assert abs(losses[0] - references["gpt2"].loss) > 1e-3
