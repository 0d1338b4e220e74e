"""One call that is recorded: it runs as it is, and leaves an entry or the reasons why there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from shardwright.comm.record import source_line
from shardwright.comm.traced import in_groups
from shardwright.compat import DisableTorchFunctionSubclass, is_batch_of_gradients, view_again
from shardwright.erased import given, holds, surroundings
from shardwright.erased.containers import CHANGED, Structure, nodes_of, taken_apart, with_leaves
from shardwright.erased.effects import Before, gradients_after, written_of
from shardwright.erased.entry import Entry, Leaf, View
from shardwright.erased.finished import Finished
from shardwright.erased.gradients import (
    Cut,
    Gradients,
    as_a_whole,
    behind_edge,
    given_back,
    has_graph,
    inputs_of,
    own_backward,
    with_edge,
)
from shardwright.erased.otherwise import Undo
from shardwright.erased.rates import Rate, may_name
from shardwright.erased.record import Recording
from shardwright.erased.refuse import NOT_REPEATED, Refusal
from shardwright.erased.results import Result, hollow
from shardwright.erased.sources import Given, Gradient, Held, Tangent
from shardwright.erased.walk import HOOKS, SCALARS, World, local_of
from shardwright.erased.watch import Watch, profiled
from shardwright.tensor import finished_forms
from shardwright.tensor.dtensor import DTensor


class Attempt:
    """The recording of one call.

    keep, refused: told of the entry, or of why there is none; with results that want gradients this is after
        their first backward.
    rates: numbers of optimizers that are followed.
    hasty: give up at the first sight of what cannot be recorded: the attempt before has told of all of it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        leaves: list[Any],
        keep: Callable[[Entry], None],
        refused: Callable[[list[Refusal]], None],
        rates: Sequence[Rate] = (),
        *,
        hasty: bool = False,
    ) -> None:
        self.function, self.leaves, self.keep, self.refused = function, leaves, keep, refused
        self.recording, self.rates = Recording(rates), rates
        self.tape = self.recording.tape
        self.world = World(self._met)
        recording = self.recording
        self.watch = Watch(
            self.world, recording.values_read, recording.catching, recording.state_of_generator
        )
        if hasty:
            self.recording.give_up_if = self._is_in_vain
        self.before: list[Before] = []
        self.where = source_line()
        self.autocast, self.standing = surroundings.autocast_devices(), surroundings.standing()

    # -- before ---------------------------------------------------------------------------------------

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call's own result."""
        with DisableTorchFunctionSubclass():
            self.structure = taken_apart((args, kwargs))[1]
            self.cut = Cut.of(args, kwargs)
            self.leaves = [self.cut.stands_for(leaf) for leaf in self.leaves]
            self.world.reach(getattr(self.function, "__name__", type(self.function).__name__), self.function)
            self.world.reach("torch's hooks", HOOKS)
            for kind in given.kinds_of(args, kwargs):
                self.world.reach("the arguments", kind)
            for place, leaf in enumerate(self.leaves):
                self._give(place, leaf)
        with in_groups(), self.recording.events, self.recording.following, self.watch, self.recording:
            out = self.function(*self.cut.args, **self.cut.kwargs)
        self.world.let_go()
        with DisableTorchFunctionSubclass():
            changed = [CHANGED] if self.cut.containers.changed() else []
            if self.recording.gave_up or changed:
                self.refused([*self.refusals(), *changed])
                self.cut.pass_on()
                return with_edge(out, self.cut)
            return self._after(out)

    def _is_in_vain(self) -> bool:
        """Is there something already that no recording can hold? Then nothing is watched any more."""
        if not (self.recording.refusals or self.watch.refusals or self.world.refusals):
            return False
        self.watch.stop()
        return True

    def _met(self, path: str, x: torch.Tensor) -> None:
        """A tensor that the program reaches."""
        with DisableTorchFunctionSubclass():
            self._look_at(path, x, x)
            self.tape.enter(local_of(x), Held(path, local_of(x)))

    def _give(self, place: int, leaf: Any) -> None:
        if isinstance(leaf, torch.Tensor):
            self._look_at(f"argument {place}", leaf, place)
            self.tape.enter(local_of(leaf), Given(place))
            for name, value in given.hung_on(leaf).items():
                self.world.reach(f"argument {place}.{name}", value)
        else:
            self.world.reach(f"argument {place}", leaf)

    def _look_at(self, path: str, x: torch.Tensor, found: torch.Tensor | int) -> None:
        if isinstance(x, DTensor) and x._spec is not x._spec.plain:
            finished_forms.give_up(x)  # a finished form that came from outside is nothing that a replay has
        before = Before.of(path, x)
        self.before.append(before)
        if before.gradient is not None:
            self.tape.enter(local_of(before.gradient), Gradient(path, found))

    # -- after ----------------------------------------------------------------------------------------

    def _after(self, out: Any) -> Any:
        flat, structure = ([out], None) if isinstance(out, torch.Tensor) else taken_apart(out)
        gradients, refusals = gradients_after(self.before, self.tape)
        written, of_written = written_of(self.before)
        refusals = [*self.refusals(), *refusals, *of_written]
        if self.cut.pass_on():
            refusals.append(Refusal("an argument", "a backward inside goes on into its graph"))
        refusals += [
            Refusal(text, NOT_REPEATED) for text in [*self._left(), *holds.changed(self.world.facts)]
        ]
        stepped = self.watch.ran_backward and any(was.brought() for was in self.before)
        hanging = [
            i for i, x in enumerate(flat) if has_graph(x) and not any(x is leaf for leaf in self.leaves)
        ]
        if stepped:
            flat = [x.detach() if i in hanging else x for i, x in enumerate(flat)]
            hanging = []
        leaves, made, of_results = self._results(flat)
        views, of_views = self._views(made)
        refusals += [*of_results, *of_views, *self._of_containers(out, structure), *self._of_decisions()]
        if not refusals:
            self.finished = Finished(self, gradients, written, leaves, made, views, structure)
        if hanging or self.cut.written():
            return self._hang(out, flat, hanging, refusals)
        if refusals:
            self.refused(refusals)
        else:
            self.finished.plain()
        return self._given_back(out, flat)

    def _left(self) -> list[str]:
        """What stands around the call, and was changed by it."""
        return [name for name, now in surroundings.standing().items() if now != self.standing[name]]

    def _of_decisions(self) -> list[Refusal]:
        """Refusals of a truth that the call reads behind a write that no replay could put back."""
        if not self.recording.decides or Undo.of(self.tape, self.tape.lines, (), ()):
            return []
        return [Refusal("item()", "the host decides by a value, behind a write that cannot be put back")]

    def _of_containers(self, out: Any, structure: Structure | None) -> list[Refusal]:
        """Refusals of a list that comes back twice, or is the very one that the program or the caller has."""
        if structure is not None and structure.shared:
            return [Refusal("a result", "it holds one list, dict or object twice")]
        known = set(map(id, nodes_of((self.cut.args, self.cut.kwargs))))
        again = [x for x in nodes_of(out) if not isinstance(x, _IMMUTABLE)]
        found = [x for x in again if id(x) in known or self.world.holds(x)]
        return [Refusal(f"a result, a {type(x).__name__}", "a replay would give another") for x in found]

    def _given_back(self, out: Any, flat: list[Any]) -> Any:
        return with_leaves(out, [self.cut.original(x) for x in flat])

    def refusals(self) -> list[Refusal]:
        """What stands in the way of a recording, as far as it is known now."""
        if may_name(self.rates, self.world.named):
            return [Refusal("a number of an optimizer", "the program may read it beside the step")]
        asked = [*self.world.asked_of_schedulers(), *self.world.newly_remembered()]
        restored = self.watch.restored if any(line.draws for line in self.tape.lines) else []
        return [*self.recording.refusals, *self.watch.refusals, *restored, *self.world.refusals, *asked]

    def _results(self, flat: list[Any]) -> tuple[list[Leaf], list[torch.Tensor], list[Refusal]]:
        """How each leaf comes back, and the tensors that were made."""
        leaves: list[Leaf] = []
        made: list[torch.Tensor] = []
        refusals: list[Refusal] = []
        for x in flat:
            leaf = self._known(x)
            if leaf is not None:
                leaves.append(leaf)
            elif isinstance(x, torch.Tensor):
                known = next((i for i, y in enumerate(made) if y is x), None)
                leaves.append(Leaf("made", len(made) if known is None else known))
                made += [x] if known is None else []
                if Result.of(x, self.tape) is None:
                    refusals.append(Refusal("a result", "it is a tensor that no recorded operator made"))
                elif type(x) is not torch.Tensor and not isinstance(x, DTensor):
                    refusals.append(
                        Refusal(f"a result of {type(x).__name__}", "a replay gives a plain tensor")
                    )
                elif given.hung_on(x):
                    refusals.append(Refusal("a result", "the call has hung attributes on it"))
                elif x.requires_grad and not has_graph(x):
                    refusals.append(Refusal("a result", "it wants a gradient, and has no graph"))
            else:
                refusals.append(Refusal(f"a result of {type(x).__name__}", "it is no tensor and no number"))
        return leaves, made, refusals

    def _known(self, x: Any) -> Leaf | None:
        """A result that is there already: a number, an argument, what the program holds, a gradient."""
        places = {id(leaf): place for place, leaf in reversed([*enumerate(self.leaves)])}
        if isinstance(x, SCALARS) or (id(x) not in places and self.world.holds(x)):
            return Leaf("same", x)
        if id(x) in places:
            return Leaf("given", places[id(x)])
        of = next((was.x for was in self.before if was.has(x)), None)
        return None if of is None else Leaf("gradient", places.get(id(of), of))

    def _views(self, made: list[torch.Tensor]) -> tuple[list[View], list[Refusal]]:
        """Which results are views, and of what; a base that does not come back is made beside them."""
        views: list[View] = []
        refusals: list[Refusal] = []
        for place, x in enumerate([*made]):
            base = x._base if x._is_view() and not x.requires_grad else None
            of_base = None if base is None or base.requires_grad else Result.of(base, self.tape)
            if base is None or of_base is None:
                continue
            leaf, like = self._base(base, made), view_again(x, hollow(of_base, local_of(base)))
            if leaf is None or like is None:
                refusals.append(Refusal("a result", "it is a view that a replay cannot make again"))
            else:
                views.append((place, like, leaf))
        return views, refusals

    def _base(self, base: torch.Tensor, made: list[torch.Tensor]) -> Leaf | None:
        known = self._known(base)
        if known is None and any(x._base is base for _, x in self.world.tensors):
            known = Leaf("same", base)
        if known is not None or any(isinstance(x, torch.Tensor) and x._base is base for x in self.leaves):
            return known
        place = next((i for i, y in enumerate(made) if y is base), len(made))
        made += [base] if place == len(made) else []
        return Leaf("made", place)

    # -- results that want gradients ------------------------------------------------------------------

    def _hang(self, out: Any, flat: list[Any], hanging: list[int], refusals: list[Refusal]) -> Any:
        results = [flat[i] for i in hanging]
        inputs = inputs_of(results)
        refusals = [*refusals, *self._refusals_of(results, inputs)]
        if refusals:
            self.refused(refusals)
        backward = partial(self._backward, record=not refusals)
        made = given_back(results, self.cut, lambda found: behind_edge(found, self.cut, backward))
        for place, x in zip(hanging, made, strict=True):
            flat[place] = x
        return self._given_back(out, flat)

    def _refusals_of(self, results: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[Refusal]:
        memory = set(map(given.storage_of, inputs))
        view = Refusal("a result", "it is a view of what was given, or of another, and wants a gradient")
        found = [view for x in results if given.storage_of(x) in memory or any(x._base is y for y in results)]
        found += [] if inputs else [Refusal("a graph", "it ends in no leaf")]
        whole = as_a_whole(results, inputs)
        found += [whole] if whole else []
        for x in inputs:
            given_it = any(self.cut.stands_for(x) is leaf for leaf in self.leaves)
            if not given_it and not (self.world.holds(x) and x.is_leaf):
                found.append(Refusal("a graph", f"it ends in a tensor {tuple(x.shape)} that was not found"))
        return found

    def _backward(
        self,
        results: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        gradients: Gradients,
        *,
        record: bool,
    ) -> Gradients:
        """The call's own backward; the first one is recorded too."""
        batched = any(x is not None and is_batch_of_gradients(x) for x in gradients)
        if not record or self.finished.has_backward or torch.is_grad_enabled() or batched or profiled():
            return own_backward(results, inputs, gradients)
        self.finished.has_backward = True
        self.recording.asks = False
        first = len(self.tape.lines)
        gradients = [None if x is None else _dense(x) for x in gradients]
        with DisableTorchFunctionSubclass():
            for place, gradient in enumerate(gradients):
                if gradient is not None:
                    self.tape.enter(local_of(gradient), Tangent(place))
        with self.recording.events, self.watch, self.recording:
            found = own_backward(results, inputs, gradients)
        with DisableTorchFunctionSubclass():
            self.finished.with_backward(first, results, inputs, gradients, found)
        return found


_IMMUTABLE = (tuple, torch.Tensor, *SCALARS)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Not expanded, as the gradient of a sum is: a replay can bring no other gradient into such memory."""
    local = local_of(gradient)
    spread = any(n > 1 and not step for n, step in zip(local.shape, local.stride(), strict=True))
    return gradient.contiguous() if spread else gradient
