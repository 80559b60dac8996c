"""The memory that `plan-layout` estimates beside what tests/bench/bench_memory.py measured.

None of these runs was used to fit the estimate.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "bench"))
import bench_memory as bench

# ranks -> of each case of the bench: GiB of max_memory_allocated on the stages, measured on H200
MEASURED: dict[int, list[tuple[float, ...]]] = {
    1: [(24.10,), (20.19,), (24.88,), (29.57,), (36.70,), (17.66,), (14.00,), (7.98,)],
    2: [
        (29.58,), (14.00,), (10.41,), (10.97,), (10.75, 10.69), (11.89, 10.86), (18.95,),
        (18.26, 17.39),
    ],
    4: [
        (10.81, 8.27), (7.48,), (10.35, 8.01, 6.77, 7.05), (12.76,), (14.82,), (6.32, 5.94),
    ],
    8: [(8.28, 6.21)],
}  # fmt: skip
RUNS = [(world, number) for world, found in MEASURED.items() for number in range(len(found))]


@pytest.mark.parametrize(("world", "number"), RUNS)
def test_memory_of_layouts_it_was_not_fitted_to_is_within_a_twentieth(
    world: int, number: int
) -> None:
    found = bench.estimated(*bench.CASES[world][number], world)
    assert [x / 2**30 for x in found] == pytest.approx(MEASURED[world][number], rel=0.05)
