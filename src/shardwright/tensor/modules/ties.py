"""Tied parameters stay one parameter when the parts of a model are placed one by one.

A strategy that is applied to a part cannot see the module that holds the other name of a tied parameter. So
it is remembered, weakly, which tensor replaced which: whoever places another part that still holds the
replaced one gets the same new parameter, if the call would have made an equal one, and an error that names
both if not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.utils.weak import WeakTensorKeyDictionary

from shardwright.errors import ParallelError
from shardwright.tensor.modules.slots import Slot, slots_of, unchanged_on_error
from shardwright.tensor.wrap import as_ours


@dataclass
class _Line:
    """The tensors that have stood for one parameter of the program: the one that does now, and its name."""

    last: nn.Parameter
    name: str


@dataclass(frozen=True, slots=True)
class _Change:
    """What a call made of the parameter in one place."""

    slot: Slot
    old: nn.Parameter
    new: nn.Parameter

    @property
    def replaced(self) -> bool:
        return self.new is not self.old


# Replaced tensor -> what stands for it. Keyed by identity and forgotten with the replaced tensor, so almost
# at once where nothing is tied. New tensors are no keys: torch cannot swap what a weak reference points to.
_lines = WeakTensorKeyDictionary()


@contextmanager
def ties_kept(module: nn.Module, verb: str) -> Iterator[None]:
    """Within the block a strategy replaces parameters of `module`; what was one parameter is one afterwards.

    Raises: ParallelError: the names of a tied parameter were placed in different ways. Then, and on any other
        error within the block, the module is as it was.
    """
    before = [(slot, slot.get()) for slot in slots_of(module)]
    lines = _known_lines()
    stood = {id(line): (line.last, line.name) for line in lines.values()}  # a strategy may be made of others
    with unchanged_on_error(module), _forgotten_on_error([old for _, old in before]):
        yield
        for changes in _by_parameter(before, lines):
            if any(change.replaced for change in changes):
                line = lines.get(id(changes[0].old))
                _tie(changes, line, stood.get(id(line), (None, "")), module, verb)


def _known_lines() -> dict[int, _Line]:
    """The line of each tensor that belongs to one, by identity: of replaced and of standing ones."""
    found: dict[int, _Line] = {}
    for replaced, line in _lines.items():
        found[id(replaced)] = found[id(line.last)] = line
    return found


def names_of_replaced() -> dict[int, str]:
    """Identity of each tensor that a strategy replaced and somebody still holds -> the name that it had."""
    return {id(old): line.name for old, line in _lines.items() if line.last is not old}


@contextmanager
def _forgotten_on_error(olds: Sequence[nn.Parameter]) -> Iterator[None]:
    """On an error within the block nothing is remembered of it: what stood there stands there again."""
    saved = [(old, line, line and (line.last, line.name)) for old in olds for line in (_lines.get(old),)]
    try:
        yield
    except BaseException:
        for old, line, was in saved:
            if line is None or was is None:
                _lines.pop(old, None)
            else:
                line.last, line.name = was
        raise


def refuse_placed_elsewhere(slots: Sequence[Slot], module: nn.Module, verb: str) -> None:
    """Raise ParallelError for a parameter whose other name was placed without it; changes nothing."""
    for slot in slots:
        line = _lines.get(slot.get())
        if line is not None and line.last is not slot.get():
            _refuse(_named(slot, module), _where(line.last, module) or line.name, line.last, verb)


def _by_parameter(
    before: Sequence[tuple[Slot, nn.Parameter]], lines: dict[int, _Line]
) -> list[list[_Change]]:
    """Changes of the names of one parameter together."""
    groups: dict[int, list[_Change]] = {}
    for slot, old in before:
        new = slot.owner._parameters.get(slot.name)
        if new is not None:
            line = lines.get(id(old))
            groups.setdefault(id(old) if line is None else id(line), []).append(_Change(slot, old, new))
    return list(groups.values())


def _tie(
    changes: Sequence[_Change],
    line: _Line | None,
    stood: tuple[nn.Parameter | None, str],
    module: nn.Module,
    verb: str,
) -> None:
    """One new parameter in all places, which stands for the old ones from now on.

    Args: stood: what stood for them before the call, and its name.
    """
    chosen, name = _chosen(changes, *stood, module)
    for change in changes:
        if change.new is chosen:
            continue
        if not _interchangeable(change.new, chosen):
            _refuse(_named(change.slot, module), name, chosen, verb)
        change.slot.put(chosen)
    line = _Line(chosen, name) if line is None else line
    line.last, line.name = chosen, name
    for change in changes:
        if change.old is not chosen:
            _lines[change.old] = line


def _chosen(
    changes: Sequence[_Change], placed: nn.Parameter | None, name: str, module: nn.Module
) -> tuple[nn.Parameter, str]:
    """The parameter for all places: what became of the one that stands for them, which may be elsewhere."""
    followers = [c for c in changes if placed is None or c.old is placed]
    if placed is not None and not followers:
        return placed, name
    first = next((c for c in followers if c.replaced), followers[0])
    return first.new, _named(first.slot, module)


def _interchangeable(new: nn.Parameter, chosen: nn.Parameter) -> bool:
    """Would the call have made the same? A unit of `fully_shard` shares its parameters with no other."""
    if not isinstance(new, TorchDTensor) or not isinstance(chosen, TorchDTensor):
        return False
    if getattr(new, "_fully_sharded", "") or getattr(chosen, "_fully_sharded", ""):
        return False
    return as_ours(new)._spec == as_ours(chosen)._spec and new.requires_grad == chosen.requires_grad


def _named(slot: Slot, module: nn.Module) -> str:
    return f"{slot.path} of {type(module).__name__}"


def _where(parameter: nn.Parameter, module: nn.Module) -> str:
    """The name of a parameter in this module, empty if it is not there."""
    return next((_named(slot, module) for slot in slots_of(module) if slot.get() is parameter), "")


def _refuse(this: str, other: str, placed: nn.Parameter, verb: str) -> None:
    layout = as_ours(placed)._spec.layout if isinstance(placed, TorchDTensor) else "not placed"
    raise ParallelError(
        f"{verb}: {this} and {other} are one parameter (tied weights), and it would not stay one: the latter "
        f"is {layout}; place both in one call, on a module that holds both"
    )
