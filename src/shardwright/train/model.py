"""The decoder that `shardwright train` trains: bytes in, next-byte logits out.

Plain modules on plain tensors; nothing here knows of meshes. Every block also takes a batch without
sequences: the graph then stays connected, so each parameter gets a zero gradient, and experts still answer
their peers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.moe.layer import MoELayer
from shardwright.train.config import TrainConfig

VOCABULARY = 256
ROTARY_BASE = 10_000.0
EMBEDDING_STD = 0.3
WRITES_TO_STREAM = re.compile(r"\.(wo|down)\.weight$")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder; also what a checkpoint must agree with."""

    layers: int
    hidden: int
    heads: int
    seq_len: int
    experts: int
    top_k: int
    expert_hidden: int

    @classmethod
    def of(cls, config: TrainConfig) -> ModelShape:
        """The sizes that `config` asks for."""
        return cls(**{name: getattr(config, name) for name in cls.__dataclass_fields__})


MakeMoE = Callable[[ModelShape], nn.Module]


def make_moe(shape: ModelShape) -> nn.Module:
    """The mixture-of-experts layer of one block."""
    return MoELayer(shape.hidden, shape.expert_hidden, shape.experts, shape.top_k)


class Attention(nn.Module):
    """Causal self-attention with rotary positions:  [b, s, h] -> [b, s, h], b at least 1.

    The projections are four separate linear layers without bias, so that tensor parallelism is a placement of
    four weights by name: wq, wk, wv by rows (whole heads), wo by columns.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_size = shape.hidden // shape.heads
        self.wq = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.wk = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.wv = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.wo = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.core = AttentionCore(shape)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        heads = (linear(x).unflatten(-1, (-1, self.head_size)) for linear in (self.wq, self.wk, self.wv))
        q, k, v = (each.transpose(1, 2) for each in heads)  # [b, n, s, d]
        return self.wo(self.core(q, k, v).transpose(1, 2).flatten(2))


class AttentionCore(nn.Module):
    """What of an attention depends on positions, without weights: [b, n, s, d] thrice -> [b, n, s, d]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        cos, sin = rotary_tables(shape.seq_len, shape.hidden // shape.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries, keys and values of each head -> what each position attends to."""
        return functional.scaled_dot_product_attention(self._turn(q), self._turn(k), v, is_causal=True)

    def _turn(self, x: Tensor) -> Tensor:
        """Rotate the pairs (x[i], x[i + d/2]) by an angle that grows with the position:  [b, n, s, d]."""
        cos, sin = self.cos[: x.shape[2]].to(x.dtype), self.sin[: x.shape[2]].to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Block(nn.Module):
    """Attention, then experts, each on a normed copy of the residual stream:  [b, s, h] -> [b, s, h]."""

    def __init__(self, shape: ModelShape, make: MakeMoE) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.attention = Attention(shape)
        self.moe_norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.moe = make(shape)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        x = x + self._attend(self.attention_norm(x))
        return x + self.moe(self.moe_norm(x))

    def _attend(self, x: Tensor) -> Tensor:
        """Attention, which without sequences runs on one of zeros whose result is dropped.

        Flash attention on the CPU divides by the number of sequences; and under tensor parallelism the
        layouts of gradients are chosen by what moving them costs, which must be the same on ranks with and
        without sequences.
        """
        if x.shape[0]:
            return self.attention(x)
        return self.attention(functional.pad(x, (0, 0, 0, 0, 0, 1)))[:0]


class Decoder(nn.Module):
    """Next-byte logits:  int64 [b, s] -> [b, s, 256]."""

    def __init__(self, shape: ModelShape, make: MakeMoE = make_moe) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(VOCABULARY, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape, make) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.head = nn.Linear(shape.hidden, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [b, s] -> [b, s, 256]; s at most the shape's seq_len."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def init_weights(model: Decoder, seed: int) -> None:
    """Fill every parameter from `seed`, in place: the same values on every rank and for every mesh.

    Normal with standard deviation 1/sqrt(hidden) (0.3 for the embedding), divided by sqrt(2 layers) where a
    layer writes to the residual stream; norms start at one. Call it on the whole model, before anything is
    distributed. Each parameter has its own generator, so that its values depend neither on the order nor on
    the class of the modules around it.
    """
    for index, (name, parameter) in enumerate(sorted(model.named_parameters())):
        if parameter.dim() == 1:
            nn.init.ones_(parameter)
            continue
        generator = torch.Generator().manual_seed((seed * 1_000_003 + index) % 2**63)
        std = _init_std(name, model.shape)
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def _init_std(name: str, shape: ModelShape) -> float:
    if name == "embedding.weight":
        return EMBEDDING_STD
    std = shape.hidden**-0.5
    return std / math.sqrt(2 * shape.layers) if WRITES_TO_STREAM.search(name) else std


def rotary_tables(seq_len: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position x frequency, each float32 [seq_len, head_size / 2]."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), ROTARY_BASE**-exponents)
    return angles.cos().float(), angles.sin().float()


def count_parameters(model: nn.Module) -> int:
    """How many numbers the model learns."""
    return sum(math.prod(p.shape) for p in model.parameters())
