"""What comes back of an erased function takes part in the program around it as the call's own results do."""

import copy
import gc
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.grads import GradientSynchronizer
from shardwright.parallel import parallelize_fsdp, parallelize_replicate
from shardwright.testing.meshes import rank_mesh

from .programs import assert_equal, assert_replayed, batches, block, full, placed


def _mesh():
    return rank_mesh((dist.get_world_size(),), ("tp",))


def _on_mesh(x, placement=None):
    return sw.distribute_tensor(x, _mesh(), {"tp": placement or sw.Shard(0)})


def _in_a_graph():
    """Arguments with a graph of their own, two backwards that add up, one result in the next call."""
    torch.manual_seed(0)
    w, batch = torch.randn(6, 6), torch.randn(4, 6)

    def layer(x, w):
        return torch.tanh(x @ w)

    one = w.clone().requires_grad_()
    ours = sw.distribute_tensor(w, _mesh(), {"tp": sw.Replicate()}).requires_grad_()
    fast = sw.erase(layer)
    for turn in range(3):
        x = batch + turn
        layer(layer(x * one[0], one), one).sum().backward()
        fast(fast(_on_mesh(x) * ours[0], ours), ours).sum().backward()
        assert_equal(ours.grad, one.grad)
    assert fast.report().replays >= 4, str(fast.report())


def test_results_are_part_of_the_graph_around(ranks):
    ranks(2, _in_a_graph)


_GIVES = {
    "what it was given times its sum": lambda t, w: t * t.sum(),
    "several": lambda t, w: (t * w, t.exp()),
    "as it is": lambda t, w: t * 1.0,
    "its argument, written": lambda t, w: t.mul_(w).sin(),
}


def _derivatives(function, x, w):
    """The value, and three derivatives of it."""
    t = x * w
    made = function(t, w)
    value = sum(y.square().sum() for y in (made if isinstance(made, tuple) else [made])) + t.square().sum()
    found = [value]
    for _ in range(3):
        found += torch.autograd.grad(value, [x, w], create_graph=True)
        value = sum(g.square().sum() for g in found[-2:])
    return found


def _again():
    torch.manual_seed(0)
    values = torch.rand(4), torch.rand(4)
    for placement in (sw.Replicate(), sw.Shard(0)):
        for name, function in _GIVES.items():
            placed = [_on_mesh(x, placement).requires_grad_() for x in values]
            ours = _derivatives(sw.erase(function), *placed)
            wanted = _derivatives(function, *(x.clone().requires_grad_() for x in values))
            for one, other in zip(ours, wanted, strict=True):
                torch.testing.assert_close(full(one), other, msg=f"{name}, {placement}")


def test_a_call_that_is_no_replay_is_differentiated_as_often_as_asked(ranks):
    """Its first derivative ended at its arguments, and the second was one of a part."""
    ranks(2, _again)


def _of_one_base():
    """Arguments that are views of one tensor: a write into one of them reaches the graphs of the others."""

    def writes(t, u):
        t.mul_(2)
        return u.sum()

    def reads(t, u):
        return (t.exp()[:2] * u[:2]).sum()

    views = {
        "view and base": lambda a: (a[1:], a),
        "base and view": lambda a: (a, a[1:]),
        "two views": lambda a: (a[1:], a[:3]),
        "one twice": lambda a: (a, a),
    }
    for placement in (sw.Shard(0), sw.Replicate()):
        for (name, view), function in itertools.product(views.items(), (writes, reads)):
            fast = sw.erase(function)
            one = torch.arange(1.0, 5.0).requires_grad_()
            ours = _on_mesh(one.detach(), placement).requires_grad_()
            for _ in range(3):
                found = []
                for leaf, call in ((ours, fast), (one, function)):
                    a = leaf * leaf
                    made = call(*view(a))
                    found.append(torch.autograd.grad(made + (a * 3).sum(), leaf)[0])
                torch.testing.assert_close(full(found[0]), found[1], msg=f"{name}, {placement}")


def test_arguments_that_are_views_of_one_tensor_stay_so(ranks):
    ranks(2, _of_one_base)


class _Apart(torch.autograd.Function):
    """The same memory, with a graph of its own."""

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 5


def _of_one_memory():
    """A recording of views of one tensor is none of tensors that share its memory alone."""

    def function(t, u):
        return (t.exp()[:2] * u[:2]).sum()

    fast = sw.erase(function)
    one = torch.arange(1.0, 5.0).requires_grad_()
    ours = _on_mesh(one.detach(), sw.Replicate()).requires_grad_()
    for other in (lambda a: a, lambda a: a, _Apart.apply, lambda a: a):
        found = []
        for leaf, call in ((ours, fast), (one, function)):
            a = leaf * leaf
            found.append(torch.autograd.grad(call(a[1:], other(a)), leaf)[0])
        torch.testing.assert_close(full(found[0]), found[1])
    assert fast.report().replays >= 2, str(fast.report())


def test_what_shares_memory_alone_is_no_view(ranks):
    ranks(2, _of_one_memory)


def _written_results():
    """A result that its own backward reads, written before it: an error, as on one device."""
    for function in (torch.exp, torch.sigmoid, lambda x: torch.softmax(x, 0), lambda x: x.exp()[1:]):
        fast, x = sw.erase(function), _on_mesh(torch.ones(4)).requires_grad_()
        for _ in range(2):
            (fast(x * 2) * 3).sum().backward()
        for write in (lambda y: y.mul_(2), lambda y: y[:1].zero_(), torch.relu_):
            made = fast(x * 2)
            write(made)
            with pytest.raises(RuntimeError, match=r"in ?place"):
                made.sum().backward()
        assert fast.report().replays > 3
    fast = sw.erase(lambda x: x * 2)  # it reads none
    for _ in range(3):
        made = fast(x * 2).add_(1)
        made.sum().backward()


def test_results_that_a_backward_reads_are_watched(ranks):
    ranks(2, _written_results)


def _in_other_ways():
    """Many gradients at once, and derivatives forward."""
    x = _on_mesh(torch.arange(4.0)).requires_grad_()

    def function(t):
        return t.sin() * t.sum()

    def many(call):
        return torch.autograd.grad(
            call(x * 2), x, torch.stack([x.detach(), x.detach() * 2]), is_grads_batched=True
        )

    def forward(call):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x * 2, x.detach().cos())
            return (torch.autograd.forward_ad.unpack_dual(call(dual)).tangent,)

    for way in (many, forward):
        torch.testing.assert_close(full(way(sw.erase(function))[0]), full(way(function)[0]))
    fast = sw.erase(function)
    fast(x * 2).sum().backward()
    assert torch.equal(full(forward(fast)[0]), full(forward(function)[0]))
    with pytest.raises(sw.errors.EraseError, match="no backward for many gradients at once"):
        many(fast)


def test_gradients_in_batches_and_forward(ranks):
    ranks(2, _in_other_ways)


def _two_results():
    """Gradients of the pattern that was recorded; another one is an error, never a wrong gradient."""
    w = _on_mesh(torch.ones(4, 4), sw.Replicate()).requires_grad_()

    def both(x):
        return x @ w, (x * 2 @ w).sum()

    fast = sw.erase(both)
    x = _on_mesh(torch.ones(4, 4))
    for _ in range(3):
        first, second = fast(x)
        (first.sum() + second).backward()
    assert_equal(w.grad, torch.full((4, 4), 3 * 3 * 4.0))
    first, _ = fast(x)
    with pytest.raises(sw.errors.EraseError, match="recorded with a gradient for a result"):
        first.sum().backward()
    assert_replayed(fast, 1, 3)


def test_a_backward_of_other_results_than_recorded_is_refused(ranks):
    ranks(2, _two_results)


def _other_backwards():
    w = _on_mesh(torch.ones(4, 4), sw.Replicate()).requires_grad_()
    fast = sw.erase(lambda x: (x @ w).exp())
    x = _on_mesh(torch.ones(4, 4)).requires_grad_()
    for _ in range(2):
        fast(x).sum().backward()
    out = fast(x)
    with pytest.raises(sw.errors.EraseError, match="no second derivative"):
        torch.autograd.grad(out.sum(), w, create_graph=True)
    out = fast(x)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="written in place"):
        out.sum().backward()
    # Another layout of the gradient than the one that was recorded.
    w.grad = None
    (fast(x) * _on_mesh(torch.ones(4, 4), sw.Shard(1))).sum().backward()
    other = torch.full((4, 4), 2.0).requires_grad_()
    (torch.ones(4, 4) @ other).exp().sum().backward()
    assert_equal(w.grad, other.grad)


def test_backwards_that_a_replay_has_not_are_errors(ranks):
    ranks(2, _other_backwards)


def _gradients_of_arguments():
    """A backward inside sets the gradients of tensors that were given, and adds to those that they had."""

    def inside(x, y=None):
        loss = (x * 2).sin().sum() if y is None else (x * y).sum()
        loss.backward()
        return loss.detach()

    fast = sw.erase(inside)
    for turn in range(8):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(turn)).requires_grad_()
        given = _on_mesh(x.detach()).requires_grad_()
        for one in (x, given) if turn >= 4 else ():
            one.grad = torch.ones_like(one)
        before = given.grad
        assert_equal(fast(given), inside(x))
        assert_equal(given.grad, x.grad)
        assert before is None or before is given.grad
    assert_replayed(fast, 2, 6)
    for turn in range(3):  # of each that wants one
        one = torch.full((4,), 3.0)
        x, y = one.clone().requires_grad_(), one.clone().requires_grad_()
        given = [_on_mesh(t.detach()).requires_grad_(t is not x or turn < 2) for t in (x, y)]
        fast(*given)
        assert_equal(given[1].grad, one)
        assert (given[0].grad is None) == (turn == 2)


def test_a_backward_inside_gives_gradients_to_arguments(ranks):
    ranks(2, _gradients_of_arguments)


def _leaves_made_inside():
    """A leaf that is made, flags, shapes and memory that change: a replay leaves none; such calls run."""

    def leaf(x):
        return (x.detach() * 2).requires_grad_()

    def thaws(x):
        return x.requires_grad_().detach() * 2

    def views(x):
        with torch.no_grad():
            view = x.view(2, 2)
        return view.mT

    def reshapes(x):
        return x.unsqueeze_(0) * 1

    def moves(x):
        x.data = x.data * 2
        return x * 1

    for function, wants in ((leaf, False), (thaws, False), (views, True), (reshapes, False), (moves, False)):
        fast = sw.erase(function)
        for _ in range(3):
            one = torch.ones(4).requires_grad_(wants)
            given = _on_mesh(one.detach(), sw.Replicate()).requires_grad_(wants)
            found, wanted = fast(given), function(one)
            assert found.requires_grad == wanted.requires_grad
            assert found.is_leaf == wanted.is_leaf
            assert given.requires_grad == one.requires_grad
            assert_equal(given, one)
        assert_replayed(fast, 0, 0)
        assert "not recorded" in str(fast.report())


def test_leaves_and_flags_that_a_call_leaves_are_refused(ranks):
    ranks(2, _leaves_made_inside)


def _tokens():
    """Tables and losses over cut rows ask on the host whether numbers are in range: replays ask it too.

    Gradients of the calls add up.
    """
    mesh = rank_mesh((2,), ("tp",))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10))
    plan = {"*.weight": {"tp": sw.Shard(0)}, "1.bias": {"tp": sw.Shard(0)}}
    model = sw.distribute_module(copy.deepcopy(plain), mesh, plan)

    def step(of, tokens):
        loss = nn.functional.cross_entropy(of(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        return loss  # its graph is used up

    def on_ranks(tokens):
        with sw.spmd(mesh, check=False):
            return step(model, tokens)

    fast = sw.erase(on_ranks)
    for turn in range(5):
        tokens = torch.randint(10, (2, 6), generator=torch.Generator().manual_seed(turn))
        assert_equal(fast(tokens), step(plain, tokens))
        for one, two in zip(model.parameters(), plain.parameters(), strict=True):
            assert_equal(one.grad, two.grad)
    assert fast.report().replays >= 2, str(fast.report())
    replays, wrong = fast.report().replays, torch.full((2, 6), 10)
    with pytest.raises(RuntimeError, match="out of bounds for dimension with size 10"):
        fast(wrong)
    assert fast.report().replays == replays + 1
    with pytest.raises(IndexError, match="index 10 is out of bounds"):
        sw.erase(on_ranks)(wrong)


def test_steps_that_read_tokens_are_replayed(ranks):
    ranks(2, _tokens)


def _buffers():
    """What a forward writes into buffers, and the mode of evaluation."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    model, _ = placed(plain, "batch", dist.get_world_size())
    fast = sw.erase(model)
    for turn in range(6):
        for module in (plain, model):
            module.train(turn < 4)
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(turn))
        wanted = plain(x)
        found = fast(_on_mesh(x))
        assert_equal(found, wanted)
        if turn < 4:
            wanted.sum().backward()
            found.sum().backward()
    for found, wanted in zip(model.buffers(), plain.buffers(), strict=True):
        assert_equal(found, wanted)


def test_buffers_are_written_in_place(ranks):
    ranks(2, _buffers)


def _many():
    fast = sw.erase(lambda x, s: x * s, most=3)
    x = _on_mesh(torch.ones(4))
    for s in range(3):
        assert_equal(fast(x, float(s)), torch.full((4,), float(s)))
    with pytest.warns(UserWarning, match="3 recordings, and none holds"):
        assert_equal(fast(x, 7.0), torch.full((4,), 7.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equal(fast(x, 8.0), torch.full((4,), 8.0))
    assert_equal(fast(x, 1.0), torch.ones(4))
    report = fast.report()
    assert (report.recordings, report.replays) == (3, 1)
    assert "3 recordings already" in str(report)


def test_recordings_are_bounded_and_say_so_once(ranks):
    ranks(2, _many)


def _uneven():
    """Rank 0 meets a new size while rank 1 replays: they send the same, and nobody waits."""
    rank, world = dist.get_rank(), dist.get_world_size()
    plain = block()
    model, _ = placed(plain, "batch", 1) if world == 1 else (block(), None)
    parallelize_replicate(model, rank_mesh((world,), ("dp",)))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    synchronizer = GradientSynchronizer(model)

    def step(x):
        optimizers[1].zero_grad()
        (model(x).pow(2).sum() / COUNT).backward()
        synchronizer.synchronize()
        optimizers[1].step()

    fast = sw.erase(step)
    for rows, long in zip((4, 4, 5, 4, 5, 3), batches(6, (5, 6, 16)), strict=True):
        batch = long[:rows]
        optimizers[0].zero_grad()
        (plain(batch).pow(2).sum() / COUNT).backward()
        optimizers[0].step()
        fast(batch[:-2] if rank == 0 else batch[-2:])
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p), q, rtol=1e-4, atol=1e-5)
    return str(fast.report())


COUNT = 4 * 6 * 16


_ALIASES = {
    "written": lambda a, b: [a.mul_(2) * a],
    "a view of it written": lambda a, b: [b * a, a[1:].mul_(3)],
    "another written with it": lambda a, b: [b[1:].mul_(a[1:]) * b[:1]],
    "a view of it": lambda a, b: [a * 2, a[1:]],
    "views of another result": lambda a, b: [(c := a.sin()), c.view(-1), c[1:].T],
    "written without a gradient": lambda a, b: [(_doubled(b) * a).sin()],
}


@torch.no_grad()
def _doubled(x):
    return x.mul_(2)


def _aliases():
    """What a call writes of its arguments, and what it returns of their memory, is a part of their graphs."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def gradient(function, place, *, of_view):
        leaf = place(x).requires_grad_()
        base, b = leaf * 1, place(x)
        results = function(base.view(4, 6) if of_view else base, b)
        for view in results[1:]:
            view.mul_(3)
        return torch.autograd.grad(sum(y.square().sum() for y in (base, b, *results)), leaf)[0]

    for function, of_view in itertools.product(_ALIASES.values(), (False, True)):
        fast = sw.erase(function)
        for _ in range(4):
            wanted = gradient(function, torch.clone, of_view=of_view)
            assert_equal(gradient(fast, _on_mesh, of_view=of_view), wanted)
    assert fast.report().replays == 3, str(fast.report())


def test_aliases_are_part_of_the_graph_around(ranks):
    ranks(2, _aliases)


def _two_views(x):
    y = x * 2
    return y, y.view(-1)


def _halves(x):
    return (x * 2).view(-1), (x * 3).t()


def _view_of_what_was_given(x):
    return x, x[1:]


# Which of the two results is written with a gradient, and which is read.
_WRITES = {
    "a view": (_two_views, 1, 0),
    "a base": (_two_views, 0, 1),
    "a view of what does not come back": (_halves, 1, 1),
    "an argument": (_view_of_what_was_given, 0, 1),
    "a view of an argument": (_view_of_what_was_given, 1, 0),
}


def _written_views(name):
    """Results without a graph are views of each other, and get one by a write of the program around."""
    function, written, read = _WRITES[name]
    for place in (lambda x: x, lambda x: sw.distribute_tensor(x, _mesh(), {"tp": sw.Replicate()})):
        fast = sw.erase(function)
        for turn in range(3):
            x, found = torch.arange(8.0).view(4, 2) + turn, []
            for call, given in ((function, x.clone()), (fast, place(x))):
                scale = torch.ones_like(given[0, 0]).requires_grad_()
                out = call(given)
                out[written].mul_(scale)
                out[read].sum().backward()
                found.append(full(scale.grad))
            assert torch.equal(*found), (name, turn)
        assert fast.report().replays == 2, str(fast.report())


@pytest.mark.parametrize("name", _WRITES)
def test_results_without_a_graph_are_views_of_what_they_were(ranks, name):
    ranks(2, _written_views, name)


def _gradients_given_back():
    """A gradient that comes back is the parameter's own, and a view that is saved knows of later writes."""
    weight = sw.distribute_tensor(torch.ones(4, 2), _mesh(), {"tp": sw.Shard(0)}).requires_grad_()

    def step(x):
        (weight * x).sum().backward()
        return weight.grad

    fast, views = sw.erase(step), sw.erase(_two_views)
    for turn in range(4):
        x = _on_mesh(torch.ones(4, 2))
        assert fast(x) is weight.grad
        assert_equal(weight.grad, torch.full((4, 2), turn + 1.0))
        base, view = views(x)
        loss = (view * weight.view(-1)).square().sum()
        base.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert (fast.report().replays, views.report().replays) == (2, 3), str(fast.report())


def test_gradients_come_back_themselves(ranks):
    ranks(2, _gradients_given_back)


def _lets_go():
    """Of a recorded call only what its results need is left: no intermediate lives as long as the program."""
    w = _on_mesh(torch.ones(6, 37), sw.Replicate()).requires_grad_()

    def run(x):
        h = (x @ w).exp()
        return h.sum(-1)

    fast = sw.erase(run)
    for _ in range(2):
        with torch.no_grad():
            fast(_on_mesh(torch.ones(82, 6)))
        fast(_on_mesh(torch.ones(82, 6))).sum().backward()
    gc.collect()
    local = (82 // dist.get_world_size(), 37)
    alive = [x for x in gc.get_objects() if type(x) is torch.Tensor and tuple(x.shape) == local]
    assert not [x for x in alive if not x.is_meta]
    assert str(fast).count(f"f32{list(local)}") >= 4
    assert (fast.report().recordings, fast.report().replays) == (2, 2), str(fast.report())


def test_a_recording_lets_go_of_what_it_saw(ranks):
    ranks(2, _lets_go)


def test_a_rank_that_records_meets_one_that_replays(ranks):
    first, second = ranks(2, _uneven)
    assert "4 recordings, 2 replays" in first, first
    assert "2 recordings, 4 replays" in second, second


def _traced():
    """Inside `trace()` the program's own lines are seen, and as much is sent as the text says."""
    model, place = placed(block(), "tensor", dist.get_world_size())
    fast = sw.erase(lambda x: model(x).redistribute({"tp": sw.Replicate()}))
    x = place(batches(1)[0])
    with torch.no_grad():
        fast(x)
        with sw.trace() as seen:
            fast(x)
        fast(x)
    assert (fast.report().recordings, fast.report().replays) == (1, 1)
    assert "sw.trace() looks at it" in str(fast.report())
    return str(fast), len(seen.collectives), seen.bytes


def test_the_text_says_what_is_sent(ranks):
    for text, collectives, sent in ranks(2, _traced):
        assert collectives > 0
        assert f"{collectives} collectives, {sent} B sent by this rank" in text
        assert "over tp" in text
        assert "_parameters['weight']" in text


class _Recomputed(nn.Module):
    """Computed again in the backward, in both of torch's ways."""

    def __init__(self, p, reentrant):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(6, 8), nn.Linear(8, 6), nn.Dropout(p)
        self.reentrant = reentrant

    def forward(self, x):
        return x + checkpoint(self._inner, x, use_reentrant=self.reentrant)

    def _inner(self, x):
        return self.dropout(self.down(torch.tanh(self.up(x))))


def _recomputing(p=0.0, *, reentrant=False):
    """A model and the layer before it, as one device has them and on the mesh."""
    torch.manual_seed(0)
    plain = nn.Linear(6, 6), _Recomputed(p, reentrant)
    return plain, [
        sw.distribute_module(copy.deepcopy(m), _mesh(), {"*": {"tp": sw.Replicate()}}) for m in plain
    ]


def _assert_same_gradients(ours, plain):
    for p, q in zip(nn.ModuleList(ours).parameters(), nn.ModuleList(plain).parameters(), strict=True):
        assert_equal(p.grad, q.grad)


def _checkpointed(reentrant):
    """A step that computes again is replayed where nothing draws from the generators that it puts back."""
    (before, plain), (first, model) = _recomputing(reentrant=reentrant)

    def step(one, two, x):
        loss = two(one(x)).square().sum()
        loss.backward()
        return loss

    fast = sw.erase(lambda x: step(first, model, x))
    for turn in range(5):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(turn))
        assert_equal(fast(_on_mesh(x)), step(before, plain, x))
        _assert_same_gradients((first, model), (before, plain))
    assert fast.report().replays == 3, str(fast.report())


def _checkpointed_with_dropout(reentrant, *, as_a_whole):
    """It drops again what it dropped, and the generator stands where one device's does."""
    (before, plain), (first, model) = _recomputing(0.5, reentrant=reentrant)
    part = model if as_a_whole else sw.erase(model)

    def step(one, two, x):
        loss = two(one(x)).square().sum()
        loss.backward()
        return loss.detach()

    def ours(x):
        return step(first, part, x)

    fast = sw.erase(ours) if as_a_whole else ours
    for turn in range(5):
        x, stands = torch.randn(4, 6, generator=torch.Generator().manual_seed(turn)), []
        for p in nn.ModuleList([before, plain, first, model]).parameters():
            p.grad = None
        for run in (lambda x: step(before, plain, x), lambda x: fast(_on_mesh(x)).full_tensor()):
            torch.manual_seed(turn)
            stands.append((run(x), torch.rand(1)))
        assert_equal(stands[1][0], stands[0][0])
        assert torch.equal(stands[1][1], stands[0][1]), "the generator stands elsewhere"
        _assert_same_gradients((first, model), (before, plain))
    report = (fast if as_a_whole else part).report()
    assert report.replays >= 3 or (reentrant and not as_a_whole), str(report)


@pytest.mark.parametrize("as_a_whole", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_steps_that_drop_again_what_they_dropped_are_replayed(ranks, reentrant, as_a_whole):
    ranks(2, _checkpointed_with_dropout, reentrant, as_a_whole=as_a_whole)


@pytest.mark.parametrize("reentrant", [False, True])
def test_steps_that_compute_again_are_replayed(ranks, reentrant):
    ranks(2, _checkpointed, reentrant)


def _run_as_a_whole(why):
    """A backward that cannot be asked for gradients fills them by itself, and goes on before the argument."""
    (before, plain), (first, model) = _recomputing(reentrant=why != "hook")
    if why == "hook":
        for m in (plain, model):
            m.up.weight.register_hook(lambda g: 2 * g)
    fast = sw.erase(model)
    for turn in range(5):  # recorded in vain, and then run as it is
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(turn))
        wanted, loss = plain(before(x)).square().sum(), fast(first(_on_mesh(x))).square().sum()
        for each in (wanted, loss):
            each.backward(retain_graph=True)
            each.backward()
        _assert_same_gradients((first, model), (before, plain))
    assert why in str(fast.report())


@pytest.mark.parametrize("why", ["hook", "reentrant"])
def test_graphs_before_and_behind_meet_where_nothing_is_recorded(ranks, why):
    ranks(2, _run_as_a_whole, why)


def _handed_on():
    """Leaves that get one gradient, which is the caller's too, have each their own."""
    fast = sw.erase(lambda a, b: a + b)
    a, b = (_on_mesh(torch.ones(4, 2)).requires_grad_() for _ in range(2))
    given = _on_mesh(torch.ones(4, 2))
    for _ in range(3):
        a.grad = b.grad = None
        for turn in range(1, 3):
            fast(a, b).backward(given)
            for x in (a.grad, b.grad):
                assert_equal(x, torch.full((4, 2), float(turn)), exact=True)
    assert_equal(given, torch.ones(4, 2), exact=True)


def test_a_replay_gives_no_two_leaves_one_gradient(ranks):
    ranks(2, _handed_on)


class _Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, x, rows):
        return ((x + self.a) * 1 + self.b).sum() + rows.sum()


def _summed_before():
    """A backward adds to what was summed before without communication: some ranks replay, others record."""
    model = parallelize_replicate(_Two(), _mesh())
    fast, synchronizer = sw.erase(model), GradientSynchronizer(model)
    for p in model.parameters():
        p.grad = p.detach() * 0
    for turn, rows in enumerate((2, 2, 2 + dist.get_rank(), 2)):
        for _ in range(2):
            out = fast(torch.ones(8), torch.ones(rows))
            with sw.trace() as seen:  # of the backward: a call in here runs as it is
                out.backward()
            assert not seen.collectives
        assert all(p.grad.placements == (sw.Partial(),) for p in model.parameters())
        synchronizer.synchronize()
        for p in model.parameters():
            assert_equal(p.grad, torch.full((8,), 4.0), exact=True)
            p.grad = p.grad.zero_() if turn % 2 == 0 else None
    assert fast.report().replays >= 5, str(fast.report())


def test_gradients_that_were_summed_become_terms_again(ranks):
    ranks(2, _summed_before)


def _sharded():
    """What units do after a backward happens in one outside of the call; its argument has a graph."""
    torch.manual_seed(0)
    model, first = nn.Linear(4, 4), torch.ones(4, requires_grad=True)
    plain, one = copy.deepcopy(model), first.detach().clone().requires_grad_()
    fast = sw.erase(parallelize_fsdp(model, rank_mesh((dist.get_world_size(),), ("dp",))))
    for turn in range(1, 3):
        fast(first * turn).sum().backward()
        (dist.get_world_size() * plain(one * turn).sum()).backward()
        assert_equal(model.weight.grad, plain.weight.grad)
        assert_equal(dist.get_world_size() * first.grad, one.grad)


def test_a_sharded_unit_gets_its_gradients(ranks):
    ranks(2, _sharded)
