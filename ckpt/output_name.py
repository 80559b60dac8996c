"""The path of an output: as the user typed it, or with a name made from the source's."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from .checkpoint.types import Checkpoint
from .errors import CheckpointError
from .formats.native.names import NAME as SHARDS
from .model.mesh import Mesh
from .model.target import Target
from .move.storage import StoragePath, Where, storage_path

if TYPE_CHECKING:
    from .formats.writing import Writer


def absolute(output: str | Path) -> Path:
    """The path of an output; a shell does not expand the ~ of ``--output=~/x``."""
    if not str(output):
        raise CheckpointError("--output '': names nothing (an unset variable of the shell?)")
    path = Path(os.path.expanduser(output)).absolute()
    if ".." not in path.parts:
        return path
    # a/b/../c is a/c, and b need not be there; the last part may be a link that is replaced
    return Path(storage_path(path.parent).real()) / path.name if path.name != ".." else path


def default_output(source: Where, ckpt: Checkpoint, target: Target | None, writer: Writer) -> Path:
    """Next to the source, named after it, the layout, and the format if it is new.

    A link gives its own name and place. A model in Hugging Face's cache gives only its name, and
    the output is in the current folder: other tools must not write into the cache.
    """
    named = _as_typed(source, ckpt.path)
    cached = _cached_name(ckpt.path)
    if cached and _cached_name(named):
        stem, folder = cached, Path.cwd()
    else:
        stem, folder = named.name if ckpt.path.is_dir() else named.stem, Path(named.parent)
    axes = _named(target.mesh) if target is not None else ()
    same = writer.TO in (ckpt.format, SHARDS) and target is not None
    kind = "" if same else f"-{writer.TO}"
    return folder / (stem + kind + "".join(f"-{axis}{size}" for axis, size in axes))


def _named(mesh: Mesh) -> tuple[tuple[str, int], ...]:
    """The axes of a mesh, and those of its experts that differ from them."""
    experts = mesh.experts
    if experts is None:
        return mesh.axes
    etp = experts.size("tp")
    more = (("ep", experts.size("ep")), ("etp", etp))
    return (*mesh.axes, *more[: 1 if etp == mesh.size("tp") else 2])


def _as_typed(source: Where, found: StoragePath) -> StoragePath:
    """The path of the checkpoint ``found`` by way of the links that the user named.

    ``source`` may be a save folder, in which a pointer led on to the checkpoint.
    """
    typed = storage_path(source)
    if typed.storage is not found.storage or ".." in typed.pure.parts:
        return found
    top = typed.real()
    if top != found and top not in found.parents:
        return found
    local = typed.at(str(Path(typed.pure).absolute()))
    return local / found.relative_to(top)


def _cached_name(path: StoragePath) -> str:
    """What Hugging Face's cache calls the model that a path below it belongs to; empty outside."""
    for repo, kind in pairwise(path.pure.parts):
        if repo.startswith("models--") and kind in ("snapshots", "blobs"):
            return repo.rpartition("--")[2]
    return ""
