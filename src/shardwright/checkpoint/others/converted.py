"""What is written of a checkpoint of others: its things, by the names that they have here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwright.checkpoint.collect import EXTRA
from shardwright.checkpoint.model_state import EXTRA as EXTRA_STATE
from shardwright.checkpoint.optimizer_state import OWN
from shardwright.checkpoint.others.foreign import ForeignTensor, Steps, as_thing, whole
from shardwright.checkpoint.others.foreign_optimizers import ForeignOptimizer, refuse_other_shapes
from shardwright.checkpoint.rng_state import KEY as RNG
from shardwright.checkpoint.storage.values import encode
from shardwright.checkpoint.storage.writer import Entry
from shardwright.errors import CheckpointError, refuse_other_kind

MODELS = ("model", "model_state_dict", "state_dict")  # what programs call the model in what they save
Key = Callable[[str], str]


class _Parameter(NamedTuple):
    """A tensor of the model: its key here, its shape."""

    key: str
    shape: tuple[int, ...]


class Converted:
    """Tensors, values and optimizers as a manifest tells them, and the entries to write."""

    def __init__(self, source: Path, found: dict[Steps, Any], key: Key | None) -> None:
        self.source, self._key = source, key
        first = {steps[0] for steps in found if len(steps) > 1}
        self.model = next((name for name in MODELS if name in first), None)
        tensors = {steps: one for steps, one in found.items() if isinstance(one, ForeignTensor)}
        self.parameters = {
            self._inside(steps): _Parameter(self.key(steps), one.shape)
            for steps, one in tensors.items()
            if self.model in (None, steps[0])
        }
        self.by_module: dict[Steps, dict[str, _Parameter]] = {}
        self.every: dict[str, _Parameter] = {}
        for steps, one in tensors.items():
            self.every[_dotted(steps)] = _Parameter(self.key(steps), one.shape)
            if len(steps) > 1:
                self.by_module.setdefault(steps[:-1], {})[str(steps[-1])] = self.every[_dotted(steps)]
        self.tensors: dict[str, dict[str, Any]] = {}
        self.values: dict[str, Any] = {}
        self.optimizers: dict[str, Any] = {}
        self.entries: list[Entry] = []

    def _inside(self, steps: Steps) -> str:
        """A name as the model knows it."""
        return _dotted(steps if self.model is None else steps[1:])

    def key(self, steps: Steps) -> str:
        """What is called so here."""
        if self._key is not None:
            found = self._key(_dotted(steps))
            refuse_other_kind(
                f"key={self._key!r:.60} gives for {_dotted(steps)}",
                found,
                str,
                CheckpointError,
                fix="give a text",
            )
            return found
        if self.model is None:
            return f"model/{self._inside(steps)}"
        first = "model" if steps[0] == self.model else f"{RNG}~" if steps[0] == RNG else steps[0]
        return "/".join(map(str, (first, *steps[1:])))

    def named(self, found: dict[Steps, Any]) -> Iterator[tuple[str, str, Any]]:
        """Key here, name there, and thing. What is neither of the model nor tensors alone is one value.

        So is the extra state of a module, which its formats take apart as they do a dict of tensors.
        """
        rest: dict[Any, dict[Steps, Any]] = {}
        extra: dict[Steps, dict[Steps, Any]] = {}
        for steps, thing in found.items():
            apart = self._key is None and self.model not in (None, steps[0]) and len(steps) > 1
            depth = next((n for n, step in enumerate(steps, 1) if _is_extra(step)), 0)
            if depth:
                extra.setdefault(steps[:depth], {})[steps] = thing
            elif apart:
                rest.setdefault(steps[0], {})[steps] = thing
            else:
                yield self.key(steps), _dotted(steps), thing
        for steps, things in extra.items():
            value = whole(things[steps]) if steps in things else _nested(things, len(steps))
            yield self.key(steps), _dotted(steps), value
        for name, things in rest.items():
            if name != EXTRA and all(isinstance(thing, ForeignTensor) for thing in things.values()):
                yield from ((self.key(steps), _dotted(steps), thing) for steps, thing in things.items())
            else:
                yield self.key((name,)), str(name), _nested(things, 1)

    def add(self, path: str, name: str, thing: Any) -> None:
        """A tensor or a value. Raises: CheckpointError: its key is taken, or it could only be pickled."""
        if path in self.tensors or path in self.values:
            raise CheckpointError(f"{self.source}: {name} and another one would both be called {path}")
        if isinstance(thing, ForeignTensor) and path != EXTRA:
            self._put(path, thing)
        else:
            self.values[path] = encode(whole(thing), path, self._keep)

    def _put(self, path: str, thing: ForeignTensor) -> None:
        self.tensors[path] = {"dtype": thing.dtype, "shape": thing.shape, "layout": None, "parts": []}
        self.entries += [
            Entry(path, thing.dtype, (at, n), n == thing.shape, get) for at, n, get in thing.boxes
        ]

    def _keep(self, key: str, tensor: torch.Tensor) -> str:
        """Take a tensor that a value names; its key."""
        while key in self.tensors or key in self.values:
            key += "~"
        self._put(key, as_thing(tensor))
        return key

    def add_optimizer(self, one: ForeignOptimizer, path: str, module: str | None = None) -> None:
        """An optimizer, by the names that its parameters have here. Args: module: whose they are, if said."""
        parameters = self._parameters_of(one, module)
        values: dict[str, dict[str, Any]] = {}
        for parameter, state in one.state.items():
            called = parameters[parameter].key if parameter != OWN else OWN
            for name, thing in state.items():
                key = f"{path}/{called}/{name}"
                if isinstance(thing, ForeignTensor) and parameter != OWN:
                    self.add(key, key, thing)
                else:
                    values.setdefault(called, {})[name] = encode(whole(thing), key, self._keep)
        groups = [
            {name: encode(of, f"{path}/{name}") for name, of in group.items()}
            | {"params": [parameters[name].key for name in group["params"]]}
            for group in one.groups
        ]
        self.optimizers[path] = {"kind": "", "groups": groups, "values": values}

    def _parameters_of(self, one: ForeignOptimizer, module: str | None) -> dict[str, _Parameter]:
        """The parameters by the names of the optimizer: of the model, or of the one module that has them all.

        Raises: CheckpointError: there is no such module, or there are several.
        """
        if module is not None:
            fitting = [of for steps, of in self.by_module.items() if module == _dotted(steps)]
            if not fitting:
                raise CheckpointError(
                    f"parameters= says that those of {_dotted(one.steps)} are of {module!r}, of which there "
                    f"are no tensors; there are some of {', '.join(map(_dotted, self.by_module)) or 'none'}"
                )
        elif one.names <= set(self.parameters):
            fitting = [self.parameters]
        elif one.names <= set(self.every):
            fitting = [self.every]
        else:
            fitting = [of for of in self.by_module.values() if one.names <= set(of) and _fits(one, of)]
        if len(fitting) > 1:
            which = next(_dotted(steps) for steps, of in self.by_module.items() if of is fitting[0])
            raise CheckpointError(
                f"{_dotted(one.steps)} has parameters of names that {len(fitting)} modules have, and does "
                f"not say which: parameters={{{_dotted(one.steps)!r}: {which!r}}} says it; of one that knows "
                "them by number, give their names with that of the module before each"
            )
        found = fitting[0] if fitting else self.parameters
        refuse_other_shapes(one, {name: of.shape for name, of in found.items()})
        return found


def _fits(one: ForeignOptimizer, parameters: dict[str, _Parameter]) -> bool:
    try:
        refuse_other_shapes(one, {name: of.shape for name, of in parameters.items()})
    except CheckpointError:
        return False
    return True


def _dotted(steps: Steps) -> str:
    return ".".join(map(str, steps))


def _is_extra(step: Any) -> bool:
    """Does a step end in the name that torch gives a module's extra state?"""
    return isinstance(step, str) and step.rpartition(".")[2] == EXTRA_STATE


def _nested(things: dict[Steps, Any], depth: int) -> Any:
    """Things below one name, of so many steps, as the dicts and lists in which they were."""
    nests: dict[Any, Any] = {}
    for steps, thing in things.items():
        inner = nests
        for step in steps[depth:-1]:
            inner = inner.setdefault(step, {})
        inner[steps[-1]] = whole(thing)
    return _with_lists(nests)


def _with_lists(nests: Any) -> Any:
    """Dicts whose keys are the numbers from 0 on are lists."""
    if not isinstance(nests, dict):
        return nests
    inner = {key: _with_lists(one) for key, one in nests.items()}
    if inner and all(type(key) is int for key in inner) and sorted(inner) == list(range(len(inner))):
        return [inner[at] for at in range(len(inner))]
    return inner
