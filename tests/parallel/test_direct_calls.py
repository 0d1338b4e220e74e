"""A child of a sharded unit called on its own, before, between and after forwards of the whole."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwright.parallel import parallelize_fsdp
from shardwright.testing.meshes import rank_mesh

from .models import check_full_gradients


class Pair(nn.Module):
    """An encoder and a decoder that share an embedding, which belongs to the whole."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.encoder = nn.Sequential(self.embed, nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4), nn.Tanh()))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, memory):
        return self.head(self.norm(self.embed(tokens) + memory))


def _steps(model, tokens):
    """Generation's order of calls, then a direct call with a gradient beside one of the whole."""
    model.eval()
    with torch.no_grad():
        first = model(tokens, model.encoder(tokens))
        again = model.encoder(tokens)
    model.train()
    memory = model.encoder(tokens)
    out = model(tokens, memory)
    (out.square().sum() + memory.sin().sum()).backward()
    return first, again, memory.detach(), out.detach()


def _sharded(reshard):
    torch.manual_seed(0)
    plain = Pair()
    sharded = copy.deepcopy(plain)
    mesh = rank_mesh((2,), ("dp",))
    parallelize_fsdp(sharded.encoder[1], mesh)
    parallelize_fsdp(sharded, mesh, reshard_after_forward=reshard)
    tokens = torch.arange(12).reshape(6, 2) % 7
    mine = slice(3 * dist.get_rank(), 3 * dist.get_rank() + 3)
    for _ in range(2):  # gradients add up
        wanted = _steps(plain, tokens)
        for got, one in zip(_steps(sharded, tokens[mine]), wanted, strict=True):
            torch.testing.assert_close(got, one[mine])
        check_full_gradients(sharded, {n: p.grad for n, p in plain.named_parameters(remove_duplicate=False)})


def test_a_child_of_a_sharded_unit_can_be_called_on_its_own(ranks):
    ranks(2, _sharded, None)
    ranks(2, _sharded, True)


def _raises():
    """A child that fails leaves the unit as it was."""
    sharded = parallelize_fsdp(Pair(), rank_mesh((2,), ("dp",)))
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shape"):
            sharded.norm(torch.zeros(2, 3))
        with torch.no_grad():
            assert sharded.encoder(tokens).shape == (2, 3, 4)


def test_a_child_that_fails_leaves_the_unit_usable(ranks):
    ranks(2, _raises)


def _checkpointed():
    """Layers of one unit, each called on its own inside of a checkpoint: the last backward frees the unit."""
    torch.manual_seed(0)
    alone, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 4)
    model = parallelize_fsdp(copy.deepcopy(alone), rank_mesh((2,), ("dp",)))
    for each, part in ((alone, x), (model, x.chunk(2)[dist.get_rank()])):
        h = part
        for layer in each:
            h = checkpoint(lambda h, layer=layer: layer(h).tanh(), h, use_reentrant=False)
        h.square().sum().backward()
    check_full_gradients(model, {name: p.grad for name, p in alone.named_parameters()})


def test_a_checkpoint_of_a_direct_call_is_computed_again(ranks):
    """It read what the backward of another call had freed: wrong gradients, or no end."""
    ranks(2, _checkpointed)


class _Encodes(nn.Module):
    """A part is a unit of its own, and is called before the whole ever was."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.decoder = nn.Linear(4, 4)

    def encode(self, x):
        return self.encoder(x)

    def forward(self, x):
        return self.decoder(self.encode(x).tanh())


def _part_first(apart, own_backward):
    torch.manual_seed(0)
    alone, mesh, x = _Encodes(), rank_mesh((2,), ("dp",)), torch.randn(4, 4)
    model, rank = copy.deepcopy(alone), torch.distributed.get_rank()
    for name in apart:
        parallelize_fsdp(model.get_submodule(name), mesh)
    parallelize_fsdp(model, mesh)
    for each, rows in ((alone, x), (model, x.chunk(2)[rank])):
        for _ in range(2):
            code = each.encode(rows).square().sum()
            if own_backward:
                code.backward()
            each(rows).square().sum().backward()
    for (name, mine), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad, msg=name)


@pytest.mark.parametrize("own_backward", [False, True])
@pytest.mark.parametrize("apart", [["encoder"], ["encoder.0", "encoder"], ["encoder.0", "encoder.1"]])
def test_a_unit_may_be_called_before_the_whole(ranks, apart, own_backward):
    ranks(2, _part_first, apart, own_backward)
