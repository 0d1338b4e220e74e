"""Replacing the parameters of a module, all or none, tied ones included."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from shardwright.tensor.modules.slots import Slot, slots_of


def replace_parameters(
    module: nn.Module, make: Callable[[str, nn.Parameter], nn.Parameter | None]
) -> dict[nn.Parameter, nn.Parameter]:
    """Replace every parameter by `make(path, parameter)` (None: leave it); ties stay ties.

    All new parameters are made before the first is put in place, so an error changes nothing.
    Returns: old parameter -> new one.
    """
    slots = list(slots_of(module))
    made: dict[nn.Parameter, nn.Parameter] = {}
    seen: set[nn.Parameter] = set()
    for slot in slots:
        old = slot.get()
        if old in seen:
            continue
        seen.add(old)
        new = make(slot.path, old)
        if new is not None:
            made[old] = new
    put_all(slots, made)
    return made


def put_all(slots: list[Slot], new_of: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Put the new parameter into every slot whose parameter has one."""
    for slot in slots:
        new = new_of.get(slot.get())
        if new is not None:
            slot.put(new)
