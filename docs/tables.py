"""Writes the tables of the pages that the code has already: ``python docs/tables.py``.

A test fails where file and code differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from shardwright.tools.inspect_ckpt import known_families
from shardwright.train.accelerate.members import TABLES, WORKS
from shardwright.train.config.cli import OPTIONS
from shardwright.train.config.fields import ARCHITECTURE, ARGUMENTS, ELSEWHERE, FIELDS, FieldUse

PAGES = ("training.md", "families.md")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _said(use: FieldUse) -> str:
    """What becomes of a field."""
    return use.what if use.use == "used" else f"Refused. {use.what} But {use.reason}."


def _default(value: object) -> str:
    return "" if value is None else f"`{value}`"


def fields() -> str:
    """Every field of the plugin."""
    return _table(
        ("field", "default", "here"),
        ((f"`{name}`", _default(use.default), _said(use)) for name, use in FIELDS.items()),
    )


def arguments() -> str:
    """What ``other_megatron_args`` may hold beside the fields."""
    rows = [(f"`{name}`", _default(use.default), use.what) for name, use in ARGUMENTS.items()]
    compared = ", ".join(f"`{name}`" for name in ARCHITECTURE)
    rows.append((compared, "", "Compared with the model; a difference is an error."))
    reasons: dict[str, list[str]] = {}
    for name, reason in ELSEWHERE.items():
        reasons.setdefault(reason, []).append(f"`{name}`")
    rows += [(", ".join(names), "", f"Refused: {reason}.") for reason, names in reasons.items()]
    return _table(("argument", "default", "here"), rows)


def options() -> str:
    """Every option of train-ckpt."""
    rows = []
    for name, option in OPTIONS.items():
        flag = "--" + name.replace("_", "-")
        value = option.metavar or ("|".join(option.values.choices) or "")
        if option.values.kind == "bool":
            flag, value = f"{flag}, --no-{flag[2:]}", ""
        if name == "resume":
            value = f"[{value}]"
        said = option.default is None or option.default is False or "(default" in option.help
        default = "" if said else _default(option.default)
        rows.append((f"`{f'{flag} {value}'.strip()}`", default, option.help))
    return _table(
        ("option", "default", "meaning"), ((a.replace("|", "\\|"), b, c) for a, b, c in rows)
    )


def families() -> str:
    """Every family, and how far it is known."""
    heads = ("family", "model_type", "weights", "train", "megatron")
    return _table(heads, (tuple(row[head] for head in heads) for row in known_families()))


def members() -> str:
    """Every public member of what scripts for Accelerate hold."""
    rows = []
    for of, groups in TABLES.items():
        for row in sorted(groups, key=lambda row: (row.use != WORKS, bool(row.what))):
            names = ", ".join(f"`{name}`" for name in row.names.split())
            here = row.use if not row.what else f"{row.use}: {row.what}"
            rows.append((of, names, here))
    return _table(("of", "members", "here"), rows)


def page(text: str) -> str:
    """A page with its tables as the code has them."""
    for make in (members, fields, arguments, options, families):
        name = make.__name__
        mark = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if mark.search(text):
            text = mark.sub(rf"\1{name}-table\n\2", text).replace(f"{name}-table", make())
    return text


if __name__ == "__main__":
    for name in PAGES:
        path = Path(__file__).with_name(name)
        path.write_text(page(path.read_text()))
