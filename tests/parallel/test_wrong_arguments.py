"""What cannot be an argument is refused by its name, in an error of ours, and nothing was changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardwright as sw
from shardwright.context import DeviceMeshParameters, submesh
from shardwright.errors import LayoutError, MeshError, ParallelError, ShardwrightError
from shardwright.grads import global_mean
from shardwright.moe import MoELayer
from shardwright.parallel import (
    ToLocalParallel,
    cut_sequence,
    differing_buffers,
    logical_dropout,
    parallelize,
    parallelize_batch_norm,
    parallelize_context,
    parallelize_expert_parallel,
    parallelize_fsdp,
    parallelize_hsdp,
    parallelize_pipeline,
    parallelize_replicate,
    parallelize_tensor,
)
from shardwright.testing import rank_mesh

Ranks = Callable[..., list[Any]]


class Pair(NamedTuple):
    tokens: Any
    rest: int


def _verbs(module: Any) -> list[Callable[[Any], object]]:
    return [
        lambda mesh: parallelize_fsdp(module, mesh),
        lambda mesh: parallelize_hsdp(module, mesh, shard_dim="tp"),
        lambda mesh: parallelize_replicate(module, mesh),
        lambda mesh: parallelize_context(module, mesh),
        lambda mesh: parallelize_expert_parallel(module, mesh),
        lambda mesh: parallelize_pipeline(module, mesh, ["1"]),
        lambda mesh: parallelize_batch_norm(module, mesh),
        lambda mesh: parallelize_tensor(module, mesh, "auto"),
        lambda mesh: differing_buffers(module, mesh),
        lambda mesh: logical_dropout(module, mesh),
    ]


def _no_modules() -> None:
    mesh = rank_mesh((2,), ("tp",))
    for verb in _verbs(None):
        with pytest.raises(ParallelError, match="takes a module, got NoneType"):
            verb(mesh)
    for verb in _verbs(nn.Sequential(nn.LazyLinear(4))):
        with pytest.raises(ParallelError, match=r"0\.weight, of a LazyLinear, has no shape yet"):
            verb(mesh)


def test_every_verb_refuses_what_is_no_module_and_what_has_no_shape(ranks: Ranks) -> None:
    """They had been an AttributeError of whatever was asked first, or an error of torch half way."""
    ranks(2, _no_modules)


def _outside() -> None:
    mesh = sw.DeviceMesh("cpu", [0], mesh_dim_names=("tp",))
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), MoELayer(4, 4, num_experts=2, top_k=1))
    before = [id(p) for p in model.parameters()]
    for call in (
        lambda: parallelize_fsdp(model, mesh),
        lambda: parallelize_hsdp(model, mesh, "tp"),
        lambda: parallelize_replicate(model, mesh),
        lambda: parallelize_context(model, mesh),
        lambda: parallelize_tensor(model, mesh, {"1": "colwise"}),
        lambda: parallelize_tensor(model, mesh, {"1": ColwiseParallel()}),
        lambda: parallelize_tensor(model, mesh, {"1.weight": [sw.Shard(0)]}),
        lambda: parallelize_module(model[1], mesh, ToLocalParallel(sw.Replicate(), sw.Replicate())),
        lambda: differing_buffers(model, mesh),
        lambda: cut_sequence(torch.ones(2, 4), mesh),
        lambda: parallelize_expert_parallel(model, mesh, "tp"),
        lambda: parallelize_pipeline(model, mesh, []),
        lambda: parallelize_batch_norm(model, mesh),
        lambda: logical_dropout(model, mesh),
        lambda: global_mean(torch.ones(()), 1, mesh),
    ):
        if dist.get_rank() == 1:
            with pytest.raises(ParallelError, match=r"rank 1 is none of the ranks \[0\] of the mesh"):
                call()
    assert [id(p) for p in model.parameters()] == before
    if dist.get_rank() == 0:
        with pytest.raises(ParallelError, match=r"^parallelize_hsdp: a ModuleList has no forward"):
            parallelize_hsdp(nn.ModuleList(), mesh, "tp")


def test_a_rank_outside_of_the_mesh_is_told_so(ranks: Ranks) -> None:
    """It had been an IndexError of torch, in some verbs after parameters were placed."""
    ranks(2, _outside)


def _of_one_rank(verb: str) -> tuple[str, bool]:
    mesh, wrong = rank_mesh((2,), ("tp",)), dist.get_rank() == 1
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), MoELayer(4, 4, num_experts=2, top_k=1))
    if wrong and verb == "batch norm":
        model[0].forward = str
    calls: dict[str, Callable[[], object]] = {
        "fsdp": lambda: parallelize_fsdp(model, mesh, reshard_after_forward="no" if wrong else None),
        "hsdp": lambda: parallelize_hsdp(model, mesh, "dp" if wrong else "tp"),
        "replicate": lambda: parallelize_replicate(model, mesh, src_data_rank=7 if wrong else 0),
        "context": lambda: parallelize_context(model, mesh, attention="rings" if wrong else "auto"),
        "tensor": lambda: parallelize_tensor(model, mesh, {} if wrong else {"1": "colwise"}),
        "pipeline": lambda: parallelize_pipeline(model, mesh, ["9" if wrong else "1"]),
        "experts": lambda: parallelize_expert_parallel(model, mesh, "ep" if wrong else "tp"),
        "batch norm": lambda: parallelize_batch_norm(model, mesh),
        "dropout": lambda: logical_dropout(None if wrong else model, mesh),  # type: ignore[arg-type]
    }
    with pytest.raises(ShardwrightError) as refused:
        calls[verb]()
    return str(refused.value), any(isinstance(p, TorchDTensor) for p in model.parameters())


def _of_each(verbs: list[str]) -> list[tuple[str, bool]]:
    return [_of_one_rank(verb) for verb in verbs]


def test_arguments_of_one_rank_alone_are_refused_on_all(ranks: Ranks) -> None:
    """The others had waited for it, or gone on to what it never came to."""
    verbs = ["fsdp", "hsdp", "replicate", "context", "tensor", "pipeline", "experts", "dropout", "batch norm"]
    for first, second in zip(*ranks(2, _of_each, verbs, timeout=30), strict=True):
        assert first[1] is second[1] is False
        assert f"rank 1 cannot go on; nothing was changed\n  there: {second[0]}" in first[0]


def _of_fsdp() -> None:
    mesh = rank_mesh((2,), ("tp",))
    for options, said in (
        ({"reshard": True}, "no argument 'reshard'; did you mean 'reshard_after_forward'"),
        ({"reshard_after_forward": "never"}, "reshard_after_forward='never' is no int or None"),
        ({"shard_placement_fn": "x"}, "shard_placement_fn='x' is no function"),
        ({"shard_placement_fn": lambda _: sw.Shard(5)}, "weight: shard_placement_fn says .* of 2 dims"),
        ({"shard_placement_fn": lambda _: 0}, "weight: shard_placement_fn says 0"),
        ({"ignored_params": {"bias"}}, "ignored_params={'bias'} are no parameters"),
    ):
        for place in (parallelize_fsdp, lambda m, mesh, **k: parallelize_hsdp(m, mesh, "tp", **k)):
            module = nn.Linear(4, 4)
            with pytest.raises(ParallelError, match=said):
                place(module, mesh, **options)
            assert type(module) is nn.Linear
            assert not any(isinstance(p, TorchDTensor) for p in module.parameters())


def test_arguments_of_fully_shard_are_looked_at_before_a_parameter_is_placed(ranks: Ranks) -> None:
    ranks(2, _of_fsdp)


def _of_others() -> None:
    mesh = rank_mesh((2,), ("tp",))
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 6)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: parallelize_pipeline(model, mesh, ["1"], stages="1"), "stages='1' is no Mapping"),
        (lambda: parallelize_pipeline(model, mesh, ["1"], stages={"0": "1"}), "there are stages 0 to 1"),
        (lambda: parallelize_tensor(model, mesh, {"0": ColwiseParallel}), "fix: make one: ColwiseParallel"),
        (
            lambda: parallelize_tensor(model, mesh, {"0": "colwise"}, sequence_parallel="yes"),
            "sequence_parallel='yes' is no bool",
        ),
        (lambda: cut_sequence(batch, mesh, placement=sw.Shard(1)), "cut_sequence: placement=.* makes no"),
        (lambda: cut_sequence(batch, mesh, dim="1"), "cut_sequence: dim='1' is no int"),
    ]
    for call, said in cases:
        with pytest.raises(ParallelError, match=said):
            call()
    cut = cut_sequence(Pair(batch, 1), mesh)
    assert type(cut) is Pair
    assert isinstance(cut.tokens, TorchDTensor)
    assert cut.rest == 1
    with pytest.raises(MeshError, match="submesh: mesh=None is no DeviceMesh"):
        submesh(None, "tp")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"takes a dense tensor, was given a torch\.sparse_coo"):
        sw.distribute_tensor(torch.eye(4).to_sparse(), mesh, [sw.Shard(0)])
    for size in ("12", 4.5, None, (2, -1)):
        with pytest.raises(LayoutError, match=r"shape=.* is no sequence of lengths"):
            sw.ones(size, device_mesh=mesh)
    with pytest.raises(LayoutError, match="device='cpu': a factory of DTensors takes"):
        sw.zeros(4, device="cpu", device_mesh=mesh)  # type: ignore[call-arg]
    whole = sw.distribute_tensor(torch.ones(4), mesh, [sw.Replicate()])
    for value in (torch.ones(2), whole, whole.sum()):
        with pytest.raises(LayoutError, match=r"full: fill_value is a .*Tensor of shape"):
            sw.full((4,), value, device_mesh=mesh)
    assert sw.full((4,), torch.tensor(2), device_mesh=mesh).dtype == torch.int64
    with pytest.raises(LayoutError, match="async_op='no' is no bool"):
        whole.redistribute(placements=[sw.Shard(0)], async_op="no")  # type: ignore[arg-type]


def test_other_verbs_refuse_by_the_name_of_the_argument(ranks: Ranks) -> None:
    ranks(2, _of_others)


def _of_tables(wrong: int) -> str:
    context = DeviceMeshParameters(data_parallel_shard=2).build(device="cpu")
    context.seed(0)
    module = None if wrong == 0 else nn.Linear(4, 4, device="meta" if wrong == 2 else "cpu")
    options: dict[str, Any] = [{}, {"report": "yes"}, {"init": "zeros"}][wrong]
    with pytest.raises(ShardwrightError) as refused:
        parallelize(module, context, "fsdp", **options)  # type: ignore[arg-type]
    context.close()
    return str(refused.value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (0, "parallelize takes a module, got NoneType"),
        (1, "parallelize: report='yes' is no function of the report, nor None"),
        (2, "parallelize: init='zeros' is no function of the module, nor None"),
    ],
)
def test_a_table_refuses_on_all_ranks(ranks: Ranks, wrong: int, said: str) -> None:
    """A report had failed on one rank, after all of it was placed."""
    assert ranks(2, _of_tables, wrong) == [said, said]
