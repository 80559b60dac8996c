"""Ranks for tests of the trainer: gloo processes on this machine, and one training step in them.

``launch`` forks ranks of the process of warm.py, since the redirections that megatron-core needs on
CPU hold for a whole process, and since importing torch, megatron-core and transformers in every
rank would be most of what it costs.

The step (``run_step``) is megatron's own: its pipeline schedule, its data parallelism, its
reduction of gradients. Weights come from rank files by safetensors alone.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import warm
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]
IGNORED = -100  # label of a token that has no loss


def launch(target: str, world: int, folder: Path, *args: object) -> list[object]:
    """Call ``module:function`` with ``args`` (JSON) in ``world`` ranks; each rank's result.

    Results are what ``torch.load(weights_only=True)`` reads: tensors, numbers, strings and
    containers of them. AssertionError with the ranks' output where one fails or time runs out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "output.txt"
    code = warm.call("train_helpers:serve", target, world, str(folder), args, log=log)
    assert code == 0, f"{target} in {world} ranks: {code}\n{log.read_text()[-6000:]}"
    return [torch.load(folder / f"rank_{r}.pt", weights_only=True) for r in range(world)]


def serve(target: str, world: int, folder: str, args: Sequence[object]) -> None:
    """Fork the ranks and wait for all; SystemExit where one fails."""
    os.environ.update(LOCAL_WORLD_SIZE=str(world), WORLD_SIZE=str(world))
    module, function = target.split(":")
    call = getattr(importlib.import_module(module), function)
    gc.freeze()  # a rank that collects would go through all that was imported, and so copy it
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    ranks = [_fork(rank, call, Path(folder), args) for rank in range(world)]
    for _ in range(world):
        pid, status = os.wait()
        ranks.remove(pid)
        if status:  # the others would wait for it until their timeout
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)


def _fork(rank: int, call, folder: Path, args: Sequence[object]) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        warm.watch_for_a_hang()
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        # a rank ends by os._exit; what is registered would only be held, threads of groups and all
        atexit.register = lambda function, *args, **named: function
        torch.save(call(*args), folder / f"rank_{rank}.pt")
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: [B, S] tokens, the next token of each, and optionally 1 for real tokens."""

    tokens: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor | None = None


def micro_batches(
    vocab: int, count: int = 2, batch: int = 2, length: int = 12, seed: int = 0
) -> list[Batch]:
    """Random tokens; some labels beside the last are ignored, in different numbers per batch."""
    random = torch.Generator().manual_seed(seed)
    found = []
    for i in range(count):
        tokens = torch.randint(0, vocab, (batch, length), generator=random)
        labels = torch.cat((tokens[:, 1:], torch.full((batch, 1), IGNORED)), 1)
        labels[0, :i] = IGNORED
        found.append(Batch(tokens, labels))
    return found


def load_weights(chunks: Sequence[torch.nn.Module], folder: Path, tp_rank: int) -> None:
    """Copy a tp rank's files, of any number of stages, into parameters of the same stored name."""
    from shardwright.train.model.build import stored_parameters

    found: Tensors = {}
    for file in sorted(folder.glob(f"model_tp_{tp_rank}_pp_*.safetensors")):
        found.update(load_file(file))
    for chunk in chunks:
        for name, parameter in stored_parameters(chunk).items():
            assert parameter.shape == found[name].shape, name
            with torch.no_grad():
                parameter.copy_(found[name])


def overwrite(file: Path, tensors: Tensors) -> None:
    """Put other values of the same type and shape into a safetensors file."""
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            data[start + begin : start + end] = tensors[name].numpy().tobytes()
    file.write_bytes(data)


def run_step(
    chunks: Sequence[torch.nn.Module], batches: Sequence[Batch]
) -> tuple[float | None, Tensors]:
    """Forward and backward of all micro-batches: mean loss per token and gradients.

    The loss is None on ranks that do not hold the last stage. Gradients are those that an
    optimizer would see: over the whole batch, by stored name.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    from shardwright.train.model.build import stored_parameters

    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = [DistributedDataParallel(config, settings, chunk) for chunk in chunks]
    for chunk in wrapped:
        chunk.train()
        chunk.zero_grad_buffer()
    found = _schedule(wrapped, batches, _sum_of_losses, forward_only=False)
    total = sum(row["tokens"] for row in found)
    loss = sum(row["loss"] for row in found) / total if found else None
    gradients = {
        name: parameter.main_grad.clone()
        for chunk in wrapped
        for name, parameter in stored_parameters(chunk).items()
    }
    return loss, gradients


def logits(chunks: Sequence[torch.nn.Module], batches: Sequence[Batch]) -> list[torch.Tensor]:
    """Each micro-batch's logits [B, S, V of all tp ranks]; empty unless on the last stage."""
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        return _schedule(chunks, batches, _all_logits, forward_only=True)


def _schedule(chunks, batches: Sequence[Batch], collect, forward_only: bool) -> list:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    first = batches[0].tokens
    return get_forward_backward_func()(
        forward_step_func=_forward_only if forward_only else _forward,
        data_iterator=[_endless(batches) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(batches),
        seq_length=first.shape[1],
        micro_batch_size=first.shape[0],
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _endless(batches: Sequence[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches


def _inputs(batch: Batch) -> Mapping[str, torch.Tensor | None]:
    from shardwright.train.model.modules import padding_mask

    at = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
    return {
        "input_ids": batch.tokens,
        "position_ids": at,
        "attention_mask": padding_mask(batch.mask),
    }


def _forward(batches: Iterator[Batch], chunk):
    batch = next(batches)
    output = chunk(**_inputs(batch), labels=batch.labels)
    return output, lambda losses: _sum_of_losses(losses, batch.labels)


def _forward_only(batches: Iterator[Batch], chunk):
    return chunk(**_inputs(next(batches))), _all_logits


def _sum_of_losses(losses: torch.Tensor, labels: torch.Tensor):
    kept = labels != IGNORED
    total = (losses * kept).sum()
    count = kept.sum().int()
    return total, count, {"loss": float(total.detach()), "tokens": int(count)}


def _all_logits(output: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(output) for _ in range(group.size())]
    torch.distributed.all_gather(parts, output.contiguous(), group=group)
    return torch.cat(parts, -1)
