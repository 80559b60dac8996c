"""Training data: what becomes a document, the order of samples, and who gets which."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tracemalloc
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("megatron.core", reason="the trainer needs megatron-core")

from shardwright.ckpt.move.publish import OutputTransaction
from shardwright.train.data import corpus as data_index
from shardwright.train.data import documents as text_documents
from shardwright.train.data import tokenise
from shardwright.train.data import tokenizer as tokenizers
from shardwright.train.data.corpus import open_corpus
from shardwright.train.data.indexed import Corpus, import_megatron
from shardwright.train.data.samples import Batches, EvalBatches, Samples, epoch_seed
from shardwright.train.errors import TrainError

EOD = 256
SETTINGS = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def indexed(prefix, documents, dtype=np.int32):
    """An indexed dataset by megatron's builder alone; gives its prefix."""
    import_megatron()
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def unique(lengths):
    """Documents in which no token id occurs twice."""
    ends = np.cumsum(lengths)
    return [list(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)]


def corpus_of(folder, documents, vocab_size=100_000):
    folder.mkdir(exist_ok=True)
    prefix = indexed(folder / "given", documents)
    return open_corpus(
        [prefix], tokenizer_dir=None, vocab_size=vocab_size, cache_dir=folder / "cache"
    )


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """127 documents of 1 to 40 tokens, each id once."""
    rng = np.random.default_rng(0)
    return corpus_of(tmp_path_factory.mktemp("numbers"), unique(rng.integers(1, 41, 127)))


def opened(tmp_path, *files, vocab_size=512, **options):
    return open_corpus(
        files,
        **{"tokenizer_dir": None, "cache_dir": tmp_path / "cache", **options},
        vocab_size=vocab_size,
    )


def written(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def documents(corpus):
    """Token ids, sequence by sequence."""
    found = corpus.indexed()
    return [found[i].tolist() for i in range(len(found))]


def as_bytes(text):
    return [*text.encode(), EOD]


def tokens(step):
    """All samples of a step in one list."""
    return [row for micro in step for row in micro["tokens"].tolist()]


def ranks(corpus, dp, *, micro, total, seed=1, seq=8, consumed=0):
    return [
        Batches(
            Samples(corpus, seq, seed),
            micro_batch_size=micro,
            global_batch_size=total,
            dp_rank=rank,
            dp_size=dp,
            consumed_samples=consumed,
        )
        for rank in range(dp)
    ]


# Documents


def test_a_text_file_is_one_document_and_a_json_line_is_one(tmp_path):
    text = written(tmp_path / "a.txt", "first\r\nsecond é\n")
    code = written(tmp_path / "b.py", "x = 1\n")
    lines = written(tmp_path / "c.jsonl", '{"text": "one"}\n\n  {"id": 7, "text": "tw\\u00f6"}')
    corpus = opened(tmp_path, text, code, lines)
    expected = [as_bytes(t) for t in ("first\r\nsecond é\n", "x = 1\n", "one", "twö")]
    assert documents(corpus) == expected
    assert corpus.documents == 4
    assert corpus.tokens == sum(map(len, expected))
    assert corpus.max_token == EOD


def test_another_data_key_is_another_text(tmp_path):
    file = written(tmp_path / "c.jsonl", '{"text": "one", "body": "two"}\n')
    assert documents(opened(tmp_path, file)) == [as_bytes("one")]
    assert documents(opened(tmp_path, file, data_key="body")) == [as_bytes("two")]


def test_a_byte_order_mark_is_not_text(tmp_path):
    text = written(tmp_path / "a.txt", b"\xef\xbb\xbfhi")
    lines = written(tmp_path / "b.jsonl", b'\xef\xbb\xbf{"text": "ho"}\n')
    assert documents(opened(tmp_path, text, lines)) == [as_bytes("hi"), as_bytes("ho")]


def test_empty_texts_are_skipped_and_said(tmp_path):
    file = written(tmp_path / "c.jsonl", '{"text": ""}\n{"text": "one"}\n{"text": ""}\n')
    with pytest.warns(UserWarning, match=r"c\.jsonl: 2 lines with an empty text were skipped"):
        assert documents(opened(tmp_path, file)) == [as_bytes("one")]


def test_bytes_in_a_small_vocabulary_end_documents_with_zero(tmp_path):
    file = written(tmp_path / "a.txt", "abc")
    assert documents(opened(tmp_path, file, vocab_size=256)) == [[97, 98, 99, 0]]
    assert documents(opened(tmp_path, file, vocab_size=257)) == [[97, 98, 99, EOD]]


@SETTINGS
@given(
    text=st.text(st.sampled_from("ab \n\té€😀"), min_size=1, max_size=120),
    piece=st.integers(1, 30),
    batch=st.integers(1, 60),
    block=st.integers(1, 30),
)
def test_bytes_are_the_same_however_text_is_read_and_cut(tmp_path, text, piece, batch, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_documents, "PIECE_CHARS", piece)
        patch.setattr(tokenise, "BATCH_CHARS", batch)
        patch.setattr(text_documents, "BLOCK_BYTES", block)
        file = written(tmp_path / "a.txt", text)
        lines = written(tmp_path / "b.jsonl", json.dumps({"text": text}))
        assert documents(opened(tmp_path, file, lines)) == [as_bytes(text)] * 2


def test_a_document_beyond_the_int32_count_becomes_several_sequences(tmp_path, monkeypatch):
    monkeypatch.setattr(text_documents, "PIECE_CHARS", 4)
    monkeypatch.setattr(tokenise, "MAX_SEQUENCE", 10)
    corpus = opened(tmp_path, written(tmp_path / "a.txt", "0123456789abcdef"))
    found = documents(corpus)
    assert max(map(len, found)) <= 10
    assert [*chain(*found)] == as_bytes("0123456789abcdef")
    assert corpus.documents == 1


def test_memory_does_not_grow_with_the_file(tmp_path):
    peaks = []
    for megabytes in (8, 32):
        file = written(tmp_path / f"{megabytes}.txt", b"all work and no play\n" * (megabytes << 16))
        tracemalloc.start()
        opened(tmp_path, file)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert file.stat().st_size > megabytes << 20
    assert peaks[1] < 1.1 * peaks[0] < 100e6


# A Hugging Face tokenizer


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    """A byte-level BPE of 300 ids, split as GPT-2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    folder = tmp_path_factory.mktemp("model")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.model_max_length = 16  # longer texts must not warn
    fast.save_pretrained(folder)
    return folder


def test_the_models_tokenizer_gives_the_ids_and_ends_documents(tmp_path, tokenizer_dir):
    from transformers import AutoTokenizer

    texts = ["def f(x):\n    return x\n", "the samples of a step " * 20]
    files = [written(tmp_path / f"{i}.txt", text) for i, text in enumerate(texts)]
    corpus = opened(tmp_path, *files, tokenizer_dir=tokenizer_dir)
    own = AutoTokenizer.from_pretrained(tokenizer_dir)
    expected = [[*own(t, add_special_tokens=False).input_ids, own.eos_token_id] for t in texts]
    assert documents(corpus) == expected
    assert corpus.tokens < sum(map(len, texts))


@pytest.mark.parametrize("batch", [1, 1 << 20])  # 1: ends of documents get batches of their own
def test_cut_at_line_ends_the_ids_are_those_of_the_whole(
    tmp_path, tokenizer_dir, monkeypatch, batch
):
    text = Path(__file__).read_text().replace("\n\n", "\nend\n  \n\t")
    whole = opened(tmp_path, written(tmp_path / "a.txt", text), tokenizer_dir=tokenizer_dir)
    monkeypatch.setattr(text_documents, "PIECE_CHARS", 1000)
    monkeypatch.setattr(tokenise, "BATCH_CHARS", batch)
    cut = opened(tmp_path, tmp_path / "a.txt", tokenizer_dir=tokenizer_dir)
    assert cut.prefix != whole.prefix  # the cache does not mix them up
    assert documents(cut) == documents(whole)
    assert cut.identity == whole.identity


def test_a_folder_with_a_config_alone_means_bytes(tmp_path):
    from transformers import GPT2Config

    GPT2Config().save_pretrained(tmp_path / "gpt2")
    file = written(tmp_path / "a.txt", "abc")
    assert documents(opened(tmp_path, file, tokenizer_dir=tmp_path / "gpt2")) == [as_bytes("abc")]


def test_a_tokenizer_that_cannot_serve_is_refused(tmp_path, tokenizer_dir):
    file = written(tmp_path / "a.txt", "abc")
    with pytest.raises(TrainError, match=r"model: token id \d+|tokenizer in .* gives token id \d+"):
        opened(tmp_path, file, tokenizer_dir=tokenizer_dir, vocab_size=5)
    for name, content, message in (
        ("broken", "{", "its tokenizer does not load"),
        ("no-eos", None, "has no end-of-sequence token"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        source = (tokenizer_dir / "tokenizer.json").read_text()
        written(folder / "tokenizer.json", content or source)
        written(folder / "tokenizer_config.json", '{"tokenizer_class": "PreTrainedTokenizerFast"}')
        with pytest.raises(TrainError, match=message):
            opened(tmp_path, file, tokenizer_dir=folder)
    folder = tmp_path / "gpt2"
    folder.mkdir()
    written(folder / "tokenizer_config.json", '{"tokenizer_class": "GPT2Tokenizer"}')
    with pytest.raises(TrainError, match="its tokenizer has no vocabulary"):
        opened(tmp_path, file, tokenizer_dir=folder)
    with pytest.raises(TrainError, match="absent: no such folder"):
        opened(tmp_path, file, tokenizer_dir=tmp_path / "absent")


# Identity and cache


def test_the_cache_is_found_by_content_wherever_the_files_lie(tmp_path, monkeypatch):
    first = opened(tmp_path, written(tmp_path / "a.txt", "abc"))
    built = (Path(first.prefix).parent / "data.json").stat()
    (tmp_path / "elsewhere").mkdir()
    copy = written(tmp_path / "elsewhere" / "b.md", "abc")
    monkeypatch.setattr(tokenise, "tokenise", None)
    assert opened(tmp_path, copy) == first
    assert (Path(first.prefix).parent / "data.json").stat() == built


def test_tokens_identify_data_and_not_how_they_were_made(tmp_path):
    text = opened(tmp_path, written(tmp_path / "a.txt", "abc"), written(tmp_path / "b.txt", "de"))
    lines = opened(tmp_path, written(tmp_path / "c.jsonl", '{"text":"abc"}\n{"text":"de"}'))
    wide = opened(tmp_path, tmp_path / "a.txt", tmp_path / "b.txt", vocab_size=70_000)
    given = indexed(tmp_path / "g", [as_bytes("abc"), as_bytes("de")], np.int64)
    assert text.prefix != wide.prefix
    for other in (lines, wide, opened(tmp_path, given)):
        assert other.identity == text.identity
        assert (other.tokens, other.documents) == (text.tokens, text.documents)
    for different in (
        opened(tmp_path, tmp_path / "b.txt", tmp_path / "a.txt"),
        opened(tmp_path, indexed(tmp_path / "h", [as_bytes("abc") + as_bytes("de")])),
    ):
        assert different.identity != text.identity


def test_a_changed_file_is_noticed_even_at_once_and_at_the_same_size(tmp_path):
    file = tmp_path / "a.txt"
    for text in ("abc", "abd", "abe"):
        assert documents(opened(tmp_path, written(file, text))) == [as_bytes(text)]


def test_settled_files_are_read_once(tmp_path, monkeypatch):
    file = written(tmp_path / "a.txt", "abc")
    monkeypatch.setattr(data_index, "SETTLED_SECONDS", -1e9)
    first = opened(tmp_path, file)
    given = opened(tmp_path, first.prefix)
    monkeypatch.setattr(data_index, "digest", None)
    monkeypatch.setattr(data_index, "read_indexed", None)
    assert opened(tmp_path, file) == first
    assert opened(tmp_path, first.prefix) == given


@pytest.mark.parametrize("damage", ["truncated", "no summary", "half a summary"])
def test_a_damaged_cache_is_built_again(tmp_path, damage):
    file = written(tmp_path / "a.txt", "abcdef")
    first = opened(tmp_path, file)
    folder = Path(first.prefix).parent
    if damage == "truncated":
        os.truncate(f"{first.prefix}.bin", 4)
    elif damage == "no summary":
        (folder / "data.json").unlink()
    else:
        os.truncate(folder / "data.json", 10)
    assert opened(tmp_path, file) == first
    assert documents(first) == [as_bytes("abcdef")]


def test_what_a_killed_run_left_does_not_disturb(tmp_path):
    file = written(tmp_path / "a.txt", "abcdef")
    first = opened(tmp_path, file)
    folder = Path(first.prefix).parent
    partial = folder.rename(folder.parent / f".{folder.name}.partial")
    (partial / "data.json").unlink()
    assert opened(tmp_path, file) == first
    assert not partial.exists()


def test_a_fault_leaves_no_cache(tmp_path):
    bad = written(tmp_path / "a.jsonl", '{"text": "fine"}\n{"no": 1}\n')
    with pytest.raises(TrainError):
        opened(tmp_path, bad)
    assert [p.name for p in (tmp_path / "cache").iterdir() if not p.name.endswith(".lock")] == []


def test_ranks_wait_for_the_first_which_alone_builds(tmp_path, monkeypatch):
    file = written(tmp_path / "a.txt", "abc" * 1000)
    built, real = [], tokenise.tokenise
    monkeypatch.setattr(tokenise, "tokenise", lambda *a: (built.append(1), real(*a)))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda rank: opened(tmp_path, file), range(4)))
    assert len(set(found)) == 1
    assert built == [1]


def test_bad_data_is_an_error_on_every_rank_and_nobody_waits(tmp_path):
    bad = written(tmp_path / "a.jsonl", '{"no": 1}\n')

    def rank(number):
        with pytest.raises(TrainError, match="line 1 has no key 'text'"):
            opened(tmp_path, bad)
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(rank, range(4)))


def test_a_run_waits_for_one_on_another_machine_whose_lock_it_cannot_share(tmp_path, monkeypatch):
    file = written(tmp_path / "a.txt", "abcdef")
    expected = opened(tmp_path, file)
    folder = Path(expected.prefix).parent
    shutil.rmtree(folder)
    other = OutputTransaction(folder, is_ours=lambda _: True)
    other.open()
    waits = []

    def other_ends(seconds):
        waits.append(seconds)
        other.close()

    monkeypatch.setattr(data_index.time, "sleep", other_ends)
    assert opened(tmp_path, file) == expected
    assert waits == [data_index.WAIT_SECONDS]


TEXTS = {
    "a.txt": "The first line\né and 😀\nno end of the line " * 4,
    "b.jsonl": "".join(json.dumps({"text": f"record {i}\nof two lines"}) + "\n" for i in range(9)),
    "c.txt": "\ufeffwith a mark\nand a second line",
}


class Killed(BaseException):
    """The end of a process, as far as its files are concerned."""


@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_a_killed_run_is_continued_to_the_same_files(tmp_path, monkeypatch, every):
    """Killed after each ``every`` saves again, until it comes through."""
    files = [written(tmp_path / name, text) for name, text in TEXTS.items()]
    monkeypatch.setattr(text_documents, "PIECE_CHARS", 7)
    monkeypatch.setattr(text_documents, "BLOCK_BYTES", 6)
    monkeypatch.setattr(tokenise, "BATCH_CHARS", 6)
    monkeypatch.setattr(tokenise, "MAX_SEQUENCE", 20)
    monkeypatch.setattr(tokenise, "SAVE_SECONDS", 0.0)
    whole = opened(tmp_path, *files, cache_dir=tmp_path / "whole")
    encoded, real, saves = [], tokenizers._encode_bytes, 0
    monkeypatch.setattr(
        tokenizers, "_encode_bytes", lambda texts: (encoded.extend(texts), real(texts))[1]
    )
    save = tokenise._DatasetWriter.save_if_due

    def save_and_die(writer, after):
        nonlocal saves
        save(writer, after)
        saves += after is not None
        if after is not None and saves % every == 0:
            raise Killed

    monkeypatch.setattr(tokenise._DatasetWriter, "save_if_due", save_and_die)
    for _ in range(200):
        try:
            found = opened(tmp_path, *files)
        except Killed:
            continue
        break
    for ending in (".bin", ".idx"):
        assert Path(found.prefix + ending).read_bytes() == Path(whole.prefix + ending).read_bytes()
    assert found == dataclasses.replace(whole, prefix=found.prefix)
    assert {path.name for path in Path(found.prefix).parent.iterdir()} == {
        "tokens.bin", "tokens.idx", "data.json",
    }  # fmt: skip
    assert saves >= 2 * every
    again = sum(map(len, encoded)) - sum(len(text) for text in TEXTS.values())
    assert again < saves * 80, "what was saved is tokenised again"


@pytest.mark.parametrize("damage", ["progress.json", "lengths", "tokens.bin", "words"])
def test_damaged_progress_is_not_believed(tmp_path, monkeypatch, damage):
    file = written(tmp_path / "a.txt", TEXTS["a.txt"])
    monkeypatch.setattr(text_documents, "PIECE_CHARS", 7)
    monkeypatch.setattr(tokenise, "BATCH_CHARS", 6)
    monkeypatch.setattr(tokenise, "SAVE_SECONDS", 0.0)
    save = tokenise._DatasetWriter.save_if_due

    def save_and_die(writer, after):
        save(writer, after)
        raise Killed

    monkeypatch.setattr(tokenise._DatasetWriter, "save_if_due", save_and_die)
    with pytest.raises(Killed):
        opened(tmp_path, file)
    (partial,) = (tmp_path / "cache").glob(".*.partial")
    if damage == "words":
        (partial / "progress.json").write_text('{"position": {"file": 0}}')
    else:
        os.truncate(partial / damage, 0) if damage != "lengths" else (partial / damage).unlink()
    monkeypatch.setattr(tokenise._DatasetWriter, "save_if_due", save)
    assert documents(opened(tmp_path, file)) == [as_bytes(TEXTS["a.txt"])]


RUN = """
import sys
from shardwright.train.data import corpus as data_index
from shardwright.train.data import indexed
from shardwright.train.data import samples as data
from shardwright.train.data import tokenise
real = tokenise.tokenise
tokenise.tokenise = lambda *a: (print("built"), real(*a))
indexed.import_megatron()
print("ready", flush=True)
sys.stdin.readline()
cache, *files = sys.argv[1:]
corpus = data_index.open_corpus(files, tokenizer_dir=None, vocab_size=512, cache_dir=cache)
data.Samples(corpus, 16, 0)[corpus.tokens]  # of an epoch after the first
print(corpus.identity)
"""


def test_independent_runs_at_once_build_one_cache_and_make_no_noise(tmp_path, monkeypatch):
    file = written(tmp_path / "a.txt", "the same data\n" * 1_000_000)
    command = [sys.executable, "-W", "always", "-c", RUN, str(tmp_path / "cache"), str(file)]
    names = ("stdin", "stdout", "stderr")
    other = subprocess.Popen(command, **dict.fromkeys(names, subprocess.PIPE), text=True)
    built, real = [], tokenise.tokenise
    monkeypatch.setattr(tokenise, "tokenise", lambda *a: (built.append(1), real(*a)))
    assert other.stdout.readline() == "ready\n"
    other.stdin.write("go\n")
    other.stdin.flush()
    own = opened(tmp_path, file)
    output, errors = other.communicate(timeout=600)
    # a CUDA build of torch that finds a toolkit and no driver says so
    assert [x for x in errors.splitlines() if "No CUDA runtime" not in x] == []
    assert output.split()[-1] == own.identity
    assert output.count("built") + len(built) == 1


# Order


def by_hand(documents, seq, seed, epoch):
    """The samples of an epoch, by plain NumPy: shuffle documents, pack, cut, shuffle samples."""
    random = np.random.RandomState(epoch_seed(seed, epoch))
    order = np.arange(len(documents), dtype=np.int32)
    random.shuffle(order)
    stream = [token for index in order for token in documents[index]]
    samples = [stream[at : at + seq + 1] for at in range(0, len(stream) - seq, seq)]
    shuffled = np.arange(len(samples), dtype=np.uint32)
    random.shuffle(shuffled)
    return [samples[i] for i in shuffled]


@SETTINGS
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=12).filter(lambda x: sum(x) > 8),
    seq=st.integers(1, 7),
    seed=st.integers(0, 2**40),
)
def test_an_epoch_is_documents_shuffled_packed_and_cut_with_none_twice(
    tmp_path, lengths, seq, seed
):
    given_documents = unique(lengths)
    samples = Samples(corpus_of(tmp_path, given_documents), seq, seed)
    total = sum(lengths)
    for epoch in (0, 1, 5):
        start = epoch * samples.per_epoch
        found = [samples[start + i] for i in range(samples.per_epoch)]
        whole = [[*s["tokens"].tolist(), s["labels"][-1].item()] for s in found]
        assert whole == by_hand(given_documents, seq, seed, epoch)
        labels = [token for s in found for token in s["labels"].tolist()]
        assert len(set(labels)) == len(labels) == samples.per_epoch * seq
        assert total - 1 - len(labels) < seq  # what does not fill a sample
        for s in found:
            assert s["tokens"][1:].tolist() == s["labels"][:-1].tolist()
            assert s["loss_mask"].tolist() == [1.0] * seq
            assert s["position_ids"].tolist() == list(range(seq))


@SETTINGS
@given(st.lists(st.integers(0, 1500), min_size=1, max_size=30))
def test_a_sample_does_not_depend_on_what_was_asked_before(numbers, asked):
    jumping = Samples(numbers, 8, 1)
    assert jumping.per_epoch < 500  # several epochs are asked for
    for number in asked:
        assert torch.equal(jumping[number]["tokens"], Samples(numbers, 8, 1)[number]["tokens"])


def test_the_order_follows_data_seed_and_length_and_nothing_else(tmp_path, numbers):
    def first(corpus=numbers, seed=1, seq=8, steps=40, total=6):
        (batches,) = ranks(corpus, 1, micro=1, total=total, seed=seed, seq=seq)
        return [row for _ in range(steps) for row in tokens(next(batches))]

    order = first()
    assert first(steps=140)[: len(order)] == order
    assert first(total=2, steps=120) == order
    elsewhere = corpus_of(tmp_path / "copy", documents(numbers))
    assert elsewhere.prefix != numbers.prefix
    assert first(elsewhere) == order
    assert first(seed=2) != order
    assert sorted(first(seed=2)) != sorted(order)


def test_epochs_have_orders_of_their_own(numbers):
    samples = Samples(numbers, 8, 1)
    orders = [
        [samples[e * samples.per_epoch + i]["tokens"].tolist() for i in range(50)] for e in range(3)
    ]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert epoch_seed(1, 2) != epoch_seed(2, 1)


# Batches


@SETTINGS
@given(
    micro=st.integers(1, 3),
    groups=st.integers(1, 3),
    consumed=st.integers(0, 900),
    seed=st.integers(0, 3),
)
def test_any_number_of_ranks_sees_the_same_samples_in_a_step(
    numbers, micro, groups, consumed, seed
):
    total = 4 * micro * groups
    samples = Samples(numbers, 8, seed)
    rows = [samples[consumed + i]["tokens"].tolist() for i in range(total)]
    for dp in (1, 2, 4):
        parts = ranks(numbers, dp, micro=micro, total=total, seed=seed, consumed=consumed)
        steps = [next(part) for part in parts]
        assert all(
            len(step) == part.num_micro_batches for step, part in zip(steps, parts, strict=True)
        )
        interleaved = [
            row
            for m in range(len(steps[0]))
            for step in steps
            for row in step[m]["tokens"].tolist()
        ]
        assert interleaved == rows


def test_micro_batches_are_tensors_of_one_shape(numbers):
    (batches,) = ranks(numbers, 1, micro=3, total=6)
    for micro in next(batches):
        assert {name: (tuple(t.shape), t.dtype) for name, t in micro.items()} == {
            "tokens": ((3, 8), torch.int64),
            "labels": ((3, 8), torch.int64),
            "loss_mask": ((3, 8), torch.float32),
            "position_ids": ((3, 8), torch.int64),
        }


def test_a_batch_may_cross_epochs_even_several(tmp_path):
    corpus = corpus_of(tmp_path, unique([5, 9, 4]))
    (batches,) = ranks(corpus, 1, micro=2, total=10, seq=4)
    per_epoch = batches.samples.per_epoch
    assert per_epoch == 4
    rows = tokens(next(batches)) + tokens(next(batches))
    every = chain(*(by_hand(unique([5, 9, 4]), 4, 1, epoch) for epoch in range(5)))
    assert rows == [sample[:-1] for sample in every]
    assert batches.epoch == 5


@SETTINGS
@given(st.integers(0, 60), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_resumed_at_any_step_and_any_dp_the_samples_go_on(numbers, steps, before, after):
    (straight,) = ranks(numbers, 1, micro=1, total=4, seq=32)
    (first, *_) = ranks(numbers, before, micro=1, total=4, seq=32)
    for _ in range(steps):
        next(straight)
        next(first)
    state = json.loads(json.dumps(first.state()))
    resumed = ranks(numbers, after, micro=1, total=4, seq=32)
    for batches in resumed:
        batches.restore(state)
        assert batches.state() == state
    for _ in range(3):
        found = [row for batches in resumed for row in tokens(next(batches))]
        assert sorted(found) == sorted(tokens(next(straight)))


def test_the_state_counts_samples_and_epochs(numbers):
    (batches,) = ranks(numbers, 1, micro=2, total=6)
    per_epoch = batches.samples.per_epoch
    for _ in range(per_epoch // 6 + 1):
        next(batches)
    assert batches.state() == {
        "consumed_samples": (per_epoch // 6 + 1) * 6,
        "epoch": 1,
        "data": numbers.identity,
        "tokens": numbers.tokens,
        "documents": 127,
        "seed": 1,
        "seq_length": 8,
    }


def test_a_cursor_of_another_order_is_refused_with_both_values(tmp_path, numbers):
    (batches,) = ranks(numbers, 1, micro=2, total=6)
    next(batches)
    state = batches.state()
    other = corpus_of(tmp_path, unique([30, 40]))
    for changed, message in (
        (ranks(numbers, 1, micro=2, total=6, seed=2), "--seed 1 in the checkpoint, 2 now"),
        (ranks(numbers, 1, micro=2, total=6, seq=4), "--seq-length 8 in the checkpoint, 4 now"),
        (
            ranks(other, 1, micro=2, total=6),
            rf"data {numbers.identity} \([\d,]+ tokens, 127 documents\) in the checkpoint, "
            rf"{other.identity} \(70 tokens, 2 documents\) now",
        ),
    ):
        with pytest.raises(TrainError, match=message):
            changed[0].restore(state)
        assert changed[0].consumed_samples == 0
    with pytest.raises(TrainError, match="has no consumed_samples, seed"):
        batches.restore({"data": "x", "seq_length": 8})


def test_a_global_batch_that_does_not_divide_is_refused(numbers):
    with pytest.raises(TrainError, match=r"size 6 does not divide .* of 4 on 2 .* multiple of 8"):
        ranks(numbers, 2, micro=4, total=6)
    with pytest.raises(TrainError, match="size 0 does not divide"):
        ranks(numbers, 1, micro=1, total=0)


# Evaluation


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("wanted", [None, 1, 5, 8, 10_000])
def test_evaluation_takes_the_first_samples_in_order(tmp_path, dp, wanted):
    given_documents = unique([3, 1, 40, 7, 22, 5])
    corpus = corpus_of(tmp_path, given_documents)
    stream = [*chain(*given_documents)]
    expected = [stream[at : at + 6] for at in range(0, len(stream) - 6, 6)][:wanted]
    parts = [
        EvalBatches(
            corpus, seq_length=6, num_samples=wanted, micro_batch_size=2, dp_rank=r, dp_size=dp
        )
        for r in range(dp)
    ]
    for _ in range(2):  # the same at every evaluation
        got = [list(part) for part in parts]
        assert {len(micros) for micros in got} == {len(parts[0])}
        ordered = [micros[m] for m in range(len(parts[0])) for micros in got]
        rows = [row for micro in ordered for row in micro["tokens"].tolist()]
        masks = [row for micro in ordered for row in micro["loss_mask"].tolist()]
        assert rows[: len(expected)] == expected
        assert masks == [[1.0] * 6] * len(expected) + [[0.0] * 6] * (len(rows) - len(expected))
        assert len(rows) - len(expected) < 2 * dp


def test_evaluation_on_no_samples_is_refused(numbers):
    with pytest.raises(TrainError, match="on 0 samples"):
        EvalBatches(numbers, seq_length=8, num_samples=0, micro_batch_size=1)


# What is refused


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", r"a\.txt: is empty \(0 bytes\)"),
        ("a.txt", b"\xef\xbb\xbf", r"a\.txt: is empty \(no text"),
        ("a.jsonl", b"\n \n", r"a\.jsonl: is empty \(no line with text under 'text'\)"),
        ("a.jsonl", b'{"text": ""}', r"a\.jsonl: is empty \(no line"),
        ("a.jsonl", b'{"text": "x"}\n\n{"b": 1, "a": 2}', r"line 3 has no key 'text' .*: a, b\)"),
        ("a.jsonl", b'{"text": "x"}\n{"text": }', r"a\.jsonl: line 2 is not JSON \(column 10"),
        ("a.jsonl", b"[1]\n", r"line 1 is a JSON list, not an object"),
        ("a.jsonl", b'{"text": 5}\n', r"line 1: 'text' is a int, not a string"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"line 1: 'text' holds half a surrogate pair"),
        ("a.jsonl", b'{"text": "x"}\n  {"text": "\xff"}', r"byte 26 \(0xff\) is not UTF-8"),
        ("a.txt", b"0123\xc3(", r"a\.txt: byte 4 \(0xc3\) is not UTF-8 .*iconv"),
        ("a.txt", b"0123456789\xe2\x82", r"a\.txt: byte 10 \(0xe2\) is not UTF-8"),
    ],
)
@pytest.mark.parametrize("block", [3, 1 << 20])
def test_bad_text_is_named_by_file_and_place(tmp_path, monkeypatch, name, content, message, block):
    monkeypatch.setattr(text_documents, "BLOCK_BYTES", block)
    with pytest.raises(TrainError, match=message):
        opened(tmp_path, written(tmp_path / name, content))


def test_files_that_cannot_be_data_are_refused(tmp_path):
    with pytest.raises(TrainError, match=r"absent\.txt: No such file or directory"):
        opened(tmp_path, tmp_path / "absent.txt")
    with pytest.raises(TrainError, match="is a folder; name the files"):
        opened(tmp_path, tmp_path)
    with pytest.raises(TrainError, match="no data files"):
        opened(tmp_path)
    written(tmp_path / "file", "x")
    with pytest.raises(TrainError, match="cannot be the data cache"):
        opened(tmp_path, tmp_path / "file", cache_dir=tmp_path / "file" / "cache")


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    file = written(tmp_path / "a.txt", "abc")
    real = tokenizers._encode_bytes
    monkeypatch.setattr(
        tokenizers, "_encode_bytes", lambda texts: (written(file, "abcd"), real(texts))[1]
    )
    with pytest.raises(TrainError, match=r"a\.txt: changed while it was read"):
        opened(tmp_path, file)


def test_a_file_that_changes_before_it_is_tokenised_does_not_spoil_the_cache(tmp_path, monkeypatch):
    file, real = written(tmp_path / "a.txt", "abc"), data_index._build_once
    monkeypatch.setattr(data_index, "_build_once", lambda *a: (written(file, "abcdef"), real(*a)))
    with pytest.raises(TrainError, match=r"a\.txt: changed while it was read"):
        opened(tmp_path, file)
    monkeypatch.undo()
    assert documents(opened(tmp_path, written(file, "abc"))) == [as_bytes("abc")]


def test_too_little_text_names_what_there_is_and_what_is_needed(tmp_path):
    corpus = opened(tmp_path, written(tmp_path / "a.txt", "0123456"))
    assert Samples(corpus, 7, 0).per_epoch == 1
    message = "the data has 8 tokens in 1 documents, and a sample of --seq-length 8 needs 9"
    with pytest.raises(TrainError, match=message):
        Samples(corpus, 8, 0)
    with pytest.raises(TrainError, match=message):
        EvalBatches(corpus, seq_length=8, num_samples=1, micro_batch_size=1)


def test_impossible_lengths_and_seeds_are_refused(numbers):
    assert Samples(numbers, 64, 0, max_positions=64)
    with pytest.raises(TrainError, match="--seq-length 65 is longer than the model's 64 positions"):
        Samples(numbers, 65, 0, max_positions=64)
    with pytest.raises(TrainError, match="--seq-length 0 is not at least 1"):
        Samples(numbers, 0, 0)
    with pytest.raises(TrainError, match="--seed -1 is negative"):
        Samples(numbers, 8, -1)


def test_an_id_beyond_the_vocabulary_names_tokenizer_and_vocabulary(tmp_path):
    file = written(tmp_path / "a.txt", "az")
    assert documents(opened(tmp_path, file, vocab_size=123)) == [[97, 122, 0]]
    with pytest.raises(TrainError, match=r"bytes gives token id 122, .* vocabulary has 122 ids"):
        opened(tmp_path, file, vocab_size=122)
    given_prefix = indexed(tmp_path / "given", [[1, 500], [2]])
    with pytest.raises(TrainError, match=r"indexed dataset .*given gives token id 500"):
        opened(tmp_path, given_prefix, vocab_size=500)


# Indexed datasets that are there already


def test_an_indexed_dataset_is_named_by_prefix_or_by_file(tmp_path):
    prefix = indexed(
        tmp_path / "v1.0" if (tmp_path / "v1.0").mkdir() else tmp_path / "v1.0.d", [[1, 2]]
    )
    found = {opened(tmp_path, name) for name in (prefix, f"{prefix}.bin", f"{prefix}.idx")}
    assert {corpus.prefix for corpus in found} == {prefix}
    assert {corpus.tokens for corpus in found} == {2}
    (both,) = {opened(tmp_path, f"{prefix}.bin", f"{prefix}.idx")}
    assert both in found


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: os.remove(f"{p}.bin"), r"given\.bin: no such file"),
        (lambda p: os.remove(f"{p}.idx"), r"given\.idx: no such file"),
        (lambda p: os.truncate(f"{p}.bin", 0), r"given\.bin: is empty"),
        (lambda p: os.truncate(f"{p}.bin", 4), r"given\.bin: has 4 bytes, and .*idx lists 20"),
        (lambda p: os.truncate(f"{p}.idx", 60), r"given\.idx: has 60 bytes where its header"),
        (lambda p: os.truncate(f"{p}.idx", 3), r"given\.idx: is not the index of a megatron"),
        (lambda p: patched(f"{p}.idx", 0, b"X"), r"given\.idx: is not the index of a megatron"),
        (lambda p: patched(f"{p}.idx", 17, b"\x07"), r"given\.idx: holds dtype code 7"),
        (lambda p: patched(f"{p}.bin", 3, b"\x80"), r"given\.bin: holds -\d+ to 5, not token ids"),
    ],
)
def test_a_damaged_indexed_dataset_is_refused(tmp_path, damage, message):
    prefix = indexed(tmp_path / "given", [[1, 2, 3], [4, 5]])
    damage(prefix)
    with pytest.raises(TrainError, match=message):
        opened(tmp_path, prefix)


def patched(path, at, content):
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(content)


def test_an_indexed_dataset_is_the_only_data(tmp_path):
    prefixes = [indexed(tmp_path / name, [[1, 2]]) for name in ("a", "b")]
    text = written(tmp_path / "c.txt", "x")
    for files in (prefixes, [prefixes[0], text]):
        with pytest.raises(TrainError, match="must be the only data, but 2 were given"):
            opened(tmp_path, *files)


# Imports


def test_importing_the_data_module_imports_neither_torch_nor_megatron_nor_transformers():
    code = (
        "import sys, shardwright.train.data.samples\n"
        "print([m for m in ('torch', 'megatron', 'transformers') if m in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert said.stdout == "[]\n"


def test_megatron_without_its_compiled_helpers_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.helpers_cpp", None)
    with pytest.raises(TrainError, match=r"no compiled megatron\.core\.datasets\.helpers_cpp"):
        import_megatron()


def test_corpora_read_well_in_a_log():
    corpus = Corpus("/p", "ab12", 1_234_567, 1_000, 5)
    assert str(corpus) == "ab12 (1,234,567 tokens in 1,000 documents)"


def test_no_warning_reaches_a_user_with_clean_data(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        corpus = opened(tmp_path, written(tmp_path / "a.jsonl", '{"text": "x"}\n'))
    assert (corpus.documents, corpus.tokens) == (1, 2)  # the byte, and the end of the document
