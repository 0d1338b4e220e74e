"""A user's op on distributed tensors: its rule takes effect while the program runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def _with_and_without_a_rule() -> dict[str, Any]:
    import shardwright as sw
    from shardwright.rules import remove_rule

    library = torch.library.Library("ruletest", "DEF")
    library.define("swiglu(Tensor x) -> Tensor")
    library.impl("swiglu", _swiglu, "CompositeExplicitAutograd")
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(0))
    cut = sw.distribute_tensor(x, mesh, {"tp": sw.Interleaved(2, 2)})
    try:
        with sw.trace() as before:
            whole = torch.ops.ruletest.swiglu(cut)
        entry = sw.rule("ruletest::swiglu", "b s (2 h) -> b s h")
        with sw.trace() as after:
            kept = torch.ops.ruletest.swiglu(cut)
        remove_rule(entry)
    finally:
        library._destroy()
    return {
        "before": (before.bytes, str(whole.placements[0])),
        "after": (after.bytes, kept.placements[0] == sw.Shard(2)),
        "values": [torch.equal(y.full_tensor(), _swiglu(x)) for y in (whole, kept)],
    }


def test_a_rule_stated_at_run_time_keeps_a_users_op_from_gathering(ranks: Callable[..., list[Any]]) -> None:
    for found in ranks(2, _with_and_without_a_rule):
        assert found["before"][0] > 0
        assert found["after"] == (0, True)
        assert found["values"] == [True, True]
