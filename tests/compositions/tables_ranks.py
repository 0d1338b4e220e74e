"""The ranks' side of the tables: a model placed by one, and steps of it beside one device."""

from __future__ import annotations

import functools
import warnings
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.context import BATCH_DOMAIN, REGULAR_DOMAIN, DeviceMeshParameters, DistributedContext
from shardwright.grads import GradientSynchronizer, clip_grad_norm_, global_mean
from shardwright.moe import MoELayer
from shardwright.parallel import parallelize
from tests.compositions.tables import CONTEXT, EXPERT, TENSOR, Variant, degrees_of, table_of
from tests.cycles import tensors_in_cycles

DIM, HEADS, VOCAB, LENGTH, IGNORED = 16, 4, 31, 9, -100
STEPS, LIMIT, BOUND, LOSS_BOUND = 5, 0.5, 1e-4, 1e-5


class Block(nn.Module):
    """Attention, then an MLP or a mixture of experts."""

    def __init__(self, *, experts: bool) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 24), nn.Linear(24, DIM)
        self.experts = MoELayer(DIM, 12, 4, 2, shared_expert_dim=8) if experts else None

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, DIM] -> the same."""
        y = self.first(x)
        q, k, v = (
            part(y).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        x = x + self.down(functional.silu(self.up(self.second(x))))
        return x if self.experts is None else x + self.experts(x)


class Model(nn.Module):
    """Tokens and labels to the sum of the losses of the labels that count."""

    def __init__(self, *, experts: bool, recompute: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block(experts=experts) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB)
        self.recompute = recompute

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """[rows, tokens] twice -> []."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")


@functools.cache
def _context(degrees: tuple[tuple[str, int], ...]) -> DistributedContext:
    return DeviceMeshParameters(**dict(degrees)).build(device="cpu")


def _batch(number: int, ranks: int) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens and labels of each data rank: other numbers of rows, and of labels that count."""
    draw = torch.Generator().manual_seed(number)
    rows = [1 + (rank + number) % 2 for rank in range(ranks)]
    tokens = torch.randint(VOCAB, (sum(rows), LENGTH), generator=draw)
    labels = torch.randint(VOCAB, (sum(rows), LENGTH), generator=draw)
    ignored = torch.rand(sum(rows), LENGTH, generator=draw) < 0.3
    labels = labels.masked_fill(ignored, IGNORED)
    return list(tokens.split(rows)), list(labels.split(rows))


def train(
    strategies: tuple[str, ...], variant: Variant, planted: str = "", *, steps: int = STEPS
) -> list[str]:
    """What differs from one device, the first step first.

    Args:
        strategies, variant: of the tables.
        planted: a fault to be seen: "twice", a gradient that counts twice on one rank; "unsummed".
        steps: how many.
    """
    warnings.simplefilter("ignore")
    at = _context(tuple(sorted(degrees_of(strategies).items())))
    made = []
    for recompute in (False, variant.recompute):
        torch.manual_seed(7)
        made.append(Model(experts=EXPERT in strategies, recompute=recompute))
    one, model = made
    parallelize(model, at, table_of(strategies), report=None)
    kind: Any = getattr(torch.optim, variant.optimizer)
    options = {"lr": 1e-3, "eps": 1e-6} if variant.optimizer == "AdamW" else {"lr": 0.3}
    optimizers = [kind(m.parameters(), **options) for m in (one, model)]
    synchronizer = GradientSynchronizer(model)
    data = at.mesh_for(BATCH_DOMAIN)["dp"]
    in_spmd = TENSOR in strategies and CONTEXT not in strategies
    found: list[str] = []
    with ExitStack() as last:
        for step in range(steps):
            left = last.enter_context(tensors_in_cycles()) if step == steps - 1 else []
            for number in range(step * variant.backwards, (step + 1) * variant.backwards):
                tokens, labels = _batch(number, data.size())
                count = sum(int((part != IGNORED).sum()) for part in labels)
                expected = one(torch.cat(tokens), torch.cat(labels)) / count
                expected.backward()
                mine, own = tokens[data.get_local_rank()], labels[data.get_local_rank()]
                with sw.spmd(at.mesh_for(REGULAR_DOMAIN)["tp"]) if in_spmd else nullcontext():
                    loss = global_mean(model(mine, own), int((own != IGNORED).sum()), data)
                    loss.backward()
                if not abs(loss.item() - expected.item()) <= LOSS_BOUND * abs(expected.item()):
                    found.append(f"step {step}: loss {loss.item():.7g}, one device {expected.item():.7g}")
            if planted == "twice" and at.rank == 0:
                model.blocks[0].up.weight.grad._local_tensor.mul_(2)
            if planted != "unsummed":
                synchronizer.synchronize()
            found += _differences(f"step {step}, gradient", _gradients(model), _gradients(one))
            norms = (
                float(clip_grad_norm_(model.parameters(), LIMIT)),
                float(nn.utils.clip_grad_norm_(one.parameters(), LIMIT)),
            )
            if not abs(norms[0] - norms[1]) <= BOUND * norms[1]:
                found.append(f"step {step}: norm {norms[0]:.7g}, one device {norms[1]:.7g}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    found += [f"{len(left)} tensors wait for the collector: {left[:3]}"] if left else []
    values = [{n: p.detach() for n, p in m.named_parameters()} for m in (model, one)]
    return found + _differences("parameter at the end", *values)


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def _differences(what: str, got: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    texts = []
    for name, wanted in expected.items():
        value = got[name]
        if value is None or wanted is None:
            texts += [f"{what} {name}: None"] if value is not wanted else []
            continue
        if (
            isinstance(value, TorchDTensor)
            and what.endswith("gradient")
            and value.placements != _placed(value)
        ):
            texts.append(f"{what} {name}: still pending")
        whole = value.full_tensor() if isinstance(value, TorchDTensor) else value
        error = float((whole - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))
        if not error <= BOUND:
            texts.append(f"{what} {name} by {error:.2g}")
    return texts


def _placed(value: Any) -> Any:
    """The placements with nothing pending: what a synchronised gradient has."""
    return tuple(sw.Replicate() if p.is_partial() else p for p in value.placements)
