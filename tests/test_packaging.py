"""What is installed: the base without torch, what each extra brings, the wheel and the sdist."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from strategies import raw, write_hf

import shardwright
from shardwright.ckpt import errors
from shardwright.tools import plan_layout, train_config

ROOT = Path(__file__).resolve().parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text()
TOPS = ("shardwright", "ckpt", "tools", "train")
_LISTED = PROJECT.split("dependencies = [")[1].split("]")[0]
BASE = set(re.findall(r'^    "([a-z0-9-]+)[^"]*",$', _LISTED, re.M))
_EXTRAS = PROJECT.split("optional-dependencies]")[1]
EXTRAS = dict(re.findall(r"^(\w+) = \[(.*?)\](?:$|  #)", _EXTRAS, re.M | re.S))
ALSO = {"isal", "PIL"}  # done without where it is absent; and what matplotlib brings


def imports(top: str) -> Iterator[tuple[Path, str]]:
    """(file, module) of every import that is no relative one, inside functions too."""
    for file in sorted((ROOT / top).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                yield from ((file, alias.name.partition(".")[0]) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield file, (node.module or "").partition(".")[0]


def test_every_package_that_is_imported_is_of_the_base_or_of_an_extra():
    known = {*sys.stdlib_module_names, "shardwright", *BASE, *ALSO, *errors._EXTRAS}
    for top in TOPS:
        for file, module in imports(top):
            assert module in known, f"{file}: {module}"


def test_the_base_is_what_checkpoint_commands_import():
    used = {module for _, module in imports("ckpt")} - set(sys.stdlib_module_names)
    assert {"numpy", "tqdm", "xxhash"} <= used & BASE
    assert used - BASE - ALSO - set(errors._EXTRAS) - {"shardwright"} == set()
    assert not BASE & {"torch", "transformers", "matplotlib", "pyyaml"}


def test_the_extra_that_an_error_names_brings_the_module():
    for module, (name, extra) in errors._EXTRAS.items():
        brings, todo = "", [extra]
        while todo:
            found = EXTRAS.get(todo.pop(), "")
            brings += found
            todo += [word for words in re.findall(r"shardwright\[([\w,]+)\]", found)
                     for word in words.split(",")]  # fmt: skip
        package = {"yaml": "pyyaml", "megatron": "megatron-core"}.get(module, module)
        in_base = package in BASE
        assert in_base or package.replace("_", "-") in brings, f"{name}: [{extra}] has no {package}"


@pytest.mark.parametrize(
    ("module", "call", "extra"),
    [
        ("yaml", lambda out: plan_layout.main(["--params", "13B", "--gpus", "8", "--output",
                                               f"{out}/p.yaml"]), "plan"),
        ("matplotlib", lambda out: plan_layout.main(["--params", "13B", "--gpus", "8", "--plot",
                                                     f"{out}/p.png"]), "plan"),
        ("yaml", lambda out: train_config.main(["--yes", "--output", f"{out}/c.yaml"]), "plan"),
    ],
)  # fmt: skip
def test_a_command_says_in_one_line_which_extra_it_lacks(
    module, call, extra, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, module, None)
    assert call(tmp_path) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"is not installed; pip install 'shardwright[{extra}]'" in error
    assert list(tmp_path.iterdir()) == []


def without(module: str, code: str) -> str:
    """What code prints to stderr in a process that lacks a package."""
    block = f"import sys\nsys.modules[{module!r}] = None\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", block], capture_output=True, text=True, check=False
    )
    return done.stderr


@pytest.mark.parametrize("module", ["torch", "transformers", "megatron"])
def test_training_says_in_one_line_which_package_it_lacks(module, tmp_path):
    write_hf(tmp_path / "model", raw("llama", heads=(4, 4), head_dim=4, layers=2, vocab=256))
    (tmp_path / "t.txt").write_text("text " * 500)
    words = ["--model", f"{tmp_path}/model", "--data", f"{tmp_path}/t.txt", "--steps", "1"]
    error = without(module, "from shardwright.tools.train_ckpt import main\n"
                            f"raise SystemExit(main({words!r}))")  # fmt: skip
    name = {"megatron": "megatron-core"}.get(module, module)
    what = "" if module == "torch" else "training: "
    said = f"{what}{name} is not installed; pip install 'shardwright[train]'"
    assert error.splitlines()[-1] == f"error: {said}"
    assert "Traceback" not in error


def test_python_code_is_told_the_extra_as_well():
    error = without("torch", "import shardwright\nshardwright.Accelerator")
    assert "torch is not installed; pip install 'shardwright[train]'" in error.splitlines()[-1]
    error = without("torch.nn", "import shardwright\nshardwright.Accelerator")
    assert "pip install" not in error, "a broken torch is not an absent one"


def test_version_and_changelog_agree():
    headings = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    release, _, dev = shardwright.__version__.partition(".dev")
    assert headings[0] == ("Unreleased" if dev else release)
    assert not dev or release not in headings, "a development version of what is released already"
    assert 'dynamic = ["version"]' in PROJECT


def test_every_top_package_is_marked_as_typed():
    assert all((ROOT / top / "py.typed").is_file() for top in TOPS)


# --- the wheel and the sdist --------------------------------------------------------------------


def build(kind: str, source: Path, out: Path) -> None:
    """Build a wheel or an sdist with this environment's setuptools."""
    code = f"import sys, setuptools.build_meta as b; b.build_{kind}(sys.argv[1])"
    command = [sys.executable, "-c", code, str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the sdist, unpacked too, and the wheel that is built from it."""
    out, copied = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("copy")
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    known = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if known.returncode:
        pytest.skip("no git here: the files of the project are not known")
    for name in filter(lambda name: (ROOT / name).is_file(), known.stdout.splitlines()):
        (copied / name).parent.mkdir(parents=True, exist_ok=True)
        (copied / name).write_bytes((ROOT / name).read_bytes())
    build("sdist", copied, out)
    with tarfile.open(next(out.glob("*.tar.gz"))) as archive:
        archive.extractall(out / "sdist", filter="data")
    build("wheel", next((out / "sdist").iterdir()), out)
    return out


@pytest.mark.slow
def test_the_wheel_holds_packages_types_and_completion(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    for top in TOPS:
        inside = "shardwright/" + ("" if top == "shardwright" else f"{top}/")
        assert inside + "py.typed" in names
    for file in (file for top in TOPS for file in (ROOT / top).rglob("*.py")):
        name = file.relative_to(ROOT).as_posix()
        assert (name if name.startswith("shardwright/") else f"shardwright/{name}") in names
    assert {f"shardwright/completions/shardwright.{s}" for s in ("bash", "zsh", "fish")} <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "tools/"))]


@pytest.mark.slow
def test_the_wheel_works_outside_of_the_repository_with_the_base_alone(built, tmp_path):
    """In an environment that holds the packages of the base, as links to this one's."""
    lib = tmp_path / "lib"
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(lib)
    for name in BASE:
        found = __import__(name).__file__
        assert found is not None
        (lib / name).symlink_to(Path(found).parent)
        libs = Path(found).parent.parent / f"{name}.libs"
        if libs.is_dir():
            (lib / libs.name).symlink_to(libs)
    case = raw("llama", heads=(4, 4), head_dim=4, layers=4, vocab=24)
    write_hf(tmp_path / "hf", case)

    def run(*words: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-S", "-m", "shardwright", *words], cwd=tmp_path, capture_output=True,
            text=True, check=False, env={"PYTHONPATH": str(lib), "PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    for command in ("reshard", "merge", "inspect", "verify", "train", "plan", "doctor", "env"):
        assert run(command, "--help").startswith(f"usage: shardwright {command} ")
    assert re.search(r"^torch +not installed$", run("env"), re.M)
    run("reshard", "hf", "--tp", "2", "--pp", "2")
    run("reshard", "hf-tp2-pp2", "--to", "torch_dist", "--tp", "4", "--pp", "1", "--output", "td")
    run("merge", "td", "--output", "back", "--verify")
    assert "equal" in run("verify", "hf", "back")
    assert "sound" in run("verify", "td")
    assert "family llama" in run("inspect", "td")
    assert (
        run("completion", "bash") == (lib / "shardwright/completions/shardwright.bash").read_text()
    )
    assert "error: torch is not installed" in run(
        "train", "--model", "hf", "--data", "x", "--steps", "1", code=1
    )


@pytest.mark.slow
def test_the_tests_run_from_the_sdist(built):
    """One file of each kind: the package is the sdist's own, without being installed."""
    source = next((built / "sdist").iterdir())
    docs = "tests/test_docs.py::test_every_option_is_named_in_the_docs"
    words = ["tests/test_place_plan.py", "tests/test_architecture.py", docs]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *words],
        cwd=source, capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    code = "import shardwright, shardwright.ckpt as c; print(shardwright.__file__, c.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=True
    )
    assert all(name.startswith(str(source.resolve())) for name in done.stdout.split())
