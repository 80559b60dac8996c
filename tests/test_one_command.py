"""``shardwright``, the one command: what it offers, its examples, completion, and start-up."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from independent import pack_states, stored, write_native
from safetensors.numpy import load_file, save_file
from strategies import raw, write_hf

import shardwright
from shardwright.tools import all_commands, completion, env, reshard, train_config, train_doctor
from shardwright.tools.all_commands import COMMANDS, main

HEAVY = {"numpy", "torch", "yaml", "transformers", "tqdm", "xxhash", "safetensors", "matplotlib"}
# Each with its module: the six commands, the two of train-ckpt, and what `shardwright` adds.
MODULES = {
    f"shardwright {name}": import_module(f"shardwright.tools.{row.module}")
    for name, row in COMMANDS.items()
} | {"shardwright train config": train_config, "shardwright train doctor": train_doctor}


def run(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """``python -m shardwright`` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "shardwright", *map(str, words)],
        capture_output=True, text=True, check=False, cwd=cwd,
    )  # fmt: skip


def called(words: list[str]) -> int:
    """The exit code of the command in this process."""
    try:
        return main(words)
    except SystemExit as stopped:
        return int(stopped.code or 0)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Tiny checkpoints under the names of the examples."""
    case = raw("llama", heads=(8, 8), head_dim=2, layers=8, vocab=256)
    write_hf(tmp_path / "Llama-3.1-8B", case)
    states = {"exp_avg": case.numbered(50_000), "exp_avg_sq": case.numbered(100_000)}
    write_native(
        tmp_path / "checkpoint-1000", case.config, stored(case.config, case.state, 2, 2),
        pack_states(case.config, states, 2, 2),
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    megatron = ["--to", "megatron", "--tp", "2", "--pp", "1", "--output", "megatron-run"]
    assert reshard.main(["checkpoint-1000", *megatron]) == 0
    (tmp_path / "docs").mkdir()
    for name in ("a", "b"):
        (tmp_path / "docs" / f"{name}.txt").write_text("Shards lie in files. " * 4000)
    (tmp_path / "run.yaml").write_text("seq_length: 32\nmicro_batch_size: 1\n")
    return tmp_path


SLOW = ("train", "doctor", "train doctor")  # these start ranks


@pytest.mark.parametrize("command", [c for c in MODULES if not c.endswith(SLOW)])
def test_every_example_of_a_help_runs(command, folder, capsys):
    examples = MODULES[command].EXAMPLES
    for example in examples:
        if command == "shardwright verify" and "merged" in example:
            assert called(["merge", "checkpoint-1000", "--output", "merged"]) == 0
        if command == "shardwright verify" and "tp4-pp2" in example:
            assert called(["reshard", "Llama-3.1-8B", "--tp", "4", "--pp", "2"]) == 0
        words = shlex.split(example.partition(" >")[0])
        assert called([*command.split()[1:], *words]) == 0, (example, capsys.readouterr())
    assert called([*command.split()[1:], "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {command} {example}".rstrip() + "\n" in shown for example in examples)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["shardwright train", "shardwright doctor"])
def test_every_example_that_starts_ranks_runs(command, folder):
    file, rng = folder / "Llama-3.1-8B" / "model.safetensors", np.random.default_rng(1)
    start = {k: rng.normal(0, 0.02, v.shape).astype(np.float32) for k, v in load_file(file).items()}
    save_file(start, file, {"format": "pt"})
    for example in MODULES[command].EXAMPLES:
        line = f"{sys.executable} -m {command} {example}"
        if command.endswith("train"):  # this model has 32 positions, and the text is short
            line += " --seq-length 32"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
        assert done.returncode == 0 or (command.endswith("doctor") and done.returncode == 1), (
            line, done.stdout, done.stderr,
        )  # fmt: skip
        assert "Traceback" not in done.stderr


def test_the_examples_of_the_list_of_commands_run(folder, capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for example in all_commands.EXAMPLES:
        assert f"  shardwright {example}\n" in shown
        assert called(shlex.split(example)) == 0, capsys.readouterr().err
    for name in COMMANDS:
        assert f"\n  {name} " in shown


def test_a_command_is_the_same_under_both_names(folder, capsys):
    assert called(["inspect", "Llama-3.1-8B"]) == 0
    there = capsys.readouterr().out
    assert import_module("shardwright.tools.inspect_ckpt").main(["Llama-3.1-8B"]) == 0
    assert capsys.readouterr().out == there
    assert called(["verify", "nowhere"]) == 2, "verify returns 2 where it cannot read"
    assert called(["merge", "nowhere"]) == 1


@pytest.mark.parametrize("command", MODULES)
def test_version_is_an_option_of_every_command(command, capsys):
    assert called([*command.split()[1:], "--version"]) == 0
    assert capsys.readouterr().out == f"shardwright {shardwright.__version__}\n"


def test_the_version_is_said_in_three_ways():
    said = f"shardwright {shardwright.__version__}\n"
    root = Path(__file__).parent.parent
    assert [run(word, cwd=root).stdout for word in ("version", "--version")] == [said, said]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("merg x", "merge"),
        ("completions", "completion"),
        ("train doctr", "doctor"),
        ("reshard x --tpp 2", "--tp"),
        ("plan --gpu-memry 3", "--gpu-memory"),
        ("train --globl-batch-size 3", "--global-batch-size"),
        ("train config --num-proceses 3", "--num-processes"),
        ("inspect x --jsn", "--json"),
    ],
)
def test_a_usage_error_is_two_lines_and_names_what_was_meant(words, meant, capsys):
    assert called(words.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 2
    assert f"did you mean {meant}?" in captured.err


@pytest.mark.parametrize("words", ["", "train", "plan", "completion", "nothing-like-it"])
def test_a_missing_word_is_a_usage_error(words, capsys):
    assert called(words.split()) == 2
    assert "Traceback" not in capsys.readouterr().err


# --- start-up ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", ["--help", "version", "completion bash", "env", *(f"{n} --help" for n in COMMANDS)]
)
def test_nothing_slow_is_imported_to_say_something(words):
    code = (
        "import sys\nfrom shardwright.tools.all_commands import main\n"
        f"try: main({words.split()!r})\nexcept SystemExit: pass\n"
        "print(*{name.split('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stderr.split())


def test_the_package_offers_the_api_and_imports_it_when_it_is_used():
    code = (
        "import sys, shardwright\n"
        "assert set(shardwright.__all__) <= set(dir(shardwright))\n"
        "assert 'reshard' in dir(shardwright.ckpt)\n"
        f"assert not {HEAVY!r} & set(sys.modules)\n"
        "assert shardwright.reshard is shardwright.ckpt.reshard\n"
        "from shardwright import open_checkpoint, merge, CheckpointError, __version__\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert all(hasattr(shardwright, name) for name in shardwright.__all__)
    with pytest.raises(AttributeError, match="no attribute 'merg'"):
        shardwright.merg  # noqa: B018


# --- completion ----------------------------------------------------------------------------------


def completed(script: Path, *words: str) -> list[str]:
    """What bash offers for the last of ``words``."""
    quoted = " ".join(shlex.quote(word) for word in words)
    code = (
        f"compopt() {{ :; }}; . {script}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; "
        '_shardwright; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_commands_options_and_choices(tmp_path):
    script = tmp_path / "shardwright.bash"
    script.write_text(completion.script("bash"))
    assert completed(script, "shardwright", "me") == ["merge"]
    assert completed(script, "shardwright", "") == list(COMMANDS)
    assert completed(script, "shardwright", "merge", "--max") == ["--max-shard-size"]
    assert completed(script, "merge-ckpt", "--max") == ["--max-shard-size"]
    assert completed(script, "/usr/bin/reshard", "x", "--replicas", "") == ["compare", "first"]
    assert completed(script, "train-ckpt", "") == ["config", "doctor", "run"]
    assert completed(script, "train-ckpt", "doctor", "--topo") == ["--topology"]
    assert completed(script, "shardwright", "train", "config", "--show") == ["--show"]
    assert completed(script, "shardwright", "completion", "") == ["bash", "zsh", "fish"]
    assert completed(script, "reshard", "--output", "") == []  # left to bash: file names


@pytest.mark.parametrize("shell", list(completion.SHELLS))
def test_a_script_knows_every_option_of_every_command(shell):
    text = completion.script(shell)
    found = set(re.findall(r"-l ([a-z0-9-]+)" if shell == "fish" else r"--([a-z0-9-]+)", text))
    for module in MODULES.values():
        flags = [f for action in module.parser()._actions for f in action.option_strings]
        assert {flag[2:] for flag in flags if flag.startswith("--")} <= found


@pytest.mark.parametrize("shell", list(completion.SHELLS))
def test_a_script_that_a_wheel_holds_is_printed_as_it_is(shell, tmp_path, monkeypatch, capsys):
    (tmp_path / completion.FOLDER).mkdir()
    (tmp_path / completion.FOLDER / f"shardwright.{shell}").write_text("ready\n")
    monkeypatch.setattr(shardwright, "__file__", str(tmp_path / "__init__.py"))
    assert called(["completion", shell]) == 0
    assert capsys.readouterr().out == "ready\n"


def test_the_line_that_installs_the_completion_of_bash_works(tmp_path):
    line = f'shardwright() {{ {sys.executable} -m shardwright "$@"; }}; '
    line += f"shardwright completion {completion.EXAMPLES[0]} && bash -ic 'complete -p reshard'"
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, check=False,
        env={**os.environ, "HOME": str(tmp_path)}, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert "-F _shardwright reshard" in done.stdout, done.stderr


# --- env -----------------------------------------------------------------------------------------


def test_env_names_versions_and_platform_and_no_secrets(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("USER", "someone-by-name")
    monkeypatch.chdir(tmp_path)
    assert called(["env", "--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    assert found["shardwright"] == shardwright.__version__
    assert found["python"].endswith(".".join(map(str, sys.version_info[:3])))
    assert found["numpy"] == import_module("numpy").__version__
    assert not {"hf_secret", "someone-by-name", os.uname().nodename, str(tmp_path)} & {
        word for value in found.values() for word in value.split()
    }
    assert called(["env"]) == 0
    assert capsys.readouterr().out.count("\n") == len(found)


def test_the_file_system_is_that_of_the_longest_mount_point(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/vda / ext4 rw 0 0\nserver:/x /mnt/my\\040data nfs4 rw 0 0\n"
        "none /mnt tmpfs rw 0 0\nserver:/y /mnt/my\\040data/deep lustre rw 0 0\n"
    )
    assert env.file_system(Path("/mnt/my data/run"), mounts) == "nfs4"
    assert env.file_system(Path("/mnt/my data/deep/run"), mounts) == "lustre"
    assert env.file_system(Path("/mnt/other"), mounts) == "tmpfs"
    assert env.file_system(Path("/home"), mounts) == "ext4"
    assert env.file_system(Path("/home"), tmp_path / "absent") == "unknown"
