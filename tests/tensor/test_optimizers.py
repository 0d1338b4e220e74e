"""Optimizers on DTensors step as on plain tensors: loop, foreach and fused, and norms of gradients."""

import pytest
import torch

import shardwright as sw

from .cases import close, full, layouts_of, mesh, place

OPTIMIZERS = {
    "SGD": lambda p, **k: torch.optim.SGD(p, lr=0.1, **k),
    "SGD with momentum": lambda p, **k: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True, **k
    ),
    "AdamW": lambda p, **k: torch.optim.AdamW(p, lr=0.05, **k),
    "Adam with amsgrad": lambda p, **k: torch.optim.Adam(p, lr=0.05, amsgrad=True, **k),
    "Adagrad": lambda p, **k: torch.optim.Adagrad(p, lr=0.05, **k),
    "RMSprop": lambda p, foreach=False, fused=False: torch.optim.RMSprop(p, lr=0.01, foreach=foreach),
    "Adamax": lambda p, foreach=False, fused=False: torch.optim.Adamax(p, lr=0.01, foreach=foreach),
}
MODES = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
SHAPES = [(5, 7), (4,), (1, 3)]


def _steps(name, mode):
    make = OPTIMIZERS[name]
    for choice in range(3):
        plain = [full(*shape, seed=i).requires_grad_() for i, shape in enumerate(SHAPES)]
        placed = []
        for p in plain:
            layouts = layouts_of(p.ndim, pending=False)
            placed.append(place(p.detach().clone(), layouts[choice % len(layouts)], requires_grad=True))
        ours, theirs = make(placed, **MODES[mode]), make(plain, **MODES[mode])
        for step in range(3):
            for i, (p, d) in enumerate(zip(plain, placed, strict=True)):
                p.grad = full(*p.shape, seed=10 * step + i)
                d.grad = place(p.grad, d.placements)
            ours.step()
            theirs.step()
        for p, d in zip(plain, placed, strict=True):
            close(d, p.detach(), f"{sw.layout_of(d)}")
            assert type(d) is sw.DTensor
            for key, value in theirs.state[p].items():
                close(ours.state[d][key], value, key)
        state = ours.state_dict()
        ours.load_state_dict(state)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["SGD", "SGD with momentum", "AdamW", "Adam with amsgrad"])
def test_steps_are_those_of_one_device(ranks, name, mode):
    ranks(2, _steps, name, mode)


@pytest.mark.parametrize("mode", ["loop", "foreach"])
@pytest.mark.parametrize("name", ["Adagrad", "RMSprop", "Adamax"])
def test_steps_of_other_optimizers(ranks, name, mode):
    ranks(2, _steps, name, mode)


@pytest.mark.parametrize("mode", MODES)
def test_steps_on_two_axes(ranks, mode):
    ranks(4, _steps, "AdamW", mode)


def _pending_gradients(mode):
    """A gradient that is still pending is finished before it is squared."""
    p = full(5, 7).requires_grad_()
    d = place(full(5, 7), [sw.Replicate()], requires_grad=True)
    p.grad, d.grad = full(5, 7, seed=1), place(full(5, 7, seed=1), [sw.Partial("sum")])
    ours, theirs = (torch.optim.AdamW([x], lr=0.1, **MODES[mode]) for x in (d, p))
    ours.step()
    theirs.step()
    close(d, p.detach())


@pytest.mark.parametrize("mode", MODES)
def test_a_pending_gradient_is_finished_before_it_is_used(ranks, mode):
    ranks(2, _pending_gradients, mode)


def _brought_once():
    """However often a step reads a gradient that lies elsewhere, it is sent once, with all others."""
    whole = [sw.Replicate()] * mesh().ndim
    placed = [place(full(*shape, seed=i), whole, requires_grad=True) for i, shape in enumerate(SHAPES)]
    for i, p in enumerate(placed):
        p.grad = place(full(*p.shape, seed=9 + i), [sw.Partial(), *whole[1:]])
    with sw.trace() as seen:
        torch.optim.AdamW(placed, lr=0.05, foreach=False).step()
    assert all("gradients lie as their parameters do" in event.reason for event in seen.collectives)
    return len(seen.collectives)


def test_gradients_are_brought_once_before_a_step(ranks):
    assert set(ranks(2, _brought_once)) == {1}


def _clip():
    plain = [full(5, 7).requires_grad_(), full(4).requires_grad_()]
    placed = [
        place(full(5, 7), [sw.Shard(0)], requires_grad=True),
        place(full(4), [sw.Replicate()], requires_grad=True),
    ]
    for i, (p, d) in enumerate(zip(plain, placed, strict=True)):
        p.grad = full(*p.shape, seed=5 + i)
        d.grad = place(p.grad, d.placements)
    wanted = torch.nn.utils.clip_grad_norm_(plain, 0.5)
    for foreach in (True, False):
        norm = torch.nn.utils.get_total_norm([d.grad for d in placed], foreach=foreach)
        close(norm, wanted)
    close(torch.nn.utils.clip_grad_norm_(placed, 0.5), wanted)
    for p, d in zip(plain, placed, strict=True):
        close(d.grad, p.grad)
    assert mesh().size() == 2


def test_torchs_own_gradient_clipping_sees_whole_norms(ranks):
    ranks(2, _clip)


def _lists():
    """`_foreach_*` with tensors that differ in layout at one position."""
    a, b = full(5, 7), full(5, 7, seed=1)
    for left in layouts_of(2):
        for right in layouts_of(2):
            xs, ys = [place(a, left), place(b, left)], [place(b, right), place(a, right)]
            for got in (
                torch._foreach_add(xs, ys),
                torch._foreach_mul(xs, ys),
                torch._foreach_sub(xs, ys, alpha=2),
            ):
                assert len(got) == 2
            close(torch._foreach_add(xs, ys)[0], a + b)
            close(torch._foreach_mul(xs, ys)[1], a * b)
            close(torch._foreach_lerp(xs, ys, 0.25)[0], torch.lerp(a, b, 0.25))
            close(torch._foreach_norm(xs)[0], torch.linalg.vector_norm(a))
            torch._foreach_addcmul_(xs, ys, ys, value=0.5)
            close(xs[0], a + 0.5 * b * b)
            assert xs[0].placements == left


def test_list_ops_with_different_layouts(ranks):
    ranks(2, _lists)


CUTS = (
    (sw.Interleaved(0, 2), sw.Shard(1)), (sw.BlockCyclic(0, 1), sw.Shard(1)), (sw.Shard(1), sw.Replicate()),
    (sw.Shard(1), sw.Interleaved(1, 2)), (sw.Shard(0), sw.Shard(1)),
)  # fmt: skip


def _unlike_in_memory():
    """Parts with gaps, as a cut along the last dim leaves them, beside gradients in another order."""
    for name in ("SGD with momentum", "AdamW", "Adam with amsgrad", "Adagrad"):
        for cut in CUTS:
            for turned in (False, True):
                plain = full(8, 10, seed=1).requires_grad_()
                ours = sw.distribute_tensor(plain.detach().clone(), mesh(), cut).requires_grad_()
                steps = [OPTIMIZERS[name]([p], fused=True) for p in (plain, ours)]
                for seed in range(3):
                    plain.grad = full(8, 10, seed=seed)
                    given = plain.grad.t().contiguous().t() if turned else plain.grad
                    ours.grad = sw.distribute_tensor(given.clone(), mesh(), cut)
                    for optimizer in steps:
                        optimizer.step()
                close(ours, plain.detach(), f"{name} {cut} {turned}")
                for key, value in steps[0].state[plain].items():
                    close(steps[1].state[ours][key], value, f"{name} {cut} {key}")


def test_a_fused_step_of_parts_with_gaps(ranks):
    ranks(4, _unlike_in_memory, timeout=120)


def _owned_scalars(name):
    """A rank that does not own a scalar has nothing of it, and none of the steps that are counted for it."""
    shapes = [(), (), (3,)]

    def drawn(seed):
        return [full(3, seed=seed + i)[: x[0] if x else 1].reshape(x) for i, x in enumerate(shapes)]

    plain = [x.requires_grad_() for x in drawn(0)]
    homes = [sw.Owner(0), sw.Owner(1), sw.Shard(0)]
    pairs = list(zip(plain, homes, strict=True))
    placed = [place(p.detach().clone(), [home], requires_grad=True) for p, home in pairs]
    ours, theirs = (OPTIMIZERS[name](x, fused=True) for x in (placed, plain))
    for step in range(2):
        for p, d, gradient in zip(plain, placed, drawn(10 * step), strict=True):
            p.grad, d.grad = gradient, place(gradient, d.placements)
        ours.step()
        theirs.step()
    for p, d in zip(plain, placed, strict=True):
        close(d, p.detach(), f"{sw.layout_of(d)}")


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adam with amsgrad", "Adagrad"])
def test_fused_steps_of_scalars_that_ranks_own(ranks, name):
    ranks(2, _owned_scalars, name)
