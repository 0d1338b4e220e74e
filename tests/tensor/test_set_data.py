"""`x.data = value`: x is another value from here on, and shares its memory, as on one device."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

import shardwright as sw
from shardwright.errors import ImplicitRedistributionError, RuleError
from shardwright.parallel import parallelize_fsdp, parallelize_replicate
from shardwright.testing.meshes import rank_mesh

_CUTS = {
    "rows": sw.Shard(0),
    "columns": sw.Shard(1),
    "whole": sw.Replicate(),
    "pending": sw.Partial("sum"),
    "in turn": sw.BlockCyclic(0, 1),
}


def _whole(x):
    return x.full_tensor() if isinstance(x, sw.DTensor) else x


def _of(shape):
    return torch.arange(float(shape[0] * shape[1])).reshape(shape) + 1


def _placed(x, mesh, cut):
    if cut.is_pending:
        return sw.DTensor.from_local(x / mesh.size(), mesh, [cut])
    return sw.distribute_tensor(x, mesh, [cut])


def _set(one_kind, other_kind, parameter):
    mesh = rank_mesh((2,), ("tp",))
    one, other = _CUTS[one_kind], _CUTS[other_kind]
    for shape in ((5, 3), (7, 3), (2, 3)):
        x, value = _placed(torch.zeros(5, 3), mesh, one), _placed(_of(shape), mesh, other)
        if parameter:
            x = nn.Parameter(x)
        before, same = id(x), x
        x.data = value
        assert id(same) == before
        wanted = _of(shape)
        assert x.shape == wanted.shape
        torch.testing.assert_close(_whole(x.detach()), wanted)
        torch.testing.assert_close(_whole((x * 2).sum(0).detach()), (wanted * 2).sum(0))
        assert x.placements == ((one,) if parameter else (other,))
        if x.placements == value.placements and not one.is_pending:  # as on one device, one memory
            value.fill_(3.0)
            torch.testing.assert_close(_whole(x.detach()), torch.full(shape, 3.0))
    if parameter:
        x.sum().backward()
        torch.testing.assert_close(_whole(x.grad), torch.ones(2, 3))


def _all_sets():
    for other in _CUTS:
        for one in ("rows", "columns", "whole", "in turn"):
            _set(one, other, parameter=True)
        for one in _CUTS:
            _set(one, other, parameter=False)


def test_a_tensor_whose_data_is_set_is_that_value(ranks):
    """Every placement of either; longer and shorter values too. Torch's DTensor keeps the old value."""
    ranks(2, _all_sets)


def _refusals():
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    x = nn.Parameter(sw.distribute_tensor(_of((4, 3)), mesh["tp"], [sw.Shard(0)]))
    texts = []
    for value in (torch.zeros(4, 3), sw.distribute_tensor(torch.zeros(4, 3), mesh["dp"], [sw.Replicate()])):
        with pytest.raises(RuleError) as caught:
            x.data = value
        texts.append(str(caught.value))
    with sw.explicit(), pytest.raises(ImplicitRedistributionError):
        x.data = sw.distribute_tensor(torch.zeros(4, 3), mesh["tp"], [sw.Shard(1)])
    torch.testing.assert_close(_whole(x.detach()), _of((4, 3)))
    with sw.spmd(mesh["tp"]):
        x.data = torch.ones(6, 3)
    assert x.placements == (sw.Shard(0),)
    torch.testing.assert_close(_whole(x.detach()), torch.ones(6, 3))
    return texts


def test_a_value_that_lives_nowhere_or_elsewhere_is_refused(ranks):
    plain, elsewhere = ranks(4, _refusals)[0]
    assert plain.startswith("x.data = value: a plain tensor of shape (4, 3) beside a DTensor")
    assert elsewhere == (
        "x.data = value: x lives on ('tp',), value on ('dp',); write "
        "x.data = value.redistribute(x.device_mesh, x.placements)"
    )


def _exchanged(strategy):
    """The average of weights, swapped in for a look and out again, as users write it."""
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    x = torch.randn(2, 4, 3)
    model = strategy(copy.deepcopy(one), rank_mesh((2,), ("dp",)))
    rank = dist.get_rank()

    def run(module, rows):
        out = module(rows)
        if isinstance(module, FSDPModule):
            module.reshard()  # the root is gathered until its backward
        return out

    def seen(module, rows):
        averages = {n: p.detach().clone() * 0.5 for n, p in module.named_parameters()}
        found = [run(module, rows)]
        kept = {}
        for name, p in module.named_parameters():
            kept[name], p.data = p.data, averages[name]
        found.append(run(module, rows))
        for name, p in module.named_parameters():
            p.data = kept[name]
        found.append(run(module, rows))
        for p in module.parameters():
            p.data = p.data.clamp(-0.1, 0.1)
        found.append(module(rows))
        found[-1].square().sum().backward()
        torch.optim.SGD(module.parameters(), 0.1).step()
        return [*found, module(rows)]

    wanted = seen(one, x.flatten(0, 1))
    if isinstance(next(model.parameters()).placements[0], sw.Replicate):
        for p in model.parameters():  # the gradient of a replicated parameter is this rank's term
            p.register_post_accumulate_grad_hook(
                lambda p: setattr(p, "grad", p.grad.redistribute(placements=p.placements))
            )
    for got, expected in zip(seen(model, x[rank]), wanted, strict=True):
        torch.testing.assert_close(got, expected[4 * rank : 4 * rank + 4])


@pytest.mark.parametrize("strategy", [parallelize_fsdp, parallelize_replicate])
def test_weights_are_exchanged_and_put_back_under_a_strategy(ranks, strategy):
    ranks(2, _exchanged, strategy)


def _gathered():
    model = parallelize_fsdp(nn.Sequential(nn.Linear(3, 5)), rank_mesh((2,), ("dp",)))
    weight, said = model[0].weight, []

    def inside(*_):
        with pytest.raises(RuleError) as caught:
            weight.data = weight.data * 2
        said.append(str(caught.value))

    hook = model[0].register_forward_hook(inside)
    model(torch.ones(1, 3))
    hook.remove()
    wanted = 2 * weight.full_tensor().detach()
    weight.data = weight.data * 2  # between a forward and its backward
    out = model(torch.ones(1, 3))
    torch.testing.assert_close(out - model[0].bias.full_tensor(), wanted.sum(1)[None])
    model.unshard()
    torch.testing.assert_close(model[0].weight.detach(), wanted)
    return said[0]


def test_a_parameter_that_is_gathered_now_is_refused(ranks):
    text = ranks(2, _gathered)[0]
    assert text == "x.data = value: weight is gathered now; call reshard() of its fully_shard unit first"


def _resized():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    parallelize_fsdp(model, rank_mesh((2,), ("dp",)))
    before = [p.full_tensor() for p in model.parameters()]
    for value in (torch.zeros(7, 3), sw.zeros(7, 3, device_mesh=model[0].weight.device_mesh)):
        with pytest.raises(RuleError) as caught:
            model[0].weight.data = value
    for p, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.full_tensor(), old)
    return str(caught.value)


def test_another_size_for_what_fully_shard_manages_is_refused(ranks):
    """`transformers` resizes an embedding in this way."""
    assert ranks(2, _resized)[0] == (
        "x.data = value: x is f32[5@dp, 3], a parameter that fully_shard gathers and cuts in this shape and "
        "dtype, and value is torch.float32 of shape (7, 3); change the module (resize its embedding, ...) "
        "before parallelize_fsdp"
    )
