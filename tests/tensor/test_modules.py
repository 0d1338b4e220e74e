"""`distribute_module` and `local_map`: placing by name, all or nothing; functions on local tensors."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwright as sw
from shardwright.errors import LayoutError, ParallelError
from shardwright.testing.meshes import rank_mesh
from tests.tiers import only

from .cases import close, full, mesh, place


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.linspace(0, 1, 6), persistent=False)
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, tokens):
        h = self.embed(tokens) * self.frozen + self.shift
        for layer in self.layers:
            h = h + functional.gelu(layer(h))
        return self.head(self.norm(h))


def _net():
    torch.manual_seed(0)
    return Net()


def _by_pattern():
    grid = mesh()
    plain = _net()
    plain.layers[0].weight.decay = 0.5
    seen = []
    plain.layers[1].bias.register_post_accumulate_grad_hook(lambda p: seen.append(sw.layout_of(p.grad)))
    keys, one = list(plain.state_dict()), copy.deepcopy(plain)
    placements = {
        "layers.*.weight": {"tp": sw.Shard(0)},
        "embed.weight": {"tp": sw.Shard(1)},
        "layers.0.*": {},
    }
    model = sw.distribute_module(plain, grid, placements)
    assert model is plain
    assert list(model.state_dict()) == keys
    assert model.head.weight is model.embed.weight
    assert sw.layout_of(model.embed.weight).placements[-1] == sw.Shard(1)
    assert sw.layout_of(model.layers[0].weight).placements[-1] == sw.Shard(0), (
        "the first pattern that matches"
    )
    assert sw.layout_of(model.layers[1].bias).is_fully_replicated
    assert isinstance(model.shift, sw.DTensor)
    assert isinstance(model.norm.running_mean, sw.DTensor)
    assert model.layers[0].weight.decay == 0.5
    assert not model.frozen.requires_grad
    assert all(isinstance(p, nn.Parameter) and isinstance(p, sw.DTensor) for p in model.parameters())
    tokens = torch.randint(11, (5,))
    cut = sw.distribute_tensor(tokens, grid, [sw.Shard(0)] * grid.ndim)
    wanted = one(tokens)
    functional.cross_entropy(wanted, tokens).backward()
    out = model(cut)
    close(out, wanted.detach())
    functional.cross_entropy(out, cut).backward()
    for (n, p), q in zip(model.named_parameters(), one.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None
        else:
            close(p.grad, q.grad, n)
    close(model.norm.running_var, one.norm.running_var)
    assert len(seen) == 1
    model.load_state_dict(model.state_dict())
    assert model.double().embed.weight.dtype == torch.float64
    model.eval()
    close(model(cut), one.double().eval()(tokens))


@pytest.mark.parametrize("world", only([3], [2, 3, 4]))
def test_a_module_placed_by_patterns_computes_as_on_one_device(ranks, world):
    ranks(world, _by_pattern)


def _torchs_way():
    """With a partition function, input_fn and output_fn, as in torch."""
    grid = rank_mesh((2,), ("tp",))
    plain = nn.Linear(4, 6)
    one = copy.deepcopy(plain)

    def partition(_name, module, where):
        module.weight = nn.Parameter(sw.distribute_tensor(module.weight.detach(), where, [sw.Shard(0)]))

    model = sw.distribute_module(
        plain,
        grid,
        partition,
        input_fn=lambda _, inputs, where: (sw.DTensor.from_local(inputs[0], where, [sw.Replicate()]),),
        output_fn=lambda _, out, where: out.redistribute(where, [sw.Replicate()]).to_local(),
    )
    assert model.weight.placements == (sw.Shard(0),)
    assert model.bias.placements == (sw.Replicate(),)
    x = full(3, 4)
    out = model(x)
    assert type(out) is torch.Tensor
    torch.testing.assert_close(out, one(x))
    out.sum().backward()
    one(x).sum().backward()
    close(model.weight.grad, one.weight.grad)
    close(model.bias.grad, one.bias.grad)


def test_torchs_arguments_work(ranks):
    ranks(2, _torchs_way)


def _refusals():
    grid = mesh()
    texts = {}
    given = {
        "unknown": {"layers.*.weight": {"tp": sw.Shard(0)}, "layer.0.bias": {}},
        "module": {"nor?": {"tp": sw.Shard(0)}},
        "axis": {"layers.*.weight": {"pp": sw.Shard(0)}},
        "dim": {"layers.*.weight": {"tp": sw.Shard(0)}, "norm.bias": {"tp": sw.Shard(1)}},
        "pending": {"frozen": {"tp": sw.Shard(0)}, "embed.weight": [sw.Shard(0)] * 3},
    }
    for name, patterns in given.items():
        model = _net()
        before = {n: id(t) for n, t in [*model.named_parameters(), *model.named_buffers()]}
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared below
            sw.distribute_module(model, grid, patterns, lambda inputs, _: inputs)
        assert {n: id(t) for n, t in [*model.named_parameters(), *model.named_buffers()]} == before
        assert not model._forward_pre_hooks
        texts[name] = str(caught.value)
    model = sw.distribute_module(_net(), grid)
    with pytest.raises(ParallelError, match="already called"):
        sw.distribute_module(model, grid)
    return texts


def test_a_bad_pattern_is_refused_before_anything_changes(ranks):
    texts = ranks(2, _refusals)[0]
    assert texts["unknown"].startswith(
        "no parameter or buffer is named 'layer.0.bias'; the module has frozen, embed"
    )
    assert "it names a module; its own: 'nor?.weight', 'nor?.bias'" in texts["module"]
    assert "no axis 'pp'" in texts["axis"]
    assert texts["dim"].startswith("norm.bias: ")
    assert texts["pending"].startswith(("embed.weight: ", "3 placements for a mesh"))


def _local_map():
    grid = rank_mesh((2,), ("tp",))
    x, w = full(5, 7), full(7, 4, seed=1)
    dx = place(x, [sw.Shard(1)], requires_grad=True)
    dw = place(w, [sw.Shard(0)], requires_grad=True)
    multiply = sw.local_map(
        torch.mm,
        out_placements=[sw.Partial("sum")],
        in_placements=([sw.Shard(1)], [sw.Shard(0)]),
        device_mesh=grid,
    )
    out = multiply(dx, dw)
    assert out.placements == (sw.Partial("sum"),)
    close(out, x @ w)
    out.full_tensor().sum().backward()
    close(dx.grad, w.sum(1).expand(5, 7))
    close(dw.grad, x.sum(0).unsqueeze(1).expand(7, 4))
    with pytest.raises(LayoutError) as caught:
        multiply(place(x, [sw.Shard(0)]), dw)
    assert "argument 0 has layout f32[5@tp, 7], expected" in str(caught.value)
    moving = sw.local_map(
        torch.mm,
        out_placements=[sw.Partial("sum")],
        in_placements=([sw.Shard(1)], [sw.Shard(0)]),
        redistribute_inputs=True,
    )
    close(moving(place(x, [sw.Shard(0)]), dw), x @ w)
    two = sw.local_map(lambda a: (a * 2, a.numel()), out_placements=([sw.Shard(0)], None))
    double, count = two(place(x[:4], [sw.Shard(0)]))
    close(double, 2 * x[:4])
    assert count == 14

    @sw.local_map(out_placements=[sw.Replicate()])
    def decorated(a, *, factor):
        return a * factor

    close(decorated(place(x, [sw.Replicate()]), factor=3), 3 * x)
    with pytest.raises(LayoutError, match="2 out_placements for 1 outputs"):
        sw.local_map(torch.neg, out_placements=([sw.Shard(0)], None))(dx)
    with pytest.raises(
        LayoutError, match=r"output 1 is a int, and has placements: .* None for a plain value"
    ):
        sw.local_map(lambda a: (a, 3), out_placements=[sw.Shard(1)])(dx)
    with pytest.raises(LayoutError, match="2 in_placements for 1 flattened arguments"):
        multiply(dx)
    with pytest.raises(LayoutError, match="1 in_grad_placements for 2 flattened arguments"):
        sw.local_map(torch.mm, out_placements=[sw.Partial()], in_grad_placements=([sw.Shard(0)],))(dx, dw)
    plain = multiply(x, w)
    assert type(plain) is torch.Tensor
    assert torch.equal(plain, x @ w)


def test_local_map_runs_a_function_on_local_tensors(ranks):
    ranks(2, _local_map)
