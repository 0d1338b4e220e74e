"""Refusals: calls that have no meaning, with the whole text that the user reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

import shardwright as sw
from shardwright.context import DeviceMeshParameters
from shardwright.grads import GradientSynchronizer
from shardwright.parallel import (
    ToLocalParallel,
    parallelize_expert_parallel,
    parallelize_fsdp,
    parallelize_hsdp,
    parallelize_replicate,
    parallelize_tensor,
)
from tests.corpus.seen import error_text, results
from tests.corpus.unit import Case, Sizes, Unit
from tests.corpus.world import mesh_of
from tests.views.placed import place

_R, _S, _P = sw.Replicate(), sw.Shard, sw.Partial
_MESH = (2, 2)


def _x(*placements: Any, shape: Any = (8, 4), order: Any = None) -> sw.DTensor:
    x = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    return place(x, placements or (_R, _S(0)), order)


def _layout(*placements: Any, shape: Any = (8, 4), **more: Any) -> sw.Layout:
    return sw.Layout(mesh_of(_MESH), placements, shape, dtype=torch.float32, **more)


def _explicit(call: Callable[[], Any]) -> Any:
    with sw.explicit():
        return call()


def _mesh() -> sw.DeviceMesh:
    return mesh_of(_MESH)


def _linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


def _after(first: Callable[[nn.Module], Any], then: Callable[[nn.Module], Any]) -> Any:
    model = _linear()
    first(model)
    return then(model)


_add, _mm, _softmax = torch.ops.aten.add.Tensor, torch.ops.aten.mm.default, torch.ops.aten._softmax.default

REFUSED: Mapping[str, Mapping[str, Callable[[], Any]]] = {
    "layouts": {
        "too few placements": lambda: _layout(_R),
        "too many placements": lambda: _layout(_R, _R, _R),
        "a dim that is not there": lambda: _layout(_S(2), _R),
        "a negative dim that is not there": lambda: _layout(_S(-3), _R),
        "no such axis": lambda: sw.distribute_tensor(torch.ones(4), _mesh(), {"cp": _S(0)}),
        "an order of other axes": lambda: _layout(_S(0), _S(0), order=("tp", "cp")),
        "an order that repeats": lambda: _layout(_S(0), _S(0), order=("tp", "tp")),
        "units of another number": lambda: _layout(sw.Ragged((1, 2, 3), (0,)), _R),
        "an owner outside": lambda: _layout(sw.Owner(2), _R),
        "a stride of another length": lambda: _layout(_R, _R, stride=(1,)),
        "no units": lambda: sw.Ragged((0, 0), (0,)),
        "negative units": lambda: sw.Ragged((1, -1), (0,)),
        "no chunks": lambda: sw.Interleaved(0, 0),
        "no block": lambda: sw.BlockCyclic(0, 0),
        "no such reduction": lambda: sw.Partial("median"),
        "no such text": lambda: sw.Layout.parse("f32[8@nowhere]", _mesh()),
        "a spec that is no cut": lambda: sw.to_partition_spec(_layout(_P(), _R)),
        "a spec that names an axis twice": lambda: sw.from_partition_spec(_mesh(), ("tp", "tp")),
        "a 0-d tensor that is cut": lambda: _layout(_S(0), _R, shape=()),
    },
    "tensors": {
        "from_local, not all named": lambda: sw.DTensor.from_local(torch.ones(2), _mesh(), {"tp": _S(0)}),
        "from_local, of another shape": lambda: sw.DTensor.from_local(
            torch.ones(3, 4), _mesh(), [_R, _S(0)], shape=torch.Size((8, 4)), stride=(4, 1)
        ),
        "redistribute, no such axis": lambda: _x().redistribute({"cp": _R}),
        "redistribute, of another number": lambda: _x().redistribute(placements=[_R]),
        "redistribute to an average of integers": lambda: sw.distribute_tensor(
            torch.arange(8), _mesh(), [_R, _R]
        ).redistribute({"tp": sw.Partial("avg")}),
        "redistribute to a norm": lambda: _x().redistribute({"tp": sw.Partial("norm2")}),
        "twice distributed": lambda: sw.distribute_tensor(_x(), _mesh(), [_R, _R]),
        "a plain tensor beside it": lambda: _x() + torch.ones(8, 4),
        "a plain tensor that is written": lambda: torch.ones(8, 4).add_(_x()),
        "two meshes": lambda: _x() + sw.distribute_tensor(torch.ones(8, 4), _mesh()["tp"], [_S(0)]),
        "many, of another number": lambda: sw.redistribute_many([_x(), _x()], [[_R, _R]]),
        "many, no such axis": lambda: sw.redistribute_many([_x()], {"cp": _R}),
        "zeros, of too many placements": lambda: sw.zeros(4, device_mesh=_mesh(), placements=[_R, _R, _R]),
        "a cut of rows that tears a number": lambda: torch.view_as_complex(_x(_R, _S(1), shape=(8, 2))),
        "a number of more than one element": lambda: _x().item(),
        "a truth of more than one element": lambda: bool(_x()),
        "windows that overlap": lambda: _x().unfold(0, 3, 1).mul_(2),
    },
    "explicit": {
        "add, cut differently": lambda: _explicit(lambda: _add(_x(_R, _S(0)), _x(_R, _S(1)))),
        "add in place, a pending sum": lambda: _explicit(lambda: _x(_R, _R).add_(_x(_R, _P()))),
        "relu of a pending sum": lambda: _explicit(lambda: _x(_R, _P()).relu()),
        "mm": lambda: _explicit(lambda: _mm(_x(_S(0), _S(1)), _x(_S(1), _S(1), shape=(4, 6)))),
        "softmax over a cut dim": lambda: _explicit(lambda: _softmax(_x(_R, _S(1)), 1, False)),
        "a whole matrix": lambda: _explicit(lambda: torch.linalg.inv(_x(_R, _S(0), shape=(4, 4)))),
        "cat": lambda: _explicit(lambda: torch.cat([_x(_R, _S(0)), _x(_R, _S(1))])),
        "a number of a pending sum": lambda: _explicit(lambda: _x(_R, _S(0)).sum().item()),
        "the whole tensor": lambda: _explicit(lambda: _x().full_tensor()),
        "another order": lambda: _explicit(lambda: _add(_x(_R, _S(0)), _x(_S(0), _S(0)))),
        "a list": lambda: _explicit(lambda: torch._foreach_add_([_x(_R, _S(0))], [_x(_R, _S(1))])),
        "a fused step": lambda: _explicit(
            lambda: torch._fused_sgd_(
                [_x(_R, _S(0))],
                [_x(_R, _P())],
                [],
                weight_decay=0.0,
                momentum=0.0,
                lr=0.1,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=True,
            )
        ),
        "out of a sum": lambda: _explicit(lambda: torch.neg(_x(_R, _P()), out=_x(_R, _R))),
        "through a view": lambda: _explicit(lambda: _x(_R, _S(0))[2:6].add_(_x(_R, _S(1), shape=(4, 4)))),
    },
    "rules": {
        "no labels": lambda: sw.rule("corpus::nothing", "->"),
        "another number of operands": lambda: sw.rule("aten::mm", "m k -> m k"),
        "a fact of no operand": lambda: sw.rule("aten::mm", "m k, k n -> m n", hom=("third: sum->sum",)),
        "no such reduction": lambda: sw.rule("aten::mm", "m k, k n -> m n", reduce="median"),
        "no such op": lambda: sw.rules_of("aten::no_such_op"),
        "explain of no such op": lambda: sw.explain("aten::no_such_op"),
        "explain of what torch refuses": lambda: sw.explain(
            "aten::mm", _layout(_R, _S(0)), _layout(_R, _S(0))
        ),
        "text that does not parse": lambda: sw.rule("aten::mm", "m k, k n - m n"),
    },
    "strategies": {
        "hsdp, no such axis": lambda: parallelize_hsdp(_linear(), _mesh(), shard_dim="nowhere"),
        "replicate twice": lambda: _after(
            lambda m: parallelize_replicate(m, _mesh()["dp"]),
            lambda m: parallelize_replicate(m, _mesh()["dp"]),
        ),
        "replicate after fsdp": lambda: _after(
            lambda m: parallelize_fsdp(m, _mesh()["dp"]), lambda m: parallelize_replicate(m, _mesh()["tp"])
        ),
        "tensor after fsdp": lambda: _after(
            lambda m: parallelize_fsdp(m, _mesh()["dp"]),
            lambda m: parallelize_tensor(m, _mesh()["tp"], {"0.weight": {"tp": _S(0)}}),
        ),
        "tensor, a pattern that matches nothing": lambda: parallelize_tensor(
            _linear(), _mesh()["tp"], {"nowhere.*": {"tp": _S(0)}}
        ),
        "module, a dim that is not there": lambda: sw.distribute_module(
            _linear(), _mesh()["tp"], {"0.bias": {"tp": _S(1)}}
        ),
        "experts that are none": lambda: parallelize_expert_parallel(_linear(), _mesh(), "tp"),
        "to local, one axis too many": lambda: ToLocalParallel(
            param_placement=(_R, _R, _R), grad_placement=(_R, _R, _R)
        )._apply(_linear(), _mesh()),
        "a synchronizer of plain parameters": lambda: GradientSynchronizer(_linear()),
        "degrees of another world": lambda: DeviceMeshParameters(data_parallel_shard=3).build(),
        "experts over no ranks": lambda: DeviceMeshParameters(tensor_parallel=4, expert_parallel=2).build(),
    },
}


def units() -> Iterator[Unit]:
    """One for each kind of refusal."""
    for kind in REFUSED:
        yield Unit("errors", kind, (_MESH,), partial(_cases, kind))


def _cases(kind: str, _: Sizes) -> Iterator[Case]:
    for name, call in REFUSED[kind].items():
        yield Case(name, partial(_told, call))


def _told(call: Callable[[], Any]) -> str:
    try:
        return results(call())
    except Exception as error:  # noqa: BLE001 - a refusal is what the user sees, all of it
        return f"raises {error_text(error, whole=True)}"
