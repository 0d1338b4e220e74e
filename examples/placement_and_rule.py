# torchrun --standalone --nproc-per-node 2 examples/placement_and_rule.py
"""A placement of your own, and a rule for an op of your own: state what they mean, and it is checked."""

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

import shardwright as sw
from shardwright.context import FLAT_DOMAIN, DeviceMeshParameters
from shardwright.placement import Box, Partition, Region
from shardwright.testing import check_placement, check_rule


@dataclass(frozen=True)
class Interlaced(Partition):
    """Coord i holds every n-th element of a dim, from the i-th on."""

    dim: int

    def region(self, shape: tuple[int, ...], n: int, coord: int) -> Region:
        outer, inner, held = shape[: self.dim], shape[self.dim + 1 :], range(coord, shape[self.dim], n)
        size = (*[1] * len(outer), 1, *inner)
        # In the order in which the local tensor has its elements: all of one outer index, then the next.
        starts = [(*before, index) for before in product(*map(range, outer)) for index in held]
        boxes = [Box((*start, *[0] * len(inner)), size) for start in starts]
        return Region(boxes, (*outer, len(held), *inner))


@torch.library.custom_op("examples::scaled_rows", mutates_args=())
def scaled_rows(x: Tensor, scale: Tensor) -> Tensor:
    """Each row times its number:  [m, k], [m] -> [m, k]."""
    return x * scale[:, None]


@scaled_rows.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


def main() -> None:
    with DeviceMeshParameters(data_parallel_replicate=2).build() as context:
        mesh = context.mesh_for(FLAT_DOMAIN)
        check_placement(Interlaced(0))  # covers, is disjoint, joins to what was split: any shape
        whole = torch.arange(14.0, device=context.device).reshape(7, 2)
        x = sw.distribute_tensor(whole, mesh, [Interlaced(0)])
        assert torch.equal(x.to_local(), whole[context.rank :: 2])
        assert torch.equal(x.redistribute([sw.Shard(1)]).full_tensor(), whole)
        columns = sw.distribute_tensor(whole, mesh, [Interlaced(1)])
        assert torch.equal(columns.to_local(), whole[:, context.rank :: 2])
        torch.testing.assert_close((x * 2 + 1).sum().full_tensor(), (whole * 2 + 1).sum())

        sw.rule("examples::scaled_rows", "m k, m -> m k", hom=("x: sum->sum", "scale: sum->sum"))
        check_rule("examples::scaled_rows", [sw.testing.Sample((whole.cpu(), whole.cpu()[:, 0]))])
        scale = sw.distribute_tensor(whole[:, 0].contiguous(), mesh, [Interlaced(0)])
        with sw.explicit():  # nothing may move unasked
            made = torch.ops.examples.scaled_rows(x, scale)
        torch.testing.assert_close(made.full_tensor(), whole * whole[:, :1])
        if context.is_main:
            print(sw.layout_of(x), "of which rank 0 holds", x.to_local().tolist())
            print("scaled", sw.layout_of(made))


if __name__ == "__main__":
    main()
