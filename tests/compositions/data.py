"""The rows that each rank reads: global batches, and how many of their rows each data rank takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.testing.rank_device import here

LENGTH = 6  # torch's styles cut it over two or three ranks, evenly
IGNORED = -100
_EVEN, _UNEVEN, _NONE = "even", "uneven", "none"
KINDS = (_EVEN, _UNEVEN, _NONE)


def rows_of_ranks(kind: str, ranks: int, number: int) -> list[int]:
    """Rows of each of `ranks` data ranks in batch `number`; batches differ in who has fewer, or none."""
    turned = [(rank + number) % ranks for rank in range(ranks)]
    if kind == _EVEN or ranks == 1:
        return [2] * ranks
    if kind == _UNEVEN:
        return [1 + turn % 2 * 2 for turn in turned]
    return [0 if turn == ranks - 1 else 1 + turn % 2 for turn in turned]


def batch(kind: str, ranks: int, number: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of the whole batch; some targets are ignored, so that counts differ more."""
    rows = sum(rows_of_ranks(kind, ranks, number))
    generator = torch.Generator("cpu").manual_seed(100 + number)
    tokens = torch.randint(3, vocab, (rows, LENGTH + 1), generator=generator, device="cpu")
    tokens = tokens.to(here())
    targets = tokens[:, 1:].clone()
    targets[::2, 0] = IGNORED
    return tokens[:, :-1].contiguous(), targets


def part(
    kind: str, ranks: int, number: int, vocab: int, index: int, *, no_rows: bool
) -> tuple[Tensor, Tensor]:
    """What data rank `index` reads; where a model takes no batch without rows, one that counts nothing."""
    counts = rows_of_ranks(kind, ranks, number)
    tokens, targets = (t.split(counts)[index] for t in batch(kind, ranks, number, vocab))
    if len(tokens) or no_rows:
        return tokens, targets
    return torch.full((1, LENGTH), 3), torch.full((1, LENGTH), IGNORED)


def counted(targets: Tensor) -> int:
    """How many targets count."""
    return int((targets != IGNORED).sum())


def loss_sum(logits: Any, targets: Tensor) -> Any:
    """The sum of the losses of all targets that count."""
    wide = logits.float() if logits.dtype == torch.bfloat16 else logits
    return functional.cross_entropy(
        wide.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=IGNORED
    )
