"""`spmd`, `explicit`, `trace`: single-device blocks, no hidden communication, and a record of the rest."""

import copy
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import shardwright as sw
from shardwright.errors import ImplicitRedistributionError, RuleError, SpmdError
from shardwright.testing.meshes import rank_mesh
from tests.tiers import only

from .cases import close, full, layouts_of, mesh, place


class Attention(nn.Module):
    """An unmodified model: it makes masks, positions and constants of its own."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, tokens):
        b, s = tokens.shape
        positions = torch.arange(s).unsqueeze(1) / torch.arange(1, 9)
        h = self.embed(tokens) + torch.sin(positions)
        q, k, v = (t.view(b, s, 2, 4).transpose(1, 2) for t in self.qkv(self.norm(h)).chunk(3, -1))
        mask = torch.full((s, s), float("-inf")).triu(1)
        weights = (q @ k.transpose(-1, -2) / 2 + mask).softmax(-1)
        mixed = (weights @ v).transpose(1, 2).reshape(b, s, 8)
        h = h + self.out(mixed) * self.scale
        return functional.linear(h, self.embed.weight)


def _runs_unmodified():
    torch.manual_seed(0)
    plain = Attention()
    tokens = torch.randint(11, (4, 5))
    wanted = plain(tokens)
    loss = functional.cross_entropy(wanted.flatten(0, 1), tokens.flatten())
    loss.backward()
    for batch in layouts_of(2, pending=False)[1:]:
        model = copy.deepcopy(plain)
        model.zero_grad()
        with sw.spmd(mesh()):
            out = model(sw.distribute_tensor(tokens, mesh(), batch))
            got = functional.cross_entropy(out.flatten(0, 1), tokens.flatten())
        close(out, wanted.detach())
        got.backward()
        for (n, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert type(p.grad) is torch.Tensor, n
            close(p.grad, q.grad, f"{n}, batch {batch}")


@pytest.mark.parametrize("world", only([3], [2, 3, 4]))
def test_an_unmodified_model_runs_and_its_plain_leaves_get_complete_gradients(ranks, world):
    ranks(world, _runs_unmodified)


def _outside():
    d = place(full(4, 4), [sw.Shard(0)])
    plain = full(4, 4)
    with pytest.raises(RuleError, match=r"sw\.spmd"):
        d + plain
    assert close(d + torch.tensor(2.0), full(4, 4) + 2) is None
    assert close(d + torch.ones(1), full(4, 4) + 1) is None
    with sw.spmd(mesh()):
        close(d + plain, plain * 2)
    with pytest.raises(RuleError):
        d + plain


def test_outside_of_the_block_a_plain_tensor_is_refused(ranks):
    ranks(2, _outside)


def _plain_graphs_outside():
    """A plain loss beside terms of parameters: its graph is handed plain gradients, to the end of it."""
    weight, number = full(4, 4), torch.tensor(2.0, requires_grad=True)
    d = place(weight, [sw.Shard(0)]).requires_grad_()
    one, plain = weight.clone().requires_grad_(), number.detach().clone().requires_grad_()
    for w, n, whole in ((d, number, d.full_tensor()), (one, plain, one)):
        (torch.stack([(whole * n).square().sum(), n.exp()]).sum() + (w * 3).sum() * n).backward()
    assert type(number.grad) is torch.Tensor
    close(number.grad, plain.grad)
    close(d.grad, one.grad)
    (first,) = torch.autograd.grad(number**3 * d.sum(), number, create_graph=True)
    close(torch.autograd.grad(first, number)[0], 6 * plain.detach() * weight.sum())


def test_a_plain_graph_beside_a_dtensor_gets_plain_gradients(ranks):
    ranks(2, _plain_graphs_outside)


def _after_a_transform():
    d = place(full(4, 4), [sw.Shard(0)])
    torch.func.vmap(lambda row: row * d)(d)  # what it wraps has the class of a plain tensor
    with pytest.raises(RuleError, match=r"sw\.spmd"):
        d + full(4, 4)


def test_a_plain_tensor_is_refused_after_a_transform_of_a_distributed_one_too(ranks):
    ranks(2, _after_a_transform)


def _differs(check):
    grid = rank_mesh((2,), ("tp",))
    d = sw.distribute_tensor(full(4, 4), grid, [sw.Shard(0)])
    for attempt in range(2):
        with sw.spmd(grid, check=check):
            mine = torch.full((4, 4), float(dist.get_rank() if attempt or check is True else 0))
            out = d + mine
    return out is not None


def _names_the_line():
    grid = rank_mesh((2,), ("tp",))
    d = sw.distribute_tensor(full(4, 4), grid, [sw.Shard(0)])
    bad = torch.full((4, 4), float(dist.get_rank()))
    with pytest.raises(SpmdError) as caught, sw.spmd(grid, check=True):
        d * bad  # the line that is named
    text = str(caught.value)
    line = next(n for n, s in enumerate(open(__file__), 1) if "the line that is named" in s)  # noqa: SIM115, PTH123
    assert f"test_spmd.py:{line}" in text
    assert "shape (4, 4) differs between the ranks" in text
    with sw.spmd(grid, check=False):
        d * bad


def test_a_plain_tensor_that_differs_is_named_with_its_line(ranks):
    ranks(2, _names_the_line)


def test_the_check_of_the_first_step_only(ranks):
    assert ranks(2, _differs, "first") == [True, True]
    assert ranks(2, _differs, False) == [True, True]
    with pytest.raises(Exception, match="differs between the ranks"):
        ranks(2, _differs, True)


def _written_into_plain():
    grid = rank_mesh((2,), ("tp",))
    d = sw.distribute_tensor(full(4, 3), grid, [sw.Shard(0)])
    plain = torch.zeros(4, 3)
    with sw.spmd(grid), sw.trace() as t:
        plain.copy_(d)
        plain[1] = d[0]
        plain += d
    wanted = full(4, 3)
    wanted[1] = full(4, 3)[0]
    wanted += full(4, 3)
    assert type(plain) is torch.Tensor
    torch.testing.assert_close(plain, wanted)
    assert any("plain" in str(decision) for decision in t.decisions)


def test_a_dtensor_written_into_a_plain_tensor_writes_its_full_value(ranks):
    ranks(2, _written_into_plain)


def _backward_outside():
    """Backward, in a thread of its own, of what was computed inside; checkpointing recomputes inside."""
    grid = rank_mesh((2,), ("tp",))
    x, w = full(4, 3), full(3, 3, seed=1)
    want = w.clone().requires_grad_()
    (x @ want).relu().square().mean().backward()
    d = sw.distribute_tensor(x, grid, [sw.Shard(0)])
    leaf = w.clone().requires_grad_()
    with sw.spmd(grid):
        loss = (d @ leaf).relu().square().mean()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert type(leaf.grad) is torch.Tensor
    torch.testing.assert_close(leaf.grad, want.grad)
    leaf.grad = None
    with sw.spmd(grid):
        (d @ leaf).relu().square().mean().backward()
        (d @ leaf).relu().square().mean().backward()
    torch.testing.assert_close(leaf.grad, 2 * want.grad)


def test_backward_needs_no_block_from_any_thread(ranks):
    ranks(2, _backward_outside)


def _explicit():
    grid = rank_mesh((2,), ("tp",))
    a = sw.distribute_tensor(full(8, 4), grid, [sw.Shard(0)])
    b = sw.distribute_tensor(full(8, 4), grid, [sw.Shard(1)])
    p = place(full(8, 4), [sw.Partial("sum")])
    r = sw.distribute_tensor(full(8, 4), grid)
    with sw.explicit():
        close(a + a, 2 * full(8, 4))
        close(a * 2, 2 * full(8, 4))
        close(a + r, 2 * full(8, 4))
        close(a.sum(1), full(8, 4).sum(1))
        close(b.redistribute({"tp": sw.Shard(0)}) + a, 2 * full(8, 4))
        assert a.sum().placements == (sw.Partial("sum"),)
        texts = []
        for call in (lambda: a + b, p.relu, lambda: r.add_(p)):
            with pytest.raises(ImplicitRedistributionError) as caught:
                call()
            texts.append(str(caught.value))
    a + b
    return texts


def test_explicit_raises_with_operands_and_a_way_out(ranks):
    add, relu, in_place = ranks(2, _explicit)[0]
    assert add.startswith("aten::add.Tensor: needs an implicit redistribution (explicit mode allows none)")
    assert "f32[8@tp, 4]" in add
    assert "f32[8, 4@tp]" in add
    assert "fix" in add
    assert "Partial(sum)" in relu
    assert 'other.redistribute({"tp": Replicate()})' in in_place


def _scalars():
    """Reading a pending value on the host communicates as well, so it is refused too."""
    x = sw.distribute_tensor(full(8, 4), rank_mesh((2,), ("tp",)), [sw.Shard(0)])
    with sw.explicit(), pytest.raises(ImplicitRedistributionError):
        x.sum().item()


def test_explicit_refuses_to_finish_a_value_for_the_host(ranks):
    ranks(2, _scalars)


def _lists_of_numbers():
    """`torch.tensor` of a list reads the memory of tensors in C: what it reads is one device's."""
    mesh = rank_mesh((2,), ("dp",))
    whole = torch.arange(6.0).view(3, 2)
    x, counts = (sw.distribute_tensor(y, mesh, [sw.Shard(0)]) for y in (whole, whole.long()))

    def program(x, counts):
        sums = [[row.sum(), 1.0] for row in x]
        return (
            torch.tensor(sums),
            torch.tensor([row.max() for row in counts]),
            torch.as_tensor((x.sum(), x.max()), dtype=torch.float64),
            torch.tensor([[2, 3], [4, 5]]),
        )

    with sw.spmd(mesh):
        found = program(x, counts)
        with pytest.raises(RuntimeError, match="cannot be converted to Scalar"):
            torch.tensor([x[0], x[1]])
        with sw.explicit(), pytest.raises(ImplicitRedistributionError):
            torch.tensor([x.sum()])
    for ours, wanted in zip(found, program(whole, whole.long()), strict=True):
        ours = ours.full_tensor() if isinstance(ours, sw.DTensor) else ours  # noqa: PLW2901
        assert ours.dtype == wanted.dtype
        assert torch.equal(ours, wanted)


def test_lists_of_numbers_that_distributed_tensors_hold(ranks):
    ranks(2, _lists_of_numbers)


def _traced():
    grid = rank_mesh((2,), ("tp",))
    a = sw.distribute_tensor(full(8, 4), grid, [sw.Shard(0)])
    b = sw.distribute_tensor(full(8, 4), grid, [sw.Shard(1)])
    with sw.trace() as quiet:
        a + a
        (a * 2).sum(1)
    assert quiet.collectives == []
    assert quiet.bytes == 0
    with sw.trace() as t:
        a + b  # traced here
    assert len(t.collectives) == 1
    assert t.bytes == 8 * 4 * 4 // 4, "a quarter of the elements goes to the other rank"
    text = str(t.table())
    assert "add" in text
    assert "test_spmd.py" in text
    with sw.trace() as t:
        a.full_tensor()
    assert t.bytes == 8 * 4 * 4 // 2
    return text


def test_trace_shows_each_move_with_its_op_and_line(ranks):
    ranks(2, _traced)


def _made_in_inference_mode():
    torch.manual_seed(0)
    plain, tokens = Attention(), torch.randint(11, (4, 5))
    wanted = plain(tokens).detach()
    model = sw.distribute_module(copy.deepcopy(plain), mesh(), {"qkv.weight": (sw.Shard(0),)})
    with torch.inference_mode(), sw.spmd(model.qkv.weight.device_mesh, check=True):
        close(model(tokens.clone()).full_tensor(), wanted)
        scale = torch.ones(())
        for _ in range(2):
            close((model.norm.weight * scale).full_tensor(), plain.norm.weight.detach() * float(scale))
            scale.mul_(2)
    with torch.inference_mode():
        noise = torch.zeros(8)
    with sw.spmd(model.qkv.weight.device_mesh, check=True):
        model.norm.weight + noise
        with torch.inference_mode():
            noise += dist.get_rank()
        with pytest.raises(SpmdError, match="differs between the ranks"):
            model.norm.weight + noise


def test_tensors_of_inference_are_compared_each_time(ranks):
    """Nothing counts how often they are written."""
    ranks(2, _made_in_inference_mode)


def _line(world_mesh, weight, x):
    with sw.spmd(world_mesh):
        return weight @ x


def _on_two_meshes():
    """The first ranks have passed the line before, on their own mesh: the others compared alone."""
    small, whole = rank_mesh((2,), ("x",)), rank_mesh((4,), ("x",))
    x = torch.arange(6.0).view(2, 3)
    if dist.get_rank() < 2:
        weight = sw.DTensor.from_local(torch.ones(2, 2), small, [sw.Shard(0)])
        assert torch.equal(_line(small, weight, x).full_tensor(), torch.ones(4, 2) @ x)
    weight = sw.DTensor.from_local(torch.ones(1, 2), whole, [sw.Shard(0)])
    assert torch.equal(_line(whole, weight, x).full_tensor(), torch.ones(4, 2) @ x)


def test_a_line_is_compared_by_the_ranks_of_its_mesh(ranks):
    ranks(4, _on_two_meshes, timeout=60)


def _with_an_error_of_one_rank():
    at = rank_mesh((2,), ("x",))
    weight = sw.DTensor.from_local(torch.ones(1, 2), at, [sw.Shard(0)])
    for step in range(3):
        try:
            with sw.spmd(at):
                y = weight @ torch.arange(6.0).view(2, 3)
                if dist.get_rank() == 1 and step == 0:
                    raise ValueError(step)
        except ValueError:
            pass
        assert torch.equal(y.full_tensor(), torch.ones(2, 2) @ torch.arange(6.0).view(2, 3))


def test_an_error_that_one_rank_catches_does_not_let_it_compare_alone(ranks):
    ranks(2, _with_an_error_of_one_rank, timeout=60)


def _as_one_device(at, function):
    with sw.spmd(at):
        return function()


def _nothing_compared_on_one_rank():
    """A block that compares nothing on one rank, and one that raises there before it compares."""
    at = rank_mesh((2,), ("x",))
    weight = sw.DTensor.from_local(torch.ones(1, 2), at, [sw.Shard(0)])
    x, tries = torch.arange(6.0).view(2, 3), []

    def late():
        tries.append(1)
        if dist.get_rank() == 0 and len(tries) == 1:
            raise OSError("not there yet")
        return (weight @ x).sum().item()

    if dist.get_rank() == 0:
        _as_one_device(at, lambda: weight.abs().to_local().max())
    found = []
    while not found:
        try:
            found.append(_as_one_device(at, late))
        except OSError:
            continue
    assert _as_one_device(at, lambda: (weight @ (x + 1)).sum().item()) == found[0] + 12
    with pytest.raises(SpmdError, match="differs between the ranks"), sw.spmd(at):
        weight @ (x + dist.get_rank())


def test_what_one_rank_does_alone_is_no_comparison(ranks):
    """It counted as one, and the ranks compared alone from then on."""
    ranks(2, _nothing_compared_on_one_rank, timeout=60)
