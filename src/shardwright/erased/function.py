"""`sw.erase`: a function that runs as it is once, and is replayed as its local program afterwards."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from shardwright.comm.record import source_line
from shardwright.comm.traced import in_groups
from shardwright.compat import DisableTorchFunctionSubclass
from shardwright.erased import given, surroundings
from shardwright.erased.attempt import Attempt
from shardwright.erased.changed_rates import rates_that_changed
from shardwright.erased.containers import taken_apart
from shardwright.erased.gradients import Cut, with_edge
from shardwright.erased.holds import changed
from shardwright.erased.otherwise import Answered
from shardwright.erased.report import Report
from shardwright.erased.tape import Answers, OtherwiseError
from shardwright.erased.watch import profiled
from shardwright.errors import EraseError, refuse_no_number, refuse_other_kind
from shardwright.tensor import finished_forms
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.views import write_back

if TYPE_CHECKING:
    from shardwright.erased.entry import Entry
    from shardwright.erased.rates import Rate

_MOST = 8
_TRIES = 3
_OTHERWISE = "it read other truths than when it was recorded, or ranks told each other something else"


class Erased:
    """What `sw.erase` returns: called like the function it was given."""

    def __init__(self, function: Callable[..., Any], most: int) -> None:
        self._function, self._most = function, most
        self.__wrapped__ = function  # what one that calls this one looks through
        self._entries: dict[Any, list[Entry]] = {}
        self._attempts: dict[Any, int] = {}
        self._rates: list[Rate] = []
        self._constant: set[Any] = set()  # what cannot be recorded with numbers that are followed
        self._lasting: dict[Any, str] = {}  # what the last attempt could not record
        self._report = Report(getattr(function, "__qualname__", type(function).__name__))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result, by a replay where a recording holds.

        What was finished of an argument, or is of a result, is known on neither side: a rank that replays has
        nothing of it, and would send what one that does not replay had.
        """
        if torch.compiler.is_compiling():
            return self._function(*args, **kwargs)
        why = surroundings.why_unerased()
        with DisableTorchFunctionSubclass():
            leaves, structure = given.flatten(args, kwargs)
            _forget_forms(leaves)
        if why:
            return _without_forms(self._as_it_is(args, kwargs, why), leaves)
        with DisableTorchFunctionSubclass():
            key = structure, surroundings.flags(), given.signature(leaves)
            entry = next((each for each in self._entries.get(key, ()) if each.holds(leaves, structure)), None)
            went = None if entry is None else self._replayed(entry, leaves)
        if entry is None or went is None:
            return _without_forms(self._record(key, leaves, args, kwargs), leaves)
        if not isinstance(went, OtherwiseError):
            return went[0]
        self._weighed(key, entry)
        return _without_forms(self._as_it_is(args, kwargs, _OTHERWISE, went.answers or {}), leaves)

    def _replayed(self, entry: Entry, leaves: list[Any]) -> tuple[Any] | OtherwiseError:
        """What it gives, or why it went another way and was undone."""
        self._report.replays += 1
        try:
            out = entry.replay(leaves)
        except OtherwiseError as otherwise:
            self._report.replays -= 1
            if otherwise.answers is None:
                raise
            return otherwise
        entry.surprises -= 1
        return (out,)

    def _weighed(self, key: Any, entry: Entry) -> None:
        """Forget what goes otherwise more often than not; it was an attempt that failed then."""
        entry.surprises = max(entry.surprises, 0) + 1
        if entry.surprises > 1:
            self._entries[key].remove(entry)
            self._lasting[key] = _OTHERWISE

    def __get__(self, owner: Any, _: Any = None) -> Any:
        """A method of the class that has it."""
        return self if owner is None else types.MethodType(self, owner)

    def __str__(self) -> str:
        entries = [entry for found in self._entries.values() for entry in found]
        return self._report.text(entries)

    def report(self) -> Report:
        """What was recorded, how often it was replayed, and what runs as it is, by name and line."""
        return self._report

    # -- as it is -------------------------------------------------------------------------------------

    def _as_it_is(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], why: str, answers: Answers | None = None
    ) -> Any:
        """The function itself; what it sends, now and in its backward, is what a replay would send.

        Args: answers: of collectives that a replay has sent in its place.
        """
        self._report.ran_as_it_is(why, source_line())
        if why in surroundings.WITHOUT_EDGE:
            return self._function(*args, **kwargs)
        with DisableTorchFunctionSubclass():
            cut = Cut.of(args, kwargs)
        with in_groups(), Answered(answers) if answers else nullcontext():
            out = self._function(*cut.args, **cut.kwargs)
        with DisableTorchFunctionSubclass():
            cut.pass_on()
            return with_edge(out, cut)

    # -- recording ------------------------------------------------------------------------------------

    def _record(self, key: Any, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        why = self._no_more(key) or _views(leaves) or profiled()
        if why:
            return self._as_it_is(args, kwargs, why)
        self._attempts[key] = self._attempts.get(key, 0) + 1
        for entry in self._entries.get(key, ())[-1:]:
            self._report.last_change = "; ".join(changed(entry.facts)[:3]) or "a tensor that it holds"
        rates = self._rates_for(key)

        def kept(entry: Entry) -> None:
            found = self._entries.get(key, [])
            if covered in found:  # what it held for, the new one holds for too
                found.remove(covered)
                self._attempts[key] -= 1
            self._entries.setdefault(key, []).insert(0, entry)
            self._report.recordings += 1

        def refused(refusals: list[Any]) -> None:
            if rates:  # once more without them
                self._constant.add(key)
                self._attempts[key] -= 1
            self._lasting[key] = self._report.refused(refusals)

        covered = self._entries[key][0] if rates and self._entries.get(key) else None
        hasty = self._failed(key) > 1 and not rates
        try:
            return Attempt(self._function, leaves, kept, refused, rates, hasty=hasty).run(args, kwargs)
        except BaseException:  # it says nothing of the next call
            self._attempts[key] -= 1
            raise

    def _failed(self, key: Any) -> int:
        """How many attempts have left no recording, with the one that runs now."""
        return self._attempts.get(key, 0) - len(self._entries.get(key, ()))

    def _rates_for(self, key: Any) -> list[Rate]:
        """The numbers of optimizers that the next recording follows: those that changed from call to call."""
        if key in self._constant:
            return []
        for entry in self._entries.get(key, ())[:1]:
            new = rates_that_changed(entry.facts, entry.optimizers, entry.named)
            if not new:  # something else changed
                return []
            self._rates += [rate for rate in new if not any(map(rate.is_of, self._rates))]
        self._rates = [rate for rate in self._rates if rate.is_there()]
        return self._rates

    def _no_more(self, key: Any) -> str:
        made = sum(map(len, self._entries.values()))
        if made >= self._most:
            self._warn()
            return f"it has {made} recordings already, and none holds"
        others = len(self._attempts) > _TRIES * self._most  # each time other arguments, perhaps
        if others or self._failed(key) >= _TRIES:
            return "what it does cannot be recorded: " + self._lasting.get(key, self._report.first_refusal())
        return ""

    def _warn(self) -> None:
        if not self._report.warned:
            self._report.warned = True
            warnings.warn(
                f"sw.erase({self._report.name}): {self._most} recordings, and none holds for this call: it "
                "runs as it is from now on where none does. What changes from call to call: "
                f"{self._report.last_change or 'shapes, layouts, flags or objects of the arguments'}. "
                "fix: keep it the same, pass it as a tensor, or erase(..., most=) more recordings",
                stacklevel=5,
            )


def _without_forms(out: Any, leaves: list[Any]) -> Any:
    """The results; of the arguments too the call may have finished some."""
    _forget_forms([*leaves, *taken_apart(out)[0]])
    return out


def _forget_forms(leaves: list[Any]) -> None:
    for x in leaves:
        if isinstance(x, DTensor):
            finished_forms.forget(x)


def _views(leaves: list[Any]) -> str:
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    if any(map(given.without_strides, tensors)):
        return "an argument is nested, or sparse and compressed"
    if any(map(given.hooked, tensors)):
        return "an argument has hooks on its gradient"
    if write_back.origins.data and any(x in write_back.origins for x in tensors):
        return "an argument is a copied view, whose writes travel to its base"
    return ""


def erase(function: Callable[..., Any], *, most: int = _MOST) -> Erased:
    """A function that runs as it is the first time, and as its local program afterwards.

    The first call with given shapes, layouts and flags runs and is recorded: what this rank does on plain
    local tensors, with its collectives. Later calls for which the recording holds replay that on plain
    tensors and wrap the results; parameters, optimizer states and buffers are written in place, gradients of
    a backward inside are set. `str()` of the result prints the local programs.

    Args:
        function: a function, a module, or a whole step with its backward and optimizer.
        most: how many recordings are kept; then one warning, and calls that fit none run as they are.

    A recording holds for: structure, shapes, strides, dtypes and layouts of the arguments; values of Python
    scalars, among the arguments and where the program reaches (cells, globals, attributes of modules,
    optimizers and objects); the identity of parameters, buffers and states; which gradients exist; grad,
    inference and autocast modes, `explicit()`, deterministic flags, the default dtype.
    A call that does what cannot be replayed runs as it is: `report()` names it, and the line of the program.
    Inside `trace()`, `guarded()`, torch's modes and transforms every call runs as it is.

    Results of a call that ran a backward inside come back without a graph. In a backward of results that
    want gradients, what `.backward(create_graph=True)` asks raises.

    Raises: EraseError: nothing that can be called; `most` is no whole number above 0.
    Cost: what the function sends, through the process groups of its axes; a replay adds nothing.
    """
    refuse_other_kind("erase: function", function, Callable, EraseError, fix="a function or a module")
    refuse_no_number("erase: most", most, EraseError, whole=True)
    return Erased(function, most)
