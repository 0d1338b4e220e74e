"""Tiny runs of the training command for tests, on the ranks of the pool."""

from __future__ import annotations

from typing import Any

from shardwright.train.config import TrainConfig

TINY = {
    "steps": 3,
    "batch_size": 4,
    "seq_len": 16,
    "layers": 2,
    "hidden": 16,
    "heads": 2,
    "experts": 4,
    "top_k": 2,
    "expert_hidden": 8,
    "warmup": 2,
    "eval_every": 2,
    "eval_windows": 3,
    "checkpoint_every": 0,
    "unit_mib": 0,  # as in a larger model: each block is a sharded unit
    "sample_length": 8,
}


def tiny(**settings: Any) -> TrainConfig:
    """A checked config of a model that trains in milliseconds."""
    return TrainConfig.parse(**{**TINY, **settings}).check()


def write_text(path: Any) -> None:
    """Some text to train on, the same everywhere."""
    path.write_bytes(bytes(32 + (i * i + i // 7) % 90 for i in range(60_000)))
