"""The mixture-of-experts layer."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.errors import ParallelError
from shardwright.moe.communicator import ExpertCommunicator
from shardwright.moe.cut_tokens import as_part_of, computes_locally, cut_by_tokens, placed_on, rows_of
from shardwright.moe.experts import GroupedExperts, SharedExpert
from shardwright.moe.grouped_linear import as_autocast, refuse_no_rows
from shardwright.moe.permute import count_groups, sort_by_group, spread_tokens, unpermute_rows
from shardwright.moe.router import TopKRouter
from shardwright.tensor.plain.boundary import rank_local


class MoELayer(nn.Module):
    """Each token passes its `top_k` best experts:  [..., dim] -> [..., dim], rank-local tokens.

    (w, c) = router(x);   y_t = sum_k w[t, k] * expert[c[t, k]](x_t)  +  shared_expert(x_t) if there is one.

    The same code runs on one device and, after `enable_distributed_communicator`, with the experts spread
    over a group: tokens travel to their experts and back. The order of every sum is fixed, so the result
    depends on the mesh only by rounding, and on nothing else. A rank without tokens takes part like any
    other, and every parameter gets a gradient (zeros where nothing passed).

    `tokens_per_expert` (int64 [num_experts]) and `choices` (int64 [T, top_k]) describe the last call on this
    rank; they are plain attributes, no part of the state dict.

    Args:
        dim: length of a token.
        hidden_dim: inner length of one expert.
        num_experts: number of experts over all ranks.
        top_k: experts per token.
        shared_expert_dim: inner length of an expert that every token passes; None for none.
        normalize: whether the weights of a token add to one.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int,
        *,
        shared_expert_dim: int | None = None,
        normalize: bool = True,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.num_experts = num_experts
        self.router = TopKRouter(dim, num_experts, top_k, normalize=normalize)
        self.experts = GroupedExperts(num_experts, dim, hidden_dim)
        self.shared_expert = None if shared_expert_dim is None else SharedExpert(dim, shared_expert_dim)
        self.communicator: ExpertCommunicator | None = None
        self.tokens_per_expert = torch.zeros(num_experts, dtype=torch.int64)
        self.choices = torch.zeros(0, top_k, dtype=torch.int64)

    @property
    def num_local_experts(self) -> int:
        """Return the number of experts whose weights this rank uses."""
        return self.num_experts if self.communicator is None else self.communicator.num_local_experts

    def enable_distributed_communicator(self, group: ProcessGroup, axis: str = "ep_shard") -> None:
        """Exchange tokens with the members of `group` from now on; the caller places the experts' weights.

        Member i must hold the experts that `Shard(0)` over the group gives it. Nothing is communicated here.

        Raises:
            ParallelError: the layer has a communicator of another group already.
        """
        if self.communicator is not None and self.communicator.group is not group:
            raise ParallelError(
                "this MoELayer exchanges tokens in another group already; apply expert parallelism once"
            )
        placed = placed_on(self.experts.gate.weight)
        self.communicator = ExpertCommunicator(group, self.num_experts, axis, placed)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mixture, in the shape of x:  [..., dim] -> [..., dim].

        Raises:
            ConfigError: x is no tensor, or its last dim is not `dim`.

        Cost: with a communicator, all-to-alls of (top_k * T) rows there and back, and one of the counts.
        """
        refuse_no_rows("MoELayer", x, self.dim)
        if isinstance(x, TorchDTensor) and self.communicator is not None:
            return self._of_cut(x, self.communicator.ranks)
        tokens = x.reshape(-1, self.dim)
        mixed = self._mix(tokens)
        if self.shared_expert is not None:
            mixed = mixed + self.shared_expert(tokens)
        return mixed.view(x.shape)

    def _of_cut(self, x: TorchDTensor, ranks: AbstractSet[int]) -> Tensor:
        """The same of tokens whose sequence is cut: each rank mixes those that it holds.

        Raises: ConfigError: x has no dim of tokens.
        Cost: as of plain tokens; where a rank's part is not of whole tokens, or other ranks of the experts
            hold it too, x is cut by rows first.
        """
        tokens = cut_by_tokens(x, ranks | placed_on(self.experts.gate.weight))
        router = self.router.weight
        if isinstance(router, TorchDTensor) and not computes_locally(router):
            routing = self.router(tokens.reshape(-1, self.dim))
            weights, choices = (rows_of(tokens, part) for part in routing)
            with rank_local():
                mixed = self._mix_routed(tokens.to_local().reshape(-1, self.dim), weights, choices)
        else:
            with rank_local():
                mixed = self._mix(tokens.to_local().reshape(-1, self.dim))
        whole = as_part_of(tokens, mixed)
        return whole if self.shared_expert is None else whole + self.shared_expert(tokens)

    def _mix(self, tokens: Tensor) -> Tensor:
        """Return the weighted sum of the experts' results:  [T, dim] -> [T, dim]."""
        return self._mix_routed(tokens, *self.router(tokens))

    def _mix_routed(self, tokens: Tensor, weights: Tensor, choices: Tensor) -> Tensor:
        """Return it for a routing: weights and choices [T, top_k]."""
        self.choices = choices
        expert_of_pair = choices.flatten()
        counts = count_groups(expert_of_pair, self.num_experts)
        self.tokens_per_expert = counts
        pairs = sort_by_group(expert_of_pair)
        rows = spread_tokens(as_autocast(tokens), pairs, self.router.top_k)
        results = unpermute_rows(self._run_experts(rows, counts), pairs)
        slots = results.unflatten(0, (-1, self.router.top_k))
        return torch.sum(slots * weights.unsqueeze(-1), dim=1).to(tokens.dtype)

    def _run_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the results for rows sorted by expert, wherever the experts are:  [P, dim] -> [P, dim]."""
        if self.communicator is None or self.communicator.group.size() == 1:
            local: Tensor = self.experts(rows, counts)
            return local
        arrival = self.communicator.announce(counts)
        received = self.communicator.dispatch(rows, arrival)
        return self.communicator.combine(self.experts(received, arrival.counts), arrival)
