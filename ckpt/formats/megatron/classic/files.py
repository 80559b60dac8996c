"""Folders and rank files of Megatron-LM's classic checkpoints: which there are, and what of a
rank's file travels further.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ....checkpoint.claims import MAX_RANKS
from ....checkpoint.json_io import CHECKSUMS, load_json, read_digests
from ....checkpoint.types import Checkpoint
from ....containers import torch_zip
from ....errors import CheckpointError, raise_all
from ....model.file_layout import Entry, Index
from ....model.manifest import SideFile
from ....model.mesh import Coord
from ....move.storage import StoragePath
from ... import foreign
from .. import args_codec, known_args, run_state
from .. import names as megatron_names
from .grid import Grid

HUGGINGFACE = "huggingface"  # where some frameworks keep config and tokenizer
TOKENIZER = "tokenizer"  # where others keep the tokenizer
TRACKER = "latest_checkpointed_iteration.txt"
RANK = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")
ITERATION = re.compile(r"iter_\d{7,}|release")
FILES = ("model_optim_rng.pt", "model_rng.pt")
FLAT = "distrib_optim.pt"
VERSIONS = (0, 1, 2, 3)
_RANDOM = "random states belong to the ranks of the saving run"
DROPPED = {
    "rng_state": _RANDOM,
    "random_rng_state": _RANDOM,
    "np_rng_state": _RANDOM,
    "torch_rng_state": _RANDOM,
    "cuda_rng_state": _RANDOM,
    "rng_tracker_states": _RANDOM,
    "rerun_state_machine": "the rerun machine's state belongs to the saving run",
    "modelopt_state": "ModelOpt's state is not carried",
}
# what Accelerate writes beside Megatron's folders, for the processes of one run
_ACCELERATE = re.compile(
    r"random_states_\d+\.pkl|(sampler|scheduler|dl_state_dict|optimizer)(_\d+)?\.bin"
    r"|scaler\.pt|custom_checkpoint_\d+\.pkl"
)
_BESIDE = re.compile(r".*\.(json|txt|md|model|jinja|tiktoken|py|yaml)|LICENSE.*|vocab.*|merges.*")
# What every rank of one save says alike: its function and its layout.
_SAME_ARGS = (
    *sorted(known_args.EXPRESSED | set(known_args.PLAIN)),
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "consumed_train_samples",
)


def iterations(path: StoragePath) -> list[StoragePath]:
    """The folders of iterations in a save folder."""
    return sorted(c for c in path.iterdir() if ITERATION.fullmatch(c.name))


def is_dist(path: StoragePath) -> bool:
    """Whether an iteration is of the distributed format, finished or not."""
    names = ("metadata.json", ".metadata", "common.pt")
    if any((path / name).exists() for name in names):
        return True
    return path.is_dir() and any(path.glob("*.distcp"))


def has_ranks(path: StoragePath) -> bool:
    """Whether rank folders lie here. Files of such names are DeepSpeed's."""
    return path.is_dir() and any(RANK.fullmatch(c.name) and c.is_dir() for c in path.iterdir())


def iteration_folder(path: StoragePath, wanted: int | None) -> StoragePath:
    """The folder of an iteration: ``wanted``, else the one that the tracker names."""
    tracker = path / TRACKER
    if not tracker.is_file() and not iterations(path):
        if wanted is not None and path.name != f"iter_{wanted:07d}":
            raise CheckpointError(f"--iteration {wanted}: {path} holds no iter_ folders")
        return path
    if wanted is not None:
        name, origin = f"iter_{wanted:07d}", f"--iteration says {wanted}"
    else:
        if not tracker.is_file():
            raise CheckpointError(
                f"{tracker}: is missing; name an iteration with --iteration N, or give one of "
                f"these folders: {_listed_iterations(path)}"
            )
        text = tracker.read_text().strip()
        if text != "release" and not re.fullmatch(r"[0-9]{1,18}", text):
            raise CheckpointError(
                f"{tracker}: says {text[:80]!r}, neither an iteration nor 'release'; iterations "
                f"here: {_listed_iterations(path)} (--iteration N picks one)"
            )
        name = text if text == "release" else f"iter_{int(text):07d}"
        origin = f"{tracker.name} says {text}"
    folder = path / name
    if not folder.is_dir() and foreign.is_deepspeed(path):
        raise CheckpointError(f"{path}: {foreign.WAY_OUT}")  # its tracker is Megatron-LM's
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: is not there, and {origin}; iterations here: {_listed_iterations(path)} "
            "(--iteration N picks one)"
        )
    return folder


def iteration_name(step: int | None) -> str:
    """The name of an iteration's folder; weights without a step are a release."""
    return "release" if step is None else f"iter_{step:07d}"


def _listed_iterations(path: StoragePath) -> str:
    return ", ".join(c.name for c in iterations(path)) or "none"


@dataclass(slots=True)
class RankFile:
    """One rank's model_optim_rng.pt."""

    folder: StoragePath
    index: Index
    args: dict[str, object]
    lost: list[str]  # args that cannot travel
    version: float  # checkpoint_version; 0 where the file says none
    coord: Coord = ()
    chunks: list[list[tuple[str, Entry]]] = field(default_factory=list)  # our names, local layers
    extra_states: int = 0  # entries without weights

    @property
    def file(self) -> str:
        return self.index.path


def rank_files(folder: StoragePath) -> dict[Coord, RankFile]:
    """Every rank's file by tensor and pipeline rank, complete, and all of one save."""
    found = []
    for child in sorted(folder.iterdir()):
        match = RANK.fullmatch(child.name)
        if match and child.is_dir():
            found.append((tuple(None if n is None else int(n) for n in match.groups()), child))
    if not found:
        if inner := [child for child in iterations(folder) if has_ranks(child)]:
            raise CheckpointError(
                f"{folder}: holds no mp_rank_TT folder but {inner[0].name}, an iteration inside an "
                f"iteration; give {inner[0]}"
            )
        raise CheckpointError(
            f"{folder}: an unfinished save (it holds no mp_rank_TT folder){others(folder)}"
        )
    _check_files(folder, [child for _, child in found])
    ranks = [(numbers, _rank_file(child)) for numbers, child in found]
    experts = any(map(_has_experts, (rank for _, rank in ranks)))
    for numbers, rank in ranks:
        # Megatron-LM looks for mp_rank_00_000_000 as well where there are no experts.
        if numbers[2] not in (None, 0) and not experts:
            raise CheckpointError(
                f"{rank.folder}: its third number is an expert-parallel rank, and the model has no "
                "experts"
            )
    second = _suffix_is_expert([(numbers[1], rank) for numbers, rank in ranks])
    if second and not experts:
        raise CheckpointError(
            f"{folder}: the second number of {found[-1][1].name} is an expert-parallel rank, and "
            "the model has no experts"
        )
    placed: dict[Coord, RankFile] = {}
    for (t, p, e), rank in ranks:
        stage, spread = (0, p) if second and e is None else (p, e)
        rank.coord = (("tp", t or 0), ("pp", stage or 0))
        if experts:
            rank.coord = (*rank.coord, ("ep", spread or 0))
        if rank.coord in placed:
            raise CheckpointError(
                f"{rank.folder} and {placed[rank.coord].folder} are the same rank"
            )
        placed[rank.coord] = rank
    _check_set(folder, placed)
    return dict(sorted(placed.items()))


def grid_of(ranks: Mapping[Coord, RankFile]) -> Grid:
    """The grid that args say and folders show."""
    args = next(iter(ranks.values())).args
    sizes = {
        axis: max(1 + max(dict(coord).get(axis, 0) for coord in ranks), size_of(args, axis) or 1)
        for axis in ("tp", "pp", "ep")
    }
    experts = any("ep" in dict(coord) for coord in ranks)
    etp = size_of(args, "etp") if experts else None
    return Grid(
        sizes["tp"], sizes["pp"], sizes["ep"] if experts else 1, etp or sizes["tp"], experts
    )


def others(folder: StoragePath) -> str:
    """What else could be read if an iteration's folder is not complete; or ""."""
    have = [c.name for c in iterations(folder.parent) if c != folder]
    if not ITERATION.fullmatch(folder.name) or not have:
        return ""
    return f"; other iterations here: {', '.join(have)} (--iteration N picks one)"


def _weights_file(folder: StoragePath) -> StoragePath | None:
    """The file of a rank's weights; Megatron-LM itself writes the first of the names."""
    return next((folder / name for name in FILES if (folder / name).is_file()), None)


def _check_files(folder: StoragePath, ranks: list[StoragePath]) -> None:
    """Check that every rank folder has its weights; the error names all that lack them."""
    faults = []
    for child in ranks:
        if _weights_file(child) is None:
            have = sorted(c.name for c in child.iterdir())
            odd = next((name for name in have if name.startswith("layer_wise_optimizer")), None)
            why = f" (the folder holds {', '.join(have[:4]) or 'nothing'})"
            if odd:
                why = f" ({odd} is of a layer-wise optimizer, which is not read)"
            faults.append(f"{child / FILES[0]}: is missing{why}")
    raise_all(faults, f"{folder}: an unfinished save{others(folder)}" if faults else "")


def _rank_file(folder: StoragePath) -> RankFile:
    file = _weights_file(folder)
    assert file is not None, "checked before"
    index = torch_zip.index(file, foreign=True)  # args may hold objects of any library
    version = index.extra.get("checkpoint_version", 0)
    if not isinstance(version, (int, float)) or version not in VERSIONS:
        raise CheckpointError(f"{file}: checkpoint_version {version!r}; 0, 1, 2 and 3 are known")
    args: dict[str, object] = {}
    lost: list[str] = []
    if index.extra.get("args") is not None:
        args, lost = args_codec.namespace(index.extra["args"], str(file))
    # random states are large as Python values, and of no further use
    slim = {k: None if k in DROPPED or k == "args" else v for k, v in index.extra.items()}
    rank = RankFile(folder, replace(index, extra=slim), args, lost, float(version))
    rank.chunks = _chunks(index)
    rank.extra_states = _extra_states(index)
    return rank


def _chunks(index: Index) -> list[list[tuple[str, Entry]]]:
    """The tensors of each virtual stage under our names, in the file's order."""
    heads = sorted(
        (k for k in index.extra if re.fullmatch(r"model\d{0,3}", k)),
        key=lambda k: int(k[5:] or 0),
    )
    if not heads:
        raise CheckpointError(f"{index.path}: has no model, and no model0")
    if heads != ["model"] and heads != [f"model{i}" for i in range(len(heads))]:
        raise CheckpointError(f"{index.path}: has {', '.join(heads)}, not model0, model1, ...")
    return [list(_named(index, head)) for head in heads]


def _named(index: Index, head: str) -> Iterator[tuple[str, Entry]]:
    for name, entry in index.entries.items():
        if name.startswith(head + "."):
            bare = name[len(head) + 1 :].removeprefix("module.")
            yield megatron_names.ours(bare), entry


def _extra_states(index: Index) -> int:
    """Entries of the model that are no tensors: None, or bytes of TransformerEngine."""
    return sum(
        str(key).endswith(megatron_names.EXTRA) and f"{head}.{key}" not in index.entries
        for head, table in index.extra.items()
        if re.fullmatch(r"model\d*", head) and isinstance(table, dict)
        for key in table
    )


def _has_experts(rank: RankFile) -> bool:
    if rank.args.get("num_experts") not in (None, 0):
        return True
    return any(".mlp.experts." in name for chunk in rank.chunks for name, _ in chunk)


def _suffix_is_expert(ranks: list[tuple[int | None, RankFile]]) -> bool:
    """Whether the second number counts expert-parallel ranks: args say so, else the contents.

    Only the first pipeline stage holds the embedding; every expert-parallel rank does.
    """
    seconds = {second for second, _ in ranks}
    if seconds <= {None, 0}:
        return False  # one stage, and one expert-parallel rank at most
    args = ranks[0][1].args
    said = args.get("pipeline_model_parallel_size")
    if type(said) is int:
        return said == 1
    return len(seconds) > 1 and all(embedding(rank) is not None for _, rank in ranks)


def embedding(rank: RankFile) -> Entry | None:
    """The rank's part of the vocabulary, which the first pipeline stage holds."""
    for name, entry in rank.chunks[0]:
        if name == "embedding.word_embeddings.weight" and entry.shape:
            return entry
    return None


_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


def size_of(args: Mapping[str, object], axis: str) -> int | None:
    """The ranks of ``tp``, ``pp``, ``ep`` or ``etp`` that args say."""
    long = _SIZES[axis]
    said = args.get(long, args.get("model_parallel_size") if axis == "tp" else None)
    return said if type(said) is int and said > 0 else None


def _check_set(folder: StoragePath, ranks: Mapping[Coord, RankFile]) -> None:
    """The ranks must be those of args, each once, of one save."""
    args = next(iter(ranks.values())).args
    faults = []
    for axis in ("tp", "pp", "ep"):
        have = 1 + max(dict(coord).get(axis, 0) for coord in ranks)
        said = size_of(args, axis)
        if said is not None and said < have:
            faults.append(f"args say {axis} {said}, the folders are those of {have}")
    grid = grid_of(ranks)
    if grid.tp * grid.pp * grid.ep * grid.etp > MAX_RANKS:
        raise CheckpointError(f"{folder}: more than {MAX_RANKS} ranks: tp {grid.tp}, pp {grid.pp}")
    grid.check(str(folder))
    faults += grid.missing(ranks)
    for key in run_state.SCHEDULERS:
        tables = {r.folder.name: r.index.extra.get(key) for r in ranks.values()}
        faults += _differing(key, {name: _plain(table) for name, table in tables.items()})
    for key in ("iteration", "checkpoint_version"):
        faults += _differing(key, {r.folder.name: r.index.extra.get(key) for r in ranks.values()})
    for key in _SAME_ARGS:
        faults += _differing(
            f"args.{key}", {r.folder.name: r.args.get(key) for r in ranks.values()}
        )
    faults += _exchanged(ranks)
    raise_all(faults, f"{folder}")


def _exchanged(ranks: Mapping[Coord, RankFile]) -> list[str]:
    """Compare the rank that each file says with its folder.

    Megatron-LM counts tensor ranks first and pipeline ranks last. Its convert.py, and older
    outputs of ours, say 0 in every file: then they say nothing.
    """
    said = {coord: rank.args.get("rank") for coord, rank in ranks.items()}
    if len(set(map(repr, said.values()))) < 2:
        return []
    grid = grid_of(ranks)
    order = sorted(ranks, key=lambda coord: grid.number(coord, 1 << 32))
    numbers = [said[coord] for coord in order]
    whole = [n for n in numbers if type(n) is int]
    if len(whole) == len(numbers) and all(a < b for a, b in itertools.pairwise(whole)):
        return []
    rows = ", ".join(f"{ranks[c].folder.name} {said[c]!r:.40}" for c in order[:8])
    return [
        f"the ranks that args say contradict the folders: {rows}; a folder was renamed or holds "
        "another's file: put the files back"
    ]


def _differing(what: str, said: Mapping[str, object]) -> list[str]:
    if len({repr(value) for value in said.values()}) < 2:
        return []
    rows = ", ".join(f"{name} {value!r:.80}" for name, value in list(said.items())[:8])
    return [f"the ranks are of different saves: {what} is {rows}"]


def _plain(table: object) -> object:
    """The plain values of a table; where a tensor of one lies is each file's own."""
    return args_codec.plain_rows(table)[0] if isinstance(table, dict) else table is None


def recorded(path: StoragePath, folder: StoragePath) -> dict[str, tuple[int, str]]:
    """Sizes and digests of an iteration's files, by paths below ``path``.

    They are recorded beside the folders of iterations, also where ``path`` is one of these.
    """
    root = folder.parent if path == folder and ITERATION.fullmatch(folder.name) else path
    file = root / CHECKSUMS
    if not file.is_file():
        return {}
    below = "" if root == folder else folder.relative_to(root).as_posix() + "/"
    cut = len(below) if path == folder else 0
    found = read_digests(load_json(file).get("files"), file)
    return {name[cut:]: row for name, row in found.items() if name.startswith(below)}


def forget(result: Checkpoint, unneeded: Iterable[StoragePath]) -> None:
    """Drop the records of files that are not needed: they may be gone."""
    names = {str(file) for file in unneeded}
    result.digests = {
        name: row for name, row in result.digests.items() if str(result.path / name) not in names
    }


def homes(path: StoragePath, folder: StoragePath) -> tuple[StoragePath, ...]:
    """The folders that may hold config and tokenizer, the one that the user gave first.

    A save folder's own files count for its iterations, and an iteration may bring its own.
    """
    if path != folder:
        return path, folder
    return (path, path.parent) if (path.parent / TRACKER).is_file() else (path,)


def beside(path: StoragePath, folder: StoragePath) -> tuple[list[SideFile], list[str]]:
    """Files that are copied with the weights (config, tokenizer), and notes on others."""
    sides: dict[str, SideFile] = {}
    notes: list[str] = []
    for home in homes(path, folder):
        found = _sides_of(home, notes if home == path else [])
        sides = {side.name: side for side in found} | sides
    return list(sides.values()), notes


def _sides_of(path: StoragePath, notes: list[str]) -> list[SideFile]:
    """Those of one folder; a file of its own counts more than one of a folder in it."""
    sides, accelerate, rest = [], [], []
    found: list[SideFile] = []  # in a folder of their own
    own = {TRACKER, CHECKSUMS, "progress.txt", *FILES, FLAT}
    for child in sorted(path.iterdir()):
        name = child.name
        if name in own or RANK.fullmatch(name) or ITERATION.fullmatch(name) or name[0] == ".":
            continue
        if _ACCELERATE.fullmatch(name):
            accelerate.append(name)
        elif child.is_file() and _BESIDE.fullmatch(name):
            sides.append(name)
        elif name in (HUGGINGFACE, TOKENIZER) and child.is_dir():
            inside = [c for c in sorted(child.iterdir()) if c.is_file()]
            found += [SideFile(c.name, str(c)) for c in inside if _BESIDE.fullmatch(c.name)]
        else:
            rest.append(name)
    if accelerate:
        notes.append(
            f"not copied: {_listed(accelerate)} (Accelerate's states of one run's processes)"
        )
    if rest:
        notes.append(f"not copied: {_listed(rest)}")
    found = [side for side in found if side.name not in sides]
    return [SideFile(name, str(path / name)) for name in sides] + found


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
