"""A decoder as its authors would write it: it knows of no mesh."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 256
_HEADS, _LAYERS = 8, 4


class Attention(nn.Module):
    """Causal, without biases; as many heads as its matrices have rows for."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, width] to the same."""
        heads = (p(x).unflatten(-1, (-1, WIDTH // _HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """Gated."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to the same."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Two residual branches."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.before_mlp, self.mlp = nn.RMSNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, width] to the same."""
        x = x + self.attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))


def decoder() -> nn.Module:
    """The blocks and a norm; the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(_LAYERS)), nn.RMSNorm(WIDTH))
