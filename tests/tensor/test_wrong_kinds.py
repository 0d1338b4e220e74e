"""Each argument of each public function, given another kind of thing: one error, nothing changed."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright import context, moe
from shardwright.errors import (
    EraseError,
    LayoutError,
    MeshError,
    ParallelError,
    PlanError,
    RuleError,
    ShardwrightError,
)
from shardwright.plan import network
from shardwright.rules import remove_rule
from shardwright.rules.registry import registry
from shardwright.testing import rank_mesh

Ranks = Callable[..., list[Any]]
MESH = sw.layout.MeshShape(("tp",), (2,))
WRONG = {"number": 3, "text": "a", "none": None, "empty": [], "object": object()}

# Swept elsewhere, torch's, or without arguments; classes to be subclassed; what the library returns.
ELSEWHERE = {"checkpoint", "grads", "parallel", "testing"}
OTHERS = {
    *("DeviceMesh", "init_device_mesh", "Replicate", "explicit", "trace", "explain", "visualize"),
    *("Partition", "Pending", "Placement", "Box", "Region"),
    *("Packing", "Plan", "DistributedContext", "Routing"),
}


class Case:
    """A right call. accepts: parameter -> the words of `WRONG` that it is documented to take."""

    def __init__(self, name: str, call: Callable[..., Any], right: dict[str, Any], /, **accepts: str) -> None:
        self.name, self.call, self.right, self.accepts = name, call, right, accepts


def _placements() -> Iterator[Case]:
    yield Case("BlockCyclic", sw.BlockCyclic, {"dim": 0, "block": 2}, dim="number", block="number")
    fused = {"dim": 0, "parts": (1, 1), "units": (1, 1)}
    yield Case("Fused", sw.Fused, fused, dim="number", units="none")
    yield Case("Interleaved", sw.Interleaved, {"dim": 0, "chunks": 2}, dim="number", chunks="number")
    yield Case("Owner", sw.Owner, {"coord": 0}, coord="number")
    yield Case("Partial", sw.Partial, {"reduce_op": "sum"})
    yield Case("Ragged", sw.Ragged, {"units": (1, 1), "dims": (0,)}, dims="number")
    yield Case("Ragged.of_lengths", sw.Ragged.of_lengths, {"lengths": (2, 2), "dims": (0,)}, dims="number")
    yield Case("Shard", sw.Shard, {"dim": 0}, dim="number")
    yield Case("ZigZag", sw.ZigZag, {"dim": 0}, dim="number")


def _layouts(mesh: Any, x: Any) -> Iterator[Case]:
    layout, full = sw.layout_of(x), torch.ones(4, 2)
    grid = {"axes": ("tp",), "sizes": (2,), "ranks": (0, 1)}
    yield Case("MeshShape", sw.layout.MeshShape, grid, ranks="none")
    order = {"order": "none empty"}  # none is named: from left to right
    tensor = {"shape": (4, 2), "dtype": torch.float32, "stride": (2, 1)}
    stated = {"mesh": MESH, "placements": [sw.Shard(0)], **tensor, "order": ("tp",)}
    yield Case("Layout", sw.Layout, stated, stride="none", **order)
    yield Case("Layout.parse", sw.Layout.parse, {"text": str(layout), "mesh": MESH})
    placed = {"placements": {"tp": sw.Shard(1)}, "order": ("tp",)}
    yield Case("with_placements", layout.with_placements, placed, **order)
    yield Case("with_shape", layout.with_shape, tensor, stride="none", dtype="none")
    yield Case("split", layout.split, {"full": full, "coords": (0,)})
    yield Case("join", layout.join, {"locals": [full[:2], full[2:]]})
    yield Case("local_shape", layout.local_shape, {"coords": (0,)})
    yield Case("region", layout.region, {"coords": (0,)})
    yield Case("coords_of", layout.coords_of, {"rank": 0})
    yield Case("layout_of", sw.layout_of, {"x": x})
    spec = {"mesh": MESH, "spec": ("tp", None)}
    yield Case("from_partition_spec", sw.from_partition_spec, spec, spec="empty")
    yield Case("to_partition_spec", sw.to_partition_spec, {"layout": layout})
    moved = {"source": layout, "target": layout.replicated(), "max_extra_bytes": None}
    yield Case("plan_redistribution", sw.plan_redistribution, moved, max_extra_bytes="none")
    packed = {"lengths": (4,), "blocks": (2,), "ranks": 2, "itemsize": 4}
    yield Case("pack_blocks", sw.pack_blocks, packed, ranks="number", itemsize="number")
    stated = {"slow_axes": ("tp",), "one_round_bytes": 3}
    yield Case("Network", sw.Network, stated, slow_axes="empty", one_round_bytes="number none")
    yield Case("Network.from_json", sw.Network.from_json, {"text": "{}"})


def _tensors(mesh: Any, x: Any) -> Iterator[Case]:
    full, placed = torch.ones(4, 2), {"tp": sw.Shard(0)}
    stated = {"device_mesh": mesh, "placements": placed}
    here = {"tensor": full, **stated, "src_data_rank": 0, "order": ("tp",)}
    accepts = {"placements": "none", "src_data_rank": "none", "order": "none empty"}
    yield Case("distribute_tensor", sw.distribute_tensor, here, **accepts)
    hooks = {"input_fn": lambda _, given, __: given, "output_fn": lambda _, made, __: made}
    of_module = {"device_mesh": mesh, "partition_fn": {"weight": placed}, **hooks, "src_data_rank": 0}
    none = dict.fromkeys((*hooks, "partition_fn", "src_data_rank"), "none")
    yield Case("distribute_module", _of_a_copy, {"module": nn.Linear(2, 2), **of_module}, **none)
    options = {"dtype": torch.float32, "layout": torch.strided, "requires_grad": False, **stated}
    for make in (sw.zeros, sw.ones, sw.empty, sw.rand, sw.randn):
        made = {"size": (4, 2), **options, "placements": {"tp": sw.Replicate()}}
        accepts = {"size": "number empty", "dtype": "none", "placements": "none"}
        yield Case(make.__name__, _by_size(make), made, **accepts)
    made = {"size": (4, 2), "fill_value": 1.0, **options, "placements": {"tp": sw.Replicate()}}
    yield Case("full", sw.full, made, **accepts, fill_value="number")
    local = {"local_tensor": full[:2], **stated, "run_check": False, "shape": (4, 2), "stride": (2, 1)}
    accepts = {"stride": "none", "grad_placements": "none"}
    yield Case("from_local", sw.DTensor.from_local, {**local, "grad_placements": placed}, **accepts)
    made = {"local_tensor": full[:2], "spec": x._spec, "requires_grad": False}
    yield Case("DTensor", sw.DTensor, made)
    for of in (x, sw.distribute_tensor(full.clone().requires_grad_(), **stated)):
        yield Case("to_local", of.to_local, {"grad_placements": placed}, grad_placements="none")
        given = {"grad_placements": {"tp": sw.Replicate()}}
        yield Case("full_tensor", of.full_tensor, given, grad_placements="none")
    dtypes = dict.fromkeys(("forward_dtype", "backward_dtype"), torch.float32)
    accepts = {"device_mesh": "none", **dict.fromkeys(dtypes, "none"), "order": "none empty"}
    asked = {**stated, "async_op": False, **dtypes, "order": ("tp",)}
    yield Case("redistribute", x.redistribute, asked, **accepts)
    accepts = {"tensors": "empty", "device_mesh": "none"}
    yield Case("redistribute_many", sw.redistribute_many, {"tensors": [x, x], **stated}, **accepts)
    one = ([sw.Shard(0)],)
    lists = {"in_placements": one, "in_grad_placements": one, "out_shapes": ((4, 2),)}
    mapped = {"func": lambda y: y * 1, "out_placements": [sw.Shard(0)], **lists, "device_mesh": mesh}
    accepts = {**dict.fromkeys((*lists, "out_placements"), "none"), "func": "none", "device_mesh": "none"}
    call = {**mapped, "redistribute_inputs": False}
    yield Case(
        "local_map",
        lambda **given: sw.local_map(**given)(x if given["func"] else torch.relu),
        call,
        **accepts,
    )
    yield Case("erase", sw.erase, {"function": torch.relu, "most": 2}, most="number")


def _blocks(mesh: Any) -> Iterator[Case]:
    yield Case("guarded", _entered(sw.guarded), {"patience": 30.0}, patience="number")
    yield Case("random_mode", _entered(sw.random_mode), {"mode": "counter"})
    yield Case("spmd", _entered(sw.spmd), {"mesh": mesh, "check": "first"})
    yield Case("use_network", sw.use_network, {"network": sw.Network()})


def _rules() -> Iterator[Case]:
    listed = {"hom": ("self: sum->sum",), "strides": (), "prefix": (), "even": (), "held": ()}
    mapped = {"ints": {}, "shapes": {}, "depends": {}}
    flags = {"later": False, "elementwise": False}
    functions = {"when": lambda _: False, "local": None}
    stated = {
        "op": "aten::mm",
        "text": "m k, k n -> m n",
        "reduce": "sum",
        **listed,
        **mapped,
        **flags,
        **functions,
    }
    accepts = {**dict.fromkeys(listed, "empty"), **dict.fromkeys(mapped, "none empty")}
    none = dict.fromkeys(("reduce", *functions), "none")
    yield Case("rule", _undone(sw.rule), stated, **accepts, **none)
    yield Case("rules_of", sw.rules_of, {"op": "aten::mm"})
    made = {"op": "aten::sinc", "any_size": False, "later": False, "make": lambda _: None}
    yield Case("register_rule", _undone(_registered_rule), made)
    made = {"op": "aten::sinc", "cost": lambda *_: None, "rows": None, "function": lambda _, x: x}
    yield Case("register_algorithm", _registered_algorithm, made, rows="none")


def _experts(mesh: Any) -> Iterator[Case]:
    group = {"group": mesh.get_group(0), "axis": "tp"}
    given = {**group, "num_experts": 2, "ranks": frozenset({0, 1})}
    yield Case("ExpertCommunicator", moe.ExpertCommunicator, given, axis="text", num_experts="number")
    layer = moe.MoELayer(4, 4, 4, 2)
    enable = layer.enable_distributed_communicator
    yield Case("enable_distributed_communicator", enable, group, axis="text")
    for part, names in (
        (moe.GroupedExperts, ("num_experts", "dim", "hidden_dim")),
        (moe.GroupedLinear, ("num_experts", "in_features", "out_features")),
        (moe.SharedExpert, ("dim", "hidden_dim")),
    ):
        yield Case(part.__name__, part, dict.fromkeys(names, 4), **dict.fromkeys(names, "number"))
    router = {"dim": 4, "num_experts": 4, "top_k": 2}
    numbers = dict.fromkeys(router, "number")
    yield Case("TopKRouter", moe.TopKRouter, {**router, "normalize": True}, **numbers)
    made = {**router, "hidden_dim": 4, "shared_expert_dim": 4, "normalize": True}
    numbers |= {"hidden_dim": "number", "shared_expert_dim": "number none"}
    yield Case("MoELayer", moe.MoELayer, made, **numbers)


def _contexts(mesh: Any) -> Iterator[Case]:
    degrees = list(inspect.signature(context.Degrees).parameters)
    numbers = dict.fromkeys(degrees[:-1], "number")  # experts are spread over the ranks that there are
    for cls in (context.Degrees, context.DeviceMeshParameters):
        yield Case(cls.__name__, cls, dict.fromkeys(degrees, 1), **numbers)
    parameters = context.DeviceMeshParameters(data_parallel_shard=2)
    accepts = {"device": "none", "timeout": "number none"}
    yield Case("build", parameters.build, {"device": "cpu", "timeout": 30.0}, **accepts)
    yield Case("mesh_for", parameters.build(device="cpu").mesh_for, {"domain": "dense"})
    named = {"name": "mine", "axes": {"own": 2}}
    yield Case("register_domain", context.register_domain, named, name="text")
    yield Case("submesh", context.submesh, {"mesh": mesh, "axes": ("tp",)})


def cases() -> Iterator[Case]:
    mesh = rank_mesh((2,), ("tp",))
    x = sw.distribute_tensor(torch.ones(4, 2), mesh, {"tp": sw.Shard(0)})
    yield from _placements()
    yield from _layouts(mesh, x)
    yield from _tensors(mesh, x)
    yield from _blocks(mesh)
    yield from _rules()
    yield from _experts(mesh)
    yield from _contexts(mesh)


def _of_a_copy(module: Any, **given: Any) -> None:
    own = copy.deepcopy(module)
    try:
        sw.distribute_module(own, **given)
    except ShardwrightError:
        assert not isinstance(own, nn.Module) or type(own.weight.data) is torch.Tensor
        raise


def _by_size(make: Callable[..., Any]) -> Callable[..., Any]:
    def call(size: Any, **options: Any) -> None:
        make(size, **options)

    return call


def _entered(block: Callable[..., AbstractContextManager[Any]]) -> Callable[..., None]:
    def call(**given: Any) -> None:
        with block(**given):
            pass

    return call


def _registered_rule(op: Any, make: Any, **flags: Any) -> Any:
    sw.register_rule(op, **flags)(make)
    return sw.rules_of(op)[-1]


def _registered_algorithm(op: Any, function: Any, **given: Any) -> None:
    sw.register_algorithm(op, **given)(function)
    entry = registry.algorithms_of(torch.ops.aten.sinc.default)[-1]
    registry.remove_algorithm(entry)


def _undone(state: Callable[..., Any]) -> Callable[..., None]:
    return lambda **given: remove_rule(state(**given))


def _outcome(call: Callable[..., Any], given: dict[str, Any]) -> str:
    """How a call ends; "" where it is refused in an error of ours, and nothing was registered or set."""
    before = list(registry), network.current
    try:
        call(**given)
    except ShardwrightError:
        return "" if (list(registry), network.current) == before else "refused, and something changed"
    except Exception as error:  # noqa: BLE001 - told, for all of them at once
        return f"{type(error).__name__}: {error}"
    return "accepted"


def swept() -> tuple[list[str], set[str]]:
    """What is neither refused as it should be nor accepted as documented; the names of the cases."""
    faults, names = [], set()
    for case in cases():
        names.add(case.name)
        if (found := _outcome(case.call, case.right)) != "accepted":
            faults.append(f"{case.name}, as it should be called: {found}")
            continue
        for parameter in case.right:
            accepted = case.accepts.get(parameter, "").split()
            for kind, value in WRONG.items():
                found = _outcome(case.call, {**case.right, parameter: value})
                wanted = "accepted" if kind in accepted else ""
                if found != wanted and not (case.name == "use_network" and kind == "text"):  # a path
                    faults.append(f"{case.name}({parameter}={value!r}): {found or 'refused'}")
    return faults, names


def test_what_is_of_another_kind_is_refused_in_an_error_of_ours(ranks: Ranks) -> None:
    for faults, names in ranks(2, swept):
        assert not faults, "\n".join(faults)
        public = Path("docs/reference/public_names.txt").read_text(encoding="utf-8").split()
        parts = [name.split(".")[1:] for name in public]
        due = {part[-1] for part in parts if part[0] not in ELSEWHERE and not part[-1].isupper()}
        assert due - OTHERS <= names


def in_words() -> None:
    mesh, x = rank_mesh((2,), ("tp",)), torch.ones(4, 2)
    with warnings.catch_warnings(action="ignore"):  # torch will not have them for ever
        quantized = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    with pytest.raises(LayoutError, match="placements='tp' is one text, where a sequence is due"):
        sw.distribute_tensor(x, mesh, "tp")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"order='tp' is one text(?s:.*)such as \('tp',\)"):
        sw.distribute_tensor(x, mesh, {"tp": sw.Shard(0)}, order="tp")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="a quantized tensor: dequantize"):
        sw.distribute_tensor(quantized, mesh, [sw.Shard(0)])
    with pytest.raises(
        LayoutError, match=r"made of a local tensor and its spec(?s:.*)fix: sw.distribute_tensor"
    ):
        sw.DTensor(x)
    with pytest.raises(ParallelError, match="a pattern=3 is no str"):
        sw.distribute_module(nn.Linear(2, 2), mesh, {3: [sw.Shard(0)]})  # type: ignore[dict-item]
    with pytest.raises(MeshError, match="has no axis 5"):
        sw.layout_of(sw.distribute_tensor(x, mesh, [sw.Shard(0)])).with_placements({5: sw.Shard(1)})


def test_refusals_say_what_is_due(ranks: Ranks) -> None:
    ranks(2, in_words)


def without_an_order() -> None:
    mesh, x = rank_mesh((2, 1), ("dp", "tp")), torch.ones(4, 2)
    some: Any = {sw.Shard(0), sw.Partial("sum")}
    placed = sw.distribute_tensor(x, mesh, [sw.Shard(0), sw.Replicate()])
    for call in (
        lambda: sw.distribute_tensor(x, mesh, some),
        lambda: sw.DTensor.from_local(x, mesh, some),
        lambda: placed.redistribute(mesh, some),
        lambda: sw.redistribute_many({placed, placed.clone()}, placements=some),  # type: ignore[call-overload]
        lambda: sw.redistribute_many([placed], placements=some),
    ):
        with pytest.raises(LayoutError, match=r"is a set, without an order, where a sequence is due"):
            call()
    with pytest.raises(LayoutError, match=r"in_placements=.* is a mapping, where a sequence is due"):
        sw.local_map(torch.relu, [sw.Shard(0)], {"tp": sw.Shard(0)})  # type: ignore[arg-type]
    assert sw.Network(slow_axes={"tp"}).slow_axes == ("tp",)  # type: ignore[arg-type]


def test_sets_are_refused_where_an_order_counts(ranks: Ranks) -> None:
    ranks(2, without_an_order)


def sized_by_name() -> None:
    mesh = rank_mesh((2,), ("tp",))
    for make in (sw.zeros, sw.ones, sw.empty, sw.rand, sw.randn):
        made = make(size=(3, 2), device_mesh=mesh, placements=[sw.Shard(0)])  # type: ignore[call-arg]
        assert made.shape == (3, 2)
        with pytest.raises(LayoutError, match="size="):
            make(3, size=(3,), device_mesh=mesh)  # type: ignore[call-arg]


def test_factories_take_their_size_by_name(ranks: Ranks) -> None:
    ranks(2, sized_by_name)


def test_numbers_that_mean_nothing_are_refused() -> None:
    with pytest.raises(PlanError, match="one_round_bytes=-3 is no number of bytes"):
        sw.Network(one_round_bytes=-3)
    with pytest.raises(LayoutError, match=r"stride=\(-1, 2\) is no sequence of lengths"):
        sw.Layout(MESH, [sw.Shard(0)], (4, 2), dtype=torch.float32, stride=(-1, 2))
    with pytest.raises(EraseError, match="most=0 is no whole number above 0"):
        sw.erase(torch.relu, most=0)
    before = list(registry)
    with pytest.raises(RuleError, match="when=3 is no Callable"):
        sw.rule("aten::mm", "m k, k n -> m n", when=3)  # type: ignore[arg-type]
    assert list(registry) == before


def shape_alone() -> None:
    """5 rows over 2 ranks, in parts of any order in memory."""
    mesh, whole = rank_mesh((2,), ("tp",)), torch.arange(15.0).view(5, 3)
    part = whole.split(3)[mesh.get_local_rank()]
    for local in (part, part.t().contiguous().t()):
        for check in (False, True):
            x = sw.DTensor.from_local(local, mesh, {"tp": sw.Shard(0)}, shape=(5, 3), run_check=check)
            assert (x.shape, x.stride()) == ((5, 3), (3, 1))
            assert torch.equal(x.full_tensor(), whole)
            assert torch.equal(x.view(15).full_tensor(), whole.view(15))
            assert torch.equal((x.t() @ x).full_tensor(), whole.t() @ whole)
            assert torch.equal(
                x.as_strided((2, 3), (3, 1), 3).full_tensor(), whole.as_strided((2, 3), (3, 1), 3)
            )
    with pytest.raises(LayoutError, match="without a shape"):
        sw.DTensor.from_local(part, mesh, {"tp": sw.Shard(0)}, stride=(3, 1))


def test_a_part_needs_the_logical_shape_alone(ranks: Ranks) -> None:
    ranks(2, shape_alone)
