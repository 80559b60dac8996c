"""``open_checkpoint``: any readable path as a mapping of logical name -> lazy array."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from . import hub
from .checkpoint.types import Checkpoint, ReadOptions
from .errors import CheckpointError
from .formats import Format, fitting, foreign, formats
from .formats.hf.names import NAME as HF
from .formats.native.names import CHECKPOINT, NAME
from .formats.native.reader import is_described
from .move import file_set
from .move.progress import human
from .move.publish import snapshot
from .move.staging import JOURNAL
from .move.storage import LOCAL, StoragePath, Where, storage_path, watching

if TYPE_CHECKING:
    from .lazy import LazyArray

_SAVED = re.compile(r"checkpoint-\d{1,18}")  # a trainer's folder of one step
# Folders of single checkpoints, as trainers keep several side by side.
_OTHER = re.compile(r"checkpoint-\d+|global_step\d+(_universal)?|iter_\d{7,}|release")
MAX_NAME_BYTES = 4096  # of a file that holds the name of a folder
LATEST = "latest"  # text file in a save folder: the name of its newest checkpoint


def read_checkpoint(path: Where, options: ReadOptions | None = None) -> Checkpoint:
    """The checkpoint at ``path``, headers only. Raises CheckpointError where none is found."""
    options = options or ReadOptions()
    if options.vocab_size is not None and options.vocab_size < 1:
        raise CheckpointError(f"--vocab-size {options.vocab_size}: must be at least 1")
    where = follow(path, options.iteration, download=options.download)
    _check_finished(where)
    if pointers := foreign.lfs_pointers(where):
        raise CheckpointError(f"{where}: {pointers}")
    chosen, notes = _format_of(where, options.format)
    for option, given in (("drop-vision", options.drop_vision), ("dequantize", options.dequantize)):
        if given and chosen.NAME != "hf":
            raise CheckpointError(
                f"{where}: --{option} is about files of Hugging Face, and this is {chosen.NAME}; "
                "leave it out"
            )
    with watching() as seen:
        found = chosen.read(where, options)
    paths = [*(f.path for f in found.files), *found.described_by]
    unopened = snapshot([path for path in paths if path not in seen], where.storage)
    found.seen = {**unopened, **{path: seen[path] for path in paths if path in seen}}
    found.notes += notes
    return found


def _format_of(where: StoragePath, asked: str | None) -> tuple[Format, list[str]]:
    """The format of a path, and a line if another one fits too.

    A valid checkpoint.json names its files, so all others do not belong to it. Without one, two
    formats in a folder are refused until the user chooses.
    """
    if asked is not None and asked not in (known := [fmt.NAME for fmt in formats()]):
        raise CheckpointError(f"--format {asked}: not a format; known are {', '.join(known)}")
    part = foreign.what_file(where) if where.is_file() else ""
    if part:
        raise CheckpointError(f"{where}: {part}")
    found = {fmt.NAME: fmt for fmt in fitting(where)}
    fits = list(found)
    if not fits:
        raise CheckpointError(f"{where}: {_unknown(where)}")
    if asked is not None and asked not in fits:
        raise CheckpointError(f"{where}: --format {asked}: it holds {' and '.join(fits)}")
    if asked is not None or len(fits) == 1:
        return found[asked or fits[0]], []
    if fits[0] != NAME or not is_described(where):
        raise CheckpointError(
            f"{where}: holds checkpoints of {len(fits)} formats, {' and '.join(fits)}; say which "
            f"with --format, e.g. --format {fits[0]}"
        )
    others = " and ".join(fits[1:])
    return found[fits[0]], [
        f"{where}: beside what {CHECKPOINT} describes lie files of the format {others}, "
        f"not read (--format {fits[1]} reads them)"
    ]


def _check_finished(path: StoragePath) -> None:
    """Files of an interrupted run have their full size, and zeros where data is missing."""
    folder = path if path.is_dir() else path.parent
    if (folder / JOURNAL).exists():
        raise CheckpointError(
            f"{path}: an unfinished output ({folder / JOURNAL} is there); finish the run that "
            "makes it with --resume"
        )


def follow(path: Where, iteration: int | None = None, *, download: bool = False) -> StoragePath:
    """``path`` resolved; for a save folder, the checkpoint that its ``latest`` names.

    ``iteration`` picks another one of a save folder's ``checkpoint-N``. What is no path may be the
    name of a model of the Hugging Face hub: then its snapshot in the cache, which ``download``
    fetches.
    """
    where = storage_path(path)
    if where.storage is LOCAL and not where.exists():
        where = storage_path(hub.local_path(str(path), download=download))
    real = where.real()
    if real.is_file() and not real.suffix:  # Hugging Face's cache: a link's name tells the type
        real = where.parent.real() / where.name
    where = real
    finish_save(where)
    found = _latest(where) if iteration is None else _numbered(where, iteration)
    if found != where:
        finish_save(found)
    return found


def finish_save(where: StoragePath) -> None:
    """Finish a save into this folder that was cut off while it replaced files."""
    if where.storage is LOCAL:
        file_set.finish(where)


def _latest(where: StoragePath) -> StoragePath:
    """The checkpoint that a save folder's ``latest`` names; ``where`` if it is no save folder."""
    pointer = where / LATEST
    if where.is_dir() and pointer.is_file() and not is_checkpoint(where):
        name = pointer.read_text(MAX_NAME_BYTES).strip()
        if not name or "/" in name or name in (".", "..") or "\0" in name:
            raise CheckpointError(f"{pointer}: names {name!r}, not a folder beside it")
        if not (where / name).is_dir():
            raise CheckpointError(f"{pointer}: names {name}, which is not there")
        return where / name
    return where


def _numbered(where: StoragePath, iteration: int) -> StoragePath:
    """The ``checkpoint-N`` of a save folder; ``where`` if it holds none, or is a checkpoint."""
    if not where.is_dir() or is_checkpoint(where):
        return where
    have = [c for c in where.iterdir() if _SAVED.fullmatch(c.name) and c.is_dir()]
    for child in have:
        if child.name == f"checkpoint-{iteration}":
            return child
    if have:
        names = ", ".join(c.name for c in sorted(have, key=lambda c: int(c.name.split("-")[1])))
        raise CheckpointError(f"{where}: --iteration {iteration}: it holds {names}")
    return where


def is_checkpoint(where: Where) -> bool:
    """Whether a format reads this path."""
    path = storage_path(where)
    return path.exists() and bool(fitting(path))


def check_replaceable(where: Where) -> None:
    """Raise unless what an output is to replace is one checkpoint, one file, or empty.

    The whole folder goes, so one that holds anything else is the user's to remove.
    """
    path = storage_path(where)
    if not path.is_dir() or path.is_symlink():
        return
    finish_save(path)
    if not (held := path.iterdir()):
        return
    fits = {fmt.NAME for fmt in fitting(path)}
    others = [child.name for child in held if _OTHER.fullmatch(child.name) and child.is_dir()]
    run = len(others) == 1 and not fits & {NAME, HF}  # Megatron-LM's folder around an iteration
    why = f"it is no checkpoint (it holds {held[0].name!r})" if not fits else ""
    if fits and others and not run:
        more = f" and {len(others) - 4} more" if len(others) > 4 else ""
        why = f"it holds other checkpoints ({', '.join(others[:4])}{more})"
    if why:
        raise CheckpointError(
            f"{where}: --overwrite would remove this folder, and {why}; remove it yourself, or "
            "name another --output"
        )


def _unknown(path: StoragePath) -> str:
    """What the path looks like, and what to do, if we know its kind."""
    if path.is_file():
        return "not a .safetensors or .bin file"
    if says := foreign.what_folder(path):
        return says
    listed = ", ".join(sorted(child.name for child in path.iterdir())[:5]) or "nothing"
    return (
        "no checkpoint here: neither model_tp_X_pp_Y rank files nor Hugging Face weights "
        f"(it holds {listed})"
    )


class OpenCheckpoint(Mapping[str, "LazyArray"]):
    """A checkpoint as logical name -> lazy array, whatever its format and layout.

    Names and shapes are Hugging Face's; optimizer state has the prefixes ``exp_avg/``,
    ``exp_avg_sq/``, ``momentum_buffer/`` and ``master/``. Nothing is read until an array is
    sliced.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.format = checkpoint.format
        self.mesh = dict(checkpoint.mesh.axes)
        self.step = checkpoint.step
        self.state = checkpoint.manifest.state

    def __getitem__(self, fqn: str) -> LazyArray:
        from .lazy import LazyArray

        manifest = self.checkpoint.manifest
        chunks = manifest.chunks.get(fqn, [])
        return LazyArray(fqn, manifest.tensors[fqn], chunks, self.checkpoint.path.storage)

    def __iter__(self) -> Iterator[str]:
        return iter(self.checkpoint.manifest.tensors)

    def __len__(self) -> int:
        return len(self.checkpoint.manifest.tensors)

    def __repr__(self) -> str:
        ckpt = self.checkpoint
        family = ckpt.model.family.name if ckpt.model else "family unknown"
        mesh = "".join(f", {axis}={size}" for axis, size in self.mesh.items() if size > 1)
        step = f", step {self.step}" if self.step is not None else ""
        size = human(sum(meta.nbytes for meta in ckpt.manifest.tensors.values()))
        return (
            f"<OpenCheckpoint {ckpt.path.name}: {self.format}, {family}{mesh}{step}, "
            f"{len(self)} tensors, {size}>"
        )

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)


def open_checkpoint(
    path: Where,
    *,
    config: Where | None = None,
    layout: Mapping[str, str] | None = None,
    vocab_size: int | None = None,
    iteration: int | None = None,
    format: str | None = None,
    trust: Iterable[str] = (),
    drop_vision: bool = False,
    dequantize: bool = False,
) -> OpenCheckpoint:
    """Open any readable checkpoint.

    ``config`` names a folder or file of a Hugging Face config, ``layout`` gives layout tags,
    ``vocab_size`` the real number of vocabulary rows. ``iteration`` picks one checkpoint of a
    folder that holds several, ``format`` one of two formats in a folder, ``trust`` names fields
    of ``config`` that count although the checkpoint contradicts them, ``drop_vision`` takes the
    language model alone, ``dequantize`` reads quantized weights as bfloat16. The others only add
    what the checkpoint does not record. Raises CheckpointError.
    """
    options = ReadOptions(
        config, layout or {}, vocab_size, iteration=iteration, format=format,
        trust=frozenset(trust), drop_vision=drop_vision, dequantize=dequantize,
    )  # fmt: skip
    return OpenCheckpoint(read_checkpoint(path, options))
