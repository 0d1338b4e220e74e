"""Replacing the parameters of a module, all or none, tied ones included."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


@dataclass(frozen=True, slots=True)
class Slot:
    """One place where a parameter is registered; a tied parameter has several."""

    owner: nn.Module
    name: str
    path: str

    def get(self) -> nn.Parameter:
        """The parameter that stands here now."""
        parameter = self.owner._parameters[self.name]
        if parameter is None:
            raise KeyError(self.path)
        return parameter

    def put(self, parameter: nn.Parameter) -> None:
        """Register another parameter here; hooks of the module are not run."""
        self.owner._parameters[self.name] = parameter


def slots_of(module: nn.Module) -> Iterator[Slot]:
    """Every place in the module tree that holds a parameter, each name of a tied one included."""
    for prefix, owner in module.named_modules(remove_duplicate=True):
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield Slot(owner, name, f"{prefix}.{name}" if prefix else name)


@contextmanager
def unchanged_on_error(module: nn.Module) -> Iterator[None]:
    """On an error within the block, every parameter that stood in the module stands there again."""
    before = [(slot, slot.get()) for slot in slots_of(module)]
    try:
        yield
    except BaseException:
        for slot, parameter in before:
            slot.put(parameter)
        raise


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
