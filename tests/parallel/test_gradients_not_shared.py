"""Gradients of leaves have storage of their own, as torch's have."""

import copy
import itertools
from functools import partial

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.parallel import parallelize_replicate
from shardwright.testing.meshes import rank_mesh

X = torch.arange(8.0)
USES = {
    "a sum that hands both the same gradient": lambda m: (X + m.a + m.b) * X,
    "a gradient that is one expanded number": lambda m: (X + m.a) * 1 + m.b,
    "a view before the local use": lambda m: m.a.view(8) * X + m.b.view(8) * X,
}


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))


def _accumulate(use):
    plain = Two()
    model = parallelize_replicate(copy.deepcopy(plain), rank_mesh((2,), ("dp",)))
    for _ in range(2):
        USES[use](plain).sum().backward()
        USES[use](model).sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad * 2)
    locals_ = [p.grad._local_tensor for p in model.parameters()]
    assert len({local.data_ptr() for local in locals_}) == 2
    assert all(local.is_contiguous() for local in locals_)


@pytest.mark.parametrize("use", USES)
def test_a_second_backward_adds_to_each_parameter_alone(ranks, use):
    ranks(2, _accumulate, use)


def _local_again(x):
    return sw.DTensor.from_local(x.to_local(), x.device_mesh, x.placements, shape=x.shape, stride=x.stride())


HANDED_ON = {
    "to_local": lambda a, b: a.to_local() + b.to_local(),
    "to_local of what is no leaf": lambda a, b: (a + 0).to_local() + (b + 0).to_local(),
    "full_tensor": lambda a, b: a.full_tensor() + b.full_tensor(),
    "a move to where it is": lambda a, b: a.redistribute(a.device_mesh, a.placements) + b,
    "moves that travel together": lambda a, b: sum(sw.redistribute_many([a, b], [a.placements] * 2)),
    "from_local of to_local": lambda a, b: _local_again(a) + b,
    "from_local of both": lambda a, b: _local_again(a) + _local_again(b),
}


COMPILED = {
    "a sum in a graph": torch.compile(lambda a, b: a + b, backend="aot_eager"),
    "one of two in a graph": lambda a, b: _as_it_came(a) + b,
}
_as_it_came = torch.compile(lambda a: a + 0, backend="aot_eager")


def _hand_on(uses):
    mesh = rank_mesh((2,), ("dp",))
    for (name, use), placement in itertools.product(globals()[uses].items(), (sw.Shard(0), sw.Replicate())):
        place = partial(sw.distribute_tensor, device_mesh=mesh, placements=[placement])
        a, b = (place(torch.ones(5, 2)).requires_grad_() for _ in range(2))
        given = []
        for turn in range(1, 3):
            out = use(a, b)
            given.append(torch.ones(out.shape) if type(out) is torch.Tensor else place(torch.ones(5, 2)))
            out.backward(given[-1])
            for x in (a, b):
                assert torch.equal(x.grad.full_tensor(), torch.full((5, 2), float(turn))), (name, placement)
        a.grad.zero_()
        assert [x.sum() == x.numel() for x in given] == [True, True], (name, placement)


@pytest.mark.parametrize("uses", ["HANDED_ON", "COMPILED"])
def test_a_gradient_that_two_get_is_copied_for_one(ranks, uses):
    ranks(2, _hand_on, uses)
