"""A transformer block, forward and backward: by hand on local tensors, erased, eager, torch's DTensor."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import shardwright as sw
from bench.turns import calls_for, timed
from shardwright.testing import RankPool, rank_mesh
from shardwright.testing.rank_device import here
from tests.witness.witness import Witness

_HEADS = 4
_TURNS = 41
_SIZES = ((32, 16, 2), (64, 32, 4), (256, 128, 4))  # width, tokens, rows
_CUT = ("q", "k", "v", "up")


class Block(nn.Module):
    """Attention and a gelu layer, two residual branches; as many heads as its matrices have rows for.

    into, out_of: what stands at the beginning and at the end of a branch; by hand, where ranks talk.
    """

    def __init__(self, width: int, into: Any = None, out_of: Any = None) -> None:
        super().__init__()
        self.width, self.into, self.out_of = width, into, out_of
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = (nn.Linear(a * width, b * width, bias=False) for a, b in ((1, 4), (4, 1)))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, width] to the same."""
        h = self.norm1(x)  # its gradients stay terms of a sum, as they do on DTensors
        size = self.width // _HEADS
        heads = (p(h).unflatten(-1, (-1, size)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.end(self.o(mixed.transpose(1, 2).flatten(-2)))
        h = self.begin(self.norm2(x))
        return x + self.end(self.down(functional.gelu(self.up(h))))

    def begin(self, x: Tensor) -> Tensor:
        """Where a branch begins."""
        return x if self.into is None else self.into(x)

    def end(self, x: Tensor) -> Tensor:
        """Where a branch ends."""
        return x if self.out_of is None else self.out_of(x)


def _reduced(x: Tensor) -> Tensor:
    """The functional collective that a local program has, without its Python wrapper."""
    ops = torch.ops._c10d_functional
    group = dist.group.WORLD.group_name
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", group))


class Into(torch.autograd.Function):
    """Copies forward, sums backward."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return _reduced(gradient)


class OutOf(torch.autograd.Function):
    """Sums forward, copies backward."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return _reduced(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


def by_hand(width: int, world: int) -> Block:
    """The block on this rank's parts of the weights, as plain tensors."""
    torch.manual_seed(0)
    made = Block(width) if world == 1 else Block(width, Into.apply, OutOf.apply)
    if world > 1:
        rank = dist.get_rank()
        for name in (*_CUT, "o", "down"):
            layer = getattr(made, name)
            part = layer.weight.detach().chunk(world, int(name in ("o", "down")))[rank]
            layer.weight = nn.Parameter(part.clone(memory_format=torch.contiguous_format))
    return made


def on_dtensors(width: int, mesh: DeviceMesh) -> nn.Module:
    """The same block, its weights cut in the same way; the program says where a branch is finished."""
    torch.manual_seed(0)
    whole = {"tp": sw.Replicate()}
    made = Block(width, None, lambda x: x.redistribute(whole))
    cuts = {f"{name}.weight": {"tp": sw.Shard(0)} for name in _CUT}
    cuts |= {f"{name}.weight": {"tp": sw.Shard(1)} for name in ("o", "down")}
    return sw.distribute_module(made, mesh, {**cuts, "*": whole})


def in_styles(width: int, mesh: DeviceMesh) -> nn.Module:
    """torch's own: tensor parallelism by its styles."""
    torch.manual_seed(0)
    plan = {name: ColwiseParallel() for name in _CUT} | {name: RowwiseParallel() for name in ("o", "down")}
    return parallelize_module(Block(width), mesh, plan)


def step_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Loss and gradients."""

    def step(x: Tensor) -> Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    return step


@dataclass
class Found:
    """What one rank saw at one size: seconds per turn of each program, collectives, losses."""

    times: dict[str, list[float]] = field(default_factory=dict)
    collectives: dict[str, int] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    recording: float = 0.0


def run() -> int:
    """Print what was found; 1 if losses differ or the erased step sends more than by hand."""
    console = Console(highlight=False, soft_wrap=True)
    bad = 0
    with RankPool() as pool:
        for ranks in (1, 2):
            for width, tokens, rows in _SIZES:
                found = pool.run(ranks, measure, width, tokens, rows, timeout=600)
                bad |= _print(console, f"{ranks} ranks, width {width}, {rows} x {tokens} tokens", found)
    return bad


def measure(width: int, tokens: int, rows: int) -> Found:
    """All programs in turn; the erased one twice, for the noise."""
    torch.set_num_threads(1)
    world = dist.get_world_size()
    mesh = rank_mesh((world,), ("tp",))
    x = torch.randn(rows, tokens, width, generator=torch.Generator(here()).manual_seed(1))
    given = sw.distribute_tensor(x, mesh, {"tp": sw.Replicate()})
    hand, ours = by_hand(width, world), on_dtensors(width, mesh)
    erased, only = sw.erase(step_of(on_dtensors(width, mesh))), on_dtensors(width, mesh)
    theirs = in_styles(width, mesh)
    forward = sw.erase(only)
    only_step = _around(only, forward)
    programs: dict[str, Callable[[], Tensor]] = {
        "by hand": lambda: step_of(hand)(x),
        "erased step": lambda: erased(given),
        "erased step again": lambda: erased(given),
        "module, loss outside": lambda: only_step(given),
        "eager DTensors": lambda: step_of(ours)(given),
        "torch's DTensor": lambda: step_of(theirs)(x),
    }
    found = Found()
    start = time.perf_counter()
    erased(given)
    found.recording = time.perf_counter() - start
    for name, program in programs.items():
        for _ in range(4):
            found.losses[name] = float(program())
        with Witness() as witness:
            program()
        found.collectives[name] = len(witness.asked)
    if erased.report().replays < 4 or forward.report().replays < 4:
        raise RuntimeError(f"{erased.report()}\n{forward.report()}")
    calls = calls_for(programs["by hand"])
    names, order = list(programs), random.Random(0)
    for _ in range(_TURNS):
        order.shuffle(names)  # who follows whom matters: a large program leaves cold caches behind
        for name in names:
            found.times.setdefault(name, []).append(timed(programs[name], calls))
    return found


def _around(model: nn.Module, forward: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """The loss and the backward outside of what is erased."""

    def step(x: Tensor) -> Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        loss = forward(x).square().mean()
        loss.backward()
        return loss.detach()

    return step


def _print(console: Console, title: str, found: list[Found]) -> int:
    """Of every turn the slowest rank counts; ratios to the program by hand, turn by turn."""
    slowest = {
        name: [max(turn) for turn in zip(*(f.times[name] for f in found), strict=True)]
        for name in found[0].times
    }
    console.print(f"{title} (recording {max(f.recording for f in found) * 1e3:.0f} ms)")
    hand, again = slowest["by hand"], slowest["erased step again"]
    for name, times in slowest.items():
        beside = again if name == "erased step" else hand
        ratio = median(a / b for a, b in zip(times, hand, strict=True))
        noise = median(a / b for a, b in zip(times, beside, strict=True))
        against = f"  A against A {noise:.3f}" if name == "erased step" else ""
        console.print(
            f"  {name:<22}{median(times) * 1e6:>9.0f} us {ratio:>7.2f}x  "
            f"{found[0].collectives[name]} collectives  loss {found[0].losses[name]:.6f}{against}"
        )
    losses = found[0].losses
    differ = any(abs(loss - losses["by hand"]) > 1e-4 * abs(losses["by hand"]) for loss in losses.values())
    return int(differ or found[0].collectives["erased step"] > found[0].collectives["by hand"])
