"""A run at tp x pp x dp behaves like plain Accelerate on dp processes, idiom by idiom.

`make test-accelerate ACCELERATE=1.6.0` runs them with another release of Accelerate.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from conformance.idioms import IDIOMS, NEEDS_THE_GRAPH
from conformance.ranks import LAYOUTS, everything, replicas

CLOSE = 1e-5
Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What every script saw on every layout."""
    return everything(tmp_path_factory.mktemp("conformance"))


def _seen(rank: dict[str, Any], name: str) -> dict[str, Any]:
    one = rank[name]
    assert "seen" in one, one.get("trace", one.get("error"))
    return one["seen"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [n for n in IDIOMS if n not in NEEDS_THE_GRAPH])
def test_a_script_sees_what_it_sees_on_data_parallel_processes(
    name: str, layout: str, ran: Found
) -> None:
    plain = [_seen(rank, name) for rank in ran[f"plain {replicas(layout)}"]]
    for rank in ran[layout]:
        found, expected = _seen(rank, name), plain[rank[name]["replica"]]
        _compare(found, expected)
    if "order" in plain[0]:  # one process's on every layout
        (alone,) = [_seen(rank, name) for rank in ran["plain 1"]]
        for rank in ran[layout]:
            flat = [[*chain(*epoch)] for epoch in _seen(rank, name)["order"]]
            assert flat == [[*chain(*epoch)] for epoch in alone["order"]]
    if "acted" in plain[0]:  # the first rank of a replica acts, its peers do not
        _check_actors(name, ran[layout], plain)


def _compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key in found.keys() & {"losses", "rates", "norms", "last"}:
        assert found[key] == pytest.approx(expected[key], abs=CLOSE), key
    if "same" in found:
        assert found["same"] == expected["same"]
    if "weights" in found:
        assert found["weights"].keys() == expected["weights"].keys()
        for fqn, tensor in found["weights"].items():
            torch.testing.assert_close(tensor, expected["weights"][fqn], atol=CLOSE, rtol=0)


def _check_actors(name: str, ranks: list[dict[str, Any]], plain: list[dict[str, Any]]) -> None:
    leaders: set[int] = set()
    for rank in ranks:
        replica = rank[name]["replica"]
        acted = _seen(rank, name)["acted"]
        if replica not in leaders:
            leaders.add(replica)
            assert acted == plain[replica]["acted"]
        else:
            assert not any(value for value in acted.values()), acted


@pytest.mark.parametrize(
    "layout", [name for name, (_, p) in LAYOUTS.items() if p != {"pp_degree": 2}]
)
@pytest.mark.parametrize("name", NEEDS_THE_GRAPH)
def test_any_function_of_loss_and_logits_works_where_the_graph_is_kept(
    name: str, layout: str, ran: Found
) -> None:
    plain = [_seen(rank, name) for rank in ran[f"plain {replicas(layout)}"]]
    for rank in ran[layout]:
        _compare(_seen(rank, name), plain[rank[name]["replica"]])


@pytest.mark.parametrize("name", NEEDS_THE_GRAPH)
def test_what_a_pipeline_cannot_scale_is_refused_by_name(name: str, ran: Found) -> None:
    for rank in ran["pp2"]:
        assert rank[name]["error"].startswith("TrainError: ")
        assert NEEDS_THE_GRAPH[name] in rank[name]["error"]
