"""One batch of messages between this rank and others, on the default group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.dtype import as_bytes, moves_natively
from shardwright.comm.record import Sending, recording
from shardwright.comm.uncounted import say_if_uncounted

# Keeps these messages apart from the user's own untagged ones and from those inside one mesh.
_TAG = 53188


@dataclass(frozen=True, slots=True)
class Mail:
    """Per peer the views that make up the message to it, and those that the message from it fills."""

    outgoing: dict[int, list[Tensor]]
    incoming: dict[int, list[Tensor]]


@dataclass(frozen=True, slots=True)
class Travelling:
    """Messages that were posted: what to wait for, what arrives, where it belongs; and what must not die."""

    works: Sequence[dist.Work]
    arriving: dict[int, Tensor]
    places: dict[int, list[Tensor]]
    leaving: dict[int, Tensor]


def send(mail: Mail, dtype: torch.dtype, *, axis: str, reason: str) -> Travelling:
    """Post one message per pair of ranks and direction, all of them at once.

    A message that is one stretch of memory is sent from there and received there; others are packed.
    """
    leaving = {peer: _packed(views) for peer, views in sorted(mail.outgoing.items())}
    say_if_uncounted()
    if not (recording() and (mail.outgoing or mail.incoming)):
        return _posted(leaving, mail)
    with Sending(
        "send_recv",
        axis=axis,
        bytes_sent=sum(message.nbytes for message in leaving.values()),
        reason=reason,
        shape=(sum(message.numel() for message in leaving.values()),),
        dtype=dtype,
    ):
        return _posted(leaving, mail)


def _posted(leaving: dict[int, Tensor], mail: Mail) -> Travelling:
    arriving = {peer: _room(views) for peer, views in sorted(mail.incoming.items())}
    operations = [
        dist.P2POp(function, _on_the_wire(message), peer, tag=_TAG)
        for function, messages in ((dist.irecv, arriving), (dist.isend, leaving))
        for peer, message in messages.items()
    ]
    works = dist.batch_isend_irecv(operations) if operations else ()
    return Travelling(works, arriving, mail.incoming, leaving)


def receive(travelling: Travelling) -> None:
    """Wait for all messages and put what arrived where it belongs."""
    for work in travelling.works:
        work.wait()
    for peer, message in travelling.arriving.items():
        _unpack(message, travelling.places[peer])


def _packed(views: Sequence[Tensor]) -> Tensor:
    if len(views) == 1 and views[0].is_contiguous():
        return views[0].view(-1)
    message = _room(views)
    position = 0
    for view in views:
        message[position : position + view.numel()].view(view.shape).copy_(view)
        position += view.numel()
    return message


def _room(views: Sequence[Tensor]) -> Tensor:
    """Where a message arrives: its place in the result if that is one stretch of memory."""
    if len(views) == 1 and views[0].is_contiguous():
        return views[0].view(-1)
    return torch.empty(sum(prod(view.shape) for view in views), dtype=views[0].dtype, device=views[0].device)


def _unpack(message: Tensor, views: Sequence[Tensor]) -> None:
    if message.data_ptr() == views[0].data_ptr():
        return
    position = 0
    for view in views:
        view.copy_(message[position : position + view.numel()].view(view.shape))
        position += view.numel()


def _on_the_wire(message: Tensor) -> Tensor:
    return message if moves_natively(message.dtype) else as_bytes(message)
