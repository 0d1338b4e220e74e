"""`x.set_(source)`: `x` is what `source` is from then on, in its memory, as one device has it."""

import pytest
import torch

import shardwright as sw
from shardwright.errors import RuleError

from .cases import close, full, mesh, place

CUTS = (sw.Replicate(), sw.Shard(0), sw.Partial())


def _shared():
    for cut in CUTS:
        for other in CUTS:
            for size in (4, 7):
                source = place(full(size, 2, seed=1), (other,))
                x = place(full(4, 2), (cut,))
                same = x.set_(source)
                assert same is x
                assert (x.shape, x.stride(), x.placements) == (source.shape, source.stride(), (other,))
                close(x, source.full_tensor())
                source.mul_(2)
                close(x, source.full_tensor(), "what is written through the source")
                x[:2].mul_(2)
                close(source, x.full_tensor(), "what is written through x")
                close(x.t() @ x, x.full_tensor().t() @ x.full_tensor())


def _gradients():
    """As of one device: a leaf is not set, and what is set is told by its source alone."""
    for put in (lambda x: x, lambda x: place(x, (sw.Shard(0),))):
        leaf, source = put(full(4)).requires_grad_(), put(full(4, seed=1))
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            leaf.set_(source)
        with torch.no_grad():
            leaf.set_(source)
        leaf.square().sum().backward()
        close(leaf.grad, 2 * full(4, seed=1))
        with pytest.raises(RuntimeError, match="Could not set tensor of type"):
            put(full(4)).set_(put(torch.arange(4)))


def _refused():
    x = place(full(4), (sw.Shard(0),))
    with pytest.raises(RuleError, match=r"x is a view, and its base would not follow\n  fix: x.copy_"):
        x[1:].set_(place(full(3), (sw.Shard(0),)))
    with pytest.raises(RuleError, match=r"nothing says who holds which part\n  fix: x.set_\(source\)"):
        x.set_(torch.empty(4).untyped_storage(), 0, (4,), (1,))
    with pytest.raises(RuleError, match="set_"):
        x.set_(full(4))
    assert x.device_mesh == mesh()
    close(x, full(4))


@pytest.mark.parametrize("check", [_shared, _gradients, _refused])
def test_memory_is_set(ranks, check):
    ranks(2, check)
