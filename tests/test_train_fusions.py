"""What a GPU run computes differently, on CPU: fused functions, recorded layers, host memory.

The functions of ``train/patches/fusions.py`` run uncompiled here, and a stand-in takes the place of
CUDA graphs. What only a GPU can show is in test_gpu.py.
"""

from __future__ import annotations

import contextlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_helpers import launch
from train_runs import CALM, CONFIGS, batches

TIED = {**CONFIGS["llama"], "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    """What two ranks found."""
    place = tmp_path_factory.mktemp("ranks")
    return launch("test_train_fusions:ranks", 2, place)[0]  # type: ignore[return-value]


def ranks() -> dict[str, Any]:
    """In each of two ranks."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    made = {"functions": _functions()}
    for name, layout in (
        ("tp2", {"tp": 2}),
        ("tp2 sp", {"tp": 2, "sequence_parallel": True}),
        ("pp2", {"pp": 2}),
        ("dp2", {}),
    ):
        made[name] = {
            kind: _train(layout, **options)
            for kind, options in {
                "plain": {},
                "fused": {"fused": True},
                "recorded": {"recorder": _Recorder},
                "failing": {"recorder": _Failing},
            }.items()
        }
    dist.destroy_process_group()
    return made


# --- fused functions ---------------------------------------------------------------------------


def _functions() -> dict[str, float]:
    """The largest difference of each function and of its gradient from megatron's own."""
    from shardwright.train.core.layout import Layout
    from shardwright.train.core.process import initialize, shutdown
    from shardwright.train.patches import fusions
    from shardwright.train.patches.megatron import import_megatron

    parallel = initialize(Layout(tp=2), seed=1)
    random = torch.Generator().manual_seed(1)
    rope: Any = import_megatron("models.common.embeddings.rope_utils")
    made = {}
    for width in (16, 8):  # of 16 numbers those that are rotated
        x = torch.randn(6, 2, 3, 16, generator=random)
        angles = torch.randn(6, 1, 1, width // 2, generator=random).repeat(1, 1, 1, 2)
        made[f"rotate {width}"] = _difference(
            x,
            lambda x, angles=angles: rope._apply_rotary_pos_emb_bshd(x, angles),
            lambda x, angles=angles: fusions.rotate(x, angles),
        )
    group = import_megatron("parallel_state").get_tensor_model_parallel_group()
    entropy = import_megatron("tensor_parallel").vocab_parallel_cross_entropy
    logits = torch.randn(6, 2, 80, generator=random).chunk(2, -1)[parallel.tp_rank].clone()
    if parallel.tp_rank == 1:
        logits[..., 30:] = -torch.inf  # padded vocabulary
    labels = torch.randint(0, 70, (6, 2), generator=random)
    labels[0, 0] = -100
    made["cross entropy"] = _difference(
        logits,
        lambda x: entropy(x.clone(), labels),
        lambda x: fusions.cross_entropy(x, labels, group),
    )
    tensors = [torch.randn(5, 3, generator=random), torch.randn(7, generator=random)]
    norm, _ = fusions.l2_norm(0, None, [tensors], False)
    whole = torch.cat([t.flatten() for t in tensors])
    made["norm"] = float((norm - whole.norm()).abs().max())
    copies = [t.clone() for t in tensors]
    fusions.scale(0, None, [copies, copies], 0.5)
    fusions.scale(0, None, [tensors, tensors], 0.5)
    made["scale"] = max(
        float((a - b).abs().max()) for a, b in zip(copies, tensors, strict=True)
    ) + float((torch.cat([t.flatten() for t in copies]) - whole * 0.5).abs().max())
    for kind in (torch.float32, torch.bfloat16):
        x, gradient = (torch.randn(4, n, generator=random).to(kind) for n in (3, 5))
        total = torch.ones(5, 3)
        fusions.accumulate(x, gradient, total)
        made[f"accumulate {kind}"] = float((total - 1 - gradient.t() @ x).abs().max())
    shutdown()
    return made


def _difference(x: torch.Tensor, first, second) -> float:
    results = []
    for function in (first, second):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        weights = torch.linspace(0.5, 1.0, y.numel()).view(y.shape)
        (gradient,) = torch.autograd.grad(y, leaf, weights)
        results += [y.detach(), gradient]
    return max(float((results[i] - results[i + 2]).abs().max()) for i in (0, 1))


def test_fused_functions_are_megatrons(found) -> None:
    for name, difference in found["functions"].items():
        assert difference < 1e-5, name


# --- in training -------------------------------------------------------------------------------


def _train(layout: dict[str, Any], fused: bool = False, recorder: Any = None) -> dict[str, Any]:
    """Five steps, one of them after an evaluation, and one with another number of rows."""
    from shardwright.ckpt.checkpoint.config import model_from
    from shardwright.train.config.schema import OptimizerSettings
    from shardwright.train.core.engine import Engine, EngineOptions
    from shardwright.train.core.layout import Layout
    from shardwright.train.core.process import initialize, shutdown
    from shardwright.train.model import config as model
    from shardwright.train.model.options import ModelOptions
    from shardwright.train.patches import fusions, graphs

    made = Layout(**layout)
    parallel = initialize(made, seed=1)
    plain = model._fusions
    if fused:
        fusions.install()
        model._fusions = lambda said, options: {  # type: ignore[assignment]
            "apply_rope_fusion": True,
            "bias_activation_fusion": True,
            "cross_entropy_fusion_impl": "te",
            "gradient_accumulation_fusion": True,
        }
    options = ModelOptions(precision="bf16", fused_cross_entropy=True, **CALM)  # type: ignore[arg-type]
    engine = Engine(model_from(TIED, "tied"), parallel, made, options, EngineOptions())
    model._fusions = plain
    engine.attach_optimizer(OptimizerSettings(lr=1e-2))
    real = graphs._Recorder, graphs._stand_ins
    _StandIns.original = staticmethod(graphs._stand_ins)
    if recorder is not None:
        graphs._Recorder, graphs._stand_ins = recorder, _StandIns  # type: ignore[assignment, misc]
        engine.graphs = [
            graphs.LayerGraphs(chunk.decoder.layers, made.pp - parallel.pp_rank)
            for chunk in engine.modules
        ]
    rows = batches(259)
    short = [{k: v[:1] for k, v in row.items()} for row in rows]
    result: dict[str, Any] = {"losses": [], "norms": []}
    with contextlib.ExitStack() as stack:
        if recorder is _Failing:
            stack.enter_context(pytest.warns(UserWarning, match="cannot be recorded"))
        for step in range(5):
            if step == 3:
                result["evaluation"] = engine.forward_backward(rows, forward_only=True)[0]
            engine.zero_grad()
            result["losses"].append(engine.forward_backward(short if step == 4 else rows)[0])
            result["norms"].append(engine.step().grad_norm)
    result["weights"] = {name: p.detach().clone() for name, p in engine.named.items()}
    result["recordings"] = [len(made.recordings) for made in engine.graphs]
    graphs._Recorder, graphs._stand_ins = real  # type: ignore[misc]
    shutdown()  # NCCL waits for recordings that hold its communicators: they have to be gone
    result["left"] = sum(len(made.recordings) for made in engine.graphs)
    return result


class _StandIns:
    """The real ones, which can be put in place again while a function runs again."""

    current: _StandIns | None = None
    original: Any = None  # graphs._stand_ins

    def __init__(self, layers) -> None:
        self.layers = layers
        self.real = inspect.unwrap(_StandIns.original)(layers)
        self.before: list[Any] = []
        self.instead: list[Any] = []

    def __enter__(self):
        if not self.before:
            self.before = self._tables()
            made = next(self.real)
            self.instead = self._tables()
            self.made = made
        self._put(self.instead)
        _StandIns.current = self
        return self.made

    def __exit__(self, *error: object) -> None:
        self._put(self.before)

    def _tables(self) -> list[Any]:
        modules = [module for layer in self.layers for module in layer.modules()]
        return [(module._parameters, dict(module._parameters)) for module in modules]

    @staticmethod
    def _put(tables: list[Any]) -> None:
        for table, content in tables:
            table.update(content)


class _Recorder:
    """Runs the function again, where a CUDA graph would run its kernels again."""

    def reset(self) -> None:
        pass

    def record(self, function):
        result, stand_ins = function(), _StandIns.current
        assert stand_ins is not None

        def again() -> None:
            with stand_ins, torch.enable_grad():
                new = function()
            with torch.no_grad():
                result.detach().copy_(new)

        return result, again


class _Failing:
    def reset(self) -> None:
        pass

    def record(self, function):
        raise RuntimeError("nothing can be recorded here")


LAYOUTS = ("tp2", "tp2 sp", "pp2", "dp2")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_training_is_the_plain_one(found, layout) -> None:
    """To the rounding of bf16; the embedding is tied, which shares a gradient buffer."""
    plain, fused = found[layout]["plain"], found[layout]["fused"]
    assert fused["losses"] == pytest.approx(plain["losses"], abs=2e-2)
    assert fused["norms"][:3] == pytest.approx(plain["norms"][:3], rel=2e-2)
    assert plain["losses"][3] < plain["losses"][0] - 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recorded_layers_compute_the_same(found, layout) -> None:
    plain, recorded = found[layout]["plain"], found[layout]["recorded"]
    assert recorded["recordings"] == [2 if layout == "pp2" else 1]  # on the first stage
    assert recorded["left"] == 0
    for key in ("losses", "norms", "evaluation"):
        assert recorded[key] == plain[key], key
    for name, weight in plain["weights"].items():
        assert torch.equal(recorded["weights"][name], weight), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_that_cannot_be_recorded_run_as_before(found, layout) -> None:
    plain, failing = found[layout]["plain"], found[layout]["failing"]
    assert failing["recordings"] == [0]
    assert failing["losses"] == plain["losses"]


# --- host memory -------------------------------------------------------------------------------


def test_host_memory_holds_every_tensor_once(monkeypatch) -> None:
    from shardwright.train.checkpoint import host_memory

    monkeypatch.setattr(host_memory, "_SLAB", 4096)
    monkeypatch.setattr(host_memory, "_LARGE", 512)
    like = [torch.empty(n, dtype=t) for t in (torch.bfloat16, torch.float32) for n in range(1, 400)]
    sizes = [t.numel() * t.element_size() for t in like]
    memory = host_memory.HostMemory(sizes, torch.device("cpu"))
    reserved: set[int] = set()
    for order in (like, like[::-1]):
        memory.clear()
        reserved = {x.data_ptr() for x in [*memory._large, *memory._slabs]}
        taken = [memory.take(t) for t in order]
        for i, tensor in enumerate(taken):
            tensor.fill_(i)
        for i, (tensor, model) in enumerate(zip(taken, order, strict=True)):
            assert tensor.shape == model.shape
            assert tensor.dtype == model.dtype
            assert (tensor == torch.tensor(i).to(model.dtype)).all()
            assert tensor.untyped_storage().data_ptr() in reserved
    extra = memory.take(torch.empty(600))
    assert extra.untyped_storage().data_ptr() not in reserved


def test_a_save_through_host_memory_is_the_plain_one(tmp_path: Path) -> None:
    differs, sizes = launch(  # type: ignore[misc]
        "test_train_fusions:save_twice", 1, tmp_path / "ranks", str(tmp_path)
    )[0]
    assert differs == []
    assert sizes[0] == sizes[1]


def save_twice(place: str) -> tuple[list[str], list[list[int]]]:
    """In one rank: the files that differ, and the sizes that were foretold and that were saved."""
    from shardwright.ckpt.checkpoint.config import model_from
    from shardwright.train.checkpoint import host_memory, save
    from shardwright.train.checkpoint.rank_state import RankState
    from shardwright.train.config.schema import OptimizerSettings
    from shardwright.train.core.engine import Engine, EngineOptions
    from shardwright.train.core.layout import Layout
    from shardwright.train.core.process import initialize
    from shardwright.train.model.options import ModelOptions

    layout = Layout()
    parallel = initialize(layout, seed=1)
    options = ModelOptions(precision="bf16", **CALM)  # type: ignore[arg-type]
    engine = Engine(model_from(TIED, "tied"), parallel, layout, options, EngineOptions())
    engine.attach_optimizer(OptimizerSettings(lr=1e-2))
    held = RankState.of(engine)
    foretold = sorted(held.bytes_to_save(weights_only=False))
    saver = save.Saver(held)
    assert saver.memory is None
    rows = batches(259)
    for name in ("plain", "reserved", "again"):
        if name == "reserved":
            saver.memory = host_memory.HostMemory(foretold, torch.device("cpu"))
        engine.zero_grad()
        if name != "reserved":  # that one saves what the one before saved
            engine.forward_backward(rows)
            engine.step()
        saver.save(Path(place) / name / "checkpoint-1", 1, {})
    saver.wait()
    first, second = (Path(place) / name / "checkpoint-1" for name in ("plain", "reserved"))
    differs = [
        file.name
        for file in first.glob("*.safetensors")
        if file.read_bytes() != (second / file.name).read_bytes()
    ]
    now = [h.tensor.numel() * h.tensor.element_size() for h in held.weights() + held.moments()]
    third = load_file(Path(place) / "again" / "checkpoint-1" / "model_tp_0_pp_0.safetensors")
    for name, parameter in engine.named.items():
        assert torch.equal(third[name], parameter), name
    return differs, [foretold, sorted(now)]
