"""What of a config.json changes the function: found through every spelling, and nothing else."""

from __future__ import annotations

import json

import pytest
from strategies import raw, write_hf

from shardwright.ckpt import ReadOptions, RunOptions, reshard, verify
from shardwright.ckpt.checkpoint.config import model_from
from shardwright.ckpt.checkpoint.function import contradictions, settings

QUIET = RunOptions(workers=1)
VARIANTS = ("llama", "llama-tied", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gpt2")


def _settings(config):
    return settings(config, model_from(config, "config.json"))


def _differ(config, **changes):
    other = {k: v for k, v in {**config, **changes}.items() if v != "absent"}
    return set(contradictions(_settings(config), _settings(other)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_config_as_transformers_writes_it_means_the_same(variant):
    """It fills in every default, moves the rotary base, and adds dozens of keys."""
    from transformers import CONFIG_MAPPING

    config = raw(variant, layers=2).config
    written = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)).to_dict()
    assert contradictions(_settings(config), _settings(json.loads(json.dumps(written)))) == {}


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2"])
def test_the_defaults_are_those_of_transformers(kind):
    """A file that says nothing but sizes, against all that transformers makes of it."""
    from transformers import CONFIG_MAPPING

    sizes = {
        "model_type": kind, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 21,
    }  # fmt: skip
    written = CONFIG_MAPPING[kind].from_dict({**sizes, "pad_token_id": None}).to_dict()
    if kind == "qwen2":
        written.pop("sliding_window")  # transformers nulls what use_sliding_window turns off
    assert contradictions(_settings(sizes), _settings(json.loads(json.dumps(written)))) == {}


CHANGES = {
    "norm epsilon": {"rms_norm_eps": 1e-3},
    "activation": {"hidden_act": "gelu"},
    "rope theta": {"rope_theta": 5e5},
    "rope scaling": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "query heads": {"num_attention_heads": 8, "head_dim": 3},
    "rotated part of a head": {"partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_setting_of_the_function_is_found(name):
    config = {**raw("llama", heads=(4, 4), layers=2).config, "head_dim": 6}
    assert name in _differ(config, **CHANGES[name])


def test_settings_of_single_families_are_found():
    gemma = raw("gemma2", layers=4).config
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"):
        assert _differ(gemma, **{key: 7.0}) == {key}
    assert _differ(gemma, sliding_window=5) == {"attention window"}
    alternate = ["sliding_attention", "full_attention"] * 2
    assert _differ({**gemma, "sliding_window": 9}, layer_types=alternate) == set()
    assert _differ({**gemma, "sliding_window": 9}, layer_types=alternate[::-1]) == {
        "attention window"
    }
    mistral = {**raw("mistral", layers=2).config, "sliding_window": None}
    assert _differ(mistral, sliding_window=4096) == {"attention window"}
    assert _differ(mistral, sliding_window="absent") == {"attention window"}  # 4096 by default
    assert _differ(raw("llama", layers=2).config, sliding_window=64) == set()  # it never looks
    gpt2 = raw("gpt2", layers=2).config
    assert _differ(gpt2, scale_attn_by_inverse_layer_idx=True) == {
        "scale_attn_by_inverse_layer_idx"
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"torch_dtype": "bfloat16"},
        {"transformers_version": "4.0", "_name_or_path": "x", "use_cache": False},
        {"bos_token_id": 1, "eos_token_id": [2, 3], "attention_dropout": 0.1},
        {"hidden_act": "swish"},
        {"rope_scaling": {"type": "linear", "factor": 1.0}},
        {
            "rope_theta": "absent",
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        {"num_key_value_heads": 4},
    ],
)
def test_what_means_the_same_is_silent(changes):
    config = {
        **raw("llama", heads=(4, 4), layers=2).config,
        "rope_theta": 10000,
        "hidden_act": "silu",
    }
    assert _differ(config, **changes) == set()


def test_numbers_that_no_float_holds_are_compared_without_a_fault():
    config = raw("llama", layers=1).config
    for value in (10**400, float("nan"), float("inf"), "x", [], {"a": 1}):
        assert _differ(config, rope_theta=value) == {"rope theta"}
        assert not contradictions(
            _settings({**config, "rope_theta": value}), _settings({**config, "rope_theta": value})
        )


# --- through verify -----------------------------------------------------------------------------


def test_verify_compares_the_function_and_not_only_the_bytes(tmp_path):
    case = raw("llama", layers=2)
    hf = write_hf(tmp_path / "hf", case)
    made = reshard(hf, tmp_path / "made", tp=2, run=QUIET).output
    path = made / "config.json"
    config = json.loads(path.read_text())
    assert verify(hf, made).same
    path.write_text(json.dumps({**config, "rope_theta": 8e6}))
    for pair in ((hf, made), (made, hf)):
        for only in (False, True):
            (found,) = verify(*pair, weights_only=only).findings
            assert (found.kind, found.name) == ("config", "rope theta")
            for part in ("8000000.0", "10000", str(hf), str(made)):
                assert part in found.text


def test_a_model_of_no_family_is_compared_by_its_keys(tmp_path):
    case = raw("llama", layers=2)
    for name, scale in (("a", 0.5), ("b", 0.25)):
        folder = write_hf(tmp_path / name, case)
        table = {**case.config, "model_type": "novel", "logit_scale": scale}
        (folder / "config.json").write_text(json.dumps(table))
    (found,) = verify(tmp_path / "a", tmp_path / "b").findings
    assert (found.kind, found.name) == ("config", "logit_scale")


@pytest.mark.parametrize("to", ["shards", "megatron", "torch_dist"])
@pytest.mark.parametrize("variant", ["llama", "gpt2"])
def test_a_conversion_of_a_hugging_face_folder_is_equal_to_it(variant, to, tmp_path):
    """Megatron's formats must say a step: 0 is none yet."""
    hf = write_hf(tmp_path / "hf", raw(variant, layers=2))
    made = reshard(hf, tmp_path / "made", tp=1, to=to, run=QUIET).output
    rows = ReadOptions(vocab_size=21) if to != "shards" else None
    for a, b, says in ((hf, made, {"read_b": rows}), (made, hf, {"read": rows})):
        verdict = verify(a, b, **says)
        assert verdict.same, verdict.differences
