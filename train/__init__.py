"""The trainer: megatron-core models, on CPU or GPU, that save and resume `tp_X_pp_Y` shards."""
