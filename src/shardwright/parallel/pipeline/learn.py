"""What each border carries: found by running the stages once, one after another, on no values.

Each stage runs the model's own code. Where that computes with a value of an earlier stage, the value is
needed; then the stage begins anew with zeros in its place. What any later stage needs crosses every border
from where it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwright.checkpoint.rng_state import read_rng, write_rng
from shardwright.comm.record import because
from shardwright.compat import FakeTensor, tree_leaves, tree_map
from shardwright.errors import ParallelError, ShardwrightError
from shardwright.parallel.pipeline.border import FindMesh, Leaf
from shardwright.parallel.pipeline.conductor import Call, NeededError, Run, Value, mark, origins
from shardwright.parallel.pipeline.split import Split

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Forward = Callable[[Run], Any]  # the model called on one micro-batch, what a stage returns to nobody

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass
class Borders:
    """What stages know of each other.

    known: what each call of a part returns, its tensors as `Leaf`. crossing: for each border, numbered by the
    stage behind it, the values that are sent, in order. rewritten: values that the model's own code writes
    into; written: those that a part writes into, and which.
    """

    known: dict[Call, Any] = field(default_factory=dict)
    made_by: dict[Call, int] = field(default_factory=dict)
    needs: dict[int, frozenset[Value]] = field(default_factory=dict)
    crossing: dict[int, tuple[Value, ...]] = field(default_factory=dict)
    rewritten: set[Value] = field(default_factory=set)
    written: dict[Value, str] = field(default_factory=dict)

    def leaf(self, value: Value) -> Leaf:
        """What is known of a value."""
        leaves = [x for x in tree_leaves(self.known[value.call]) if isinstance(x, Leaf)]
        return leaves[value.leaf]

    def earlier(self, stage: int) -> dict[Call, Any]:
        """What calls before this stage returned."""
        return {call: tree for call, tree in self.known.items() if self.made_by[call] < stage}

    def made(self, stage: int) -> frozenset[Value]:
        """The values of this stage itself that later ones need."""
        needed = frozenset().union(*(self.crossing.values()))
        return frozenset(v for v in needed if self.made_by[v.call] == stage)


@dataclass
class _Told:
    """What the rank of a stage tells all others: what its calls returned, and what it needed for them."""

    trees: dict[Call, Any] = field(default_factory=dict)
    needs: frozenset[Value] = frozenset()
    rewritten: frozenset[Value] = frozenset()
    written: dict[Value, str] = field(default_factory=dict)
    error: str | None = None


def learn(split: Split, model: nn.Module, forward: Forward, find: FindMesh, device: torch.device) -> Borders:
    """Run every stage once, on the ranks that hold it, and tell all of them what crosses the borders.

    Nothing of the model is changed by it: buffers and generators are put back.
    Raises: ParallelError: on every rank of the axis, what one of them cannot do.
    Cost: a forward of each stage, one after another; their descriptions are sent to all ranks of the axis.
    """
    borders = Borders()
    with torch.no_grad(), _as_it_was(model):
        for stage in range(split.stages):
            told = _Told()
            if stage in split.mine:
                told = _tried(stage, split, borders, forward, find, device)
            told = _from(split.rank_of[stage], told, split.mesh.get_group(), device)
            if told.error is not None:
                raise ParallelError(f"pipeline, stage {stage}: {told.error}")
            borders.known.update(told.trees)
            borders.made_by.update(dict.fromkeys(told.trees, stage))
            borders.needs[stage] = told.needs
            borders.rewritten |= told.rewritten
            borders.written |= told.written
    for behind in range(1, split.stages):
        late = frozenset().union(*(borders.needs[s] for s in range(behind, split.stages)))
        borders.crossing[behind] = tuple(sorted(v for v in late if borders.made_by[v.call] < behind))
    _refuse_written(borders)
    return borders


def _refuse_written(borders: Borders) -> None:
    """Raise ParallelError for a value that a part of one stage writes into and a later stage reads.

    Where the part and the reader are of one stage, and the value of an earlier one, it is as on one device.
    """
    for behind, values in borders.crossing.items():
        for value in values:
            part = borders.written.get(value)
            if part is not None and _stage_of(borders, part) < behind:
                raise ParallelError(
                    f"pipeline: {part} writes in place into what {value.call.key} returned, and stage "
                    f"{behind} reads that\n  fix: return a new tensor from {part}, or cut elsewhere"
                )


def _stage_of(borders: Borders, part: str) -> int:
    return min(stage for call, stage in borders.made_by.items() if call.key == part)


def _tried(
    stage: int, split: Split, borders: Borders, forward: Forward, find: FindMesh, device: torch.device
) -> _Told:
    try:
        return _stage(stage, split, borders, forward, find, device)
    except ShardwrightError as error:
        return _Told(error=str(error))
    except Exception as error:  # noqa: BLE001  the other ranks wait to be told
        return _Told(error=f"{type(error).__name__}: {error}")


def _stage(
    stage: int, split: Split, borders: Borders, forward: Forward, find: FindMesh, device: torch.device
) -> _Told:
    """Run one stage until it has asked for all that it needs."""
    needs: frozenset[Value] = frozenset()
    known = borders.earlier(stage)
    while True:
        zeros = {value: borders.leaf(value).zeros(find, device) for value in needs}
        run = Run(stage, zeros, known, None, lambda leaf: split.hollow(leaf, device))
        try:
            with _Following():
                out = forward(run)
            asked = frozenset().union(*(origins(x) for x in tree_leaves(out)))
            if stage != split.stages - 1 or not asked:
                break
        except NeededError as error:
            asked = error.values
        _check_asked(stage, asked, needs, known)
        needs |= asked
    run.rewritten.update(run.look())
    described = {call: _described(call, tree) for call, tree in run.trees.items()}
    return _Told(described, needs, frozenset(run.rewritten), dict(run.written))


def _check_asked(
    stage: int, asked: frozenset[Value], needs: frozenset[Value], known: Mapping[Call, Any]
) -> None:
    for value in sorted(asked):
        if value.call not in known:
            name = value.call.key
            raise ParallelError(
                f"{name} is held by another stage, and the model's own code uses it in stage {stage}\n"
                f"  fix: parallelize_pipeline(..., stages={{{name!r}: {stage}}}), or both stages in a tuple"
            )
    if asked <= needs:
        raise ParallelError(f"it asks again for {sorted(asked)}, which it was given")


def _described(call: Call, tree: Any) -> Any:
    """What a call returned, tensors as `Leaf`. Raises: ParallelError: something that cannot be sent."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return Leaf.of(leaf)
        if not isinstance(leaf, _PLAIN):
            raise ParallelError(
                f"{call.key} returns a {type(leaf).__name__}, and what a stage hands to the next is tensors "
                "(in tuples, lists, dicts) and plain values\n  fix: cut around a module that returns those; "
                "for a cache of keys and values, pass use_cache=False"
            )
        return leaf

    return tree_map(one, tree)


def _from(rank: int, told: _Told, group: ProcessGroup, device: torch.device) -> _Told:
    """What this rank of the axis tells, on all of them."""
    if dist.get_world_size(group) == 1:
        return told
    box = [told]
    with because("what crosses the borders of a pipeline"):
        dist.broadcast_object_list(box, src=dist.get_global_rank(group, rank), group=group, device=device)
    return box[0]


class _Following(TorchFunctionMode):
    """Follows hollow tensors through functions: what is made of them, and what cannot be made of them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        of = [origins(x) for x in tree_leaves((args, dict(kwargs or {})))]
        values = frozenset().union(*of)
        if not values:
            return func(*args, **(kwargs or {}))
        try:
            out = func(*args, **(kwargs or {}))
        except Exception as error:
            raise NeededError(values) from error
        for x in tree_leaves(out):
            if isinstance(x, FakeTensor):
                mark(x, origins(x) | values)
        return out


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Buffers and generators are put back."""
    before = [(b, b.detach().clone()) for b in model.buffers()]
    generators = read_rng()
    try:
        yield
    finally:
        write_rng(generators)
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
