"""Models with other habits: torch's own layers, convolutions, recurrence, arithmetic on weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCAB, DIM, HIDDEN = 30, 16, 24


class Model(nn.Module):
    """An embedding, a list of blocks [rows, tokens, DIM] -> the same, a head."""

    def __init__(self, *blocks: nn.Module, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(DIM, VOCAB, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight
        self.checkpointing = ""

    def forward(self, tokens: Tensor) -> Tensor:
        """[rows, tokens] -> [rows, tokens, VOCAB]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self._through(block, x)
        out: Tensor = self.head(x)
        return out

    def _through(self, block: nn.Module, x: Tensor) -> Tensor:
        out: Tensor
        if self.checkpointing:
            out = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        else:
            out = block(x)
        return out


def encoder(*, tied: bool) -> nn.Module:
    """torch's encoder layers: one weight for q, k and v, biases, both orders of the norms."""
    layers = [
        nn.TransformerEncoderLayer(DIM, 4, HIDDEN, dropout=0.0, batch_first=True, norm_first=first)
        for first in (False, True)
    ]
    return Model(*layers, tied=tied)


class Convolution(nn.Module):
    """Along the tokens: a convolution, a norm of groups, a depthwise and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv1d(DIM, HIDDEN, 3, padding=1)
        self.norm = nn.GroupNorm(4, HIDDEN)
        self.each = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1, groups=HIDDEN)
        self.back = nn.ConvTranspose1d(HIDDEN, DIM, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, DIM] -> the same."""
        y = functional.gelu(self.norm(self.wide(x.transpose(1, 2))))
        return x + self.back(self.each(y)).transpose(1, 2)


def convolutions(*, tied: bool) -> nn.Module:
    """A convolutional network."""
    return Model(Convolution(), Convolution(), tied=tied)


class Recurrence(nn.Module):
    """A recurrent layer, both directions; it keeps its weights in a list of its own too."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = kind(DIM, DIM // 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, DIM] -> the same."""
        return x + self.cell(x)[0]


def lstm(*, tied: bool) -> nn.Module:
    """A recurrent network."""
    return Model(Recurrence(nn.LSTM), Recurrence(nn.LSTM), tied=tied)


def gru(*, tied: bool) -> nn.Module:
    """Another one."""
    return Model(Recurrence(nn.GRU), Recurrence(nn.GRU), tied=tied)


class Arithmetic(nn.Module):
    """Weights that are computed with before they meet data: merged, joined, sliced, normalised, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM)
        self.low = nn.Parameter(torch.randn(3, DIM) * 0.3)
        self.high = nn.Parameter(torch.randn(DIM, 3) * 0.3)
        self.left, self.right = nn.Linear(DIM, 5), nn.Linear(DIM, 7)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(12, DIM))
        self.scales = nn.ParameterList(nn.Parameter(torch.rand(DIM)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, DIM] -> the same."""
        merged = self.base.weight + self.high @ self.low
        y = functional.linear(x, merged, self.base.bias)
        both = torch.cat([self.left.weight, self.right.weight])
        z = functional.linear(y, both, torch.cat([self.left.bias, self.right.bias]))
        z = torch.tanh(self.normed(z)) + y[..., :4] @ self.base.weight[:4]
        # Of a bare sum the scales would get one gradient in one memory, to which torch adds twice.
        return x + z * torch.stack(list(self.scales)).square().sum(0)


def arithmetic(*, tied: bool) -> nn.Module:
    """Weights are computed with before they meet data."""
    return Model(Arithmetic(), Arithmetic(), tied=tied)
