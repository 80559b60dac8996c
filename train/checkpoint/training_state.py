"""What a checkpoint holds besides its tensors, as JSON: one schema for both front ends.

    state_version that of ckpt/checkpoint/state.py; older checkpoints have none
    schedule      train-ckpt: one table, {style, lr, min_lr, warmup_steps, decay_steps, num_steps}
                  Accelerator: a list with the state of each scheduler object, in their order
    param_groups  a table for each group of the optimizer: step, lr, weight_decay, betas, ...
    data          train-ckpt: the cursor of its samples, {data, seed, seq_length, consumed, ...}
                  Accelerator: {loaders: [a cursor for each prepared loader]}

Each front end reads what it can use of the other's: both read step and param_groups; a schedule or
a data cursor of the other kind is ignored, with a line. Numbers that JSON does not have (inf, nan:
ReduceLROnPlateau begins with one) are ``{"float": "inf"}``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..errors import raise_faults

_FLOAT = "float"
_NAMES = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def to_json(state: Mapping[str, object]) -> dict[str, Any]:
    """A state as JSON values; TrainError names what cannot be one."""
    faults: list[str] = []
    made = {key: _encode(value, key, faults) for key, value in state.items()}
    raise_faults("this state cannot be saved", faults)
    return made


def _encode(value: object, where: str, faults: list[str]) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: str(value)}
    if isinstance(value, Mapping):
        faults += [
            f"{where}: the key {key!r} is a {type(key).__name__}, JSON has only texts as keys"
            for key in value
            if not isinstance(key, str)
        ]
        return {str(k): _encode(v, f"{where}.{k}", faults) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(v, f"{where}[{i}]", faults) for i, v in enumerate(value)]
    faults.append(f"{where} is a {type(value).__name__}, which JSON cannot hold")
    return None


def from_json(state: Mapping[str, object]) -> dict[str, Any]:
    """The state that ``to_json`` was given, as a reader found it; readers refuse later versions."""
    return {key: _decode(value) for key, value in state.items()}


def _decode(value: object) -> Any:
    if isinstance(value, Mapping):
        if set(value) == {_FLOAT} and value[_FLOAT] in _NAMES:
            return _NAMES[str(value[_FLOAT])]
        return {key: _decode(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_decode(v) for v in value]
    return value
