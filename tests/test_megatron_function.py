"""megatron-core built from the args that we write computes what transformers computes.

The model is built by Megatron-LM's own rule: every field of TransformerConfig takes the arg of its
name. Nothing that reads or writes checkpoints in the other process is ours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from shardwright.ckpt import reshard

BASE: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64, "rms_norm_eps": 1e-3,
    "max_position_embeddings": 32, "rope_theta": 500.0, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "initializer_range": 0.2,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 2.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**BASE, "model_type": "llama"},
    "tied": {**BASE, "model_type": "llama", "tie_word_embeddings": True},
    "biases": {**BASE, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama3": {**BASE, "model_type": "llama", "rope_scaling": LLAMA3},
    "linear": {**BASE, "model_type": "llama", "rope_scaling": LINEAR},
    "mistral": {**BASE, "model_type": "mistral", "sliding_window": None},
    "qwen2": {**BASE, "model_type": "qwen2"},
    "qwen3": {**BASE, "model_type": "qwen3"},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32,
             "vocab_size": 64, "layer_norm_epsilon": 1e-3, "initializer_range": 0.2,
             "activation_function": "gelu", "bos_token_id": None, "eos_token_id": None,
             "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}  # fmt: skip
MODELS["gpt2's own gelu"] = {**MODELS["gpt2"], "activation_function": "gelu_new"}
BUILDS = """
import argparse, dataclasses, glob, os, sys
from pathlib import Path
import torch
from shardwright.train.patches import cpu
cpu.install()
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
parallel_state.initialize_model_parallel(1, 1)
model_parallel_cuda_manual_seed(1)
tokens = torch.load(sys.argv[2], weights_only=True)
for folder in sys.argv[3:]:
    (file,) = glob.glob(folder + "/release/mp_rank_00/model_optim_rng.pt")
    found = torch.load(file, weights_only=False)
    args = found["args"]
    fields = {f.name for f in dataclasses.fields(TransformerConfig)}
    said = {k: v for k, v in vars(args).items() if k in fields}
    if not args.group_query_attention:
        said["num_query_groups"] = None
    if args.swiglu:
        said |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    else:  # Megatron-LM hands --openai-gelu to no model of megatron-core
        said["bias_activation_fusion"] = args.bias_gelu_fusion
    config = TransformerConfig(**{
        **said, "use_cpu_initialization": True, "pipeline_dtype": args.params_dtype,
        "masked_softmax_fusion": False, "bias_dropout_fusion": False, "transformer_impl": "local",
    })
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=getattr(args, "rotary_seq_len_interpolation_factor", None),
    )
    model.load_state_dict(found["model"], strict=True)
    count, length = tokens.shape
    positions = torch.arange(length).expand(count, length)
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    with torch.no_grad():
        logits = model.eval()(tokens, positions, mask)
    torch.save(logits[..., : args.vocab_size], folder + "/logits.pt")
"""


def test_megatron_core_built_from_our_args_gives_transformers_logits(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    torch.manual_seed(5)
    tokens = torch.randint(64, (2, 24))
    torch.save(tokens, tmp_path / "tokens.pt")
    wanted, folders = {}, []
    for name, said in MODELS.items():
        kind = said["model_type"]
        config = transformers.AutoConfig.for_model(**said)
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():  # norms and biases too
                parameter.add_(torch.randn_like(parameter) * 0.1)
            wanted[name] = model(tokens).logits
        model.save_pretrained(tmp_path / name)
        written = json.loads((tmp_path / name / "config.json").read_text())
        assert written["model_type"] == kind
        out = tmp_path / f"{name}-megatron"
        reshard(tmp_path / name, out, to="megatron", tp=1, pp=1, make_vocab_size_divisible_by=1)
        folders.append(str(out))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUILDS, str(tmp_path / "store"),
         str(tmp_path / "tokens.pt"), *folders],
        capture_output=True, text=True, check=False,
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for name, logits in wanted.items():
        found = torch.load(tmp_path / f"{name}-megatron" / "logits.pt", weights_only=True)
        assert (found - logits).abs().max() < 1e-4 * logits.abs().max(), name
