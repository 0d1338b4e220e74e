"""What happens to the Pending axes of a redistribution: kept, reduced, made anew.

Several Pendings combine right to left and are never swapped: a Pending that stays may be passed by a
reduction to its left only where the two commute (both linear, or the same reduction).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from shardwright.errors import PlanError
from shardwright.layout.layout import Layout
from shardwright.placement.base import Pending
from shardwright.placement.partial import Partial
from shardwright.plan.work import TermsOf
from shardwright.remember import remembered


@dataclass(frozen=True, slots=True)
class PendingChange:
    """Terms of Pendings, each list in its layout's order of application.

    kept: stay as they are. reduced: combined, last first. made: embedded in the target, first first.
    """

    kept: tuple[TermsOf, ...]
    reduced: tuple[TermsOf, ...]
    made: tuple[TermsOf, ...]


_NO_CHANGE = PendingChange((), (), ())


def pending_change(source: Layout, target: Layout) -> PendingChange:
    """Which Pendings are kept, reduced and made between two layouts.

    Raises: PlanError: a Pending of the target cannot be made from a finished value; a reduction has no
    meaning for the dtype.
    """
    before, after = pendings_of(source), pendings_of(target)
    if not before and not after:
        return _NO_CHANGE
    kept = _kept(before, after)
    made = tuple([of for of in after if of not in kept])
    for of in made:
        refuse_target(target, of.axis)
    reduced = tuple([of for of in before if of not in kept])
    _check_domains(source, (*reduced, *made))
    return PendingChange(kept, reduced, made)


def has_embed(placement: Pending) -> bool:
    """True when terms can be made from a finished value."""
    return placement.can_be_target and type(placement).embed is not Pending.embed


def takes_padding(pending: Pending, dtype: torch.dtype, n: int) -> bool:
    """Whether its n terms can be made where parts of a value are, by padding them with its identity.

    Not where signs matter: a rank that holds no negative number would go on where another one refuses. Nor
    where a term is weighed, so that a value and identities are another value; the one term of an average is
    n times the value, for which a narrow type has no room.
    """
    empty = torch.empty((), dtype=dtype, device="cpu")
    if pending.reduce_op == "avg" and dtype.itemsize < _WIDE:
        return False
    if pending.identity(empty) is None:
        return False
    signed = dtype.is_floating_point and pending.in_domain(torch.ones_like(empty))
    if signed and not pending.in_domain(torch.full_like(empty, -1)):
        return False
    return bool(pending.reduce_op) or _is_any_of_its_terms(pending, dtype, n)


_WIDE = 4  # bytes

# Of more coords nobody tries each: the value is finished there.
_MANY_COORDS = 64


@remembered(1024)
def _is_any_of_its_terms(pending: Pending, dtype: torch.dtype, n: int) -> bool:
    """Is a value what it and identities combine to, on whichever coord it is? Of a class of the user's."""
    x = torch.tensor([1, 2], device="cpu").to(dtype)
    neutral = pending.identity(x) if pending.in_domain(x) else None
    if neutral is None or n > _MANY_COORDS:
        return False
    for coord in range(n):
        made = pending.combine([(x if each == coord else neutral).clone() for each in range(n)])
        if not torch.allclose(made.to(torch.complex128), x.to(torch.complex128), rtol=1e-2):
            return False
    return True


def refuse_target(target: Layout, axis: int) -> None:
    """Raise PlanError if the Pending on this axis cannot be made from a finished value."""
    placement = cast("Pending", target.placements[axis])
    if not has_embed(placement):
        raise PlanError(
            f"{placement} on axis {target.axes[axis]!r} cannot be a target: it has no embed; "
            "redistribute to Replicate or a Partition instead"
        )
    blank = torch.zeros((), dtype=target.dtype, device="cpu")
    if not _has_values(placement, target.dtype):
        others = [name for name in ("sum", "max", "bor") if Partial(name).in_domain(blank)]
        fix = " or ".join(["Replicate()", *(f'Partial("{name}")' for name in others)])
        raise PlanError(
            f"{placement.text()} on axis {target.axes[axis]!r} cannot be a target: it has no meaning for "
            f"{target.dtype}; fix (checked): {fix}"
        )


def _has_values(pending: Pending, dtype: torch.dtype) -> bool:
    """Is there a number of this type in its domain?"""
    zero = torch.zeros((), dtype=dtype, device="cpu")
    return pending.in_domain(zero) or pending.in_domain(torch.ones_like(zero))


def _check_domains(layout: Layout, pendings: tuple[TermsOf, ...]) -> None:
    for axis, pending, _ in pendings:
        if not _has_values(pending, layout.dtype):
            raise PlanError(
                f"{pending} on axis {layout.axes[axis]!r} has no meaning for {layout.dtype}: convert the "
                "tensor first, or reduce it otherwise"
            )


def commute(pendings: Sequence[TermsOf]) -> bool:
    """True when these may be combined in any order: all linear, or all the same named reduction."""
    if all(of.pending.linear for of in pendings):
        return True
    return len({of.pending for of in pendings}) == 1 and bool(pendings[0].pending.reduce_op)


def _kept(before: tuple[TermsOf, ...], after: tuple[TermsOf, ...]) -> tuple[TermsOf, ...]:
    if commute(before + after):
        return tuple(of for of in before if of in after)
    kept: list[TermsOf] = []
    for mine, theirs in zip(before, after, strict=False):
        if mine != theirs:
            break
        kept.append(mine)
    return tuple(kept)


def pendings_of(layout: Layout) -> tuple[TermsOf, ...]:
    """The Pendings of a layout in their order of application."""
    found: list[TermsOf] = []
    for axis in layout.order:
        placement = layout.placements[axis]
        if placement.is_pending:
            found.append(TermsOf(axis, cast("Pending", placement), layout.sizes[axis]))
    return tuple(found)
