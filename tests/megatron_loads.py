"""A rank that lets megatron-core itself load a torch_dist folder, and says what it got.

    megatron_loads.py FOLDER OUTPUT      under torchrun: tp is the number of ranks

Writes each rank's state dict, optimizer tensors included, to OUTPUT/rank_R.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwright.train import cpu


def model_of(args: Any) -> Any:
    """The GPTModel that Megatron-LM's args describe, by megatron-core's own local spec."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        add_bias_linear=args.add_bias_linear,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        normalization=args.normalization,
        tensor_model_parallel_size=dist.get_world_size(),
        params_dtype=args.params_dtype,
        bf16=args.bf16,
        pipeline_dtype=args.params_dtype,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
    )
    return model.to(args.params_dtype)


def main(folder: str, output: str) -> None:
    cpu.install()
    dist.init_process_group("gloo")
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(dist.get_world_size(), 1)
    model_parallel_cuda_manual_seed(1)
    args = dist_checkpointing.load_common_state_dict(folder)["args"]
    model = model_of(args)
    wanted = {"model": model.sharded_state_dict()}
    found = dist_checkpointing.load(wanted, folder)
    model.load_state_dict(found["model"])
    made: dict[str, Any] = {"model": model.state_dict(), "common": found.get("optimizer")}
    tokens = torch.arange(16).view(1, 16) * 13 % 200
    positions = torch.arange(16).view(1, 16)
    mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), 1)
    with torch.no_grad():
        made["logits"] = model.eval()(tokens, positions, mask)
    torch.save(made, Path(output) / f"rank_{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
