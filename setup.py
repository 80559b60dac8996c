"""What pyproject.toml cannot say: a build makes the completion scripts from the parsers."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildWithCompletions(build_py):
    """Builds the packages, and beside them the scripts that ``shardwright completion`` prints."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # made from the parsers whenever they are asked for
            return
        sys.path.insert(0, str(ROOT))
        from shardwright.tools.completion import FOLDER, SHELLS, script

        folder = Path(self.build_lib, "shardwright", FOLDER)
        folder.mkdir(parents=True, exist_ok=True)
        for shell in SHELLS:
            (folder / f"shardwright.{shell}").write_text(script(shell), encoding="utf-8")


setup(cmdclass={"build_py": BuildWithCompletions})
