"""What a state is called in the nests of torch's `get_state_dict`, and back.

    {"model": {"0.weight": x}, "optimizer": {"state": {"0.weight": {"exp_avg": x}}, "param_groups": [...]}}

The same as one flat name: "model.0.weight", "optimizer.state.0.weight.exp_avg".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.checkpoint.collect import RANKS, Part, optimizers_of, values_of
from shardwright.checkpoint.optimizer_state import OWN
from shardwright.checkpoint.rng_state import KEY as RNG
from shardwright.checkpoint.storage.values import decode, kept_in
from shardwright.errors import CheckpointError

_PARAMS = "params"
_NAMES = "param_names"


def as_torch_nests(parts: list[Part], tensors: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """A state in torch's nests; the states of the generators are left out.

    Args: tensors: by key. about: more values, by name.
    Raises: CheckpointError: a value differs between ranks, or two things get one place.
    """
    nests: dict[str, Any] = {}
    modules = list(dict.fromkeys(name for part in parts for name in part.modules))
    optimizers = optimizers_of(parts)
    inside: set[str] = set()
    for path, saved in optimizers.items():
        found, used = _optimizer(path, saved, modules, tensors)
        if any(part.optimizers[path].named for part in parts if path in part.optimizers):
            found["param_groups"] = [{**one, _NAMES: one[_PARAMS]} for one in found["param_groups"]]
        _put(nests, path.split("/"), found)
        inside |= used
    ties = {name: first for part in parts for name, first in part.ties.items() if name not in tensors}
    values = values_of(parts)
    values.pop(RNG, None)
    of_values = {key for key, _ in kept_in(list(values.values()))}
    for key in (*tensors, *ties):
        if key not in inside and key not in of_values:
            _put(nests, _place(key, modules), tensors[ties.get(key, key)])
    for path, value in values.items():
        if isinstance(value, dict) and value.get("$") == RANKS:
            raise CheckpointError(
                f"{path} differs between ranks, and torch's format has room for one value: make it equal, "
                'leave it out, or save without format="dcp"'
            )
        _put(nests, _place(path, modules), decode(value, path, tensors.__getitem__))
    for name, value in about.items():
        if value not in (None, {}):
            _put(nests, [name], value)
    return nests


def _place(key: str, modules: list[str]) -> list[str]:
    """The steps to a key: what is below a module is one step, with dots, as torch names it."""
    module = max((one for one in modules if key.startswith(f"{one}/")), key=len, default=None)
    return key.split("/") if module is None else [*module.split("/"), key[len(module) + 1 :]]


def _optimizer(
    path: str, saved: dict[str, Any], modules: list[str], tensors: Mapping[str, Any]
) -> tuple[dict[str, Any], set[str]]:
    """An optimizer as `get_state_dict` gives it, and the keys of its tensors."""
    names = [name for group in saved["groups"] for name in group[_PARAMS]]
    called = _short(names, modules)
    state: dict[str, dict[str, Any]] = {called[name]: {} for name in names}
    inside: set[str] = set()
    for key in tensors:
        parameter, _, name = key[len(path) + 1 :].rpartition("/")
        if key.startswith(f"{path}/") and parameter in called:
            state[called[parameter]][name] = tensors[key]
            inside.add(key)
    if OWN in saved["values"]:
        own = f"{path} keeps {next(iter(saved['values'][OWN]))!r} for no parameter"
        raise CheckpointError(f'{own}, for which get_state_dict has no name: save without format="dcp"')
    for parameter, values in saved["values"].items():
        found = decode(values, f"{path}/{parameter}", tensors.__getitem__)
        state[called[parameter]] |= found
        inside |= {key for key, _ in kept_in(list(values.values()))}
    groups = [
        {
            **{key: decode(one, key) for key, one in group.items() if key != _PARAMS},
            _PARAMS: [called[name] for name in group[_PARAMS]],
        }
        for group in saved["groups"]
    ]
    return {"state": {name: of for name, of in state.items() if of}, "param_groups": groups}, inside


def _short(names: list[str], modules: list[str]) -> dict[str, str]:
    """A parameter's name below its module, where all are of one module; else its path with dots."""
    places = {name: _place(name, modules) for name in names}
    if len({tuple(place[:-1]) for place in places.values()}) == 1:
        return {name: place[-1] for name, place in places.items()}
    return {name: ".".join(place) for name, place in places.items()}


def _put(nests: dict[str, Any], steps: list[str], value: Any) -> None:
    for step in steps[:-1]:
        nests = nests.setdefault(step, {})
    if steps[-1] in nests:
        raise CheckpointError(f"two things of the state are called {'.'.join(steps)} in torch's format")
    nests[steps[-1]] = value
