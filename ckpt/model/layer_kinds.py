"""Which kind each layer of a model is, as a config says it: dense or moe, full or linear.

A family's table names functions of this module; a row's ``layers`` names a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..errors import CheckpointError

Config = Mapping[str, object]
# (config, layers, origin for messages) -> the kind of each layer
LayerKinds = Callable[[Config, int, str], tuple[str, ...]]


def listed(key: str, names: Mapping[str, str], otherwise: LayerKinds) -> LayerKinds:
    """A list of the config has a word for each layer; ``names`` are the kinds that they mean."""

    def kinds(config: Config, layers: int, origin: str) -> tuple[str, ...]:
        words = config.get(key)
        if words is None:
            return otherwise(config, layers, origin)
        if not isinstance(words, list) or len(words) != layers:
            raise CheckpointError(f"{origin}: {key} is {words!r:.200}, no list of {layers} words")
        odd = [word for word in words if not isinstance(word, str) or word not in names]
        if odd:
            known = ", ".join(names)
            raise CheckpointError(f"{origin}: {key} names {odd[0]!r:.80}; known are {known}")
        return tuple(names[word] for word in words)

    return kinds


def alike(kind: str) -> LayerKinds:
    """All layers are of one kind."""
    return lambda config, layers, origin: (kind,) * layers


def dense_first(config: Config, layers: int, origin: str) -> tuple[str, ...]:
    """DeepSeek: the first layers are dense, and of the rest each n-th has experts."""
    first = _whole(config, "first_k_dense_replace", 0, origin)
    every = _whole(config, "moe_layer_freq", 1, origin, least=1)
    return tuple("moe" if i >= first and i % every == 0 else "dense" for i in range(layers))


def sparse_steps(config: Config, layers: int, origin: str) -> tuple[str, ...]:
    """Qwen: each n-th layer has experts, but for those listed."""
    every = _whole(config, "decoder_sparse_step", 1, origin, least=1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise CheckpointError(f"{origin}: mlp_only_layers is {dense!r:.200}, no list of layers")
    without = set(dense)
    return tuple(
        "moe" if i not in without and (i + 1) % every == 0 else "dense" for i in range(layers)
    )


def each_nth(key: str, every: str) -> LayerKinds:
    """The layers that a list of the config numbers have experts, else each n-th one."""

    def kinds(config: Config, layers: int, origin: str) -> tuple[str, ...]:
        said, step = config.get(key), _whole(config, every, 1, origin, least=1)
        if said is not None and not (
            isinstance(said, list) and all(type(i) is int and 0 <= i < layers for i in said)
        ):
            raise CheckpointError(f"{origin}: {key} is {said!r:.200}, no list of layers")
        moe = set(range(step - 1, layers, step) if said is None else said)
        return tuple("moe" if i in moe else "dense" for i in range(layers))

    return kinds


def _whole(config: Config, key: str, default: int, origin: str, least: int = 0) -> int:
    value = config.get(key)
    if value is None:
        return default
    if type(value) is not int or value < least:
        raise CheckpointError(f"{origin}: {key} is {value!r:.80}, no whole number from {least} on")
    return value
