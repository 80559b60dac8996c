"""How a pipeline's stages share work: the bubble, and the most even split of layers."""

from __future__ import annotations

from collections.abc import Sequence


def bubble_share(pp: int, micro_batches: int, chunks: int = 1) -> float:
    """The part of a step in which a stage of an even pipeline waits: (p-1) / (v m + p-1).

    Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using
    Megatron-LM", section 2.2, there over the ideal time, here over the whole.
    """
    return (pp - 1) / (chunks * micro_batches + pp - 1)


def heaviest(layers: Sequence[int], head: float) -> float:
    """Work of the heaviest stage in layers; the last one has the output layer, worth ``head``."""
    return max(*layers[:-1], layers[-1] + head)


def balanced(layers: int, pp: int, head: float) -> tuple[int, ...]:
    """Layers of each stage such that the heaviest stage is as light as whole layers allow."""

    def split(last: int) -> tuple[int, ...]:
        each, more = divmod(layers - last, pp - 1)
        return (*(each + (i < more) for i in range(pp - 1)), last)

    return min(
        (split(last) for last in range(layers - pp + 1, 0, -1)),
        key=lambda found: heaviest(found, head),
    )


def even_split(layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each stage, as even as whole layers allow."""
    each, more = divmod(layers, pp)
    return tuple(each + (i < more) for i in range(pp))
