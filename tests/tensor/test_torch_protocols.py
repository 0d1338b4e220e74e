"""What torch offers around its own DTensor (sizes, safe loading, implicit replication) holds for ours."""

import io
import pickle
import warnings
from functools import partial

import pytest
import torch
import torch.distributed.tensor as torchs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import implicit_replication, register_sharding
from torch.fx.experimental.proxy_tensor import make_fx

import shardwright as sw
from shardwright.errors import MeshError, ParallelError, PlacementError, RuleError
from shardwright.grads import GradientSynchronizer, global_mean
from shardwright.layout import MeshShape
from shardwright.parallel import parallelize_replicate
from shardwright.placement.base import _rebuild as rebuild_placement
from tests.placement.test_shipped_laws import SHIPPED

from .cases import close, full, layouts_of, place


def _sizes():
    """Law: two tensors are of the same size or not, wherever their elements live; nothing moves."""
    a, b = full(5, 4), full(4, 5)
    for layout in layouts_of(2):
        d = place(a, layout)
        spread = place(b, layout)
        with sw.trace() as seen:
            for x, y in ((a, a), (a, b)):
                wanted = x.is_same_size(y)
                theirs = d if y is a else spread
                assert x.is_same_size(theirs) is wanted
                assert theirs.is_same_size(x) is wanted
                assert torch.is_same_size(x, theirs) is wanted
                assert d.is_same_size(theirs) is wanted
                assert torch.is_same_size(x, other=theirs) is wanted
        assert not seen.collectives


def test_sizes_compare_with_plain_tensors(ranks):
    ranks(2, _sizes)


def _saved(values):
    buffer = io.BytesIO()
    torch.save(values, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def _safe_loads():
    x = full(6, 4)
    for layout in layouts_of(2):
        d = place(x, layout, requires_grad=True)
        saved = {"d": d, "parameter": torch.nn.Parameter(d.detach()), "rows": d.detach()[1:].flatten()}
        loaded = _saved(saved)
        for name, was in saved.items():
            again = loaded[name]
            assert type(again) is sw.DTensor
            assert sw.layout_of(again) == sw.layout_of(was)
            assert again.requires_grad is was.requires_grad
            assert torch.equal(again.to_local(), was.to_local())
        assert isinstance(loaded["parameter"], torch.nn.Parameter)
        torch.testing.assert_close(loaded["rows"].full_tensor(), x[1:].flatten())


def test_safe_loading(ranks):
    ranks(2, _safe_loads)


class Own(sw.Shard):
    """A placement class of the user's."""


def test_every_placement_loads_safely():
    """Law: any placement of the library's comes back; a user's class once the user has allowed it."""
    assert issubclass(sw.DTensor, torch.Tensor)  # its package allows them once it is imported
    for given in SHIPPED:
        assert _saved(given) == given
    with pytest.raises(pickle.UnpicklingError, match="add_safe_globals"):
        _saved(Own(0))
    with torch.serialization.safe_globals([Own]):
        assert _saved(Own(0)) == Own(0)


def test_only_placements_are_rebuilt_as_placements():
    with pytest.raises(PlacementError, match="MeshShape is not a placement"):
        rebuild_placement(MeshShape, {})


def _implicitly_replicated():
    """Law: inside torch's block plain tensors count as replicated, gradients included; outside, refused."""
    x, w = full(5, 4), full(4, seed=1)
    plain, one = w.clone().requires_grad_(), x.clone().requires_grad_()
    ((one * plain).exp() @ torch.stack([plain, plain], 1)).sum().backward()
    for layout in layouts_of(2):
        d, beside = place(x, layout, requires_grad=True), w.clone().requires_grad_()
        with implicit_replication():
            ((d * beside).exp() @ torch.stack([beside, beside], 1)).sum().backward()
            target = d.detach().clone()
            target.add_(w)
            close(torch.where(w > 0, target, 0.0), torch.where(w > 0, x + w, 0.0))
        assert type(beside.grad) is torch.Tensor
        close(beside.grad, plain.grad)
        close(d.grad, one.grad)
        with pytest.raises(RuleError, match=r"sw\.spmd"):
            d * w


def test_implicit_replication(ranks):
    ranks(2, _implicitly_replicated)


def _registered_with_torch():
    """A registration in torch's dispatcher, which ours does not ask, is told of once per op."""
    x, op = full(5, 4), torch.ops.aten.sinh.default
    propagator = torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator
    assert op not in propagator.op_strategy_funcs
    d = place(x, [sw.Shard(0)])
    close(d.sinh(), x.sinh())
    register_sharding(op)(lambda _: [([sw.Replicate()], [sw.Replicate()])])
    try:
        with pytest.warns(UserWarning, match=r"register_sharding\(aten::sinh.*\n.*sw\.rule"):
            close(place(x, [sw.Shard(1)]).sinh(), x.sinh())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            close(place(x, [sw.Replicate()]).sinh(), x.sinh())
            close(d.cosh(), x.cosh())
    finally:
        del propagator.op_strategy_funcs[op]
        propagator.op_to_schema_info.pop(op, None)


def test_a_sharding_registered_with_torch_is_warned_of(ranks):
    ranks(2, _registered_with_torch)


def _met_first_among_fake_tensors():
    """A program without memory, and one that is traced, may be the first that sees its mesh."""
    x = full(8, 4)

    def program(mesh, part):
        d = sw.DTensor.from_local(part, mesh, [sw.Shard(0)])
        return d.softmax(0).redistribute(mesh, [sw.Replicate()]).to_local()

    first, second = (init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("first", "second"))
    mine = x.chunk(2)[first.get_local_rank()].clone()
    with FakeTensorMode() as mode:
        weight = sw.distribute_tensor(mode.from_tensor(x), first, [sw.Shard(0)]).requires_grad_()
        weight.softmax(0).square().sum().backward()
        assert weight.grad.to_local().shape == (4, 4)
        assert program(first, mode.from_tensor(mine)).shape == (8, 4)
        logits = sw.distribute_tensor(torch.empty(64, 64), first, [sw.Shard(1)])
        loss = torch.nn.functional.cross_entropy(logits, logits.argmax(1))
        assert loss.full_tensor().shape == ()
        with pytest.raises(ParallelError, match="is global over these ranks already"):
            global_mean(loss, 64, first)
        GradientSynchronizer(parallelize_replicate(torch.nn.Linear(4, 4), first))
    traced = make_fx(lambda part: program(second, part), tracing_mode="fake")(mine)
    torch.testing.assert_close(traced(mine), x.softmax(0))


def test_a_mesh_may_be_met_first_among_fake_tensors(ranks):
    ranks(2, _met_first_among_fake_tensors, fresh=True)


def _ranks_as_one():
    """torch's mode gives one program the coords of all ranks: each rank's plan is another one here."""
    mesh = init_device_mesh("cpu", (2,))
    before = sw.distribute_tensor(full(4, 6), mesh, [sw.Shard(0)])
    with LocalTensorMode(2):
        made = partial(sw.DTensor.from_local, full(4, 6), mesh, [sw.Shard(0)])
        for use in (made, partial(sw.distribute_tensor, full(4, 6), mesh, [sw.Shard(0)]), before.sum):
            with pytest.raises(MeshError, match="LocalTensorMode runs all ranks as one"):
                use()
    assert torch.equal(before.full_tensor(), full(4, 6))


def test_torchs_simulation_of_all_ranks_in_one_process_is_refused(ranks):
    ranks(2, _ranks_as_one)


def _started_from_torchs():
    """A backward may start from torch's own DTensors: its pipelines receive gradients as such."""
    x, seed, mesh = full(4, 6), full(6, 4, seed=1), init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    plain = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(plain.t() * 2, plain, seed)
    for placement in (sw.Replicate(), sw.Shard(0), sw.Shard(1)):
        theirs = torchs.distribute_tensor(seed, mesh, [placement])
        for target in (sw.Shard(0), sw.Replicate()):
            d = sw.distribute_tensor(x, mesh, [sw.Shard(1)]).requires_grad_()
            moved = (d.t() * 2).redistribute(mesh, [target])
            (found,) = torch.autograd.grad(moved, d, theirs, retain_graph=True)
            moved.backward(theirs, retain_graph=True)
            close(found, wanted, f"grad from {placement}")
            close(d.grad, wanted, f"backward from {placement}")
            d.grad = None
            torch.autograd.backward([moved], [theirs], retain_graph=True, inputs=[d])
            close(d.grad, wanted, f"backward of inputs from {placement}")
            start = theirs.detach().requires_grad_()
            (again,) = torch.autograd.grad(moved, d, start, create_graph=True)
            (of_start,) = torch.autograd.grad(again.square().sum(), start)
            close(of_start, 8 * seed, f"second backward from {placement}")  # of (2 * seed) ** 2


def test_backwards_start_from_torchs_dtensors(ranks):
    ranks(2, _started_from_torchs)
