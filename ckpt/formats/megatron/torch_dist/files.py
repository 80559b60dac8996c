"""What lies in the folder of a torch_dist iteration beside its blobs, and whether it is one."""

from __future__ import annotations

import re
from dataclasses import replace

from ....checkpoint.json_io import load_json
from ....containers import dcp, pickles, torch_zip
from ....containers.dcp import COMMON, DESCRIBES, METADATA
from ....errors import CheckpointError
from ....model.file_layout import Index
from ....move.storage import StoragePath
from ..classic import files as megatron_files

# where args and the iteration lie since megatron-core 0.20
COMMON_OBJECT = re.compile(r"common_state(/shard_0_\d+)?")


def check_kind(folder: StoragePath) -> None:
    """Only finished saves of the one backend."""
    file = folder / DESCRIBES
    if not file.is_file():
        if (folder / METADATA).exists() and not (folder / COMMON).exists():
            raise CheckpointError(
                f"{folder}: holds {METADATA} and no {COMMON}: a checkpoint of PyTorch's own "
                "(fsdp_dtensor or torch_dcp), which is not read; save it with --ckpt-format "
                "torch_dist"
            )
        raise CheckpointError(
            f"{folder}: an unfinished save ({DESCRIBES}, which is written last, is missing)"
            + (megatron_files.others(folder) or "; name another iteration with --iteration N")
        )
    backend = load_json(file).get("sharded_backend")
    if backend != "torch_dist":
        raise CheckpointError(
            f"{file}: sharded_backend is {backend!r}, which is not read; load it with the "
            "Megatron-LM that wrote it and save it with --ckpt-format torch_dist"
        )


def common(folder: StoragePath, listing: dcp.Listing) -> Index:
    """What belongs to no rank: common.pt, or since megatron-core 0.20 an object in a blob."""
    if (folder / COMMON).is_file():
        return torch_zip.index(folder / COMMON, foreign=True)
    name = next((name for name in listing.objects if COMMON_OBJECT.fullmatch(name)), None)
    if name is None:
        raise CheckpointError(
            f"{folder / COMMON}: is missing, and {METADATA} names no object common_state in its "
            "place: args and iteration of the run are lost; copy the whole iteration again"
        )
    if name in listing.lost:
        raise CheckpointError(f"{listing.lost[name]}; copy the whole iteration again")
    found = dcp.objects(listing.objects[name])
    root = found.extra.get("0")  # of a list of one
    if not isinstance(root, dict):
        raise CheckpointError(f"{found.path}: {name} holds {pickles.short(root)}, no table")
    entries = {key.removeprefix("0."): entry for key, entry in found.entries.items()}
    return replace(found, entries=entries, extra=root)
