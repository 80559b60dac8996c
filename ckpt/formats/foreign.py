"""Recognises by name what this tool cannot read, and says what it is and what to type.

Folders of other tools, and files that are one part of something: a rank, an optimizer, an adapter.
It looks at names only, and at one small file that may name a base model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..checkpoint.json_io import load_json
from ..errors import CheckpointError
from ..move.storage import StoragePath

# rank files of DeepSpeed, and of GPT-NeoX, which trains with it
_DEEPSPEED = re.compile(
    r"mp_rank_\d+_model_states\.pt|layer_\d+-model_\d+-model_states\.pt"
    r"|(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_\w+\.pt"
)
_STEP = re.compile(r"global_step\d+(_universal)?")  # the folder of one save
WAY_OUT = (
    "a DeepSpeed or GPT-NeoX checkpoint, not Megatron-LM's; make a Hugging Face folder of it with "
    "their own tools (zero_to_fp32.py in the folder, GPT-NeoX's tools/ckpts/convert_neox_to_hf.py) "
    "and give that"
)
_ADAPTER = "adapter_config.json"
_VERL = re.compile(r"model_world_size_\d+_rank_\d+\.pt")
_FSDP = re.compile(r"pytorch_model_fsdp_\d+|optimizer_\d+")
_CHECKPOINT = re.compile(r"checkpoint-\d{1,18}")
_RANK_FOLDER = re.compile(r"mp_rank_\d{2,6}(_\d{3,6}){0,2}")
_ITERATION = re.compile(r"iter_\d{7,}|release")
_MEGATRON_FILES = ("model_optim_rng.pt", "model_rng.pt", "distrib_optim.pt")

# File name -> what it is and which one to give instead; `{folder}` is the file's own.
_FILES: tuple[tuple[str, str], ...] = (
    (
        r"(pytorch_)?model((_[a-z]+_\d+)+)\.(safetensors|bin)",
        "one rank of a checkpoint of several; give its folder: {folder}",
    ),
    (
        r"(model|pytorch_model)-\d{5}-of-\d{5}\.(safetensors|bin)",
        "one part of the weights; give its folder: {folder}",
    ),
    (
        r"model_optim_rng\.pt|model_rng\.pt|distrib_optim\.pt",
        "one rank of a checkpoint of Megatron-LM; give the folder of its iteration: {above}",
    ),
    (
        r"common\.pt|__\d+_\d+\.distcp|\.metadata",
        "a part of a distributed checkpoint; give its folder: {folder}",
    ),
    (
        r"optimizer.*\.(safetensors|bin|pt|pth)",
        "the state of an optimizer, no model; give the checkpoint's folder: {folder}",
    ),
    (
        r"(lr_)?scheduler.*\.(bin|pt|pth)|scaler.*\.(bin|pt)|sampler.*\.bin|training_args\.bin"
        r"|rng_state.*\.pth|random_states_\d+\.(safetensors|pkl)|dl_state_dict.*\.bin",
        "a part of a trainer's state, no model; give the checkpoint's folder: {folder}",
    ),
    (
        r"adapter_model\.(safetensors|bin)",
        "a LoRA adapter, which is no model by itself; merge it into its base with peft "
        "(merge_and_unload, then save_pretrained) and give that folder",
    ),
    (
        r".*\.gguf",
        "a GGUF file, whose weights are quantized and renamed; give the Hugging Face folder that "
        "it was made from",
    ),
    (_VERL.pattern, "one rank of a checkpoint of verl; give its folder: {folder}"),
    (_DEEPSPEED.pattern, WAY_OUT),
)


def is_deepspeed(path: StoragePath) -> bool:
    """Whether the folder, or that of one of its saves, holds rank files of DeepSpeed."""
    steps = [c for c in path.iterdir() if _STEP.fullmatch(c.name) and c.is_dir()]
    return any(_DEEPSPEED.fullmatch(c.name) for folder in (path, *steps) for c in folder.iterdir())


def what_file(path: StoragePath) -> str:
    """What a file is that is not a whole model, and what to give instead; "" if unknown."""
    for pattern, says in _FILES:
        if re.fullmatch(pattern, path.name):
            return says.format(folder=path.parent, above=path.parent.parent)
    return ""


def what_folder(path: StoragePath) -> str:
    """What a folder without a readable checkpoint is, and what to do; "" if unknown."""
    names = sorted(child.name for child in path.iterdir())
    if is_deepspeed(path):
        return WAY_OUT
    if _ADAPTER in names:
        return _adapter(path)
    return _of_names(path, names)


def _of_names(path: StoragePath, names: Sequence[str]) -> str:
    """The same, from the names in the folder."""

    def some(pattern: re.Pattern[str]) -> list[str]:
        return [name for name in names if pattern.fullmatch(name)]

    if any(name in _MEGATRON_FILES for name in names):
        return f"one rank of a checkpoint of Megatron-LM; give the folder above: {path.parent}"
    if found := some(_ITERATION):
        return (
            f"iterations of Megatron-LM ({', '.join(found[:5])}) and no "
            f"latest_checkpointed_iteration.txt; give one of them: {path / found[-1]}"
        )
    if some(_VERL):
        return (
            "a checkpoint of verl in FSDP's shards; make a Hugging Face folder of it with "
            f"python -m verl.model_merger merge --backend fsdp --local_dir {path} --target_dir OUT"
        )
    if found := some(_FSDP):
        weights = next((n for n in found if n.startswith("pytorch_model")), found[0])
        return (
            "FSDP's shards, written by PyTorch; make one model of them with "
            f"accelerate merge-weights {path / weights} OUT and give OUT"
        )
    if any(name.endswith(".distcp") for name in names):
        return (
            "a distributed checkpoint of PyTorch's own, not of megatron-core; make one file of it "
            f"with python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} "
            "model.pt and give that with --config HF_DIR"
        )
    if any(name.endswith(".gguf") for name in names):
        return (
            "GGUF files, whose weights are quantized and renamed; give the Hugging Face folder "
            "that they were made from"
        )
    if found := some(_CHECKPOINT):
        newest = max(found, key=lambda name: int(name.split("-")[1]))
        return (
            f"a trainer's folder of {len(found)} checkpoints and no pointer to the newest; give "
            f"one of them: {path / newest}"
        )
    return ""


def _adapter(path: StoragePath) -> str:
    try:
        base = load_json(path / _ADAPTER).get("base_model_name_or_path")
    except CheckpointError:
        base = None
    of = f" of {base!r:.200}" if isinstance(base, str) else ""
    return (
        f"a LoRA adapter{of}, which is no model by itself; merge it into its base with peft "
        "(merge_and_unload, then save_pretrained) and give that folder"
    )


_POINTER = b"version https://git-lfs.github.com/spec/"  # the first line of a Git LFS pointer
_POINTER_BYTES = 1024  # no pointer is longer
_KEPT_APART = (".safetensors", ".bin", ".pt", ".pth", ".json", ".model", ".gguf", ".distcp")


def lfs_pointers(path: StoragePath) -> str:
    """What to say if files are pointers of Git LFS (three lines of text); "" if they are not."""
    folder = path if path.is_dir() else path.parent
    found = [
        child.name
        for child in (path.iterdir() if path.is_dir() else (path,))
        if child.suffix in _KEPT_APART
        and child.is_file()
        and child.size() <= _POINTER_BYTES
        and child.read_bytes().startswith(_POINTER)
    ]
    if not found:
        return ""
    return (
        f"{', '.join(found[:5])}: a Git LFS pointer in place of the file, {len(found)} in all; "
        f"fetch the files with: git -C {folder} lfs pull"
    )
