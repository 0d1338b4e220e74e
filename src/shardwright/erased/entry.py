"""One recording, ready to be replayed: its guard, its programs, what it gives back and leaves behind."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shardwright.comm.traced import in_groups
from shardwright.compat import DisableTorchFunctionSubclass, is_batch_of_gradients, version_of, view_again
from shardwright.erased import given, text
from shardwright.erased.containers import held_among
from shardwright.erased.effects import Effects, carry_out
from shardwright.erased.gradients import hang
from shardwright.erased.holds import gradient_of
from shardwright.erased.results import Result, made_again
from shardwright.erased.sources import Given, Gradient
from shardwright.erased.walk import local_of
from shardwright.errors import EraseError
from shardwright.tensor.dtensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardwright.erased.containers import Structure
    from shardwright.erased.facts import Fact
    from shardwright.erased.program import Program


@dataclass(frozen=True, slots=True)
class Leaf:
    """How one leaf of the result comes back.

    kind: "given" (the leaf of the arguments with this number), "made" (the result of this number), "same"
        (this very object: a constant, a parameter) or "gradient" (that of an argument by number, or of this
        parameter).
    """

    kind: str
    what: Any

    def found(self, leaves: list[Any], made: Sequence[torch.Tensor]) -> Any:
        """What it is for these arguments, in a replay that made these results."""
        if self.kind == "same":
            return self.what
        if self.kind == "gradient":
            return given.found(self.what, leaves).grad
        return (leaves if self.kind == "given" else made)[self.what]


View = tuple[int, torch.Tensor, Leaf]


@dataclass(slots=True, eq=False)
class Backward:
    """The backward of results that want gradients.

    program: takes saved values and tangents, gives gradients.
    wanted:  per differentiable result the gradient that it had, None for none.
    inputs:  where the gradients go: a number of a leaf of the arguments, or the tensor itself.
    gradients: how each is given back, None for an input without.
    watched: as `inputs`, what must not be written before it ran. watched_results: results of which the same
        is true, by number.
    """

    program: Program
    wanted: tuple[Result | None, ...]
    strides: tuple[tuple[int, ...], ...]
    inputs: tuple[int | torch.Tensor, ...]
    gradients: tuple[Result | None, ...]
    differentiable: tuple[int, ...]
    saved: int  # how many values of the forward it takes
    watched: tuple[int | torch.Tensor, ...]
    watched_results: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Entry:
    """What a recording knows. optimizers, named: see `World`. objects: arguments whose `id` is in its key.

    views: the results of these numbers are like these tensors without data, of what is another leaf.
    held_nodes, given_nodes: lists, dicts and objects that the program holds, and which of them it was given.
    question, answers: what it decides by, of what is there before it runs, and what it said.
    surprises: how many replays went otherwise, less those that did not.
    """

    facts: Sequence[Fact]
    guard: Callable[[], bool]
    program: Program
    made: tuple[Result, ...]
    leaves: tuple[Leaf, ...]
    views: tuple[View, ...]
    objects: tuple[Any, ...]
    structure: Structure | None
    effects: Effects
    question: Program
    answers: tuple[bool | float, ...]
    given_offsets: tuple[int, ...] | None
    held_storages: frozenset[int]
    given_held: tuple[Any, ...]
    held_nodes: frozenset[int]
    given_nodes: tuple[tuple[int, int], ...]
    given_gradients: tuple[tuple[int, Any], ...]
    autocast: tuple[str, ...]
    backward: Backward | None = None
    where: str = ""
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    named: frozenset[str] = frozenset()
    readers: tuple[Any, ...] = field(default=())
    surprises: int = 0

    def __post_init__(self) -> None:
        self.readers = tuple(_reader(self.program, number) for number in self.program.takes)

    def holds(self, leaves: list[Any], structure: Any) -> bool:
        """May this call be a replay?"""
        if held_among(structure, self.held_nodes) != self.given_nodes:
            return False
        if self.given_offsets is not None and given.offsets(leaves) != self.given_offsets:
            return False
        if any(gradient_of(leaves[place]) != kind for place, kind in self.given_gradients):
            return False
        if not (self.guard() and overlap(leaves, self.held_storages) == self.given_held):
            return False
        return not self.answers or self._asked(leaves) == self.answers

    def _asked(self, leaves: list[Any]) -> tuple[bool | float, ...]:
        """What the host would read now; nothing where an operator raises, as the call does then by itself."""
        try:
            with self._plainly():
                found = self.question.run(*[_reader(self.question, n)(leaves) for n in self.question.takes])
                return tuple([x.item() for x in found])
        except (RuntimeError, IndexError):
            return ()

    def replay(self, leaves: list[Any]) -> Any:
        """The call on plain tensors; torch's functions are not asked about subclasses here.

        Raises: OtherwiseError: it goes otherwise than when it was recorded.
        """
        values = self._run([read(leaves) for read in self.readers])
        carry_out(self.effects, leaves, values[len(self.made) : len(self.made) + self._n_gradients])
        made = self._made(values, leaves)  # behind what the call wrote: its backward watches for later writes
        flat = [leaf.found(leaves, made) for leaf in self.leaves]
        return flat[0] if self.structure is None else self.structure.put_together(flat)

    def _run(self, taken: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        undo = self.program.undo
        if undo is None:
            with self._plainly():
                return self.program.run(*taken)
        with undo.around(taken) as answers, self._plainly():
            return self.program.run(*taken, answers)

    @contextmanager
    def _plainly(self) -> Iterator[None]:
        with torch.no_grad(), ExitStack() as stack:
            for device in self.autocast:  # the casts are in the program
                stack.enter_context(torch.autocast(device, enabled=False))
            yield

    @property
    def _n_gradients(self) -> int:
        return sum(result is not None for _, result in self.effects.gradients)

    def _made(self, values: tuple[torch.Tensor, ...], leaves: list[Any]) -> list[torch.Tensor]:
        made = [made_again(result, local) for result, local in zip(self.made, values, strict=False)]
        for place, like, base in self.views:
            made[place] = view_again(like, base.found(leaves, made))
        backward = self.backward
        if backward is None:
            return made
        saved = values[len(values) - backward.saved :] if backward.saved else ()
        inputs = [given.found(x, leaves) for x in backward.inputs]
        watched = [(x, version_of(x)) for x in (given.found(where, leaves) for where in backward.watched)]

        def run(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
            return self._run_backward(saved, gradients, watched)

        hung = hang(lambda: tuple(made[place] for place in backward.differentiable), run, inputs)
        for place, x in zip(backward.differentiable, hung, strict=True):
            made[place] = x
        watched += [(x, version_of(x)) for x in (made[place] for place in backward.watched_results)]
        return made

    def _run_backward(
        self,
        saved: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        watched: Sequence[tuple[torch.Tensor, int | None]],
    ) -> list[torch.Tensor | None]:
        backward = self.backward
        if backward is None or torch.is_grad_enabled():
            raise EraseError(_TWICE)
        if any(x is not None and is_batch_of_gradients(x) for x in gradients):
            raise EraseError(_BATCHED)
        for x, version in watched:
            if version_of(x) != version:
                raise RuntimeError(_WRITTEN.format(tuple(x.shape)))
        with torch.no_grad(), DisableTorchFunctionSubclass():
            tangents = [
                _as_recorded(gradient, wanted)
                for gradient, wanted in zip(gradients, backward.wanted, strict=True)
                if not _absent(gradient, wanted)
            ]
            laid = [_laid(x, stride) for x, stride in zip(tangents, backward.strides, strict=True)]
            values = iter(backward.program.run(*saved, *laid))
            taken = {*backward.program.takes, *backward.program.holds}
            return [None if r is None else _own(r, next(values), taken) for r in backward.gradients]

    def __str__(self) -> str:
        parts = [text.of_program(self.program, f"recorded at {self.where}" if self.where else "recorded")]
        if self.answers:
            parts.insert(0, text.of_program(self.question, f"held where this gives {self.answers}"))
        if self.backward is not None:
            parts.append(text.of_program(self.backward.program, "its backward"))
        return "\n".join(parts)


_TWICE = (
    "a replay has no second derivative: backward(create_graph=True) of what an erased function returned\n"
    "  fix: call the function itself, or take the inner gradient inside of what is erased"
)
_BATCHED = (
    "a replay has no backward for many gradients at once: autograd.grad(is_grads_batched=True) of what an "
    "erased function returned\n  fix: call the function itself, or take the gradients one by one"
)
_WRITTEN = (
    "a tensor of shape {} that an erased function's backward needs was written in place after its forward"
)
_PATTERN = (
    "the backward was recorded with {} gradient for a result of layout {}, and now there is {}\n"
    "  fix: erase a function whose results take part in every loss, or one function per loss"
)


def overlap(leaves: list[Any], storages: frozenset[int]) -> tuple[Any, ...]:
    """Arguments that are, or share memory with, what the program holds: these very objects."""
    return tuple(
        (place, id(x))
        for place, x in enumerate(leaves)
        if isinstance(x, torch.Tensor) and given.storage_of(x) in storages
    )


def _reader(program: Program, number: int) -> Callable[[list[Any]], torch.Tensor]:
    source = program.tape.values[number].source
    if isinstance(source, Given):
        place = source.leaf
        return lambda leaves: local_of(leaves[place])
    if isinstance(source, Gradient):
        parameter = source.parameter
        return lambda leaves: local_of(given.found(parameter, leaves).grad)
    raise TypeError(f"no way to read value {number} ({source!r})")


def _absent(gradient: torch.Tensor | None, wanted: Result | None) -> bool:
    if (gradient is None) != (wanted is None):
        layout = None if wanted is None or wanted.spec is None else wanted.spec.layout
        words = ("no", "one") if wanted is None else ("a", "none")
        raise EraseError(_PATTERN.format(words[0], layout, words[1]))
    return gradient is None


def _as_recorded(gradient: Any, wanted: Any) -> torch.Tensor:
    """The local part of a gradient, in the layout that it had when the backward was recorded."""
    spec = wanted.spec
    if spec is None:
        return local_of(gradient)
    if gradient._spec.plain.token is not spec.token:
        with in_groups():
            order, placements = spec.layout.order_names, spec.layout.placements
            gradient = DTensor.redistribute(gradient, spec.mesh, placements, order=order)
    return local_of(gradient)


def _own(result: Result, local: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """A gradient: torch may keep it, and looks at the wrapper alone. So it shares nothing with others.

    taken: the numbers of values that somebody else has.
    """
    if result.spec is not None and result.value in taken:
        local = local.clone()
    taken.add(result.value)
    return made_again(result, local)


def _laid(x: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    if x.stride() == stride:
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)
