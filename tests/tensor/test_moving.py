"""Into, out of and between layouts: values, gradients with torch's conventions, and what is refused."""

import dataclasses
import itertools
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwright as sw
from shardwright.errors import LayoutError, ParallelError, RuleError
from shardwright.tensor import distribute
from shardwright.testing.meshes import rank_mesh
from tests.tiers import only

from .cases import close, full, layouts_of, mesh, place, placed, placements_of

SHAPES = [(5, 7), (1, 3), (6, 4), (2, 0), (4,)]


def _round_trips():
    for shape in SHAPES:
        x = full(*shape)
        for placements in layouts_of(len(shape), pending=False):
            d = sw.distribute_tensor(x, mesh(), placements)
            assert d.shape == x.shape
            assert d.stride() == x.stride()
            assert d.placements == placements
            assert torch.equal(d.full_tensor(), x)
            local = sw.layout_of(d).split(x, tuple(mesh().get_coordinate()))
            assert torch.equal(d.to_local(), local)
            again = sw.DTensor.from_local(d.to_local(), mesh(), placements, shape=x.shape, stride=x.stride())
            assert torch.equal(again.full_tensor(), x)


@pytest.mark.parametrize("world", only([3, 6], [2, 3, 4, 6]))
def test_what_is_distributed_comes_back_bit_for_bit(ranks, world):
    ranks(world, _round_trips)


def _parts_of_one_element():
    axis = rank_mesh((2,), ("axis",))
    for dtype in (torch.complex64, torch.int16, torch.float8_e4m3fn, torch.float32):
        column = full(2, 3).to(dtype)[:, 0]
        repeated = column[:1].expand(2)
        for x in (column, repeated):
            for placement in (sw.Shard(0), sw.ZigZag(0), sw.Owner(1), sw.Replicate()):
                assert torch.equal(sw.distribute_tensor(x, axis, [placement]).full_tensor().view(x.dtype), x)
        one = column[:1].as_strided((1,), (3,))
        whole = sw.DTensor.from_local(one, axis, [sw.Replicate()], run_check=True)
        assert torch.equal(whole.to_local(), one)


def test_parts_of_one_element_travel_whatever_their_stride_says(ranks):
    """torch calls one element contiguous, and shows its bytes only at a stride of 1."""
    ranks(2, _parts_of_one_element)


def _redistributes():
    for shape in [(5, 7), (1, 3)]:
        x = full(*shape)
        for source, target in itertools.product(layouts_of(len(shape)), repeat=2):
            if any(p.is_partial() for p in target) and not any(p.is_partial() for p in source):
                continue
            d = place(x, source, requires_grad=True)
            moved = d.redistribute(placements=target)
            assert moved.placements == target
            close(moved, x, f"{source} -> {target}")
            weight = full(*shape, seed=9)
            (moved * sw.distribute_tensor(weight, mesh())).sum().backward()
            close(d.grad, weight, f"gradient of {source} -> {target}")


@pytest.mark.parametrize("world", only([3], [2, 3, 4]))
def test_redistribution_keeps_values_and_gradients(ranks, world):
    ranks(world, _redistributes)


def _unmoved():
    grid = rank_mesh((2, 2), ("a", "b"))
    x = full(8, 6)
    d = sw.distribute_tensor(x, grid, [sw.Shard(0), sw.Replicate()]).requires_grad_()
    for given in ([sw.Shard(0), theirs.Replicate()], {"a": sw.Shard(-2)}, {}, d.placements):
        same = d.redistribute(given) if isinstance(given, dict) else d.redistribute(grid, given)
        assert same is not d
        assert sw.layout_of(same) == sw.layout_of(d)
        assert same.to_local().data_ptr() == d.to_local().data_ptr()
        d.grad = None
        # The gradient of this product is replicated on `a` and must come back in the layout of `d`.
        weight = sw.distribute_tensor(full(8, 6, seed=1), grid)
        (same.redistribute({"a": sw.Replicate()}) * weight).sum().backward()
        assert sw.layout_of(d.grad) == sw.layout_of(d)
        close(d.grad, full(8, 6, seed=1), given)
    with torch.no_grad():
        assert not d.redistribute({}).requires_grad
    second = torch.autograd.grad((d.redistribute({}) ** 3).sum(), d, create_graph=True)[0].sum()
    close(torch.autograd.grad(second, d)[0], 6 * x, "second derivative")


def test_a_redistribution_that_moves_nothing_shares_memory_and_is_differentiable(ranks):
    ranks(4, _unmoved)


def _written_unmoved():
    """A write into what moved nowhere is one into what it came from, and so are the gradients."""
    grid = rank_mesh((2,), ("a",))
    ways = {
        "one": lambda x, placements: x.redistribute(grid, placements),
        "by name": lambda x, _: x.redistribute({}),
        "of a list": lambda x, placements: sw.redistribute_many([x], [placements])[0],
    }
    for (name, way), placement, writes in itertools.product(
        ways.items(), (sw.Shard(0), sw.Replicate()), (0, 1)
    ):
        x = sw.distribute_tensor(full(4), grid, [placement]).requires_grad_()
        one = full(4).requires_grad_()
        ours, wanted = [], []
        for leaf, move, found in ((x, way, ours), (one, lambda a, _: a.view_as(a), wanted)):
            first = leaf * 2
            pair = first, move(first, [placement])
            read = pair[1 - writes].sin()
            pair[writes].mul_(leaf)
            for made in pair:
                found += [made, *torch.autograd.grad(made.sum(), leaf, retain_graph=True)]
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(read.sum(), leaf)
        for mine, other in zip(ours, wanted, strict=True):
            close(mine, other, f"{name}, {placement}")


def test_what_moves_nowhere_is_a_view(ranks):
    ranks(2, _written_unmoved)


class _None(torch.autograd.Function):
    """A derivative that has nothing for its first argument."""

    @staticmethod
    def forward(ctx, first, second):
        return second * 2

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient * 2


class _Whole(torch.autograd.Function):
    """A derivative that gives the gradient whole."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient.redistribute({"a": sw.Replicate()})


def _gradients_unmoved():
    """The gradient of what did not move comes back in its layout, or not at all."""
    grid = rank_mesh((2,), ("a",))
    x, y = (sw.distribute_tensor(full(4), grid, [sw.Shard(0)]).requires_grad_() for _ in range(2))
    _None.apply(x.redistribute({}), y).sum().backward()
    assert x.grad is None
    seen = []
    inner = x * 2
    inner.register_hook(lambda gradient: seen.append(gradient.placements))
    _Whole.apply(inner.redistribute({})).sum().backward()
    assert seen == [(sw.Shard(0),)]


def test_gradients_of_what_did_not_move(ranks):
    ranks(2, _gradients_unmoved)


def _order_is_a_move():
    grid = rank_mesh((2, 2), ("a", "b"))
    x = full(6, 3)
    both = [sw.Shard(0), sw.Shard(0)]
    d = sw.distribute_tensor(x, grid).redistribute(grid, both, order=("b", "a"))
    assert sw.layout_of(d.redistribute({})) == sw.layout_of(d)
    left = d.redistribute(grid, both)
    assert sw.layout_of(left) != sw.layout_of(d)
    assert torch.equal(left.full_tensor(), x)


def test_a_list_of_placements_is_left_to_right_also_where_only_the_order_differs(ranks):
    ranks(4, _order_is_a_move)


def _to_pending():
    x = full(5, 7)
    d = sw.distribute_tensor(x, mesh(), [sw.Replicate()])
    for op in ("sum", "avg", "max", "min"):
        moved = d.redistribute(placements=[sw.Partial(op)])
        torch.testing.assert_close(moved.full_tensor(), x)


def test_a_finished_value_can_become_pending(ranks):
    ranks(2, _to_pending)


def _to_averages():
    axis = rank_mesh((2,), ("axis",))
    for x in (torch.full((4,), 60000.0).half(), torch.full((4,), 400.0).to(torch.float8_e4m3fn)):
        for placement in (sw.Shard(0), sw.Owner(0), sw.Replicate()):
            moved = sw.distribute_tensor(x, axis, [placement]).redistribute([sw.Partial("avg")])
            assert torch.equal(moved.full_tensor().float(), x.float()), placement


def test_terms_of_an_average_fit_in_a_narrow_type(ranks):
    """One term of n times the value, beside zeros, would not."""
    ranks(2, _to_averages)


@dataclasses.dataclass(frozen=True)
class _Weighed(sw.Pending):
    """The value is the sum of the terms, of which each coord's is weighed."""

    def combine(self, locals):  # noqa: A002  the name in sw.Pending
        return sum(term * (coord + 1) for coord, term in enumerate(locals)) / 2

    def embed(self, x, n, coord):
        return x * 2 if coord == 0 else torch.zeros_like(x)

    def identity(self, x):
        return torch.zeros_like(x)

    @property
    def linear(self):
        return True

    def in_domain(self, x):
        return x.is_floating_point()


def _to_weighed_terms():
    axis, other = rank_mesh((3,), ("axis",)), rank_mesh((3,), ("other",))
    x = full(5, 7)
    for placement in (sw.Shard(0), sw.ZigZag(1), sw.Owner(1), sw.Partial(), sw.Replicate()):
        d = sw.distribute_tensor(x, axis, [placement])
        torch.testing.assert_close(d.redistribute([_Weighed()]).full_tensor(), x)
        torch.testing.assert_close(d.redistribute(other, [_Weighed()]).full_tensor(), x)
        written = sw.distribute_tensor(torch.zeros(5, 7), axis, [_Weighed()])
        written[1:3] = d[1:3]
        torch.testing.assert_close(written.full_tensor()[1:3], x[1:3])


def test_a_value_becomes_terms_that_are_weighed(ranks):
    """Zeros are what its combine ignores, and a part beside them is not the value."""
    ranks(3, _to_weighed_terms)


def _mappings():
    grid = mesh()
    x = full(6, 4)
    d = sw.distribute_tensor(x, grid, {"tp": sw.Shard(1)})
    assert d.placements == (sw.Replicate(), sw.Shard(1))
    e = d.redistribute({"dp": sw.Shard(0)})
    assert e.placements == (sw.Shard(0), sw.Shard(1))
    assert torch.equal(e.full_tensor(), x)
    f = sw.DTensor.from_local(e.to_local(), grid, {"tp": sw.Shard(1), "dp": sw.Shard(0)})
    assert torch.equal(f.full_tensor(), x)
    g = sw.distribute_tensor(x, grid, {"dp": sw.Shard(0), "tp": sw.Shard(0)}, order=("tp", "dp"))
    assert torch.equal(g.full_tensor(), x)
    assert str(sw.layout_of(g)) == "f32[6@(tp, dp), 4]"
    h = g.redistribute({"tp": sw.Replicate()})
    assert torch.equal(h.full_tensor(), x)
    with sw.init_device_mesh("cpu", (4,), mesh_dim_names=("all",)):
        assert sw.distribute_tensor(x).placements == (sw.Replicate(),)


def test_placements_may_be_named_by_axis(ranks):
    ranks(4, _mappings)


def _orders():
    """tp first with uneven lengths: the rows of a rank are those that the order says, whatever moves."""
    grid = mesh()
    x = full(7, 3)
    for source in itertools.permutations(("dp", "tp")):
        d = sw.distribute_tensor(x, grid, [sw.Shard(0), sw.Shard(0)], order=source)
        assert torch.equal(d.full_tensor(), x)
        for target in itertools.permutations(("dp", "tp")):
            moved = d.redistribute(placements=[sw.Shard(0), sw.Shard(0)], order=target)
            assert sw.layout_of(moved).order_names == target
            assert torch.equal(moved.full_tensor(), x)
            assert torch.equal(moved.to_local(), sw.layout_of(moved).split(x, tuple(grid.get_coordinate())))
        assert torch.equal((d * 2 + 1).full_tensor(), x * 2 + 1)
        assert torch.equal((d.t() * 2).full_tensor(), x.t() * 2)


@pytest.mark.parametrize("world", only([4], [4, 6]))
def test_the_order_of_application_is_part_of_a_layout(ranks, world):
    ranks(world, _orders)


def _gradients_of_from_local():
    """torch's conventions: the local gradient has the placements of the value, pending ones finished."""
    grid = rank_mesh((2,), ("tp",))
    rank = dist.get_rank()
    for placement, expected in [
        (sw.Replicate(), torch.full((2, 3), 3.0)),
        (sw.Shard(0), torch.full((2, 3), 3.0)),
        (sw.Partial("sum"), torch.full((2, 3), 3.0)),
    ]:
        for kind in (sw.DTensor, theirs.DTensor):
            local = torch.ones(2, 3, requires_grad=True)
            d = kind.from_local(local, grid, [placement])
            (d * 3.0).sum().full_tensor().backward() if kind is theirs.DTensor else (d * 3.0).sum().backward()
            assert torch.equal(local.grad, expected), (placement, kind)
    local = torch.ones(2, 3, requires_grad=True)
    d = sw.DTensor.from_local(local, grid, [sw.Replicate()])
    out = d.to_local(grad_placements=[sw.Partial("sum")])
    (out * (rank + 1)).sum().backward()
    assert torch.equal(local.grad, torch.full((2, 3), 3.0)), "terms 1 and 2 are added for a replicated value"
    local = torch.ones(2, 3, requires_grad=True)
    d = sw.DTensor.from_local(local, grid, [sw.Replicate()], grad_placements=[sw.Partial("sum")])
    d.to_local(grad_placements=[sw.Partial("sum")]).mul(rank + 1).sum().backward()
    assert torch.equal(local.grad, torch.full((2, 3), rank + 1.0)), "left pending: nothing is added"
    local = torch.ones(2, 3, requires_grad=True)
    sw.DTensor.from_local(local, grid, [sw.Replicate()]).to_local().sum().backward()
    assert torch.equal(local.grad, torch.ones(2, 3)), "a replicated gradient is taken at its word"


def test_gradients_of_from_local_and_to_local_follow_torch(ranks):
    ranks(2, _gradients_of_from_local)


def _parts_of_another_shape():
    grid = rank_mesh((2,), ("tp",))
    rows, whole = [sw.Shard(0)], [sw.Partial("sum")]
    for requires in (True, False):
        d = place(full(4, 6), rows, requires_grad=requires)
        mapped = sw.local_map(torch.sin, rows, in_grad_placements=(whole,), device_mesh=grid)
        local = d.detach().to_local().requires_grad_(requires)
        for stated in (whole, [sw.Replicate()], [sw.Shard(1)]):
            with pytest.raises(LayoutError, match=r"the part \(2, 6\) of f32\[4@tp, 6\] would"):
                d.to_local(grad_placements=stated)
            with pytest.raises(LayoutError, match="grad_placements: the part"):
                sw.DTensor.from_local(local, grid, rows, grad_placements=stated)
        with pytest.raises(LayoutError, match="grad_placements: the part"):
            mapped(d)
    d = place(full(4, 6), rows, requires_grad=True)
    d.to_local(grad_placements=[sw.ZigZag(0)]).sum().backward()
    assert d.grad.placements == (sw.ZigZag(0),)


def test_a_gradient_whose_parts_have_another_shape_is_refused_where_it_is_stated(ranks):
    """`local_map` made a pending gradient of rows of it; others failed in a backward."""
    ranks(2, _parts_of_another_shape)


def _gradient_of_full_tensor():
    grid = rank_mesh((2,), ("tp",))
    for placement in placements_of(2):
        d = place(full(5, 7), [placement], requires_grad=True)
        (d.full_tensor() * 2).sum().backward()
        close(d.grad, torch.full((5, 7), 2.0), str(placement))
        e = place(full(5, 7), [placement], requires_grad=True)
        (e.full_tensor(grad_placements=[sw.Partial("sum")]) * 2).sum().backward()
        close(e.grad, torch.full((5, 7), 4.0), f"{placement}, terms of two ranks")
    assert grid.size() == 2


def test_the_gradient_of_a_full_tensor_is_replicated_unless_said_otherwise(ranks):
    ranks(2, _gradient_of_full_tensor)


def _beside_torchs():
    """torch's DTensor and ours in one expression, in both orders, with gradients into both."""
    grid = rank_mesh((2,), ("tp",))
    x, w = full(5, 7), full(7, 4, seed=1)
    want_x, want_w = x.clone().requires_grad_(), w.clone().requires_grad_()
    (want_x @ want_w).square().sum().backward()
    for p, q in itertools.product(placements_of(2, pending=False), repeat=2):
        for first, second in ((sw, theirs), (theirs, sw)):
            dx = first.distribute_tensor(x.clone(), grid, [p]).requires_grad_()
            dw = second.distribute_tensor(w.clone(), grid, [q]).requires_grad_()
            out = dx @ dw
            assert isinstance(out, sw.DTensor)
            out.square().sum().backward()
            close(dx.grad, want_x.grad)
            close(dw.grad, want_w.grad)
            local = torch.ones(3, 7, requires_grad=True)
            mixed = theirs.DTensor.from_local(local, grid, [theirs.Shard(0)]) @ sw.distribute_tensor(
                w, grid, [q]
            )
            mixed.sum().backward()
            close(local.grad, w.sum(1).expand(3, 7))


def test_torchs_own_tensors_mix_with_ours(ranks):
    ranks(2, _beside_torchs)


def _constructed():
    """Law: the class takes a spec, one of torch's own too, orders of application included."""
    grid, x = rank_mesh((2, 2), ("dp", "tp")), full(8, 3)
    strided = theirs.placement_types._StridedShard(0, split_factor=2)
    for placements in ([theirs.Shard(0), theirs.Shard(1)], [strided, theirs.Shard(0)]):
        torchs = theirs.distribute_tensor(x, grid, placements)
        leaf = sw.DTensor(torchs.to_local().clone(), torchs._spec, requires_grad=True)
        assert leaf.is_leaf
        assert sw.layout_of(leaf) == sw.layout_of(torchs)
        again = sw.DTensor(leaf.detach().to_local(), leaf._spec, requires_grad=False)
        close(again, x)
        (leaf * 3).square().sum().backward()
        close(leaf.grad, 18 * x)


def test_the_class_takes_a_local_tensor_and_a_spec(ranks):
    ranks(4, _constructed)


def _factories():
    grid = mesh()
    for make, reference in ((sw.zeros, torch.zeros), (sw.ones, torch.ones)):
        for placements in layouts_of(2):
            d = make(5, 7, device_mesh=grid, placements=placements)
            assert isinstance(d, sw.DTensor)
            assert torch.equal(d.full_tensor(), reference(5, 7)), placements
            assert make((5, 7), device_mesh=grid, placements={}).placements == (sw.Replicate(),) * grid.ndim
    d = sw.full((3, 2), 7, device_mesh=grid, placements={"tp": sw.Shard(0)}, requires_grad=False)
    assert d.dtype == torch.int64
    assert torch.equal(d.full_tensor(), torch.full((3, 2), 7))
    assert sw.empty(4, 3, device_mesh=grid, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert sw.empty(4, 3, device_mesh=grid, layout=torch.strided).layout is torch.strided
    for make in (sw.zeros, sw.ones, sw.empty, sw.rand, sw.randn, partial(sw.full, fill_value=1)):
        with pytest.raises(LayoutError, match="sparse_coo: a factory"):
            make((4, 3), device_mesh=grid, layout=torch.sparse_coo)
    for make, reference in ((sw.rand, torch.rand), (sw.randn, torch.randn)):
        for placements in layouts_of(2, pending=False):
            torch.manual_seed(3)
            d = make(5, 7, device_mesh=grid, placements=placements, requires_grad=True)
            after = torch.rand(1)
            torch.manual_seed(3)
            assert torch.equal(d.full_tensor(), reference(5, 7))
            assert torch.equal(after, torch.rand(1)), "the generator stands where one device's stands"
            assert d.is_leaf
            assert d.requires_grad


@pytest.mark.parametrize("world", only([2], [2, 4]))
def test_factories_make_the_tensors_of_one_device(ranks, world):
    ranks(world, _factories)


def _sources():
    """Only the source rank's values count; with None every rank's own."""
    grid = rank_mesh((2,), ("tp",))
    x = torch.full((4,), float(dist.get_rank()))
    assert torch.equal(sw.distribute_tensor(x, grid, [sw.Shard(0)]).full_tensor(), torch.zeros(4))
    one = sw.distribute_tensor(x, grid, [sw.Shard(0)], src_data_rank=1).full_tensor()
    assert torch.equal(one, torch.ones(4))
    own = sw.distribute_tensor(x, grid, [sw.Shard(0)], src_data_rank=None).full_tensor()
    assert torch.equal(own, torch.tensor([0.0, 0.0, 1.0, 1.0]))
    checked = sw.DTensor.from_local(x, grid, [sw.Replicate()], run_check=True)
    assert torch.equal(checked.to_local(), torch.zeros(4))
    # What the others had plays no part in what they are given, nor in the gradient.
    far = torch.tensor([1.0, 3.0]) if dist.get_rank() == 0 else torch.tensor([1e8, float("inf")])
    leaf = far.clone().requires_grad_()
    told = sw.DTensor.from_local(leaf, grid, [sw.Replicate()], run_check=True)
    assert torch.equal(told.to_local(), torch.tensor([1.0, 3.0]))
    (told * told).sum().backward()
    assert torch.equal(leaf.grad, torch.tensor([2.0, 6.0]))


def test_the_values_are_those_of_the_source_rank(ranks):
    ranks(2, _sources)


_CUTS = (sw.Shard(0), sw.Shard(-1), sw.Interleaved(0, 2), sw.ZigZag(0), sw.Owner(1), sw.Ragged((1, 2)))


def _part_by_part(many):
    """Law: a rank gets its part of what the source has; of a cut no rank is sent what others hold."""
    distribute._MANY = many
    grid = mesh()
    whole = full(6, 5)
    given = {
        "row-major": whole,
        "turned": whole.t(),
        "empty": whole[:, :0],
        "bool": whole > 0,
        "complex": torch.complex(whole, -whole),
        "conjugate": torch.complex(whole, -whole).conj(),
        "bfloat16": whole.bfloat16(),
    }
    other = [sw.Replicate(), sw.Shard(0), sw.Partial()][: 1 if grid.ndim == 1 else 3]
    for (name, x), cut, beside, source in itertools.product(given.items(), _CUTS, other, (0, 1)):
        if beside.is_partial() and not x.is_floating_point():
            continue
        placements = [beside, cut][-grid.ndim :]
        here = tuple(grid.get_coordinate()) == (source,) * grid.ndim
        mine = x if here else torch.empty_like(x).fill_(7)
        d = sw.distribute_tensor(mine, grid, placements, src_data_rank=source)
        wanted = placed(x, grid, placements)
        where = f"{name} {placements} from {source}"
        assert sw.layout_of(d) == sw.layout_of(wanted), where
        assert torch.equal(d.to_local(), wanted.to_local()), where
        # Of a pending value the plain split is a view of the whole; what is received has memory of its own.
        assert beside.is_partial() or d.to_local().stride() == wanted.to_local().stride(), where
        assert torch.equal(mine, x if here else torch.full_like(mine, 7)), where
    turned = {"order": ("tp", "dp")} if grid.ndim == 2 else {}
    d = sw.distribute_tensor(full(7, 3), grid, [sw.Shard(0)] * grid.ndim, **turned)
    assert torch.equal(d.to_local(), sw.layout_of(d).split(full(7, 3), tuple(grid.get_coordinate())))


@pytest.mark.parametrize("many", [64, 2], ids=["part by part", "all of it to many ranks"])
@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_is_sent_its_part_of_what_the_source_has(ranks, world, many):
    ranks(world, _part_by_part, many, fresh=many == 2)


def _sends_of(rows):
    """How a matrix of that many rows goes along an axis of 64 ranks, of which this process is one."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=64, store=FakeStore())
    with mock.patch.object(dist, "scatter") as scatter, mock.patch.object(dist, "broadcast") as broadcast:
        sw.distribute_tensor(torch.ones(rows, 4), sw.init_device_mesh("cpu", (64,)), [sw.Shard(0)])
    return scatter.call_count, broadcast.call_count


def test_many_ranks_are_told_a_little_by_a_tree(ranks):
    """63 messages of a few bytes leave one rank one after another; larger parts are worth theirs."""
    assert ranks(1, _sends_of, 64, fresh=True) == [(0, 1)]
    assert ranks(1, _sends_of, 64 * 32, fresh=True) == [(1, 0)]


def _sent(placements):
    with sw.trace() as seen:
        sw.distribute_tensor(full(8, 6), mesh(), placements)
    return [event.op for event in seen.collectives], seen.bytes


def test_distributing_sends_parts_of_what_is_cut(ranks):
    """On a mesh of 2 x 2: nobody sends values that are not the source's, and cut axes come first."""
    half = 8 * 6 * 4 // 2
    both = ranks(4, _sent, [sw.Shard(0), sw.Shard(1)])
    assert both == [
        (["scatter"] * 2, half + half // 2),
        (["scatter"], 0),
        (["scatter"] * 2, half // 2),
        (["scatter"], 0),
    ]
    beside = ranks(4, _sent, [sw.Replicate(), sw.Shard(1)])
    ops = ["scatter", "broadcast"]
    assert beside == [(ops, 2 * half), (ops, half), (["broadcast"], 0), (["broadcast"], 0)]


def _text(call, kind=LayoutError):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def _refusals():
    grid = mesh()
    x = full(6, 4)
    d = sw.distribute_tensor(x, grid, {"tp": sw.Shard(0)})
    other = rank_mesh((4,), ("all",))
    return {
        "count": _text(lambda: sw.distribute_tensor(x, grid, [sw.Shard(0)])),
        "leaf before count": _text(
            lambda: sw.distribute_tensor(x.clone().requires_grad_() * 2, grid, [sw.Shard(0)])
        ),
        "other mesh": _text(lambda: sw.distribute_tensor(d, other, [sw.Shard(0)])),
        "axis": _text(lambda: d.redistribute({"pp": sw.Shard(0)})),
        "dim": _text(lambda: sw.distribute_tensor(x, grid, {"tp": sw.Shard(2)}), ValueError),
        "unnamed": _text(lambda: sw.DTensor.from_local(x, grid, {"tp": sw.Shard(0)})),
        "history": _text(lambda: sw.distribute_tensor(x.clone().requires_grad_() * 2, grid)),
        "already": _text(lambda: sw.distribute_tensor(d, grid, [sw.Shard(0), sw.Replicate()])),
        "local shape": _text(
            lambda: sw.DTensor.from_local(x, grid, [sw.Shard(0), sw.Replicate()], shape=(6, 4), stride=(4, 1))
        ),
        "no placements": _text(d.redistribute),
        "two meshes": _text(lambda: d + sw.distribute_tensor(x, other, [sw.Replicate()]), RuleError),
        "plain": _text(lambda: d + x, RuleError),
        "no tensor": _text(lambda: sw.DTensor.from_local([1.0], grid, [sw.Replicate()] * 2)),
        "stride alone": _text(lambda: sw.DTensor.from_local(x, grid, [sw.Replicate()] * 2, stride=(4, 1))),
    }


def test_bad_input_is_refused_with_what_and_why(ranks):
    texts = ranks(4, _refusals)[0]
    assert texts["count"] == (
        "1 placements for a mesh of 2 axes ('dp', 'tp'), which must have the same length: give one per axis, "
        "or a mapping {axis name: placement}"
    )
    assert texts["leaf before count"] == texts["history"]
    assert "distribute leaf tensor" in texts["history"]
    assert "to a different device mesh" in texts["other mesh"]
    assert "to a different placements" in texts["already"]
    assert texts["axis"] == "the mesh has no axis 'pp'; its axes are ('dp', 'tp')"
    assert "2" in texts["dim"]
    assert texts["unnamed"] == "no placement for axis 'dp': every axis of ('dp', 'tp') must be named here"
    assert "use DTensor.from_local" in texts["history"]
    assert "use redistribute to move it" in texts["already"]
    assert "local tensor of shape (6, 4)" in texts["local shape"]
    assert texts["no placements"].startswith("redistribute needs placements")
    assert "was given a list" in texts["no tensor"]
    assert "different meshes" in texts["two meshes"]
    assert "sw.distribute_tensor" in texts["plain"]
    assert "sw.DTensor.from_local" in texts["plain"]
    assert "sw.spmd(mesh)" in texts["plain"]
    assert texts["stride alone"].startswith("from_local: stride=(4, 1) without a shape")
    assert issubclass(LayoutError, RuntimeError)  # some of these are one in torch, the others a ValueError
    assert issubclass(ParallelError, RuntimeError)


def _dtypes():
    """forward_dtype and backward_dtype: cast before each move."""
    grid = rank_mesh((2,), ("tp",))
    d = sw.distribute_tensor(full(4, 4), grid, [sw.Shard(0)]).requires_grad_()
    out = d.redistribute(placements=[sw.Replicate()], forward_dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out.full_tensor(), full(4, 4).bfloat16())
    out.sum().backward()
    assert d.grad.dtype == torch.float32


def test_a_redistribution_can_cast(ranks):
    ranks(2, _dtypes)


_WHOLE = [sw.Owner(0), sw.Owner(1), sw.Shard(0), sw.Ragged((2, 0)), sw.BlockCyclic(0, 4), sw.Partial()]
_SOURCES = [sw.Replicate(), sw.Shard(0), sw.Partial(), sw.Partial("max"), sw.Owner(0)]


def _moved_and_written():
    """Law: what is written into a moved tensor reaches its source on no rank."""
    mesh, other = rank_mesh((2,), ("tp",)), rank_mesh((2,), ("dp",))
    ways = {
        "alone": lambda x, target: x.redistribute({"tp": target}),
        "many": lambda x, target: sw.redistribute_many([x, x], [[target], [target]])[0],
        "later": lambda x, target: x.redistribute({"tp": target}, async_op=True),
        "between": lambda x, target: x.redistribute(other, [target]),
    }
    for rows in (1, 3):
        for source in _SOURCES:
            for target in _WHOLE:
                for name, way in ways.items():
                    if source == target:
                        continue
                    x = sw.distribute_tensor(torch.ones(rows), mesh, [source])
                    own = x.to_local().clone()
                    for _ in range(2):  # the second is a known move
                        way(x, target).zero_()
                        assert torch.equal(x.to_local(), own), (name, rows, source, target)
    leaf = sw.distribute_tensor(torch.ones(3), mesh, [sw.Replicate()]).requires_grad_()
    kept = leaf.exp()
    kept.redistribute({"tp": sw.Owner(0)}).mul_(0)
    kept.sum().backward()
    assert torch.equal(leaf.grad.to_local(), torch.ones(3).exp())


def test_a_moved_tensor_has_memory_of_its_own_on_every_rank(ranks):
    ranks(2, _moved_and_written)
