"""The gather of a column-parallel input and its product: begun before all rows are there, and after.

On links that take time and no processor (`bench.links`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.nn.functional import linear

import shardwright as sw
from bench.links import LINK, medians_at
from shardwright.testing import RankPool, rank_mesh

_TOKENS, _WIDTH = 1024, 1024
_TURNS = 9


def hidden(rate: int | None) -> tuple[float, float, float]:
    """Seconds of gather and product in parts, one after the other, and of the gather alone.

    rate: bytes per second that a rank sends; None: as fast as it can.
    """
    torch.set_num_threads(1)
    mesh = rank_mesh((dist.get_world_size(),), ("tp",))
    made = torch.Generator().manual_seed(1)
    x = sw.distribute_tensor(torch.randn(1, _TOKENS, _WIDTH, generator=made), mesh, [sw.Shard(1)])
    weight = sw.distribute_tensor(torch.randn(4 * _WIDTH, _WIDTH, generator=made), mesh, [sw.Shard(0)])

    def gathered(*, in_parts: bool) -> sw.DTensor:
        return x.redistribute([sw.Replicate()], async_op=in_parts)

    steps: list[Callable[[], Tensor]] = [
        lambda: linear(gathered(in_parts=True), weight),
        lambda: linear(gathered(in_parts=False), weight),
        lambda: gathered(in_parts=False),
    ]
    torch.testing.assert_close(steps[0]().to_local(), steps[1]().to_local())
    first, second, third = medians_at(rate, steps, _TURNS)
    return first, second, third


def tell_hidden(console: Console, pool: RankPool) -> None:
    """Print what the product of one layer hides of its gather."""
    for ranks in (2, 4):
        for rate in (None, LINK):
            seen = pool.run(ranks, hidden, rate, timeout=600)
            parts, waiting, alone = (max(times) * 1e3 for times in zip(*seen, strict=True))
            links = f"links of {rate / 1e6:.0f} MB/s" if rate else "links as they are"
            console.print(
                f"gather of {_TOKENS} x {_WIDTH} and its product, {ranks} ranks, {links}: {parts:.1f} ms in "
                f"parts, {waiting:.1f} one after the other; the gather alone takes {alone:.1f} ms; hidden: "
                f"{(waiting - parts) / alone:.0%}"
            )
