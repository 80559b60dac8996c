"""One rank's training engine: model chunks, gradients, optimizer, the pipeline schedule.

The command and the Accelerator both drive it. A call of ``forward_backward`` takes this
data-parallel rank's micro-batches and runs megatron-core's whole schedule. The loss of a call
is the sum over its counted tokens on all data-parallel ranks, divided by their number, as
transformers normalises; gradients follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardwright.ckpt.checkpoint import Model
from shardwright.ckpt.mesh import Mesh

from . import optim
from .errors import TrainError
from .model import (
    ModelOptions,
    build,
    padding_mask,
    stored_parameters,
    transformer_config,
)
from .parallel import Layout, Parallel, import_megatron
from .state import RankState

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

# A micro-batch: tokens, labels, loss_mask, position_ids [b, s]; labels are those to predict at
# each position. attention_mask (optional) [b, s]: 1 for a token, 0 for padding.
Batch = Mapping[str, torch.Tensor]
LossFunction = Callable[[Batch, torch.Tensor], torch.Tensor]  # (batch, loss [b, s]) -> [b, s]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How gradients are reduced and kept."""

    distributed_optimizer: bool = False
    overlap: bool = False  # overlap gradient reduction and parameter gathering with computing
    check_for_nan: bool = True
    bucket_elements: int | None = None  # gradients reduced at once; None is megatron's choice


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step."""

    grad_norm: float  # global L2 norm before clipping
    skipped: bool  # overflow: nothing was changed


class Engine:
    """Model, gradients and optimizer of one rank."""

    def __init__(
        self,
        model: Model,
        parallel: Parallel,
        layout: Layout,
        model_options: ModelOptions,
        options: EngineOptions,
    ) -> None:
        self.model, self.parallel, self.layout = model, parallel, layout
        self.model_options, self.options = model_options, options
        self.config = transformer_config(model, parallel, layout, model_options)
        self.modules = build(model, parallel, layout, model_options)
        self.named: dict[str, torch.nn.Parameter] = {}
        for chunk in self.modules:
            self.named.update(stored_parameters(chunk))
        self.chunks = [self._wrapped(chunk, i) for i, chunk in enumerate(self.modules)]
        self.optimizer: MegatronOptimizer | None = None
        self.view: optim.OptimizerView | None = None
        self._set_hooks()

    def _wrapped(self, chunk: torch.nn.Module, index: int) -> torch.nn.Module:
        """The chunk in megatron's DDP, which owns the gradient buffers."""
        ddp = import_megatron("distributed")
        config = ddp.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=self.options.overlap,
            overlap_param_gather=self.options.overlap and self.options.distributed_optimizer,
            use_distributed_optimizer=self.options.distributed_optimizer,
            check_for_nan_in_grad=False,  # the step checks, and names what to do
            bucket_size=self.options.bucket_elements,
        )
        return ddp.DistributedDataParallel(self.config, config, chunk, disable_bucketing=index > 0)

    def _set_hooks(self) -> None:
        """What the schedule calls at the end of a backward pass."""
        self._finalize = import_megatron("distributed").finalize_model_grads
        if self.options.overlap:
            self.config.no_sync_func = [c.no_sync for c in self.chunks]
            self.config.grad_sync_func = [c.start_grad_sync for c in self.chunks]
            if self.options.distributed_optimizer:
                self.config.param_sync_func = [c.start_param_sync for c in self.chunks]
            for hook in ("no_sync_func", "grad_sync_func", "param_sync_func"):
                found = getattr(self.config, hook)
                if isinstance(found, list) and len(found) == 1:
                    setattr(self.config, hook, found[0])

    def attach_optimizer(
        self, spec: optim.OptimizerSpec, groups: Sequence[optim.ParamGroup] | None = None
    ) -> None:
        """Make the optimizer over this rank's parameters."""
        chosen = list(groups) if groups is not None else optim.default_groups(self.named, spec)
        self.optimizer = optim.build(self.chunks, self.named, spec, chosen)
        self.view = optim.OptimizerView(self.optimizer)
        self.config.grad_scale_func = self.optimizer.scale_loss

    def rank_state(self) -> RankState:
        """What this rank saves and loads."""
        p = self.parallel
        owned = self.layout.owned(self.model.sizes["layer"])
        mesh = Mesh((("tp", p.tp), ("pp", p.pp)), {"pp": owned})
        coord = (("tp", p.tp_rank), ("pp", p.pp_rank))
        return RankState(
            model=self.model,
            mesh=mesh,
            dp=p.dp,
            dp_rank=p.dp_rank,
            coord=coord,
            rank=p.rank,
            named=self.named,
            optimizer=self.view,
            sharded=self.options.distributed_optimizer and p.dp > 1,
            vocab_multiple=self.model_options.vocab_multiple,
            control=p.control_group,
        )

    def facts(self) -> dict[str, object]:
        """What the model is under the names of Megatron's arguments."""
        c, model = self.config, self.model
        rope = self.modules[0].rotary_base if hasattr(self.modules[0], "rotary_base") else None
        learned = "pos" in model.sizes
        return {
            "num_layers": c.num_layers,
            "hidden_size": c.hidden_size,
            "ffn_hidden_size": c.ffn_hidden_size,
            "num_attention_heads": c.num_attention_heads,
            "num_query_groups": c.num_query_groups,
            "group_query_attention": c.num_query_groups != c.num_attention_heads,
            "kv_channels": c.kv_channels,
            "max_position_embeddings": model.config.get(
                "max_position_embeddings", model.config.get("n_positions")
            ),
            "rotary_base": rope,
            "rotary_percent": getattr(self.modules[0], "rotary_percent", None),
            "norm_epsilon": c.layernorm_epsilon,
            "swiglu": c.gated_linear_unit,
            "add_bias_linear": c.add_bias_linear,
            "add_qkv_bias": c.add_qkv_bias,
            "qk_layernorm": c.qk_layernorm,
            "normalization": c.normalization,
            "position_embedding_type": "learned_absolute" if learned else "rope",
            "untie_embeddings_and_output_weights": "tie_word_embeddings" not in model.flags,
            "orig_vocab_size": model.sizes["vocab"],
            "padded_vocab_size": self.rank_state().placement.sizes["padded_vocab"],
        }

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def forward_backward(
        self,
        batches: Sequence[Batch],
        *,
        forward_only: bool = False,
        reduce: bool = True,
        weight: float = 1.0,
        loss_function: LossFunction | None = None,
        collect: bool = False,
    ) -> tuple[float, list[torch.Tensor]]:
        """The loss of a batch, the same on every rank, and its gradients.

        ``reduce`` sums gradients over the data-parallel ranks: False while more calls of the
        same step follow. ``weight`` scales gradients, not the loss. With ``collect`` the last
        stage's logits [b, s, vocab of its tp rank] come back as well.
        """
        count = self._count_tokens(batches, forward_only)
        run = _Run(len(batches) * weight / count, loss_function, collect)
        self.config.finalize_model_grads_func = self._finalize if reduce else None
        schedules = import_megatron("pipeline_parallel.schedules")
        shape = batches[0]["tokens"].shape
        for chunk in self.chunks:
            chunk.train(not forward_only)
        losses = schedules.get_forward_backward_func()(
            forward_step_func=partial(_forward_step, run),
            data_iterator=self._iterators(batches),
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(batches),
            seq_length=shape[1],
            micro_batch_size=shape[0],
            forward_only=forward_only,
        )
        return self._agree_on_loss(losses, count), run.logits

    def _iterators(self, batches: Sequence[Batch]) -> Any:
        moved = [self._on_device(batch) for batch in batches]
        if len(self.chunks) > 1:
            return [iter(moved) for _ in self.chunks]
        return iter(moved)

    def _on_device(self, batch: Batch) -> Batch:
        return {k: v.to(self.parallel.device, non_blocking=True) for k, v in batch.items()}

    def _count_tokens(self, batches: Sequence[Batch], forward_only: bool) -> float:
        """Tokens that count toward the loss, over all data-parallel ranks."""
        count = sum(batch["loss_mask"].sum(dtype=torch.float64) for batch in batches)
        box = torch.tensor([float(count)], dtype=torch.float64, device=self.parallel.device)
        group = import_megatron("parallel_state").get_data_parallel_group()
        dist.all_reduce(box, group=group)
        if box.item() == 0 and forward_only:
            return 1.0  # nothing to predict: only logits are wanted
        if box.item() == 0:
            raise TrainError("no token of this batch counts toward the loss: every label is masked")
        return float(box.item())

    def _agree_on_loss(self, losses: Sequence[Mapping[str, torch.Tensor]], count: float) -> float:
        """Sum the last stage's losses over data-parallel ranks and tell every rank."""
        state = import_megatron("parallel_state")
        box = torch.zeros(1, dtype=torch.float64, device=self.parallel.device)
        if self.parallel.is_last_stage:
            box += sum(loss["sum"].double() for loss in losses)
            dist.all_reduce(box, group=state.get_data_parallel_group())
        if self.parallel.pp > 1:
            group = state.get_pipeline_model_parallel_group()
            dist.broadcast(box, dist.get_global_rank(group, self.parallel.pp - 1), group=group)
        return float(box.item()) / count

    @property
    def sequence_multiple(self) -> int:
        """What sequence lengths must be a multiple of."""
        return self.parallel.tp if self.layout.sequence_parallel else 1

    def whole_logits(self, parts: Sequence[torch.Tensor], length: int) -> torch.Tensor:
        """Micro-batches' logits as [rows, length, vocab], on every rank of the replica.

        ``parts`` are what ``forward_backward`` collected: empty but on the last stage.
        """
        state = import_megatron("parallel_state")
        found, shape = None, [0, 0, 0]
        if parts:
            mine = torch.cat(list(parts))[:, :length].contiguous()
            every = [torch.empty_like(mine) for _ in range(self.parallel.tp)]
            dist.all_gather(every, mine, group=state.get_tensor_model_parallel_group())
            found = torch.cat(every, -1)[..., : self.model.sizes["vocab"]].float().contiguous()
            shape = list(found.shape)
        if self.parallel.pp == 1:
            assert found is not None
            return found
        group = state.get_pipeline_model_parallel_group()
        last = dist.get_global_rank(group, self.parallel.pp - 1)
        box = torch.tensor(shape, device=self.parallel.device)
        dist.broadcast(box, last, group=group)
        if found is None:
            found = torch.empty(box.tolist(), device=self.parallel.device)
        dist.broadcast(found, last, group=group)
        return found

    def step(self) -> StepResult:
        """Clip, step, and hand the new weights to the model."""
        assert self.optimizer is not None, "attach_optimizer first"
        done, norm, _ = self.optimizer.step()
        norm = float(norm) if norm is not None else float(self.optimizer.get_grad_norm())
        return StepResult(norm, not done)


@dataclass(slots=True)
class _Run:
    """One call of the schedule."""

    scale: float  # of the loss that is differentiated
    loss_function: LossFunction | None
    collect: bool
    logits: list[torch.Tensor]

    def __init__(self, scale: float, loss_function: LossFunction | None, collect: bool) -> None:
        self.scale, self.loss_function, self.collect = scale, loss_function, collect
        self.logits = []


def _forward_step(
    run: _Run, batches: Iterator[Batch], chunk: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """megatron's forward step: the output of a stage, and how to reduce it to a loss."""
    batch = next(batches)
    output = chunk(
        batch["tokens"],
        batch["position_ids"],
        padding_mask(batch.get("attention_mask")),
        labels=None if run.collect else batch["labels"],
    )
    return output, partial(_loss, run, batch)


def _loss(run: _Run, batch: Batch, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """The scaled loss to differentiate, and the plain sum to report.

    output: [b, s] losses, or [b, s, v] logits of this tp rank where they are collected.
    """
    if run.collect:
        run.logits.append(output.detach())
        entropy = import_megatron("tensor_parallel").vocab_parallel_cross_entropy
        labels = batch["labels"].transpose(0, 1).contiguous()
        output = entropy(output.float().transpose(0, 1).contiguous(), labels).transpose(0, 1)
    if run.loss_function is not None:
        output = run.loss_function(batch, output)
    total = (output.float() * batch["loss_mask"]).sum()
    return total * run.scale, {"sum": total.detach()}
