"""States of registered objects: what is saved is loaded again, and what could not be is refused."""

from __future__ import annotations

import datetime as dt
import math
import random
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import numpy as np
import pytest
import torch

from shardwright.train.checkpoint import registered
from shardwright.train.errors import TrainError

BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
VALUES = {
    "numbers": [1, 2.5, True, None, 1j, 10**40, -0.0],
    "texts": ("a", b"b", bytearray(b"c")),
    "tensor": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "sets": [{1, "a"}, frozenset({(1, 2)})],
    "ordered": OrderedDict(b=1, a=2),
    "counter": Counter("abca"),
    "default": defaultdict(list, {"a": [np.float32(1.5)]}),
    "int keys": {1: "a", (2, 3): "b", None: "c"},
    "deque": deque([1, np.int64(2), dt.date(2024, 2, 29)], maxlen=5),
    "endless deque": deque([[]]),
    "datetime": dt.datetime(2024, 10, 27, 2, 30, 1, 5, tzinfo=BERLIN, fold=1),
    "offset": dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=5, minutes=30))),
    "plain time": dt.time(23, 59, 59, 999_999),
    "delta": -dt.timedelta(days=3, microseconds=1),
    "decimal": [Decimal("1.10"), Fraction(1, 3), UUID(int=7), range(3, 9, 2)],
    "path": Path("/a/b"),
    "random": random.Random(3).getstate(),
    "numpy random": np.random.RandomState(3).get_state(),
    "generator": np.random.default_rng(3).bit_generator.state,
    "arrays": [
        np.arange(6, dtype=">i2").reshape(3, 2)[:, ::-1],
        np.array(["a", "bcd"]),
        np.array([b"x"]),
        np.array(["2024-01-01"], dtype="datetime64[D]"),
        np.zeros((0, 3), np.complex64),
        np.array(5.0),
    ],
    "scalars": [np.float16(1.5), np.bool_(True), np.datetime64("2024-01-01T00:00"), np.str_("u")],
    "tagged": {registered._KIND: "datetime", "value": "not one"},
    "inf": [math.inf, -math.inf],
}


def same(one: object, other: object) -> bool:
    """Equal in value and type, to the last leaf."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == other.dtype and one.shape == other.shape and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_as_it_was(name, tmp_path):
    registered.write(tmp_path / "x", {"value": VALUES[name]}, "object 0")
    found = registered.read(tmp_path / "x")["value"]
    assert same(found, VALUES[name]), found
    if isinstance(VALUES[name], deque):
        assert found.maxlen == VALUES[name].maxlen
    if isinstance(VALUES[name], defaultdict):
        assert found["new"] == []
    if name == "datetime":
        assert (found.fold, found.utcoffset()) == (1, dt.timedelta(hours=1))


class Own(dict):
    """A class of a script's."""


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (SimpleNamespace(a=1), "object 0.deep[1] is a types.SimpleNamespace"),
        (Own(), "object 0.deep[1] is a test_registered.Own"),
        (print, "builtin_function_or_method"),
        (np.array([object()]), "object 0.deep[1] is a NumPy array of object"),
        (np.zeros(2, [("a", "i4")]), "NumPy array of"),
        (defaultdict(lambda: 3), "a function of the script's"),
        (dt.datetime(2024, 1, 1, tzinfo=type("Z", (dt.tzinfo,), {})()), "time zone is a Z"),
    ],
)
def test_what_could_not_be_loaded_is_refused_when_it_is_saved(value, said, tmp_path):
    with pytest.raises(TrainError) as error:
        registered.write(tmp_path / "x", {"deep": [1, value], "also": {1: Own()}}, "object 0")
    assert said in str(error.value)
    assert "object 0.also.1" in str(error.value)
    assert not (tmp_path / "x").exists()


def test_what_an_older_release_wrote_is_read(tmp_path):
    state = {"count": 3, "tensor": torch.ones(2), "nested": [{"a": (1,)}]}
    torch.save(state, tmp_path / "x")
    assert same(registered.read(tmp_path / "x"), state)


def test_a_file_that_would_run_code_or_is_of_an_unknown_kind_is_refused(tmp_path):
    torch.save({"x": Own()}, tmp_path / "x")
    with pytest.raises(TrainError, match="cannot be read"):
        registered.read(tmp_path / "x")
    for kind, value in (("later", 1), ("array", ("|O", (1,), b"12345678")), ("datetime", 3)):
        torch.save({registered._KIND: kind, "value": value}, tmp_path / "x")
        with pytest.raises(TrainError, match="cannot be read"):
            registered.read(tmp_path / "x")
