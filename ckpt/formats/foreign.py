"""DeepSpeed's folders, which look like Megatron-LM's and are not read: told apart by name."""

from __future__ import annotations

import re

from ..move.storage import StoragePath

# rank files of DeepSpeed, and of GPT-NeoX, which trains with it
_FILES = re.compile(
    r"mp_rank_\d+_model_states\.pt|layer_\d+-model_\d+-model_states\.pt"
    r"|(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_\w+\.pt"
)
_STEP = re.compile(r"global_step\d+(_universal)?")  # the folder of one save


def is_deepspeed(path: StoragePath) -> bool:
    """Whether the folder, or that of one of its saves, holds rank files of DeepSpeed."""
    steps = [c for c in path.iterdir() if _STEP.fullmatch(c.name) and c.is_dir()]
    return any(_FILES.fullmatch(c.name) for folder in (path, *steps) for c in folder.iterdir())


WAY_OUT = (
    "a DeepSpeed or GPT-NeoX checkpoint, not Megatron-LM's; make a Hugging Face folder of it with "
    "their own tools (zero_to_fp32.py in the folder, GPT-NeoX's tools/ckpts/convert_neox_to_hf.py) "
    "and give that"
)
