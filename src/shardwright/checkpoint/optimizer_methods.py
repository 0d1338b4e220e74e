"""What an optimizer does itself when its state is asked for or loaded: its methods, torch's hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from shardwright.compat import hooks_of_optimizer
from shardwright.errors import CheckpointError

_PARAMS = "params"


def refuse_what_is_lost(optimizer: Optimizer, path: str) -> None:
    """Let an optimizer say its state, where it does so in a way of its own.

    Raises: CheckpointError: it says more than its groups and states hold.
    """
    asked = (hooks_of_optimizer(optimizer, f"state_dict_{when}") for when in ("pre", "post"))
    if not any(asked) and type(optimizer).state_dict is Optimizer.state_dict:
        return
    said = optimizer.state_dict()
    for name in sorted(set(said) - {"state", "param_groups"}):
        raise CheckpointError(
            f"the state_dict() of {path} gives {name!r} beside its groups and states, which would be "
            f"lost: keep it in the optimizer's state[{name!r}], or save it beside the optimizer"
        )
    held = {place: optimizer.state.get(one, {}) for one, place in _places(optimizer).items()}
    states = ((f"state[{place}]", held.get(place, one), one) for place, one in said["state"].items())
    pairs = enumerate(zip(optimizer.param_groups, said["param_groups"], strict=False))
    groups = ((f"param_groups[{number}]", *pair) for number, pair in pairs)
    for where, mine, other in (*groups, *states):
        for name in sorted(map(str, set(other) - set(mine))) if isinstance(other, dict) else ():
            raise CheckpointError(
                f"the state_dict() of {path} gives {name!r} in its {where}, where the optimizer itself has "
                "no such thing, so that it would be lost: keep it there, or save it beside the optimizer"
            )


def loads_itself(optimizer: Optimizer) -> bool:
    """Does its class, or a hook, do something of its own with a state that is loaded?"""
    if hooks_of_optimizer(optimizer, "load_state_dict_pre"):
        return True
    methods = (type(optimizer).load_state_dict, type(optimizer).__setstate__)
    return any(not method.__module__.startswith("torch.") for method in methods)


def load_by_its_methods(
    optimizer: Optimizer,
    names: dict[int, str],
    states: dict[str, dict[str, Any]],
    groups: list[dict[str, Any]],
    own: dict[str, Any],
) -> None:
    """Give an optimizer what was loaded as its `state_dict` says such things, by its own `load_state_dict`.

    Args: states: parameter -> state -> value. groups: the settings. own: what it keeps for no parameter.
    """
    places = _places(optimizer)
    packed = [
        {**mine, **saved, _PARAMS: [places[one] for one in mine[_PARAMS]]}
        for mine, saved in zip(optimizer.param_groups, groups, strict=True)
    ]
    given = {place: states[names[id(one)]] for one, place in places.items() if names[id(one)] in states}
    optimizer.load_state_dict({"state": {**given, **own}, "param_groups": packed})


def after_load(optimizer: Optimizer) -> None:
    """Tell those that torch tells when an optimizer's state has been loaded."""
    for hook in hooks_of_optimizer(optimizer, "load_state_dict_post"):
        hook(optimizer)


def _places(optimizer: Optimizer) -> dict[torch.Tensor, int]:
    """Parameter -> the number by which torch's `state_dict` calls it."""
    every = (one for group in optimizer.param_groups for one in group[_PARAMS])
    return {one: place for place, one in enumerate(dict.fromkeys(every))}
