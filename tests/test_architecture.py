"""Which module may import which: arrows run one way, and there is no circle.

Imports are read from the source, those inside functions and for types alone as well: what is
hidden from the interpreter binds two modules together all the same.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from shardwright.ckpt import formats

ROOT = Path(__file__).resolve().parent.parent
TOP = ("shardwright", "ckpt", "train", "tools")

# ckpt/: a package imports those to the right of its own. `commands` are the modules beside the
# packages, and `ckpt` is the package itself, which names what users call.
CKPT = (
    {"ckpt"},
    {"commands"},
    {"formats"},
    {"checkpoint"},
    {"containers", "families"},
    {"move"},
    {"model"},
    {"errors"},
)

# train/: what each package may import of the others, beside the modules that all may see. Modules
# that need no torch stand apart from their package: doctor and planning must answer without it.
APART = {
    "train.errors": "errors",
    "train.core.layout": "layout",
    "train.core.from_config": "from_config",
    "train.model.traits": "traits",
}
SEEN_BY_ALL = {"errors", "layout"}
TRAIN: dict[str, set[str]] = {
    "train": {"accelerate", "config"},
    "__main__": {"accelerate", "run"},
    "accelerate": {"checkpoint", "config", "core", "data", "doctor", "from_config", "patches"},
    "run": {"checkpoint", "config", "core", "data", "doctor", "from_config"},
    "doctor": {"config", "from_config", "planning"},
    "planning": {"traits"},
    "checkpoint": {"core", "patches"},
    "core": {"config", "model", "patches"},
    "model": {"patches", "traits"},
    "traits": set(),
    "patches": set(),
    "data": set(),
    "config": set(),
    "from_config": {"config", "core", "model"},
    "layout": set(),
    "errors": set(),
}


@cache
def modules() -> dict[str, Path]:
    """Dotted name, `shardwright.` left out -> file."""
    found = {}
    for top in TOP:
        for file in sorted((ROOT / top).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported(name: str) -> Iterator[str]:
    """The modules of ours that a module names in an import, wherever it stands."""
    file = modules()[name]
    here = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("shardwright.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = here[: len(here) + 1 - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            base = base.removeprefix("shardwright").removeprefix(".")
            for alias in node.names:
                full = f"{base}.{alias.name}".removeprefix(".")
                yield full if full in modules() else base


@cache
def arrows() -> frozenset[tuple[str, str]]:
    """Every (module, module that it imports)."""
    known = modules()
    return frozenset((a, b) for a in known for b in imported(a) if b in known and a != b)


def room(name: str) -> str:
    """The package below ckpt/ or train/ that a module lies in, or what stands for it."""
    parts = name.split(".")
    if name in APART:
        return APART[name]
    if len(parts) == 1 or parts[1] == "errors":
        return parts[-1]
    if (ROOT / parts[0] / parts[1]).is_dir():
        return parts[1]
    return "commands" if parts[0] == "ckpt" else parts[1]


def circles(arrows: frozenset[tuple[str, str]]) -> list[list[str]]:
    """Modules that import each other, over however many others: one list for each circle."""
    below = {a: {b for x, b in arrows if x == a} for a in {n for pair in arrows for n in pair}}
    reach: dict[str, set[str]] = {}
    for start in below:
        seen, todo = set(), [start]
        while todo:
            new = below[todo.pop()] - seen
            seen |= new
            todo += new
        reach[start] = seen
    found = {
        tuple(sorted(b for b in seen if a in reach[b])) for a, seen in reach.items() if a in seen
    }
    return [list(circle) for circle in sorted(found)]


def test_no_modules_import_each_other_in_a_circle():
    assert circles(arrows()) == []


def test_a_circle_of_three_is_seen_as_one_and_a_diamond_as_none():
    ring = frozenset({("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")})
    assert circles(ring) == [["a", "b", "c"]]
    assert circles(frozenset({("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")})) == []


def test_packages_of_ckpt_import_to_the_right_alone():
    rank = {name: i for i, names in enumerate(CKPT) for name in names}
    own = [(a, b) for a, b in arrows() if a.split(".")[0] == b.split(".")[0] == "ckpt"]
    assert {room(a) for a, _ in own} <= rank.keys(), "a package that has no place in the order"
    wrong = [f"{a} -> {b}" for a, b in own if room(a) != room(b) and rank[room(a)] >= rank[room(b)]]
    assert wrong == []


def test_packages_of_train_import_what_their_row_names():
    own = [(a, b) for a, b in arrows() if a.split(".")[0] == b.split(".")[0] == "train"]
    wrong = [
        f"{a} -> {b}"
        for a, b in own
        if room(b) not in {room(a), *SEEN_BY_ALL, *TRAIN.get(room(a), set())}
    ]
    assert wrong == []


def test_the_rows_of_train_form_no_circle():
    assert circles(frozenset((a, b) for a, row in TRAIN.items() for b in row)) == []


@pytest.mark.parametrize(("one", "other"), [("ckpt", "train"), ("ckpt", "tools"),
                                            ("train", "tools")])  # fmt: skip
def test_the_library_knows_nothing_of_what_is_built_on_it(one, other):
    assert [f"{a} -> {b}" for a, b in arrows() if a.split(".")[0] == one
            and b.split(".")[0] == other] == []  # fmt: skip


def test_no_module_imports_a_private_name_of_another():
    found = [
        f"{name}: {alias.name}"
        for name, file in modules().items()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]
    assert found == []


def test_every_reader_and_writer_stands_in_the_tuples_of_formats():
    known = [n for n in modules() if n.startswith("ckpt.formats.")]
    for kind, table in (("reader", formats._READERS), ("writer", formats._WRITERS.values())):
        there = {n.removeprefix("ckpt.formats.") for n in known if n.endswith(f".{kind}")}
        assert set(table) == there


def test_the_list_of_packages_is_the_folders_with_an_init():
    lines = (ROOT / "pyproject.toml").read_text().split("[tool.setuptools]")[1].split("]")[0]
    listed = ast.literal_eval(lines.split("=", 1)[1].strip() + "]")
    folders = {n for n, file in modules().items() if file.name == "__init__.py"}
    assert listed == sorted(listed)
    assert {name.removeprefix("shardwright.") for name in listed} == folders
    every = {".".join(f.parent.relative_to(ROOT).parts) for f in modules().values()}
    assert every - folders == set(), "a folder of modules without an __init__.py"
