"""What one rank holds of a model and its optimizer, as live tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from shardwright.ckpt.model.dtypes import FROM_TORCH
from shardwright.ckpt.model.family import Model
from shardwright.ckpt.model.manifest import is_padding
from shardwright.ckpt.model.mesh import Coord, Mesh
from shardwright.ckpt.model.placement import Placement
from shardwright.ckpt.model.target import Target
from shardwright.ckpt.move.live import LiveTensor

from ..core.engine import Engine
from ..core.layout import Place, mesh_of
from ..core.optim import OptimizerView

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of this rank as a checkpoint names it, and its memory."""

    live: LiveTensor
    tensor: torch.Tensor  # contiguous, on the training device


@dataclass(slots=True)
class RankState:
    """What one rank holds of a model and its optimizer."""

    model: Model
    mesh: Mesh  # tp and pp
    place: Place  # of this rank
    named: Mapping[str, torch.nn.Parameter]  # stored name -> parameter
    optimizer: OptimizerView | None
    sharded: bool  # the optimizer is cut over dp
    vocab_multiple: int
    control: dist.ProcessGroup | None  # gloo, for agreement on saves
    settle: Callable[[], None] = lambda: None  # makes every rank's weights those of the last step
    stream: bool = False  # the model draws random numbers in `rng.model_stream`
    placement: Placement = field(init=False)

    @classmethod
    def of(cls, engine: Engine) -> RankState:
        """What the engine of this rank holds."""
        p, options = engine.parallel, engine.options
        return cls(
            model=engine.model,
            mesh=mesh_of(engine.model, engine.layout),
            place=p.place,
            named=engine.named,
            optimizer=engine.view,
            sharded=options.distributed_optimizer and p.dp > 1,
            vocab_multiple=engine.model_options.vocab_multiple,
            control=p.control_group,
            settle=engine.settle,
        )

    def __post_init__(self) -> None:
        self.placement = Placement.written(self.model, self.mesh, self.vocab_multiple)

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.place.dp

    @property
    def dp_rank(self) -> int:
        """This rank's place among them."""
        return self.place.dp_rank

    @property
    def coord(self) -> Coord:
        """This rank's place in the mesh."""
        return self.place.coord

    @property
    def rank(self) -> int:
        """Of the whole world."""
        return self.place.rank

    def saves(self, names: Iterable[str]) -> bool:
        """Whether this rank writes the file of these stored tensors, whose owner is one rank."""
        owners = {self.place.owner(name) for name in names} or {self.place.owner("")}
        assert len(owners) == 1, f"one file, several owners: {owners}"
        return owners == {self.rank}

    def weights(self) -> list[Held]:
        """The weights, in row order."""
        return [self._held("", placed.name, p.data) for placed, p in self._rows()]

    def frozen(self) -> list[str]:
        """The logical weights of this rank that are not trained, so have no optimizer state."""
        return [
            part
            for placed, param in self._rows()
            if not param.requires_grad
            for part in placed.parts
            if not is_padding(part)
        ]

    def moments(self) -> list[Held]:
        """Masters and moments that this rank holds, whole or in ranges."""
        if self.optimizer is None:
            return []
        found = [
            self._held(slot.state, placed.name, slot.tensor, slot.start, slot.stop)
            for placed, param in self._rows()
            for slot in self.optimizer.slots(param)
        ]
        return sorted(found, key=lambda held: held.live.state)

    def bytes_to_save(self, weights_only: bool) -> list[int]:
        """The sizes of the tensors that this rank saves, in no set order."""
        rows = [(placed.name, param) for placed, param in self._rows()]
        owned = [param for name, param in rows if self.place.owns(name)]
        found = [p.numel() * p.element_size() for p in owned]
        if self.optimizer is None or weights_only:
            return found
        stepped = [param for _, param in rows] if self.sharded else owned
        return found + [size for param in stepped for size in self.optimizer.sizes(param)]

    def _rows(self) -> list[tuple[Any, torch.nn.Parameter]]:
        rows = self.placement.placed[self.coord]
        lacking = [p.name for p in rows if p.name not in self.named]
        surplus = set(self.named) - {p.name for p in rows}
        assert not lacking, f"the model has no {lacking}"
        assert not surplus, f"no row places {surplus}"
        return [(placed, self.named[placed.name]) for placed in rows]

    def _held(
        self, state: str, name: str, tensor: torch.Tensor, start: int = 0, stop: int = -1
    ) -> Held:
        placed = self.placement.find(self.coord, name)
        if not self.sharded and stop >= 0:  # cut over a single rank: all of it
            tensor, start, stop = tensor.view(placed.shape), 0, -1
        dtype = FROM_TORCH[str(tensor.dtype).removeprefix("torch.")]
        made = LiveTensor(state, placed, dtype, start, stop)
        assert tuple(tensor.shape) == made.shape, f"{name}: {tuple(tensor.shape)} {made.shape}"
        return Held(made, tensor)

    def target(self, step: int) -> Target:
        """What a checkpoint of this trainer is."""
        return Target(self.model, self.mesh, self.dp, self.sharded, self.vocab_multiple, True, step)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy().data)


def dtype_of(tensor: torch.Tensor) -> str:
    return FROM_TORCH[str(tensor.dtype).removeprefix("torch.")]
