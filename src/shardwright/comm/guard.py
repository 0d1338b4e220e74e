"""A guard of collective calls: ranks compare what they are about to do before any of them does it.

Ranks that run different calls wait for messages that nobody sends, or, where the shapes happen to agree, add
up and gather values that do not belong together. With the guard on, a rank first tells each rank that takes
part what it is about to do: the plan, its reason and the line of the program, or, for a call that is no plan
(of torch, of the program itself), the collective. What two ranks tell each other is numbered pair by pair, so
an extra call meets the next thing that the other rank does, which may be the end of the block. They tell it
through the store of the process group: nobody waits in a collective for a rank that will not come, and a rank
that is slow is waited for.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardwright.comm.guarded_call import NOTHING, Pair, pairs_of, words_of
from shardwright.comm.record import asker, source_line
from shardwright.comm.tap import GroupCall, listen, stop_listening
from shardwright.comm.traced import is_traced
from shardwright.compat import default_store
from shardwright.errors import ConfigError, PlanError, refuse_no_number
from shardwright.plan.plan import Plan

_PATIENCE = 1800.0
_LONGEST_NAP = 0.02

# What runs plans looks here, and at nothing else: off, the guard costs the look at this number.
on = 0


class _Thread(threading.local):
    """compared: what is being sent was compared as a plan already."""

    compared = False


_thread = _Thread()


@contextmanager
def guarded(*, patience: float = _PATIENCE) -> Iterator[None]:
    """Compare what the ranks are about to send, call by call, inside the block.

    Every redistribution is compared by its plan, its reason and the line of the program that asked for it,
    every other collective (of torch, of the program) by its kind, root, shapes and dtypes, in an all-to-all
    between each two ranks; messages between two ranks (`send`, `recv`) are not. A difference raises on every
    rank that takes part, before anything is sent; so does an extra or a missing call, as soon as the
    other rank does the next thing, at the latest at the end of the block, where all ranks wait for each
    other. A rank that only is slow is waited for. The environment variable SHARDWRIGHT_GUARD=1 guards a
    whole program, and its end is the end of the block.

    Args: patience: seconds after which a rank that says nothing counts as lost.
    Raises: PlanError: ranks disagree, with both calls and both lines; or one was silent for too long.
        ConfigError: `patience` is no number above 0.
    Cost: a short message to each rank that takes part through the process group's store, per call; in no
        block: none. All ranks of the world enter and leave the block together.
    """
    refuse_no_number("guarded: patience", patience, ConfigError)
    _start(patience)
    try:
        yield
    except BaseException as error:
        if not isinstance(error, PlanError):
            _book.leave(f"left the guarded block by {type(error).__name__}", waits=False)
        _stop()
        raise
    try:
        _book.leave("left the guarded block", waits=True)
    finally:
        _stop()


def _start(patience: float) -> None:
    global on  # noqa: PLW0603 - a switch of the process
    on += 1
    if on == 1:
        _book.open(patience)
        listen(check_call)


def _stop() -> None:
    global on  # noqa: PLW0603
    on -= 1
    if on == 0:
        stop_listening(check_call)


def must_compare(*local_tensors: Tensor) -> bool:
    """Not yet compared, and not of a trace: what a compiled graph sends is compared when it runs."""
    return not (_thread.compared or any(is_traced(x) for x in local_tensors))


@contextmanager
def compared(plans: Sequence[Plan], reason: str) -> Iterator[None]:
    """Compare these plans, which run together in the block, with those of the other ranks of their meshes.

    Raises: PlanError: another rank is about to do something else.
    """
    ranks = tuple(dict.fromkeys((*plans[0].source.ranks, *plans[0].target.ranks))) if plans else ()
    if dist.get_rank() in ranks:
        _book.compare(_Doing("redistributions", _of_plans(plans, reason), source_line(), ranks))
    before, _thread.compared = _thread.compared, True
    try:
        yield
    finally:
        _thread.compared = before


def _of_plans(plans: Sequence[Plan], reason: str) -> tuple[str, ...]:
    """A digest, of layouts and steps, and a text for each: other steps may lead to the same layouts."""
    why = f"{reason}: " if reason else ""
    return tuple(
        f"{sha256(str(plan).encode()).hexdigest()[:16]} {_text(plan)}; {why}{plan.reason}" for plan in plans
    )


def _text(plan: Plan) -> str:
    if plan.source.mesh_shape == plan.target.mesh_shape:
        return f"{plan.source} -> {plan.target}"
    return " -> ".join(f"{layout} on ranks {layout.ranks}" for layout in (plan.source, plan.target))


def compare_words(what: str, ranks: Sequence[int]) -> None:
    """Compare what an operation of ours is about to do where the calls that it makes would not tell.

    Raises: PlanError: another of the ranks is about to do something else.
    """
    if not _thread.compared:
        _book.compare(_Doing("calls", (f"- {what}",), source_line(), tuple(ranks)))


def check_call(call: GroupCall) -> None:
    """Compare a call that is no plan.

    Messages between two ranks are not: which one is posted first differs from rank to rank, so nobody can be
    waited for.
    """
    if _thread.compared or call.op in ("send", "recv"):
        return
    ranks = tuple(dist.get_process_group_ranks(call.group))
    line = source_line()
    # Only what our operations send comes from one line: the program may write its own calls rank by rank.
    told = line if asker().startswith("shardwright") else ""
    what = (f"- {call.op} {words_of(call)}over ranks {ranks}",)
    _book.compare(_Doing("calls", what, told, ranks, shown=line), pairs_of(call))


@dataclass(frozen=True, slots=True)
class _Doing:
    """What a rank is about to do.

    what: a text per plan, behind a digest. shown: a line not compared. pair: what goes to the rank that is
    told, and what is to come from it.
    """

    kind: str
    what: tuple[str, ...]
    line: str
    ranks: tuple[int, ...]
    shown: str = ""
    number: int = 0
    pair: Pair = NOTHING

    def agrees(self, other: _Doing) -> bool:
        """The same, apart from the number (ranks need not all take part in all calls) and the folder."""
        here, there = ((d.kind, d.what, Path(d.line).name, d.ranks) for d in (self, other))
        return here == there and self.pair == other.pair[::-1]

    def text(self, other: _Doing) -> str:
        """The first of its plans that the other has not, and its line."""
        several = f"the first of {len(self.what)}: " if len(self.what) != len(other.what) else ""
        pairs = zip(self.what, other.what, strict=False)
        what = next((mine for mine, theirs in pairs if mine != theirs), self.what[0])
        at = f" at {self.line or self.shown}" if self.line or self.shown else ""
        to_it, from_it = self.pair
        pair = f", to it {to_it}, from it {from_it}" if self.pair != NOTHING else ""
        return f"call {self.number}{at}: {several}{what.split(' ', 1)[1]}{pair}"


class _Book:
    """What this rank told each other rank and heard from it, through the store of the process group."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._patience = _PATIENCE
        self._forget()

    def _forget(self) -> None:
        self._store: Any = None
        self._session = ""
        self._number = 0
        self._told: dict[int, int] = defaultdict(int)
        self._heard: dict[int, int] = defaultdict(int)

    def open(self, patience: float) -> None:
        """Start anew; ranks that enter a block for the nth time meet in the nth session."""
        self._patience = patience
        self._forget()
        if dist.is_initialized():
            self._join()

    def _join(self) -> None:
        self._store, world = default_store(), dist.get_world_size()
        entered = self._store.add("shardwright/guard/entered", 1)
        self._session = f"shardwright/guard/{(entered - 1) // world}"
        self._rank, self._world = dist.get_rank(), world

    def compare(self, doing: _Doing, pairs: Mapping[int, Pair] = MappingProxyType({})) -> None:
        """Tell the others, hear what they are about to do, and raise if that is something else.

        Args: pairs: what each of them is told besides.
        """
        with self._lock:
            if self._store is None:
                self._join()
            doing = self._tell(doing, pairs)
            for peer in doing.ranks:
                if peer != self._rank:
                    self._hear(peer, replace(doing, pair=pairs.get(peer, NOTHING)))

    def _tell(self, doing: _Doing, pairs: Mapping[int, Pair] = MappingProxyType({})) -> _Doing:
        self._number += 1
        doing = replace(doing, number=self._number)
        for peer in doing.ranks:
            if peer != self._rank:
                text = json.dumps(asdict(replace(doing, pair=pairs.get(peer, NOTHING))))
                self._store.set(self._key(self._rank, peer, self._told[peer]), text)
                self._told[peer] += 1
        return doing

    def _key(self, source: int, target: int, number: int) -> str:
        return f"{self._session}/{source}>{target}/{number}"

    def _hear(self, peer: int, doing: _Doing) -> None:
        key = self._key(peer, self._rank, self._heard[peer])
        self._wait(key, peer, doing)
        facts = json.loads(self._store.get(key))
        self._store.delete_key(key)
        self._heard[peer] += 1
        lists = {name: tuple(facts[name]) for name in ("what", "ranks", "pair")}
        other = _Doing(**{**facts, **lists})
        if not doing.agrees(other):
            kind = doing.kind if doing.kind == other.kind else "calls"
            self._refuse(
                f"rank {self._rank} and rank {peer} are about to run different {kind}:\n"
                f"  rank {self._rank}, {doing.text(other)}\n  rank {peer}, {other.text(doing)}"
            )

    def _wait(self, key: str, peer: int, doing: _Doing) -> None:
        start, nap = time.monotonic(), 1e-4
        while not self._store.check([key]):
            if nap >= _LONGEST_NAP and self._store.check([f"{self._session}/refused"]):
                self._refuse(self._store.get(f"{self._session}/refused").decode())
            if time.monotonic() - start > self._patience:
                self._refuse(
                    f"rank {peer} said nothing for {self._patience:g} s while rank {self._rank} waits to run"
                    f"\n  {doing.text(doing)}"
                )
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)

    def _refuse(self, why: str) -> None:
        """Raise, and make those raise who wait for this rank elsewhere; what follows is another session."""
        self._store.set(f"{self._session}/refused", why)
        self._forget()
        raise PlanError(why)

    def leave(self, how: str, *, waits: bool) -> None:
        """The last thing that a rank does in a block; all others do the same now."""
        with self._lock:
            if self._store is None:
                return
            doing = self._tell(_Doing("calls", (f"- {how}",), "", tuple(range(self._world)), source_line()))
            for peer in doing.ranks if waits else ():
                if peer != self._rank:
                    self._hear(peer, doing)


_book = _Book()


def _end() -> None:
    """The end of a guarded program. One that ends by an error does not wait for the others."""
    try:
        _book.leave("ended", waits=not hasattr(sys, "last_value"))
    except (PlanError, RuntimeError) as error:  # a store whose process is gone raises the latter
        sys.stderr.write(f"shardwright: {error}\n")
        sys.stderr.flush()
        os._exit(1)


if os.environ.get("SHARDWRIGHT_GUARD", "0") not in ("", "0"):
    _start(_PATIENCE)
    atexit.register(_end)
