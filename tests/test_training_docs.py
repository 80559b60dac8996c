"""docs/training.md says what the code says, and no setting is left unread."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from shardwright.train.config import schema as config

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "training.md").read_text()


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_the_tables_are_those_of_the_code() -> None:
    tables, found = _script("tables"), []
    for name in tables.PAGES:
        text = (ROOT / "docs" / name).read_text()
        assert tables.page(text) == text, "run python docs/tables.py"
        found += re.findall("<!-- (?!end)(.*) -->", text)
    assert sorted(found) == ["arguments", "families", "fields", "members", "options"]


def test_the_tree_is_that_of_the_code() -> None:
    page = (ROOT / "docs" / "tree.md").read_text()
    assert _script("tree").page() == page, "run python docs/tree.py"


def test_every_member_that_scripts_use_is_named() -> None:
    from shardwright.train.accelerate.accelerator import Accelerator
    from shardwright.train.accelerate.loader import PreparedLoader
    from shardwright.train.accelerate.model import PreparedModel

    inside = {"remember_loss", "evaluated", "clear_gradients", "whole_state", "restart", "tell"}
    inside |= {
        "registered",
        "pending_batches",
        "active_loader",
        "watched",
        "begin_pass",
        "end_pass",
    }
    inside |= {"skipping", "state", "restore", "start_after", "begin", "of"}
    for kind in (Accelerator, PreparedLoader, PreparedModel):
        public = {name for name in vars(kind) if not name.startswith("_")}
        lacking = sorted(name for name in public - inside if f"`{name}`" not in PAGE)
        assert not lacking, f"{kind.__name__}: {', '.join(lacking)}"


PARTS = [part for part in vars(config).values() if dataclasses.is_dataclass(part)]
SETTINGS = [
    (part.__name__, field.name)
    for part in PARTS
    if part.__module__ == config.__name__ and part.__name__ != "Sizes"
    for field in dataclasses.fields(part)
]
# Passed on under another name, or read where settings are made.
ELSEWHERE = {
    ("Parallelism", "last_stage_layers"),
    ("ModelSettings", "rotary"),
    ("BatchSizes", "accumulation"),
}


@pytest.mark.parametrize(("part", "name"), SETTINGS)
def test_every_setting_is_read_by_the_trainer(part: str, name: str) -> None:
    if (part, name) in ELSEWHERE:
        return
    every = (ROOT / "train").rglob("*.py")
    files = [file for file in every if file.parent.name != "config"]
    text = "\n".join(file.read_text() for file in [*files, ROOT / "tools" / "train_ckpt.py"])
    assert re.search(rf"\.{name}\b", text), f"{part}.{name} changes nothing"
