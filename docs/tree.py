"""Writes docs/tree.md from the first sentence of every module: ``python docs/tree.py``.

A test fails where page and code differ.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path(__file__).with_name("tree.md")
HEAD = """# Every module

The first sentence of each file in `shardwright/`, `ckpt/`, `train/` and `tools/`; `python
docs/tree.py` writes this page. [design.md](design.md) says which package may import which.
"""


def sentence(file: Path) -> str:
    """The first sentence of a module's docstring; "" where it has none."""
    text = " ".join((ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0].split())
    found = re.match(r".*?[.](?= [A-Z`]|$)", text)
    return (found[0] if found else text).rstrip(".:").replace("``", "`")


def page() -> str:
    """The page as the code has it."""
    lines = [HEAD]
    for top in ("shardwright", "ckpt", "train", "tools"):
        for folder in sorted({file.parent for file in (ROOT / top).rglob("*.py")}):
            lines.append(f"\n## {folder.relative_to(ROOT).as_posix()}/\n")
            for file in sorted(folder.glob("*.py")):
                said = sentence(file)
                if said:
                    name = "" if file.name == "__init__.py" else f"`{file.name}`: "
                    lines.append(f"- {name}{said}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
