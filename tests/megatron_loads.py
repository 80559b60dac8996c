"""Lets megatron-core itself load checkpoints, and says what it got.

``main`` is called in a fork of the process of warm.py. Each job names a checkpoint, a layout and an
optimizer; the ranks of a layout are forks again. Every rank writes the weights, the optimizer's own
``state_dict`` and the logits of the job's tokens to OUTPUT/JOB/rank_R.pt, or what went wrong to
OUTPUT/JOB/rank_R.txt. Nothing that reads or writes checkpoints here is ours.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import signal
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import warm

Job = Mapping[str, Any]


class FusedAdam(torch.optim.Optimizer):
    """Where TransformerEngine's and Apex's keep their state; it never steps here.

    ``step`` is in each group and not in the state, and the moments are made by whoever loads.
    """

    def __init__(self, params: Any, adam_w_mode: bool = True, **defaults: Any) -> None:
        super().__init__(params, {"bias_correction": True, **defaults})


def use_fused_adam() -> None:
    """Do as megatron-core does where Apex is installed.

    Its distributed optimizer cannot load a checkpoint with torch's Adam: state_dict() asserts that
    there is one step before the first one was made, and the load of the parameter state then asks
    the file for each parameter's ``step``.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    distrib_optimizer.Adam = FusedAdam
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True


# --- a rank ------------------------------------------------------------------------------------


def activation_of(args: argparse.Namespace) -> Any:
    """What Megatron-LM makes of its flags."""
    from megatron.core.activations import squared_relu

    if args.swiglu:
        return torch.nn.functional.silu
    return squared_relu if vars(args).get("squared_relu") else torch.nn.functional.gelu


def experts_of(args: argparse.Namespace) -> dict[str, Any]:
    """What Megatron-LM makes of its args of experts, and what megatron-core needs on a CPU."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 uses it without TransformerEngine
        moe_utils.te_general_gemm = None
    return {
        "num_moe_experts": args.num_experts,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none",
    }


def build(job: Job, args: argparse.Namespace) -> list[Any]:
    """This rank's GPTModels, one per virtual stage, as args describe them: the local spec."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )
    from megatron.core.transformer import TransformerConfig

    layout, said = job["layout"], {}
    if job.get("by_name"):  # as Megatron-LM itself: each field takes the arg of its name
        fields = {field.name for field in dataclasses.fields(TransformerConfig)}
        said = {name: value for name, value in vars(args).items() if name in fields}
    # core_v0.13.1 called it norm_epsilon
    epsilon = vars(args).get("layernorm_epsilon") or args.norm_epsilon
    made: dict[str, Any] = dict(  # noqa: C408
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        # Megatron-LM reads the number only beside this; a default of 1 stands there otherwise
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        kv_channels=args.kv_channels,
        add_bias_linear=args.add_bias_linear,
        gated_linear_unit=args.swiglu,
        activation_func=activation_of(args),
        normalization=args.normalization,
        layernorm_epsilon=epsilon,
        tensor_model_parallel_size=layout["tp"],
        pipeline_model_parallel_size=layout["pp"],
        virtual_pipeline_model_parallel_size=layout["vpp"] if layout["vpp"] > 1 else None,
        params_dtype=args.params_dtype,
        bf16=args.bf16,
        pipeline_dtype=args.params_dtype,
        attention_softmax_in_fp32=True,
        masked_softmax_fusion=False,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=bool(job.get("by_name") and args.bias_gelu_fusion),
        transformer_impl="local",
    )
    if vars(args).get("num_experts"):
        made |= experts_of(args)
    config = TransformerConfig(**{**said, **made})
    spec = get_gpt_layer_local_spec(
        qk_layernorm=args.qk_layernorm, normalization=args.normalization
    )
    if config.num_moe_experts:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=args.normalization
        )
    stage, chunks = parallel_state.get_pipeline_model_parallel_rank(), []
    for v in range(layout["vpp"]):
        chunk = GPTModel(
            config,
            spec,
            vocab_size=job["vocab"] or args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=stage == v == 0,
            post_process=(stage, v) == (layout["pp"] - 1, layout["vpp"] - 1),
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_base=args.rotary_base,
            rotary_percent=args.rotary_percent,
            rope_scaling=args.use_rope_scaling,
            rope_scaling_factor=vars(args).get("rope_scaling_factor", 8.0),
            seq_len_interpolation_factor=vars(args).get("rotary_seq_len_interpolation_factor"),
            vp_stage=v if layout["vpp"] > 1 else None,
        )
        chunks.append(chunk.to(args.params_dtype))
    return chunks


def center_norms(chunks: Sequence[Any], args: argparse.Namespace) -> None:
    """Norms of the local spec do not add the 1 that --apply-layernorm-1p asks for."""
    if not vars(args).get("apply_layernorm_1p"):
        return
    with torch.no_grad():
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if name.endswith("layernorm.weight"):
                    parameter.add_(1)


def optimizer_of(job: Job, chunks: Sequence[Any], args: argparse.Namespace) -> Any:
    """megatron-core's own, with hyperparameters that no checkpoint here has."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    distributed = job["optimizer"] == "distributed"
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed
    )
    wrapped = [
        DistributedDataParallel(chunk.config, ddp, chunk, disable_bucketing=v > 0)
        for v, chunk in enumerate(chunks)
    ]
    config = OptimizerConfig(
        optimizer="adam",
        lr=7.0,
        adam_eps=7.0,
        bf16=args.bf16,
        params_dtype=args.params_dtype,
        use_distributed_optimizer=distributed,
    )
    return get_megatron_optimizer(config, wrapped)


def names(chunks: Sequence[Any]) -> list[str]:
    """The keys of Megatron-LM's files for the model's chunks."""
    return ["model"] if len(chunks) == 1 else [f"model{v}" for v in range(len(chunks))]


def load_dist(job: Job) -> tuple[list[Any], Any, dict[str, Any]]:
    """As Megatron-LM's load_checkpoint loads torch_dist; and which keys one side alone has."""
    from megatron.core import dist_checkpointing

    folder = job["folder"]
    common = dist_checkpointing.load_common_state_dict(folder)
    args = common["args"]
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    chunks = build(job, args)
    made = optimizer_of(job, chunks, args) if job["optimizer"] else None
    wanted: dict[str, Any] = {
        name: chunk.sharded_state_dict(metadata=metadata)
        for name, chunk in zip(names(chunks), chunks, strict=True)
    }
    if made is not None:
        wanted["optimizer"] = made.sharded_state_dict(wanted, is_loading=True, metadata=metadata)
    found, unasked, absent = dist_checkpointing.load(
        wanted, folder, strict=dist_checkpointing.validation.StrictHandling.RETURN_ALL
    )
    for name, chunk in zip(names(chunks), chunks, strict=True):
        chunk.load_state_dict(found[name])
    center_norms(chunks, args)
    if made is not None:
        made.load_state_dict(found["optimizer"])
    return chunks, made, {"unasked": sorted(unasked), "absent": sorted(absent)}


def load_classic(job: Job) -> tuple[list[Any], Any, dict[str, Any]]:
    """As Megatron-LM's load_checkpoint loads the classic format; args need no Megatron-LM."""
    from megatron.core import parallel_state

    layout = job["layout"]
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if layout["pp"] > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    folder = Path(job["folder"]) / name
    torch.serialization.add_safe_globals([argparse.Namespace])
    found = torch.load(folder / "model_optim_rng.pt", weights_only=True)
    args = found["args"]
    assert args.tensor_model_parallel_size == layout["tp"]
    assert args.pipeline_model_parallel_size == layout["pp"]
    chunks = build(job, args)
    made = optimizer_of(job, chunks, args) if job["optimizer"] else None
    for name, chunk in zip(names(chunks), chunks, strict=True):
        chunk.load_state_dict(found[name], strict=True)
    center_norms(chunks, args)
    if made is not None:
        made.load_state_dict(found["optimizer"])
        if job["optimizer"] == "distributed":
            with torch.no_grad():  # 0.16.1 has it for torch_dist alone; fp32 parameters need it
                made.load_parameter_state(str(folder / "distrib_optim.pt"))
    return chunks, made, {}


def logits_of(job: Job, chunks: Sequence[Any]) -> torch.Tensor | None:
    """[B, S, padded V] on the last stage, stage after stage without a schedule."""
    from megatron.core import parallel_state

    layout = job["layout"]
    tokens = torch.load(job["tokens"], weights_only=True)["tokens"]
    count, length = tokens.shape
    positions = torch.arange(length).expand(count, length)
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    stage, rank = parallel_state.get_pipeline_model_parallel_rank(), dist.get_rank()
    step, order = layout["tp"] * layout["dp"], list(itertools.product(
        range(layout["vpp"]), range(layout["pp"])))  # fmt: skip
    found = None
    for i, (v, p) in enumerate(order):
        if p != stage:
            continue
        chunk = chunks[v].eval()
        if i > 0:
            hidden = torch.empty(
                length, count, chunk.config.hidden_size, dtype=chunk.config.params_dtype
            )
            dist.recv(hidden, rank + (order[i - 1][1] - p) * step)
            chunk.set_input_tensor(hidden)
        with torch.no_grad():
            found = chunk(tokens, positions, mask, runtime_gather_output=True)
        if i + 1 < len(order):
            dist.send(found.contiguous(), rank + (order[i + 1][1] - p) * step)
            found = None
    return None if found is None else found.float()


def run(job: Job) -> dict[str, Any]:
    """Load, compute, and give back what the rank holds."""
    chunks, made, more = (load_dist if job["kind"] == "torch_dist" else load_classic)(job)
    logits = logits_of(job, chunks) if job["tokens"] else None
    if job.get("logits_only"):
        return {"logits": logits}
    said: dict[str, Any] = {
        **more,
        "model": {n: c.state_dict() for n, c in zip(names(chunks), chunks, strict=True)},
        "logits": logits,
    }
    if made is None:
        return said
    said["optimizer"] = made.state_dict()
    (part,) = made.chained_optimizers
    said["class"] = type(part).__name__
    if job["optimizer"] == "distributed":
        # what Megatron-LM would save as distrib_optim.pt; None but on the first data-parallel rank
        said["flat"] = part.get_parameter_state_dp_zero()
        if job["layout"]["dp"] > 1:
            return said  # each rank has ranges of parameters
    said["named"] = {head: {} for head in said["model"]}
    for head, chunk in zip(said["named"], chunks, strict=True):
        for name, param in chunk.named_parameters():
            if job["optimizer"] == "distributed":
                held = part._get_main_param_and_optimizer_states(param)
                rows = {"master": held.pop("param"), **held}
            else:
                main = getattr(param, "main_param", param)
                rows = {"master": main, **part.optimizer.state[main]}
            said["named"][head] |= {
                f"{state}/{name}": x.detach().view(param.shape)
                for state, x in rows.items()
                if state != "step"
            }
    return said


def rank_main(rank: int, world: int, jobs: Sequence[Job], output: Path) -> None:
    """One forked rank of jobs with one layout; an error ends it, and ``wait_for`` the others."""
    layout = jobs[0]["layout"]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    store = output / f"{jobs[0]['name']}.store"  # nothing may be in it from other ranks
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world,
                            timeout=timedelta(minutes=10))  # fmt: skip
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        layout["tp"],
        layout["pp"],
        layout["vpp"] if layout["vpp"] > 1 else None,
        distributed_timeout_minutes=10,
    )
    model_parallel_cuda_manual_seed(1)
    for job in jobs:
        folder = output / job["name"]
        folder.mkdir(exist_ok=True)
        try:
            torch.save(run(job), folder / f"rank_{rank}.pt")
        except BaseException:
            (folder / f"rank_{rank}.txt").write_text(traceback.format_exc())
            os._exit(1)
        dist.barrier()
    dist.destroy_process_group()


# --- all of them -------------------------------------------------------------------------------


def main(jobs_file: str, output: str) -> None:
    """All jobs of a file."""
    import megatron.core.dist_checkpointing
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401  all before the forks

    jobs = json.loads(Path(jobs_file).read_text())

    def world_of(job: Job) -> tuple[Any, ...]:
        return (*job["layout"].values(), job["fused_adam"])

    for _, group in itertools.groupby(sorted(jobs, key=world_of), world_of):
        of_world = list(group)
        layout = of_world[0]["layout"]
        size = layout["tp"] * layout["pp"] * layout["dp"]
        ranks = []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                try:
                    warm.watch_for_a_hang()
                    if of_world[0]["fused_adam"]:
                        use_fused_adam()
                    rank_main(rank, size, of_world, Path(output))
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            ranks.append(child)
        wait_for(ranks)


def wait_for(ranks: list[int]) -> None:
    """All, or until one fails: then the others would wait for it in a collective."""
    left = set(ranks)
    while left:
        child, status = os.wait()
        left.discard(child)
        if status != 0:
            for other in left:
                os.kill(other, signal.SIGKILL)
