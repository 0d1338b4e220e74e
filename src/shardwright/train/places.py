"""Which sequences, and which of their positions, each rank of a run reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.train.config import TrainConfig
from shardwright.train.data import share


@dataclass(frozen=True)
class Place:
    """The coordinates of a rank in the regular domain that decide what it reads."""

    config: TrainConfig
    stage: int
    reader: int
    cp: int
    tp: int

    @classmethod
    def of(cls, config: TrainConfig, rank: int) -> Place:
        """The place of a rank: pp outermost, then data, context and tensor parallel axes."""
        sizes = (
            config.pp,
            config.dp_replicate * (config.dp_shard or 1),
            config.cp,
            config.cp_replicate,
            config.tp,
        )
        coords = []
        for size in reversed(sizes):
            rank, coord = divmod(rank, size)
            coords.append(coord)
        tp, other, cp, data, stage = coords
        return cls(config, stage, data * config.cp_replicate + other, cp, tp)

    @property
    def counts(self) -> bool:
        """Is it the first of the ranks of its stage that read these positions?"""
        return self.config.sp or self.tp == 0

    def rows(self, total: int) -> range:
        """The sequences that it reads, of `total`."""
        return share(total, self.config.batch_ranks, self.reader)

    def positions(self) -> Tensor:
        """The positions of each sequence that it holds: int64 [tokens].

        Under `--cp` pieces i and 2n-1-i of 2n, as `sw.ZigZag` says; of these, under `--sp`, one run.
        """
        config = self.config
        everything = torch.arange(config.seq_len)
        if config.cp > 1:
            pieces = everything.chunk(2 * config.cp)
            everything = torch.cat((pieces[self.cp], pieces[-1 - self.cp]))
        return everything.chunk(config.tp)[self.tp] if config.sp else everything

    def tokens(self) -> Tensor:
        """The tokens that it reads in a step, as indices of the flattened global batch."""
        rows = torch.tensor(list(self.rows(self.config.batch_size)), dtype=torch.int64)
        return (rows[:, None] * self.config.seq_len + self.positions()).flatten()


def readers(config: TrainConfig) -> int:
    """How many ranks of a stage read the same tokens."""
    return 1 if config.sp else config.tp
