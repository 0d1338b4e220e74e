"""`check_placement`: the laws of a placement on generated shapes and meshes, with a counterexample.

For those who add a placement: one call in a test, or a subclass of `PlacementLaws`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import ClassVar, TypeVar

import torch

from shardwright.errors import PlacementError, words_of
from shardwright.index.region import Shape
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import MeshShape
from shardwright.placement.base import Partition, Pending, Placement
from shardwright.placement.convert import as_placement
from shardwright.placement.first_use import named
from shardwright.placement.partition_laws import PARTITION_HOOKS, PARTITION_LAWS, resolved_means_the_same
from shardwright.placement.shard import Shard
from shardwright.testing.hook_laws import PENDING_HOOKS
from shardwright.testing.meshes import sizes_of
from shardwright.testing.placement_laws import PENDING_LAWS, is_a_value, samples

AXIS_SIZES = (1, 2, 3, 5)
_LARGEST_AXIS = 32
_FEW = 24  # elements of the shapes that are cut over two axes
_SMALL = 20  # elements times coords where the statements beside the meaning are tried
_SIZES_1D = (0, 1, 2, 3, 4, 5, 7, 8, 12, 13, 24)
_SIZES_2D = (0, 1, 2, 3, 5, 8)
_SIZES_3D = (0, 1, 2, 3)


P = TypeVar("P", bound=Placement)


class BrokenLawError(PlacementError):
    """A placement breaks a law; the message is the smallest counterexample that was found."""


def shapes() -> Iterator[Shape]:
    """Shapes of up to 3 dims with sizes 0, 1, primes, smaller and larger than an axis; small ones first."""
    found: list[Shape] = [()]
    for ndim, sizes in enumerate((_SIZES_1D, _SIZES_2D, _SIZES_3D), 1):
        found += product(sizes, repeat=ndim)
    return iter(sorted(found, key=lambda shape: (prod(shape) > 0, prod(shape), len(shape), shape)))


def check_placement(placement: Placement, *, axis_sizes: Sequence[int] | None = None) -> None:
    """Check every law of a placement on all small shapes and axis sizes that it accepts.

    Partition: the regions cover, are disjoint, lie inside, fill the local shape; split and join; alone and
    before and after a `Shard` on another axis; every other method that the class defines says what follows
    from its regions (`shardwright.testing.hook_laws.HOOKS` lists them). Pending: combine(embed(x)) == x,
    elementwise; the other methods likewise. All: a frozen value that pickles.
    Args: axis_sizes: default 1, 2, 3, 5, or else those up to 32 that the placement accepts. Shapes and sizes
        that `validate` refuses are skipped, and so are numbers of dims for which every `region` raises.
    Raises: BrokenLawError: with the smallest counterexample, or when no shape and axis is accepted.
        PlacementError: no placement. MeshError: no sizes of axes.
    """
    sizes = AXIS_SIZES if axis_sizes is None else axis_sizes
    sizes = sizes_of("axis_sizes", sizes) if sizes != () else ()
    given = placement if issubclass(type(placement), Placement) else as_placement(placement)
    _check_value(given)
    checked = as_placement(given)
    cases = _accepted(checked, sizes)
    if not cases and axis_sizes is None:
        cases = _accepted(checked, range(1, _LARGEST_AXIS + 1))
    if not cases:
        raise BrokenLawError(f"{named(checked)} refuses every shape on axes of sizes {sizes}")
    for shape, n in cases:
        _check_alone(checked, shape, n)
    if isinstance(checked, Partition):
        _check_composed(checked, cases)


def _check_value(placement: Placement) -> None:
    try:
        broken = is_a_value(placement)
    except Exception as error:
        raise BrokenLawError(f"{named(placement)} (as a value): {words_of(error)}") from error
    _report(placement, "as a value", broken)


def _cases(axis_sizes: Sequence[int]) -> Iterator[tuple[Shape, int]]:
    cases = [(shape, n) for shape in shapes() for n in sorted(set(axis_sizes))]
    return iter(sorted(cases, key=lambda case: prod(case[0]) * case[1]))


def _accepts(placement: Placement, shape: Shape, n: int) -> bool:
    try:
        placement.resolved(len(shape)).validate(shape, n)
    except PlacementError:
        return False
    except Exception as error:
        broken = f"it raised {words_of(error)}; what it refuses, it refuses with a PlacementError"
        raise BrokenLawError(_message(placement, "validate", broken, shape, n)) from error
    return True


def _accepted(placement: Placement, axis_sizes: Sequence[int]) -> list[tuple[Shape, int]]:
    """The cases that the placement does not refuse.

    Without the numbers of dims for which every shape raises: a placement of matrices is for matrices.
    """
    cases = [case for case in _cases(axis_sizes) if _accepts(placement, *case)]
    if not isinstance(placement, Partition):
        return cases
    known: set[int] = set()
    for shape, n in cases:
        if len(shape) not in known and _has_region(placement, shape, n):
            known.add(len(shape))
    return [case for case in cases if len(case[0]) in known]


def _has_region(placement: Partition, shape: Shape, n: int) -> bool:
    try:
        _resolved(placement, shape).region(shape, n, 0)
    except Exception:  # noqa: BLE001 - a user's method: whatever it raises, it has no region here
        return False
    return True


def _resolved(placement: P, shape: Shape) -> P:
    resolved: P = placement.resolved(len(shape))  # type: ignore[assignment]
    return resolved


def _check_alone(placement: Placement, shape: Shape, n: int) -> None:
    resolved = placement.resolved(len(shape))
    if isinstance(resolved, Partition):
        hooks = PARTITION_HOOKS if prod(shape) * n <= _SMALL else ()
        if hooks:
            _apply(resolved_means_the_same, placement, shape, n)
        for partition_law in (*PARTITION_LAWS, *hooks):
            _apply(partition_law, resolved, shape, n)
    elif isinstance(resolved, Pending) and resolved.can_be_target:
        if not any(True for _ in samples(resolved, shape)):
            _report(resolved, "in_domain", "none of the float, integer, bool and complex samples is in it")
        for pending_law in (*PENDING_LAWS, *PENDING_HOOKS):
            _apply(pending_law, resolved, shape, n)


def _apply(law: Callable[[P, Shape, int], str | None], placement: P, shape: Shape, n: int) -> None:
    """Run one law; an exception of the placement is a counterexample too."""
    try:
        broken = law(placement, shape, n)
    except Exception as error:
        raise BrokenLawError(
            _message(placement, law.__name__, f"it raised {words_of(error)}", shape, n)
        ) from error
    if broken:
        raise BrokenLawError(_message(placement, law.__name__, broken, shape, n))


def _message(placement: Placement, law: str, broken: str, shape: Shape, n: int) -> str:
    what = law.replace("_", " ")
    return f"{named(placement)} breaks the law '{what}' for shape {shape} on an axis of size {n}:\n{broken}"


def _report(placement: Placement, law: str, broken: str | None) -> None:
    if broken:
        raise BrokenLawError(f"{named(placement)} ({law}): {broken}")


def _check_composed(placement: Partition, cases: Sequence[tuple[Shape, int]]) -> None:
    """Before and after a `Shard` of each dim on another axis: shapes, regions and join of the layout."""
    for shape, n in cases:
        if n == 1 or not 0 < len(shape) < 3 or prod(shape) > _FEW:
            continue
        for dim, order in product(range(len(shape)), (("p", "s"), ("s", "p"))):
            mesh = MeshShape(("p", "s"), (n, 2))
            layout = Layout(mesh, [placement, Shard(dim)], shape, dtype=torch.int64, order=order)
            _apply(_layout_law(layout), placement, shape, n)


def _layout_law(layout: Layout) -> Callable[[Placement, Shape, int], str | None]:
    def after_another_axis_too(placement: Placement, shape: Shape, n: int) -> str | None:  # noqa: ARG001
        return layout_law(layout)

    return after_another_axis_too


def layout_law(layout: Layout) -> str | None:
    """What a layout of partitions must fulfil on every rank; None, or what is broken."""
    x = torch.arange(layout.numel).reshape(layout.shape)
    parts = [layout.split(x, layout.coords_of(rank)) for rank in layout.ranks]
    for rank, part in zip(layout.ranks, parts, strict=True):
        coords = layout.coords_of(rank)
        region = layout.region(coords)
        boxes = [x[box.slices].reshape(-1) for box in region.boxes]
        held = torch.cat(boxes).tolist() if boxes else []
        if part.reshape(-1).tolist() != held:
            return f"{layout}: the region of coords {coords} holds {held}, split gives {part.tolist()}"
        if not tuple(part.shape) == layout.local_shape(coords) == region.local_shape:
            return f"{layout}: coords {coords} have {tuple(part.shape)}, not {layout.local_shape(coords)}"
    joined = layout.join(parts)
    return None if torch.equal(joined, x) else f"{layout}: join(split(x)) is {joined.tolist()}"


class PlacementLaws:
    """The same as a pytest class: subclass it as `Test...` and name the placements.

    ```python
    class TestMyPlacement(PlacementLaws):
        placements = (MyPlacement(3), MyPlacement(5))
    ```
    """

    placements: ClassVar[tuple[Placement, ...]] = ()
    axis_sizes: ClassVar[tuple[int, ...] | None] = None

    def test_placements_are_named(self) -> None:
        """There is something to check."""
        if not self.placements:
            raise BrokenLawError(f"{type(self).__name__} names no placements")

    def test_every_law_holds(self) -> None:
        """Each placement fulfils every law."""
        for placement in self.placements:
            check_placement(placement, axis_sizes=self.axis_sizes)
