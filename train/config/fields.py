"""The fields of Accelerate's ``MegatronLMPlugin``: what each does here, or why it is refused.

Every field of Accelerate 1.15's plugin is here under the same name and with the same default. A
refused field is an error if it gets another value than its default, so none is silently ignored.

One default differs: ``context_parallel_size`` is 1, where Accelerate's 2 doubles the processes that
are needed. And some defaults count only when they are given: the recompute settings ("full",
"uniform", 1), the dropouts (0.0) and ``use_rotary_position_embeddings``, so that a plugin that says
nothing recomputes nothing and keeps the model's own dropout and positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .values import Values


@dataclass(frozen=True, slots=True)
class FieldUse:
    """What happens to one field, argument or key."""

    use: Literal["used", "refused"]
    values: Values
    default: object
    what: str  # what it does here, or what it would do
    reason: str = ""  # why any value but the default is refused, and what to do instead


def used_field(
    kind: str,
    default: object,
    what: str,
    *,
    least: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
) -> FieldUse:
    return FieldUse("used", Values(kind, least, most, choices), default, what)


def refused_field(kind: str, default: object, what: str, reason: str) -> FieldUse:
    return FieldUse("refused", Values(kind), default, what, reason)


_DECODER_ONLY = "only decoder models are trained here; leave it out"
_OWN_MODEL = (
    "the model comes from the transformers model given to prepare(), because weights of unknown "
    "names could be neither saved nor resharded; leave it out"
)
_NO_DUMMY = (
    "there is no MegatronLMDummyDataLoader here; give prepare() a DataLoader over your dataset "
    "(megatron-core's GPTDataset is one), or use train-ckpt, which builds indexed datasets"
)
_NO_CPU_OPTIMIZER = (
    "masters and moments stay on the training device; use_distributed_optimizer=True cuts them "
    "over the data-parallel ranks"
)
_STYLES = ("constant", "linear", "cosine")
FIELDS: dict[str, FieldUse] = {
    "tp_degree": used_field("int", 1, "Ranks that share each layer's matrices.", least=1),
    "pp_degree": used_field("int", 1, "Pipeline stages that the layers are spread over.", least=1),
    "use_custom_fsdp": refused_field(
        "bool", False, "Would cut the weights over the data-parallel ranks.",
        "checkpoints hold whole tp x pp shards; use_distributed_optimizer=True cuts the optimizer, "
        "the larger part",
    ),
    "overlap_cpu_optimizer_d2h_h2d": refused_field(
        "bool", False, "Would overlap copies of an optimizer in host memory.", _NO_CPU_OPTIMIZER
    ),
    "no_load_optim": used_field(
        "bool", False, "load_state leaves the optimizer; its masters follow the loaded weights."
    ),
    "eod_mask_loss": used_field(
        "bool", False, "Leaves positions whose input is the end-of-text token out of the loss."
    ),
    "no_save_optim": used_field("bool", False, "Checkpoints hold weights and no optimizer state."),
    "optimizer_cpu_offload": refused_field(
        "bool", False, "Would keep the optimizer in host memory.", _NO_CPU_OPTIMIZER
    ),
    "use_precision_aware_optimizer": refused_field(
        "bool", False, "Would keep masters and moments in less than fp32.",
        "it needs Transformer Engine's FusedAdam, and checkpoints hold fp32 masters and moments",
    ),
    "decoder_last_pipeline_num_layers": used_field(
        "int", None, "Layers of the last pipeline stage; the others share the rest evenly.", least=1
    ),
    "recompute_granularity": used_field(
        "str", "full", "What is computed again in the backward pass: full (whole "
        "layers), selective (attention) or none; it overrides recompute_activations.",
        choices=("full", "selective", "none"),
    ),
    "recompute_method": used_field(
        "str", "uniform", "Which layers full recomputation covers: uniform (all, in groups of "
        "recompute_num_layers) or block (the first recompute_num_layers of each stage).",
        choices=("uniform", "block"),
    ),
    "recompute_num_layers": used_field(
        "int", 1, "Layers in a recomputed group (uniform), or recomputed per stage (block).",
        least=1,
    ),
    "attention_backend": refused_field(
        "backend", True, "Attention is PyTorch's SDPA, which picks its flash, cuDNN or own kernel.",
        "megatron-core's other attention keeps the score matrix, and a kernel of SDPA is pinned by "
        "running the script inside torch.nn.attention.sdpa_kernel; leave it at True or auto",
    ),
    "expert_model_parallel_size": refused_field(
        "int", 1, "Would spread experts over ranks.", "mixture-of-experts models are not trained "
        "here yet; leave it at 1",
    ),
    "context_parallel_size": refused_field(
        "int", 1, "Would cut long sequences over ranks.", "the attention here needs whole "
        "sequences; for long ones use sequence_parallelism, recomputation or a larger tp_degree",
    ),
    "attention_dropout": used_field(
        "float", 0.0, "Dropout of attention weights; the model's own if it is not given.",
        least=0, most=1,
    ),
    "hidden_dropout": used_field(
        "float", 0.0, "Dropout after embedding, attention and MLP; the model's own if it is "
        "not given.", least=0, most=1,
    ),
    "attention_softmax_in_fp32": refused_field(
        "bool", True, "SDPA computes the softmax in fp32.", "SDPA has no other; leave it at True"
    ),
    "expert_tensor_parallel_size": refused_field(
        "int", 1, "Would set the tensor parallelism of experts.", "mixture-of-experts models are "
        "not trained here yet; leave it at 1",
    ),
    "calculate_per_token_loss": used_field(
        "bool", True, "The loss is the mean over all tokens of the batch, as in transformers; "
        "False takes the mean of the micro-batches' means, those without a token left out.",
    ),
    "use_rotary_position_embeddings": used_field(
        "bool", True, "The model keeps its own positions; a given value that contradicts them is "
        "an error.",
    ),
    "num_micro_batches": used_field(
        "int", 1, "Micro-batches in one forward and backward of the pipeline.", least=1
    ),
    "gradient_clipping": used_field(
        "float", 1.0, "Largest L2 norm of all gradients together; 0 does not clip.", least=0
    ),
    "sequence_parallelism": used_field(
        "bool", False, "Cuts norms, dropout and saved activations along the sequence over the tp "
        "ranks; without effect at tp_degree 1.",
    ),
    "recompute_activations": used_field(
        "bool", False, "Selective recomputation; full where one of its settings is given too "
        "(checkpoint_num_layers, recompute_method, ...).",
    ),
    "use_distributed_optimizer": used_field(
        "bool", False, "Cuts masters and moments over the data-parallel ranks; for AdamW and Adam."
    ),
    "pipeline_model_parallel_split_rank": refused_field(
        "int", None, "Would be the stage where the decoder begins.", _DECODER_ONLY
    ),
    "num_layers_per_virtual_pipeline_stage": used_field(
        "int", None, "Layers in each of the several chunks that a stage holds when the pipeline "
        "is interleaved.", least=1,
    ),
    "is_train_batch_min": used_field(
        "bool", True, "The micro-batch is the smallest batch size of the prepared loaders; False "
        "takes the largest.",
    ),
    "train_iters": used_field(
        "int", None, "Optimizer steps of the whole training: where the schedule ends; train-ckpt "
        "stops there.", least=1,
    ),
    "train_samples": used_field("int", None, "The same in samples.", least=1),
    "weight_decay_incr_style": used_field(
        "str", "constant", "How weight decay grows over the training.", choices=_STYLES
    ),
    "start_weight_decay": used_field("float", None, "Weight decay of the first step.", least=0),
    "end_weight_decay": used_field("float", None, "Weight decay of the last step.", least=0),
    "lr_decay_style": used_field(
        "str", "linear", "How the learning rate falls after the warmup.", choices=_STYLES
    ),
    "lr_decay_iters": used_field(
        "int", None, "Step at which the learning rate reaches min_lr; train_iters by default.",
        least=1,
    ),
    "lr_decay_samples": used_field("int", None, "The same in samples.", least=1),
    "lr_warmup_iters": used_field(
        "int", None, "Steps over which the learning rate rises from 0.", least=0
    ),
    "lr_warmup_samples": used_field("int", None, "The same in samples.", least=0),
    "lr_warmup_fraction": used_field(
        "float", None, "The same as a share of the decay's steps.", least=0, most=1
    ),
    "min_lr": used_field(
        "float", 0, "Learning rate at the end of the decay and after it.", least=0
    ),
    "consumed_samples": used_field(
        "ints", None, "Samples to skip in each prepared loader, in the order of prepare(); whole "
        "global batches, which may be epochs. A loaded checkpoint overrides it.", least=0,
    ),
    "no_wd_decay_cond": used_field(
        "callable", None, "no_wd_decay_cond(name, parameter): true for parameters without weight "
        "decay. Names are megatron-core's, layers counted over the whole model. An error if the "
        "optimizer has several param groups of its own.",
    ),
    "scale_lr_cond": used_field(
        "callable", None, "scale_lr_cond(name, parameter): true for parameters whose learning "
        "rate is multiplied by lr_mult; else as no_wd_decay_cond.",
    ),
    "lr_mult": used_field("float", 1.0, "The factor of scale_lr_cond.", least=0),
    "megatron_dataset_flag": refused_field(
        "bool", False, "Would announce a MegatronLMDummyDataLoader.", _NO_DUMMY
    ),
    "seq_length": used_field(
        "int", None, "Longest sequence, longer ones are refused; by default the model's positions "
        "(train-ckpt: at most 1024 of them).", least=1,
    ),
    "encoder_seq_length": refused_field(
        "int", None, "Would be the sequence length of an encoder.", _DECODER_ONLY
    ),
    "decoder_seq_length": used_field("int", None, "Another name of seq_length.", least=1),
    "tensorboard_dir": used_field(
        "str", None, "Folder of TensorBoard event files: loss, lr and grad_norm of every optimizer "
        "step, eval_loss of every evaluation.",
    ),
    "set_all_logging_options": used_field(
        "bool", False, "Logs the norm of the weights too (params_norm), which costs a pass over "
        "them; everything else is logged anyway.",
    ),
    "eval_iters": used_field(
        "int", 100, "train-ckpt: steps of one evaluation. A script evaluates as it likes.", least=1
    ),
    "eval_interval": used_field(
        "int", 1000, "train-ckpt: steps between evaluations. A script evaluates as it likes.",
        least=1,
    ),
    "return_logits": used_field(
        "bool", False, "The output has the logits of the whole vocabulary, gathered on every rank; "
        "without it only a batch without labels gives them.",
    ),
    "custom_train_step_class": used_field(
        "callable", None, "Called with a namespace of Megatron's arguments and "
        "custom_train_step_kwargs; its forward_step(iterator, model) runs each micro-batch and "
        "returns (output, function of the output that returns (loss, dict)). The loss is the mean "
        "over micro-batches and data-parallel ranks.",
    ),
    "custom_train_step_kwargs": used_field(
        "dict", None, "Keyword arguments for custom_train_step_class."
    ),
    "custom_model_provider_function": refused_field(
        "callable", None, "Would build the model.", _OWN_MODEL
    ),
    "custom_prepare_model_function": refused_field(
        "callable", None, "Would wrap the model.", _OWN_MODEL
    ),
    "custom_megatron_datasets_provider_function": refused_field(
        "callable", None, "Would build Megatron datasets.", _NO_DUMMY
    ),
    "custom_get_batch_function": used_field(
        "callable", None, "custom_get_batch_function(iterator) gives tokens, labels (shifted), "
        "loss_mask, attention_mask (None, [rows, sequence] with 1 for a token, or [rows or 1, 1, "
        "sequence, sequence] with true for hidden) and position_ids of a micro-batch.",
    ),
    "custom_loss_function": used_field(
        "callable", None, "custom_loss_function(loss_mask, losses) gives the loss of a "
        "micro-batch, a scalar, and a dict of scalars that the output has as reported; with "
        "return_logits it gets (losses, logits of this tp rank). Micro-batches count by their "
        "tokens, or all equally if calculate_per_token_loss is False.",
    ),
    "other_megatron_args": used_field(
        "dict", None, "Megatron arguments by name: those with a meaning here are used, those that "
        "describe the model are compared with it, any other is an error.",
    ),
    "checkpoint_num_layers": used_field(
        "int", None, "The older name of recompute_num_layers; asks for full recomputation.", least=1
    ),
    "distribute_checkpointed_activations": used_field(
        "bool", False, "Each tp rank keeps its part of the inputs that full recomputation saves.",
    ),
    "partition_activations": used_field(
        "bool", False, "The same as distribute_checkpointed_activations."
    ),
    "check_for_nan_in_loss_and_grad": used_field(
        "bool", True, "A loss or gradient that is not finite stops the run, naming step and rank."
    ),
}  # fmt: skip
# What Accelerate itself takes from the environment and from a YAML's megatron_lm_config.
ACCELERATE_FIELDS = tuple(
    name
    for name in list(FIELDS)[: list(FIELDS).index("use_distributed_optimizer") + 1]
)  # fmt: skip
# Megatron's own names for what a plugin field says.
ALIASES = {
    "tensor_model_parallel_size": "tp_degree",
    "pipeline_model_parallel_size": "pp_degree",
    "sequence_parallel": "sequence_parallelism",
    "clip_grad": "gradient_clipping",
    "distribute_saved_activations": "distribute_checkpointed_activations",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
# What Accelerate's guides call a field in a YAML, beside the names above.
YAML_ALIASES = {**ALIASES, "learning_rate_decay_iters": "lr_decay_iters"}
# Megatron arguments without a field.
ARGUMENTS: dict[str, FieldUse] = {
    "seed": used_field(
        "int",
        1234,
        "Seed of a script's dropout; torch's random state at prepare() decides it if it is not "
        "given. The default is that of train-ckpt.",
        least=0,
    ),
    "make_vocab_size_divisible_by": used_field(
        "int", 128, "The vocabulary is padded to a multiple of this times tp.", least=1
    ),
    "overlap_grad_reduce": used_field(
        "bool", False, "Overlaps gradient reduction, and with the distributed optimizer gathering "
        "parameters, with computing; without effect while gradients are accumulated.",
    ),
    "distributed_timeout_minutes": used_field(
        "int", 10, "How long a collective waits for other ranks.", least=1
    ),
}  # fmt: skip
# Megatron arguments that describe the model: they must say what the model is.
ARCHITECTURE: dict[str, FieldUse] = {
    name: used_field(kind, None, "Compared with the model.")
    for kind, names in {
        "int": "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups "
        "kv_channels max_position_embeddings rotary_base orig_vocab_size padded_vocab_size",
        "float": "rotary_percent norm_epsilon",
        "bool": "group_query_attention swiglu add_bias_linear add_qkv_bias qk_layernorm "
        "untie_embeddings_and_output_weights",
        "str": "position_embedding_type normalization",
    }.items()
    for name in names.split()
}
# Megatron arguments that are set in another way here.
ELSEWHERE = {
    **dict.fromkeys(
        ("lr", "weight_decay", "optimizer", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum"),
        "the optimizer given to prepare() says it",
    ),
    **dict.fromkeys(
        ("micro_batch_size", "global_batch_size"),
        "the loader's batch_size is the micro-batch, num_micro_batches the number of them",
    ),
    "overlap_param_gather": "overlap_grad_reduce covers it",
    **dict.fromkeys(("bf16", "fp16"), "Accelerator(mixed_precision=...) says it"),
    **dict.fromkeys(("load", "save"), "load_state and save_state take the folder"),
    **dict.fromkeys(("wandb_project", "wandb_exp_name", "wandb_save_dir"), "use init_trackers"),
}
