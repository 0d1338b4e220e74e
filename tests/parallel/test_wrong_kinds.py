"""What is no module, mesh, plan or count is refused by name, on every rank, before anything is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import ParallelError, SpmdError
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
