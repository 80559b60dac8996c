"""What the trainer replaces in torch and megatron-core, or relies on there: each name as expected.

A fresh interpreter looks at them, since the redirections for CPU hold for a whole process.
"""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
import warnings
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest

from shardwright.train.patches import table

ROOT = Path(__file__).resolve().parent.parent
ROWS = [
    pytest.param(row, name, id=f"{row.where}.{name}")
    for row in (*table.REPLACED, *table.RELIED_ON)
    for name in row.names.split()
]
Found = dict[str, dict[str, Any]]


def look() -> Found:
    """Each name's parameters (None: it has no signature) and source; those that are there."""
    found: Found = {}
    for row in (*table.REPLACED, *table.RELIED_ON):
        for name in row.names.split():
            thing: Any = import_module(row.where)
            try:
                for part in name.split("."):
                    thing = getattr(thing, part)
            except AttributeError:
                if not row.absent:
                    continue
                thing = import_module(row.where)
            found[f"{row.where} {name}"] = {
                "parameters": _or_none(lambda thing=thing: [*inspect.signature(thing).parameters]),
                "source": _or_none(lambda thing=thing: inspect.getsource(thing)),
            }
    return found


def _or_none(function: Any) -> Any:
    try:
        return function()
    except (TypeError, ValueError, OSError):
        return None


@pytest.fixture(scope="module")
def found() -> Found:
    run = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=600, check=True
    )
    return json.loads(run.stdout)


@pytest.mark.parametrize(("row", "name"), ROWS)
def test_a_name_is_there_and_takes_and_says_what_we_rely_on(
    row: table.Names, name: str, found: Found
) -> None:
    key = f"{row.where} {name}"
    assert key in found, f"{row.where} has no {name} any more: {row.why}"
    there, wanted = found[key], row.parameters.split()
    if row.exact:
        assert there["parameters"] == wanted
    elif wanted:
        assert set(wanted) <= set(there["parameters"])
    for text in row.texts:
        assert text in there["source"], row.why


def test_megatron_core_is_the_version_that_the_table_was_made_for() -> None:
    assert metadata.version("megatron-core") == "0.16.1"


def test_a_name_that_is_not_in_the_table_cannot_be_replaced() -> None:
    with pytest.raises(AssertionError, match=r"torch\.cuda\.is_available is not in the table"):
        table.replace("torch.cuda", "is_available", None)


def test_no_name_stands_in_the_table_twice() -> None:
    every = [(row.where, name) for row in table.REPLACED for name in row.names.split()]
    assert len(every) == len(set(every))


# --- nothing is left out -----------------------------------------------------------------------


def _trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted((ROOT / "train").rglob("*.py"))}


def test_every_private_name_of_another_package_is_in_the_table() -> None:
    used: dict[str, str] = {}
    own = {"_cos_sin", "_exit"}  # our mark on a tensor; os._exit is public
    for path, tree in _trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                inside = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                if inside and isinstance(node.ctx, ast.Store):
                    own.add(node.attr)
                elif not node.attr.startswith("__"):
                    used.setdefault(node.attr, f"{path.relative_to(ROOT)}:{node.lineno}")
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
    said = " ".join(
        f"{row.where}.{row.names} {' '.join(row.texts)}"
        for row in (*table.REPLACED, *table.RELIED_ON)
    )
    known = set(said.replace(".", " ").split())
    assert {name: where for name, where in used.items() if name not in own | known} == {}


def test_modules_of_other_packages_are_changed_through_the_table_alone() -> None:
    """No assignment to an attribute of an imported module, and no setattr on one."""
    faults = []
    for path, tree in _trees().items():
        if path.name == "table.py":
            continue
        modules = {
            alias.asname or alias.name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                base: ast.expr = node.value
                while isinstance(base, ast.Attribute):
                    base = base.value
                if isinstance(base, ast.Name) and base.id in modules:
                    faults.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
    assert faults == []


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(look()))
