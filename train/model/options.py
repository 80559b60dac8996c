"""How a model is computed. Pure: no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import TrainError

_PRECISION = ("fp32", "bf16")
_RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a model is computed; none of it changes what is stored."""

    precision: Literal["fp32", "bf16"] = "fp32"  # of weights and activations
    recompute: Literal["none", "selective", "full"] = "none"  # selective: core attention only
    recompute_method: str | None = None  # full: "uniform" (default) or "block"
    recompute_num_layers: int | None = None  # full: layers per unit, or per stage with "block"
    attention_dropout: float | None = None  # None: the config's
    hidden_dropout: float | None = None  # of residual branches and embedding; None: the config's
    fused_cross_entropy: bool = False
    deterministic: bool = False  # bit-equal repeats; turns on torch.use_deterministic_algorithms
    vocab_multiple: int = 128  # vocabulary rows are padded to a multiple of this times tp
    distribute_saved_activations: bool = False  # full: each tp rank keeps 1/tp of the inputs
    fusions: bool = True  # on a GPU: fused kernels where megatron-core has many small ones
    # on a GPU: replay layers as CUDA graphs; None where launches, not kernels, take the time
    cuda_graphs: bool | None = None

    def __post_init__(self) -> None:
        for name, value, known in (
            ("precision", self.precision, _PRECISION),
            ("recompute", self.recompute, _RECOMPUTE),
            ("recompute_method", self.recompute_method, (None, "uniform", "block")),
        ):
            if value not in known:
                raise TrainError(f"{name}={value!r}: must be one of {', '.join(map(str, known))}")
        for name, number in (
            ("vocab_multiple", self.vocab_multiple),
            ("recompute_num_layers", self.recompute_num_layers),
        ):
            if number is not None and number < 1:
                raise TrainError(f"{name}={number}: must be at least 1")
        if self.recompute != "full":
            for name in ("recompute_method", "recompute_num_layers"):
                if (value := getattr(self, name)) is not None:
                    raise TrainError(f"{name}={value!r}: recompute is {self.recompute}, not full")
            if self.distribute_saved_activations:
                raise TrainError(
                    f"distribute_saved_activations: recompute is {self.recompute}, not full"
                )
        if self.fused_cross_entropy and self.precision == "fp32":
            raise TrainError(
                "megatron-core's fused cross entropy rounds its gradient to bfloat16; use it with "
                "precision bf16"
            )
