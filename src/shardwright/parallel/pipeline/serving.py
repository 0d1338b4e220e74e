"""A stage that has failed goes on with what its data peers wait for: the collectives of sharded units."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import tree_leaves
from shardwright.compat.fully_shard.units import FsdpUnit


class Units:
    """The sharded units of a model, in the order in which each stage's forward comes to them.

    Every rank of the data axes gathers a unit when its forward begins, and again for its backward. A forward
    that raises half-way leaves some out; `served` makes them up, with nothing computed in between.
    """

    def __init__(self) -> None:
        self._expected: dict[int, list[nn.Module]] = {}
        self._entered: list[nn.Module] = []
        self._left: list[Tensor] = []
        self._follows = False
        self._known: set[int] = set()

    def follow(self, model: nn.Module) -> None:
        """Hear when forwards of the units of a model begin and end."""
        for unit in model.modules():
            if isinstance(unit, FSDPModule) and id(unit) not in self._known:
                self._known.add(id(unit))
                unit.register_forward_pre_hook(self._enter, prepend=True)
                unit.register_forward_hook(self._leave)

    def _enter(self, unit: nn.Module, _args: Any) -> None:
        if self._follows and not FsdpUnit(unit).goes_on(self._entered):
            self._entered.append(unit)

    def _leave(self, _unit: nn.Module, _args: Any, out: Any) -> None:
        if self._follows:
            self._left += [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]

    def begin(self) -> None:
        """A forward of a stage begins."""
        self._entered, self._left, self._follows = [], [], True

    def end(self) -> None:
        """It has ended, whichever way. What it left is kept until the next one, or `served`."""
        self._follows = False

    def learned(self, stage: int) -> None:
        """The forward that has just ended went through all units of this stage."""
        self._expected[stage] = self._entered

    def are_in(self, stage: int) -> bool:
        """Does the forward of this stage go through any?"""
        return bool(self._expected.get(stage))

    def done(self) -> None:
        """Nobody will ask for what the last forward left."""
        self._left = []

    def served(self, stage: int, anchor: Tensor) -> Tensor:
        """Go through the units that the forward of this stage has left open or not come to.

        Returns: what is to be part of what leaves, so that a backward gathers all units of the stage again.
        Cost: what a forward of these units sends.
        """
        done, self._left = self._left, []
        entered = self._entered
        chain = torch.stack([anchor, *(_nothing_of(x) for x in done)]).sum()
        for unit in reversed(entered[1:]):
            chain = _left(unit, chain)
        for unit in self._expected.get(stage, [])[len(entered) :]:
            (chain,), _ = FsdpUnit(unit).enter((chain,), {})
            chain = _left(unit, chain)
        return _left(entered[0], chain) if entered else chain


def _left(unit: nn.Module, chain: Tensor) -> Tensor:
    """End the forward of a unit, if it is open; its parameters have gradients, of zeros."""
    if FsdpUnit(unit).is_idle:
        return chain
    own = [_nothing_of(p) for p in FsdpUnit(unit).gathered() if p.requires_grad]
    left: Tensor = FsdpUnit(unit).leave((), torch.stack([chain, *own]).sum())
    return left


def _nothing_of(x: Tensor) -> Tensor:
    local = x.to_local() if isinstance(x, TorchDTensor) else x
    return local.flatten()[:0].sum().to(torch.float32)
