"""What a compiled program reads of a tensor inside `spmd`, after its graph broke."""

import torch

import shardwright as sw
from shardwright.testing.meshes import rank_mesh


def _facts(x, rows, columns):
    product = rows * columns  # the comparison of the plain operand ends on the host: the graph breaks
    return product, x.device, x.dtype, x.ndim, x.requires_grad


def _compiled():
    mesh = rank_mesh((2,), ("tp",))
    x = sw.distribute_tensor(torch.randn(4, 3), mesh, [sw.Shard(0)])
    rows = sw.distribute_tensor(torch.arange(3.0)[:, None], mesh, [sw.Replicate()])
    with sw.spmd(mesh, check=True):
        product, *facts = torch.compile(_facts, backend="eager")(x, rows, torch.ones(4))
    torch._dynamo.reset()
    assert facts == [torch.device("cpu"), torch.float32, 2, False]
    torch.testing.assert_close(product.full_tensor(), torch.arange(3.0)[:, None].expand(3, 4))


def test_a_compiled_program_reads_the_attributes_that_it_names(ranks):
    """The dtype was the device: a frame compiled for one getter ran for the other."""
    ranks(2, _compiled)
