"""The ranks of one data-parallel replica: the first reads and decides, its peers receive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate.utils.operations import recursively_apply

from ..core.process import Parallel, gloo_group
from ..errors import TrainError

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Replica:
    """This rank's replica, and the first ranks of all replicas."""

    rank: int
    leaders: tuple[int, ...]  # the first rank of each replica
    leader: int  # that of this rank's
    peers: dist.ProcessGroup | None  # the ranks of the replica, over gloo; None for one rank
    council: dist.ProcessGroup | None  # the leaders, over gloo; None for one, and on their peers

    @classmethod
    def of(cls, p: Parallel) -> Replica:
        """Makes the groups; every rank calls it."""
        leaders = tuple(p.tp * replica for replica in range(p.dp))
        every = [
            [tp + p.tp * (replica + p.dp * pp) for pp in range(p.pp) for tp in range(p.tp)]
            for replica in range(p.dp)
        ]
        return cls(p.rank, leaders, leaders[p.dp_rank], gloo_group(every), gloo_group([leaders]))

    @property
    def is_leader(self) -> bool:
        """Whether this rank reads for the others of its replica."""
        return self.rank == self.leader

    def share(self, made: Callable[[], _T]) -> _T:
        """What ``made`` returns on the leader, on every rank of the replica; tensors on the CPU.

        An error of the leader is raised there as it is, and on its peers as a TrainError.
        """
        if self.peers is None:
            return made()
        box: list[Any] = [None, ""]
        if self.is_leader:
            try:
                box[0] = made()
            except BaseException as error:
                self._send([None, f"{type(error).__name__}: {error}"])
                raise
        self._send(box)
        if box[1]:
            raise TrainError(f"rank {self.leader}, which reads for this one, failed: {box[1]}")
        return box[0]

    def _send(self, box: list[Any]) -> None:
        sent = recursively_apply(_on_cpu, box) if self.is_leader else box
        try:
            dist.broadcast_object_list(sent, self.leader, group=self.peers)
        except (AttributeError, TypeError) as error:  # pickle's
            raise TrainError(
                f"a batch cannot be handed to the other ranks of its replica: {error}; let the "
                "collate function return tensors, numbers and texts"
            ) from error

    def agreed(self, values: list[_T]) -> list[_T]:
        """Among leaders: what the first of all has."""
        if self.council is None:
            return values
        box: list[Any] = [values]
        dist.broadcast_object_list(box, self.leaders[0], group=self.council)
        return box[0]


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()
