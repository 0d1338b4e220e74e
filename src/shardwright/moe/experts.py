"""The networks that tokens pass: gated linear units, one or one per expert."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from shardwright.moe.grouped_linear import GroupedLinear, refuse_no_rows, refuse_no_sizes


class GroupedExperts(nn.Module):
    """y_i = (silu(x_i G[g]) * (x_i U[g])) D[g]:  [T, dim], int64 [local experts] -> [T, dim].

    Rows are sorted by expert g; the second argument counts them.

    Args:
        num_experts: number of experts over all ranks.
        dim: length of a token.
        hidden_dim: inner length of one expert.
    """

    def __init__(self, num_experts: int, dim: int, hidden_dim: int) -> None:
        super().__init__()
        refuse_no_sizes(num_experts=num_experts, dim=dim, hidden_dim=hidden_dim)
        self.gate = GroupedLinear(num_experts, dim, hidden_dim)
        self.up = GroupedLinear(num_experts, dim, hidden_dim)
        self.down = GroupedLinear(num_experts, hidden_dim, dim)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return [T, dim] for rows [T, dim] sorted by expert, of which expert e has `counts[e]`."""
        inner = functional.silu(self.gate(rows, counts)) * self.up(rows, counts)
        result: Tensor = self.down(inner, counts)
        return result


class SharedExpert(nn.Module):
    """y = (silu(x G) * (x U)) D, for every token:  [T, dim] -> [T, dim].

    Args:
        dim: length of a token.
        hidden_dim: inner length.
    """

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        refuse_no_sizes(dim=dim, hidden_dim=hidden_dim)
        self.dim = dim
        self.gate = nn.Linear(dim, hidden_dim, bias=False)
        self.up = nn.Linear(dim, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Return [T, dim] for rows [T, dim]."""
        refuse_no_rows("SharedExpert", rows, self.dim)
        result: Tensor = self.down(functional.silu(self.gate(rows)) * self.up(rows))
        return result
