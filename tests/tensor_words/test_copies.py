"""A model that words have placed is copied and saved as a whole: its hooks go with it."""

import copy
import io

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.parallel import parallelize_tensor
from shardwright.testing import rank_mesh


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(9, 8), nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def _saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _computes_the_same(copied, sequence):
    torch.manual_seed(0)
    model, tokens = Net(), torch.randint(9, (2, 5))
    wanted = model(tokens).detach()
    mesh = rank_mesh((2,), ("tp",))
    words = {"embed": "embedding_rowwise", "blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    parallelize_tensor(model, mesh, words, sequence_parallel=sequence)
    twin = copied(model)
    with sw.spmd(mesh):
        torch.testing.assert_close(twin(tokens).full_tensor(), wanted)


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("copied", [copy.deepcopy, _saved])
def test_a_copy_computes_the_same(ranks, copied, sequence):
    ranks(2, _computes_the_same, copied, sequence)
