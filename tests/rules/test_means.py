"""A mean is one local call wherever the cut lies, and divides by the logical count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Seen(TorchDispatchMode):
    """The names of ops on plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        import shardwright as sw

        if any(issubclass(each, sw.DTensor) for each in types):
            return NotImplemented
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def _local_ops() -> dict[str, list[str]]:
    import shardwright as sw

    mesh = sw.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    found = {}
    for name, way, dim in (("rows", sw.Shard(0), 1), ("cut", sw.Shard(0), 0)):
        x = sw.distribute_tensor(torch.ones(5, 4), mesh, [way])
        x.mean(dim)  # decided
        with _Seen() as seen:
            x.mean(dim)
        found[name] = seen.names
    return found


def test_a_known_mean_is_one_local_call(ranks: Callable[..., list[Any]]) -> None:
    for found in ranks(2, _local_ops):
        assert found == {"rows": ["aten::mean"], "cut": ["aten::sum", "aten::div"]}


def _into_out() -> list[str]:
    import shardwright as sw

    mesh = sw.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    whole = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    wrong = []
    for way in (sw.Shard(0), sw.Shard(1), sw.Ragged((1, 3), (0, 1)), sw.Replicate()):
        for dim, kept in ((0, False), (1, True), ((0, 1), True)):
            for target in (sw.Partial(), sw.Replicate()):
                want = whole.mean(dim, kept)
                out = sw.DTensor.from_local(torch.ones(want.shape), mesh, [target])
                torch.mean(sw.distribute_tensor(whole, mesh, [way]), dim, kept, out=out)
                if not torch.allclose(out.full_tensor(), want, atol=1e-6):
                    wrong.append(f"{way}, {dim}, {target}")
    return wrong


def test_a_mean_into_an_operand_is_that_of_one_device(ranks: Callable[..., list[Any]]) -> None:
    """Into terms of a sum, too."""
    assert ranks(2, _into_out) == [[], []]


def _of_nothing() -> list[bool]:
    import shardwright as sw

    mesh = sw.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    nothing = sw.distribute_tensor(torch.zeros(0, 3), mesh, [sw.Shard(0)])
    return [bool(nothing.mean(dim).full_tensor().isnan().all()) for dim in (0, (0, 1))]


def test_a_mean_of_nothing_is_not_a_number(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(2, _of_nothing) == [[True, True]] * 2
