"""The order of training samples, and which data-parallel rank gets which.

A sample is ``seq_length`` tokens and the token after them, cut from the documents packed end to
end. Epoch e is megatron-core's GPTDataset of exactly one epoch, built with a seed made of
(seed, e): documents shuffled, packed, samples shuffled. So the order is a function of data, seed
and sequence length alone; GPTDataset's own order over several epochs changes with the number of
samples it is asked for. An epoch leaves out the at most ``seq_length - 1`` tokens that do not
fill a sample, other ones each time where there are several documents.

A step takes ``global_batch_size`` consecutive samples of that order. Of those, sample
``(m * dp_size + r) * micro_batch_size + j`` is row j of micro-batch m on data-parallel rank r, as
in Megatron-LM, so that any number of ranks sees the same samples in the same step. Every
tensor- and pipeline-parallel rank of one data-parallel rank gets the same batches.

Memory is 4 bytes per document and 12 per sample of the current epoch, built in memory by each
rank: no files, no barrier at an epoch's end. Tokens are read from the mapped .bin.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import TrainError
from .indexed import Corpus, import_megatron

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Batches", "Corpus", "EvalBatches", "Samples"]

FIELDS = ("tokens", "labels", "loss_mask", "position_ids")


class _NoTokenizer:
    """What GPTDataset asks of a tokenizer; without a ``pad`` no token of the data is masked."""

    vocab_size = None
    eod = 0  # used only to reset positions or mask at document ends, which is not done
    unique_identifiers: Mapping[str, str] = {}


class Samples:
    """The endless order of samples: number i is number ``i % per_epoch`` of its epoch."""

    def __init__(
        self, corpus: Corpus, seq_length: int, seed: int, max_positions: int | None = None
    ) -> None:
        check_length(corpus, seq_length, max_positions)
        if seed < 0:
            raise TrainError(f"--seed {seed} is negative; pass 0 or more")
        self.corpus, self.seq_length, self.seed = corpus, seq_length, seed
        self.per_epoch = (corpus.tokens - 1) // seq_length
        self._indexed = corpus.indexed()
        self._epoch = -1
        self._dataset: Any = None

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        epoch, index = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            self._dataset = None  # free it before the next is built
            self._dataset = _dataset(self._indexed, self.seq_length, epoch_seed(self.seed, epoch))
            assert len(self._dataset) == self.per_epoch, (len(self._dataset), self.per_epoch)
            self._epoch = epoch
        return self._dataset[index]


def check_length(corpus: Corpus, seq_length: int, max_positions: int | None) -> None:
    """Raise unless the data fills a sample and the model has a position for each token."""
    if seq_length < 1:
        raise TrainError(f"--seq-length {seq_length} is not at least 1")
    if max_positions is not None and seq_length > max_positions:
        raise TrainError(
            f"--seq-length {seq_length} is longer than the model's {max_positions} positions; "
            f"pass --seq-length {max_positions} or less"
        )
    if corpus.tokens < seq_length + 1:
        raise TrainError(
            f"the data has {corpus.tokens} tokens in {corpus.documents} documents, and a sample of "
            f"--seq-length {seq_length} needs {seq_length + 1}; pass more data or a shorter length"
        )


def epoch_seed(seed: int, epoch: int) -> int:
    """A seed for GPTDataset (uint32); NumPy's SeedSequence keeps neighbours unrelated."""
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])


def _dataset(indexed: Any, seq_length: int, seed: int) -> Any:
    """megatron's GPTDataset of one epoch of all documents."""
    import_megatron()
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, logger
    from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(  # no blend: the indices stay in memory
        random_seed=seed,
        sequence_length=seq_length,
        tokenizer=_NoTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    logger.addFilter(_expected)
    try:
        every = np.arange(len(indexed), dtype=np.int32)
        return GPTDataset(indexed, indexed.path_prefix, every, None, Split.train, config)
    finally:
        logger.removeFilter(_expected)


def _expected(record: logging.LogRecord) -> bool:
    """Drop megatron's remark that the indices are not written to files."""
    return "path_to_cache is None" not in record.getMessage()


class Batches:
    """An endless iterator over steps; each is this rank's list of micro-batches.

    A micro-batch maps tokens, labels, position_ids (int64) and loss_mask (float32, as GPTDataset
    has it) to CPU tensors of shape [micro_batch_size, seq_length].
    """

    def __init__(
        self,
        samples: Samples,
        *,
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        consumed_samples: int = 0,
    ) -> None:
        assert 0 <= dp_rank < dp_size, (dp_rank, dp_size)
        row = micro_batch_size * dp_size
        if min(micro_batch_size, global_batch_size) < 1 or global_batch_size % row:
            raise TrainError(
                f"--global-batch-size {global_batch_size} does not divide into micro-batches of "
                f"{micro_batch_size} on {dp_size} data-parallel ranks; pass a multiple of {row}"
            )
        self.samples = samples
        self.micro_batch_size, self.global_batch_size = micro_batch_size, global_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.consumed_samples = consumed_samples

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches in a step."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        return self.consumed_samples // self.samples.per_epoch

    def __iter__(self) -> Iterator[list[dict[str, Tensor]]]:
        return self

    def __next__(self) -> list[dict[str, Tensor]]:
        step = []
        for micro in range(self.num_micro_batches):
            rows = rows_of(micro, self.micro_batch_size, self.dp_rank, self.dp_size)
            step.append(_stack([self.samples[self.consumed_samples + row] for row in rows]))
        self.consumed_samples += self.global_batch_size
        return step

    def state(self) -> dict[str, Any]:
        """The cursor, for a checkpoint: JSON."""
        corpus = self.samples.corpus
        return {
            "consumed_samples": self.consumed_samples,
            "epoch": self.epoch,
            "data": corpus.identity,
            "tokens": corpus.tokens,
            "documents": corpus.documents,
            "seed": self.samples.seed,
            "seq_length": self.samples.seq_length,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken; TrainError if it is of another order of samples."""
        now = self.state()
        missing = sorted({"consumed_samples", "data", "seed", "seq_length"} - state.keys())
        if missing:
            raise TrainError(f"the checkpoint's data cursor has no {', '.join(missing)}")
        faults = [
            f"{_NAMES[key]} {_shown(state, key)} in the checkpoint, {_shown(now, key)} now"
            for key in _NAMES
            if state[key] != now[key]
        ]
        if faults:
            raise TrainError(
                f"the checkpoint's data cursor is of another order of samples: {'; '.join(faults)}"
                "; pass the same data, tokenizer and options to continue from it"
            )
        self.consumed_samples = int(state["consumed_samples"])


_NAMES = {"data": "data", "seed": "--seed", "seq_length": "--seq-length"}


def _shown(state: Mapping[str, Any], key: str) -> str:
    if key != "data":
        return str(state[key])
    counts = [f"{state[name]:,} {name}" for name in ("tokens", "documents") if name in state]
    return f"{state['data']} ({', '.join(counts) or 'size unknown'})"


class EvalBatches:
    """The first samples of the data, in the order of the files: the same at every evaluation.

    Each iteration yields this rank's ``len()`` micro-batches, assigned as in `Batches`. Where
    the samples do not fill the last ones, rows with a loss mask of zero do.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        seq_length: int,
        num_samples: int | None,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        max_positions: int | None = None,
        multiple_of: int = 1,
    ) -> None:
        """``multiple_of``: micro-batches, as an interleaved pipeline takes them."""
        check_length(corpus, seq_length, max_positions)
        assert 0 <= dp_rank < dp_size, (dp_rank, dp_size)
        self.multiple_of = multiple_of
        self._dataset = _unshuffled(_dataset(corpus.indexed(), seq_length, 0))
        have = len(self._dataset)
        self.num_samples = have if num_samples is None else min(num_samples, have)
        if self.num_samples < 1 or micro_batch_size < 1:
            raise TrainError(
                f"evaluation on {num_samples} samples in micro-batches of {micro_batch_size}: "
                "both must be at least 1"
            )
        self.micro_batch_size, self.dp_rank, self.dp_size = micro_batch_size, dp_rank, dp_size

    def __len__(self) -> int:
        unit = self.micro_batch_size * self.dp_size * self.multiple_of
        return -(-self.num_samples // unit) * self.multiple_of

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for micro in range(len(self)):
            rows = rows_of(micro, self.micro_batch_size, self.dp_rank, self.dp_size)
            # None is GPTDataset's sample without loss.
            yield _stack([self._dataset[r if r < self.num_samples else None] for r in rows])


def _unshuffled(dataset: Any) -> Any:
    """The same dataset with documents and samples in their own order."""
    from megatron.core.datasets.helpers import build_sample_idx

    lengths = np.array(dataset.dataset.sequence_lengths)  # a copy: the C++ code wants it in memory
    dataset.document_index = np.arange(len(lengths), dtype=np.int32)
    length = dataset.config.sequence_length
    dataset.sample_index = build_sample_idx(
        lengths, dataset.document_index, length, 1, int(lengths.sum(dtype=np.int64))
    )
    dataset.shuffle_index = np.arange(len(dataset), dtype=np.int64)
    return dataset


def rows_of(micro: int, micro_batch_size: int, dp_rank: int, dp_size: int) -> range:
    """Which samples of a step are micro-batch ``micro`` of this rank."""
    start = (micro * dp_size + dp_rank) * micro_batch_size
    return range(start, start + micro_batch_size)


def _stack(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    import torch

    return {name: torch.stack([row[name] for row in rows]) for name in FIELDS}
