"""The image and the workflow name only what the project has. Neither is run here."""

import fnmatch
import json
import re
import sys
from pathlib import Path

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
KNOWN = {"ARG", "CMD", "COPY", "ENTRYPOINT", "FROM", "RUN", "USER", "WORKDIR"}


def instructions() -> list[tuple[str, str]]:
    text = "\n".join(line for line in DOCKERFILE.splitlines() if not line.startswith("#"))
    lines = filter(None, text.replace("\\\n", " ").splitlines())
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def arguments_of(name: str) -> list[str]:
    return [rest for word, rest in instructions() if word == name]


def is_ignored(path: str) -> bool:
    """As Docker reads .dockerignore: the last pattern that fits a top-level name decides."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text("utf-8").split("\n"):
        pattern = line.removeprefix("!")
        if line and not line.startswith("#") and fnmatch.fnmatchcase(path, pattern):
            ignored = not line.startswith("!")
    return ignored


def pythons() -> list[str]:
    pattern = re.compile(r"Programming Language :: Python :: (3\.\d+)")
    return [m[1] for m in map(pattern.fullmatch, PROJECT["classifiers"]) if m]


def workflow_job() -> dict:
    (job,) = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))["jobs"].values()
    return job


def test_the_dockerfile_uses_known_instructions_and_starts_with_a_base_image():
    words = [word for word, _ in instructions()]
    assert set(words) <= KNOWN
    assert words[words.index("FROM") - 1 :][:2] == ["ARG", "FROM"]
    assert all(re.match(r"python:\$\{PYTHON\}-slim\b", image) for image in arguments_of("FROM"))
    (python,) = [a.removeprefix("PYTHON=") for a in arguments_of("ARG") if a.startswith("PYTHON=")]
    assert python in pythons()


def test_what_the_image_copies_exists_and_is_not_ignored():
    copies = [a.split()[:-1] for a in arguments_of("COPY") if not a.startswith("--from=")]
    sources = [source for copy in copies for source in copy]
    assert {"pyproject.toml", "ckpt", "shardwright", "tools", "train"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not is_ignored(source), source


@pytest.mark.parametrize("path", [".git", ".venv", "build", "tests", "docs"])
def test_the_build_context_leaves_out(path):
    assert is_ignored(path)


def test_the_image_takes_the_base_by_default_and_names_extras_that_exist():
    assert 'EXTRAS=""' in arguments_of("ARG")
    named = re.findall(r"EXTRAS=([a-z,]+)", DOCKERFILE + (ROOT / "README.md").read_text("utf-8"))
    extras = {extra for names in named for extra in names.split(",")}
    assert extras
    assert extras <= set(PROJECT["optional-dependencies"])


def test_the_image_runs_a_script_of_the_project_and_not_as_root():
    (entry,) = arguments_of("ENTRYPOINT")
    assert json.loads(entry) == ["shardwright"]
    assert "shardwright" in PROJECT["scripts"]
    (user,) = arguments_of("USER")
    assert user not in ("root", "0")
    assert any(re.search(rf"useradd .*\b{user}$", run) for run in arguments_of("RUN"))


def test_the_workflow_covers_every_python_that_the_project_names():
    assert workflow_job()["strategy"]["matrix"]["python"] == pythons()
    assert PROJECT["requires-python"] == f">={pythons()[0]}"


def test_the_workflow_makes_what_ci_run_makes_and_the_makefile_has_it():
    commands = [step["run"] for step in workflow_job()["steps"] if "run" in step]
    targets = [re.fullmatch(r"make (\S+) PYTHON=python", command)[1] for command in commands]
    assert targets == re.findall(r"^make (\S+)$", (ROOT / ".ci/run").read_text("utf-8"), re.M)
    rules = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
    assert set(targets) <= set(rules)


def test_the_workflow_caches_pip_by_files_that_exist():
    (setup,) = [s["with"] for s in workflow_job()["steps"] if "setup-python" in s.get("uses", "")]
    assert setup["cache"] == "pip"
    for name in setup["cache-dependency-path"].split():
        assert (ROOT / name).is_file(), name
