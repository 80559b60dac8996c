"""Gradients are reduced once, whatever a script's order of calls; norms against plain transformers.

Two ranks run every order in every layout. The learning rate is 0, so that each order starts from
the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import pytest
import torch
from accelerator_jobs import make_model, make_rows
from train_helpers import launch

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "dp2": {},
    "dp2, distributed optimizer": {"use_distributed_optimizer": True},
    "pp2, tied": {"pp_degree": 2, "num_micro_batches": 2},
    "tp2, sequence parallel": {
        "tp_degree": 2, "sequence_parallelism": True, "num_micro_batches": 2
    },
}  # fmt: skip
OVERLAPPED = {
    "use_distributed_optimizer": True, "other_megatron_args": {"overlap_grad_reduce": True}
}  # fmt: skip
ROWS = 4  # of a forward, on all ranks


def batch_of(number: int) -> dict[str, torch.Tensor]:
    """The rows of a script's forward; some labels are ignored, in different numbers."""
    rows = make_rows(3 * ROWS)[number * ROWS : (number + 1) * ROWS]
    return {key: torch.stack([row[key] for row in rows]) for key in ("input_ids", "labels")}


def share_of(number: int, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """A data-parallel rank's rows of a batch."""
    share = ROWS // ranks
    return {k: v[rank * share : (rank + 1) * share] for k, v in batch_of(number).items()}


# --- in the ranks ------------------------------------------------------------------------------


class Script:
    """What a script has after ``prepare``."""

    def __init__(self, plugin: Mapping[str, Any]) -> None:
        from shardwright.train import Accelerator, MegatronLMPlugin

        self.accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(**plugin))
        model = make_model("gpt2")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def forward(self, number: int) -> torch.Tensor:
        """This data-parallel rank's share of a batch; the loss."""
        p = self.accelerator.parallel
        return self.model(**share_of(number, p.dp_rank, p.dp)).loss

    def backward(self, number: int) -> None:
        self.accelerator.backward(self.forward(number))

    def step(self) -> float:
        """The gradient norm that the step saw."""
        self.optimizer.step()
        norm = self.optimizer.last.grad_norm
        self.optimizer.zero_grad()
        return norm

    def clip(self) -> float:
        return float(self.accelerator.clip_grad_norm_(self.model.parameters(), 1e9))


def _one(script: Script) -> float:
    script.backward(0)
    return script.step()


def _two(script: Script) -> float:
    script.backward(0)
    script.backward(1)
    return script.step()


def _three(script: Script) -> float:
    for number in range(3):
        script.backward(number)
    return script.step()


def _clipped(script: Script) -> float:
    script.backward(0)
    script.backward(1)
    norms = [script.clip(), script.clip(), script.step()]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-6)
    return norms[0]


def _evaluated_between(script: Script) -> float:
    script.backward(0)
    script.model.eval()
    assert not script.forward(2).requires_grad
    script.model.train()
    script.backward(1)
    return script.step()


def _not_synchronized(script: Script) -> float:
    with script.accelerator.no_sync(script.model):
        script.backward(0)
    script.backward(1)
    return script.step()


def _without_gradients(script: Script) -> float:
    with torch.no_grad():
        assert not script.forward(2).requires_grad
    script.backward(0)
    with torch.inference_mode():
        script.forward(2)
    return script.step()


def _cleared(script: Script) -> float:
    script.backward(2)
    script.optimizer.zero_grad()
    script.backward(0)
    return script.step()


def _nothing(script: Script) -> float:
    return script.step()


ORDERS: Mapping[str, tuple[Callable[[Script], float], tuple[int, ...]]] = {  # and what counts
    "one forward": (_one, (0,)),
    "two forwards": (_two, (0, 1)),
    "three forwards": (_three, (0, 1, 2)),
    "two forwards, clipped twice": (_clipped, (0, 1)),
    "an evaluation between": (_evaluated_between, (0, 1)),
    "no_sync": (_not_synchronized, (0, 1)),
    "a forward under no_grad": (_without_gradients, (0,)),
    "cleared in between": (_cleared, (0,)),
    "no forward": (_nothing, ()),
}


def _after_the_step(script: Script) -> None:
    script.backward(0)
    script.optimizer.step()
    script.backward(1)
    script.optimizer.step()


def _after_clipping(script: Script) -> None:
    script.backward(0)
    script.clip()
    script.backward(1)


def _no_gradient(script: Script) -> None:
    with torch.no_grad():
        loss = script.forward(0)
    script.accelerator.backward(loss)


REFUSED: Mapping[str, tuple[Callable[[Script], None], str]] = {
    "after the step": (
        _after_the_step,
        "a forward pass in train mode, but the gradients before it are used by the optimizer's "
        "step already; call zero_grad() first",
    ),
    "after clipping": (_after_clipping, "the gradients before it are clipped already"),
    "a loss of no_grad": (_no_gradient, "backward: the loss has no gradients"),
}
# Where a forward runs the schedule at once, it begins anew, and the second step is refused.
OF_SCHEDULE = {
    "after the step": "a second optimizer step, and the gradients of the first were not cleared; "
    "call optimizer.zero_grad() in every step"
}


def in_ranks() -> dict[str, dict[str, Any]]:
    """Layout -> order -> norm, or the message of a refusal."""
    from accelerator_jobs import leave

    from shardwright.train.errors import TrainError

    def message(act: Callable[[], object]) -> str:
        try:
            act()
        except TrainError as error:
            return str(error)
        return "no error"

    torch.distributed.init_process_group("gloo")
    found: dict[str, dict[str, Any]] = {}
    for name, plugin in LAYOUTS.items():
        script = Script(plugin)
        assert script.accelerator.parallel.place.rank == torch.distributed.get_rank()
        found[name] = {order: act(script) for order, (act, _) in ORDERS.items()}
        for order, (act_, _) in REFUSED.items():
            script.optimizer.zero_grad()
            found[name][order] = message(lambda act=act_, script=script: act(script))
        script.optimizer.zero_grad()
        found[name]["afterwards"] = _one(script)
        found[name]["factor"] = float(script.model.engine.config.grad_scale_func(torch.ones(1)))
        script.accelerator.free_memory()
        leave()
    script = Script(OVERLAPPED)
    names = ("one forward", "again", "cleared in between")
    found["overlapped"] = {name: ORDERS.get(name, (_one,))[0](script) for name in names}
    found["overlapped"]["two forwards"] = message(lambda: _two(script))
    script.accelerator.free_memory()
    leave()
    return found


# --- claims ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("gradients")
    return launch("test_gradients:in_ranks", 2, folder)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, tuple[int, ...]], float]:
    """The norm of the summed gradients of some forwards, by transformers alone.

    A key is the number of data-parallel ranks, each with a loss of its own, and the forwards.
    """
    found = {}
    for ranks, batches in product((1, 2), {counted for _, counted in ORDERS.values()}):
        model = make_model("gpt2")
        for number in batches:
            for rank in range(ranks):
                (model(**share_of(number, rank, ranks)).loss / ranks).backward()
        squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
        found[ranks, batches] = float(sum(squares)) ** 0.5
    return found


def replicas(layout: str) -> int:
    return 2 if layout.startswith("dp2") else 1


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_reduced_once_in_every_order_of_calls(
    layout: str, order: str, ran: list[Any], expected: Mapping[Any, float]
) -> None:
    wanted = expected[replicas(layout), ORDERS[order][1]]
    assert [rank[layout][order] for rank in ran] == pytest.approx([wanted] * 2, rel=1e-4)


@pytest.mark.parametrize("order", REFUSED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_orders_that_cannot_be_right_are_refused_on_every_rank(
    layout: str, order: str, ran: list[Any]
) -> None:
    said = REFUSED[order][1]
    if "num_micro_batches" in LAYOUTS[layout]:
        said = OF_SCHEDULE.get(order, said)
    for rank in ran:
        assert said in rank[layout][order]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_goes_on_after_a_refusal(
    layout: str, ran: list[Any], expected: Mapping[Any, float]
) -> None:
    wanted = expected[replicas(layout), (0,)]
    for rank in ran:
        assert rank[layout]["afterwards"] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_layer_adds_to_the_loss_is_divided_by_the_tokens_of_the_batch(
    layout: str, ran: list[Any]
) -> None:
    ranks = replicas(layout)
    for number, rank in enumerate(ran):  # megatron-core scales auxiliary losses by this, once
        counted = int((share_of(0, number % ranks, ranks)["labels"][:, 1:] != -100).sum())
        assert rank[layout]["factor"] == pytest.approx(1 / counted / ranks, rel=1e-6)


def test_overlapped_reduction_takes_one_forward_for_each_step(
    ran: list[Any], expected: Mapping[Any, float]
) -> None:
    for rank in ran:
        found = rank["overlapped"]
        norms = [found[name] for name in ("one forward", "again", "cleared in between")]
        assert norms == pytest.approx([expected[2, (0,)]] * 3, rel=1e-4)
        assert "overlap_grad_reduce" in found["two forwards"]


def test_a_script_of_several_forwards_has_other_gradients_than_of_one(
    expected: Mapping[Any, float],
) -> None:
    for ranks in (1, 2):
        norms = [round(norm, 3) for (of, _), norm in expected.items() if of == ranks]
        assert len(set(norms)) == len(norms)
