"""Messages around a ring: to the next rank, from the one before, while this one computes.

Of the default group, which every rank has, like all messages between pairs (`mailbox`): a ring may go over
several axes, which have no group together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from shardwright.comm.dtype import bits
from shardwright.comm.functional import exchange_rows
from shardwright.comm.record import Sending, recording
from shardwright.comm.traced import goes_in_groups
from shardwright.comm.uncounted import say_if_uncounted

# Keeps these messages apart from those of redistributions, which may be under way between the same ranks.
_TAG = 53188


@dataclass(frozen=True, slots=True)
class Passing:
    """One message to the next rank and one from the rank before, under way.

    arriving: what is received; not to be read before `wait`. leaving: stays alive until then.
    """

    works: Sequence[Work]
    arriving: Tensor
    leaving: Tensor

    def wait(self) -> Tensor:
        """What has arrived, once what was sent has left."""
        for work in self.works:
            work.wait()
        return self.arriving


@dataclass(frozen=True, slots=True)
class Ring:
    """This rank's place in a ring.

    Args:
        ranks: all of them, in the order in which messages go round.
        own: which of them this one is.
        group: that of the axis, for what may not go between pairs of ranks (`traced`); None: several axes.
        axis, reason: what the record says.
        blocking: wait for each message before anything is computed; to measure what overlap is worth.
    """

    ranks: tuple[int, ...]
    own: int
    group: ProcessGroup | None
    axis: str
    reason: str
    blocking: bool = False

    def source(self, step: int) -> int:
        """Whose part this rank has after `step` messages."""
        return (self.own - step) % len(self.ranks)

    def pass_on(self, leaving: Tensor, size: int, *, lane: int = 0) -> Passing:
        """Post a flat tensor to the next rank, and the receipt of `size` elements from the one before.

        Args: lane: 0 or 1; messages of one lane arrive in the order in which they are sent.
        Cost: this rank sends `leaving`; an empty one is not sent.
        """
        if self.group is not None and goes_in_groups(leaving):
            return Passing((), self._exchanged(leaving, size, self.group), leaving)
        arriving = leaving.new_empty(size)
        if leaving.is_meta:
            return Passing((), arriving, leaving)  # a rehearsal: there is nothing to send
        say_if_uncounted()
        if not recording():
            return self._posted(leaving, arriving, lane)
        with Sending(
            "send_recv",
            axis=self.axis,
            bytes_sent=leaving.nbytes,
            reason=self.reason,
            shape=tuple(leaving.shape),
            dtype=leaving.dtype,
        ):
            return self._posted(leaving, arriving, lane)

    def _exchanged(self, leaving: Tensor, size: int, group: ProcessGroup) -> Tensor:
        n = len(self.ranks)
        incoming, outgoing = [0] * n, [0] * n
        incoming[self.own - 1], outgoing[(self.own + 1) % n] = size, leaving.numel()
        return exchange_rows(leaving, incoming, outgoing, group, axis=self.axis, reason=self.reason)

    def _posted(self, leaving: Tensor, arriving: Tensor, lane: int) -> Passing:
        passing = Passing(self._started(leaving, arriving, _TAG + lane), arriving, leaving)
        if not self.blocking:
            return passing
        return Passing((), passing.wait(), leaving)  # gloo waits for ever for what was waited for

    def _started(self, leaving: Tensor, arriving: Tensor, tag: int) -> list[Work]:
        """gloo starts each message as it is posted; NCCL needs those that meet to be posted together."""
        after, before = self.ranks[(self.own + 1) % len(self.ranks)], self.ranks[self.own - 1]
        both = ((dist.irecv, arriving, before), (dist.isend, leaving, after))
        messages = [(verb, bits(x), rank) for verb, x, rank in both if x.numel()]
        if leaving.device.type == "cpu":
            return [cast("Work", verb(x, rank, tag=tag)) for verb, x, rank in messages]
        operations = [dist.P2POp(verb, x, rank, tag=tag) for verb, x, rank in messages]
        return dist.batch_isend_irecv(operations) if operations else []
