"""How a model is split over ranks, and which rank holds and saves what. Pure: no torch.

Ranks are numbered as megatron numbers them: tp fastest, then data-parallel, then pp.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.ckpt.errors import CheckpointError
from shardwright.ckpt.model.family import Model, build_mesh
from shardwright.ckpt.model.mesh import Coord, Mesh, Stages, named_axes
from shardwright.ckpt.model.pipeline import split_by_counts, split_evenly
from shardwright.ckpt.model.placement import Placement

from ..errors import TrainError


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is split; what the world has beyond tp x pp is data parallelism."""

    tp: int = 1
    pp: int = 1
    sequence_parallel: bool = False  # norms and dropout on 1/tp of the sequence
    pp_layers: tuple[int, ...] | None = None  # layers of each stage; None splits evenly
    virtual_pp_layers: int | None = None  # layers per virtual stage; None: no interleaving

    def __post_init__(self) -> None:
        for axis, size in (("tp", self.tp), ("pp", self.pp)):
            if size < 1:
                raise TrainError(f"{axis}={size}: must be at least 1")
        if self.sequence_parallel and self.tp == 1:
            raise TrainError(
                "sequence parallelism splits the sequence over the tp ranks, and tp is 1; turn it "
                "off or raise tp"
            )
        if self.pp_layers is not None and len(self.pp_layers) != self.pp:
            raise TrainError(
                f"{len(self.pp_layers)} numbers of layers ({self._named()}) for pp={self.pp} "
                "stages; give one for each stage"
            )
        if self.virtual_pp_layers is not None:
            self._check_virtual(self.virtual_pp_layers)

    def _named(self) -> str:
        return ",".join(map(str, self.pp_layers or ()))

    def _check_virtual(self, layers: int) -> None:
        if layers < 1:
            raise TrainError(f"{layers} layers per virtual stage: must be at least 1")
        if self.pp == 1:
            raise TrainError(
                f"{layers} layers per virtual stage: virtual stages need a pipeline, and pp is 1"
            )
        if self.pp_layers is not None:
            raise TrainError(
                f"stages of {self._named()} layers cannot have virtual stages of {layers} layers: "
                "virtual stages are all of one size"
            )

    def data_parallel(self, world_size: int) -> int:
        """Replicas in a world of ``world_size`` ranks; TrainError if it does not divide."""
        ranks = self.tp * self.pp
        if world_size % ranks:
            raise TrainError(
                f"{world_size} processes do not divide into replicas of tp={self.tp} x "
                f"pp={self.pp} = {ranks} ranks; start a multiple of {ranks}"
            )
        return world_size // ranks

    def chunks(self, num_layers: int) -> tuple[tuple[range, ...], ...]:
        """The layers of every virtual stage: ``chunks(n)[pp_rank][virtual_stage]``, 0-based.

        Without interleaving each pipeline rank has one chunk. TrainError or CheckpointError
        if ``num_layers`` cannot be split so.
        """
        if self.virtual_pp_layers is None:
            stages = (
                split_by_counts(num_layers, self.pp_layers)
                if self.pp_layers is not None
                else split_evenly(num_layers, self.pp)
            )
            return tuple((range(s[0], s[-1] + 1) if s else range(0),) for s in stages)
        size, width = self.virtual_pp_layers, self.pp * self.virtual_pp_layers
        if num_layers % width:
            raise TrainError(
                f"{num_layers} layers do not divide over pp={self.pp} with {size} layers per "
                f"virtual stage, which takes multiples of {width}"
            )
        return tuple(
            tuple(range(at, at + size) for at in range(p * size, num_layers, width))
            for p in range(self.pp)
        )

    def owned(self, num_layers: int) -> tuple[tuple[int, ...], ...]:
        """The layers of each pipeline rank, as ``ckpt.mesh.Mesh.owned["pp"]`` holds them."""
        return tuple(tuple(i for chunk in rank for i in chunk) for rank in self.chunks(num_layers))

    def stages(self, num_layers: int) -> Stages:
        """The layers of every virtual stage, as ``ckpt.mesh.Mesh.stages["pp"]`` holds them."""
        return tuple(tuple(map(tuple, rank)) for rank in self.chunks(num_layers))


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank stands: the sizes of the axes, and its place along each."""

    tp: int
    pp: int
    dp: int
    tp_rank: int
    pp_rank: int
    dp_rank: int

    @property
    def rank(self) -> int:
        """Of the whole world."""
        return self._rank(self.dp_rank)

    def _rank(self, dp_rank: int) -> int:
        return self.tp_rank + self.tp * (dp_rank + self.dp * self.pp_rank)

    @property
    def coord(self) -> Coord:
        """The coordinate of the rank files that hold this rank's tensors."""
        return (("tp", self.tp_rank), ("pp", self.pp_rank))

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the output layer, and so the loss."""
        return self.pp_rank == self.pp - 1

    def owner(self, name: str) -> int:
        """The rank that saves this place's copy of a stored tensor.

        Ranks that differ in dp alone hold equal copies of every tensor; the first of them saves.
        """
        return self._rank(0)

    def owns(self, name: str) -> bool:
        """Whether this rank saves its copy of a stored tensor."""
        return self.owner(name) == self.rank


def mesh_of(model: Model, layout: Layout) -> Mesh:
    """The mesh of a layout, with the layers that each stage owns."""
    stages = layout.stages(model.sizes["layer"])
    return Mesh((("tp", layout.tp), ("pp", layout.pp)), {"pp": stages})


def check_layout(model: Model, layout: Layout, vocab_multiple: int) -> None:
    """CheckpointError with every row that this layout cannot split, or with the heads alone."""
    axes = named_axes({"tp": layout.tp, "pp": layout.pp})
    mesh = build_mesh(model, axes, layout.stages(model.sizes["layer"]))
    if model.sizes["n"] % layout.tp:
        raise CheckpointError(
            f"{model.sizes['n']} query heads do not divide over tp={layout.tp}; "
            f"{Placement.way_on(model, mesh)}"
        )
    Placement.written(model, mesh, vocab_multiple)
