"""``train-ckpt config``: questions, flags, and the YAML that Accelerate's own package reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwright.tools import train_ckpt
from shardwright.train.config import questions
from shardwright.train.config.accelerate_yaml import read_accelerate
from shardwright.train.config.fields import ACCELERATE_FIELDS
from shardwright.train.config.from_plugin import from_plugin
from shardwright.train.config.plugin import MegatronLMPlugin

# Every key of accelerate 1.15's megatron_lm_config, with values that differ from most defaults.
KEYS: dict[str, Any] = {
    "tp_degree": 2, "pp_degree": 2, "num_micro_batches": 6, "sequence_parallelism": True,
    "recompute_activations": False, "recompute_granularity": "full", "recompute_method": "block",
    "recompute_num_layers": 2, "use_distributed_optimizer": True, "gradient_clipping": 0.5,
    "use_custom_fsdp": False, "overlap_cpu_optimizer_d2h_h2d": False, "no_load_optim": True,
    "eod_mask_loss": True, "no_save_optim": True, "optimizer_cpu_offload": False,
    "use_precision_aware_optimizer": False, "decoder_last_pipeline_num_layers": 3,
    "attention_backend": True, "expert_model_parallel_size": 1, "context_parallel_size": 1,
    "attention_dropout": 0.1, "hidden_dropout": 0.2, "attention_softmax_in_fp32": True,
    "expert_tensor_parallel_size": 1, "calculate_per_token_loss": False,
    "use_rotary_position_embeddings": True,
}  # fmt: skip
FLAGS = [
    "--recompute", "full", "--num-machines", "2", "--machine-rank", "1", "--main-process-ip",
    "10.0.0.1", "--main-process-port", "29511", "--rdzv-backend", "c10d", "--num-processes", "16",
    "--mixed-precision", "bf16",
    *(
        word
        for name, value in KEYS.items()
        if name not in ("recompute_activations", "recompute_granularity")
        for word in (f"--{name.replace('_', '-')}", str(value))
    ),
]  # fmt: skip


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting, GPU or file of the machine reaches a test."""
    for name in list(os.environ):
        if name.startswith(("MEGATRON_LM_", "ACCELERATE_")) or name == "WORLD_SIZE":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")


@pytest.fixture
def cluster_config() -> Any:
    """Accelerate's own form of a YAML."""
    reason = "the accelerate package is not installed: pip install 'shardwright[test]'"
    module = pytest.importorskip("accelerate.commands.config.config_args", reason=reason)
    return module.ClusterConfig


def _config(*words: object) -> int:
    return train_ckpt.main(["config", *map(str, words)])


def _written(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def _megatron(path: Path) -> dict[str, Any]:
    found = _written(path)["megatron_lm_config"]
    return {key.removeprefix("megatron_lm_"): value for key, value in found.items()}


# --- with Accelerate ---------------------------------------------------------------------------


def test_the_flags_cover_the_keys_that_accelerate_knows() -> None:
    launch = pytest.importorskip("accelerate.commands.launch", reason="accelerate is not installed")
    actions = launch.launch_command_parser()._actions
    known = {a.dest.removeprefix("megatron_lm_") for a in actions if a.dest[:12] == "megatron_lm_"}
    assert KEYS.keys() == known == set(ACCELERATE_FIELDS)


def test_what_is_written_loads_in_accelerate_to_equal_values_and_back(
    cluster_config: Any, tmp_path: Path
) -> None:
    path, back, again = (tmp_path / name for name in ("a.yaml", "b.yaml", "c.yaml"))
    assert _config("--yes", "--output", path, *FLAGS) == 0
    theirs = cluster_config.from_yaml_file(str(path))
    assert theirs.distributed_type.value == "MEGATRON_LM"
    assert theirs.megatron_lm_config == {f"megatron_lm_{n}": v for n, v in KEYS.items()}
    assert (theirs.num_processes, theirs.num_machines, theirs.machine_rank) == (16, 2, 1)
    assert (theirs.main_process_ip, theirs.main_process_port) == ("10.0.0.1", 29511)
    assert (theirs.rdzv_backend, theirs.mixed_precision, theirs.gpu_ids) == ("c10d", "bf16", "all")
    theirs.to_yaml_file(str(back))
    assert _written(back) == _written(path)
    assert _config("--yes", "--read", back, "--output", again) == 0
    assert _written(again) == _written(path)


def test_the_defaults_load_in_accelerate_and_back(cluster_config: Any, tmp_path: Path) -> None:
    path, back = tmp_path / "a.yaml", tmp_path / "b.yaml"
    assert _config("--yes", "--output", path) == 0
    cluster_config.from_yaml_file(str(path)).to_yaml_file(str(back))
    assert _written(back) == _written(path)


def test_what_accelerate_config_writes_is_kept_word_for_word(
    cluster_config: Any, tmp_path: Path
) -> None:
    """Also what the other answers make pointless, and settings of recomputation that repeat."""
    path, again = tmp_path / "a.yaml", tmp_path / "b.yaml"
    said = {"tp_degree": 1, "pp_degree": 4, "sequence_parallelism": False, "num_micro_batches": 8,
            "recompute_activations": True, "use_distributed_optimizer": False,
            "gradient_clipping": 0.0}  # fmt: skip
    cluster_config(
        compute_environment="LOCAL_MACHINE", distributed_type="MEGATRON_LM", mixed_precision="no",
        use_cpu=False, debug=False, num_processes=8, main_training_function="train", gpu_ids="0,1",
        downcast_bf16="no", tpu_env=[], same_network=True,
        megatron_lm_config={f"megatron_lm_{n}": v for n, v in said.items()},
    ).to_yaml_file(str(path))  # fmt: skip
    assert _config("--yes", "--read", path, "--output", again) == 0
    assert _written(again) == _written(path)


def test_a_written_file_means_the_same_under_accelerate_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = pytest.importorskip("accelerate.commands.launch", reason="accelerate is not installed")
    path = tmp_path / "a.yaml"
    assert _config("--yes", "--output", path, *FLAGS) == 0
    args = launch.launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    args, _, _ = launch._validate_launch_command(args)
    for name, text in launch.prepare_multi_gpu_env(args).items():
        if name.startswith(("MEGATRON_LM_", "ACCELERATE_")):
            monkeypatch.setenv(name, text)
    made = MegatronLMPlugin()
    assert {name: getattr(made, name) for name in KEYS} == KEYS
    config = from_plugin(made, world_size=16)
    assert (config.precision.name, config.recompute.granularity) == ("bf16", "full")


# --- asking ------------------------------------------------------------------------------------


def _scripted(lines: list[str], prompts: list[str]) -> questions.Ask:
    left: Iterator[str] = iter(lines)

    def ask(prompt: str) -> str:
        prompts.append(prompt)
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    return ask


def test_answers_are_asked_in_order_and_an_empty_line_takes_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[str] = []
    lines = ["", "8", "2", "n", "2", "", "full", "", "3", "no", "", "no"]
    monkeypatch.setattr("builtins.input", _scripted(lines, prompts))
    assert _config("--ask", "--output", tmp_path / "a.yaml") == 0
    assert _megatron(tmp_path / "a.yaml") == {
        "tp_degree": 2, "sequence_parallelism": False, "pp_degree": 2, "num_micro_batches": 8,
        "recompute_activations": False, "recompute_granularity": "full",
        "recompute_method": "uniform", "recompute_num_layers": 3,
        "use_distributed_optimizer": False, "gradient_clipping": 1.0,
    }  # fmt: skip
    assert _written(tmp_path / "a.yaml")["num_processes"] == 8
    assert len(prompts) == len(lines)
    assert "[4]" in prompts[1], "one process per GPU of this machine"


def test_a_flag_is_not_asked_for_and_a_pointless_question_is_not_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[str] = []
    monkeypatch.setattr("builtins.input", _scripted([""] * 5, prompts))
    flags = ["--num-machines", 1, "--tp", 1, "--pp", 1, "--recompute", "none"]
    assert _config("--ask", "--output", tmp_path / "a.yaml", *flags) == 0
    said = " ".join(prompts)
    for word in ("Tensor", "Sequence", "Pipeline", "Recompute", "Address", "Which layers"):
        assert word not in said
    assert "sequence_parallelism" not in _megatron(tmp_path / "a.yaml")


def test_a_wrong_answer_is_explained_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[str] = []
    found = questions.answer({}, {}, {}, _scripted(["0", "1", "two", "2", *[""] * 9], prompts))
    assert (found["num_machines"], found["num_processes"]) == (1, 2)
    assert prompts[1].startswith("0: must be at least 1. How many machines")
    assert prompts[3].startswith("two: expected a whole number. Processes")


def test_several_machines_are_asked_for_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[str] = []
    lines = ["2", "1", "", "10.0.0.7", "", "c10d", *[""] * 9]
    found = questions.answer({}, {}, {"gpus": 8}, _scripted(lines, prompts))
    assert found["main_process_ip"] == "10.0.0.7"
    assert "no default" in prompts[3]
    assert (found["machine_rank"], found["main_process_port"], found["rdzv_backend"]) == (
        1, 29500, "c10d"
    )  # fmt: skip
    assert found["num_processes"] == 16


def test_answers_that_end_early_are_an_error_that_names_the_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", _scripted(["1", "4"], []))
    assert _config("--ask") == 1
    assert "--tp-degree" in capsys.readouterr().err


def test_a_file_that_is_read_gives_the_defaults_and_a_flag_changes_one(tmp_path: Path) -> None:
    path, other = tmp_path / "a.yaml", tmp_path / "b.yaml"
    assert _config("--yes", "--output", path, *FLAGS) == 0
    assert _config("--yes", "--read", path, "--output", other, "--recompute", "selective") == 0
    changed = {**KEYS, "recompute_activations": True, "recompute_granularity": "selective"}
    assert _megatron(other) == changed
    top, before = _written(other), _written(path)
    del top["megatron_lm_config"], before["megatron_lm_config"]
    assert top == before


# --- the file ----------------------------------------------------------------------------------


def test_the_default_place_is_where_accelerate_looks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _config("--yes", "--tp", 2, "--num-processes", 4) == 0
    path = tmp_path / "home" / "accelerate" / "default_config.yaml"
    assert f"wrote {path}" in capsys.readouterr().out
    assert read_accelerate(path).num_processes == 4
    assert [child.name for child in path.parent.iterdir()] == [path.name], "a partial file is left"


def test_an_existing_file_is_replaced_only_when_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("distributed_type: FSDP\n")
    assert _config("--yes", "--output", path) == 1
    said = capsys.readouterr().err
    assert f"{path} exists, for FSDP" in said
    assert "--overwrite" in said
    assert path.read_text() == "distributed_type: FSDP\n"
    monkeypatch.setattr("builtins.input", _scripted([*[""] * 9, "no"], []))
    assert _config("--ask", "--output", path) == 1
    assert path.read_text() == "distributed_type: FSDP\n"
    assert _config("--yes", "--output", path, "--overwrite") == 0
    assert read_accelerate(path).values["num_machines"] == 1


def test_a_file_is_changed_in_place_without_more_words(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    assert _config("--yes", "--output", path, "--tp", 2) == 0
    assert _config("--yes", "--read", path, "--output", path, "--clip-grad", 0) == 0
    assert _megatron(path)["gradient_clipping"] == 0
    assert _megatron(path)["tp_degree"] == 2


def test_show_says_what_a_file_means_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.yaml"
    _config("--yes", "--output", path, *FLAGS)
    before, _ = path.read_bytes(), capsys.readouterr()
    assert _config("--show", "--read", path) == 0
    said = capsys.readouterr().out
    parts = ["16 processes on 2 machines (c10d, 10.0.0.1:29511)", "tp=2 with sequence", "pp=2"]
    parts += ["4 data-parallel", "micro-batches per pass: 6", "full (block, 2)", "bf16"]
    assert [part for part in parts if part not in said] == []
    assert path.read_bytes() == before
    assert not (tmp_path / "home").exists()


# --- what is refused ---------------------------------------------------------------------------

TWO = "--num-machines 2 --num-processes 4 --main-process-ip h --main-process-port 1"
REFUSED = {
    "--tp 2 --pp 2 --num-processes 6": ["6 processes", "tp=2 x pp=2 = 4"],
    "--num-processes 3 " + TWO.replace("--num-processes 4", ""): ["num_processes 3", "machines 2"],
    "--num-machines 2 --num-processes 4": ["2 machines need main_process_ip", "--main-process-ip"],
    TWO + " --machine-rank 2": ["machine_rank 2", "count from 0"],
    "--machine-rank 1": ["--machine-rank", "--num-machines is 1"],
    "--sequence-parallel yes": ["--sequence-parallelism", "--tp is 1"],
    "--recompute-method block": [
        "--recompute-method",
        "only works with --recompute full",
        "it is none",
    ],
    "--recompute most": ["--recompute most", "none, selective, full"],
    "--tp two": ["--tp-degree two", "whole number"],
    "--tp 0": ["--tp-degree 0", "at least 1"],
    "--mixed-precision fp16": ["--mixed-precision fp16", "no, bf16"],
    "--context-parallel-size 2": ["context_parallel_size=2", "refused"],
    "--decoder-last-pipeline-num-layers 2": ["decoder_last_pipeline_num_layers=2", "pp is 1"],
}


@pytest.mark.parametrize("words", REFUSED)
def test_contradictions_are_one_clear_line(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _config("--yes", "--output", tmp_path / "a.yaml", *words.split()) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1, said
    assert [part for part in REFUSED[words] if part not in said[0]] == [], said[0]
    assert not (tmp_path / "a.yaml").exists()


@pytest.mark.parametrize(
    ("variable", "text", "words", "parts"),
    [
        ("MEGATRON_LM_TP_DEGREE", "4", "--tp 2", ["tp_degree is 2", "unset MEGATRON_LM_TP_DEGREE"]),
        ("MEGATRON_LM_PP_DEGREE", "x", "--pp 2", ["MEGATRON_LM_PP_DEGREE=x"]),
        ("ACCELERATE_MIXED_PRECISION", "no", "", ["mixed_precision is bf16", "PRECISION=no"]),
        ("MEGATRON_LM_TP_DEGREES", "4", "", ["did you mean MEGATRON_LM_TP_DEGREE"]),
    ],
)
def test_a_variable_that_would_outrank_the_file_is_named(
    variable: str, text: str, words: str, parts: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv(variable, text)
    assert _config("--yes", "--output", tmp_path / "a.yaml", *words.split()) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1, said
    assert [part for part in parts if part not in said[0]] == [], said[0]


def test_a_variable_that_agrees_is_no_contradiction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "2")
    monkeypatch.setenv("MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER", "yes")
    assert _config("--yes", "--tp", 2, "--output", tmp_path / "a.yaml") == 0


@pytest.mark.parametrize(
    ("table", "parts"),
    [
        ({"distributed_type": "FSDP"}, ["distributed_type FSDP", "expected MEGATRON_LM"]),
        ({"distributed_type": "MULTI_GPU"}, ["MULTI_GPU", "expected MEGATRON_LM"]),
        ({"num_processes": 2}, ["no distributed_type", "expected MEGATRON_LM"]),
        (
            {"distributed_type": "MEGATRON_LM", "megatron_lm_config": {"megatron_lm_tp_size": 2}},
            ["unknown key megatron_lm_tp_size", "nearest is megatron_lm_tp_degree"],
        ),
        (
            {"distributed_type": "MEGATRON_LM", "num_machine": 2},
            ["unknown key num_machine", "nearest is num_machines"],
        ),
    ],
)
def test_a_file_of_another_kind_is_refused_by_name(
    table: dict[str, Any], parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(json.dumps(table))
    assert _config("--yes", "--read", path, "--output", tmp_path / "b.yaml") == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1, said
    assert str(path) in said[0]
    assert [part for part in parts if part not in said[0]] == [], said[0]


def test_an_unknown_flag_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        _config("--yes", "--gradient-cliping", 1)
    assert stopped.value.code == 2
    assert "--gradient-clipping" in capsys.readouterr().err.splitlines()[-1]


def test_a_model_gives_the_defaults_of_its_best_layout(tmp_path: Path) -> None:
    pytest.importorskip("shardwright.train.planning.search", reason="no planner")
    path = tmp_path / "a.yaml"
    assert _config("--yes", "--params", "13B", "--num-processes", 8, "--output", path) == 0
    made = read_accelerate(path)
    assert made.num_processes == 8
    assert made.plugin["tp_degree"][0] * made.plugin["pp_degree"][0] > 1, "13B needs several GPUs"
    assert _config("--yes", "--params", "13B", "--num-processes", 8, "--tp", 4, "--pp", 1,
                   "--output", path, "--overwrite") == 0  # fmt: skip
    assert _megatron(path)["tp_degree"] == 4


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from shardwright.tools import train_ckpt\n"
        "for words in (['config', '--help'], ['doctor', '--help']):\n"
        "    try:\n"
        "        train_ckpt.main(words)\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 0\n"
        "heavy = {'torch', 'numpy', 'yaml', 'transformers', 'megatron', 'accelerate'}\n"
        "sys.exit(str(heavy & sys.modules.keys()) if heavy & sys.modules.keys() else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for flag in ("--tp", "--megatron-lm-tp-degree", "--recompute-method", "--topology"):
        assert flag in done.stdout
