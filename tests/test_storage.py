"""The storage seam: who may touch files, and a second storage behind it."""

from __future__ import annotations

import ast
import builtins
import os
import sys
from pathlib import Path, PurePosixPath
from threading import Event

import pytest
from fixtures_safety import case, write_hf, write_native
from memory_storage import MemoryStorage

from shardwright.ckpt import RunOptions, families, merge, open_checkpoint, reshard, verify
from shardwright.ckpt.checkpoint.types import ReadOptions
from shardwright.ckpt.convert import ReshardOptions, _job
from shardwright.ckpt.inspect import describe, describe_tensor
from shardwright.ckpt.model.planner import plan, resolve
from shardwright.ckpt.move.executor import Budget, run_units, units
from shardwright.ckpt.move.files import SCRATCH_BYTES, copy_file, create, seal, write_file
from shardwright.ckpt.move.storage import LOCAL, StoragePath, storage_path

ROOT = Path(__file__).resolve().parent.parent / "ckpt"

# --- who may touch files ----------------------------------------------------------------------

# What `os` is used for that is no file of a checkpoint.
OF_OS = {
    "environ",
    "environ.get",
    "fspath",
    "sched_getaffinity",
    "strerror",
    "PathLike",
    "path.expanduser",
}
MODULES = {"shutil", "tempfile", "glob", "io", "fcntl", "filecmp", "mmap"}
# Outputs are local folders still, made by move/publish.py: these hand it their names.
NAMES_OUTPUTS = {"convert.py", "output_name.py", "jobs.py"}


def outside() -> list[Path]:
    return [f for f in sorted(ROOT.rglob("*.py")) if f.relative_to(ROOT).parts[0] != "move"]


def dotted(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def touches(tree: ast.AST, name: str) -> list[str]:
    """Everything in a module's source that may open, list or look at a file by itself."""
    found = []
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func) == "open":
            found.append("open()")
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            text = dotted(node)
            if text.startswith("os.") and text.removeprefix("os.") not in OF_OS:
                found.append(text)
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in MODULES]
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.split(".")[0] in {*MODULES, "os"}:
                found.append(module)
            if module == "pathlib" and name not in NAMES_OUTPUTS:
                found += [a.name for a in node.names if not a.name.startswith("Pure")]
    return found


def test_no_module_outside_move_holds_what_touches_files():
    found = {f.relative_to(ROOT).as_posix(): touches(ast.parse(f.read_text()), f.name)
             for f in outside()}  # fmt: skip
    assert {name: rows for name, rows in found.items() if rows} == {}


def test_what_touches_files_is_noticed_in_a_source():
    text = (
        "import os, shutil\nfrom pathlib import Path\nfrom os import stat\n"
        "open('x')\nos.path.exists('x')\nos.listdir('.')\nos.environ['x']\n"
    )
    assert sorted(touches(ast.parse(text), "x.py")) == sorted(
        ["shutil", "Path", "os", "open()", "os.path.exists", "os.listdir"]
    )


@pytest.fixture
def watched(monkeypatch):
    """Calls of the system by modules of ckpt/ outside move/: (module, call)."""
    found: set[tuple[str, str]] = set()

    def around(module, name):
        real = getattr(module, name)

        def call(*args, **more):
            frame = sys._getframe(1)
            if args and str(args[0]) in families.__path__:  # a package lists its own tables
                return real(*args, **more)
            while frame is not None:
                file = frame.f_code.co_filename
                if "importlib" in file:
                    break
                parts = Path(file).parts
                if "ckpt" in parts and "shardwright" in parts:
                    inside = parts[len(parts) - parts[::-1].index("ckpt") :]
                    if inside[0] != "move":
                        found.add(("/".join(inside), name))
                    break
                frame = frame.f_back
            return real(*args, **more)

        monkeypatch.setattr(module, name, call)

    for name in ("open", "stat", "lstat", "listdir", "scandir", "mkdir", "rename", "unlink"):
        around(os, name)
    around(builtins, "open")
    return found


def test_a_module_that_touches_files_by_itself_is_noticed(watched, tmp_path):
    code = compile("import os\nos.stat('/')", "/x/shardwright/ckpt/formats/bad.py", "exec")
    exec(code, {})
    assert watched == {("formats/bad.py", "stat")}


SOURCES = ["hf", "hf-bin", "native", "llama_bf16_tp2pp2_torch", "llama_bf16_tp2pp2_torch_dist"]


@pytest.mark.parametrize("name", SOURCES)
def test_every_command_reaches_files_through_the_seam(name, tmp_path, golden, watched):
    if name == "native":
        source = write_native(tmp_path / name, 2, 1, made=case(), multiple=2)
    elif name.startswith("hf"):
        source = write_hf(tmp_path / name, binary=name != "hf")
    else:
        source = golden / name
    watched.clear()
    quiet = RunOptions(workers=1)
    reshard(source, tmp_path / "out", to="shards", tp=1, pp=1, run=quiet)
    reshard(source, tmp_path / "bin", to="shards", tp=1, pp=1, safe_serialization=False, run=quiet)
    merge(source, tmp_path / "merged", run=quiet)
    verify(source, tmp_path / "out", run=quiet)
    verify(source, run=quiet)
    opened = open_checkpoint(source)
    describe(opened.checkpoint)
    describe_tensor(opened.checkpoint, next(iter(opened)))
    assert watched == set()


# --- a storage in memory ----------------------------------------------------------------------


def loaded(folder: Path, at: str) -> StoragePath:
    """A folder of the file system, in a memory storage of its own."""
    storage = MemoryStorage()
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            storage.put(f"{at}/{file.relative_to(folder).as_posix()}", file.read_bytes())
    return StoragePath(PurePosixPath(at), storage)


def convert(source: StoragePath, output: str, options: ReshardOptions) -> StoragePath:
    """What a job does, within one storage: design, plan, create, move, seal, describe."""
    storage, root = source.storage, source.at(output)
    job = _job(source, output, options, ReadOptions())
    design = job.design(root.pure)
    made = resolve(plan(job.source.manifest, design.manifest, job.drop))
    for file in design.files:
        source.at(file.path).parent.make()
        create(file.path, file.layout, storage)
    scratch = memoryview(bytearray(SCRATCH_BYTES))

    def finish(mover):
        for file in design.files:
            for checksum in file.layout.checksums:
                seal(file.path, checksum, mover.files, scratch, Event())

    run_units(
        units(made.copies), Budget(1), lambda mover, index, unit: mover.move(unit),
        finish=finish, storage=storage,
    )  # fmt: skip
    sizes = {
        PurePosixPath(f.path).relative_to(root.pure).as_posix(): (f.layout.size_bytes, "")
        for f in design.files
    }
    for side in job.sides(design, sizes):
        target = root / side.name
        target.parent.make()
        if side.source:
            copy_file(source.at(side.source), target)
        else:
            write_file(target, side.text.encode())
    return root


def bytes_below(folder: StoragePath) -> dict[str, bytes]:
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for _, _, files in folder.walk()
        for file in files
    }


@pytest.mark.parametrize("safe", [True, False])
def test_a_round_trip_in_memory_is_the_local_one_byte_for_byte(safe, tmp_path):
    """HF -> shards -> HF, and shards -> shards, with no file of the system touched."""
    write_hf(tmp_path / "hf")
    here = loaded(tmp_path / "hf", "/models/hf")
    shards = ReshardOptions({"tp": 2, "pp": 2}, to="shards", safe=safe)
    narrow = ReshardOptions({"tp": 1, "pp": 2}, to="shards", safe=safe)
    back = ReshardOptions({}, to="hf", safe=safe)
    one = convert(here, "/out/shards", shards)
    two = convert(one, "/out/narrow", narrow)
    three = convert(two, "/out/back", back)
    options = {"safe_serialization": safe}
    reshard(tmp_path / "hf", tmp_path / "shards", tp=2, pp=2, **options)
    reshard(tmp_path / "shards", tmp_path / "narrow", tp=1, pp=2, **options)
    merge(tmp_path / "narrow", tmp_path / "back", **options)
    for made, name in ((one, "shards"), (two, "narrow"), (three, "back")):
        wanted = bytes_below(storage_path(tmp_path / name))
        found = bytes_below(made)
        assert sorted(found) == sorted(wanted)
        assert [n for n in found if found[n] != wanted[n]] == []
    assert here.storage.opened == 0


def test_a_checkpoint_in_memory_is_opened_and_sliced(tmp_path):
    write_hf(tmp_path / "hf", binary=True)
    opened = open_checkpoint(loaded(tmp_path / "hf", "/m"))
    local = open_checkpoint(tmp_path / "hf")
    assert list(opened) == list(local)
    for name in opened:
        assert (opened[name][...] == local[name][...]).all()


def test_a_path_of_another_storage_is_none_of_the_system(tmp_path):
    assert os.fspath(StoragePath(PurePosixPath("/x"), LOCAL)) == "/x"
    with pytest.raises(TypeError, match="no path of the local file system"):
        os.fspath(StoragePath(PurePosixPath("/x"), MemoryStorage()))
