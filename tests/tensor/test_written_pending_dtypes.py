"""What is written into a pending tensor of another dtype is what one device writes."""

from itertools import product

import torch

import shardwright as sw
from shardwright.testing.meshes import rank_mesh

DTYPES = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float64)
VALUES = torch.tensor([0.0, 1.0, 3.0, 100.0])


def _sources(values, mesh):
    """The same values whole, cut, and as terms."""
    for placement in (sw.Replicate(), sw.Shard(0)):
        yield sw.distribute_tensor(values, mesh, [placement], src_data_rank=None)
    if values.dtype != torch.bool:
        term = values if mesh.get_local_rank() else torch.zeros_like(values)
        yield sw.DTensor.from_local(term, mesh, [sw.Partial("sum")])


def _written():
    mesh = rank_mesh((2,), ("tp",))
    for op, own, given in product(("max", "min"), DTYPES, DTYPES):
        wanted, values = torch.ones(4, dtype=own), VALUES.to(given)
        targets = [sw.DTensor.from_local(wanted.clone(), mesh, [sw.Partial(op)]) for _ in range(3)]
        wanted.copy_(values)
        for target, source in zip(targets, _sources(values, mesh), strict=False):
            target.copy_(source)
            what = f"{op}: {given} {sw.layout_of(source)} into {own}: {target.full_tensor()}"
            assert torch.equal(target.full_tensor(), wanted), what


def test_a_value_of_another_dtype_is_written_into_terms_as_it_is(ranks):
    ranks(2, _written, timeout=60)
