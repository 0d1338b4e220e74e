"""A recording that has ended: what it needs from the call, until its entry is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardwright.erased import given, holds
from shardwright.erased.containers import held_among
from shardwright.erased.effects import Effects
from shardwright.erased.entry import Backward, Entry, Leaf, View, overlap
from shardwright.erased.gradients import Gradients
from shardwright.erased.program import Program, program_of
from shardwright.erased.rates import followed_facts
from shardwright.erased.refuse import NOT_REPEATED, Refusal
from shardwright.erased.results import Result
from shardwright.erased.walk import SCALARS, local_of

if TYPE_CHECKING:
    from shardwright.erased.attempt import Attempt


class Finished:
    """What is known of a call that ran to its end, and makes the entry: now, or with its first backward.

    leaves, made, views: its results, as `Entry` has them. has_backward: a backward was recorded, or refused.
    """

    def __init__(
        self,
        attempt: Attempt,
        gradients: list[tuple[Any, Result | None]],
        written: list[torch.Tensor],
        leaves: list[Leaf],
        made: list[torch.Tensor],
        views: list[View],
        structure: Any,
    ) -> None:
        self.attempt, self.leaves, self.made, self.structure = attempt, leaves, made, structure
        self.views = views
        places = {id(x): i for i, x in enumerate(attempt.leaves)}
        self.effects = Effects(
            tuple((places.get(id(x), x), result) for x, result in gradients),
            tuple(x for x in written if id(x) not in places),
            tuple(places[id(x)] for x in written if id(x) in places),
        )
        self.has_backward = False
        self.results = [Result.of(x, attempt.tape) for x in made]
        self._told = len(attempt.world.facts)
        self.facts = followed_facts(attempt.world.facts, attempt.rates)
        # Looked at now: gradients and versions go on before a backward comes.
        tensors = [x for _, x in attempt.world.tensors]
        gradients_before = self._gradients_before()
        self.guard = holds.guard_of(self.facts, tensors, gradients_before)
        known = [(places.get(x), kind) for x, kind in gradients_before.items()]
        self.given_gradients = tuple((place, kind) for place, kind in known if place is not None)

    def _gradients_before(self) -> dict[int, Any]:
        """What the program can have asked of them; one that cannot may find others in a replay."""
        attempt = self.attempt
        if not (attempt.world.sees_gradients or attempt.watch.ran_backward):
            return {}
        return {id(was.x): was.gradient_kind for was in attempt.before}

    def plain(self) -> None:
        """An entry without a backward of its own."""
        self._entry(self._gives(()), len(self.attempt.tape.lines), None)

    def _gives(self, saved: Sequence[int]) -> list[int]:
        of_results = [result.value for result in self.results if result is not None]
        of_gradients = [result.value for _, result in self.effects.gradients if result is not None]
        return [*of_results, *of_gradients, *saved]

    def with_backward(
        self,
        first: int,
        results: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        gradients: Gradients,
        found: Gradients,
    ) -> None:
        """An entry with the backward that was just recorded."""
        attempt, tape = self.attempt, self.attempt.tape
        refusals = [*attempt.refusals(), *self._with_facts_of_the_backward()]
        of_inputs = [None if x is None else Result.of(x, tape) for x in found]
        if any(x is not None and r is None for x, r in zip(found, of_inputs, strict=True)):
            refusals.append(Refusal("a gradient", "it comes from nowhere in the recording"))
        if refusals:
            attempt.refused(refusals)
            return
        wanted = tuple(None if x is None else Result.of(x, tape) for x in gradients)
        tangents = [r.value for r in wanted if r is not None]
        gives = [r.value for r in of_inputs if r is not None]
        alone = program_of(tape, tape.lines[first:], gives)
        saved = [number for number in alone.takes if number not in tangents]
        program = program_of(tape, tape.lines[first:], gives, [*saved, *tangents])
        places = {id(x): i for i, x in enumerate(attempt.leaves) if isinstance(x, torch.Tensor)}
        self._entry(
            self._gives(saved),
            first,
            Backward(
                program,
                wanted,
                tuple(local_of(x).stride() for x in gradients if x is not None),
                tuple(places.get(id(attempt.cut.stands_for(x)), x) for x in inputs),
                tuple(of_inputs),
                tuple(next(i for i, y in enumerate(self.made) if y is x) for x in results),
                len(saved),
                self._of_others([*saved, *program.holds]),
                self._of_results([*saved, *program.holds]),
            ),
        )

    def _with_facts_of_the_backward(self) -> list[Refusal]:
        """What only the backward reached is asked of each call too; what it changes there is refused."""
        facts = self.attempt.world.facts[self._told :]
        if not facts:
            return []
        self._told = len(self.attempt.world.facts)
        of_forward, of_backward = self.guard, holds.guard_of(facts, (), {})
        self.facts, self.guard = [*self.facts, *facts], lambda: of_forward() and of_backward()
        return [Refusal(text, NOT_REPEATED) for text in holds.changed(facts)]

    def _of_others(self, numbers: list[int]) -> tuple[Any, ...]:
        """What these values lie in that the program around may write before the backward."""
        attempt = self.attempt
        memory = {given.storage_of(attempt.tape.values[n].tensor) for n in numbers}
        leaves = [i for i, x in enumerate(attempt.leaves) if isinstance(x, torch.Tensor)]
        of_leaves = [i for i in leaves if given.storage_of(attempt.leaves[i]) in memory]
        return (*of_leaves, *(x for _, x in attempt.world.tensors if given.storage_of(x) in memory))

    def _of_results(self, numbers: list[int]) -> tuple[int, ...]:
        """The results in whose memory these values lie."""
        memory = {given.storage_of(self.attempt.tape.values[n].tensor) for n in numbers}
        return tuple(i for i, x in enumerate(self.made) if given.storage_of(x) in memory)

    def _entry(self, gives: list[int], lines: int, backward: Backward | None) -> None:
        attempt, tape = self.attempt, self.attempt.tape
        program = program_of(tape, tape.lines[:lines], gives, whole=True)
        tensors = [x for _, x in attempt.world.tensors]
        storages = frozenset(map(given.storage_of, tensors))
        held = (x for fact in self.facts for x in (fact.holder, fact.value))
        nodes = frozenset(id(x) for x in held if not isinstance(x, _IMMUTABLE))
        truths = attempt.recording.truths
        asked = {id(line) for _, lines in truths.values() for line in lines}
        question = program_of(tape, [line for line in tape.lines if id(line) in asked], [*truths])
        programs = [program, question, *([backward.program] if backward else ())]
        places = _names_places(programs, attempt.world.named)
        tape.settle({number for each in programs for number in each.holds})
        attempt.keep(
            Entry(
                facts=self.facts,
                guard=self.guard,
                program=program,
                made=tuple(r for r in self.results if r is not None),
                leaves=tuple(self.leaves),
                views=tuple(self.views),
                objects=given.objects_of(attempt.leaves),
                structure=self.structure,
                effects=self.effects,
                question=question,
                answers=tuple(value for value, _ in truths.values()),
                given_offsets=given.offsets(attempt.leaves) if places else None,
                held_storages=storages,
                given_held=overlap(attempt.leaves, storages),
                held_nodes=nodes,
                given_nodes=held_among(attempt.structure, nodes),
                given_gradients=self.given_gradients,
                autocast=attempt.autocast,
                backward=backward,
                where=attempt.where,
                optimizers=tuple(attempt.world.optimizers),
                named=frozenset(attempt.world.named),
            )
        )


_IMMUTABLE = (tuple, torch.Tensor, *SCALARS)


def _names_places(programs: Sequence[Program], named: set[str]) -> bool:
    """Does a line name a place of memory by its number, or may the program ask for it?"""
    lines = (line for program in programs for line in program.lines)
    return "storage_offset" in named or any("as_strided" in line.name for line in lines)
