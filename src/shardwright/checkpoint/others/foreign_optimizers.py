"""Optimizers as other programs store them: by name, by flat names, or by the numbers of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.checkpoint.optimizer_state import OWN
from shardwright.checkpoint.others.foreign import ForeignTensor, Steps, whole
from shardwright.errors import CheckpointError

_GROUPS = "param_groups"
_PARAMS = "params"
_NAMES = "param_names"
_OF_THE_SHAPE = {  # states of torch's optimizers that have the shape of their parameter
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "acc_delta",
    "grad_avg", "sum", "prev", "ax",
}  # fmt: skip


# Names in an order, or for each optimizer by its name: those, or the module whose parameters it has.
Numbered = Sequence[str] | Mapping[str, str | Sequence[str]] | None


@dataclass
class ForeignOptimizer:
    """An optimizer: settings of each group with `params` by name, and parameter -> state -> thing."""

    steps: Steps
    groups: list[dict[str, Any]] = field(default_factory=list)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """Of its parameters."""
        return {*self.state, *(name for group in self.groups for name in group[_PARAMS])} - {OWN}


def take_optimizers(found: dict[Steps, Any], numbered: Numbered) -> list[ForeignOptimizer]:
    """The optimizers among what a source holds; what is theirs leaves `found`.

    Args: numbered: the names of the parameters in the order in which the optimizer had them, for one that
        knows them by number; by the optimizer's name, where there are several.
    Raises: CheckpointError: that order is needed and not given, or a state does not fit its parameter.
    """
    nested = [steps[:-3] for steps in found if steps[-3:-2] == (_GROUPS,) and steps[-1] == _PARAMS]
    flat = [steps[:-1] for steps in found if steps and str(steps[-1]).startswith(f"{_GROUPS}.")]
    names = [called(steps) for steps in (*nested, *flat)]
    if isinstance(numbered, Mapping) and (unknown := set(numbered) - set(names)):
        raise CheckpointError(
            f"parameters= speaks of {min(unknown)!r}, which is no optimizer there; there are "
            f"{', '.join(dict.fromkeys(names)) or 'none'}"
        )
    taken = [_nested(found, steps, numbered) for steps in dict.fromkeys(nested)]
    return taken + [_flat(found, steps) for steps in dict.fromkeys(flat) if steps not in nested]


def called(steps: Steps) -> str:
    """An optimizer's name in a source."""
    return ".".join(map(str, steps))


def _nested(found: dict[Steps, Any], steps: Steps, given: Numbered) -> ForeignOptimizer:
    numbered = given.get(called(steps)) if isinstance(given, Mapping) else given
    depth = len(steps)
    own = [key for key in found if key[:depth] == steps and len(key) == depth + 3]
    mine = {key: found.pop(key) for key in own if key[depth] in ("state", _GROUPS)}
    groups: dict[int, dict[str, Any]] = {}
    state: dict[str, dict[str, Any]] = {}
    for key, thing in mine.items():
        if key[depth] == _GROUPS:
            groups.setdefault(key[depth + 1], {})[str(key[depth + 2])] = whole(thing)
        else:
            state.setdefault(str(key[depth + 1]), {})[str(key[depth + 2])] = thing
    ordered = [groups[number] for number in sorted(groups)]
    names = _names(steps, ordered, None if isinstance(numbered, str) else numbered)
    for group in ordered:
        group[_PARAMS] = [names.get(one, str(one)) for one in group[_PARAMS]]
        group.pop(_NAMES, None)
    by_name = {names.get(int(one) if one.isdecimal() else one, one): of for one, of in state.items()}
    return ForeignOptimizer(steps, ordered, by_name)


def _names(steps: Steps, groups: list[dict[str, Any]], numbered: Sequence[str] | None) -> dict[Any, str]:
    """Number -> name of a parameter; empty where they are known by name."""
    numbers = [one for group in groups for one in group[_PARAMS]]
    if all(isinstance(one, str) for one in numbers):
        return {}
    if numbered is None and all(len(group.get(_NAMES, ())) == len(group[_PARAMS]) for group in groups):
        numbered = [name for group in groups for name in group[_NAMES]]
    name = called(steps) or "the optimizer"
    if numbered is None:
        raise CheckpointError(
            f"{name} knows its {len(numbers)} parameters by number only: give their names in the order in "
            "which that optimizer was given them: parameters=[name for name, _ in model.named_parameters()], "
            "or one group's after another's"
        )
    if len(numbered) != len(numbers) or len(set(numbered)) != len(numbered):
        raise CheckpointError(
            f"{name} has {len(numbers)} parameters, parameters= names {len(set(numbered))} different ones"
        )
    return dict(zip(numbers, numbered, strict=True))


def _flat(found: dict[Steps, Any], steps: Steps) -> ForeignOptimizer:
    """Of `state.<parameter>.<name>` and `param_groups.<parameter>.<setting>`: each a group of its own."""
    depth = len(steps)
    one = ForeignOptimizer(steps)
    groups: dict[str, dict[str, Any]] = {}
    for key in [key for key in found if key[:depth] == steps and len(key) == depth + 1]:
        kind, _, rest = str(key[depth]).partition(".")
        parameter, _, name = rest.rpartition(".")
        if kind == _GROUPS and parameter:
            groups.setdefault(parameter, {_PARAMS: [parameter]})[name] = whole(found.pop(key))
        elif kind == "state" and parameter:
            one.state.setdefault(parameter, {})[name] = found.pop(key)
    one.groups = list(groups.values())
    return one


def refuse_other_shapes(one: ForeignOptimizer, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises CheckpointError where a parameter is none of the model's, or a state has not its shape."""
    for parameter in sorted(one.names):
        if parameter not in shapes:
            raise CheckpointError(
                f"{'.'.join(map(str, one.steps)) or 'the optimizer'} has a parameter {parameter!r}, and "
                "there is no tensor of that name"
            )
        for name, thing in one.state.get(parameter, {}).items():
            shape = thing.shape if isinstance(thing, ForeignTensor) else shapes[parameter]
            if name in _OF_THE_SHAPE and shape != shapes[parameter]:
                raise CheckpointError(
                    f"{name} of {parameter} is {list(shape)}, the parameter {list(shapes[parameter])}: are "
                    "the parameters named in the order in which the optimizer had them?"
                )
