"""What a call leaves behind beside its results: gradients of parameters, and versions of what it wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version

from shardwright.compat import version_of
from shardwright.erased.given import found, hung_on, of_tensor, storage_of
from shardwright.erased.holds import gradient_of, may_have_gradient
from shardwright.erased.refuse import NOT_REPEATED, Refusal
from shardwright.erased.results import Result, made_again
from shardwright.erased.tape import Tape

_UNSET = object()


@dataclass(frozen=True, slots=True)
class Before:
    """A tensor as it was before the call."""

    path: str
    x: torch.Tensor
    gradient: torch.Tensor | None
    gradient_kind: Any
    gradient_version: int | None
    version: int | None
    node: Any
    wants_gradient: bool
    lies: Any
    hung: dict[str, Any]

    @staticmethod
    def of(path: str, x: torch.Tensor) -> Before:
        """Now."""
        gradient = _gradient(x)
        written = None if gradient is None else version_of(gradient)
        version, node, wants, hung = version_of(x), x.grad_fn, x.requires_grad, hung_on(x)
        return Before(path, x, gradient, gradient_of(x), written, version, node, wants, _lies(x), hung)

    def has(self, gradient: Any) -> bool:
        """Is this very tensor its gradient now?"""
        return _gradient(self.x) is gradient

    def brought(self) -> bool:
        """Has it got a gradient since, or more of one?"""
        now = _gradient(self.x)
        return now is not self.gradient or (now is not None and version_of(now) != self.gradient_version)


def _lies(x: torch.Tensor) -> Any:
    """How it lies and in which memory: what `t_` and `x.data = y` change, and no write of values does."""
    return of_tensor(x), storage_of(x)


def _gradient(x: torch.Tensor) -> torch.Tensor | None:
    return x.grad if may_have_gradient(x) else None


@dataclass(frozen=True, slots=True)
class Effects:
    """gradients: of parameters, and of arguments by number; None: it is gone. written: by the call."""

    gradients: tuple[tuple[Any, Result | None], ...]
    written: tuple[Any, ...]
    written_leaves: tuple[int, ...]


def gradients_after(
    before: list[Before], tape: Tape
) -> tuple[list[tuple[Any, Result | None]], list[Refusal]]:
    """The gradients that are others than before."""
    changed: list[tuple[Any, Result | None]] = []
    refusals: list[Refusal] = []
    for was in before:
        now = _gradient(was.x)
        if now is was.gradient:
            continue
        result = None if now is None else Result.of(now, tape)
        if now is not None and result is None:
            refusals.append(Refusal(f"{was.path}.grad", "it comes from nowhere in the recording"))
        changed.append((was.x, result))
    return changed, refusals


def written_of(before: list[Before]) -> tuple[list[torch.Tensor], list[Refusal]]:
    """What the call wrote in place."""
    written: list[torch.Tensor] = []
    refusals: list[Refusal] = []
    for was in before:
        if version_of(was.x) != was.version:
            written.append(was.x)
        if was.x.requires_grad is not was.wants_gradient:
            refusals.append(Refusal(f"{was.path}.requires_grad", NOT_REPEATED))
        elif was.x.grad_fn is not was.node:
            refusals.append(Refusal(was.path, "a write in place under a gradient gave it another graph"))
        elif _lies(was.x) != was.lies:
            refusals.append(
                Refusal(was.path, "the call gives it another shape or memory; a replay would not")
            )
        why = "the call sets it; a replay would not"
        refusals += [Refusal(f"{was.path}.{name}", why) for name in _attributes_set(was)]
    return written, refusals


def _attributes_set(was: Before) -> list[str]:
    now = hung_on(was.x)
    return [name for name in {**was.hung, **now} if now.get(name, _UNSET) is not was.hung.get(name, _UNSET)]


def carry_out(effects: Effects, leaves: list[Any], locals_: Sequence[torch.Tensor]) -> None:
    """Do it again; `locals_` are the gradients' local tensors, in order, None's left out."""
    remaining = iter(locals_)
    for parameter, result in effects.gradients:
        found(parameter, leaves).grad = None if result is None else made_again(result, next(remaining))
    count = [*effects.written, *(leaves[place] for place in effects.written_leaves)]
    if count:
        increment_version(count)
