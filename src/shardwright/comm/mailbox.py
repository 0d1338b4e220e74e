"""Messages between pairs of ranks, of the default group: over several axes, between two meshes, large ones.

A collective needs its data packed member by member, and repeated for members that want the same. A message
is sent from the local tensor itself and received into the result itself wherever it is one run of it; what
has to be packed is packed once for all ranks that want it. Transfers of several tensors share a message per
pair of ranks.

All ranks post the messages of a pair in the order of their plans: these have no number to be told by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from shardwright.comm.dtype import bits
from shardwright.comm.pack import copy_in, in_memory, joined, move, view_of
from shardwright.comm.record import Sending, recording
from shardwright.comm.task import Task, filled, room, tensor
from shardwright.comm.uncounted import say_if_uncounted
from shardwright.index.overlap import Strided, as_run
from shardwright.plan.plan import Plan
from shardwright.plan.work import Held, Share, Terms, Transfer

# Keeps our messages apart from the user's own untagged ones (gloo; NCCL orders them by issue).
TAG = 53187


@dataclass(frozen=True, slots=True)
class Message:
    """What goes to some ranks, or comes from one into a slot. run: the views as one stretch of memory."""

    ranks: tuple[int, ...]
    views: tuple[Strided, ...]
    run: Strided | None
    numel: int
    slot: int = 0


class Mailing(Task):
    """A transfer as messages, into one tensor per term, or into one.

    own_term: the view of the source that is all of the own term, if there is one; then nothing is copied.
    """

    sends = True

    def __init__(self, work: Transfer, plan: Plan) -> None:
        self.kept, self.terms, self.own_slot = work.kept, work.terms, work.own_term
        self.axis = plan.names(work.axes)
        others = _to_the_next_first(work)
        wanted: dict[tuple[Strided, ...], list[int]] = {}
        for share in others:
            if any(view.numel for view in share.send):
                wanted.setdefault(share.send, []).append(plan.rank_at(share.member))
        self.outgoing = [_message(ranks, views) for views, ranks in wanted.items()]
        incoming = [_message([plan.rank_at(s.member)], s.receive, s.term) for s in reversed(others)]
        self.incoming = [message for message in incoming if message.numel]
        self.own_term = _whole_term(work) if work.terms else None
        self.numel_sent = sum(message.numel * len(message.ranks) for message in self.outgoing)

    def run(self, held: Held, why: str) -> Held:
        """The result, or its terms."""
        return self._sent((self,), (held,), why).wait()[0]

    def start(self, held: Held, why: str) -> Posted:
        """Nothing is taken from the memory of `held` after the return."""
        return Posted(self._sent((self,), (held,), why, copies=True))

    def together(self, tasks: Sequence[Task], held: Sequence[Held], why: str) -> list[Held]:
        """One message per pair of ranks for all tensors."""
        return self._sent(cast("Sequence[Mailing]", tasks), held, why).wait()

    def _sent(
        self, tasks: Sequence[Mailing], held: Sequence[Held], why: str, *, copies: bool = False
    ) -> Arriving:
        """Post every message, copy the own parts meanwhile, and return without waiting."""
        xs = [in_memory(tensor(x), task.kept.source) for task, x in zip(tasks, held, strict=True)]
        say_if_uncounted()
        if not (recording() and any(task.outgoing or task.incoming for task in tasks)):
            return _posted(tasks, xs, copies=copies)
        sent = sum(task.numel_sent for task in tasks)
        with Sending(
            "send_recv",
            axis=self.axis,
            bytes_sent=sent * xs[0].element_size(),
            reason=why,
            shape=tuple(xs[0].shape) if len(xs) == 1 else (sent,),
            dtype=xs[0].dtype,
        ):
            return _posted(tasks, xs, copies=copies)

    def slots(self, x: Tensor, *, copies: bool) -> list[Tensor]:
        """Where terms arrive, or the result."""
        if self.kept.nothing:
            return [x.clone() if copies else x]
        return [self._slot(x, index, copies=copies) for index in range(max(self.terms, 1))]

    def _slot(self, x: Tensor, index: int, *, copies: bool) -> Tensor:
        if self.own_term is not None and index == self.own_slot:
            own = view_of(x, self.own_term).view(self.kept.target.shape)
            return own.clone() if copies else own
        return room(x, self.kept.target, self.kept.filling)

    def keep_own(self, x: Tensor, slots: Sequence[Tensor]) -> None:
        """Copy what the rank holds already."""
        if not (self.kept.nothing or self.own_term is not None):
            move(x, slots[self.own_slot], self.kept.views)

    def finished(self, slots: list[Tensor]) -> Held:
        """The result once everything has arrived."""
        if not self.terms:
            return filled(slots[0], self.kept.filling)
        borrowed = None if self.own_term is None else self.own_slot
        return Terms(slots, [index != borrowed for index in range(len(slots))])


def _to_the_next_first(work: Transfer) -> list[Share]:
    """The other members, this rank's next one first, so that not all send to one rank at once."""
    members = [share.member for share in work.shares]
    own = next((i for i, member in enumerate(members) if member >= work.own), 0)  # type: ignore[operator]
    turned = [*work.shares[own:], *work.shares[:own]]
    return [share for share in turned if share.member != work.own]


def _message(ranks: Sequence[int], views: tuple[Strided, ...], slot: int = 0) -> Message:
    return Message(tuple(ranks), views, as_run(views), sum(view.numel for view in views), slot)


def _whole_term(work: Transfer) -> Strided | None:
    """The view of the local tensor that is this rank's whole term, if it has the term's shape."""
    own = work.kept.views
    if len(own) != 1 or own[0][0].size != tuple(size for size in work.kept.target.shape if size != 1):
        return None
    return own[0][0]


# What arrives: where it is received; its rank; and if that is a buffer, what it fills: (tensor, message).
_Arrival = tuple[Tensor, int, Sequence[tuple[Tensor, Message]]]


@dataclass(frozen=True, slots=True)
class Arriving:
    """Messages under way. Nothing in the slots may be read before `wait()`.

    received: per message its work (None: a part of the batch) and what it fills from a buffer; like those of
        the batch, those that nobody has waited for.
    sent: what must stay alive until `works` are done.
    """

    tasks: Sequence[Mailing]
    slots_of: list[list[Tensor]]
    received: list[tuple[Work | None, _Arrival]]
    works: Sequence[Work]
    sent: Sequence[Tensor]
    batch: list[Work]

    def each(self) -> Iterator[int]:
        """The rank of one message after another, once what it brings is in the slots."""
        while self.batch:  # gloo waits for ever for what was waited for
            self.batch.pop().wait()
        while self.received:
            arrival, (buffer, rank, fills) = self.received.pop(0)
            if arrival is not None:
                arrival.wait()
            position = 0
            for slot, message in fills:
                copy_in(buffer[position : position + message.numel], slot, message.views)
                position += message.numel
            yield rank

    def wait(self) -> list[Held]:
        """The results, once everything has arrived and everything that was sent has left."""
        for _ in self.each():
            pass
        for work in self.works:
            work.wait()
        return [task.finished(slots) for task, slots in zip(self.tasks, self.slots_of, strict=True)]


@dataclass(frozen=True, slots=True)
class Posted:
    """A transfer of one tensor under way; called, it waits for all of it."""

    arriving: Arriving

    def __call__(self) -> Held:
        """The result, or its terms."""
        return self.arriving.wait()[0]

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """Of a result: a rank, and the result with that one's part in it; this one, then as they arrive."""
        (task,), (slots,) = self.arriving.tasks, self.arriving.slots_of
        if not task.terms:
            yield from ((rank, slots[0]) for rank in chain([dist.get_rank()], self.arriving.each()))


def _posted(tasks: Sequence[Mailing], xs: Sequence[Tensor], *, copies: bool) -> Arriving:
    slots_of = [task.slots(x, copies=copies) for task, x in zip(tasks, xs, strict=True)]
    if xs[0].is_meta:
        return Arriving(tasks, slots_of, [], (), (), [])  # a rehearsal: there is nothing to send
    places = list(_place(tasks[0], slots_of[0]) if len(tasks) == 1 else _shared_places(tasks, slots_of))
    parts = _parts(tasks[0], xs[0], copies=copies) if len(tasks) == 1 else _shared_parts(tasks, xs)
    post = _post_singly if _posts_singly(xs[0]) else _post_as_one_batch
    received, works, sent, batch = post(places, parts)
    for task, x, slots in zip(tasks, xs, slots_of, strict=True):
        task.keep_own(x, slots)
    return Arriving(tasks, slots_of, received, works, sent, batch)


def _posts_singly(x: Tensor) -> bool:
    """gloo starts each message when it is posted: the first travel while the others are packed."""
    return x.device.type == "cpu"


_Posted = tuple[list[tuple[Work | None, _Arrival]], list[Work], list[Tensor], list[Work]]


def _post_singly(places: Sequence[_Arrival], parts: Iterator[tuple[Tensor, Sequence[int]]]) -> _Posted:
    received = [(cast("Work | None", _post(dist.irecv, place[0], place[1])), place) for place in places]
    works: list[Work] = []
    sent: list[Tensor] = []
    for part, ranks in parts:
        works += [_post(dist.isend, part, rank) for rank in ranks]
        sent.append(part)
    return received, works, sent, []


def _post(verb: Callable[..., Work | None], part: Tensor, rank: int) -> Work:
    return cast("Work", verb(bits(part), rank, tag=TAG))


def _post_as_one_batch(places: Sequence[_Arrival], parts: Iterator[tuple[Tensor, Sequence[int]]]) -> _Posted:
    """NCCL runs messages in the order in which they are posted unless they are posted together."""
    leaving = list(parts)
    operations = [dist.P2POp(dist.irecv, bits(place), rank) for place, rank, _ in places] + [
        dist.P2POp(dist.isend, bits(part), rank) for part, ranks in leaving for rank in ranks
    ]
    batch = dist.batch_isend_irecv(operations) if operations else []
    return [(None, place) for place in places], [], [part for part, _ in leaving], batch


def _place(task: Mailing, slots: Sequence[Tensor]) -> Iterator[_Arrival]:
    """Where each message is received: in the result itself, or in a buffer of its own."""
    for message in task.incoming:
        slot = slots[message.slot]
        if message.run is not None:
            yield view_of(slot, message.run), message.ranks[0], ()
        else:
            yield slot.new_empty(message.numel), message.ranks[0], ((slot, message),)


def _parts(task: Mailing, x: Tensor, *, copies: bool) -> Iterator[tuple[Tensor, Sequence[int]]]:
    """What each message carries: the local tensor's own memory, or a packed copy."""
    for message in task.outgoing:
        if message.run is None:
            yield joined(x, message.views), message.ranks
        else:
            run = view_of(x, message.run)
            yield (run.clone() if copies else run), message.ranks


def _shared_places(tasks: Sequence[Mailing], slots_of: Sequence[Sequence[Tensor]]) -> Iterator[_Arrival]:
    """A buffer for each rank that sends anything, and what it fills, in the order of the tensors."""
    fills: dict[int, list[tuple[Tensor, Message]]] = {}
    for task, slots in zip(tasks, slots_of, strict=True):
        for message in task.incoming:
            fills.setdefault(message.ranks[0], []).append((slots[message.slot], message))
    for rank, of_rank in sorted(fills.items(), key=lambda item: item[0]):
        yield of_rank[0][0].new_empty(sum(message.numel for _, message in of_rank)), rank, of_rank


def _shared_parts(tasks: Sequence[Mailing], xs: Sequence[Tensor]) -> Iterator[tuple[Tensor, Sequence[int]]]:
    """What goes to each rank, of all tensors in their order."""
    pieces: dict[int, list[Tensor]] = {}
    for task, x in zip(tasks, xs, strict=True):
        for part, ranks in _parts(task, x, copies=False):
            for rank in ranks:
                pieces.setdefault(rank, []).append(part)
    for rank, of_rank in sorted(pieces.items()):
        yield (of_rank[0] if len(of_rank) == 1 else torch.cat(of_rank)), (rank,)
