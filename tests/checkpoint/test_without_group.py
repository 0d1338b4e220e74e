"""Ranks that know nothing of each other, because nobody made a process group."""

import warnings

import pytest
from torch import nn

from shardwright.checkpoint import async_save, load, save, save_hf


def _all(folder):
    save(folder / "one", nn.Linear(3, 2))
    async_save(folder / "two", nn.Linear(3, 2)).wait()
    save_hf(nn.Linear(3, 2), folder / "three")


def test_a_rank_above_0_is_told_what_it_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    for call, path in (
        (lambda: save(tmp_path / "one", nn.Linear(3, 2)), "one"),
        (lambda: async_save(tmp_path / "two", nn.Linear(3, 2)).wait(), "two"),
        (lambda: save_hf(nn.Linear(3, 2), tmp_path / "three"), "three"),
    ):
        with pytest.warns(
            UserWarning, match=rf"rank 1 .*has no process group and writes .*{path} as if"
        ) as seen:
            call()
        assert seen[0].filename == __file__
    load(tmp_path / "one", nn.Linear(3, 2))  # reads, and says nothing


@pytest.mark.parametrize("rank", ["", "0", "first"])
def test_rank_0_may_write_alone(tmp_path, monkeypatch, rank):
    monkeypatch.setenv("RANK", rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _all(tmp_path)
