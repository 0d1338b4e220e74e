"""Gradients that are summed while the backward goes on are those of one device, whatever each rank has."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.comm.record import Recorder
from shardwright.errors import ParallelError
from shardwright.grads import GradientSynchronizer
from shardwright.parallel import parallelize_fsdp, parallelize_hsdp, parallelize_replicate, parallelize_tensor
from shardwright.placement import Shard
from shardwright.testing import rank_mesh

WIDTH = 6
BYTES_OF_ONE = 4 * WIDTH * WIDTH


class _Net(nn.Module):
    """Layers in a row; `spare` is used, and converted, where it is asked for, `never` by nobody."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.layers[0].weight

    def forward(self, x, spare):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.tied(self.spare.to(x.dtype)(x) if spare else x)


def _batch(number):
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def _rows(rank, n, uneven):
    if uneven:  # the last rank has none
        return slice(rank * 4, rank * 4 + 4) if rank < 2 else slice(8, 8)
    return slice(rank * 8 // n, (rank + 1) * 8 // n)


def _train(sizes, bucket_bytes, accumulate, uneven, spare_ranks):
    """Gradients and parameters of three steps, beside one device."""
    torch.manual_seed(0)
    plain = _Net().double()
    mesh = rank_mesh(sizes, ("a", "b")[: len(sizes)])
    model = parallelize_replicate(copy.deepcopy(plain), mesh)
    n = mesh.size()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, model)]
    synchronizer = GradientSynchronizer(model, bucket_bytes)
    rank = torch.distributed.get_rank()
    for step in range(3):
        numbers = range(step * 10, step * 10 + accumulate)
        for number in numbers:
            x = _batch(number)
            for each in range(n):
                part = plain(x[_rows(each, n, uneven)], each in spare_ranks)
                part.square().sum().backward()
        for number in list(numbers)[:-1]:
            _backward(model, _batch(number)[_rows(rank, n, uneven)], rank in spare_ranks)
        with synchronizer.overlapped():
            _backward(model, _batch(numbers[-1])[_rows(rank, n, uneven)], rank in spare_ranks)
        _compare(plain, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q, rtol=1e-9, atol=1e-9, msg=name)


def _backward(model, rows, spare):
    if len(rows):  # a rank without rows leaves it out
        model(rows, spare).square().sum().backward()


def _compare(plain, model):
    for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        if q[1].grad is None:
            assert p.grad is None, name
            continue
        assert tuple(p.grad.placements) == tuple(p.placements), name
        torch.testing.assert_close(p.grad.to_local(), q[1].grad, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize(
    ("sizes", "bucket_bytes", "accumulate", "uneven", "spare_ranks"),
    [
        pytest.param((2,), 25 << 20, 1, False, {0, 1}, id="one bucket"),
        pytest.param((2,), 4 * BYTES_OF_ONE, 1, False, {0, 1}, id="several"),
        pytest.param((2,), 1, 1, False, set(), id="one each, some unused"),
        pytest.param((2,), 400, 1, False, {1}, id="another graph"),
        pytest.param((4,), 400, 1, True, {0}, id="ranks without rows"),
        pytest.param((4,), 700, 3, False, {2, 3}, id="accumulated"),
        pytest.param((2, 2), 700, 2, False, {0, 1}, id="two axes"),
        pytest.param((1, 2), 700, 1, False, {0, 1}, id="an axis of one rank"),
    ],
)
def test_gradients_and_steps_equal_those_of_one_device(
    ranks, sizes, bucket_bytes, accumulate, uneven, spare_ranks
):
    n = torch.Size(sizes).numel()
    ranks(n, _train, sizes, bucket_bytes, accumulate, uneven, spare_ranks)


def _changed():
    """One synchronizer whose module is changed between the steps, beside one device."""
    torch.manual_seed(0)
    plain = _Net()
    model = parallelize_replicate(copy.deepcopy(plain), rank_mesh((2,), ("a",)))
    synchronizer = GradientSynchronizer(model, 2 * BYTES_OF_ONE)
    rank = torch.distributed.get_rank()
    changes = (
        lambda net: None,
        lambda net: net.layers[1].requires_grad_(False),
        lambda net: net.double(),
        lambda net: net.layers.requires_grad_(True),
    )
    for number, change in enumerate(changes):
        for net in (plain, model):
            change(net)
            net.zero_grad()
        x = _batch(number).to(plain.spare.weight.dtype)
        plain(x, True).square().sum().backward()
        with synchronizer.overlapped():
            _backward(model, x[_rows(rank, 2, False)], True)
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=name)


def test_a_module_that_changes_between_the_steps(ranks):
    ranks(2, _changed)


def _when():
    """Collectives that were sent when the backward returns, when the block ends, and their bytes."""
    model = parallelize_replicate(_Net(), rank_mesh((2,), ("a",)))
    synchronizer = GradientSynchronizer(model, BYTES_OF_ONE + 4 * WIDTH)
    rows = _batch(torch.distributed.get_rank()).float()
    with Recorder() as seen:
        model(rows, True).sum().backward()
        accumulating = len(seen.collectives)
        with synchronizer.overlapped():
            model.never(rows).sum().backward()
            in_backward = len(seen.collectives)
            grads = [p.grad for p in model.never.parameters()]
    return accumulating, in_backward, len(seen.collectives), grads, seen.bytes


def test_buckets_are_sent_in_the_backward_and_accumulating_sends_nothing(ranks):
    for accumulating, in_backward, sent, grads, _ in ranks(2, _when):
        assert (accumulating, in_backward) == (0, 1)
        assert sent > 2
        assert grads == [None, None]


def _bytes():
    model = parallelize_replicate(_Net(), rank_mesh((2,), ("a",)))
    synchronizer = GradientSynchronizer(model)
    with Recorder() as seen, synchronizer.overlapped():
        model(_batch(torch.distributed.get_rank()).float(), True).sum().backward()
    parameters = list(model.parameters())
    return seen.bytes, sum(4 * p.numel() for p in parameters) + 12 * len(parameters), len(seen.collectives)


def test_no_byte_is_sent_beside_the_gradients_and_three_flags_for_each(ranks):
    for sent, wanted, collectives in ranks(2, _bytes):
        assert (sent, collectives) == (wanted, 1)


def _twice(readers, bucket_bytes):
    """Two backwards in a block, of these ranks: each sends its second terms when the block ends."""
    torch.manual_seed(0)
    plain = _Net().double()
    model = parallelize_replicate(copy.deepcopy(plain), rank_mesh((2,), ("a",)))
    synchronizer = GradientSynchronizer(model, bucket_bytes)
    rank = torch.distributed.get_rank()
    for step in range(2):
        for each in readers:
            for number in (step, step + 5, step + 7)[: 3 - each]:
                plain(_batch(number)[4 * each : 4 * each + 4], True).sum().backward()
        with synchronizer.overlapped():
            for number in (step, step + 5, step + 7)[: 3 - rank] if rank in readers else ():
                model(_batch(number)[4 * rank : 4 * rank + 4], True).sum().backward()
        _compare(plain, model)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize("bucket_bytes", [1, 700, 1 << 20])
@pytest.mark.parametrize("readers", [(0, 1), (0,), (1,)])
def test_gradients_that_come_again_in_a_block_are_added(ranks, readers, bucket_bytes):
    ranks(2, _twice, readers, bucket_bytes)


class _Recomputed(nn.Module):
    """A layer that is called twice, each time in a checkpoint that runs a backward of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.layer, self.other = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda a: self.layer(a).tanh(), x, use_reentrant=True)
        return checkpoint(lambda a: self.other(a).tanh(), self.layer(x), use_reentrant=True)


def _recomputed(sizes, bucket_bytes, has_rows):
    torch.manual_seed(0)
    plain = _Recomputed().double()
    mesh = rank_mesh(sizes, ("a", "b")[: len(sizes)])
    model = parallelize_replicate(copy.deepcopy(plain), mesh)
    synchronizer = GradientSynchronizer(model, bucket_bytes)
    rank, n = torch.distributed.get_rank(), mesh.size()
    for step in range(2):
        for each in range(n):
            if each in has_rows:
                plain(_batch(step)[_rows(each, n, False)]).square().sum().backward()
        with synchronizer.overlapped():
            if rank in has_rows:
                model(_batch(step)[_rows(rank, n, False)]).square().sum().backward()
        _compare(plain, model)


@pytest.mark.parametrize("bucket_bytes", [64, 700, 1 << 20])
@pytest.mark.parametrize(
    ("sizes", "has_rows"),
    [
        pytest.param((2,), {0, 1}, id="two ranks"),
        pytest.param((2,), {1}, id="one without rows"),
        pytest.param((2, 2), {0, 1, 3}, id="two axes"),
    ],
)
def test_reentrant_checkpoints_of_a_layer_that_is_called_twice(ranks, sizes, bucket_bytes, has_rows):
    """One backward had been taken for two, and refused."""
    ranks(torch.Size(sizes).numel(), _recomputed, sizes, bucket_bytes, has_rows)


def _summed_before():
    """A second block adds to gradients that are sums already, also on a rank that has nothing new."""
    mesh = rank_mesh((2,), ("a",))
    torch.manual_seed(0)
    plain = _Net().double()
    model = parallelize_replicate(copy.deepcopy(plain), mesh)
    synchronizer = GradientSynchronizer(model, 500)
    rank = torch.distributed.get_rank()
    for number, readers in ((0, (0, 1)), (1, (0,)), (2, ()), (3, (1,))):
        for each in readers:
            plain(_batch(number)[4 * each : 4 * each + 4], True).sum().backward()
        with synchronizer.overlapped():
            if rank in readers:
                model(_batch(number)[4 * rank : 4 * rank + 4], True).sum().backward()
        _compare(plain, model)


def test_sums_are_added_to(ranks):
    ranks(2, _summed_before)


def _hybrid():
    mesh = rank_mesh((2, 2), ("outer", "inner"))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 5))
    model = parallelize_hsdp(copy.deepcopy(plain), mesh, "inner")
    synchronizer = GradientSynchronizer(model)
    for step in range(2):
        x = _batch(step).float()
        plain.zero_grad()
        plain(x).square().sum().backward()
        model.zero_grad()
        rank = torch.distributed.get_rank()
        loss = model(x[2 * rank : 2 * rank + 2]).square().sum()  # the root stays gathered until its backward
        with synchronizer.overlapped():
            loss.backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert tuple(p.grad.placements) == tuple(p.placements), name
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-4, msg=name)


def test_the_outer_axis_of_hybrid_sharding(ranks):
    ranks(4, _hybrid)


class _Scaled(nn.Module):
    """`fully_shard` takes no parameter without dims: `scale` is replicated, and left to the synchronizer."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, 5)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))) * self.scale


def _gathered_on_other_axes():
    """The root stays gathered until its backward: its parameters are DTensors on the tensor axis alone."""
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    plain = _Scaled().double()
    model = copy.deepcopy(plain)
    parallelize_tensor(model, mesh["tp"], {"up": "colwise", "down": "rowwise"})
    parallelize_fsdp(model, mesh["dp"])
    synchronizer = GradientSynchronizer(model)
    at = mesh.get_local_rank("dp")
    for step in range(2):
        x = _batch(step)
        plain.zero_grad()
        plain(x).square().sum().backward()
        model.zero_grad()
        with sw.spmd(mesh["tp"]):
            loss = model(x[4 * at : 4 * at + 4]).square().sum()
            with synchronizer.overlapped():
                loss.backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert tuple(p.grad.placements) == tuple(p.placements), name
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-9, atol=1e-9, msg=name)


def test_a_unit_that_is_gathered_on_other_axes(ranks):
    ranks(4, _gathered_on_other_axes)


class _Begins(nn.Module):
    """A parameter of one row stands before each sequence: where there are none, its gradient is another."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.layer(torch.cat([self.first.expand(len(x), -1, -1), x], 1)))


def _without_rows_beside_tensor_parallelism(overlapped, dim):
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    plain = _Begins().double()
    model = copy.deepcopy(plain)
    parallelize_tensor(model, mesh["tp"], {"first": {"tp": Shard(dim)}, "layer.weight": {"tp": Shard(1)}})
    parallelize_replicate(model, mesh["dp"])
    synchronizer = GradientSynchronizer(model)
    for step in range(3):
        x = _batch(step)[:, None]
        mine = (x[:0], x)[(mesh.get_local_rank("dp") + step) % 2] if step < 2 else x[:0]
        for each in (plain, model):
            each.zero_grad()
        plain(x[: 8 if step < 2 else 0]).square().sum().backward()
        with sw.spmd(mesh["tp"]), synchronizer.overlapped() if overlapped else contextlib.nullcontext():
            model(mine).square().sum().backward()
        synchronizer.synchronize()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert tuple(p.grad.placements) == tuple(p.placements), name
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("dim", [0, 2])
@pytest.mark.parametrize("overlapped", [False, True])
def test_a_rank_without_rows_beside_tensor_parallelism(ranks, overlapped, dim):
    ranks(4, _without_rows_beside_tensor_parallelism, overlapped, dim)


def _contradiction():
    mesh = rank_mesh((2,), ("a",))
    model = parallelize_replicate(nn.Linear(4, 4, bias=False), mesh)
    synchronizer = GradientSynchronizer(model)
    weight = model.weight

    def unlike():
        with synchronizer.overlapped():
            if torch.distributed.get_rank() == 0:
                model(torch.ones(2, 4)).sum().backward()
            else:
                weight.grad = torch.zeros_like(weight).redistribute(mesh, [Shard(0)])

    with pytest.raises(ParallelError, match=r"weight.*other layouts on some ranks"):
        unlike()


def test_contradictions_are_refused_on_every_rank(ranks):
    ranks(2, _contradiction)


def _left():
    """An exception that leaves the block, on all ranks, before its backward and after it."""
    rows = torch.ones(3, WIDTH)
    model = parallelize_replicate(nn.Linear(WIDTH, 2), rank_mesh((2,), ("a",)))
    synchronizer = GradientSynchronizer(model)

    def block(*, backward):
        with synchronizer.overlapped():
            if backward:
                model(rows).sum().backward()
            raise ValueError("a bad batch")

    model(rows).sum().backward()
    with pytest.raises(ValueError, match="a bad batch"):
        block(backward=False)
    synchronizer.synchronize()
    torch.testing.assert_close(model.weight.grad.full_tensor(), 2 * rows.sum(0).expand(2, -1))
    with pytest.raises(ValueError, match="a bad batch"):
        block(backward=True)
    for call in (synchronizer.synchronize, lambda: synchronizer.overlapped().__enter__()):
        with pytest.raises(ParallelError, match="while gradients travelled: they are lost"):
            call()
    model.zero_grad()
    model(rows).sum().backward()
    GradientSynchronizer(model).synchronize()
    torch.testing.assert_close(model.weight.grad.full_tensor(), 2 * rows.sum(0).expand(2, -1))


def test_gradients_that_an_exception_loses_are_not_missed_in_silence(ranks):
    ranks(2, _left)


def _left_on_one(sizes, at):
    """One rank leaves the block; the others hear of it, and all go on."""
    mesh = rank_mesh(sizes, ("a", "b")[: len(sizes)])
    model = parallelize_replicate(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), mesh)
    rows, fails = torch.ones(1, 2), torch.distributed.get_rank() == 1
    hook = model[1].weight.register_hook(_fail) if fails and at == "in the backward" else None

    def block():
        with GradientSynchronizer(model, 1).overlapped():
            if fails and at == "before":
                _fail()
            model(rows).sum().backward()
            if fails and at == "after":
                _fail()

    with pytest.raises((ValueError, ParallelError)) as caught:
        block()
    if hook is not None:
        hook.remove()
    model.zero_grad()
    with GradientSynchronizer(model).overlapped():
        model(rows).sum().backward()
    assert model[2].bias.grad.to_local().tolist() == [torch.distributed.get_world_size()] * 2
    return str(caught.value)


def _fail(*_):
    raise ValueError("a bad batch")


@pytest.mark.parametrize(
    ("sizes", "at"), [((2,), "before"), ((2,), "after"), ((2, 2), "in the backward")], ids=str
)
def test_the_others_hear_of_an_exception_that_leaves_the_block_on_one_rank(ranks, sizes, at):
    """They waited for its gradients."""
    said = ranks(torch.Size(sizes).numel(), _left_on_one, sizes, at, timeout=60)
    assert said.pop(1) == "a bad batch"
    assert all("cannot go on with the sums of its gradients, as its own error says" in text for text in said)


def _nested():
    model = parallelize_replicate(_Net().double(), rank_mesh((2,), ("a",)))
    synchronizer = GradientSynchronizer(model)
    outer, inner = synchronizer.overlapped(), synchronizer.overlapped()
    with pytest.raises(ParallelError, match="stands in another one"), outer, inner:
        pass
    with synchronizer.overlapped():  # nothing of the refused one stays
        model(_batch(0), spare=True).sum().backward()
    assert model.tied.weight.grad is not None


def test_a_block_in_another_one_is_refused_and_no_hook_stays(ranks):
    """The inner one had ended what the outer one listens to, in an AttributeError at its end."""
    ranks(2, _nested)


def _kept_by_the_program():
    """What is left of one step's gradients in the next steps, and which steps have the memory of the last."""
    mesh = rank_mesh((2,), ("dp",))
    torch.manual_seed(0)
    plain = nn.Linear(WIDTH, WIDTH, bias=False)
    model = parallelize_replicate(copy.deepcopy(plain), mesh)
    synchronizer = GradientSynchronizer(model)
    kinds = (
        lambda gradient: gradient,
        lambda gradient: gradient.to_local()[1:],
        lambda gradient: gradient.to_local().numpy(),
        lambda gradient: gradient.to_local().untyped_storage(),
        lambda _: None,
        lambda _: None,
    )
    kept, places = [], []
    for number, keep in enumerate(kinds):
        x = _batch(number).float()
        plain.zero_grad()
        plain(x).square().sum().backward()
        model.zero_grad()
        with synchronizer.overlapped():
            _backward_of(model, x.chunk(2)[torch.distributed.get_rank()])
        gradient = model.weight.grad
        places.append(gradient.to_local().data_ptr())
        kept.append((keep(gradient), plain.weight.grad.clone()))
        del gradient
    whole, part, array, storage = (each for each, _ in kept[:4])
    wanted = [gradient for _, gradient in kept]
    torch.testing.assert_close(whole.to_local(), wanted[0])
    torch.testing.assert_close(part, wanted[1][1:])
    torch.testing.assert_close(torch.from_numpy(array), wanted[2])
    held = torch.empty(0).set_(storage, 0, (WIDTH, WIDTH))
    torch.testing.assert_close(held, wanted[3])
    assert len(set(places[:5])) == 5
    assert places[5] == places[4]


def _backward_of(model, rows):
    model(rows).square().sum().backward()


def test_gradients_that_the_program_keeps_are_not_written_by_later_steps(ranks):
    """The memory of a bucket is the next one's, once nobody holds a part of it."""
    ranks(2, _kept_by_the_program)


def _pending_on_all_ranks_alike():
    """A gradient that nobody sums in the block: all ranks have it in one state, which is not the last."""
    mesh = rank_mesh((2,), ("dp",))
    torch.manual_seed(0)
    model = parallelize_replicate(nn.Linear(WIDTH, WIDTH, bias=False), mesh)
    beside = nn.Parameter(sw.distribute_tensor(torch.ones(WIDTH), mesh, [sw.Replicate()]))
    synchronizer = GradientSynchronizer([("weight", model.weight), ("beside", beside)])
    terms = [_batch(number)[0].float() for number in range(2)]
    rank = torch.distributed.get_rank()
    for _ in range(2):
        with synchronizer.overlapped():
            _backward_of(model, _batch(rank).float())
            beside.grad = sw.DTensor.from_local(terms[rank], mesh, [sw.Partial()])
        assert tuple(beside.grad.placements) == (sw.Replicate(),)
        torch.testing.assert_close(beside.grad.to_local(), terms[0] + terms[1])
        model.weight.grad = None


def test_what_is_pending_on_all_ranks_alike_is_summed(ranks):
    ranks(2, _pending_on_all_ranks_alike)
