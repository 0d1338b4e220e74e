"""Random models at random cuts beside one device: `python -m tests.pipeline.hostile [first] [number]`.

A seed says all of it: which layers, what crosses between them, what is tied, shared, frozen and skipped over.
"""

from __future__ import annotations

import copy
import random
import sys
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_ as torch_clip
from torch.utils.checkpoint import checkpoint

from shardwright.grads import clip_grad_norm_
from shardwright.parallel import Pipeline, parallelize_pipeline
from shardwright.parallel.pipeline.schedules import MULTI
from shardwright.testing import rank_mesh
from shardwright.testing.pool import RankPool
from shardwright.testing.rank_errors import RankError

H, WORDS, ROWS, LENGTH, LAYERS, STEPS, CLIP = 8, 11, 8, 5, 8, 3, 0.5


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Pair(Plain):
    """Returns more than one tensor, and None."""

    def forward(self, x):
        y = super().forward(x)
        return y, None, (self.linear.weight.mean() * y[..., :1],)


class Named(Plain):
    """Returns a dict of a tensor, a number and a text."""

    def forward(self, x):
        return {"x": super().forward(x), "times": 2, "how": "twice"}


class Masked(Plain):
    """Takes keywords, one of them optional."""

    def forward(self, x, *, mask, scale=None):
        y = self.linear(x) * mask[..., None]
        return x + (y if scale is None else y * scale)


class Normed(Plain):
    """Batch statistics, and a buffer that counts: once for each micro-batch."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(H, H, bias=False)  # a bias before a norm has rounding for a gradient
        self.norm = nn.BatchNorm1d(H)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        return x + self.drop(self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2))


class Turned(Plain):
    """Its result is not contiguous."""

    def forward(self, x):
        return super().forward(x).transpose(0, 1).contiguous().transpose(0, 1)


class InPlace(Plain):
    def forward(self, x):
        return self.linear(x).mul_(0.5).add_(x)


KINDS = (Plain, Pair, Named, Masked, Normed, Turned, InPlace)


class Hostile(nn.Module):
    """A small language model that its seed has put together."""

    def __init__(self, seed):
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.embed = nn.Embedding(WORDS, H)
        self.register_buffer("positions", torch.randn(LENGTH, H))
        self.layers = nn.ModuleList(rng.choice(KINDS)() for _ in range(LAYERS))
        self.head = nn.Linear(H, WORDS, bias=rng.random() < 0.5)
        self.gain = nn.Parameter(torch.ones(H)) if rng.random() < 0.3 else None
        if rng.random() < 0.4:
            self.head.weight = self.embed.weight
        if rng.random() < 0.4:
            one, other = rng.sample(range(LAYERS), 2)
            self.layers[one].linear.weight = self.layers[other].linear.weight
        if rng.random() < 0.3:
            at = rng.randrange(LAYERS)
            self.layers[at].requires_grad_(False)
        self.skips = {}
        for _ in range(rng.choice((0, 1, 2))):
            start, end = sorted(rng.sample(range(LAYERS), 2))
            self.skips[end] = start
        self.adds = rng.random() < 0.3  # a running sum of all layers, written in place
        self.writes = rng.random() < 0.3  # into what a layer returned
        self.every = rng.choice((2, 3))
        self.returns = rng.choice(("logits", "dict", "loss"))
        self.again = rng.random() < 0.4  # computed once more in the backward

    def forward(self, tokens, *, times=1, mask=None, labels=None):
        mask = (tokens > 0).float() if mask is None else mask
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        total, seen, extra = torch.zeros_like(x), [], 0.0
        for at, layer in enumerate(self.layers):
            x, more = self.called(at, layer, x, mask, times)
            extra = extra + more
            if at in self.skips:
                x = x + seen[self.skips[at]]
            if self.writes and at % self.every == 1:
                x = x * 1.0
                x.mul_(0.5)
            if self.adds:
                total += x
            seen.append(x)
        x = (x + 0.1 * total + extra) if self.adds else x + extra
        x = x if self.gain is None else x * self.gain
        return self.returned(self.head(x), labels)

    def called(self, at, layer, x, mask, times):
        if isinstance(layer, Pair):
            x, nothing, (more,) = layer(x)
            return x, more if nothing is None else 0.0
        if isinstance(layer, Named):
            out = layer(x)
            return out["x"] * out["times"] if out["how"] == "twice" else out["x"], 0.0
        if isinstance(layer, Masked):
            return layer(x, mask=mask, scale=2.0 if at % self.every == 0 else None), 0.0
        for _ in range(times if at == 0 else 1):
            again = self.again and not isinstance(layer, Normed)  # whose order would tell
            x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        return x, 0.0

    def returned(self, logits, labels):
        if self.returns == "loss":
            return {"loss": shifted(logits, labels), "logits": logits}
        return {"logits": logits} if self.returns == "dict" else logits


def shifted(logits, labels):
    """Each position says the next word."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def loss_of(out, labels):
    """The sum over the tokens of a micro-batch."""
    if isinstance(out, dict):
        return out["loss"] if "loss" in out else shifted(out["logits"], labels)
    return shifted(out, labels)


@dataclass(frozen=True)
class Trial:
    """A model and a way to run it."""

    seed: int
    world: int
    schedule: str
    micro: int

    @property
    def stages(self) -> int:
        """One or two for each rank."""
        return self.world * (2 if self.schedule in MULTI else 1)

    def cuts(self) -> list[str]:
        """Where the stages begin."""
        rng = random.Random(f"cuts {self}")
        ends = sorted(rng.sample(range(1, LAYERS + 1), self.stages - 1))
        return [f"layers.{at}" if at < LAYERS else "head" for at in ends]


def trials(first: int, number: int) -> list[Trial]:
    """One for each seed: ranks, schedules and micro-batches in turn, as they go together."""
    found = []
    for seed in range(first, first + number):
        rng = random.Random(f"trial {seed}")
        world = rng.choice((2, 4))
        schedule = rng.choice(("gpipe", "1f1b", *MULTI))
        micro = rng.choice((1, 2, 4) if schedule == "gpipe" else (world, 8))
        found.append(Trial(seed, world, schedule, micro))
    return found


def try_one(trial: Trial) -> float:
    """The largest error beside one device. Collective."""
    model = Hostile(trial.seed)
    alone = copy.deepcopy(model)
    given = {"stages": {"gain": trial.stages - 1}} if model.gain is not None else {}
    parallelize_pipeline(model, rank_mesh((trial.world,), ("pp",)), trial.cuts(), **given)
    pipeline = Pipeline(model, loss_of, micro_batches=trial.micro, schedule=trial.schedule)
    known = dict(alone.named_parameters(remove_duplicate=False))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-5) for m in (model, alone)]
    worst = 0.0
    for step in range(STEPS):
        torch.manual_seed(100 * trial.seed + step)
        tokens = torch.randint(0, WORDS, (ROWS, LENGTH))
        kwargs = {"times": 1 + trial.seed % 2} | ({"labels": tokens} if model.returns == "loss" else {})
        wanted = _alone(alone, tokens, kwargs, trial.micro)
        loss = float(pipeline.step(tokens, target=tokens, **kwargs))
        worst = max(worst, abs(loss - wanted) / abs(wanted))
        worst = max(worst, _gradients(model, known))
        norm, have = float(torch_clip(alone.parameters(), CLIP)), float(clip_grad_norm_(model, CLIP))
        worst = max(worst, abs(have - norm) / norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        worst = max(worst, _error(parameter.detach(), known[name].detach()))
    buffers = dict(alone.named_buffers())
    for name, buffer in model.named_buffers():
        worst = max(worst, _error(buffer.float(), buffers[name].float()))
    return worst


def _alone(model, tokens, kwargs, micro):
    total = 0.0
    for rows in tokens.chunk(micro):
        given = {k: rows if k == "labels" else v for k, v in kwargs.items()}
        term = loss_of(model(rows, **given), rows)
        term.backward()
        total += float(term.detach())
    return total


def _gradients(model, known):
    worst = 0.0
    for name, parameter in model.named_parameters(remove_duplicate=False):
        wanted = known[name].grad
        if wanted is None or parameter.grad is None:
            assert parameter.grad is None or not parameter.grad.any(), name
            assert wanted is None or not wanted.any(), name
            continue
        worst = max(worst, _error(parameter.grad, wanted))
    return worst


def _error(have, want):
    return float((have - want).abs().max() / want.abs().max().clamp(min=1e-6))


def main() -> int:
    """Try seeds; 0 if all are as one device."""
    given = [int(text) for text in sys.argv[1:]]
    first, number = (*given, 0, 40)[:2] if len(given) != 1 else (given[0], 40)
    bad, start = 0, time.monotonic()
    with RankPool(preload=("tests.pipeline.hostile",)) as pool:
        for trial in trials(first, number):
            text = ""
            try:
                worst = max(pool.run(trial.world, try_one, trial, timeout=120.0))
                text = "" if worst < 1e-4 else f"differs by {worst:.1e}"
            except RankError as error:
                text = str(error).strip().splitlines()[-1]
            bad += bool(text)
            print(f"{trial}: {text or 'as one device'}", flush=True)
    print(f"{number} pipelines, {bad} not as one device, {time.monotonic() - start:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
