"""How tokens reach the ranks that hold their experts, and come back."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_process_group_ranks

from shardwright.comm.collectives import all_to_all_uneven
from shardwright.comm.functional import exchange_rows
from shardwright.errors import ParallelError, refuse_no_number, refuse_other_kind
from shardwright.moe.permute import PairOrder, permute_rows, sort_by_group, unpermute_rows


@dataclass(frozen=True)
class Arrival:
    """What this rank receives in one exchange, and how to undo it.

    `counts` rows per local expert, int64 [local experts]; `pairs` sorts the received rows (by sender, then
    by expert) by expert, then by sender: the order that one device would have if it held the senders' tokens
    in turn.
    """

    counts: Tensor
    pairs: PairOrder
    sent: tuple[int, ...]
    received: tuple[int, ...]


class ExpertCommunicator:
    """The exchange of tokens inside one expert-parallel group. Not a module: it has no parameters.

    Expert e lives on the member that a `Shard(0)` of the experts gives it: runs of ceil(experts / members),
    so later members may hold fewer, or none. Every member takes part in every exchange, with tokens or not.

    Args:
        group: the ranks of one expert-parallel group.
        num_experts: number of experts over the group.
        axis: the mesh axis that the group lies on, for the record of communication.
        ranks: those that the experts are placed over, copies included; what gathers weights for a forward
            shows plain tensors then, which cannot say. By default those of the group.
    """

    def __init__(
        self,
        group: ProcessGroup,
        num_experts: int,
        axis: str = "ep_shard",
        ranks: AbstractSet[int] = frozenset(),
    ) -> None:
        fix = 'the group of an axis: mesh.get_group("ep_shard")'
        refuse_other_kind("ExpertCommunicator: group", group, ProcessGroup, ParallelError, fix=fix)
        refuse_no_number("ExpertCommunicator: num_experts", num_experts, ParallelError, whole=True)
        refuse_other_kind("ExpertCommunicator: axis", axis, str, ParallelError, fix="the name of the axis")
        refuse_other_kind(
            "ExpertCommunicator: ranks", ranks, AbstractSet, ParallelError, fix="a set of ranks"
        )
        self.group = group
        self.axis = axis
        self.ranks = ranks or frozenset(get_process_group_ranks(group))
        self.experts_of_member = _run_lengths(num_experts, group.size())

    @property
    def num_local_experts(self) -> int:
        """Return the number of experts that this rank holds."""
        return self.experts_of_member[self.group.rank()]

    def announce(self, counts: Tensor) -> Arrival:
        """Tell every member how many rows its experts will get:  int64 [experts] -> what arrives here.

        Raises: ParallelError: counts of another shape or dtype.
        Cost: one all-to-all of 8 bytes per expert; on an accelerator, one synchronisation with the host.
        """
        members, own = self.group.size(), self.num_local_experts
        experts = sum(self.experts_of_member)
        if counts.dtype != torch.int64 or tuple(counts.shape) != (experts,):
            raise ParallelError(
                f"ExpertCommunicator.announce: counts say how many rows each of the {experts} experts "
                f"gets, in int64 of shape ({experts},), got {counts.dtype} of shape {tuple(counts.shape)}\n"
                f"  fix: torch.bincount(expert_of_row, minlength={experts})"
            )
        announced = exchange_rows(
            counts,
            [own] * members,
            self.experts_of_member,
            self.group,
            axis=self.axis,
            reason="token counts of experts",
        ).view(members, own)
        sent = [int(part.sum()) for part in counts.cpu().split(list(self.experts_of_member))]
        received = announced.cpu().sum(1).tolist()
        expert_of_row = _expert_of_row(announced, sum(received))
        return Arrival(announced.sum(0), sort_by_group(expert_of_row), tuple(sent), tuple(received))

    def dispatch(self, rows: Tensor, arrival: Arrival) -> Tensor:
        """Send rows sorted by expert to their experts:  [P, d] -> [received, d], sorted by local expert."""
        received = all_to_all_uneven(
            rows,
            arrival.received,
            arrival.sent,
            self.group,
            axis=self.axis,
            reason="dispatch tokens to experts",
        )
        return permute_rows(received, arrival.pairs)

    def combine(self, rows: Tensor, arrival: Arrival) -> Tensor:
        """Send the experts' results back: the inverse of `dispatch`."""
        by_sender = unpermute_rows(rows, arrival.pairs)
        return all_to_all_uneven(
            by_sender,
            arrival.sent,
            arrival.received,
            self.group,
            axis=self.axis,
            reason="return expert results",
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return self: a copied module talks to the same peers, and a process group cannot be copied."""
        return self


def _run_lengths(length: int, members: int) -> tuple[int, ...]:
    """Return how many of `length` elements each member holds, in runs of ceil(length / members)."""
    run = -(-length // members)
    return tuple(min(run, max(length - run * member, 0)) for member in range(members))


def _expert_of_row(announced: Tensor, rows: int) -> Tensor:
    """Return the local expert of each received row:  int64 [members, local experts] -> int64 [rows]."""
    members, own = announced.shape
    experts = torch.arange(own, device=announced.device).repeat(members)
    return experts.repeat_interleave(announced.flatten(), output_size=rows)
