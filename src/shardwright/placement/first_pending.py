"""What a pending class of somebody else's says, compared with its `combine` where it is first met.

On a few numbers of the dtype, on the CPU, on every rank alike: what is rounding is no contradiction here
(`shardwright.testing.check_placement` counts units in the last place), and a class whose kernels need another
device, or values of another kind, is not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwright.errors import PlacementError, words_of
from shardwright.placement.base import Pending, Placement, stated_by, undisturbed
from shardwright.placement.first_use import named
from shardwright.placement.partial import Partial, is_reduction
from shardwright.remember import remembered

# What a method raises that is wrong in itself, whatever the device and the values.
_FAULTS = (LookupError, AttributeError, TypeError, NameError, ArithmeticError)
_SHAPE = (2, 3)
_ULPS = 256


@remembered(4096)
def check_pending(pending: Pending, n: int, dtype: torch.dtype) -> None:
    """Compare what a class says of n terms of this dtype.

    Raises: PlacementError: `combine` does not undo `embed`, one of them makes another kind of tensor, or
        another method contradicts `combine`.
    """
    with undisturbed(), torch.no_grad():
        for law in (_dual_is_a_placement, _combine_undoes_embed, *_BESIDE):
            try:
                broken = law(pending, n, dtype)
            except _FAULTS as error:
                broken = f"{law.__name__.strip('_')}: it raised {words_of(error)}"
            except Exception:  # noqa: BLE001 - of a kernel, or a value: no verdict
                broken = None
            if broken:
                raise PlacementError(
                    f"{named(pending)} over {n} coords, {dtype}: {broken} "
                    "(shardwright.testing.check_placement tries its laws)"
                )


def _values(pending: Pending, dtype: torch.dtype) -> Tensor | None:
    """Numbers of the domain: of both signs, else positive ones, else ones."""
    numbers = torch.tensor([-2.0, -1.0, 1.0, 2.0, 3.0, 4.0]).reshape(_SHAPE)
    for candidate in (numbers, numbers.abs(), torch.ones(_SHAPE)):
        x = candidate > 0 if dtype == torch.bool else candidate.to(dtype)
        if pending.in_domain(x):
            return x
    return None


def _terms(pending: Pending, n: int, dtype: torch.dtype) -> list[Tensor] | None:
    """Any n terms: no value is said of them."""
    x = _values(pending, dtype)
    if x is None:
        return None
    return [x.roll(coord, 1) if coord % 2 else x.clone() for coord in range(n)]


def _dual_is_a_placement(pending: Pending, n: int, dtype: torch.dtype) -> str | None:  # noqa: ARG001
    dual: object = pending.dual()
    if isinstance(dual, Placement) and not dual.is_partition and not dual.is_pending:
        return None
    return f"dual() is {dual!r}: each term of a reduction needs the whole gradient"


def _combine_undoes_embed(pending: Pending, n: int, dtype: torch.dtype) -> str | None:
    x = _values(pending, dtype)
    if x is None or not pending.can_be_target:
        return None
    before = x.clone()
    terms = [pending.embed(x, n, coord) for coord in range(n)]
    for coord, term in enumerate(terms):
        if broken := _unlike(term, x):
            return f"embed() of coord {coord} made {broken}"
        if term.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
            return f"embed() of coord {coord} is the value itself: a write into one would reach the other"
    value = pending.combine(terms)
    if broken := _unlike(value, x):
        return f"combine() made {broken}"
    if not torch.equal(x, before):
        return "combine() or embed() changed its argument"
    if not _close(value, x, n, pending.tolerance):
        return f"combine(embed(x)) is {value.tolist()}, x is {x.tolist()}"
    return None


def _combines_in_place_alike(pending: Pending, n: int, dtype: torch.dtype) -> str | None:
    if (
        stated_by(type(pending), "combine_in_place") is Pending
        or (terms := _terms(pending, n, dtype)) is None
    ):
        return None
    wanted = pending.combine([term.clone() for term in terms])
    given = pending.combine_in_place([term.clone() for term in terms], [True] * n)
    if not _close(given, wanted, n, pending.tolerance):
        whose = _from(pending, "combine_in_place")
        return f"combine_in_place(){whose} is {given.tolist()}, combine() {wanted.tolist()}"
    return None


def _reduces_as_it_says(pending: Pending, n: int, dtype: torch.dtype) -> str | None:
    if not is_reduction(pending.reduce_op) or (terms := _terms(pending, n, dtype)) is None:
        return None
    wanted = Partial(pending.reduce_op).combine([term.clone() for term in terms])
    given = pending.combine(terms)
    if not _close(given, wanted, n, pending.tolerance):
        return (
            f"its reduce_op names {pending.reduce_op!r}, which makes {wanted.tolist()} of what combine() "
            f"makes {given.tolist()}: derive from sw.Pending, which names no reduction"
        )
    return None


def _ignores_its_identity(pending: Pending, n: int, dtype: torch.dtype) -> str | None:
    x = _values(pending, dtype)
    neutral = None if x is None else pending.identity(x)
    if x is None or neutral is None:
        return None
    if pending.linear:
        ignored = not neutral.any()
    else:
        terms = [x.clone(), *(neutral.clone() for _ in range(n - 1))]
        ignored = _close(pending.combine(terms), x, n, pending.tolerance)
    return None if ignored else f"identity() is {neutral.tolist()}, which combine() does not ignore"


def _is_elementwise(pending: Pending, n: int, dtype: torch.dtype) -> str | None:
    terms = _terms(pending, n, dtype)
    if terms is None:
        return None
    whole = pending.combine([term.clone() for term in terms])[:1, :2]
    part = pending.combine([term[:1, :2].clone() for term in terms])
    if _close(part, whole, n, pending.tolerance):
        return None
    return f"combine() of some elements is {part.tolist()}, of all of them {whole.tolist()} there"


def _is_linear_if_it_says_so(pending: Pending, n: int, dtype: torch.dtype) -> str | None:
    if not pending.linear or (terms := _terms(pending, n, dtype)) is None:
        return None
    other = [term.flip(1) for term in terms]
    both = pending.combine([one - two for one, two in zip(terms, other, strict=True)])
    apart = pending.combine([term.clone() for term in terms]) - pending.combine(other)
    return None if _close(both, apart, n, pending.tolerance) else "it says linear, and combine() is not"


_BESIDE: Sequence[Callable[[Pending, int, torch.dtype], str | None]] = (
    _reduces_as_it_says,
    _combines_in_place_alike,
    _ignores_its_identity,
    _is_elementwise,
    _is_linear_if_it_says_so,
)


def _from(pending: Pending, name: str) -> str:
    """Where a class has a method from, if `combine` is its own."""
    owner, meaning = (stated_by(type(pending), each) for each in (name, "combine"))
    if owner is None or meaning is None or owner not in meaning.__mro__[1:]:
        return ""
    return f", inherited from {owner.__name__} beside a combine() of {meaning.__name__},"


def _unlike(made: object, x: Tensor) -> str | None:
    """What a method made, if it is no tensor like x."""
    if not isinstance(made, Tensor):
        return f"{made!r:.200}, not a tensor"
    if made.shape != x.shape or made.dtype != x.dtype:
        return f"{made.dtype} of shape {tuple(made.shape)} of {x.dtype} of shape {tuple(x.shape)}"
    return None


def _close(value: Tensor, wanted: Tensor, n: int, ulps: int) -> bool:
    """Equal up to rounding of n terms."""
    if value.shape != wanted.shape or value.dtype != wanted.dtype:
        return False
    if not wanted.is_floating_point() and not wanted.is_complex():
        return bool(torch.equal(value, wanted)) or ulps > 0
    unit = min(torch.finfo(wanted.dtype).eps * max(_ULPS + n, ulps), 0.25)
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    return torch.allclose(value.to(wide), wanted.to(wide), rtol=unit, atol=unit, equal_nan=True)
