"""``merge-ckpt --test-logits``: the logits of a merge against those of its source's model.

Both models are in float32 on the CPU, one after the other. The source's is filled with the logical
tensors of its own files and made from its own config: the merged files have no part in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .checkpoint.types import Checkpoint
from .errors import CheckpointError, install
from .model.dtypes import TO_TORCH
from .model.manifest import TensorMeta, category_of, is_padding
from .move.storage import LOCAL, StoragePath, Where, storage_path
from .reader import OpenCheckpoint

if TYPE_CHECKING:
    import torch

OPTION = "--test-logits"
# Of the largest logit. The same weights give the same bits, unless a kernel adds in another order.
ROUNDING = 1e-5
_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt",
    "spiece.model", "tekken.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LogitsVerdict:
    """What two models say about a prompt."""

    tokens: int  # of the prompt
    gap: float  # largest difference of two logits
    largest: float  # magnitude of a logit of the source's model
    top: tuple[str, str]  # the token after the prompt: of the result, of the source's model

    @property
    def same(self) -> bool:
        """Whether the two differ by no more than rounding."""
        return self.gap <= ROUNDING * self.largest

    def lines(self) -> list[str]:
        """The verdict for people."""
        return [
            f"logits of {self.tokens} tokens: largest difference {self.gap:.3g} "
            f"(largest logit {self.largest:.3g})",
            f"top token: {self.top[0]} in the result, {self.top[1]} in the source's model",
        ]

    def check(self, output: Where) -> None:
        """CheckpointError where the two differ."""
        if not self.same:
            raise CheckpointError(
                f"{output}: {OPTION}: its logits differ from those of the source's model by up to "
                f"{self.gap:.3g}; --verify names the tensors that differ, verify-ckpt the settings"
            )


def check_logits(output: Where | None) -> None:
    """Raise unless the logits of an output can be computed: libraries, and a local folder."""
    for module in ("torch", "transformers"):
        if find_spec(module) is None:
            raise CheckpointError(f"{OPTION}: {install(module, 'train')}")
    if output is None:
        return
    where = storage_path(output)
    if where.storage is not LOCAL:
        raise CheckpointError(f"{output}: {OPTION} needs an output in a folder of this machine")
    if where.name.endswith((".safetensors", ".bin")):
        raise CheckpointError(
            f"{output}: {OPTION} opens the result with transformers, which needs a folder; "
            "give --output a name without .safetensors or .bin"
        )


def compare_logits(source: Checkpoint, made: Checkpoint, prompt: str, cast: bool) -> LogitsVerdict:
    """The logits of a finished output and of its source's model, for every token of ``prompt``.

    With ``cast`` the source's weights are first rounded to the dtypes of the output.
    """
    check_logits(made.path)
    with _quiet():
        tokenizer = _tokenizer(made.path)
        ids = _ids(prompt, tokenizer, made)
        ours = _logits(_opened(made.path), ids, made)
        kinds = made.manifest.tensors if cast else {}
        theirs = _logits(_built(source, kinds), ids, source)
    if ours.shape != theirs.shape:
        raise CheckpointError(
            f"{made.path}: {OPTION}: logits of shape {list(ours.shape)}, and {list(theirs.shape)} "
            "from the source's model"
        )
    said = tuple(_token(int(logits[-1].argmax()), tokenizer) for logits in (ours, theirs))
    return LogitsVerdict(len(ids), _gap(ours, theirs), _largest(theirs), (said[0], said[1]))


def _gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """Equal infinities, and NaN on both sides, are equal; NaN on one side is infinitely far."""
    same = (a == b) | (a.isnan() & b.isnan())
    gaps = (a - b).abs().masked_fill(same, 0.0)
    return float(gaps.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def _largest(logits: torch.Tensor) -> float:
    finite = logits[logits.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _token(index: int, tokenizer: Any) -> str:  # noqa: ANN401 - transformers' class
    return f"{index} {tokenizer.decode([index])!r}" if tokenizer is not None else str(index)


# --- the prompt -----------------------------------------------------------------------------------


def _tokenizer(output: StoragePath) -> Any:  # noqa: ANN401 - transformers' class
    """The tokenizer of a folder; None if it has none."""
    if not any((output / name).is_file() for name in _TOKENIZER):
        return None
    from transformers import AutoTokenizer

    with _told(f"{output}: transformers cannot open the tokenizer"):
        return AutoTokenizer.from_pretrained(str(output), trust_remote_code=False)


def _ids(prompt: str, tokenizer: Any, made: Checkpoint) -> list[int]:  # noqa: ANN401
    """The tokens of a prompt."""
    if tokenizer is not None:
        with _told(f"{made.path}: the tokenizer cannot read the prompt"):
            ids = [int(index) for index in tokenizer(prompt)["input_ids"]]
    elif all(word.isdecimal() and word.isascii() for word in prompt.split()):
        ids = [int(word) for word in prompt.split()]
    else:
        raise CheckpointError(
            f"{made.path}: {OPTION} {prompt!r:.80}: there is no tokenizer here; give token ids, "
            f'e.g. {OPTION} "1 2 3"'
        )
    if not ids:
        raise CheckpointError(f"{made.path}: {OPTION} {prompt!r:.80}: it has no tokens")
    vocab = made.need_model().sizes["vocab"]
    if max(ids) >= vocab:
        raise CheckpointError(
            f"{made.path}: {OPTION}: token {max(ids)} of the prompt, and a vocabulary of {vocab}"
        )
    return ids


# --- the models -----------------------------------------------------------------------------------


def _opened(output: StoragePath) -> torch.nn.Module:
    """The result, as transformers opens its folder."""
    import torch
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    with _told(f"{output}: transformers cannot open the result"):
        loaded = auto.from_pretrained(
            str(output), dtype=torch.float32, trust_remote_code=False, output_loading_info=True
        )
    return _complete(loaded, output)


def _built(source: Checkpoint, kinds: Mapping[str, TensorMeta]) -> torch.nn.Module:
    """The source's config and tensors as a model; ``kinds`` are dtypes to round them to."""
    import torch
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    config = dict(source.need_model().config)
    state = _weights(source, kinds)
    with _told(f"{source.path}: transformers cannot build the source's model"):
        made = transformers.CONFIG_MAPPING[str(config["model_type"])].from_dict(config)
        with torch.device("meta"):  # for its class alone
            kind = type(auto.from_config(made))
        loaded = kind.from_pretrained(
            None, config=made, state_dict=state, dtype=torch.float32, output_loading_info=True
        )
    return _complete(loaded, source.path)


def _weights(source: Checkpoint, kinds: Mapping[str, TensorMeta]) -> dict[str, torch.Tensor]:
    """Name -> weight of the source, read through its own layout."""
    import torch

    state = {}
    for fqn, array in OpenCheckpoint(source).items():
        if category_of(fqn) or is_padding(fqn):
            continue
        state[fqn] = array.torch()
        if fqn in kinds and kinds[fqn].dtype != array.dtype:
            state[fqn] = state[fqn].to(getattr(torch, TO_TORCH[kinds[fqn].dtype]))
    return state


def _complete(loaded: tuple[Any, Mapping[str, Any]], path: StoragePath) -> torch.nn.Module:
    """The model, unless transformers filled a weight with random values."""
    model, said = loaded
    for what in ("missing_keys", "mismatched_keys"):
        if absent := sorted(map(str, said[what])):
            raise CheckpointError(
                f"{path}: {OPTION}: transformers finds no values for {len(absent)} weights of its "
                f"model, first {absent[0]}"
            )
    found: torch.nn.Module = model.eval()
    return found


def _logits(model: torch.nn.Module, ids: list[int], of: Checkpoint) -> torch.Tensor:
    """Logits of one model, [token, vocab], in float32."""
    import torch

    with torch.no_grad(), _told(f"{of.path}: its model cannot compute the prompt"):
        found: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0].float()
    return found


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Errors of transformers, which are of many types, as ours."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{what} ({OPTION}): {first}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars and reports of transformers."""
    import transformers.utils

    logging: Any = transformers.utils.logging
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
