"""Ranks that place other parameters hear of it in the same words, before the first is placed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor

import shardwright as sw
from shardwright.comm.record import Recorder
from shardwright.context import DeviceMeshParameters
from shardwright.errors import ParallelError
from shardwright.moe import MoELayer
from shardwright.parallel import (
    parallelize,
    parallelize_context,
    parallelize_expert_parallel,
    parallelize_fsdp,
    parallelize_hsdp,
    parallelize_replicate,
    parallelize_tensor,
)
from shardwright.tensor.modules.same_model import told_alike
from shardwright.testing import rank_mesh

Ranks = Callable[..., list[Any]]


def _place(strategy: str, module: nn.Module, **options: Any) -> None:
    if strategy == "hsdp":
        parallelize_hsdp(module, rank_mesh((2, 1), ("a", "b")), shard_dim="b", **options)
        return
    if strategy == "module":
        sw.distribute_module(module, rank_mesh((2,), ("tp",)))
        return
    if strategy == "tensor":
        parallelize_tensor(module, rank_mesh((2,), ("tp",)), {"inner": "replicate"})
        return
    call = {"replicate": parallelize_replicate, "fsdp": parallelize_fsdp, "context": parallelize_context}
    call[strategy](module, rank_mesh((2,), ("dp",)), **options)  # type: ignore[operator]


def _tied(is_tied: int) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if is_tied:
        module[1].weight = module[0].weight
    return module


def _frozen(bias: int) -> nn.Module:
    module = nn.Linear(4, 4)
    module.bias.requires_grad_(bool(bias))
    return module


def _made(how: str, rank: int) -> nn.Module:
    """A module that is another one on rank 1."""
    a, b = nn.Linear(2, 3), nn.Linear(3, 2)
    makers: dict[str, Callable[[], nn.Module]] = {
        "dtype": lambda: nn.Linear(4, 4, dtype=torch.float64 if rank else torch.float32),
        "width": lambda: nn.Linear(4, 4 + 2 * rank),
        "order": lambda: nn.ModuleDict({"a": a, "b": b} if rank else {"b": b, "a": a}),
        "one more": lambda: nn.Linear(4, 4, bias=bool(rank)),
        "trained": lambda: _frozen(rank),
        "tied": lambda: _tied(rank),
    }
    module = nn.Module()
    module.inner = makers[how]()
    return module


_NAMED = {
    "dtype": ("inner.weight", "float32 (4, 4)", "float64 (4, 4)"),
    "width": ("inner.weight", "float32 (4, 4)", "float32 (6, 4)"),
    "order": ("inner.b.weight", "inner.b.weight: float32 (2, 3)", "inner.a.weight: float32 (3, 2)"),
    "one more": ("inner.bias", "no more parameters", "inner.bias: float32 (4,)"),
    "trained": ("inner.bias", "float32 (4,), requires_grad=False", "float32 (4,)"),
    "tied": ("inner.1.weight", "float32 (2, 2)", "float32 (2, 2), tied to inner.0.weight"),
}


def _refused(strategy: str, how: str, device: str) -> str:
    with torch.device(device):
        module = _made(how, dist.get_rank())
    with pytest.raises(ParallelError) as refused:
        _place(strategy, module)
    assert not any(isinstance(p, TorchDTensor) for p in module.parameters())
    assert type(module) is nn.Module
    return str(refused.value)


@pytest.mark.parametrize("strategy", ["replicate", "fsdp", "hsdp", "context", "tensor", "module"])
@pytest.mark.parametrize("how", _NAMED)
def test_the_first_parameter_that_differs_is_named_with_what_each_rank_has(
    ranks: Ranks, strategy: str, how: str
) -> None:
    """They had been garbage values, or an abort of the backend in a later step."""
    for device in ("cpu", "meta"):
        first, second = ranks(2, _refused, strategy, how, device)
        assert first == second
        name, one, two = _NAMED[how]
        verb = "distribute_module" if strategy == "module" else f"parallelize_{strategy}"
        assert first.startswith(f"{verb}: the ranks differ in {name}; nothing was changed\n")
        assert one in first.splitlines()[1]
        assert two in first.splitlines()[2]
        assert "fix: make the module alike" in first


def _by_function(cut: bool) -> Callable[[str, nn.Module, Any], None]:
    def place(_: str, module: nn.Module, mesh: Any) -> None:
        for name, parameter in list(module._parameters.items()):
            if cut and parameter is not None:
                value = sw.distribute_tensor(parameter.detach(), mesh, [sw.Shard(0)], src_data_rank=None)
                module._parameters[name] = nn.Parameter(value)

    return place


def _plan(how: str, rank: int) -> Any:
    """What is asked for a norm of 4 features, otherwise on rank 1."""
    plans: dict[str, tuple[Any, Any]] = {
        "dims": ({"weight": [sw.Shard(0)]}, {"weight": [sw.Replicate()]}),
        "names": ({"weight": [sw.Shard(0)]}, {"bias": [sw.Shard(0)]}),
        "first": (
            {"weight": [sw.Shard(0)], "*": [sw.Replicate()]},
            {"*": [sw.Replicate()], "weight": [sw.Shard(0)]},
        ),
        "buffers": ({"running_mean": [sw.Shard(0)]}, {"running_var": [sw.Shard(0)]}),
        "none": ({"weight": [sw.Shard(0)]}, {"waits": [sw.Shard(0)]}),
        "function": (_by_function(False), _by_function(True)),
    }
    return plans[how][rank]


def _planned(verb: str, how: str, source: int | None) -> str:
    module, mesh = nn.BatchNorm1d(4), rank_mesh((2,), ("tp",))
    before = dict(module.named_parameters()) | dict(module.named_buffers())
    plan = _plan(how, dist.get_rank())
    call = sw.distribute_module if verb == "distribute_module" else parallelize_tensor
    with pytest.raises(ParallelError) as refused:
        call(module, mesh, plan, src_data_rank=source)
    after = dict(module.named_parameters()) | dict(module.named_buffers())
    assert all(after[name] is tensor for name, tensor in before.items())
    return str(refused.value)


_DIFFERS = {
    "dims": ("weight", "weight: float32 (4,), to be (Shard(dim=0),)", "weight: float32 (4,)"),
    "names": ("weight", "weight: float32 (4,), to be (Shard(dim=0),)", "weight: float32 (4,)"),
    "first": ("weight", "weight: float32 (4,), to be (Shard(dim=0),)", "weight: float32 (4,)"),
    "buffers": (
        "running_mean",
        "running_mean: float32 (4,), to be (Shard(dim=0),)",
        "running_mean: float32 (4,)",
    ),
    "function": ("weight", "weight: float32 (4,)", "weight: float32 (4,), placed (Shard(dim=0),) on ('tp',)"),
}


@pytest.mark.parametrize("source", [0, None])
@pytest.mark.parametrize("how", _DIFFERS)
def test_placements_that_differ_are_told_with_what_each_rank_asks_for(
    ranks: Ranks, how: str, source: int | None
) -> None:
    """They had been a rank that waits for a message of another kind."""
    first, second = ranks(2, _planned, "distribute_module", how, source)
    assert first == second
    name, one, two = _DIFFERS[how]
    lines = first.splitlines()
    assert lines[0] == f"distribute_module: the ranks differ in {name}; nothing was changed"
    assert lines[1:3] == [f"  rank 0  {one}", f"  rank 1  {two}"]


@pytest.mark.parametrize("how", ["first", "buffers"])
def test_plans_of_placements_are_compared_name_by_name(ranks: Ranks, how: str) -> None:
    first, second = ranks(2, _planned, "parallelize_tensor", how, 0)
    assert first == second
    assert first.startswith("parallelize_tensor: the ranks differ in ")


@pytest.mark.parametrize("verb", ["distribute_module", "parallelize_tensor"])
def test_a_pattern_without_a_match_on_one_rank_is_told_to_the_others(ranks: Ranks, verb: str) -> None:
    here, there = ranks(2, _planned, verb, "none", 0)
    assert here.startswith(f"{verb}: rank 1 cannot go on; nothing was changed\n  there: ")
    assert there.startswith("no parameter or buffer is named 'waits'")


def _function_that_fails() -> str:
    def place(name: str, module: nn.Module, mesh: Any) -> None:
        if name == "1" and dist.get_rank():
            raise ValueError("no such layer")

    with pytest.raises((ValueError, ParallelError)) as caught:
        sw.distribute_module(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), rank_mesh((2,), ("tp",)), place)
    return str(caught.value)


def test_an_error_of_a_function_that_places_on_one_rank_is_told_to_the_others(ranks: Ranks) -> None:
    here, there = ranks(2, _function_that_fails, timeout=60)
    assert here == "distribute_module: rank 1 cannot go on; nothing was changed\n  there: no such layer"
    assert there == "no such layer"


def _buffers(verb: str) -> str:
    module, mesh = nn.BatchNorm1d(4), rank_mesh((2,), ("tp",))
    module.running_mean = torch.zeros(4 + dist.get_rank())
    call = sw.distribute_module if verb == "distribute_module" else parallelize_tensor
    with pytest.raises(ParallelError) as refused:
        call(module, mesh, {"weight": [sw.Shard(0)]})
    return str(refused.value)


@pytest.mark.parametrize("verb", ["distribute_module", "parallelize_tensor"])
def test_buffers_that_are_placed_too_are_compared(ranks: Ranks, verb: str) -> None:
    first, second = ranks(2, _buffers, verb)
    assert first == second
    assert first.startswith(f"{verb}: the ranks differ in running_mean; nothing was changed\n")


def _other_options() -> str:
    with pytest.raises(ParallelError, match="the ranks differ in options") as refused:
        _place("fsdp", nn.Linear(2, 2), reshard_after_forward=not dist.get_rank())
    return str(refused.value)


def test_ranks_that_shard_in_other_ways_are_refused(ranks: Ranks) -> None:
    first, second = ranks(2, _other_options)
    assert first == second
    assert "{reshard_after_forward: True}" in first
    assert "{reshard_after_forward: False}" in first


def _other_experts() -> str:
    mesh = rank_mesh((1, 2), ("ep_replicate", "ep_shard"))
    layer = MoELayer(4, 4 + 4 * dist.get_rank(), num_experts=2, top_k=1)
    with pytest.raises(ParallelError, match="parallelize_expert_parallel: the ranks differ in") as refused:
        parallelize_expert_parallel(layer, mesh)
    assert layer.communicator is None
    return str(refused.value)


def test_layers_of_other_experts_are_refused(ranks: Ranks) -> None:
    first, second = ranks(2, _other_experts)
    assert first == second


def _values(strategy: str, seeds: str) -> list[str]:
    torch.manual_seed(dist.get_rank() if seeds == "own" else 0)
    mesh = rank_mesh((2, 2), ("a", "b"))
    axis = {"replicate": 0, "shard": 1}.get(seeds)
    if axis is not None:
        torch.manual_seed(mesh.get_local_rank(axis))
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if strategy == "hsdp":
            parallelize_hsdp(module, mesh, shard_dim="b")
        elif strategy == "replicate":
            parallelize_replicate(module, mesh)
        else:
            parallelize_fsdp(module, mesh["b"])
    return [str(each.message) for each in said]


@pytest.mark.parametrize(
    ("strategy", "seeds", "are_said"),
    [
        pytest.param("fsdp", "own", True, id="sharded"),
        pytest.param("fsdp", "replicate", False, id="sharded, and another group is another"),
        pytest.param("fsdp", "alike", False, id="sharded alike"),
        pytest.param("hsdp", "shard", True, id="hybrid, over the shards"),
        pytest.param("hsdp", "replicate", False, id="hybrid, over the copies: the first one's are sent"),
        pytest.param("replicate", "own", False, id="replicated: the first one's are sent"),
    ],
)
def test_other_values_of_what_is_cut_are_said(
    ranks: Ranks, strategy: str, seeds: str, are_said: bool
) -> None:
    """Each rank cut its own tensor: together a tensor that nobody drew, and not a word."""
    for said in ranks(4, _values, strategy, seeds):
        assert len(said) == are_said
        for text in said:
            assert "the ranks of axis 'b' have other values" in text
            assert "Seed alike on every rank before the module is made" in text
            assert "or load values afterwards" in text


def _said_once() -> int:
    torch.manual_seed(dist.get_rank())
    mesh = rank_mesh((2,), ("dp",))
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for unit in (*module, module):
            parallelize_fsdp(unit, mesh)
    return len(said)


def test_other_values_are_said_once_for_all_units(ranks: Ranks) -> None:
    assert ranks(2, _said_once) == [1, 1]


def _sent() -> tuple[list[str], list[str]]:
    mesh = rank_mesh((2,), ("dp",))
    torch.manual_seed(0)
    module = parallelize_replicate(nn.Linear(4, 4), mesh, src_data_rank=None)
    with Recorder() as placed:
        parallelize_fsdp(nn.Linear(4, 4), mesh)
    with Recorder() as step:
        module(torch.ones(2, 4)).sum().backward()
    return [e.op for e in placed.collectives], [e.op for e in step.collectives]


def test_one_small_message_when_placed_and_none_in_a_step(ranks: Ranks) -> None:
    for placed, step in ranks(2, _sent):
        assert placed == ["all_reduce"]
        assert step == []


def _by_table() -> int:
    context = DeviceMeshParameters(data_parallel_shard=2).build(device="cpu")
    context.seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with Recorder() as record:
        parallelize(module, context, {"*": "fsdp", "": "fsdp"}, report=None)
    context.close()
    return len([e for e in record.collectives if e.op == "all_reduce"])


def test_a_table_compares_once_for_all_of_its_calls(ranks: Ranks) -> None:
    assert ranks(2, _by_table) == [0, 0]


def _first_dim(_: nn.Parameter, skip: object = (), names: object = ()) -> sw.Shard:
    return sw.Shard(0)


class _WithOwn(nn.Module):
    """Beside a dense layer what only this rank has: a table of its own length, experts of its own names."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)
        self.table = nn.Embedding(3 + rank, 4)
        self.experts = nn.ModuleDict({str(rank): nn.Linear(4, 4)})
        self.later = nn.LazyLinear(3)


def _own_parameters() -> tuple[bool, list[str]]:
    mesh, rank = rank_mesh((2,), ("dp",)), dist.get_rank()
    torch.manual_seed(0)
    module = _WithOwn(rank)
    own = {p for name, p in module.named_parameters() if not name.startswith("dense")}
    parallelize_fsdp(module, mesh, ignored_params=own)
    torch.manual_seed(1)  # the tables drew other numbers of them
    conjugated = nn.Linear(4, 4, dtype=torch.complex64)
    conjugated.weight = nn.Parameter(conjugated.weight.detach().conj())
    parallelize_fsdp(conjugated, mesh)
    other = nn.Linear(4, 4)
    names = {f"layer{n}" for n in (range(50) if rank else reversed(range(50)))}
    parallelize_fsdp(
        other, mesh, shard_placement_fn=partial(_first_dim, names=names, skip=[torch.ones(2) * rank])
    )
    told = told_alike([{"b", "a"}, torch.ones(2), torch.float32, sw.Shard(0), object()])
    return type(module.dense.weight) is type(module.table.weight), [told]


def test_what_a_rank_has_of_its_own_is_not_compared(ranks: Ranks) -> None:
    one, two = ranks(2, _own_parameters, timeout=60)
    assert one == two
    assert one[0] is False
    assert one[1] == [
        "[{'a', 'b'}, a tensor torch.float32 (2,), torch.float32, Shard(dim=0), builtins.object]"
    ]
