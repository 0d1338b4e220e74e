"""The three families of placements: `Partition`, `Pending`, `Replicate`.

A placement says, for one mesh axis of size n, how a logical tensor becomes n local tensors and back. It is
not a layout (one axis only, no mesh) and not an operation (it moves nothing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import isfunction
from typing import Any, ClassVar

from torch import Tensor
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import Replicate as TorchReplicate

from shardwright.compat import DisableTorchFunction, function_modes_on, modes_on, without_modes
from shardwright.errors import PlacementError
from shardwright.index.assemble import derived_cut_dims, join_regions, laid_like, take_region
from shardwright.index.compose import compose_regions
from shardwright.index.region import Region, Shape
from shardwright.index.runs import Runs

# The indices that each coord holds of a 1-d tensor, in local order.
HeldBy = Callable[[int], Runs]

# What a class says about indices. A class of somebody else's may use torch to find them: see `undisturbed`.
_ABOUT_INDICES = (
    *("region", "runs", "local_length", "local_shape", "cut_dims", "touched_dims", "even", "validate"),
    *("resolved", "on_dim", "on_dims", "moved", "flat_group", "within", "names"),
)

_MAKING_TENSORS = ("split", "join", "embed", "combine", "combine_in_place")


@contextmanager
def undisturbed() -> Iterator[None]:
    """A block in which torch makes plain tensors on the CPU, whatever modes and default device are on.

    A placement is asked for indices in the middle of an op: while tensors are fake, under `torch.device`.
    """
    with without_modes(), DisableTorchFunction():
        yield


def _undisturbed(method: Any) -> Any:
    """The method, run in a block of `undisturbed` where anything is on."""
    if isinstance(method, classmethod):
        return classmethod(_undisturbed(method.__func__))
    if not isfunction(method):
        return method

    @wraps(method)
    def asked(*args: Any, **kwargs: Any) -> Any:
        if not modes_on() and not function_modes_on():
            return method(*args, **kwargs)
        with undisturbed():
            found = method(*args, **kwargs)
            return list(found) if isinstance(found, Iterator) else found  # a generator runs in here

    return asked


def _laid(method: Any) -> Any:
    """A method that makes a tensor of another, or of several, run so that it lies in memory as they do."""

    @wraps(method)
    def laid(self: Any, *args: Any, **kwargs: Any) -> Any:
        made, given = method(self, *args, **kwargs), next(iter((*args, *kwargs.values())))
        like = given if isinstance(given, Tensor) else given[0]
        return laid_like(made, like) if isinstance(made, Tensor) else made

    return laid if isfunction(method) else method


# The library's own classes.
OWN_CLASSES: set[type] = set()


_HOME = __name__.rpartition(".")[0]


def is_shipped_class(cls: type) -> bool:
    """Is it a placement of the library's own, whose laws the tests check?"""
    return cls.__module__.startswith(f"{_HOME}.")


def stated_by(cls: type, name: str) -> type | None:
    """The class from which `cls` has an attribute."""
    return next((base for base in cls.__mro__ if name in vars(base)), None)


class Placement(TorchPlacement):
    """Base of all placements; torch accepts them as its own. Subclass `Partition` or `Pending` instead.

    Frozen: an attribute is set once, in `__init__` (a frozen dataclass is the short way). Equality, hash,
    repr and pickling come from the attributes; `__init__` need not call the base.
    """

    is_partition: ClassVar[bool] = False
    is_pending: ClassVar[bool] = False
    is_replicated: ClassVar[bool] = False
    # Whether the sizes of the dims play no part in which dims it cuts and in whether it has a meaning: then
    # what is decided for one shape holds for every shape with as many dims. A class that does not say so is
    # asked anew for each shape.
    any_size: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let methods of somebody else's class run `undisturbed`, and what they make be `_laid`."""
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("shardwright."):
            OWN_CLASSES.add(cls)
            return
        for name in (*_ABOUT_INDICES, *_MAKING_TENSORS):
            owner = stated_by(cls, name)
            if owner is cls or (owner is not None and not issubclass(owner, Placement)):  # or a mixin's
                setattr(cls, name, (_laid if name in _MAKING_TENSORS else _undisturbed)(vars(owner)[name]))

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG004 - arguments belong to __init__
        """Make the C++ part, also for a dataclass, copy and pickle, which skip our __init__."""
        self = super().__new__(cls)
        TorchPlacement.__init__(self)
        return self

    def dual(self) -> Placement:
        """The placement of the gradient of a value that has this placement."""
        raise PlacementError(f"{self!r}: subclass Partition or Pending, which know it")

    def local_shape(self, shape: Shape, n: int, coord: int) -> Shape:  # noqa: ARG002 - same for every coord here
        """Shape of the local tensor of `coord`; `shape` is the tensor left by earlier axes."""
        return shape

    def validate(self, shape: Shape, n: int) -> None:
        """Raise PlacementError if this placement has no meaning for such a tensor on an axis of size n.

        Asked of the whole tensor, also where axes before leave less of it (`region` is asked of what they
        leave): an own class that fits only what they leave is refused.
        """

    def resolved(self, ndim: int) -> Placement:  # noqa: ARG002 - nothing to resolve without a dim
        """The same placement with negative dims counted from the front."""
        return self

    def text(self) -> str:
        """How the text of a layout names this placement."""
        return repr(self)

    def _called(self) -> str:
        """Class and arguments, as a call that parses back."""
        return f"{type(self).__name__}({', '.join(map(written, self._state().values()))})"

    def _state(self) -> dict[str, Any]:
        """The attributes, those in slots first."""
        slots = (name for cls in type(self).__mro__ for name in cls.__dict__.get("__slots__", ()))
        return {**{name: getattr(self, name) for name in slots if hasattr(self, name)}, **self.__dict__}

    def _restore(self, state: dict[str, Any]) -> None:
        """Set the attributes of a placement that was made without its `__init__`."""
        for name, value in state.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._state():
            raise AttributeError(f"{type(self).__name__}.{name}: placements are frozen")
        super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return type(self) is type(other) and self._state() == other._state()

    def __hash__(self) -> int:
        return hash((type(self).__qualname__, *self._state().values()))

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={value!r}" for name, value in self._state().items())
        return f"{type(self).__name__}({inside})"

    def __str__(self) -> str:
        return self.text()

    def __copy__(self) -> Placement:
        return self

    def __deepcopy__(self, memo: object) -> Placement:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self._state())

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """An expression that makes this placement again, for torch's code generation, and its names."""
        kind, state = self.__reduce__()[1]
        return f"_rebuild({kind.__name__}, {state!r})", {"_rebuild": _rebuild, kind.__name__: kind}


def written(value: Any) -> str:
    """An argument of a placement as the text of a layout names it; it parses back."""
    if isinstance(value, Placement):
        return value.text()
    if isinstance(value, tuple):
        inside = ", ".join(map(written, value))
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    return repr(value)


def check_source(name: str, source: object) -> None:
    """Raise PlacementError unless what a placement is made of is a partition."""
    if not isinstance(source, Partition):
        raise PlacementError(f"{name}: {source!r} is not a partition: it does not say which coord holds what")


def check_counts(name: str, least: int, **counts: object) -> None:
    """Raise PlacementError unless these arguments are integers, none below `least`."""
    for argument, value in counts.items():
        if not isinstance(value, int) or value < least:
            raise PlacementError(f"{name}: {argument} must be an integer >= {least}, got {value!r}")


def _rebuild(cls: type[Placement], state: dict[str, Any]) -> Placement:
    """Make a placement again from its attributes, without its `__init__`.

    Raises: PlacementError: `cls` is no placement; a file may name any class.
    """
    if not issubclass(cls, Placement):
        raise PlacementError(f"{cls.__name__} is not a placement")
    placement: Placement = cls.__new__(cls)
    placement._restore(state)
    return placement


class Partition(Placement):
    """Each logical element lives on exactly one coord. A subclass states `region`; the rest is derived.

    Laws: the regions of all coords cover the tensor, are disjoint, and `join(split(x)) == x` bit for bit, for
    every shape. `shardwright.testing.check_placement` checks them.
    """

    is_partition = True
    # Whether one coord holds all of any tensor, whatever its shape.
    undivided: ClassVar[bool] = False

    def region(self, shape: Shape, n: int, coord: int) -> Region:  # noqa: ARG002 - for subclasses
        """What `coord` of `n` holds of a tensor of this shape (the tensor left by earlier axes)."""
        raise PlacementError(f"{type(self).__name__} does not say what a coord holds: define region()")

    def within(self, region: Region, n: int, coord: int) -> Region:
        """What `coord` holds when the tensor is itself the local tensor of `region`: in region's indices."""
        return compose_regions(region, self.region(region.local_shape, n, coord))

    def local_shape(self, shape: Shape, n: int, coord: int) -> Shape:
        """Shape of the local tensor of `coord`; as many dims as `shape`."""
        return self.region(shape, n, coord).local_shape

    def cut_dims(self, shape: Shape, n: int) -> tuple[int, ...]:
        """The dims that this partition cuts.

        On all others every coord that holds anything holds every index, in order, so that the local tensor
        may be used along them as if it were the logical one.
        """
        return derived_cut_dims(self, shape, n)

    def resolved(self, ndim: int) -> Partition:  # noqa: ARG002 - nothing to resolve without a dim
        """The same partition with negative dims counted from the front."""
        return self

    def touched_dims(self, shape: Shape, n: int) -> tuple[int, ...]:  # noqa: ARG002 - all, whatever the axis
        """The dims whose local size may differ from the logical one.

        Two partitions that touch no common dim may be applied in either order. A class that does not say
        which dims it cuts is taken to touch all.
        """
        return tuple(range(len(shape)))

    def flat_group(self) -> tuple[int, ...]:
        """The dims that this partition flattens into one; a later `Shard` of one cuts the flat dim."""
        return ()

    def on_dim(self, dim: int) -> Partition | None:  # noqa: ARG002 - for classes that have a dim
        """The same split along another dim; None where that has no meaning."""
        return None

    def on_dims(self, dims: dict[int, int]) -> Partition:  # noqa: ARG002 - for classes that have dims
        """The same split with its dims renumbered (`old: new`; dims not named stay)."""
        return self

    @classmethod
    def names(cls, held: HeldBy, length: int, n: int) -> Iterable[Partition]:  # noqa: ARG003 - for subclasses
        """Guesses at the instance of this class that cuts a 1-d tensor so that coord i holds `held(i)`.

        The placement of a view's result is the first right guess: the library's own classes are asked, then
        the class that cuts the source. A guess is compared on every coord before it is used, so it need not
        be right; where none is, the result's placement is derived from the source's.
        """
        return ()

    def even(self, shape: Shape, n: int) -> bool:
        """Whether all coords hold a local tensor of the same shape."""
        first = self.local_shape(shape, n, 0)
        return all(self.local_shape(shape, n, coord) == first for coord in range(1, n))

    def split(self, x: Tensor, n: int, coord: int) -> Tensor:
        """The local tensor of `coord`: a view of `x` where the region is one box. Differentiable."""
        return take_region(x, self.region(tuple(x.shape), n, coord))

    def join(self, locals: Sequence[Tensor], shape: Shape) -> Tensor:  # noqa: A002 - the word of the laws
        """The tensor of this shape whose splits over `len(locals)` coords are `locals`. Differentiable."""
        n = len(locals)
        return join_regions(locals, [self.region(shape, n, coord) for coord in range(n)], shape)

    def dual(self) -> Partition:
        """Itself: the gradient of a part is that part of the gradient."""
        return self


class Pending(Placement):
    """The logical value is an elementwise reduction of what the coords hold. A subclass states both ways.

    Law: `combine([embed(x, n, c) for c in range(n)]) == x` for values of its domain, within `tolerance`.
    """

    is_pending = True
    reduce_op: str = ""
    can_be_target: ClassVar[bool] = True

    def combine(self, locals: Sequence[Tensor]) -> Tensor:  # noqa: A002, ARG002 - the word of the laws
        """The logical value; `locals` holds one tensor per coord, in order."""
        raise PlacementError(f"{type(self).__name__} does not say how to reduce: define combine()")

    def combine_in_place(
        self,
        locals: Sequence[Tensor],  # noqa: A002 - the word of the laws
        free: Sequence[bool],  # noqa: ARG002 - a class may do better
    ) -> Tensor:
        """As `combine`; the locals that are `free` may be overwritten, and one may be the result."""
        return self.combine(locals)

    def embed(self, x: Tensor, n: int, coord: int) -> Tensor:  # noqa: ARG002 - for subclasses
        """The cheapest local tensor of `coord` that makes the locals combine to `x`. A new tensor."""
        raise PlacementError(f"{type(self).__name__} does not say how to make locals: define embed()")

    def identity(self, x: Tensor) -> Tensor | None:  # noqa: ARG002 - classes without one say None
        """Like `x`, filled with the value that `combine` ignores; None where there is none."""
        return None

    def in_domain(self, x: Tensor) -> bool:  # noqa: ARG002 - no limit unless a class has one
        """Whether the law holds for this value (dtypes, signs); without an own one, for every value."""
        return True

    @property
    def linear(self) -> bool:
        """Whether `combine` is linear: a linear op then acts on the locals as on the value."""
        return False

    @property
    def tolerance(self) -> int:
        """How many units in the last place `combine(embed(x))` may be away from `x`; 0 is bit for bit."""
        return 0

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Torch's question: pending, with this reduction if one is named."""
        return reduce_op is None or reduce_op == self.reduce_op

    def dual(self) -> Placement:
        """Replicate: each term of a sum has the sum's gradient; others are reduced before a backward."""
        return Replicate()


class Replicate(TorchReplicate, Placement):
    """Every coord holds the whole tensor."""

    is_replicated = True
    any_size = True

    def __init__(self) -> None:
        TorchReplicate.__init__(self)

    def dual(self) -> Placement:
        """Replicate, or Partial("sum") where the gradient is still to be summed: whichever it already is."""
        return self

    def __eq__(self, other: object) -> bool:
        """Equal to any `Replicate`, torch's included."""
        return isinstance(other, TorchReplicate)

    __hash__ = TorchReplicate.__hash__
    __repr__ = TorchReplicate.__repr__
    __str__ = TorchReplicate.__str__

    def text(self) -> str:
        """How the text of a layout names this placement."""
        return "Replicate()"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()
