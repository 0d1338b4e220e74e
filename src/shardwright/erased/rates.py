"""Numbers of an optimizer's groups that are others from call to call: a learning rate and its schedule.

The first recording holds for the numbers that were there. Where nothing but such numbers has changed since,
the next one follows them, as step counts are followed (`numbers.py`): while the optimizer steps, a followed
number stands in its group, and the program that is recorded reads the group at each replay. What the step
decides by the number, or asks of it as a number, is refused; then recordings hold for the numbers that were
there, as before. A fused kernel takes numbers alone: its rate is followed from the call to the kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from shardwright.erased import numbers
from shardwright.erased.facts import FLOAT, Fact

_OURS = str(Path(__file__).parents[1])
OPTIMIZERS = str(Path(torch.__file__).parent / "optim")
# Functions of torch that hand their learning rate to a kernel and do nothing else with it.
_FUSED = frozenset({"_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad"})
_WHAT = "a number of an optimizer"


@dataclass(frozen=True, slots=True, eq=False)
class Rate:
    """One number: the group that holds it, under which key, of which optimizer."""

    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    key: str

    def is_there(self) -> bool:
        """Is the group still one of the optimizer's? States that are loaded bring others."""
        return any(group is self.group for group in self.optimizer.param_groups)

    def is_of(self, other: Rate) -> bool:
        """Is it the same number? Calls of other sizes find it too, and it stands in its group once."""
        return self.group is other.group and self.key == other.key

    def is_at(self, fact: Fact) -> bool:
        """Is it the number that a fact is of?"""
        return fact.holder is self.group and fact.key == self.key


def may_name(rates: Sequence[Rate], named: Collection[str]) -> bool:
    """May a program that has these names and texts in its code read one of the numbers by itself?"""
    return any(not {"param_groups", "state_dict", rate.key}.isdisjoint(named) for rate in rates)


def followed_facts(facts: Iterable[Fact], rates: Sequence[Rate]) -> list[Fact]:
    """The facts of a recording that follows these numbers: of them it only asks that they are numbers."""
    return [replace(f, kind=FLOAT) if any(rate.is_at(f) for rate in rates) else f for f in facts]


class Following:
    """Within the block the numbers are followed in every step of their optimizers.

    names: what the text of a followed number names, for the program.
    """

    def __init__(self, rates: Sequence[Rate], refuse: Callable[[str, str], None]) -> None:
        self._rates, self._refuse = rates, refuse
        self.names: dict[str, Any] = {f"r{place}": rate.group for place, rate in enumerate(rates)}
        self._hooks: list[Any] = []
        self._put: list[tuple[Rate, Any, float]] = []
        self._handed: list[Any] = []

    def __enter__(self) -> Self:
        for optimizer in {id(rate.optimizer): rate.optimizer for rate in self._rates}.values():
            self._hooks.append(optimizer.register_step_pre_hook(self._begins))
            self._hooks.append(optimizer.register_step_post_hook(self._ends))
        return self

    def __exit__(self, *_: object) -> None:
        self._ends()
        for hook in self._hooks:
            hook.remove()

    def _begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for place, rate in enumerate(self._rates):
            if rate.optimizer is optimizer:
                value = rate.group[rate.key]
                name = f"r{place}[{rate.key!r}]"
                put = rate.group[rate.key] = self._followed(value, name, rate.key)
                self._put.append((rate, put, value))

    def _followed(self, value: float, name: str, key: str) -> Any:
        put: Any = None

        def handed() -> bool:
            frame: Any = sys._getframe(2)  # below the node: who makes the call that casts
            while frame.f_code.co_filename.startswith(_OURS):  # doors in Python hand it on
                frame = frame.f_back
            if key != "lr":  # equal numbers are not one number
                return False
            if frame.f_code.co_name not in _FUSED or not frame.f_code.co_filename.startswith(OPTIMIZERS):
                return False
            self._handed.append(put)
            return True

        put = numbers.followed(value, name, lambda why: self._refuse(_WHAT, why), handed)
        return put

    def with_handed(self, func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The named arguments of an operator, with the followed number that was cast for it."""
        if not self._handed or not func._schema.name.startswith("aten::_fused_"):
            return kwargs
        put = self._handed.pop()
        if kwargs.get("lr") != numbers.plain(put):
            self._refuse(_WHAT, "a fused step takes another one than its learning rate")
            return kwargs
        return kwargs | {"lr": put}

    def _ends(self, *_: Any) -> None:
        if self._handed:
            self._refuse(_WHAT, "a fused step casts it, and no kernel takes it")
            self._handed.clear()
        for rate, put, value in self._put:
            if rate.group[rate.key] is put:
                rate.group[rate.key] = value
            else:
                self._refuse(_WHAT, "a step changes it")
                rate.group[rate.key] = numbers.plain(rate.group[rate.key])
        self._put.clear()
