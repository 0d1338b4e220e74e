"""What one rank does in a step, ready to run: one class per kind of work, none per kind of step.

A task is bound to its rank once and then run on any number of local tensors. These need nobody else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import cast

from torch import Tensor

from shardwright.comm.pack import MANY, arranged, in_memory, move, new_tensor
from shardwright.comm.traced import is_traced
from shardwright.compat.graph_order import made_of
from shardwright.errors import PlacementError, PlanError
from shardwright.plan.work import Apply, Filling, Held, Memory, Move, Terms


class Task(ABC):
    """One step on this rank. sends: it waits for other ranks."""

    sends = False

    @abstractmethod
    def run(self, held: Held, why: str) -> Held:
        """What the rank holds after the step. why: what the record says about what is sent."""

    def start(self, held: Held, why: str) -> Callable[[], Held]:
        """As `run`, only posted: the function that it returns waits. `held` may be written to meanwhile."""
        done = self.run(held, why)
        return lambda: done

    def together(self, tasks: Sequence[Task], held: Sequence[Held], why: str) -> list[Held]:
        """Run tasks of plans of one form, this one first, each on its tensor."""
        return [task.run(x, why) for task, x in zip(tasks, held, strict=True)]


class Moving(Task):
    """A copy inside the rank."""

    def __init__(self, work: Move) -> None:
        self.work = work
        self.in_many = work.filling is None and len(work.views) >= MANY

    def run(self, held: Held, why: str) -> Tensor:  # noqa: ARG002 - nothing is sent
        """The tensor itself where that is the result."""
        x = in_memory(tensor(held), self.work.source)
        if self.work.nothing:
            return x
        if self.in_many and (made := arranged(x, self.work.views, self.work.target)) is not None:
            return made
        out = room(x, self.work.target, self.work.filling)
        move(x, out, self.work.views)
        out = filled(out, self.work.filling)
        return out if self.work.views else in_memory(made_of(out, x), self.work.target)


class Applying(Task):
    """A function of what the rank holds."""

    def __init__(self, work: Apply) -> None:
        self.function = work.function

    def run(self, held: Held, why: str) -> Tensor:  # noqa: ARG002 - nothing is sent
        """What the function returns."""
        return self.function(held)


class Piecewise(Task):
    """Other tasks on the same source for one piece after the other."""

    sends = True

    def __init__(self, target: Memory, pieces: Sequence[tuple[Sequence[Task], Move]]) -> None:
        self.target, self.pieces = target, pieces

    def run(self, held: Held, why: str) -> Tensor:
        """All pieces together."""
        out = new_tensor(tensor(held), self.target)
        for tasks, piece in self.pieces:
            done = run_all(tasks, held, why)
            move(in_memory(done, piece.source), out, piece.views)
            del done  # the next piece needs the memory
        return out


def run_all(tasks: Sequence[Task], held: Held, why: str) -> Tensor:
    """One task after the other. What it holds is let go step by step."""
    for task in tasks:
        held = task.run(held, why)
    return cast("Tensor", held)


def tensor(held: Held) -> Tensor:
    """What every task but an applied function is given.

    Raises: PlanError: terms, which a step must combine first.
    """
    if isinstance(held, Terms):
        raise PlanError("a step that moves elements was given terms: combine them in a step before it")
    return held


def room(like: Tensor, memory: Memory, filling: Filling | None) -> Tensor:
    """A result before anything is in it: filled with the identity where it will be a term."""
    out = new_tensor(like, memory)
    if filling is not None and memory.numel:
        identity = filling.pending.identity(like.new_empty(()))
        return out if identity is None else out.copy_(identity)
    return out


def filled(out: Tensor, filling: Filling | None) -> Tensor:
    """A term that was made by padding, once everything is in it.

    Raises: PlacementError: terms cannot be made of these values.
    """
    if filling is None or not out.numel():
        return out
    if not is_traced(out) and not filling.pending.in_domain(out):
        raise PlacementError(f"{filling.pending} has no meaning for these values of {out.dtype}")
    return out if filling.scale == 1 else out.mul_(filling.scale)
