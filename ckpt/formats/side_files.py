"""Which files of a folder travel with the weights: all that are neither weights nor ours."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ..checkpoint.json_io import is_file_name
from ..errors import CheckpointError
from ..model.manifest import SideFile

# Weights, optimizer state and their tables, in any framework's spelling. They are what a
# conversion replaces; copying them beside the result would leave two truths in one folder.
_WEIGHTS = re.compile(
    r"(pytorch_model|model|optimizer|consolidated|tf_model|flax_model|rust_model)"
    r"([-_.].*)?\.(bin|safetensors|pt|pth|h5|msgpack|ot|gguf)"
    r"|(pytorch_model|model)\.(bin|safetensors)\.index(\..*)?\.json"
    r"|random_states_\d+\.(safetensors|pkl)"
    r"|checkpoint\.json|checksums\.json"
)


def side_files(folder: Path) -> tuple[SideFile, ...]:
    """Every non-weight file below ``folder``, hidden ones left out, links followed."""
    found = [SideFile(path.relative_to(folder).as_posix(), str(path)) for path in _walk(folder)]
    return tuple(sorted(found, key=lambda f: f.name))


def skipped_links(folder: Path) -> list[str]:
    """A line for each linked folder, which does not travel: links may run in circles."""
    return [
        f"{Path(root, name)}: a linked folder, not copied"
        for root, folders, _ in os.walk(folder)
        for name in sorted(folders)
        if not name.startswith(".") and Path(root, name).is_symlink()
    ]


def _walk(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):  # does not enter linked folders: no loops
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(root, name)
            if name.startswith(".") or _WEIGHTS.fullmatch(name):
                continue
            try:
                if path.stat() and path.is_file():
                    yield path
            except OSError as error:
                raise CheckpointError(f"{path}: {error.strerror}") from error


def resolve(folder: Path, name: object, said_by: Path) -> Path:
    """A file that an index names, which must lie in the index's own folder.

    Links are followed: Hugging Face's cache is made of them.
    """
    if not isinstance(name, str) or not is_file_name(name):
        raise CheckpointError(f"{said_by}: names {name!r}, which is not a file of its own folder")
    path = folder / name
    try:
        path.stat()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: is missing ({said_by.name} names it)") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    return path
