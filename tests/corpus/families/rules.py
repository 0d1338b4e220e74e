"""What `sw.explain` says of the ATen calls that operators run as: the rule, the price, what else could be."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

import shardwright as sw
from shardwright.testing.simulate import Sample
from tests.corpus.families.operators import OF_VALUES
from tests.corpus.seen import arguments_text, error_text, one_line
from tests.corpus.unit import WITHOUT, Case, Sizes, Unit
from tests.ops.database import operators
from tests.plan.kinds import mesh_shape
from tests.rules.captured import captured_calls
from tests.rules.samples import SAMPLES, samples_of
from tests.torch_samples import OF_A_SET

Overload = torch._ops.OpOverload
Cut = Callable[[Tensor, int], sw.Placement]
_ONE_OF = 2  # operators, by the length of their names: the others run much the same
_CALLS = 3  # ATen calls of each operator
_MOST = 1 << 16  # elements of an operand

# What nearly every operator runs beside its own op; these have samples of their own.
_COMMON = frozenset(
    f"aten::{name}" for name in (
        "add.Tensor", "clone", "detach", "expand", "mul.Tensor", "ones_like", "randn_like", "sum", "view",
        "as_strided", "copy_", "_to_copy", "fill_.Scalar", "permute", "t", "transpose.int", "unsqueeze",
        "zeros_like", "zero_", "zeros", "neg", "slice.Tensor", "select.int", "squeeze.dim", "alias",
    )
)  # fmt: skip


def _rows(x: Tensor, _: int) -> sw.Placement:
    return sw.Shard(0) if x.dim() else sw.Replicate()


def _last(x: Tensor, _: int) -> sw.Placement:
    return sw.Shard(x.dim() - 1) if x.dim() else sw.Replicate()


def _sum(x: Tensor, _: int) -> sw.Placement:
    return sw.Replicate() if x.dtype == torch.bool else sw.Partial()


def _first_rows(x: Tensor, position: int) -> sw.Placement:
    return _rows(x, position) if position == 0 else sw.Replicate()


def _in_turn(x: Tensor, position: int) -> sw.Placement:
    return (_last, _rows, _sum)[position % 3](x, position)


CUTS: dict[str, Cut] = {
    "rows": _rows,
    "last dim": _last,
    "sum": _sum,
    "rows of the first": _first_rows,
    "in turn": _in_turn,
}


def units() -> Iterator[Unit]:
    """One for each operator of the database, and one for each op that has written samples."""
    for name, info in operators().items():
        if name not in OF_VALUES | OF_A_SET and len(name) % _ONE_OF == 0:
            yield Unit("rules", name, WITHOUT, partial(_of_operator, info))
    for op in SAMPLES:
        yield Unit("rules", op.name(), WITHOUT, partial(_of_samples, op))


def _of_operator(info: Any, _: Sizes) -> Iterator[Case]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = captured_calls([info], samples=1)
    calls = [(op, samples[0]) for op, samples in found.items() if op.name() not in _COMMON]
    for op, sample in calls[:_CALLS]:
        yield from _of_call(op, sample)


def _of_samples(op: Overload, _: Sizes) -> Iterator[Case]:
    for sample in samples_of(op):
        yield from _of_call(op, sample if isinstance(sample, Sample) else Sample(sample))


def _of_call(op: Overload, sample: Sample) -> Iterator[Case]:
    tensors = [x for x in tree_leaves((sample.args, sample.kwargs)) if isinstance(x, Tensor)]
    if not tensors or any(x.numel() > _MOST or x.layout != torch.strided for x in tensors):
        return
    words, known = arguments_text(sample.args, sample.kwargs), set()
    for sizes in ((2,), (2, 3)):
        for cut in CUTS.values() if len(sizes) == 1 else (_in_turn,):
            placed = [tuple(cut(x, i + axis) for axis in range(len(sizes))) for i, x in enumerate(tensors)]
            if str(placed) not in known:
                known.add(str(placed))
                text = f"{op.name()}({words}) {_by(sizes)} {placed}"
                yield Case(text, partial(_told, op, sample, sizes, placed))


def _by(sizes: Sizes) -> str:
    return "x".join(map(str, sizes))


def _told(op: Overload, sample: Sample, sizes: Sizes, placed: Sequence[Any]) -> str:
    mesh, remaining = mesh_shape(sizes), iter(placed)

    def layout(x: Tensor) -> sw.Layout:
        return sw.Layout(mesh, next(remaining), tuple(x.shape), dtype=x.dtype, stride=tuple(x.stride()))

    try:
        args, kwargs = tree_map_only(Tensor, layout, (sample.args, sample.kwargs))
        return one_line(" | ".join(str(sw.explain(op, *args, **kwargs)).splitlines()))
    except Exception as error:  # noqa: BLE001 - a refusal is what the user sees
        return f"raises {error_text(error)}"
