"""Placing a model as a composition says, on the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwright as sw
from shardwright.parallel import (
    parallelize_expert_parallel,
    parallelize_fsdp,
    parallelize_hsdp,
    parallelize_replicate,
    parallelize_tensor,
)
from shardwright.testing.meshes import rank_mesh
from tests.compositions.models import MODELS, SEQUENCE, blocks_of
from tests.compositions.table import EXPERT_AXES, SOME, STREAM, TENSOR, WORDS, Composition, Step

Call = Callable[[], object]


class Place:
    """The meshes of one composition, and where this rank stands on them."""

    def __init__(self, composition: Composition) -> None:
        self.composition = composition
        self.mesh = rank_mesh(composition.sizes, composition.axes)

    @property
    def data(self) -> DeviceMesh | None:
        """The axes whose ranks read other rows; None where all read the same."""
        axes = self.composition.data_axes
        return self.part(axes) if axes else None

    @property
    def index(self) -> int:
        """Which of the data ranks this one is."""
        index = 0
        for axis in self.composition.data_axes:
            index = index * self.mesh[axis].size() + self.mesh.get_local_rank(axis)
        return index

    def part(self, axes: tuple[str, ...]) -> DeviceMesh:
        """The mesh of some axes, in the mesh's own order."""
        return self.mesh[tuple(axis for axis in self.composition.axes if axis in axes)]

    def experts(self) -> DeviceMesh:
        """The data ranks, as the experts see them."""
        spread = self.composition.spread
        sizes = (self.composition.data_ranks // spread, spread)
        if "tp" not in self.composition.axes:
            return rank_mesh(sizes, EXPERT_AXES)
        return rank_mesh((*sizes, self.mesh["tp"].size()), (*EXPERT_AXES, "tp"))[EXPERT_AXES]

    def inside(self, *, check: bool = True) -> AbstractContextManager[Any]:
        """Where the forward runs: by names, the model computes on distributed tensors."""
        return (
            sw.spmd(self.mesh["tp"], check=check)
            if self.composition.uses(TENSOR, SOME, WORDS, STREAM)
            else nullcontext()
        )


def place(model: nn.Module, name: str, at: Place) -> nn.Module:
    """Apply every step, in order, in place."""
    for call in calls(model, name, at):
        call()
    return model


def calls(model: nn.Module, name: str, at: Place) -> Iterator[Call]:
    """The calls that a user writes for the composition, in order."""
    for step in at.composition.steps:
        yield from _CALLS[step.strategy.removesuffix("-blocks")](model, name, at, step)


_FIRST, _SECOND = {"tp": sw.Shard(0)}, {"tp": sw.Shard(1)}


def _by_names(model: nn.Module, name: str, at: Place, step: Step) -> Iterator[Call]:
    plan = {pattern: {"tp": placement} for pattern, placement in MODELS[name].by_name.items()}
    yield lambda: sw.distribute_module(model, at.mesh["tp"], plan)


def _of_some(model: nn.Module, name: str, at: Place, step: Step) -> Iterator[Call]:
    """Every second module that has something to cut; what has two owners stays with the others."""
    owners = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    cut: dict[nn.Module, dict[str, dict[str, sw.Placement]]] = {}
    for path, owner in model.named_modules():
        for leaf, parameter in owner.named_parameters(recurse=False):
            full = f"{path}.{leaf}" if path else leaf
            found = [p for pattern, p in MODELS[name].by_name.items() if fnmatchcase(f".{full}", pattern)]
            if found and owners[id(parameter)] == 1:
                cut.setdefault(owner, {})[leaf] = {"tp": found[0]}
    alone = [(m, plan) for m, plan in cut.items() if not any(c in cut for c in m.modules() if c is not m)]
    for owner, plan in alone[::2]:
        yield partial(sw.distribute_module, owner, at.mesh["tp"], plan)


def _by_styles(model: nn.Module, name: str, at: Place, step: Step) -> Iterator[Call]:
    yield lambda: parallelize_tensor(model, at.mesh["tp"], MODELS[name].styles())


def _by_tokens(model: nn.Module, name: str, at: Place, step: Step) -> Iterator[Call]:
    styles = {pattern: style() for pattern, style in SEQUENCE.items()}
    yield lambda: parallelize_tensor(model, at.mesh["tp"], styles)


def _by_words(model: nn.Module, name: str, at: Place, step: Step) -> Iterator[Call]:
    cut = step.strategy == STREAM
    yield lambda: parallelize_tensor(model, at.mesh["tp"], "auto", sequence_parallel=cut)


def _by_parts(model: nn.Module, name: str, at: Place, step: Step) -> Iterator[Call]:
    """The attention and the MLP of each block of our decoder, whose inputs and outputs are plain."""
    heads = dict.fromkeys(("q.weight", "k.weight", "v.weight"), _FIRST) | {"o.weight": _SECOND}
    inner = {"gate.*": _FIRST, "up.*": _FIRST, "down.weight": _SECOND}
    blocks = blocks_of(model, name)
    plans = {block.attention: heads for block in blocks}
    if not MODELS[name].experts:
        plans |= {block.mlp: inner for block in blocks}  # one that two blocks share stands here once
    for part, plan in plans.items():
        yield partial(sw.distribute_module, part, at.mesh["tp"], plan, _enter, _leave)


def _enter(_: nn.Module, inputs: tuple[torch.Tensor, ...], mesh: DeviceMesh) -> tuple[torch.Tensor, ...]:
    return tuple(sw.DTensor.from_local(x, mesh, [sw.Replicate()]) for x in inputs)


def _leave(_: nn.Module, out: sw.DTensor, mesh: DeviceMesh) -> torch.Tensor:
    return out.redistribute(mesh, [sw.Replicate()]).to_local()


def _replicate(model: nn.Module, name: str, at: Place, step: Step) -> Iterator[Call]:
    for part in _parts(model, name, step):
        yield partial(parallelize_replicate, part, at.part(step.axes))


def _fsdp(model: nn.Module, name: str, at: Place, step: Step) -> Iterator[Call]:
    for part in _parts(model, name, step):
        yield partial(parallelize_fsdp, part, at.part(step.axes))


def _hsdp(model: nn.Module, name: str, at: Place, step: Step) -> Iterator[Call]:
    for part in _parts(model, name, step):
        yield partial(parallelize_hsdp, part, at.part(step.axes), shard_dim="ds")


def _parts(model: nn.Module, name: str, step: Step) -> Iterator[nn.Module]:
    """The modules that a strategy is called on: blocks, then the whole; either alone."""
    only_blocks = step.strategy.endswith("-blocks")
    if step.by_blocks or only_blocks:
        yield from dict.fromkeys(blocks_of(model, name))
    if not only_blocks:
        yield model


def _expert(model: nn.Module, name: str, at: Place, step: Step) -> Iterator[Call]:
    yield lambda: parallelize_expert_parallel(model, at.experts(), EXPERT_AXES[1])


_CALLS: dict[str, Callable[[nn.Module, str, Place, Step], Iterator[Call]]] = {
    "tensor": _by_names,
    "styles": _by_styles,
    "sequence": _by_tokens,
    "blocks": _by_parts,
    "some": _of_some,
    "words": _by_words,
    "stream": _by_words,
    "replicate": _replicate,
    "fsdp": _fsdp,
    "hsdp": _hsdp,
    "expert": _expert,
}
