"""Designs torch_dist checkpoints, one chunk per layer, so that a reader takes single layers.

All tensors are those of one rank (reader.py says why), in one .distcp file: blob after blob,
each a file of ``torch.save``. ``.metadata`` is the pickle that torch.distributed.checkpoint reads,
written without torch.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import PurePath

from ....containers import torch_zip
from ....containers.dcp import COMMON, DESCRIBES, METADATA
from ....containers.pickle_writer import dumps
from ....containers.pickles import Global, Stub
from ....errors import raise_all
from ....model.box import Box
from ....model.chunk_builder import ChunkBuilder
from ....model.design import Design, OutFile
from ....model.dtypes import HALF, TO_TORCH
from ....model.family import build_mesh
from ....model.file_layout import Checksum, FileLayout, Spec
from ....model.layout import default_layout
from ....model.manifest import SLOTS, SideFile
from ....model.placement import Placed, Placement
from ...writing import StoredDtypes, WriteRequest, Written, checksums
from .. import names as megatron_names
from .. import run_state
from ..classic import writer as megatron_out
from ..classic.files import TRACKER, iteration_name

TO = "torch_dist"
TAKES = megatron_out.TAKES
WEIGHTS_ONLY = False
_BLOBS = "__0_0.distcp"
_DESCRIPTION = (
    '{"sharded_backend": "torch_dist", "sharded_backend_version": 1, '
    '"common_backend": "torch", "common_backend_version": 1}'
)
_DCP = "torch.distributed.checkpoint"


def design(request: WriteRequest, root: PurePath) -> Design:
    """Every file of the iteration below ``root``."""
    return _Designer(request, root).design()


def sides(request: WriteRequest, made: Design, files: Written) -> list[SideFile]:
    """What travels along, digests, the description that marks a finished save, and the tracker."""
    kept = [s for s in request.sides if s.name not in (TRACKER, DESCRIBES)]
    step = request.target.step
    return [
        *kept,
        *checksums(files),
        SideFile(f"{iteration_name(step)}/{DESCRIBES}", text=_DESCRIPTION),
        SideFile(TRACKER, text="release" if step is None else str(step)),
    ]


class _Designer:
    """Collects blobs, and what ``.metadata`` says of them."""

    def __init__(self, request: WriteRequest, root: PurePath) -> None:
        self.request, self.target = request, request.target
        self.classic = megatron_out.Designer(request, root)  # args, groups and padding are its
        self.states = self.classic.states
        self.folder = root / iteration_name(self.target.step)
        model = self.target.model
        one = build_mesh(model, (("tp", 1), ("pp", 1)))
        layout = {**default_layout(model.family), "glu": "flat"}
        here = Placement.of(model, one, layout, self.classic.here.padded)
        self.rows = [row for rows in here.placed.values() for row in rows]
        self.builder, self.dtypes = ChunkBuilder(here), StoredDtypes(request.metas)
        freq = self.classic.args.get("moe_layer_freq", 1)
        self.stacked = freq in (None, 1)  # else keys number the layers
        self.parts: list[FileLayout] = []  # of the blobs' file, with offsets from its start
        self.at = 0
        self.table: dict[str, Stub] = {}  # state_dict_metadata
        self.chunks: dict[str, list[Stub]] = {}
        self.places: dict[Stub, Stub] = {}  # storage_data

    def design(self) -> Design:
        for row in self.rows:
            dtype = self.dtypes.of(row, "") or "F32"
            self._tensor("", row, dtype, "")
            for state in self._kinds() if row.trained else ():
                self._state(state, row, dtype)
        for row in sorted(self.rows, key=lambda row: dict(row.numbers).get("layer", -1)):
            self._extra_state(row)
        raise_all(self.dtypes.faults, "these tensors cannot be packed")
        files = [
            OutFile(str(self.folder / _BLOBS), self._joined()),
            OutFile(str(self.folder / COMMON), torch_zip.layout_tree(self._common())),
            OutFile(str(self.folder / METADATA), _whole(self._metadata())),
        ]
        notes = [*self.classic.notes, self.classic.contents()]  # args name what it is not asked for
        return Design(files, self.builder.manifest(), 0, notes)

    # --- blobs -------------------------------------------------------------------------------

    def _kinds(self) -> list[str]:
        """Optimizer states to write: megatron-core's distributed optimizer asks for masters of
        a model that is all fp32 as well, and fails where they are missing.
        """
        needed = {*self.states, *(("master",) if self.states and self.target.sharded else ())}
        return [s for s in ("master", *SLOTS) if s in needed]

    def _state(self, state: str, row: Placed, weight: str) -> None:
        """Optimizer state; the distributed optimizer has masters of fp32 weights too."""
        have = self.dtypes.of(row, state)
        key = state
        if state == "master":
            key = "param" if self.target.sharded else "fp32_param"
            if weight == "F32":
                if self.target.sharded:
                    self._tensor(key, row, "F32", "")
                return
        if have is not None:
            self._tensor(key, row, have, state)

    def _tensor(self, key: str, row: Placed, dtype: str, state: str) -> None:
        """A stored tensor, or one layer of a stacked one, as a blob of its own."""
        name, lead = self._key(row)
        box = Box(
            (*(at for at, _ in lead), *(0 for _ in row.shape)), (*(1 for _ in lead), *row.shape)
        )
        whole = (*(count for _, count in lead), *row.shape)
        fqn = f"optimizer.state.{key}.{name}" if key else name
        start = self._blob(torch_zip.layout_tree(Spec("tensor", dtype, box.sizes)))
        if fqn not in self.table:
            self.chunks[fqn] = []
            self.table[fqn] = _storage(whole, dtype, self.chunks[fqn])
        self.chunks[fqn].append(
            Stub(f"{_DCP}.metadata", "ChunkStorageMetadata", (),
                 {"offsets": _size(box.offsets), "sizes": _size(box.sizes)})
        )  # fmt: skip
        self._place(fqn, box.offsets, start)
        offset = self.parts[-1].offsets["tensor"]
        self.builder.add(state, row, str(self.folder / _BLOBS), offset, dtype)

    def _key(self, row: Placed) -> tuple[str, list[tuple[int, int]]]:
        """The key of a stored tensor, and (place, size) of each dim that stacks layers, experts.

        Megatron-LM's local layers have the keys of TransformerEngine's dense ones, but for latent
        attention.
        """
        classic, numbers = self.classic, dict(row.numbers)
        name = row.name
        if classic.fused:
            moe = classic.has_experts(row)
            name = megatron_names.fused(name, moe=moe, latent=classic.latent)
        elif not classic.latent:
            name = megatron_names.fused(name)
        lead = []
        sizes = self.target.model.sizes
        if "layer" in numbers and self.stacked:
            name = name.replace(f"decoder.layers.{numbers['layer']}.", "decoder.layers.", 1)
            lead.append((numbers["layer"], sizes["layer"]))
        if "expert" in numbers:
            name = name.replace(f".local_experts.{numbers['expert']}.", ".experts.", 1)
            lead.append((numbers["expert"], sizes["expert"]))
        return name, lead

    def _extra_state(self, row: Placed) -> None:
        """The local spec's empty extra state of a linear layer."""
        name, lead = self._key(row)
        module, _, kind = name.rpartition(".")
        if kind != "weight" or module.rpartition(".")[2] not in megatron_out.LINEAR_OF_LAYERS:
            return
        at, of = (".".join(str(pair[i]) for pair in lead) for i in (0, 1))
        self._object(f"{module}._extra_state/shard_{at or 0}_{of or 1}")

    def _object(self, name: str) -> None:
        """An object that holds nothing."""
        start = self._blob(torch_zip.layout_tree([None]))
        self.table[name] = Stub(f"{_DCP}.metadata", "BytesStorageMetadata", (), {})
        self._place(name, None, start)

    def _blob(self, made: FileLayout) -> int:
        start = self.at
        self.parts.append(_shifted(made, start))
        self.at += made.size_bytes
        return start

    def _place(self, fqn: str, offset: tuple[int, ...] | None, start: int) -> None:
        index = {"fqn": fqn, "offset": None if offset is None else _size(offset), "index": None}
        info = {"relative_path": _BLOBS, "offset": start, "length": self.at - start}
        self.places[Stub(f"{_DCP}.metadata", "MetadataIndex", (), index)] = Stub(
            f"{_DCP}.filesystem", "_StorageInfo", (), info
        )

    def _joined(self) -> FileLayout:
        fixed = tuple(row for part in self.parts for row in part.fixed)
        checksums = tuple(row for part in self.parts for row in part.checksums)
        return FileLayout(self.at, {}, fixed, checksums)

    # --- what describes them -----------------------------------------------------------------

    def _metadata(self) -> bytes:
        meta: dict[str, object] = {
            "checkpoint_id": None,
            "save_id": None,
            "load_id": None,
            "modules": [],
        }
        table = {
            "state_dict_metadata": self.table,
            "planner_data": None,
            "storage_data": self.places,
            "storage_meta": Stub(f"{_DCP}.metadata", "StorageMeta", (), meta),
        }
        return dumps(Stub(f"{_DCP}.metadata", "Metadata", (), table))

    def _common(self) -> dict[str, object]:
        args = {**self.classic.args, "ckpt_format": "torch_dist"}
        content: dict[str, object] = {
            "singleton_local_shards": False, "chained_optim_avoid_prefix": True,
        }  # fmt: skip
        tree: dict[str, object] = {
            "args": Stub("argparse", "Namespace", (), args),
            "checkpoint_version": 3.0,
            "iteration": self.target.step or 0,
            **run_state.operations(self.classic.state),
            "content_metadata": content,
        }
        if self.states:
            tree |= self.classic.schedulers
            if self.target.sharded:
                content["distrib_optim_sharding_type"] = "fully_reshardable"
            tree["optimizer"] = self._optimizer()
        return tree

    def _optimizer(self) -> object:
        """Hyperparameters and the step; what is sharded lies in blobs.

        Where experts are spread over ranks they have an optimizer of their own.
        """
        chain = self.classic.chain
        made = [self._one_optimizer(experts) for experts in chain]
        return made[0] if len(chain) == 1 else dict(enumerate(made))

    def _one_optimizer(self, experts: bool | None) -> dict[str, object]:
        if self.target.sharded:
            return {
                **self.classic.distributed_groups(experts),
                "param_state_sharding_type": "fully_reshardable",
            }
        groups, step, step_in = self.classic.groups(experts)
        state: dict[str, object] = {}
        for group in groups:
            group.pop("params", None)
            megatron_out.put_step(group, step, step_in)
        if step is not None and step_in == "state":
            state["common_step"] = torch_zip.Known("F32", (), struct.pack("<f", step))
        inner: dict[str, object] = {"state": state, "param_groups": groups}
        half = any(self.dtypes.of(row, "") in HALF for row in self.rows if row.trained)
        return {"optimizer": inner, **self.classic.scaler()} if half else inner


def _size(shape: tuple[int, ...]) -> Stub:
    return Stub("torch", "Size", (shape,))


def _storage(shape: tuple[int, ...], dtype: str, chunks: list[Stub]) -> Stub:
    """TensorStorageMetadata; properties as torch's own __getstate__ gives them."""
    properties = (
        Global("torch", TO_TORCH[dtype]),
        Stub("torch.serialization", "_get_layout", ("torch.strided",)),
        False,  # requires_grad
        Stub(f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING", (0,)),  # contiguous
        False,  # pin_memory
    )
    made = Stub(f"{_DCP}.metadata", "TensorProperties", (), properties)
    table = {"properties": made, "size": _size(shape), "chunks": chunks}
    return Stub(f"{_DCP}.metadata", "TensorStorageMetadata", (), table)


def _shifted(made: FileLayout, by: int) -> FileLayout:
    """The same file from byte ``by`` of another on."""
    offsets: Mapping[str, int] = {name: at + by for name, at in made.offsets.items()}
    checksums = tuple(
        Checksum(c.offset_bytes + by, c.length_bytes, tuple(s + by for s in c.slots))
        for c in made.checksums
    )
    fixed = tuple((at + by, data) for at, data in made.fixed)
    return FileLayout(made.size_bytes, dict(offsets), fixed, checksums)


def _whole(data: bytes) -> FileLayout:
    return FileLayout(len(data), {}, ((0, data),))
