"""The families that the trainer computes with the least of their own: logits, losses and gradients
are those of transformers, on two tensor-parallel ranks with sequence parallelism.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from independent import load_hf
from train_helpers import launch, load_weights, logits, micro_batches, overwrite, run_step

from shardwright.ckpt import CheckpointError, RunOptions, merge, reshard
from shardwright.ckpt.checkpoint.config import load_model, model_from
from shardwright.train.checkpoint.hf_weights import check_names
from shardwright.train.core.layout import Layout
from shardwright.train.core.process import initialize, shutdown
from shardwright.train.errors import TrainError
from shardwright.train.model.build import build
from shardwright.train.model.options import ModelOptions
from shardwright.train.model.read import read
from shardwright.train.planning.estimate import shape_of

VOCAB, MULTIPLE = 61, 16
BASE: Mapping[str, object] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "head_dim": 8, "initializer_range": 0.1, "attention_dropout": 0.0, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
FAMILIES: Mapping[str, Mapping[str, object]] = {
    "seed_oss": {"model_type": "seed_oss", "residual_dropout": 0.0},
    "arcee": {"model_type": "arcee"},
    "nemotron": {"model_type": "nemotron"},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 5},
    "starcoder2 no bias": {"model_type": "starcoder2", "use_bias": False},
    "stablelm": {"model_type": "stablelm", "partial_rotary_factor": 0.5, "use_qkv_bias": True},
    "glm": {"model_type": "glm"},
    "glm4": {"model_type": "glm4", "partial_rotary_factor": 1.0},
    "smollm3": {"model_type": "smollm3"},
    "gpt_neox": {"model_type": "gpt_neox", "use_parallel_residual": False, "rotary_pct": 0.5},
    "granite": {
        "model_type": "granite", "embedding_multiplier": 6.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.3, "logits_scaling": 4.0, "tie_word_embeddings": True,
    },
}  # fmt: skip
LAYOUT = Layout(tp=2, sequence_parallel=True)


def steps(folder: str) -> dict[str, object]:
    """In a rank: every model's logits, loss and gradients."""
    torch.distributed.init_process_group("gloo")
    parallel, found = initialize(LAYOUT, seed=3), {}
    for name in FAMILIES:
        shards = Path(folder) / f"{name} shards"
        model = load_model(shards / "config.json")
        options = ModelOptions(vocab_multiple=MULTIPLE)
        chunks = build(model, parallel.place, LAYOUT, options, parallel.device)
        load_weights(chunks, shards, parallel.tp_rank)
        scores = logits(chunks, micro_batches(VOCAB))
        found[name] = (scores, *run_step(chunks, micro_batches(VOCAB)))
    shutdown()
    return found


def made(name: str, folder: Path):
    """A random model of transformers, and its shards."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**BASE, **FAMILIES[name]}, attn_implementation="eager")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder / name)
    reshard(folder / name, folder / f"{name} shards", tp=2,
            make_vocab_size_divisible_by=MULTIPLE, run=RunOptions(workers=1))  # fmt: skip
    return model.eval()


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    wanted = wanted.detach()
    return bool((found - wanted).abs().max() <= 1e-5 * max(1.0, float(wanted.abs().max())))


def test_logits_losses_and_gradients_are_those_of_transformers(tmp_path):
    models = {name: made(name, tmp_path) for name in FAMILIES}
    ranks = launch("test_train_families:steps", 2, tmp_path / "ranks", str(tmp_path))
    for name, model in models.items():
        batches = micro_batches(VOCAB)
        wanted = [model(batch.tokens).logits for batch in batches]
        losses = [F.cross_entropy(x.transpose(1, 2), b.labels, reduction="sum")
                  for x, b in zip(wanted, batches, strict=True)]  # fmt: skip
        count = sum(int((b.labels >= 0).sum()) for b in batches)
        loss = sum(losses) / count
        loss.backward()
        for rank in ranks:
            assert close(torch.stack(list(rank[name][0]))[..., :VOCAB], torch.stack(wanted)), name
        assert ranks[0][name][1] == pytest.approx(loss.item(), rel=1e-5), name
        state = load_hf(tmp_path / name)
        found = merged([rank[name][2] for rank in ranks], tmp_path / f"{name} shards")
        assert found.keys() == state.keys(), name
        gradients = named(model, state)
        wrong = [key for key, x in found.items() if not close(x, gradients[key])]
        assert wrong == [], name


def test_models_in_memory_have_the_names_of_their_tables(tmp_path):
    """Scripts prepare a model in memory, which transformers may spell otherwise than its files."""
    for name in FAMILIES:
        check_names(made(name, tmp_path), load_model(tmp_path / name / "config.json"))


def merged(ranks: list[dict[str, torch.Tensor]], shards: Path) -> dict[str, torch.Tensor]:
    """Gradients of all ranks under the names of Hugging Face: written over the weights."""
    for t, tensors in enumerate(ranks):
        overwrite(shards / f"model_tp_{t}_pp_0.safetensors", tensors)
    out = shards.with_name(shards.name + " merged")
    merge(shards, out, run=RunOptions(workers=1))
    return load_hf(out)


def named(model, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients by the name that save_pretrained gives the parameter."""
    found = {}
    for name, parameter in model.named_parameters():
        spelled = name.replace("lm_head", "embed_out") if name not in state else name
        found[spelled] = parameter.grad
    return found


# --- what is refused ---------------------------------------------------------------------------

REFUSED = {
    "stablelm parallel": (
        {"model_type": "stablelm", "use_parallel_residual": True}, "use_parallel_residual True"),
    "stablelm norms": ({"model_type": "stablelm", "qk_layernorm": True}, "qk_layernorm True"),
    "stablelm dropout": ({"model_type": "stablelm", "hidden_dropout": 0.1}, "after the MLP alone"),
    "gpt_neox parallel": ({"model_type": "gpt_neox"}, "use_parallel_residual True"),
    "olmo2": ({"model_type": "olmo2"}, "the family olmo2 cannot be trained"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_compute_is_refused_by_name(name):
    said, why = REFUSED[name]
    with pytest.raises(TrainError, match=why):
        read(model_from(json.loads(json.dumps({**BASE, **said})), "config.json"))


def test_layouts_are_planned_for_families_that_the_trainer_computes():
    assert shape_of(model_from({**BASE, **FAMILIES["granite"]}, "x"), "x").heads == 4
    with pytest.raises(CheckpointError, match="does not compute the family olmo2"):
        shape_of(model_from({**BASE, "model_type": "olmo2"}, "x"), "x")
