"""Several modules as one sharded unit are gathered together, and train as on one device, whoever runs."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwright as sw
from shardwright.errors import ParallelError
from shardwright.grads import GradientSynchronizer
from shardwright.parallel import parallelize_fsdp, parallelize_hsdp
from shardwright.testing.meshes import rank_mesh

TOKENS = torch.arange(24).view(4, 6) % 9


class _Net(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed, self.body, self.norm = nn.Embedding(9, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 9)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens, head=True):
        x = self.norm(self.body(self.embed(tokens)).tanh())
        return self.head(x) if head else x


def _loss(out, tokens):
    return functional.cross_entropy(out.flatten(0, 1), tokens.flatten(), reduction="sum")


def _whole(model, tokens):
    _loss(model(tokens), tokens).backward()


def _head_by_chunks(model, tokens):
    stream = model(tokens, head=False)
    cut = stream.detach().requires_grad_()
    for each in (slice(0, 2), slice(2, 6)):
        _loss(model.head(cut[:, each]), tokens[:, each]).backward()
    stream.backward(cut.grad)


def _parts_alone_before(model, tokens):
    before = list(model.parameters())
    with torch.no_grad():
        model.head(model(tokens, head=False))
        model.norm(torch.ones(2, 8))
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))  # what it gathered is freed
    _whole(model, tokens)


def _nothing_but_parts(model, tokens):
    _loss(model.head(model.norm(model.body(model.embed(tokens)).tanh())), tokens).backward()


def _trained(tied, options):
    torch.manual_seed(0)
    alone = _Net(tied)
    model, mesh = copy.deepcopy(alone), rank_mesh((2,), ("dp",))
    together = [model.norm, model.head, *([model.embed] if tied else [])]
    assert parallelize_fsdp(together, mesh, **options) is together
    parallelize_fsdp(model, mesh)
    pairs = [(alone, TOKENS), (model, TOKENS[mesh.get_local_rank() :: 2])]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each, _ in pairs]
    for program in (_whole, _head_by_chunks, _parts_alone_before, _nothing_but_parts, _whole):
        for each, tokens in pairs:
            program(each, tokens)
        GradientSynchronizer(model).synchronize()
        for (name, mine), wanted in zip(model.named_parameters(), alone.parameters(), strict=True):
            told = f"{name} after {program.__name__}"
            torch.testing.assert_close(mine.grad.full_tensor(), wanted.grad, msg=told)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    alone.double()
    model.double()
    _whole(alone, TOKENS)
    _whole(model, pairs[1][1])
    for mine, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), wanted.grad, rtol=1e-4, atol=1e-5)
    with sw.trace() as seen, torch.no_grad():
        torch.testing.assert_close(model(TOKENS), alone(TOKENS), rtol=1e-4, atol=1e-5)
    assert [each.op for each in seen.collectives] == ["all_gather"] * 2


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}])
def test_several_modules_are_one_unit_whoever_is_called(ranks, tied, options):
    ranks(2, _trained, tied, options)


def _hybrid():
    alone = _Net(False)
    model, mesh = copy.deepcopy(alone), rank_mesh((2, 2), ("replicate", "shard"))
    parallelize_hsdp((model.norm, model.norm, model.head), mesh, shard_dim="shard")
    parallelize_hsdp(model, mesh, shard_dim="shard")
    rank = 2 * mesh["replicate"].get_local_rank() + mesh["shard"].get_local_rank()
    _whole(alone, TOKENS)
    _whole(model, TOKENS[rank : rank + 1])
    for mine, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), wanted.grad)


def test_several_modules_are_one_unit_of_a_hybrid(ranks):
    ranks(4, _hybrid)


def _refused():
    model, mesh = _Net(False), rank_mesh((2,), ("dp",))
    for several, why in (
        ([model.norm, nn.ModuleList([model.head])], "a ModuleList has no forward"),
        ([model.norm, model.head.bfloat16()], "parameters of one dtype"),
        ([model.norm, None], "takes a module, got list"),
    ):
        with pytest.raises(ParallelError, match=why):
            parallelize_fsdp(several, mesh)
    parallelize_fsdp([model.embed, model.norm], mesh)  # the refused calls have changed nothing
    with pytest.raises(ParallelError, match="places this module already"):
        parallelize_fsdp([model.body, model.norm], mesh)
    for _ in range(2):
        with pytest.raises(ParallelError, match="fix: shard the module that holds them too"):
            model(TOKENS)
    parallelize_fsdp(model.float(), mesh)
    _whole(model, TOKENS)


def test_what_cannot_be_one_unit_is_refused(ranks):
    ranks(2, _refused)


class _Twice(nn.Module):
    """Layers that are registered as they are, and inside of what is called."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.blocks = nn.ModuleList(nn.Sequential(layer, nn.Tanh()) for layer in self.layers)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def _by_another_path(units):
    torch.manual_seed(0)
    alone = _Twice()
    model, mesh = copy.deepcopy(alone), rank_mesh((2,), ("dp",))
    for unit in getattr(model, units):
        parallelize_fsdp(unit, mesh)
    parallelize_fsdp(model, mesh)
    for _ in range(2):
        _whole(alone, TOKENS)
        with sw.trace() as seen:
            _whole(model, TOKENS[mesh.get_local_rank() :: 2])
        GradientSynchronizer(model).synchronize()
    for (name, mine), wanted in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), wanted.grad, msg=name)
    return sum(each.op == "all_gather" for each in seen.collectives)


@pytest.mark.parametrize("units", ["layers", "blocks"])
def test_layers_of_units_may_be_registered_by_another_path(ranks, units):
    """Around such units the model's own one took their layers again: torch's error about meshes."""
    assert ranks(2, _by_another_path, units) == [5, 5]  # of each layer for forward and backward, of the rest


class _Own:
    """What a program calls its results."""

    def __init__(self, logits):
        self.logits = logits


@dataclass
class _Told:
    logits: torch.Tensor


class _Wraps(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.net, self.kind = _Net(False), kind

    def forward(self, tokens):
        return self.kind(self.net(tokens))


def _returned(kind, keep):
    torch.manual_seed(0)
    alone = _Wraps(_Told)
    mesh = rank_mesh((2,), ("dp",))
    model = copy.deepcopy(alone)
    model.kind = kind
    parallelize_fsdp(model, mesh, reshard_after_forward=not keep)
    mine = TOKENS[mesh.get_local_rank() :: 2]
    with torch.no_grad():
        torch.testing.assert_close(model(mine).logits, alone(mine).logits)
    if kind is _Own:
        with pytest.raises(ParallelError, match="returned a _Own, in which fully_shard finds no tensor"):
            model(mine)
        model.kind = _Told
    _loss(alone(TOKENS).logits, TOKENS).backward()
    _loss(model(mine).logits, mine).backward()
    GradientSynchronizer(model).synchronize()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", [_Own, _Told])
def test_results_in_which_nobody_finds_a_tensor_are_refused(ranks, kind, keep):
    """Where the unit kept its parameters, no gradient came, and nothing said so."""
    ranks(2, _returned, kind, keep)
