"""What a step reads depends on seed, step and row only; held-out text is never trained on."""

from __future__ import annotations

import pytest
import torch

from shardwright.errors import ConfigError
from shardwright.train.data import Corpus, load_corpus, share


@pytest.fixture
def corpus() -> Corpus:
    return Corpus(torch.arange(5000).to(torch.uint8), torch.arange(1000).to(torch.uint8), "numbers")


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 16])
def test_the_global_batch_is_the_same_for_every_number_of_ranks(corpus, ranks):
    whole = corpus.batch(3, 5, range(7), 16)
    parts = [corpus.batch(3, 5, share(7, ranks, rank), 16) for rank in range(ranks)]
    assert torch.equal(torch.cat(parts), whole)
    assert whole.shape == (7, 17)


def test_a_rank_without_rows_gets_an_empty_batch(corpus):
    empty = corpus.batch(0, 1, share(1, 4, 0), 16)
    assert empty.shape == (0, 17)
    assert empty.dtype == torch.int64


def test_seed_step_and_row_each_change_the_window(corpus):
    windows = [corpus.batch(seed, step, range(row, row + 1), 64) for seed, step, row in
               [(0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1)]]  # fmt: skip
    assert len({bytes(window[0].tolist()) for window in windows}) == 4


def test_shares_are_contiguous_and_cover_everything():
    for total in range(10):
        for parts in range(1, 6):
            rows = [row for index in range(parts) for row in share(total, parts, index)]
            assert rows == list(range(total))


def test_the_held_out_part_is_not_trained_on(tmp_path):
    """Every four bytes of this text occur once in it, so a shared word would show."""
    text = b"".join(number.to_bytes(4, "big") for number in range(2**24, 2**24 + 20_000))
    (tmp_path / "numbers.txt").write_bytes(text.replace(b"\0", b"\1"))
    corpus = load_corpus(tmp_path / "numbers.txt", 32)
    assert len(corpus.train) + len(corpus.held_out) == len(text) + 1
    assert len(corpus.held_out) * 19 <= len(corpus.train) <= len(corpus.held_out) * 21
    trained = bytes(corpus.train.tolist())
    for window in corpus.held_out_windows(10, range(10), 32):
        assert bytes(window.tolist()) not in trained


def test_a_folder_is_read_in_one_order_and_binary_files_are_left_out(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "z.txt").write_bytes(b"z" * 5000)
    (tmp_path / "a.txt").write_bytes(b"a" * 4000)
    (tmp_path / "c.bin").write_bytes(b"\0" * 4000)
    corpus = load_corpus(tmp_path, 8)
    assert set(corpus.train.tolist()) == set(b"az\n")
    assert corpus.train[0] == ord("a")


def test_too_little_text_is_refused_with_what_is_needed(tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(ConfigError, match=r"10 bytes of text are too few .* at least 20,640 bytes"):
        load_corpus(tmp_path / "short.txt", 128)


def test_the_default_corpus_is_the_standard_library():
    corpus = load_corpus(None, 128)
    assert len(corpus.train) > 5_000_000
    assert b"import " in bytes(corpus.train[:100_000].tolist())


def test_a_corpus_that_is_cut_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("shardwright.train.data.MOST_BYTES", 2**20)
    (tmp_path / "long.txt").write_bytes(b"text" * 2**19)
    corpus = load_corpus(tmp_path / "long.txt", 8)
    assert corpus.source == f"the first 1 MiB of {tmp_path / 'long.txt'}"
    assert len(corpus.train) + len(corpus.held_out) == 2**20
