"""What the trainer is told: the plugin against Accelerate's own, files, options, derived sizes."""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.tools.options import dashed
from shardwright.train.config.accelerate_yaml import read_accelerate
from shardwright.train.config.checks import batch_sizes, check_expected, data_parallel_of, for_model
from shardwright.train.config.cli import OPTIONS, options
from shardwright.train.config.fields import ACCELERATE_FIELDS, FIELDS
from shardwright.train.config.from_options import from_options
from shardwright.train.config.from_plugin import from_plugin, schedule_fields
from shardwright.train.config.plugin import MegatronLMPlugin, environment
from shardwright.train.config.schema import (
    BatchSizes,
    OptimizerSettings,
    Parallelism,
    Recompute,
    Sizes,
    TrainConfig,
    megatron_args,
)
from shardwright.train.config.values import resolve
from shardwright.train.errors import TrainError

EXTRA = (  # the fields that Accelerate's plugin does not have
    "checkpoint_num_layers",
    "distribute_checkpointed_activations",
    "partition_activations",
    "check_for_nan_in_loss_and_grad",
)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of the machine reaches a test."""
    for name in list(os.environ):
        if name.startswith(("MEGATRON_LM_", "ACCELERATE_")) or name == "WORLD_SIZE":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no-cache"))


@pytest.fixture(scope="session")
def theirs() -> type:
    """Accelerate's own plugin."""
    return pytest.importorskip("accelerate.utils").MegatronLMPlugin


def _hook(*args: object, **kwargs: object) -> bool:
    return True


def _config(world_size: int = 1, **fields: Any) -> TrainConfig:
    return from_plugin(MegatronLMPlugin(**fields), world_size=world_size, environ={})


# --- the table ---------------------------------------------------------------------------------


def test_the_table_has_every_field_of_accelerate_in_its_order(theirs: type) -> None:
    names = [f.name for f in dataclasses.fields(theirs)]
    assert list(FIELDS) == [*names, *EXTRA]


def test_the_plugin_takes_exactly_the_fields_of_the_table() -> None:
    assert [f.name for f in dataclasses.fields(MegatronLMPlugin) if f.init] == list(FIELDS)
    for name, use in FIELDS.items():
        assert use.what.endswith("."), name
        assert bool(use.reason) == (use.use == "refused"), name


def test_defaults_are_accelerates_but_for_context_parallel_size(theirs: type) -> None:
    own, their = MegatronLMPlugin(), theirs()
    differing = {n for n in FIELDS if n not in EXTRA and getattr(own, n) != getattr(their, n)}
    assert differing == {"context_parallel_size"}


# field -> (a value, what of the configuration it must change, to what, what else is needed)
USED: dict[str, tuple[Any, str, Any, dict[str, Any]]] = {
    "tp_degree": (2, "parallelism.tp", 2, {}),
    "pp_degree": (2, "parallelism.pp", 2, {}),
    "no_load_optim": (True, "saving.load_optimizer", False, {}),
    "eod_mask_loss": (True, "data.eod_mask_loss", True, {}),
    "no_save_optim": (True, "saving.save_optimizer", False, {}),
    "decoder_last_pipeline_num_layers": (
        3, "parallelism.last_stage_layers", 3, {"pp_degree": 2},
    ),
    "recompute_granularity": (
        "full", "recompute", Recompute("full", "uniform", 1), {},
    ),
    "recompute_method": ("block", "recompute", Recompute("full", "block", 1), {}),
    "recompute_num_layers": (2, "recompute", Recompute("full", "uniform", 2), {}),
    "attention_dropout": (0.1, "model.attention_dropout", 0.1, {}),
    "hidden_dropout": (0.1, "model.hidden_dropout", 0.1, {}),
    "calculate_per_token_loss": (False, "data.per_token_loss", False, {}),
    "use_rotary_position_embeddings": (True, "model.rotary", True, {}),
    "num_micro_batches": (4, "batch.num_micro_batches", 4, {}),
    "gradient_clipping": (0.5, "optimizer.clip_grad", 0.5, {}),
    "sequence_parallelism": (True, "parallelism.sequence_parallel", True, {"tp_degree": 2}),
    "recompute_activations": (True, "recompute.granularity", "selective", {}),
    "use_distributed_optimizer": (True, "parallelism.distributed_optimizer", True, {}),
    "num_layers_per_virtual_pipeline_stage": (
        2, "parallelism.virtual_pp_layers", 2, {"pp_degree": 2, "num_micro_batches": 2},
    ),
    "is_train_batch_min": (False, "data.smallest_loader", False, {}),
    "train_iters": (50, "steps", 50, {}),
    "train_samples": (50, "steps", 25, {"num_micro_batches": 2}),
    "weight_decay_incr_style": (
        "cosine", "schedule.wd_style", "cosine",
        {"train_iters": 9, "start_weight_decay": 0.1, "end_weight_decay": 0.2},
    ),
    "start_weight_decay": (
        0.1, "schedule.wd_start", 0.1,
        {"train_iters": 9, "weight_decay_incr_style": "linear", "end_weight_decay": 0.2},
    ),
    "end_weight_decay": (
        0.2, "schedule.wd_end", 0.2,
        {"train_iters": 9, "weight_decay_incr_style": "linear", "start_weight_decay": 0.1},
    ),
    "lr_decay_style": ("cosine", "schedule.style", "cosine", {"train_iters": 9}),
    "lr_decay_iters": (7, "schedule.decay_steps", 7, {"train_iters": 9}),
    "lr_decay_samples": (
        7, "schedule.decay_steps", 3.5, {"train_iters": 9, "num_micro_batches": 2},
    ),
    "lr_warmup_iters": (4, "schedule.warmup_steps", 4, {"train_iters": 9}),
    "lr_warmup_samples": (
        4, "schedule.warmup_steps", 2, {"train_iters": 9, "num_micro_batches": 2},
    ),
    "lr_warmup_fraction": (0.25, "schedule.warmup_steps", 2.5, {"train_iters": 10}),
    "min_lr": (1e-5, "schedule.min_lr", 1e-5, {"train_iters": 9}),
    "consumed_samples": ([3], "data.consumed_samples", (3, 0, 0), {}),
    "no_wd_decay_cond": (_hook, "optimizer.no_weight_decay", _hook, {}),
    "scale_lr_cond": (_hook, "optimizer.scale_lr", _hook, {}),
    "lr_mult": (2.0, "optimizer.lr_mult", 2.0, {"scale_lr_cond": _hook}),
    "seq_length": (64, "data.seq_length", 64, {}),
    "decoder_seq_length": (64, "data.seq_length", 64, {}),
    "tensorboard_dir": ("runs", "logging.tensorboard_dir", "runs", {}),
    "set_all_logging_options": (True, "logging.params_norm", True, {}),
    "eval_iters": (5, "data.eval_iters", 5, {}),
    "eval_interval": (5, "data.eval_interval", 5, {}),
    "return_logits": (True, "model.return_logits", True, {}),
    "custom_train_step_class": (dict, "hooks.train_step_class", dict, {}),
    "custom_train_step_kwargs": (
        {"a": 1}, "hooks.train_step_kwargs", {"a": 1}, {"custom_train_step_class": dict},
    ),
    "custom_get_batch_function": (_hook, "hooks.get_batch", _hook, {}),
    "custom_loss_function": (_hook, "hooks.loss_function", _hook, {}),
    "other_megatron_args": ({"seed": 7}, "seed", 7, {}),
    "checkpoint_num_layers": (2, "recompute", Recompute("full", "uniform", 2), {}),
    "distribute_checkpointed_activations": (
        True, "recompute", Recompute("full", "uniform", 1, True), {"tp_degree": 2},
    ),
    "partition_activations": (
        True, "recompute.distribute_saved_activations", True, {"tp_degree": 2},
    ),
    "check_for_nan_in_loss_and_grad": (False, "optimizer.check_for_nan", False, {}),
}  # fmt: skip

REFUSED: dict[str, Any] = {
    "use_custom_fsdp": True,
    "overlap_cpu_optimizer_d2h_h2d": True,
    "optimizer_cpu_offload": True,
    "use_precision_aware_optimizer": True,
    "attention_backend": "flash",
    "expert_model_parallel_size": 2,
    "context_parallel_size": 2,
    "attention_softmax_in_fp32": False,
    "expert_tensor_parallel_size": 2,
    "pipeline_model_parallel_split_rank": 1,
    "megatron_dataset_flag": True,
    "encoder_seq_length": 64,
    "custom_model_provider_function": _hook,
    "custom_prepare_model_function": _hook,
    "custom_megatron_datasets_provider_function": _hook,
}


def test_every_field_has_a_case_below() -> None:
    assert {n for n, use in FIELDS.items() if use.use == "used"} == USED.keys()
    assert {n for n, use in FIELDS.items() if use.use == "refused"} == REFUSED.keys()


@pytest.mark.parametrize("name", USED)
def test_a_used_field_changes_its_part_of_the_configuration(name: str) -> None:
    value, where, expected, also = USED[name]
    fields = {**also, name: value}
    world = fields.get("tp_degree", 1) * fields.get("pp_degree", 1)
    unsaid = _config(train_iters=9) if where.startswith("schedule") else _config()
    assert attrgetter(where)(_config(world, **fields)) == expected
    assert attrgetter(where)(unsaid) != expected


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_field_names_itself_its_value_and_the_reason(name: str) -> None:
    value = REFUSED[name]
    with pytest.raises(TrainError) as error:
        MegatronLMPlugin(**{name: value})
    for part in (name, repr(value), FIELDS[name].reason):
        assert part in str(error.value)
    MegatronLMPlugin(**{name: FIELDS[name].default})


def test_all_faults_are_reported_together() -> None:
    with pytest.raises(TrainError) as error:
        MegatronLMPlugin(tp_degree=0, pp_degree="two", use_custom_fsdp=True, lr_decay_style="wsd")
    text = str(error.value)
    assert "4 faults" in text
    for part in ("tp_degree=0", "pp_degree='two'", "use_custom_fsdp=True", "constant, linear"):
        assert part in text


@pytest.mark.parametrize("value", [[], [1, 2, 3, 4], [-1], "a", 3])
def test_samples_consumed_are_one_to_three_numbers(value: Any) -> None:
    with pytest.raises(TrainError, match="consumed_samples"):
        MegatronLMPlugin(consumed_samples=value)


def test_a_value_assigned_later_is_read_and_checked() -> None:
    plugin = MegatronLMPlugin(seq_length=8)
    plugin.seq_length = 16
    plugin.other_megatron_args = {"seed": 3}
    config = from_plugin(plugin, environ={})
    assert (config.data.seq_length, config.seed) == (16, 3)
    plugin.context_parallel_size = 2
    with pytest.raises(TrainError, match=r"context_parallel_size=2 \(assigned\) is refused"):
        from_plugin(plugin, environ={})


def test_batch_sizes_are_recorded_where_scripts_look_for_them() -> None:
    plugin = MegatronLMPlugin(num_micro_batches=4)
    plugin.set_training_args(2, 3)
    assert plugin.global_batch_size == 24


# --- sources -----------------------------------------------------------------------------------


def test_the_constructor_overrides_the_environment_and_that_the_yaml(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = ("tp_degree", "pp_degree", "num_micro_batches")
    path = _write(tmp_path, {f"megatron_lm_{name}": 8 for name in names})
    monkeypatch.setenv("ACCELERATE_CONFIG_FILE", str(path))
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "4")
    monkeypatch.setenv("MEGATRON_LM_PP_DEGREE", "4")
    plugin = MegatronLMPlugin(tp_degree=2)
    assert (plugin.tp_degree, plugin.pp_degree, plugin.num_micro_batches) == (2, 4, 8)
    assert plugin.origin("tp_degree") == "the constructor"
    assert plugin.origin("pp_degree") == "MEGATRON_LM_PP_DEGREE"
    assert plugin.origin("num_micro_batches") == f"megatron_lm_num_micro_batches in {path}"
    assert plugin.origin("seq_length") == "default"


def test_a_default_given_to_the_constructor_still_overrides_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEGATRON_LM_LR_DECAY_STYLE", "cosine")
    assert MegatronLMPlugin(lr_decay_style="linear").lr_decay_style == "linear"
    assert MegatronLMPlugin().lr_decay_style == "cosine"


def test_a_script_does_not_read_the_default_yaml(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    _default_yaml(tmp_path, {"megatron_lm_tp_degree": 2})
    assert MegatronLMPlugin().tp_degree == 1


_words = st.sampled_from(["true", "False", "1", "0", "yes", "NO", "on", "f"])
_TEXTS: dict[str, st.SearchStrategy[str]] = {
    "int": st.integers(1, 64).map(str) | st.sampled_from([" 3 ", "1_0"]),
    "float": st.floats(0, 1).map(str) | st.sampled_from(["0", "1e-3"]),
    "bool": _words,
    "backend": _words,
}
_CHOSEN = {"recompute_granularity": ["full", "selective"], "recompute_method": ["uniform", "block"]}


def _environments() -> st.SearchStrategy[dict[str, str]]:
    texts = {
        name: st.sampled_from(_CHOSEN[name]) if name in _CHOSEN else _TEXTS[use.values.kind]
        for name, use in FIELDS.items()
        if name in ACCELERATE_FIELDS
    }
    variables = {f"MEGATRON_LM_{name.upper()}": text for name, text in texts.items()}
    return st.fixed_dictionaries({}, optional=variables)


@given(_environments())
@settings(max_examples=60, deadline=None)
def test_the_environment_reads_as_accelerate_reads_it(
    theirs: type, environ: dict[str, str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, text in environ.items():
            patch.setenv(name, text)
        their = theirs()
    own = resolve(FIELDS, [environment(environ)])
    assert not own.faults
    for name in ACCELERATE_FIELDS:
        if name == "context_parallel_size" and f"MEGATRON_LM_{name.upper()}" not in environ:
            continue
        assert own.values[name] == getattr(their, name), name
        assert type(own.values[name]) is type(getattr(their, name)), name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("TP_DEGREE", "two"), ("TP_DEGREE", ""), ("TP_DEGREE", "None"), ("PP_DEGREE", "2.0"),
        ("GRADIENT_CLIPPING", "much"), ("SEQUENCE_PARALLELISM", "maybe"),
        ("RECOMPUTE_ACTIVATIONS", ""), ("DECODER_LAST_PIPELINE_NUM_LAYERS", "x"),
    ],
)  # fmt: skip
def test_a_variable_that_accelerate_cannot_read_is_named(
    theirs: type, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv("MEGATRON_LM_" + name, text)
    with pytest.raises(ValueError, match=r".*"):
        theirs()
    with pytest.raises(TrainError, match=f"{name.lower()}='{text}' .MEGATRON_LM_{name}.: expected"):
        MegatronLMPlugin()


def test_a_misspelled_variable_is_an_error_and_a_foreign_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEGATRON_LM_PATH", "/opt/megatron")
    MegatronLMPlugin()
    monkeypatch.setenv("MEGATRON_LM_TP_DEGRE", "2")
    with pytest.raises(TrainError, match="did you mean MEGATRON_LM_TP_DEGREE"):
        MegatronLMPlugin()


# --- Accelerate's YAML -------------------------------------------------------------------------

# All 27 keys, none of them refused.
YAML_27: dict[str, Any] = {
    "tp_degree": 2, "pp_degree": 2, "use_custom_fsdp": False,
    "overlap_cpu_optimizer_d2h_h2d": False,
    "no_load_optim": False, "eod_mask_loss": True, "no_save_optim": True,
    "optimizer_cpu_offload": False, "use_precision_aware_optimizer": False,
    "decoder_last_pipeline_num_layers": 3, "recompute_granularity": "full",
    "recompute_method": "block", "recompute_num_layers": 2, "attention_backend": True,
    "expert_model_parallel_size": 1, "context_parallel_size": 1, "attention_dropout": 0.1,
    "hidden_dropout": 0.0, "attention_softmax_in_fp32": True, "expert_tensor_parallel_size": 1,
    "calculate_per_token_loss": False, "use_rotary_position_embeddings": True,
    "num_micro_batches": 4, "gradient_clipping": 0.5, "sequence_parallelism": True,
    "recompute_activations": False, "use_distributed_optimizer": True,
}  # fmt: skip


def _write(folder: Path, megatron: dict[str, Any], **top: Any) -> Path:
    path = folder / "accelerate.yaml"
    table = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MEGATRON_LM",
             "megatron_lm_config": megatron, **top}  # fmt: skip
    path.write_text(yaml.safe_dump(table))
    return path


def _default_yaml(cache: Path, megatron: dict[str, Any], **top: Any) -> Path:
    folder = cache / "accelerate"
    folder.mkdir(parents=True, exist_ok=True)
    return _write(folder, megatron, **top).rename(folder / "default_config.yaml")


@pytest.fixture
def their_yaml(theirs: type, tmp_path: Path) -> Path:
    """All 27 keys, in a file that Accelerate's own code has written."""
    from accelerate.commands.config.config_args import ClusterConfig

    path = tmp_path / "default_config.yaml"
    ClusterConfig(
        compute_environment="LOCAL_MACHINE", distributed_type="MEGATRON_LM", mixed_precision="bf16",
        use_cpu=False, debug=False, num_processes=16, num_machines=2, machine_rank=1,
        main_process_ip="10.0.0.1", main_process_port=29501, rdzv_backend="c10d", gpu_ids="all",
        megatron_lm_config={f"megatron_lm_{n}": v for n, v in YAML_27.items()},
    ).to_yaml_file(path)  # fmt: skip
    return path


def test_the_cases_cover_the_27_keys_that_accelerate_launch_knows(theirs: type) -> None:
    from accelerate.commands.launch import launch_command_parser

    known = {a.dest for a in launch_command_parser()._actions if a.dest.startswith("megatron_lm_")}
    assert len(known) == 27
    assert {f"megatron_lm_{name}" for name in ACCELERATE_FIELDS} == known
    assert YAML_27.keys() == set(ACCELERATE_FIELDS)


def test_a_yaml_of_accelerate_reads_as_its_own_loader_reads_it(their_yaml: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    their, own = load_config_from_file(str(their_yaml)), read_accelerate(their_yaml)
    assert {f"megatron_lm_{n}": v for n, (v, _) in own.plugin.items()} == their.megatron_lm_config
    for name in own.given - {"compute_environment"}:
        assert own.values[name] == getattr(their, name), name
    assert own.values["compute_environment"] == their.compute_environment.value


def test_a_yaml_means_what_accelerate_launch_makes_of_it(
    theirs: type, their_yaml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.commands import launch

    monkeypatch.setenv("ACCELERATE_CONFIG_FILE", str(their_yaml))
    read = MegatronLMPlugin()
    monkeypatch.delenv("ACCELERATE_CONFIG_FILE")
    args = launch.launch_command_parser().parse_args(["--config_file", str(their_yaml), "s.py"])
    args, _, _ = launch._validate_launch_command(args)
    made = launch.prepare_multi_gpu_env(args)
    for name, text in made.items():
        if name.startswith(("MEGATRON_LM_", "ACCELERATE_")):
            monkeypatch.setenv(name, text)
    launched, their = MegatronLMPlugin(), theirs()
    assert made["MEGATRON_LM_PP_DEGREE"] == "2"
    for name in ACCELERATE_FIELDS:
        assert getattr(read, name) == getattr(launched, name) == getattr(their, name), name
    assert from_plugin(launched, world_size=16).precision.name == "bf16"


GUIDE = """
compute_environment: LOCAL_MACHINE
distributed_type: MEGATRON_LM
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
megatron_lm_config:
  megatron_lm_gradient_clipping: 1.0
  megatron_lm_learning_rate_decay_iters: 320000
  megatron_lm_num_micro_batches: 1
  megatron_lm_pp_degree: 2
  megatron_lm_recompute_activations: true
  megatron_lm_sequence_parallelism: false
  megatron_lm_tp_degree: 2
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


@pytest.mark.parametrize("flat", [False, True])
def test_the_yaml_of_the_guides_is_read_with_a_line_on_old_names_and_places(
    flat: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = yaml.safe_load(GUIDE)
    if flat:
        table |= {key: str(value) for key, value in table.pop("megatron_lm_config").items()}
    path = tmp_path / "guide.yaml"
    path.write_text(yaml.safe_dump(table))
    file = read_accelerate(path)
    said = {name: value for name, (value, _) in file.plugin.items()}
    assert str(said.pop("lr_decay_iters")) == "320000"
    assert set(said) == {"gradient_clipping", "num_micro_batches", "pp_degree", "tp_degree",
                         "recompute_activations", "sequence_parallelism"}  # fmt: skip
    renamed = "megatron_lm_learning_rate_decay_iters is read as megatron_lm_lr_decay_iters"
    assert file.notes[-1] == f"{path}: {renamed}"
    assert len(file.notes) == 1 + flat
    monkeypatch.setenv("ACCELERATE_CONFIG_FILE", str(path))
    plugin = MegatronLMPlugin()
    assert (plugin.tp_degree, plugin.pp_degree, plugin.sequence_parallelism) == (2, 2, False)
    assert plugin.lr_decay_iters == 320000


def test_two_names_of_one_field_that_disagree_are_refused(tmp_path: Path) -> None:
    table = yaml.safe_load(GUIDE)
    table["megatron_lm_config"]["megatron_lm_lr_decay_iters"] = 7
    path = tmp_path / "guide.yaml"
    path.write_text(yaml.safe_dump(table))
    with pytest.raises(TrainError, match=r"lr_decay_iters: the file says 320000.* and, with .*7"):
        read_accelerate(path)


def test_a_yaml_says_how_many_processes_and_machines(
    their_yaml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_CONFIG_FILE", str(their_yaml))
    config = from_plugin(MegatronLMPlugin(), world_size=16, environ={})
    assert config.precision.name == "bf16"
    assert (config.launch.nproc, config.launch.num_machines, config.launch.machine_rank) == (
        8,
        2,
        1,
    )
    assert config.launch.rdzv_backend == "c10d"
    assert config.launch.accelerate_file == str(their_yaml)


def test_what_accelerate_config_writes_for_everything_off_is_accepted(tmp_path: Path) -> None:
    path = _write(
        tmp_path, {"megatron_lm_tp_degree": 2, "megatron_lm_pp_degree": None},
        debug=False, downcast_bf16="no", enable_cpu_affinity=False, machine_rank=0,
        main_training_function="main", mixed_precision=False, num_machines=1, num_processes=2,
        rdzv_backend="static", same_network=True, tpu_env=[], tpu_use_cluster=False,
        tpu_use_sudo=False, use_cpu=False, deepspeed_config={}, gpu_ids="all",
        dynamo_config={"dynamo_backend": "NO"},
    )  # fmt: skip
    read = read_accelerate(path)
    assert list(read.plugin) == ["tp_degree"]
    assert read.num_processes == 2
    assert read.values["mixed_precision"] == "no"


BAD_YAMLS = {
    "tp_degree: [": "not YAML",
    "- a": "expected a mapping of settings, found list",
    "": "found NoneType",
    "tp_degree: 2": "no distributed_type, expected MEGATRON_LM",
    "distributed_type: FSDP": "distributed_type FSDP, expected MEGATRON_LM",
    "distributed_type: MEGATRON_LM\nmegatron_lm_config: 3": "expected a mapping",
    "distributed_type: MEGATRON_LM\nnum_proceses: 2": "num_proceses; the nearest is num_processes",
    "distributed_type: MEGATRON_LM\nmegatron_lm_config: {megatron_lm_tp_degre: 2}":
        "megatron_lm_tp_degre; the nearest is megatron_lm_tp_degree",
    "distributed_type: MEGATRON_LM\nmegatron_lm_config: {tp_degree: 2}":
        "unknown key tp_degree; the nearest is megatron_lm_tp_degree",
    "distributed_type: MEGATRON_LM\nmixed_precision: fp16": "fp16 is refused: bf16 needs no loss",
    "distributed_type: MEGATRON_LM\nmixed_precision: half": "'half' is not known",
    "distributed_type: MEGATRON_LM\nnum_processes: many": "expected a whole number",
    "distributed_type: MEGATRON_LM\nnum_processes: 3\nnum_machines: 2": "does not divide over",
    "distributed_type: MEGATRON_LM\nmachine_rank: 1": "machine_rank 1: 1 machines count from 0",
    "distributed_type: MEGATRON_LM\ndebug: true": "TORCH_DISTRIBUTED_DEBUG",
    "distributed_type: MEGATRON_LM\nfsdp_config: {fsdp_version: 2}": "another engine",
    "distributed_type: MEGATRON_LM\ncompute_environment: AMAZON_SAGEMAKER": "LOCAL_MACHINE",
    "distributed_type: MEGATRON_LM\nfp16: true": "mixed_precision: bf16",
}  # fmt: skip


@pytest.mark.parametrize("text", BAD_YAMLS)
def test_a_bad_yaml_is_named_with_what_is_wrong(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(TrainError) as error:
        read_accelerate(path)
    assert str(error.value).startswith(str(path))
    assert BAD_YAMLS[text] in str(error.value)


def test_an_absent_or_unreadable_yaml_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_CONFIG_FILE", str(tmp_path / "none.yaml"))
    with pytest.raises(TrainError, match=r"none\.yaml: cannot be read: No such file"):
        MegatronLMPlugin()
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(TrainError, match=r"b\.yaml"):
        read_accelerate(tmp_path / "b.yaml")


def test_a_bad_value_in_a_yaml_is_named_with_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _write(tmp_path, {"megatron_lm_tp_degree": 2.5, "megatron_lm_context_parallel_size": 4})
    monkeypatch.setenv("ACCELERATE_CONFIG_FILE", str(path))
    with pytest.raises(TrainError) as error:
        MegatronLMPlugin()
    assert f"tp_degree=2.5 (megatron_lm_tp_degree in {path}): expected a whole" in str(error.value)
    assert "context_parallel_size=4" in str(error.value)


# --- other_megatron_args -----------------------------------------------------------------------


def test_other_megatron_args_set_fields_arguments_and_expectations() -> None:
    other = {"tensor_model_parallel_size": 2, "clip_grad": 0.5, "overlap_grad_reduce": True,
             "make_vocab_size_divisible_by": 8, "distributed_timeout_minutes": 2,
             "num_layers": 4, "swiglu": True, "normalization": None}  # fmt: skip
    config = _config(2, other_megatron_args=other, use_distributed_optimizer=True)
    assert (config.parallelism.tp, config.optimizer.clip_grad) == (2, 0.5)
    assert config.parallelism.overlap
    assert (config.model.vocab_multiple, config.launch.timeout_minutes) == (8, 2)
    assert config.model.expected == {"num_layers": 4, "swiglu": True}
    check_expected(config.model.expected, {"num_layers": 4, "swiglu": True, "x": 1}, "m")
    with pytest.raises(TrainError, match=r"\['swiglu'\] is True, the model's is False"):
        check_expected(config.model.expected, {"num_layers": 4, "swiglu": False}, "m")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"clip_gard": 1.0}, r"\['clip_gard'\]: no argument .* nearest is clip_grad"),
        ({"use_flash_attn": True}, "no argument that is known here"),
        ({"lr": 1.0}, "the optimizer given to prepare"),
        ({"bf16": True}, "mixed_precision"),
        ({"context_parallel_size": 2}, "is refused"),
        ({"seed": "x"}, "expected a whole number"),
        ({"tensor_model_parallel_size": 4}, "is 4, but tp_degree is 2"),
        ({"other_megatron_args": {}}, "no argument"),
    ],
)
def test_other_megatron_args_without_a_meaning_are_refused_by_name(
    other: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainError, match=message):
        MegatronLMPlugin(tp_degree=2, other_megatron_args=other)


def test_other_megatron_args_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "4")
    plugin = MegatronLMPlugin(other_megatron_args={"tensor_model_parallel_size": 2})
    assert plugin.tp_degree == 2


# --- what values mean together -----------------------------------------------------------------


@settings(deadline=None)
@given(
    st.integers(1, 64), st.integers(1, 16), st.integers(1, 16), st.integers(1, 8), st.integers(0, 7)
)
def test_any_two_sizes_give_the_third(
    dp: int, micro: int, num: int, accumulation: int, unsaid: int
) -> None:
    batch = BatchSizes(micro, num, dp, accumulation)
    total = micro * num * dp
    assert batch.global_batch_size == total
    assert batch.samples_per_step == total * accumulation
    assert batch.rank_size * dp == total
    assert batch_sizes(dp, micro, num, None, accumulation) == batch
    assert batch_sizes(dp, micro, None, total, accumulation) == batch
    assert batch_sizes(dp, None, num, total, accumulation) == batch
    assert batch_sizes(dp, micro, num, total, accumulation) == batch


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 400))
def test_a_global_batch_is_met_exactly_or_refused(dp: int, micro: int, total: int) -> None:
    if total % (dp * micro) == 0:
        batch = batch_sizes(dp, micro, global_size=total)
        assert batch.global_batch_size == total
        assert (batch.micro_batch_size, batch.data_parallel) == (micro, dp)
        return
    with pytest.raises(TrainError) as error:
        batch_sizes(dp, micro, global_size=total)
    for number in (dp, micro, total):
        assert str(number) in str(error.value)


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 130))
def test_processes_divide_into_copies_of_the_model_or_are_refused(
    tp: int, pp: int, world: int
) -> None:
    layout = Parallelism(tp, pp)
    if world % (tp * pp) == 0:
        assert data_parallel_of(world, layout) * tp * pp == world
    else:
        with pytest.raises(TrainError, match=f"{world} processes do not divide over tp={tp} x"):
            data_parallel_of(world, layout)


def test_sizes_that_contradict_name_both_and_a_way_out() -> None:
    with pytest.raises(TrainError, match="global batch 10 is not micro-batch 2 x 3 micro-batches"):
        batch_sizes(1, 2, 3, 10)
    with pytest.raises(
        TrainError, match=r"global batch 10 is not a multiple of .* = 4; 8 would be"
    ):
        batch_sizes(2, 2, None, 10)
    with pytest.raises(TrainError, match="micro-batch of 0"):
        batch_sizes(1, 0)


RECOMPUTE: list[tuple[dict[str, Any], Recompute]] = [
    ({}, Recompute()),
    ({"recompute_activations": True}, Recompute("selective")),
    ({"recompute_granularity": "selective"}, Recompute("selective")),
    ({"recompute_granularity": "none"}, Recompute("none")),
    # As a YAML of all 27 keys would say it.
    (
        {"recompute_activations": True, "recompute_granularity": "selective",
         "recompute_method": "uniform", "recompute_num_layers": 1},
        Recompute("selective"),
    ),
    ({"recompute_activations": True, "recompute_granularity": "full"},
     Recompute("full", "uniform", 1)),
    ({"recompute_activations": False, "recompute_granularity": "full"},
     Recompute("full", "uniform", 1)),
    ({"recompute_activations": True, "checkpoint_num_layers": 1}, Recompute("full", "uniform", 1)),
    ({"recompute_activations": False, "recompute_num_layers": 1}, Recompute("none")),
    (
        {"recompute_activations": True, "checkpoint_num_layers": 1, "partition_activations": True,
         "distribute_checkpointed_activations": True, "tp_degree": 2},
        Recompute("full", "uniform", 1, True),
    ),
    ({"recompute_activations": True, "partition_activations": False}, Recompute("selective")),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), RECOMPUTE)
def test_recomputation_is_what_the_given_fields_ask_for(
    fields: dict[str, Any], expected: Recompute
) -> None:
    config = _config(fields.get("tp_degree", 1), **fields)
    assert config.recompute == expected
    assert not config.notes


@pytest.mark.parametrize(
    ("world", "fields", "note"),
    [
        (1, {"sequence_parallelism": True}, "sequence parallelism has no effect at tp=1"),
        (1, {"partition_activations": True}, "one tp rank"),
        (2, {"partition_activations": True, "tp_degree": 2, "sequence_parallelism": True},
         "already distributes"),
        (1, {"recompute_granularity": "selective", "recompute_num_layers": 4},
         "recompute_num_layers: no effect on selective"),
        (1, {"recompute_activations": False, "recompute_method": "block"},
         "recompute_method: no effect on none"),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_said(world: int, fields: dict[str, Any], note: str) -> None:
    assert any(note in line for line in _config(world, **fields).notes)


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"recompute_activations": True, "recompute_granularity": "none"}, "contradicts"),
    ({"recompute_granularity": "full", "recompute_num_layers": 2, "checkpoint_num_layers": 3},
     "recompute_num_layers=2 contradicts .*checkpoint_num_layers=3"),
    ({"seq_length": 8, "decoder_seq_length": 16}, "seq_length=8 contradicts"),
    ({"train_iters": 8, "train_samples": 16}, "train_iters=8 and train_samples=16"),
    ({"train_iters": 8, "lr_decay_iters": 8, "lr_decay_samples": 8}, "say the same thing"),
    ({"train_iters": 8, "lr_warmup_iters": 2, "lr_warmup_fraction": 0.1}, "say the same thing"),
    ({"lr_warmup_iters": 2}, "lr_warmup_iters=2 needs an end"),
    ({"lr_decay_style": "constant", "lr_warmup_fraction": 0.5}, "needs an end"),
    ({"train_iters": 8, "lr_warmup_iters": 8}, "a warmup of 8 steps is not shorter than"),
    ({"train_iters": 8, "min_lr": 1.0}, "min_lr 1.0 is above the learning rate 0.0001"),
    ({"train_samples": 3, "num_micro_batches": 4}, "less than one step of 4"),
    ({"train_iters": 8, "start_weight_decay": 0.1}, "need weight_decay_incr_style"),
    ({"train_iters": 8, "weight_decay_incr_style": "linear", "end_weight_decay": 0.1},
     "needs both start_weight_decay .now None"),
    ({"train_iters": 8, "weight_decay_incr_style": "linear", "start_weight_decay": 0.2,
      "end_weight_decay": 0.1}, "may only grow"),
    ({"lr_mult": 2.0}, "no scale_lr_cond"),
    ({"custom_train_step_kwargs": {"a": 1}}, "no custom_train_step_class"),
    ({"decoder_last_pipeline_num_layers": 3}, "but pp is 1"),
    ({"num_layers_per_virtual_pipeline_stage": 1}, "needs a pipeline: pp is 1"),
    ({"num_layers_per_virtual_pipeline_stage": 1, "pp_degree": 2, "num_micro_batches": 3},
     "multiples of pp=2, there are 3"),
    ({"num_layers_per_virtual_pipeline_stage": 1, "pp_degree": 2, "num_micro_batches": 2,
      "decoder_last_pipeline_num_layers": 1}, "needs equal stages"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), CONTRADICTIONS)
def test_contradicting_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainError, match=message):
        _config(fields.get("pp_degree", 1), **fields)


@pytest.mark.parametrize("name", ["fp16", "fp8", "half"])
def test_other_precisions_are_refused(name: str) -> None:
    with pytest.raises(TrainError, match=f"mixed_precision: .?{name}"):
        from_plugin(MegatronLMPlugin(), name, environ={})
    with pytest.raises(TrainError, match=f"ACCELERATE_MIXED_PRECISION: .?{name}"):
        from_plugin(MegatronLMPlugin(), environ={"ACCELERATE_MIXED_PRECISION": name})


def test_the_argument_overrides_the_environments_precision() -> None:
    environ = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    assert from_plugin(MegatronLMPlugin(), "no", environ=environ).precision.name == "fp32"
    assert from_plugin(MegatronLMPlugin(), environ=environ).precision.name == "bf16"


def test_a_plugin_that_names_no_schedule_leaves_the_rate_to_the_script() -> None:
    assert _config().schedule is None
    assert _config().steps is None
    plugin = MegatronLMPlugin(lr_decay_style="cosine", min_lr=0.0)
    assert schedule_fields(plugin) == ["lr_decay_style", "min_lr"]


def test_a_dummy_schedulers_steps_count_where_the_plugin_says_nothing() -> None:
    optimizer = OptimizerSettings(lr=0.5, weight_decay=0.25)
    config = from_plugin(
        MegatronLMPlugin(), optimizer=optimizer, total_steps=20, warmup_steps=5, environ={}
    )
    assert config.schedule is not None
    assert (config.steps, config.schedule.warmup_steps, config.schedule.decay_steps) == (20, 5, 20)
    assert (config.schedule.lr, config.schedule.wd_start, config.schedule.wd_end) == (
        0.5,
        0.25,
        0.25,
    )
    plugin = MegatronLMPlugin(train_iters=10, lr_warmup_iters=1)
    config = from_plugin(plugin, total_steps=20, warmup_steps=5, environ={})
    assert config.schedule is not None
    assert (config.steps, config.schedule.warmup_steps) == (10, 1)


def test_a_constant_rate_needs_no_end() -> None:
    config = _config(lr_decay_style="constant", lr_warmup_iters=3)
    assert config.schedule is not None
    assert config.steps is None
    assert config.schedule.warmup_steps == 3 < config.schedule.decay_steps


def test_samples_count_accumulated_steps() -> None:
    config = from_plugin(
        MegatronLMPlugin(train_samples=100, lr_warmup_samples=12, num_micro_batches=2),
        micro_batch_size=2,
        gradient_accumulation_steps=2,
        world_size=1,
        environ={},
    )
    assert config.schedule is not None
    assert (config.batch.samples_per_step, config.steps) == (8, 12)
    assert config.schedule.warmup_steps == 1.5


def test_the_guides_plugin_is_understood() -> None:
    plugin = MegatronLMPlugin(
        tp_degree=2, pp_degree=2, num_micro_batches=4, gradient_clipping=1.0,
        sequence_parallelism=False, recompute_activations=True, use_distributed_optimizer=True,
        custom_prepare_model_function=None,
    )  # fmt: skip
    config = from_plugin(
        plugin, "bf16", world_size=8, micro_batch_size=2, gradient_accumulation_steps=8, environ={}
    )
    assert config.parallelism == Parallelism(2, 2, distributed_optimizer=True)
    assert config.batch == BatchSizes(2, 4, 2, 8)
    assert config.recompute == Recompute("selective")
    assert config.precision.name == "bf16"


MODEL = Sizes("tiny llama", num_layers=7, positions=64, rotary=True)


def test_a_model_settles_stages_and_length() -> None:
    config = _config(3, pp_degree=3, decoder_last_pipeline_num_layers=1)
    settled = for_model(config, MODEL)
    assert settled.parallelism.pp_layers == (3, 3, 1)
    assert settled.data.seq_length is None
    config = replace(config, data=replace(config.data, files=("a",)))
    assert for_model(config, MODEL).data.seq_length == 64
    assert for_model(config, replace(MODEL, positions=None)).data.seq_length == 1024
    config = replace(config, parallelism=Parallelism(tp=3, sequence_parallel=True))
    assert for_model(config, MODEL).data.seq_length == 63


def test_what_a_model_forbids_is_reported_together() -> None:
    config = _config(
        6, tp_degree=2, pp_degree=3, decoder_last_pipeline_num_layers=2, seq_length=65,
        sequence_parallelism=True, use_rotary_position_embeddings=False,
    )  # fmt: skip
    with pytest.raises(TrainError) as error:
        for_model(config, MODEL)
    for part in ("tiny llama (4 faults)", "65 are longer than its 64", "65 over tp=2",
                 "positions are rotary", "leaves 5 of 7 layers"):  # fmt: skip
        assert part in str(error.value)


def test_megatrons_arguments_are_named_for_custom_train_steps() -> None:
    args = megatron_args(_config(2, tp_degree=2, num_micro_batches=3))
    assert args["tensor_model_parallel_size"] == 2
    assert args["global_batch_size"] == 3


# --- train-ckpt's options ----------------------------------------------------------------------

BASE = "--model m --data a.txt --steps 10"


def _options(line: str, environ: dict[str, str] | None = None) -> TrainConfig:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    options(parser)
    args = parser.parse_args(dashed(line.split()))
    return from_options(args, {"HF_HOME": "/nonexistent"} | (environ or {}))


LINES: dict[str, tuple[str, Any]] = {
    "--model x": ("model.path", "x"),
    "--data x y": ("data.files", ("x", "y")),
    "--data-key content": ("data.key", "content"),
    "--tp 2": ("parallelism.tp", 2),
    "--pp 2": ("parallelism.pp", 2),
    "--pp 3 --pp-layers 3,3,1": ("parallelism.pp_layers", (3, 3, 1)),
    "--pp 2 --virtual-pp-layers 1 --global-batch-size 2": ("parallelism.virtual_pp_layers", 1),
    "--tp 2 --sequence-parallel": ("parallelism.sequence_parallel", True),
    "--micro-batch-size 3": ("batch", BatchSizes(3)),
    "--micro-batch-size 2 --global-batch-size 8 --nproc 2": ("batch", BatchSizes(2, 2, 2)),
    "--seq-length 32": ("data.seq_length", 32),
    "--steps 7": ("steps", 7),
    "--optimizer sgd": ("optimizer.name", "sgd"),
    "--lr 0.5": ("schedule.lr", 0.5),
    "--lr-decay-style cosine": ("schedule.style", "cosine"),
    "--lr-warmup-steps 3": ("schedule.warmup_steps", 3),
    "--min-lr 1e-6": ("schedule.min_lr", 1e-6),
    "--weight-decay 0.1": ("schedule.wd_end", 0.1),
    "--adam-beta1 0.8": ("optimizer.betas", (0.8, 0.999)),
    "--adam-beta2 0.95": ("optimizer.betas", (0.9, 0.95)),
    "--adam-eps 1e-6": ("optimizer.eps", 1e-6),
    "--optimizer sgd --sgd-momentum 0.9": ("optimizer.momentum", 0.9),
    "--clip-grad 0": ("optimizer.clip_grad", 0),
    "--precision bf16": ("precision.name", "bf16"),
    "--recompute selective": ("recompute", Recompute("selective")),
    "--recompute full": ("recompute", Recompute("full", "uniform", 1)),
    "--distributed-optimizer": ("parallelism.distributed_optimizer", True),
    "--attention-dropout 0.1": ("model.attention_dropout", 0.1),
    "--hidden-dropout 0.1": ("model.hidden_dropout", 0.1),
    "--seed 5": ("seed", 5),
    "--eval-data x": ("data.eval_files", ("x",)),
    "--eval-data x --eval-interval 3": ("data.eval_interval", 3),
    "--eval-data x --eval-iters 3": ("data.eval_iters", 3),
    "--save-dir s": ("saving.save_dir", "s"),
    "--save-dir s --save-interval 4": ("saving.save_interval", 4),
    "--save-dir s --keep-last 2": ("saving.keep_last", 2),
    "--save-dir s --overwrite": ("saving.overwrite", True),
    "--save-dir s --break-lock": ("saving.break_lock", True),
    "--timeout-minutes 30": ("launch.timeout_minutes", 30),
    "--nproc 1 --num-machines 2 --main-process-ip h": ("launch.num_machines", 2),
    "--nproc 1 --num-machines 2 --main-process-ip h --machine-rank 1": ("launch.machine_rank", 1),
    "--nproc 1 --num-machines 2 --main-process-ip h --main-process-port 9": (
        "launch.main_process_port",
        9,
    ),
    "--nproc 1 --num-machines 2 --main-process-ip h --rdzv-backend c10d": (
        "launch.rdzv_backend",
        "c10d",
    ),
    "--save-dir s --resume": ("saving.resume", "latest"),
    "--no-verify-source": ("saving.verify_source", False),
    "--resume checkpoint-4": ("saving.resume", "checkpoint-4"),
    "--tensorboard-dir t": ("logging.tensorboard_dir", "t"),
    "--nproc 4": ("launch.nproc", 4),
}


def test_every_option_has_a_case() -> None:
    words = {name: name.replace("_", "-") for name in OPTIONS}
    shown = {
        name
        for name, word in words.items()
        if any(f"--{word}" in k or f"--no-{word}" in k for k in LINES)
    }
    assert shown == OPTIONS.keys()


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("spelling", ["dashes", "underscores", "file"])
def test_an_option_reaches_its_part(line: str, spelling: str, tmp_path: Path) -> None:
    where, expected = LINES[line]
    if spelling == "file":
        path = tmp_path / "own.yaml"
        path.write_text("".join(f"{k}: {v}\n" for k, v in _as_yaml(line)))
        config = _options(f"{_without(BASE, line)} --config {path}")
    else:
        words = line.split()
        if spelling == "underscores":
            words = ["--" + w[2:].replace("-", "_") if w.startswith("--") else w for w in words]
        config = _options(f"{BASE} {' '.join(words)}")
    assert attrgetter(where)(config) == expected
    assert attrgetter(where)(_options(BASE)) != expected


def _as_yaml(line: str) -> Iterator[tuple[str, str]]:
    for part in f" {line}".split(" --")[1:]:
        name, *values = part.split()
        listed = f"[{', '.join(values)}]" if len(values) > 1 else (values or ["true"])[0]
        if name.startswith("no-"):  # a switch that is turned off
            name, listed = name[3:], "false"
        yield name, f"[{listed}]" if name == "pp-layers" else listed


def _without(base: str, line: str) -> str:
    """``base`` without the options that ``line`` names."""
    named = {part.split()[0] for part in f" {line}".split(" --")[1:]}
    kept = [part for part in f" {base}".split(" --")[1:] if part.split()[0] not in named]
    return " ".join("--" + part for part in kept)


def test_ranks_default_to_one_copy_of_the_model() -> None:
    config = _options(f"{BASE} --tp 2 --pp 3")
    assert (config.world_size, config.launch.nproc, config.batch.data_parallel) == (6, 6, 1)
    config = _options(f"{BASE} --tp 2", {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"})
    assert (config.world_size, config.batch.data_parallel) == (8, 4)
    config = _options(f"{BASE} --nproc 2", {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"})
    assert config.notes == ("nproc: 2 is overridden by the 4 that the launcher started",)
    with pytest.raises(TrainError, match="3 processes do not divide over tp=2 x pp=1 = 2"):
        _options(f"{BASE} --tp 2 --nproc 3")


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("", ["3 faults", "--steps", "--data", "--model"]),
        ("--data a --steps 3", ["--model HF_DIR_OR_CONFIG"]),
        (f"{BASE} --save-interval 3 --keep-last 1", ["--save-interval 3", "--keep-last 1"]),
        (f"{BASE} --resume", ["latest in --save-dir"]),
        (f"{BASE} --pp 2 --pp-layers 1,2,3", ["names 3 stages, pp is 2"]),
        (f"{BASE} --pp 2 --pp-layers 1,x", ["pp_layers='1,x' (--pp-layers): expected a list"]),
        (f"{BASE} --pp 2 --pp-layers 2,0", ["must be at least 1"]),
        (f"{BASE} --tp 0 --clip-grad -1", ["tp_degree=0 (--tp)", "gradient_clipping=-1.0"]),
        (f"{BASE} --lr nan", ["lr=nan (--lr): expected a number"]),
        (f"{BASE} --global-batch-size 3 --micro-batch-size 2", ["global batch 3"]),
        (f"{BASE} --lr-warmup-steps 10", ["a warmup of 10 steps"]),
    ],
)
def test_bad_options_are_named(line: str, parts: list[str]) -> None:
    with pytest.raises(TrainError) as error:
        _options(line)
    for part in parts:
        assert part in str(error.value)


def test_a_resumed_run_needs_no_model() -> None:
    assert _options("--data a --steps 3 --resume checkpoint-2").model.path is None


def test_flags_override_files_and_say_so(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("tp: 2\nlr: 1e-3\nsequence-parallel: yes\nresume: false\nseed: 3\n")
    config = _options(f"{BASE} --config {own} --tp 4 --lr 2e-3")
    assert (config.parallelism.tp, config.optimizer.lr, config.seed) == (4, 2e-3, 3)
    assert config.parallelism.sequence_parallel
    assert config.saving.resume is None
    assert set(config.notes) == {
        f"tp_degree: 4 (--tp) overrides 2 (tp in {own})",
        f"lr: 0.002 (--lr) overrides 1e-3 (lr in {own})",
    }


def test_files_override_the_environment_and_a_later_file_an_earlier(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("tp: 2\n")
    theirs = _write(
        tmp_path, {"megatron_lm_tp_degree": 4, "megatron_lm_pp_degree": 2,
                   "megatron_lm_num_micro_batches": 4}, mixed_precision="bf16", num_processes=8,
    )  # fmt: skip
    environ = {"MEGATRON_LM_TP_DEGREE": "8", "ACCELERATE_MIXED_PRECISION": "no"}
    config = _options(f"{BASE} --config {theirs} --config {own}", environ)
    assert (config.parallelism.tp, config.parallelism.pp) == (2, 2)
    assert (config.precision.name, config.world_size) == ("bf16", 8)
    assert config.batch == BatchSizes(1, 4, 2)
    assert sum("overrides" in note for note in config.notes) == 3
    assert _options(f"{BASE} --config {own} --config {theirs}").parallelism.tp == 4


def test_a_global_batch_overrides_the_number_of_micro_batches(tmp_path: Path) -> None:
    path = _write(tmp_path, {"megatron_lm_num_micro_batches": 4})
    config = _options(f"{BASE} --config {path} --global-batch-size 16")
    assert config.batch.num_micro_batches == 16
    assert "num_micro_batches: 4" in config.notes[0]
    assert "is overridden by 16" in config.notes[0]


def test_a_recompute_flag_overrides_a_files_older_field(tmp_path: Path) -> None:
    path = _write(tmp_path, {"megatron_lm_recompute_activations": True})
    assert _options(f"{BASE} --config {path}").recompute == Recompute("selective")
    config = _options(f"{BASE} --config {path} --recompute none")
    assert config.recompute == Recompute("none")
    assert any("(--recompute) overrides True" in note for note in config.notes)


def test_the_default_accelerate_file_counts_where_we_launch_and_is_named(tmp_path: Path) -> None:
    path = _default_yaml(tmp_path, {"megatron_lm_tp_degree": 2}, mixed_precision="bf16")
    config = _options(BASE, {"HF_HOME": str(tmp_path)})
    assert (config.parallelism.tp, config.precision.name) == (2, "bf16")
    assert config.notes == (f"using the settings in {path}",)
    assert config.launch.accelerate_file == str(path)
    joined = _options(BASE, {"HF_HOME": str(tmp_path), "WORLD_SIZE": "1"})
    assert joined.parallelism.tp == 1
    path.write_text("distributed_type: MULTI_GPU\nwhatever: 1\n")
    assert _options(BASE, {"HF_HOME": str(tmp_path)}).notes == ()


def test_ranks_that_get_the_accelerate_file_agree_with_their_launcher(tmp_path: Path) -> None:
    path = _default_yaml(tmp_path, {"megatron_lm_tp_degree": 2}, num_processes=4)
    parent = _options(BASE, {"HF_HOME": str(tmp_path)})
    environ = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "ACCELERATE_CONFIG_FILE": str(path)}
    assert _options(BASE, environ) == parent


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpp: 2", "unknown key tpp; the nearest is tp"),
        ("seq_lenght: 2", "the nearest is seq_length"),
        ("tp: 2\ndistributed_type: MULTI_GPU", "distributed_type MULTI_GPU, expected MEGATRON_LM"),
        ("seq-length: 2\nseq_length: 3", "there twice"),
        ("precision: fp16", "choose one of fp32, bf16"),
        ("tp: [2]", "expected a whole number"),
        ("sequence_parallel: perhaps", "expected true or false"),
        ("3: 4", "expected a mapping"),
    ],
)
def test_a_bad_file_of_options_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(TrainError) as error:
        _options(f"{BASE} --config {path}")
    assert str(path) in str(error.value)
    assert message in str(error.value)


def test_help_shows_every_option_and_imports_nothing_heavy() -> None:
    code = (
        "import argparse, sys\n"
        "from shardwright.train.config import cli\n"
        "parser = argparse.ArgumentParser()\n"
        "cli.options(parser)\n"
        "print(parser.format_help())\n"
        "heavy = {'torch', 'numpy', 'yaml', 'transformers', 'megatron', 'accelerate'}\n"
        "sys.exit(str(heavy & sys.modules.keys()) if heavy & sys.modules.keys() else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in (*OPTIONS, "config"):
        assert "--" + name.replace("_", "-") in done.stdout
