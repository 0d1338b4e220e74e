# torchrun --standalone --nproc-per-node 2 examples/placement_and_rule.py
"""A placement of your own, and a rule for an op of your own: state what they mean, and it is checked."""

from dataclasses import dataclass

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
        boxes, count = [], len(range(coord, shape[self.dim], n))
        for index in range(coord, shape[self.dim], n):
            offset = tuple(index if d == self.dim else 0 for d in range(len(shape)))
            size = tuple(1 if d == self.dim else s for d, s in enumerate(shape))
            boxes.append(Box(offset, size))
        return Region(boxes, tuple(count if d == self.dim else s for d, s in enumerate(shape)))


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
