"""Which files of a folder are copied with the weights: config, tokenizer, code, and all others.

Not copied are files that a conversion replaces (weights of any framework), files that are wrong in
its result (training state, adapters, other checkpoints inside the folder), and links that lead out
of the checkpoint. The report names all of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from ..checkpoint.types import ReadOptions
from ..errors import CheckpointError
from ..model.manifest import SideFile
from ..move.storage import FILE, StoragePath, Where, is_file_name, storage_path

# What this tool and transformers write next to tensors; an output gets new ones.
_TABLES = re.compile(
    r"(pytorch_model|model)\.(bin|safetensors)\.index(\..*)?\.json"
    r"|random_states_\d+\.(safetensors|pkl)"
    r"|checkpoint\.json|checksums\.json"
)
_RANKS = re.compile(r"(pytorch_model|model|optimizer)(_[a-z]+_\d+)+\.(safetensors|bin)")
# Weights, optimizer state and their tables, in any framework's spelling. Copying them beside the
# result would leave two truths in one folder.
_WEIGHTS = re.compile(
    r"((pytorch_model|model|optimizer|consolidated|tf_model|flax_model|rust_model)"
    r"([-_.].*)?\.(bin|safetensors|pt|pth|h5|msgpack|ot|gguf)"
    r"|.*\.(safetensors|gguf|onnx|onnx_data|h5|msgpack|ot|tflite|ckpt|distcp))"
    r"([-_.]?(bak|backup|old|orig)\d*|~)?"
    r"|(pytorch_)?model\.(bin|safetensors)\.index\..*\.json"
)
_TRAINING = re.compile(
    r"(lr_)?scheduler.*\.(bin|pt|pth)|scaler.*\.(bin|pt)|sampler.*\.bin|dl_state_dict.*\.bin"
    r"|rng_state.*\.pth|training_args\.bin|custom_checkpoint_\d+\.pkl"
    r"|common\.pt|model_optim_rng\.pt|model_rng\.pt|distrib_optim\.pt"
    r"|latest|latest_checkpointed_iteration\.txt|latest_universal"
)
_ADAPTER = re.compile(r"adapter_(model.*|config\.json)")
_NESTED = re.compile(
    r"checkpoint-\d+|global_step\d+(_universal)?|iter_\d{7,}|mp_rank_\d{2,6}(_\d{3,6}){0,2}"
    r"|pytorch_model_fsdp_\d+|optimizer_\d+|dist_ckpt"
)
_SHARDS = re.compile(r"mp_rank_\d{2,6}(_\d{3,6}){0,2}|__\d+_\d+\.distcp|\.metadata")
_KINDS = ((_WEIGHTS, "other weights"), (_TRAINING, "training state"), (_ADAPTER, "an adapter"))
_SHOWN = 8  # names of one kind in the report


@dataclass(slots=True)
class _Found:
    """What lies in a folder beside the tensors."""

    sides: list[SideFile] = field(default_factory=list)
    behind: dict[str, list[str]] = field(default_factory=dict)  # why -> names
    links: list[str] = field(default_factory=list)  # lines on linked folders

    def leave(self, why: str, name: str) -> None:
        self.behind.setdefault(why, []).append(name)


def side_files(where: Where, options: ReadOptions | None = None) -> tuple[SideFile, ...]:
    """The files below a folder that are copied; hidden ones never are."""
    found = _scan(storage_path(where), options or ReadOptions())
    return tuple(sorted(found.sides, key=lambda f: f.name))


def left_behind(folder: StoragePath, options: ReadOptions, read: Collection[str]) -> list[str]:
    """A line for each kind of file that is not copied; ``read`` are the paths that were read."""
    found = _scan(folder, options, {str(path) for path in read})
    lines = []
    for why, names in found.behind.items():
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        lines.append(f"not copied, {why}: {', '.join(sorted(names)[:_SHOWN])}{more}")
    return [*found.links, *lines]


def _scan(folder: StoragePath, options: ReadOptions, read: Collection[str] = ()) -> _Found:
    found = _Found()
    for at, folders, rest in folder.walk():  # does not enter linked folders: no loops
        entered = []
        for child in folders:
            name = child.relative_to(folder).as_posix()
            if child.name.startswith("."):
                continue
            if child.is_symlink():
                found.links.append(f"{child}: a linked folder, not copied")
            elif not options.copy_all and _is_nested(child):
                found.leave("another checkpoint or a trainer's folder (--copy-all)", name + "/")
                continue
            entered.append(child)
        folders[:] = entered
        for path in rest:
            if not path.name.startswith(".") and str(path) not in read:
                _sort(found, folder, at, path, options)
    return found


def _is_nested(folder: StoragePath) -> bool:
    """Whether a folder is another checkpoint: by its name, or by shards in it."""
    return bool(_NESTED.fullmatch(folder.name)) or any(
        _SHARDS.fullmatch(child.name) for child in folder.iterdir()
    )


def _sort(
    found: _Found, folder: StoragePath, at: StoragePath, path: StoragePath, options: ReadOptions
) -> None:
    """Decide whether one file is copied."""
    name = path.relative_to(folder).as_posix()
    if _TABLES.fullmatch(path.name) or _RANKS.fullmatch(path.name):
        return
    why = next((why for pattern, why in _KINDS if pattern.fullmatch(path.name)), "")
    if why and (not options.copy_all or (at == folder and _READ.fullmatch(path.name))):
        found.leave(f"{why} (--copy-all)", name)
    elif not options.follow_links and name != "config.json" and _leads_out(folder, path):
        found.leave("a link out of the checkpoint (--follow-links)", name)
    else:
        what = path.stat()
        if what is None:
            raise CheckpointError(f"{path}: leads to no file")
        if what.kind != FILE:
            found.leave("no regular file", name)
            return
        found.sides.append(SideFile(name, str(path)))


# Names of weights: a copy would be read in place of the output's weights.
_READ = re.compile(r"(pytorch_)?model(-\d{5}-of-\d{5})?\.(bin|safetensors)")


def _leads_out(folder: StoragePath, path: StoragePath) -> bool:
    """Whether a link leads out of the checkpoint; the blobs of the hub's cache count as inside."""
    if not path.is_symlink():
        return False
    inside = [folder.real()]
    if inside[0].parent.name == "snapshots":
        inside.append(inside[0].parent.parent / "blobs")
    return not any(place in path.real().parents for place in inside)


def resolve(folder: StoragePath, name: object, said_by: StoragePath) -> StoragePath:
    """A file that an index names; it must be in the index's folder.

    Links are followed: Hugging Face's cache is made of them.
    """
    if not isinstance(name, str) or not is_file_name(name):
        raise CheckpointError(f"{said_by}: names {name!r}, which is not a file of the same folder")
    path = folder / name
    if not path.exists():
        raise CheckpointError(f"{path}: is missing ({said_by.name} names it)")
    return path
