"""Every name of other packages that the trainer replaces, or relies on though private.

Those are torch, megatron-core and accelerate. megatron-core is pinned, the others are not.
tests/test_patches.py asserts each row, so that an update fails with the name. ``replace`` is the
one way to replace a name of a module.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib import import_module

_M = "megatron.core"
_SCHEDULES = _M + ".pipeline_parallel.schedules"


@dataclass(frozen=True, slots=True)
class Names:
    """Names of one module of another package."""

    where: str
    names: str  # separated by spaces; "Class.method" too
    why: str
    parameters: str = ""  # those that each must have
    exact: bool = False  # it has these alone, in this order: a stand-in takes or overrides them
    texts: tuple[str, ...] = ()  # what the source must say
    absent: bool = False  # not there without Transformer Engine or Apex


# fmt: off
REPLACED = (
    Names("torch.cuda", "current_device", "the one device is the CPU"),
    Names("torch.cuda", "synchronize reset_peak_memory_stats",
          "nothing is ever pending or cached", parameters="device", exact=True),
    Names("torch.cuda", "empty_cache", "nothing is ever pending or cached"),
    Names("torch.cuda", "Stream Event", "work is done when it is called"),
    Names("torch.cuda", "stream", "the one stream", parameters="stream", exact=True),
    Names("torch.cuda", "current_stream default_stream", "the one stream", parameters="device",
          exact=True),
    Names("torch.cuda", "get_rng_state", "the CPU's random state", parameters="device",
          exact=True),
    Names("torch.cuda", "set_rng_state", "the CPU's random state", parameters="new_state device",
          exact=True),
    Names("torch.cuda", "manual_seed manual_seed_all", "the CPU's random state",
          parameters="seed", exact=True),
    Names("torch.cuda",
          "memory_allocated max_memory_allocated memory_reserved max_memory_reserved",
          "no memory of a GPU", parameters="device", exact=True),
    Names("torch.cuda.random", "get_rng_state", "the same, where torch looks",
          parameters="device", exact=True),
    Names("torch.cuda.random", "set_rng_state", "the same, where torch looks",
          parameters="new_state device", exact=True),
    Names("torch.cuda.random", "manual_seed manual_seed_all", "the same, where torch looks",
          parameters="seed", exact=True),
    Names("torch.cuda.nvtx", "range_push mark", "no profiler", parameters="msg", exact=True),
    Names("torch.cuda.nvtx", "range_pop", "no profiler"),
    Names("torch.distributed", "isend", "gloo sends what a freed tensor's memory holds by then",
          parameters="tensor dst group tag group_dst", exact=True),
    Names("torch.distributed", "all_to_all_single", "gloo takes split sizes as lists alone",
          parameters="output input output_split_sizes input_split_sizes group async_op",
          exact=True),
    Names("torch.distributed", "all_gather", "gloo takes equal parts alone",
          parameters="tensor_list tensor group async_op", exact=True),
    Names("torch.distributed", "reduce_scatter", "gloo takes equal parts alone",
          parameters="output input_list op group async_op", exact=True),
    Names("torch.distributed.distributed_c10d", "isend",
          "gloo sends what a freed tensor's memory holds by then",
          parameters="tensor dst group tag group_dst", exact=True),
    Names("torch.distributed.distributed_c10d", "all_to_all_single",
          "gloo takes split sizes as lists alone",
          parameters="output input output_split_sizes input_split_sizes group async_op",
          exact=True),
    Names("torch.distributed.distributed_c10d", "all_gather", "gloo takes equal parts alone",
          parameters="tensor_list tensor group async_op", exact=True),
    Names("torch.distributed.distributed_c10d", "reduce_scatter", "gloo takes equal parts alone",
          parameters="output input_list op group async_op", exact=True),
    Names(_M + ".tensor_parallel.random", "_get_cuda_rng_state", "the CPU's random state",
          parameters="device clone graph_safe", exact=True),
    Names(_M + ".tensor_parallel.random", "_set_cuda_rng_state", "the CPU's random state",
          parameters="new_state device graph_safe", exact=True),
    Names(_M + ".transformer.moe.moe_utils", "te_general_gemm",
          "named without Transformer Engine too", absent=True),
    Names(_M + ".tensor_parallel.layers", "fused_weight_gradient_mlp_cuda", "Apex's kernel",
          texts=("fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(",), absent=True),
    Names(_M + ".tensor_parallel.layers", "_grad_accum_fusion_available",
          "says that the kernel above is there"),
    Names(_M + ".models.common.embeddings.rope_utils", "fused_apply_rotary_pos_emb",
          "Transformer Engine's kernel; None without it"),
    Names(_M + ".models.common.language_module.language_module", "te_parallel_cross_entropy",
          "Transformer Engine's kernel; None without it"),
    Names(_M + ".optimizer.clip_grads", "l2_norm_impl",
          "the fallbacks wait for the GPU for each tensor",
          parameters="chunk_size noop_flag tensor_lists per_tensor args", exact=True),
    Names(_M + ".optimizer.clip_grads", "multi_tensor_scale_impl",
          "the fallbacks wait for the GPU for each tensor",
          parameters="chunk_size noop_flag tensor_lists scale", exact=True),
    Names("accelerate.state", "PartialState.is_main_process",
          "under MEGATRON_LM it is the last process; here rank 0"),
    Names("accelerate.state", "PartialState.is_local_main_process",
          "under MEGATRON_LM it is the last process; here the first of its machine"),
    Names("accelerate.state", "PartialState.is_last_process", "one rank of its replica alone"),
    Names("accelerate.state", "PartialState.use_distributed",
          "decorators ask it whether there are other processes: peers are"),
    Names("accelerate.state", "PartialState.wait_for_everyone",
          "does nothing under MEGATRON_LM", parameters="self", exact=True),
    Names("accelerate.state", "PartialState.on_process", "one rank of a replica alone",
          parameters="self function process_index", exact=True),
    Names("accelerate.logging", "MultiProcessAdapter.log", "one rank of a replica alone",
          parameters="self level msg args kwargs", exact=True),
    Names("accelerate.utils.operations", "torch",
          "collectives of its functions span the world; here each replica counts once"),
    Names("accelerate.utils.random", "torch",
          "the same for generators that are synchronized"),
    Names("accelerate", "Accelerator.__new__",
          "an unchanged script's class makes ours; it has none of its own"),
)

RELIED_ON = (
    Names("torch.distributed.distributed_c10d", "_get_default_store",
          "ranks leave notes for each other that wait for nobody"),
    Names("torch._C", "DisableTorchFunction", "collectives that go past the mode of cpu.py"),
    Names("torch._dynamo.config", "disable", "no compilation on CPU, once dynamo is imported"),
    Names("torch.overrides", "TorchFunctionMode.__torch_function__", "overridden by cpu.py",
          parameters="self func types args kwargs", exact=True),
    Names("torch", "_foreach_norm _foreach_copy_ _foreach_mul_", "one kernel for many tensors"),
    Names("torch.nn", "Module", "graphs.py puts other parameters over the same memory",
          texts=("_parameters",)),
    Names("torch.optim.lr_scheduler", "LRScheduler", "asks whether its optimizer has stepped",
          texts=("_opt_called",)),
    Names("torch.cuda", "graph", "CUDA graphs are recorded"),
    Names(_M + ".tensor_parallel.random", "CudaRNGStatesTracker",
          "its states are saved; its warning is filtered", texts=("CPU RNG state changed",)),
    Names(_M + ".tensor_parallel.random", "CudaRNGStatesTracker.get_states",
          "random states of named regions"),
    Names(_M + ".tensor_parallel.random", "CudaRNGStatesTracker.set_states",
          "random states of named regions", parameters="states"),
    Names(_M + ".tensor_parallel.random", "CudaRNGStatesTracker.fork",
          "random states of named regions", parameters="name"),
    Names(_M + ".utils", "local_multi_tensor_l2_norm", "replaced only where these are in use",
          parameters="chunk_size noop_flag tensor_lists per_tensor args", exact=True),
    Names(_M + ".utils", "local_multi_tensor_scale", "replaced only where these are in use",
          parameters="chunk_size noop_flag tensor_lists scale", exact=True),
    Names(_M + ".parallel_state", "_global_process_group_list",
          "shutdown closes the groups that megatron forgets"),
    Names(_M + ".parallel_state", "initialize_model_parallel", "called with the names below",
          parameters="tensor_model_parallel_size pipeline_model_parallel_size "
              "create_gloo_process_groups distributed_timeout_minutes"),
    Names(_M + ".parallel_state", "get_global_memory_buffer",
          "recordings keep its buffers alive"),
    Names(_SCHEDULES, "forward_step_calc_loss",
          "three values of a loss are not divided with calculate_per_token_loss",
          parameters="loss_func config", texts=("len(outputs) == 3",)),
    Names(_SCHEDULES, "backward_step", "every loss starts with config.grad_scale_func",
          parameters="config", texts=("config.grad_scale_func(output_tensor[0])",)),
    Names(_SCHEDULES,
          "forward_backward_no_pipelining forward_backward_pipelining_without_interleaving "
              "forward_backward_pipelining_with_interleaving",
          "called by keywords; gradients are reduced only where the config has a function for it",
          parameters="forward_step_func data_iterator model num_microbatches seq_length "
              "micro_batch_size forward_only",
          texts=("if config.finalize_model_grads_func is not None and not forward_only:",)),
    Names(_M + ".distributed", "finalize_model_grads",
          "reduces gradients; divides them by num_tokens, which it is not given",
          parameters="model num_tokens"),
    Names(_M + ".distributed.distributed_data_parallel", "DistributedDataParallel.__init__",
          "our chunks are wrapped", parameters="config ddp_config module disable_bucketing"),
    Names(_M + ".distributed.distributed_data_parallel",
          "DistributedDataParallel.zero_grad_buffer DistributedDataParallel.no_sync",
          "gradient buffers and overlap"),
    Names(_M + ".distributed.distributed_data_parallel",
          "DistributedDataParallel.start_param_sync", "gradient buffers and overlap",
          parameters="force_sync"),
    Names(_M + ".distributed.distributed_data_parallel",
          "DistributedDataParallel.start_grad_sync", "gradient buffers and overlap",
          parameters="unused"),
    Names(_M + ".distributed.distributed_data_parallel", "DistributedDataParallel",
          "gradients are summed, not averaged, with calculate_per_token_loss",
          texts=("gradient_scaling_factor = 1.0",)),
    Names(_M + ".optimizer.optimizer",
          "MegatronOptimizer.prepare_grads MegatronOptimizer.get_grad_norm",
          "the norm before a step, and the loss's scale"),
    Names(_M + ".optimizer.optimizer", "MegatronOptimizer.scale_loss",
          "the norm before a step, and the loss's scale", parameters="loss"),
    Names(_M + ".optimizer.optimizer", "Float16OptimizerWithFloat16Params",
          "a bf16 parameter names its master", texts=("param.main_param = main_param",)),
    Names(_M + ".optimizer.optimizer", "ChainedOptimizer", "holds its parts",
          texts=("self.chained_optimizers",)),
    Names(_M + ".optimizer.optimizer", "MegatronOptimizer.reload_model_params",
          "masters from loaded weights", parameters="state_dict"),
    Names(_M + ".optimizer.distrib_optimizer", "DistributedOptimizer",
          "where masters and moments lie",
          texts=("self.model_param_gbuf_map", "self.model_param_group_index_map",)),
    Names(_M + ".optimizer.distrib_optimizer", "DistributedOptimizer._get_model_param_range_map",
          "which range of a parameter a rank steps", parameters="param"),
    Names(_M + ".optimizer.optimizer_config", "ParamKey", "param groups of our own",
          parameters="with_name_predicate"),
    Names(_M + ".optimizer.optimizer_config", "ParamWithNamePredicate", "param groups of our own",
          parameters="name fn"),
    Names(_M + ".optimizer_param_scheduler", "OptimizerParamScheduler.__init__", "the schedule",
          parameters="optimizer init_lr max_lr min_lr lr_warmup_steps lr_decay_steps "
              "lr_decay_style start_wd end_wd wd_incr_steps wd_incr_style"),
    Names(_M + ".models.common.embeddings.rotary_pos_embedding",
          "RotaryEmbedding.forward.__wrapped__",
          "the cache of angles belongs to the class and keeps models alive; ours is the "
              "instance's", parameters="self max_seq_len offset packed_seq cp_group", exact=True),
    Names(_M + ".models.common.embeddings.rotary_pos_embedding", "RotaryEmbedding",
          "frequencies are set as transformers has them", texts=("self.inv_freq",)),
    Names(_M + ".models.common.embeddings.language_model_embedding", "LanguageModelEmbedding",
          "the embedding's own dropout", texts=("self.embedding_dropout",)),
    Names(_M + ".tensor_parallel.layers", "VocabParallelEmbedding",
          "whether its output is cut over tp",
          texts=("self.reduce_scatter_embeddings", "self.tp_group",)),
    Names(_M + ".tensor_parallel.layers",
          "ColumnParallelLinear.__init__ RowParallelLinear.__init__",
          "bias is overridden for each layer", parameters="bias"),
    Names(_M + ".tensor_parallel.layers", "ColumnParallelLinear", "the output layer's group",
          texts=("self.tp_group",)),
    Names(_M + ".transformer.transformer_block", "get_num_layers_to_build", "layers of a chunk",
          parameters="config vp_stage"),
    Names(_M + ".transformer.transformer_block", "TransformerBlockSubmodules",
          "the chunk's layers and last norm", parameters="layer_specs layer_norm"),
    Names(_M + ".transformer.transformer_layer", "TransformerLayerSubmodules", "our layer",
          parameters="input_layernorm self_attention self_attn_bda pre_mlp_layernorm mlp mlp_bda"),
    Names(_M + ".transformer.transformer_layer", "TransformerLayer.forward",
          "replaced in each layer while graphs are used", parameters="self args kwargs",
          exact=True),
    Names(_M + ".transformer.attention", "SelfAttentionSubmodules", "our attention",
          parameters="linear_qkv core_attention linear_proj q_layernorm k_layernorm"),
    Names(_M + ".transformer.attention", "Attention", "how it makes and calls our CoreAttention",
          texts=("softmax_scale=self.config.softmax_scale",)),
    Names(_M + ".transformer.mlp", "MLPSubmodules", "our MLP",
          parameters="linear_fc1 linear_fc2"),
    Names(_M + ".models.gpt", "GPTModel.__init__", "our model",
          parameters="config transformer_layer_spec vocab_size max_sequence_length pre_process "
              "post_process share_embeddings_and_output_weights position_embedding_type "
              "rotary_percent rotary_base vp_stage"),
    Names(_M + ".transformer.transformer_config", "TransformerConfig", "our model and its schedule",
          parameters="calculate_per_token_loss grad_scale_func finalize_model_grads_func "
              "no_sync_func grad_sync_func param_sync_func timers pipeline_model_parallel_layout "
              "virtual_pipeline_model_parallel_size overlap_p2p_comm batch_p2p_comm "
              "batch_p2p_sync deallocate_pipeline_outputs apply_rope_fusion "
              "bias_activation_fusion cross_entropy_fusion_impl gradient_accumulation_fusion "
              "cuda_graph_scope softmax_scale layernorm_zero_centered_gamma"),
    Names(_M + ".distributed", "DistributedDataParallelConfig", "gradient buffers",
          parameters="grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather "
              "use_distributed_optimizer check_for_nan_in_grad bucket_size"),
    Names(_M + ".optimizer", "get_megatron_optimizer", "the optimizer",
          parameters="config model_chunks config_overrides use_gloo_process_groups"),
    Names(_M + ".transformer.module", "param_is_not_shared", "which weights a norm counts",
          parameters="param"),
    Names(_M + ".tensor_parallel", "param_is_not_tensor_parallel_duplicate",
          "which weights a norm counts", parameters="param tp_group"),
    Names(_M + ".datasets.gpt_dataset", "GPTDataset.__init__",
          "its remark on indices is filtered",
          parameters="indexed_dataset dataset_path indexed_indices num_samples index_split "
              "config"),
    Names(_M + ".datasets.gpt_dataset", "GPTDataset", "the remark",
          texts=("path_to_cache is None",)),
    Names(_M + ".datasets.helpers", "build_sample_idx", "samples of documents"),
    Names(_M + ".datasets.indexed_dataset", "IndexedDatasetBuilder.__init__",
          "corpora are written", parameters="bin_path dtype"),
    Names("atexit", "_run_exitfuncs", "a rank that failed ends without Python's own end"),
    Names("accelerate", "Accelerator.__init__", "what was prepared is kept under these names",
          texts=("self._models", "self._optimizers", "self._schedulers", "self._dataloaders",
              "self._custom_objects", "self._save_model_state_pre_hook",
              "self._load_model_state_pre_hook")),
    Names("accelerate", "Accelerator.prepare", "the mark of a prepared object",
          texts=("_is_accelerate_prepared",)),
    Names("accelerate.state", "PartialState AcceleratorState GradientState",
          "what the states say; forgotten when a process leaves its layout",
          texts=("_shared_state",)),
    Names("accelerate.state", "PartialState._reset_state AcceleratorState._reset_state "
          "GradientState._reset_state", "forgotten when a process leaves its layout"),
    Names("accelerate.state", "GradientState._add_dataloader GradientState._remove_dataloader",
          "loaders that are iterated", parameters="self dataloader", exact=True),
    Names("accelerate.state", "GradientState._set_sync_gradients", "after a checkpoint is loaded",
          parameters="self sync_gradients", exact=True),
    Names("torch.utils.data", "RandomSampler", "copied into Accelerate's seedable sampler",
          texts=("self._num_samples",)),
    Names(_SCHEDULES, "forward_step", "train-ckpt's report has a timer of this name",
          texts=("'forward-compute'",)),
    Names(_SCHEDULES, "backward_step", "train-ckpt's report has a timer of this name",
          texts=("'backward-compute'",)),
    Names(_SCHEDULES, "forward_backward_no_pipelining",
          "train-ckpt's report has a timer of this name", texts=("'forward-backward'",)),
)
# fmt: on

_KNOWN = {(row.where, name) for row in REPLACED for name in row.names.split()}


def replace(where: str, name: str, stand_in: object) -> None:
    """Put ``stand_in`` in the place of a name of a module, for the rest of the process."""
    assert (where, name) in _KNOWN, f"{where}.{name} is not in the table of replaced names"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core says at length that Apex is absent
        holder: object = import_module(where)
    *parts, last = name.split(".")
    for part in parts:
        holder = getattr(holder, part)
    setattr(holder, last, stand_in)
