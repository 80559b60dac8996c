"""One rank's training engine: model chunks, gradients, optimizer, the pipeline schedule.

The command and the Accelerator both drive it. A call of ``forward_backward`` takes this
data-parallel rank's micro-batches and runs megatron-core's whole schedule. The loss of a call
is the mean over the counted tokens of all its micro-batches on all data-parallel ranks, as
transformers normalises, or the mean of the micro-batches' own means; gradients follow. With
``own_loss`` it is the mean of this data-parallel rank alone, and gradients are those of the mean
of all ranks' losses, as of processes that each run transformers under torch's DDP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardwright.ckpt.model.family import Model
from shardwright.ckpt.model.placement import padded_vocab

from ..config.schema import OptimizerSettings
from ..errors import TrainError
from ..model.build import build, stored_parameters
from ..model.config import transformer_config
from ..model.modules import hidden_keys
from ..model.options import ModelOptions
from ..patches import graphs
from ..patches.megatron import import_megatron
from . import agreement, heads, optim
from .gradients import Gradients
from .heads import Heads
from .layout import Layout
from .losses import ForwardStep, LossFunction, MicroBatch, Run, custom_step, forward_step
from .process import Parallel

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How gradients are reduced and kept."""

    distributed_optimizer: bool = False
    overlap: bool = False  # overlap gradient reduction and parameter gathering with computing
    check_for_nan: bool = True  # find out which rank has a loss or gradient that is not finite
    bucket_elements: int | None = None  # gradients reduced at once; None is megatron's choice
    per_token_loss: bool = True  # mean over all tokens; else over the micro-batches' means
    own_loss: bool = False  # the mean of each data-parallel rank alone; ranks count alike
    eod_tokens: tuple[int, ...] = ()  # input tokens whose position does not count


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the schedule that computed gradients; it can be run again."""

    step: Callable[..., Any]
    batches: Sequence[Mapping[str, Any]]
    shape: tuple[int, ...]
    share: float  # the factor of its gradients at a weight of 1


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
        trained: Callable[[str], bool] | None = None,
    ) -> None:
        """``trained(name)``: whether a stored tensor gets gradients; None: all do."""
        self.model, self.parallel, self.layout = model, parallel, layout
        self.model_options, self.options = model_options, options
        self.config = transformer_config(model, layout, model_options)
        self.modules = build(model, parallel.place, layout, model_options, parallel.device)
        self.named: dict[str, torch.nn.Parameter] = {}
        for chunk in self.modules:
            self.named.update(stored_parameters(chunk))
        if trained is not None:
            self._freeze(trained)
        self.chunks: list[Any] = [self._wrapped(c, i) for i, c in enumerate(self.modules)]
        self.graphs = self._layer_graphs()
        self.optimizer: MegatronOptimizer | None = None
        self.view: optim.OptimizerView | None = None
        finalize = import_megatron("distributed").finalize_model_grads
        self.gradients = Gradients(self.chunks, finalize, options.overlap)
        self.heads = Heads(self.modules[-1])
        self.last: Call | None = None  # the last that computed gradients
        self.counted = 0.0  # what this rank's last loss was divided by
        self.mean_loss = 0.0  # of the last call, over all data-parallel ranks
        self.reported: dict[str, float] = {}  # what the loss function reported in the last call
        self.faulty_rank: int | None = None  # the first whose loss or gradient was not finite
        self._set_hooks()

    def _freeze(self, trained: Callable[[str], bool]) -> None:
        """Called before the gradient buffers are made: frozen parameters have no place in them."""
        for name, param in self.named.items():
            param.requires_grad_(trained(name))
        embedding = getattr(self.modules[0], "embedding", None)
        if embedding is not None and not any(p.requires_grad for p in embedding.parameters()):
            # the schedule and full recomputation start a backward at every stage's layers
            embedding.register_forward_hook(_wants_gradient)

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

    def _layer_graphs(self) -> list[graphs.LayerGraphs]:
        """The CUDA graphs of each chunk's layers, if they are wanted and possible."""
        wanted, layout = self.model_options.cuda_graphs, self.layout
        if self.parallel.device.type != "cuda" or wanted is False:
            return []
        interleaved = layout.virtual_pp_layers is not None
        reason = graphs.obstacle(self.config, interleaved, self.options.overlap)
        if wanted and reason is not None:
            raise TrainError(f"cuda_graphs: {reason}; turn one of the two off")
        if reason is not None or (wanted is None and layout.tp * layout.pp == 1):
            return []
        under_way = layout.pp - self.parallel.pp_rank
        return [
            graphs.LayerGraphs(chunk.decoder.layers, under_way, needed=bool(wanted))
            for chunk in self.modules
        ]

    def _set_hooks(self) -> None:
        """What the schedule calls before and during a backward pass.

        ``finalize_model_grads_func`` stays empty: ``gradients`` reduces, and once in a step.
        """
        self._factor = 1.0  # of the loss, and of what layers add to it
        self.config.grad_scale_func = self._scaled
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
        self, spec: OptimizerSettings, groups: Sequence[optim.ParamGroup] | None = None
    ) -> None:
        """Make the optimizer over this rank's parameters; without ``groups`` by megatron's rule."""
        chosen = list(groups) if groups is not None else optim.default_groups(self.named)
        self.optimizer = optim.build(
            self.chunks, self.named, spec, chosen,
            bf16=self.model_options.precision == "bf16",
            distributed=self.options.distributed_optimizer,
            overlap=self.options.overlap,
        )  # fmt: skip
        self.view = optim.OptimizerView(self.optimizer)

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """What a backward pass starts with: megatron-core's one place to scale every loss."""
        return (loss if self.optimizer is None else self.optimizer.scale_loss(loss)) * self._factor

    def settle(self) -> None:
        """Gather the weights that the next forward pass would gather."""
        if self.options.overlap and self.options.distributed_optimizer:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def facts(self) -> dict[str, object]:
        """The model's properties under the names of Megatron's arguments."""
        c, model = self.config, self.model
        rope = self.modules[0].rotary_base if hasattr(self.modules[0], "rotary_base") else None
        learned, vocab = "pos" in model.sizes, model.sizes["vocab"]
        padded = padded_vocab(vocab, self.model_options.vocab_multiple, self.layout.tp)
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
            "orig_vocab_size": vocab,
            "padded_vocab_size": padded,
        }

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.gradients.clear()
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def forward_backward(
        self,
        batches: Sequence[MicroBatch],
        *,
        forward_only: bool = False,
        reduce: bool = False,
        weight: float = 1.0,
        loss_function: LossFunction | None = None,
        collect: bool = False,
    ) -> tuple[float, list[torch.Tensor]]:
        """The loss of a batch, the same on every rank (of the replica), and its gradients.

        Gradients add to those of earlier calls since ``zero_grad``. ``step`` and ``grad_norm``
        reduce them over the ranks; ``reduce`` does it now, since no call of the step follows.
        ``weight`` scales gradients, not the loss. ``forward_only`` computes in eval mode; under
        ``torch.no_grad`` train mode computes no gradients either. With ``collect`` the last
        stage's logits [b, s, vocab of its tp rank] come back as well.
        """
        batches = [self._weighted(batch) for batch in batches]
        backward = not forward_only and torch.is_grad_enabled()
        total, share = self._total(batches, backward)
        run = Run(self.options.per_token_loss, loss_function, collect)
        call = Call(partial(forward_step, run), batches, tuple(batches[0]["tokens"].shape), share)
        losses = self._schedule(call, not forward_only, backward, weight)
        if reduce:
            self.gradients.reduce()
        logits, run.logits, run.collect = run.logits, [], False  # `again` keeps none
        return self._agree(losses, total, loss_function is not None), logits

    def custom_forward_backward(
        self,
        step: ForwardStep,
        batches: Sequence[Mapping[str, Any]],
        shape: tuple[int, int],
        *,
        forward_only: bool = False,
        weight: float = 1.0,
    ) -> float:
        """The same with a forward step of Megatron's shape, which reads ``batches`` itself.

        The loss is the mean over micro-batches and data-parallel ranks. ``shape`` is [b, s].
        """
        ranks = self.parallel.dp
        count = len(batches) * (1 if self.options.own_loss else ranks)
        share = 1.0 / (len(batches) * ranks)
        backward = not forward_only and torch.is_grad_enabled()
        call = Call(partial(custom_step, step), batches, shape, share)
        losses = self._schedule(call, not forward_only, backward, weight)
        return self._agree(losses, float(count), custom=True)

    def again(self, call: Call, weight: float) -> None:
        """Add the gradients of a call once more; no collective of the data-parallel ranks."""
        self._schedule(call, True, True, weight)

    def direct(
        self, batch: MicroBatch, loss_function: LossFunction | None = None, collect: bool = False
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The loss of a micro-batch, with its graph, in train mode on a model of one stage.

        A backward pass of the caller's adds gradients, those of the mean over data-parallel ranks.
        ``with_graph`` makes whole logits of those that come back, if they are collected, or of
        those of ``heads``.
        """
        assert self.layout.pp == 1, "the graph ends at the stage's border"
        batch = self._on_device(self._weighted(batch))
        total, share = self._total([batch], True)
        self._factor = share  # of what layers add to a loss
        # the fused kernel is faster, and leaves logits of half precision alone
        keep = collect or not self.config.cross_entropy_loss_fusion
        run = Run(self.options.per_token_loss, loss_function, keep, graph=True, hands=collect)
        output, loss = forward_step(run, iter([batch]), self._one_chunk())
        found, _, report = loss(output)
        mean = self._agree([report], total, loss_function is not None)
        # without anything to predict here: the loss of the other ranks, and no gradient
        own = found / total if total else found * 0.0 + mean
        return _Scaled.apply(own, share * total, self._begin_direct()), run.logits

    def direct_logits(self, batch: MicroBatch) -> torch.Tensor:
        """[rows, s, vocab] of a micro-batch, with its graph, as ``direct`` gives a loss."""
        batch = self._on_device(self._weighted(batch))
        chunk = self._one_chunk()
        found = chunk(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=None)
        return self.with_graph([found], self._begin_direct())

    def with_graph(
        self, parts: Sequence[torch.Tensor], begin: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """Logits of this tp rank as whole ones, [rows, s, vocab], with their graph."""
        whole = heads.whole(self.parallel, parts, self.model.sizes["vocab"])
        begin = begin or self._begin_direct()
        return _Scaled.apply(whole, 1.0 / self.parallel.dp, begin)

    def _one_chunk(self) -> Any:
        for chunk in self.chunks:
            chunk.train()
        for replayed in self.graphs:
            replayed.prepare(1, alone=False)
        return self.chunks[0]

    def _begin_direct(self) -> Callable[[], None]:
        """What the backward pass of one forward calls first; more than once does no harm."""
        begun = False

        def begin() -> None:
            nonlocal begun
            if not (begun and self.options.overlap):
                self.gradients.begin_backward()
            begun = True

        return begin

    def _schedule(
        self, call: Call, training: bool, backward: bool, weight: float
    ) -> list[Mapping[str, Any]]:
        """Run megatron-core's schedule; what the last stage's losses returned.

        ``weight`` scales gradients.
        """
        schedules = import_megatron("pipeline_parallel.schedules")
        for chunk in self.chunks:
            chunk.train(training)
        if backward:
            self.gradients.begin_backward()
            self._factor, self.last = weight * call.share, call
            for replayed in self.graphs:
                replayed.prepare(len(call.batches))
        with torch.set_grad_enabled(backward):
            found: list[Mapping[str, Any]] = schedules.get_forward_backward_func()(
                forward_step_func=call.step,
                data_iterator=self._iterators(call.batches),
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=len(call.batches),
                seq_length=call.shape[1],
                micro_batch_size=call.shape[0],
                forward_only=not backward,
            )
        return found

    def _iterators(self, batches: Sequence[Mapping[str, Any]]) -> Any:
        moved = [self._on_device(batch) for batch in batches]
        if len(self.chunks) > 1:
            return [iter(moved) for _ in self.chunks]
        return iter(moved)

    def _on_device(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        device = self.parallel.device
        return {
            k: v.to(device, non_blocking=True) if isinstance(v, torch.Tensor) else v
            for k, v in batch.items()
        }

    def _weighted(self, batch: MicroBatch) -> dict[str, Any]:
        """The batch with a loss mask of positions that count, and its portion of the whole loss.

        Its attention mask becomes the one that the model takes, here and not in the schedule,
        since reading it waits for a GPU that has it.
        """
        mask = batch["loss_mask"]
        for token in self.options.eod_tokens:
            mask = mask * (batch["tokens"] != token)
        portion = mask.sum(dtype=torch.float64)
        if not self.options.per_token_loss:
            portion = (portion > 0).double()
        hidden = hidden_keys(batch.get("attention_mask"))
        return {**batch, "attention_mask": hidden, "loss_mask": mask, "portion": portion}

    def _total(self, batches: Sequence[Mapping[str, Any]], backward: bool) -> tuple[float, float]:
        """What the sum of losses is divided by, and the factor of each loss's gradient.

        The sum is that of all data-parallel ranks, or with ``own_loss`` of this one, whose total
        is 0 where it has nothing to predict. TrainError where no rank has.
        """
        mine, own = float(sum(b["portion"] for b in batches)), self.options.own_loss
        self.counted = mine
        every = agreement.over_dp(self.parallel, float(mine > 0) if own else mine)
        if every == 0 and backward:
            raise TrainError("no token of this batch counts toward the loss: every label is masked")
        if own:
            return mine, 1.0 / (mine * every) if mine else 0.0
        total = every or 1.0  # nothing to predict: only logits are wanted
        return total, 1.0 / total

    def _agree(self, losses: Sequence[Mapping[str, Any]], total: float, custom: bool) -> float:
        """The mean loss on every rank; ``reported`` gets what a user's function reported."""
        own = self.options.own_loss
        if own:
            loss, self.mean_loss, mine = agreement.own_loss(self.parallel, losses, total)
        else:
            agreed, mine = agreement.loss(self.parallel, losses)
            loss = self.mean_loss = agreed / total
        self.reported = (
            agreement.reports(self.parallel, losses, total or 1.0, own) if custom else {}
        )
        self._note_faults(self.mean_loss, mine)
        return loss

    def _note_faults(self, agreed: float, *mine: torch.Tensor) -> None:
        """If ``agreed``, a number of all ranks, is not finite: find the first rank to blame."""
        self.faulty_rank = None
        if self.options.check_for_nan and not math.isfinite(agreed):
            self.faulty_rank = agreement.first_faulty(self.parallel, mine)

    @property
    def sequence_multiple(self) -> int:
        """What sequence lengths must be a multiple of."""
        return self.parallel.tp if self.layout.sequence_parallel else 1

    def whole_logits(self, parts: Sequence[torch.Tensor], length: int) -> torch.Tensor:
        """Micro-batches' logits as [rows, length, vocab], on every rank of the replica.

        ``parts`` are what ``forward_backward`` collected: empty but on the last stage.
        """
        return agreement.whole_logits(self.parallel, parts, length, self.model.sizes["vocab"])

    def grad_norm(self) -> float:
        """The L2 norm of all gradients, before clipping; a collective."""
        assert self.optimizer is not None, "attach_optimizer first"
        self.gradients.reduce()
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def step(self) -> StepResult:
        """Reduce what is not reduced, clip, step, and hand the new weights to the model."""
        assert self.optimizer is not None, "attach_optimizer first"
        self.gradients.reduce()
        done, norm, _ = self.optimizer.step()
        self.gradients.after_step()
        norm = float(norm) if norm is not None else float(self.optimizer.get_grad_norm())
        trained: list[Any] = [p for p in self.named.values() if p.requires_grad]
        self._note_faults(norm, *(param.main_grad for param in trained))
        return StepResult(norm, not done)

    def params_norm(self) -> float:
        """The L2 norm of all weights, each counted once."""
        self.settle()
        shared = import_megatron("transformer.module").param_is_not_shared
        single = import_megatron("tensor_parallel").param_is_not_tensor_parallel_duplicate
        box = torch.zeros(1, dtype=torch.float64, device=self.parallel.device)
        for param in self.named.values():
            if shared(param) and single(param):
                box += param.detach().double().square().sum()
        state = import_megatron("parallel_state")
        dist.all_reduce(box, group=state.get_model_parallel_group())
        return math.sqrt(float(box.item()))


class _Scaled(torch.autograd.Function):
    """The same value; its gradient is multiplied by a factor, after ``begin`` was called."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, factor: float, begin: Callable[[], None]
    ) -> torch.Tensor:
        ctx.factor, ctx.begin = factor, begin
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.begin()
        return gradient * ctx.factor, None, None


def _wants_gradient(module: torch.nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output
