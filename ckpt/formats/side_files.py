"""Which files of a folder travel with the weights: all that are neither weights nor ours."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..errors import CheckpointError
from ..model.manifest import SideFile
from ..move.storage import FILE, StoragePath, Where, is_file_name, storage_path

# Weights, optimizer state and their tables, in any framework's spelling. They are what a
# conversion replaces; copying them beside the result would leave two truths in one folder.
_WEIGHTS = re.compile(
    r"(pytorch_model|model|optimizer|consolidated|tf_model|flax_model|rust_model)"
    r"([-_.].*)?\.(bin|safetensors|pt|pth|h5|msgpack|ot|gguf)"
    r"|(pytorch_model|model)\.(bin|safetensors)\.index(\..*)?\.json"
    r"|random_states_\d+\.(safetensors|pkl)"
    r"|checkpoint\.json|checksums\.json"
)


def side_files(where: Where) -> tuple[SideFile, ...]:
    """Every non-weight file below a folder, hidden ones left out, links followed."""
    folder = storage_path(where)
    found = [SideFile(path.relative_to(folder).as_posix(), str(path)) for path in _walk(folder)]
    return tuple(sorted(found, key=lambda f: f.name))


def skipped_links(folder: StoragePath) -> list[str]:
    """A line for each linked folder, which does not travel: links may run in circles."""
    return [
        f"{child}: a linked folder, not copied"
        for _, folders, _ in folder.walk()
        for child in folders
        if not child.name.startswith(".") and child.is_symlink()
    ]


def _walk(folder: StoragePath) -> Iterator[StoragePath]:
    for _, folders, rest in folder.walk():  # does not enter linked folders: no loops
        folders[:] = [child for child in folders if not child.name.startswith(".")]
        for path in rest:
            if path.name.startswith(".") or _WEIGHTS.fullmatch(path.name):
                continue
            found = path.stat()
            if found is None:
                raise CheckpointError(f"{path}: leads to no file")
            if found.kind == FILE:
                yield path


def resolve(folder: StoragePath, name: object, said_by: StoragePath) -> StoragePath:
    """A file that an index names, which must lie in the index's own folder.

    Links are followed: Hugging Face's cache is made of them.
    """
    if not isinstance(name, str) or not is_file_name(name):
        raise CheckpointError(f"{said_by}: names {name!r}, which is not a file of its own folder")
    path = folder / name
    if not path.exists():
        raise CheckpointError(f"{path}: is missing ({said_by.name} names it)")
    return path
