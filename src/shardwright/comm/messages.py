"""Messages straight between local tensors: no buffer where what is sent or received is one run of memory.

A collective needs its data packed member by member, and repeated for members that want the same. Messages
between pairs of ranks are sent from the local tensor itself and received into the result itself wherever
they are one run of it; what has to be packed is packed once for all ranks that want it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from shardwright.comm.channel import TAG, PeerWire
from shardwright.comm.dtype import bits
from shardwright.comm.pack import copy_in, joined, move, new_tensor, view_of
from shardwright.comm.record import Sending, recording
from shardwright.comm.terms import Terms
from shardwright.comm.uncounted import say_if_uncounted
from shardwright.index.overlap import Strided, as_run
from shardwright.plan.transfer import Memory, Transfer


@dataclass(frozen=True, slots=True)
class Message:
    """What goes to some members, or comes from one into a slot. run: the views as one stretch of memory."""

    members: tuple[int, ...]
    views: tuple[Strided, ...]
    run: Strided | None
    numel: int
    slot: int = 0


@dataclass(frozen=True, slots=True)
class Mail:
    """The messages of one rank in an exchange, into tensors that lie as `slot` says: one per term, or one.

    own: (from, to) views of what the rank holds already, for slot `own_slot`. own_term: the view that is all
    of that slot, if there is one; then nothing is copied.
    """

    outgoing: tuple[Message, ...]
    incoming: tuple[Message, ...]
    slot: Memory
    terms: int
    own: tuple[tuple[Strided, Strided], ...]
    own_slot: int
    own_term: Strided | None


def mail_of(table: Transfer, own: int) -> Mail:
    """The messages of member `own`: to its next neighbour first, so that not all send to one rank at once."""
    n = len(table.members)
    others = [(own + step) % n for step in range(1, n)]
    wanted: dict[tuple[Strided, ...], list[int]] = {}
    for member in others:
        views = table.send[own] if table.gather else table.send[member]
        if sum(view.numel for view in views):
            wanted.setdefault(views, []).append(member)
    outgoing = [_message(members, views) for views, members in wanted.items()]
    slot = table.slot
    incoming = [_incoming(member, table.receive[member], slot) for member in reversed(others)]
    own_slot = _slot_of([to for _, to in table.own], slot)
    held = tuple((source, _in_slot(to, slot)) for source, to in table.own)
    return Mail(
        tuple(outgoing),
        tuple(message for message in incoming if message.numel),
        slot,
        table.terms,
        held,
        own_slot,
        _whole_term(held, slot) if table.terms else None,
    )


def _message(members: Sequence[int], views: tuple[Strided, ...], slot: int = 0) -> Message:
    return Message(tuple(members), views, as_run(views), sum(view.numel for view in views), slot)


def _incoming(member: int, views: tuple[Strided, ...], slot: Memory) -> Message:
    return _message((member,), tuple(_in_slot(view, slot) for view in views), _slot_of(views, slot))


def _slot_of(views: Sequence[Strided], slot: Memory) -> int:
    return views[0].start // slot.numel if views and slot.numel else 0


def _in_slot(view: Strided, slot: Memory) -> Strided:
    return view._replace(start=view.start % slot.numel) if slot.numel else view


def _whole_term(own: tuple[tuple[Strided, Strided], ...], slot: Memory) -> Strided | None:
    """The view of the local tensor that is this rank's whole term, if it has the term's shape."""
    if len(own) != 1 or own[0][0].size != tuple(size for size in slot.shape if size != 1):
        return None
    return own[0][0]


@dataclass(frozen=True, slots=True)
class Arriving:
    """An exchange under way. Nothing in its slots may be read before `wait()`.

    received: per message its work (None: a part of the batch) and its buffer (None: received in place).
    sent: what must stay alive until `works` are done.
    """

    mail: Mail
    slots: list[Tensor]
    received: Sequence[tuple[Work | None, Tensor | None, Message]]
    works: Sequence[Work]
    sent: Sequence[Tensor]
    batch: Sequence[Work] = ()

    def wait(self) -> Tensor | Terms:
        """The result, once everything has arrived and everything that was sent has left."""
        for work in self.batch:
            work.wait()
        for arrival, buffer, message in self.received:
            if arrival is not None:
                arrival.wait()
            if buffer is not None:
                copy_in(buffer, self.slots[message.slot], message.views)
        for work in self.works:
            work.wait()
        if not self.mail.terms:
            return self.slots[0]
        borrowed = None if self.mail.own_term is None else self.mail.own_slot
        return Terms(self.slots, [index != borrowed for index in range(len(self.slots))])


def send_mail(wire: PeerWire, x: Tensor, mail: Mail, reason: str, *, copies: bool = False) -> Arriving:
    """Post every message, copy the own part meanwhile, and return without waiting.

    copies: take nothing from the memory of `x` after the return, so that it may be written to.
    All ranks post the messages of a pair in the order of their plans: these have no number to be told by.
    """
    say_if_uncounted()
    if not (recording() and (mail.outgoing or mail.incoming)):
        return _posted(wire, x, mail, copies=copies)
    count = sum(message.numel * len(message.members) for message in mail.outgoing)
    with Sending(
        "send_recv",
        axis=wire.axis,
        bytes_sent=count * x.element_size(),
        reason=reason,
        shape=tuple(x.shape),
        dtype=x.dtype,
    ):
        return _posted(wire, x, mail, copies=copies)


def _posted(wire: PeerWire, x: Tensor, mail: Mail, *, copies: bool) -> Arriving:
    slots = [_slot(x, mail, index, copies=copies) for index in range(max(mail.terms, 1))]
    if x.is_meta:
        return Arriving(mail, slots, (), (), ())  # a rehearsal: there is nothing to send
    if not _posts_singly(x):
        return _send_as_one_batch(wire, x, mail, slots, copies=copies)
    received = [
        (_post(dist.irecv, tensor, wire.ranks[message.members[0]]), buffer, message)
        for tensor, buffer, message in _places(slots, mail.incoming)
    ]
    works: list[Work] = []
    sent: list[Tensor] = []
    for tensor, message in _parts(x, mail.outgoing, copies=copies):
        works += [_post(dist.isend, tensor, wire.ranks[member]) for member in message.members]
        sent.append(tensor)
    _keep_own(x, mail, slots)
    return Arriving(mail, slots, received, works, sent)


def _slot(x: Tensor, mail: Mail, index: int, *, copies: bool) -> Tensor:
    if mail.own_term is not None and index == mail.own_slot:
        own = view_of(x, mail.own_term).view(mail.slot.shape)
        return own.clone() if copies else own
    return new_tensor(x, mail.slot)


def _keep_own(x: Tensor, mail: Mail, slots: Sequence[Tensor]) -> None:
    if mail.own_term is None:
        move(x, slots[mail.own_slot], mail.own)


def _posts_singly(x: Tensor) -> bool:
    """gloo starts each message when it is posted: the first travel while the others are packed."""
    return x.device.type == "cpu"


def _post(verb: Callable[..., Work | None], tensor: Tensor, rank: int) -> Work:
    return cast("Work", verb(bits(tensor), rank, tag=TAG))


def _send_as_one_batch(
    wire: PeerWire, x: Tensor, mail: Mail, slots: list[Tensor], *, copies: bool
) -> Arriving:
    """NCCL runs messages in the order in which they are posted unless they are posted together."""
    places, parts = list(_places(slots, mail.incoming)), list(_parts(x, mail.outgoing, copies=copies))
    operations = [
        dist.P2POp(dist.irecv, bits(tensor), wire.ranks[message.members[0]]) for tensor, _, message in places
    ] + [
        dist.P2POp(dist.isend, bits(tensor), wire.ranks[member])
        for tensor, message in parts
        for member in message.members
    ]
    works = dist.batch_isend_irecv(operations) if operations else []
    _keep_own(x, mail, slots)
    received = [(None, buffer, message) for _, buffer, message in places]
    return Arriving(mail, slots, received, (), [tensor for tensor, _ in parts], batch=works)


def _places(
    slots: Sequence[Tensor], incoming: Sequence[Message]
) -> Iterator[tuple[Tensor, Tensor | None, Message]]:
    """Where each message is received: in the result itself, or in a buffer of its own."""
    for message in incoming:
        slot = slots[message.slot]
        if message.run is not None:
            yield view_of(slot, message.run), None, message
        else:
            buffer = slot.new_empty(message.numel)
            yield buffer, buffer, message


def _parts(x: Tensor, outgoing: Sequence[Message], *, copies: bool) -> Iterator[tuple[Tensor, Message]]:
    """What each message carries: the local tensor's own memory, or a packed copy."""
    for message in outgoing:
        if message.run is None:
            yield joined(x, message.views), message
        else:
            run = view_of(x, message.run)
            yield (run.clone() if copies else run), message
