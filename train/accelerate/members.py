"""Every public member of what scripts for Accelerate hold: works here, differs, or is refused.

docs/training.md has the table, and tests/test_members.py walks it: no member of the installed
release of Accelerate is missing, and none that no release has is named. Imports nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Use = Literal["works", "differs", "refused"]
WORKS: Use = "works"
DIFFERS: Use = "differs"
REFUSED: Use = "refused"


@dataclass(frozen=True, slots=True)
class Members:
    """Members of one class that are alike."""

    names: str  # separated by spaces
    use: Use
    what: str = ""  # how it differs, or why it is refused; for some also what it is


_ENGINE = "of another engine; what asks for one is refused"
_HANDLER = "a handler that is kept as it is given"
_PRECISION = "the model computes in its own precision, `no` or `bf16`"

ACCELERATOR = (
    Members(
        "accumulate autocast_handler clear dataloader_config device device_placement "
        "dispatch_batches flag_tensor free_memory gather gather_for_metrics get_tracker "
        "gradient_accumulation_steps gradient_state init_handler init_trackers is_main_process "
        "is_local_main_process local_main_process_first local_process_index log log_with "
        "logging_dir main_process_first no_sync num_processes on_last_process "
        "on_local_main_process on_local_process on_main_process on_process "
        "optimizer_step_was_skipped pad_across_processes print profile profile_handler "
        "project_configuration project_dir reduce register_for_checkpointing "
        "register_load_state_pre_hook register_save_state_pre_hook rng_types save save_iteration "
        "set_trigger should_save_model split_batches "
        "split_between_processes step step_scheduler_with_optimizer sync_gradients "
        "trackers trigger_sync_in_backward unscale_gradients use_seedable_sampler "
        "use_stateful_dataloader non_blocking verify_device_map wait_for_everyone",
        WORKS,
    ),
    Members(
        "backward", WORKS,
        "any function of the loss, and of the logits with one stage and one micro-batch",
    ),
    Members(
        "prepare prepare_model prepare_optimizer prepare_scheduler prepare_data_loader", WORKS,
        "one causal language model with one optimizer, together or one after the other; any number "
        "of loaders and schedulers; other objects come back as they are",
    ),
    Members("clip_grad_norm_", WORKS, "all parameters together, by the L2 norm, over all ranks"),
    Members("clip_grad_value_", WORKS, "all parameters together"),
    Members("check_trigger", WORKS, "any rank may have set it, peers too"),
    Members("is_last_process", WORKS, "the first rank of the last replica"),
    Members("skip_first_batches", WORKS),
    Members("process_index", WORKS, "peers have that of their replica"),
    Members("state", WORKS, "Accelerate's own"),
    Members("mixed_precision", WORKS, "`no` or `bf16`"),
    Members("distributed_type", DIFFERS, "`MEGATRON_LM`, as scripts ask for it"),
    Members("use_distributed multi_device", DIFFERS,
            "whether there are several replicas; always for a peer; there is no DDP"),
    Members("autocast native_amp scaler", DIFFERS, f"nothing: {_PRECISION}"),
    Members("even_batches join_uneven_inputs", DIFFERS,
            "loaders are always even, since every rank runs each forward; rows that fill up do not "
            "count"),
    Members("save_state load_state", DIFFERS, "native checkpoints, see below"),
    Members("save_model get_state_dict unwrap_model", DIFFERS, "see below"),
    Members("end_training", DIFFERS, "the ranks stay together until the script ends"),
    Members("ddp_handler scaler_handler", DIFFERS, f"{_HANDLER}: no DDP, no loss scale"),
    Members(
        "ao_recipe_handler fp8_recipe_handler te_recipe_handler msamp_recipe_handler fp8_backend "
        "fp8_enabled has_fp8_handler delayed_fp8_autocast",
        REFUSED, f"fp8: {_PRECISION}",
    ),
    Members(
        "deepspeed_config deepspeed_engine_wrapped deepspeed_plugin deepspeed_ulysses_dl_adapter "
        "is_fsdp2 is_composable_parallelism_enabled parallelism_config torch_device_mesh "
        "tensor_parallel_rank pipeline_parallel_rank context_parallel_rank data_parallel_rank "
        "data_parallel_shard_rank maybe_context_parallel",
        REFUSED, _ENGINE,
    ),
    Members("has_lomo_optimizer lomo_backward", REFUSED, "optimizers are AdamW, Adam and SGD"),
)  # fmt: skip

ACCELERATOR_STATE = (
    Members(
        "destroy_process_group fork_launched initialized is_last_process is_local_main_process "
        "is_main_process local_main_process_first main_process_first mixed_precision print "
        "split_between_processes wait_for_everyone",
        WORKS,
    ),
    Members("megatron_lm_plugin", WORKS,
            "the plugin that the script gave, with `global_batch_size` and the like"),
    Members("distributed_type use_distributed", DIFFERS, "as the Accelerator's"),
    Members("downcast_bfloat dynamo_plugin use_ipex", DIFFERS, "nothing"),
    Members(
        "deepspeed_plugin deepspeed_plugins get_deepspeed_plugin select_deepspeed_plugin "
        "device_mesh fsdp_plugin is_fsdp2 parallelism_config torch_tp_plugin",
        REFUSED, _ENGINE,
    ),
)  # fmt: skip

PARTIAL_STATE = (
    Members(
        "backend debug default_device destroy_process_group device fork_launched initialized "
        "is_local_main_process is_main_process local_main_process_first local_process_index "
        "main_process_first num_processes on_last_process on_local_main_process on_local_process "
        "on_main_process on_process print process_index set_device split_between_processes "
        "wait_for_everyone",
        WORKS,
    ),
    Members("is_last_process", WORKS, "the first rank of the last replica"),
    Members("distributed_type use_distributed", DIFFERS, "as the Accelerator's"),
)

GRADIENT_STATE = (
    Members(
        "active_dataloader adjust_scheduler dataloader_references end_of_dataloader in_dataloader "
        "initialized num_steps plugin_kwargs remainder sync_gradients sync_with_dataloader",
        WORKS,
    ),
    Members("is_xla_gradients_synced", WORKS, "of TPUs"),
)

PLUGIN = (
    Members("data_parallel_size micro_batch_size global_batch_size set_training_args", WORKS,
            "set when loaders are prepared"),
    Members(
        "megatron_lm_default_args dataset_args set_mixed_precision set_network_size_args "
        "set_optimizer_type set_scheduler_args set_tensorboard_logging_options",
        DIFFERS, "of Accelerate's own engine; not looked at",
    ),
)  # fmt: skip

OPTIMIZER = (
    Members(
        "accelerator_state defaults device_placement eval gradient_state optimizer param_groups "
        "scaler step step_was_skipped train zero_grad",
        WORKS,
    ),
    Members("state state_dict", DIFFERS,
            "hyper-parameters alone: moments lie in megatron's optimizer, save_state has them"),
    Members("load_state_dict", REFUSED, "the state comes by load_state, each rank its share"),
    Members("add_param_group", REFUSED, "param groups are made before prepare"),
)  # fmt: skip

SCHEDULER = (
    Members(
        "get_last_lr get_lr gradient_state load_state_dict optimizers print_lr scheduler "
        "split_batches step step_with_optimizer",
        WORKS,
    ),
    Members("state_dict", DIFFERS, "as JSON, without functions"),
)

LOADER = (
    Members(
        "begin device end end_of_dataloader get_sampler gradient_state iteration remainder reset "
        "rng_types set_epoch skip_batches synchronized_generator "
        "total_batch_size total_dataset_length adjust_state_dict_for_prefetch",
        WORKS,
    ),
    Members("set_sampler", WORKS, "in an order that all replicas agree on"),
    Members("state_dict load_state_dict", DIFFERS,
            "those of the rank that reads; save_state has where each loader is"),
)  # fmt: skip

MODEL = (
    Members(
        "__call__ config device eval forward modules named_parameters parameters train training "
        "zero_grad",
        WORKS,
    ),
    Members("state_dict", DIFFERS, "the whole model by transformers' names; every rank calls it"),
    Members("load_state_dict", REFUSED, "weights come by load_state, or before prepare"),
)

TABLES = {
    "Accelerator": ACCELERATOR,
    "AcceleratorState": ACCELERATOR_STATE,
    "PartialState": PARTIAL_STATE,
    "GradientState": GRADIENT_STATE,
    "MegatronLMPlugin, beside its fields": PLUGIN,
    "a prepared optimizer": OPTIMIZER,
    "a prepared scheduler": SCHEDULER,
    "a prepared loader": LOADER,
    "a prepared model": MODEL,
}
# Members that only some supported releases have.
OF_SOME_RELEASES = {
    "Accelerator": (
        "context_parallel_rank data_parallel_rank data_parallel_shard_rank "
        "deepspeed_ulysses_dl_adapter fp8_enabled is_composable_parallelism_enabled "
        "maybe_context_parallel multi_device parallelism_config pipeline_parallel_rank "
        "should_save_model tensor_parallel_rank torch_device_mesh"
    ),
    "AcceleratorState": "device_mesh parallelism_config use_ipex",
}
