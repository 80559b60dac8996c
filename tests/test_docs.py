"""What README and docs/ show is true: commands run, snippets run, options exist and are named.

Commands about checkpoints run on tiny ones under the names that the pages use. Commands that start
training or need a cluster are checked for their options.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from independent import pack_states, stored, write_native
from strategies import raw, write_hf

from shardwright.tools import (
    inspect_ckpt,
    merge_ckpt,
    plan_layout,
    reshard,
    train_ckpt,
    verify_ckpt,
)

ROOT = Path(__file__).resolve().parent.parent
PAGES = {path.name: path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]}
COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "reshard": reshard.main,
    "merge-ckpt": merge_ckpt.main,
    "verify-ckpt": verify_ckpt.main,
    "inspect-ckpt": inspect_ckpt.main,
    "plan-layout": plan_layout.main,
    "train-ckpt": train_ckpt.main,
}
PARTS = {"train-ckpt": ("config", "doctor", "run")}  # commands with a second word
# Options that pages name and that belong to other tools.
OTHERS = {
    "torchrun": "--standalone --nproc-per-node --nnodes --node-rank --master-addr --master-port "
    "--rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf",
    "Megatron-LM": "--ckpt-format --no-load-rng --no-load-optim --finetune "
    "--override-opt_param-scheduler --use-checkpoint-args --norm-epsilon "
    "--rotary-seq-len-interpolation-factor",
    "make torture": "--into --minutes --only --part --report --seeds --state",
    "accelerate launch": "--use_megatron_lm --config_file",
}
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]*")
_BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)


def blocks(page: str, *languages: str) -> list[str]:
    """The code blocks of a page in these languages."""
    return [text for language, text in _BLOCK.findall(PAGES[page]) if language in languages]


def lines(text: str) -> Iterator[str]:
    """Commands of a block: continued lines joined, prompts and comments removed."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        command = line.strip().removeprefix("$ ")
        if command and not command.startswith("#"):
            yield command.partition("  #")[0]


def shown() -> list[tuple[str, str]]:
    """(page, command line) of each command of ours in a block or an indented line."""
    found = []
    for name, page in PAGES.items():
        texts = [text for _, text in _BLOCK.findall(page)]
        rest = _BLOCK.sub("", page)
        texts += [line for line in rest.splitlines() if line.startswith("    ")]
        found += [
            (name, line) for text in texts for line in lines(text) if line.split()[0] in COMMANDS
        ]
    return found


def options_of(monkeypatch: pytest.MonkeyPatch, command: str) -> set[str]:
    """Every option of a command that its help lists."""
    seen: list[argparse.ArgumentParser] = []
    monkeypatch.setattr(argparse.ArgumentParser, "print_help", lambda self: seen.append(self))
    name, *second = command.split()
    with pytest.raises(SystemExit):
        COMMANDS[name]([*second, "--help"])
    return {
        option
        for action in seen[0]._actions
        if action.help is not argparse.SUPPRESS
        for option in action.option_strings
        if option.startswith("--")
    }


@pytest.fixture
def options(monkeypatch) -> dict[str, set[str]]:
    every = [*COMMANDS, *(f"{c} {part}" for c, parts in PARTS.items() for part in parts)]
    return {command: options_of(monkeypatch, command) for command in every}


def test_every_option_that_a_page_shows_belongs_to_the_command(options):
    commands = shown()
    assert len(commands) > 20
    for page, line in commands:
        name, *words = line.split()
        command = f"{name} {words[0]}" if words and words[0] in PARTS.get(name, ()) else name
        own = re.split(r" \S+\.py\b", line)[0] if words[:1] == ["run"] else line
        for option in _OPTION.findall(own):  # what follows a script is the script's
            assert option in options[command], f"{page}: {line}: {command} has no {option}"


def test_every_option_in_the_text_exists(options):
    known = set().union(*options.values(), *(text.split() for text in OTHERS.values()))
    for name, page in PAGES.items():
        if name == "tree.md":
            continue
        for span in re.findall(r"`([^`\n]+)`", _BLOCK.sub("", page)):
            for option in _OPTION.findall(span):
                assert option in known, f"{name}: `{span}`: no command has {option}"


def test_every_option_is_named_in_the_docs(options):
    text = "\n".join(PAGES.values())
    named = set(_OPTION.findall(text))
    fields = set(re.findall(r"`([a-z0-9_]+)`", text))  # settings of the plugin
    for command, those in options.items():
        for option in those - {"--help"}:
            plain = option[2:].removeprefix("megatron-lm-").replace("-", "_")
            assert option in named or plain in fields, f"{command} {option}: no page names it"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with tiny checkpoints under the names of the pages."""
    case = raw("llama", heads=(8, 8), head_dim=2, layers=8, vocab=24)
    write_hf(tmp_path / "Llama-3.1-8B", case)
    states = {"exp_avg": case.numbered(50_000), "exp_avg_sq": case.numbered(100_000)}
    write_native(
        tmp_path / "checkpoint-1000",
        case.config,
        stored(case.config, case.state, 2, 2),
        pack_states(case.config, states, 2, 2),
    )
    monkeypatch.chdir(tmp_path)
    words = ["--to", "megatron", "--tp", "2", "--pp", "1", "--output", "megatron-run"]
    assert reshard.main(["checkpoint-1000", *words]) == 0
    return tmp_path


def test_the_commands_and_the_first_snippet_of_the_readme_run(folder):
    text, *_ = blocks("README.md", "console")
    commands = list(lines(text))
    assert len(commands) == 9
    for line in commands:
        name, *words = shlex.split(line)
        assert COMMANDS[name](words) == 0, line
    snippet, *_ = blocks("README.md", "python")
    exec(compile(snippet, "README.md", "exec"), {})
    assert (folder / "out" / "model.safetensors").is_file()


def test_the_commands_of_the_planning_page_run(folder):
    rows = [line for page, line in shown() if page == "planning.md"]
    assert len(rows) == 4
    for line in rows:
        name, *words = shlex.split(line)
        if not words[-1].startswith("docs/"):  # the picture has a test of its own
            assert COMMANDS[name](words) == 0, line
    assert (folder / "plan.yaml").is_file()


def test_the_yaml_of_the_launch_page_describes_a_run(folder, monkeypatch):
    from shardwright.train.config import cli, from_options

    text, *_ = blocks("launch.md", "yaml")
    Path("run.yaml").write_text(text)
    made = argparse.ArgumentParser()
    cli.options(made)
    config = from_options.from_options(made.parse_args(["--config", "run.yaml"]))
    assert (config.parallelism.tp, config.parallelism.pp) == (8, 2)


def test_the_first_script_of_the_training_page_runs(tmp_path):
    text, *_ = blocks("training.md", "python")
    small = text
    for long, short in (
        ("tp_degree=2, pp_degree=2", "tp_degree=1, pp_degree=1"),
        ("GPT2Config()", "GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=64)"),
        ("50257, (64, 128)", "64, (64, 16)"),
    ):
        assert long in small
        small = small.replace(long, short)
    (tmp_path / "script.py").write_text(small)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "checkpoint-epoch-0" / "checkpoint.json").is_file()
