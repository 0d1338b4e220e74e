"""A step of the trainer of the training command, at its usual size, beside DDP of the same model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from bench.turns import Found, Step, in_turns, told
from shardwright.testing import RankPool
from shardwright.train.config import TrainConfig
from shardwright.train.data import Corpus, load_corpus, share
from shardwright.train.model import Decoder, ModelShape, init_weights
from shardwright.train.optim import make_optimizer, set_learning_rate
from shardwright.train.parallelize import build_model
from shardwright.train.runner import degrees
from shardwright.train.step import Trainer

_STRATEGIES: dict[str, Callable[[int], dict[str, Any]]] = {
    "replicate": lambda n: {"dp_replicate": n, "dp_shard": 1},
    "fsdp": lambda n: {"dp_shard": n},
    "fsdp, experts spread": lambda n: {"dp_shard": n, "ep": n},
}


def run() -> int:
    """Print what was found on 2 and 4 ranks; 1 if a loss is not that of one device."""
    console, bad = Console(highlight=False, soft_wrap=True), False
    with RankPool() as pool:
        for ranks in (2, 4):
            for name in _STRATEGIES:
                found = pool.run(ranks, measure, name, timeout=600)
                bad |= not told(console, f"{name}, {ranks} ranks", found)
    return int(bad)


def measure(name: str) -> Found:
    """The trainer beside DDP."""
    torch.set_num_threads(1)
    n, rank = dist.get_world_size(), dist.get_rank()
    config = TrainConfig.parse(world=n, **_STRATEGIES[name](n)).check(given_ranks=n)
    corpus = load_corpus(config.data, config.seq_len)
    own, all_rows = share(config.batch_size, n, rank), share(config.batch_size, 1, 0)
    ddp = _plain(config, corpus, own, DistributedDataParallel)
    with degrees(config).build(device="cpu") as context:
        model = build_model(config, context)
        trainer = Trainer(config, context, corpus, model, make_optimizer(model, config))
        counted = _Counted()

        def ours() -> Tensor:
            return torch.tensor(trainer.step(counted.next()).loss)

        return in_turns(ours, ddp, _plain(config, corpus, all_rows, lambda model: model))


class _Counted:
    """The number of a step, from 1."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        """Count on."""
        self._last += 1
        return self._last


def _plain(config: TrainConfig, corpus: Corpus, rows: Any, around: Callable[[Decoder], nn.Module]) -> Step:
    """What a trainer of plain tensors does in a step; DDP makes means over the ranks of means over rows."""
    inner = Decoder(ModelShape.of(config))
    init_weights(inner, config.seed)
    model, counted = around(inner), _Counted()
    optimizer = make_optimizer(inner, config)

    def step() -> Tensor:
        number = counted.next()
        set_learning_rate(optimizer, config, number)
        batch = corpus.batch(config.seed, number, rows, config.seq_len)
        logits = model(batch[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(inner.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if model is not inner:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        return total

    return step
