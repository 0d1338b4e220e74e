"""What is no module, mesh, plan or count is refused by name, on every rank, before anything is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright import context as c
from shardwright import grads as g
from shardwright import moe as m
from shardwright import parallel as p
from shardwright.errors import ParallelError, ShardwrightError, SpmdError
from shardwright.grads import global_mean
from shardwright.parallel import parallelize_fsdp, parallelize_hsdp, parallelize_replicate, parallelize_tensor
from shardwright.testing import rank_mesh

Ranks = Callable[..., list[Any]]


def strategies() -> list[Callable[[Any, Any], object]]:
    return [
        parallelize_fsdp,
        parallelize_replicate,
        lambda module, mesh: parallelize_hsdp(module, mesh, shard_dim="dp"),
        lambda module, mesh: parallelize_tensor(module, mesh, {"0": "colwise"}),
    ]


def wrong_kinds() -> None:
    mesh, module = rank_mesh((2,), ("dp",)), nn.Sequential(nn.Linear(2, 2))
    for place in strategies():
        for other in (None, "dp", module):
            with pytest.raises(ParallelError, match=f"with axis names, got {type(other).__name__}"):
                place(module, other)
        with pytest.raises(ParallelError, match="takes a module, got OrderedDict"):
            place(module.state_dict(), mesh)
    for several in ([module, module[0]], (module,)):
        with pytest.raises(ParallelError, match="fix: one call for each of these modules"):
            parallelize_replicate(several, mesh)  # type: ignore[arg-type]
    holder = nn.Module()
    holder.list, holder.table = nn.ParameterList([torch.ones(2)]), nn.ParameterDict({"a": torch.ones(2)})
    for container in holder.children():
        with pytest.raises(ParallelError, match=r"has no forward(?s:.*)the module whose forward reads"):
            parallelize_fsdp(container, mesh)
    with pytest.raises(ParallelError, match="a plan is a mapping or a word"):
        parallelize_tensor(module, mesh, ["0"])  # type: ignore[arg-type]
    with pytest.raises(
        SpmdError, match="takes the mesh on which plain tensors count as replicated, got 'dp'"
    ):
        sw.spmd("dp")  # type: ignore[arg-type]
    assert type(module[0].weight) is nn.Parameter
    assert type(module) is nn.Sequential


def wrong_counts() -> None:
    mesh, loss = rank_mesh((2,), ("dp",)), torch.tensor(6.0)
    for count in ("3", None, -1, [3], torch.ones(2)):
        with pytest.raises(ParallelError, match="takes how many items this rank summed"):
            global_mean(loss, count, mesh)  # type: ignore[arg-type]
    with pytest.raises(ParallelError, match="as a scalar, got int of shape"):
        global_mean(3, 3, mesh)  # type: ignore[arg-type]
    for count in (3, 3.0, torch.tensor([3]), np.int64(3)):
        assert global_mean(loss, count, mesh) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("program", [wrong_kinds, wrong_counts])
def test_other_kinds_of_things_are_refused_by_name(ranks: Ranks, program: Callable[[], None]) -> None:
    """They had been an AttributeError of whatever was asked first, or were taken in silence."""
    ranks(2, program)


def words() -> dict[str, Any]:
    """What is no argument of most functions; made anew for each call, since some can be read once."""
    return {
        "none": None,
        "below": -1,
        "fraction": 1.5,
        "yes": True,
        "text": "nowhere",
        "nothing": [],
        "dict": {1: None},
        "object": object(),
        "tensor": torch.ones(2),
        "scalar": torch.tensor(3),
        "nan": float("nan"),
        "generator": iter([1]),
        "class": sw.DeviceMesh,
    }


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), m.MoELayer(4, 4, 2, 1))


Case = tuple[str, Callable[..., Any], dict[str, Any], dict[str, str]]
_MODEL = "the model"


def strategy_cases(mesh: sw.DeviceMesh) -> Iterator[Case]:
    """A right call of each, and the words that its arguments are documented to take."""
    placed = {"module": _MODEL, "mesh": mesh}
    sharded = {"reshard_after_forward": True, "ignored_params": None, "mp_policy": torch}
    takes = {"reshard_after_forward": "none yes", "ignored_params": "none nothing"}
    yield "fsdp", parallelize_fsdp, placed | sharded, takes
    yield "hsdp", parallelize_hsdp, placed | sharded | {"shard_dim": "dp"}, takes
    source, plan = {"src_data_rank": 0}, {"parallelize_plan": {"0": "colwise"}}
    takes = {"src_data_rank": "none", "sequence_parallel": "yes"}
    yield "replicate", parallelize_replicate, placed | source, takes
    yield "tensor", parallelize_tensor, placed | source | plan | {"sequence_parallel": False}, takes

    def named(module: Any, word: Any, pattern: Any) -> None:
        parallelize_tensor(module, mesh, {pattern: word})

    yield "a plan", named, {"module": _MODEL, "word": "colwise", "pattern": "0"}, {"pattern": "nothing dict"}
    cut = {"attention": "auto", "cut": None, "placement": sw.ZigZag, "output": "cut"}
    yield "context", p.parallelize_context, placed | source | cut, takes | {"cut": "none"}
    sequence = {"mesh": mesh, "dim": 1, "placement": sw.ZigZag}
    yield "sequence", lambda **k: p.cut_sequence(torch.ones(2, 4), **k), sequence, {"dim": "below"}
    yield (
        "experts",
        p.parallelize_expert_parallel,
        {"module": _MODEL, "mesh_experts": mesh, "expert_shard_dim": "dp"},
        {},
    )
    yield "norms", p.parallelize_batch_norm, placed, {}
    yield "dropout", p.logical_dropout, placed, {}
    yield "buffers", p.differing_buffers, placed, {}
    pipeline = {"cuts": ["1"], "stages": None}
    yield "pipeline", p.parallelize_pipeline, placed | pipeline, {"stages": "none"}

    def local(module: Any, mesh: Any, value: Any, grad: Any) -> None:
        p.ToLocalParallel(value, grad)._apply(module, mesh)

    yield "local", local, placed | {"value": sw.Replicate(), "grad": sw.Partial()}, {}


def cases(mesh: sw.DeviceMesh) -> Iterator[Case]:
    """The same of what places no parameter."""
    yield from strategy_cases(mesh)
    whole = parallelize_replicate(model(), mesh)
    synchronized = {"parameters": whole, "bucket_bytes": 9, "static": False}
    takes = {"parameters": "below tensor scalar nothing", "static": "yes"}
    yield "synchronizer", g.GradientSynchronizer, synchronized, takes
    norm = {"max_norm": 1.0, "norm_type": 2.0, "error_if_nonfinite": False, "foreach": None}
    takes = {"error_if_nonfinite": "yes", "foreach": "yes none"}
    numbers = {"max_norm": "fraction scalar", "norm_type": "fraction scalar"}
    yield "clip", lambda **k: g.clip_grad_norm_([], **k), norm, takes | numbers
    counted = {"loss_sum": torch.tensor(1.0), "count": 3, "mesh": mesh}
    yield "mean", global_mean, counted, {"loss_sum": "scalar", "count": "fraction scalar"}
    scale = {"init_scale": 2.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
    takes = {"device": "text", "init_scale": "fraction", "growth_factor": "fraction", "enabled": "yes"}
    yield "scaler", g.GradScaler, {"device": "cpu", "enabled": True} | scale, takes
    yield "rows of a layer", m.MoELayer(4, 4, 2, 1), {"x": torch.ones(1, 4)}, {}
    yield "rows of a router", m.TopKRouter(4, 4, 2), {"tokens": torch.ones(1, 4)}, {}
    yield "rows of an expert", m.SharedExpert(4, 4), {"rows": torch.ones(1, 4)}, {}
    yield (
        "rows of experts",
        lambda x: m.GroupedExperts(1, 4, 4)(x, torch.tensor([1])),
        {"x": torch.ones(1, 4)},
        {},
    )
    yield "submesh", c.submesh, {"mesh": mesh, "axes": ("dp",)}, {}
    yield "world", c.Degrees().check_world, {"world_size": 1}, {}


def _state(module: nn.Module) -> list[Any]:
    held = [(type(child), len(child._forward_hooks), sorted(vars(child))) for child in module.modules()]
    return [held, [(parameter, parameter._version) for parameter in module.parameters()]]


def sweep() -> None:
    mesh = rank_mesh((2,), ("dp",))
    for name, call, right, takes in cases(mesh):
        for argument in right:
            for word in words():
                module, wrong = model(), words()[word]
                if word in takes.get(argument, "").split() or (word == "none" and right[argument] is None):
                    continue
                given = {k: module if v is _MODEL else v for k, v in right.items() if v is not torch}
                before, said = _state(module), f"{name}({argument}={word})"
                with pytest.raises(ShardwrightError) as told:
                    pytest.fail(f"{said} gives {call(**(given | {argument: wrong}))!r}")
                assert len(str(told.value)) > 20, said
                after = _state(module)
                assert after[0] == before[0], said
                assert all(a is b and v == w for (a, v), (b, w) in zip(after[1], before[1], strict=True)), (
                    said
                )


def test_another_kind_of_thing_is_one_error_before_anything_is_changed(ranks: Ranks) -> None:
    ranks(2, sweep)


def _ignores_what_can_be_read_once() -> None:
    mesh, module = rank_mesh((2,), ("dp",)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parallelize_fsdp(module, mesh, ignored_params=module[0].parameters())
    assert [type(x) is nn.Parameter for x in module.parameters()] == [True, True, False, False]


def test_parameters_to_ignore_may_come_from_a_generator(ranks: Ranks) -> None:
    """They were read when they were looked at, and sharded then, since nothing was left of them."""
    ranks(2, _ignores_what_can_be_read_once)
