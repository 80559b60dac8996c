"""Runs every idiom in the ranks of each layout, and on Accelerate's own engine.

Four processes are started once and are worlds of one, two or four ranks in turn, as in
accelerator_jobs.py.
"""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from conformance.idioms import IDIOMS, VOCAB, Kit
from train_helpers import launch

LAYOUTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "one process": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tp_degree": 2}),
    "pp2": (2, {"pp_degree": 2}),
    "tp2 dp2": (4, {"tp_degree": 2}),
}
PLAIN = {"plain 1": 1, "plain 2": 2}
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "vocab_size": VOCAB,
    "initializer_range": 0.2,
}  # fmt: skip


def replicas(layout: str) -> int:
    """The data-parallel ranks of a layout."""
    world, plugin = LAYOUTS[layout]
    return world // (plugin.get("tp_degree", 1) * plugin.get("pp_degree", 1))


@functools.cache
def _weights() -> Mapping[str, torch.Tensor]:
    return _made().state_dict()


def _made() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return LlamaForCausalLM(LlamaConfig(**SIZES))


def model() -> Any:
    made = _made()
    made.load_state_dict(_weights())
    return made.train()


def run(folder: str, names: Sequence[str] = ()) -> dict[str, Any]:
    """In a process: layout -> idiom -> what its script saw, or the error that ended it."""
    process, found = int(os.environ["RANK"]), {}
    jobs: list[tuple[str, int, Mapping[str, Any] | None]] = [
        *((name, world, None) for name, world in PLAIN.items()),
        *((name, world, plugin) for name, (world, plugin) in LAYOUTS.items()),
    ]
    for number, (name, world, plugin) in enumerate(jobs):
        if process >= world:
            continue
        os.environ.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        os.environ.update(RANK=str(process), LOCAL_RANK=str(process))
        store = f"file://{folder}/store_{number}"
        dist.init_process_group("gloo", init_method=store, rank=process, world_size=world)
        found[name] = {one: _one(one, plugin) for one in names or IDIOMS}
        _leave(plugin)
        dist.destroy_process_group()
    return found


def _one(name: str, plugin: Mapping[str, Any] | None) -> Any:
    import accelerate
    from accelerate.state import AcceleratorState, GradientState

    made: list[Any] = []
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {name} {plugin}", flush=True)

    def make(**options: Any) -> Any:
        if plugin is None:
            made.append(accelerate.Accelerator(cpu=True, **options))
        else:
            from shardwright.train import Accelerator, MegatronLMPlugin

            how = {"gradient_clipping": 0, **plugin}
            how["other_megatron_args"] = {"make_vocab_size_divisible_by": 1}
            made.append(Accelerator(megatron_lm_plugin=MegatronLMPlugin(**how), **options))
        return made[-1]

    kit = Kit(make, model, plugin is None, plugin is None or plugin.get("pp_degree", 1) == 1)
    try:
        found = {"seen": IDIOMS[name](kit)}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    found["rank"] = dist.get_rank()
    found["replica"] = made[-1].process_index if made else -1
    for one in made:
        one.free_memory()
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    dist.barrier()
    return found


def _leave(plugin: Mapping[str, Any] | None) -> None:
    if plugin is not None:
        from shardwright.train.accelerate import state

        state.leave()


def everything(folder: Path, names: Sequence[str] = ()) -> dict[str, list[dict[str, Any]]]:
    """For each layout what its ranks found, in their order."""
    found = launch("conformance.ranks:run", 4, folder, str(folder), list(names))
    layouts = [*PLAIN, *LAYOUTS]
    return {name: [rank[name] for rank in found if name in rank] for name in layouts}  # type: ignore[operator, index]
