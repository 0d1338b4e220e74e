"""An op's own binding to Python: a function of torch that parses its arguments in half the time.

`torch.ops.aten.add.Tensor` looks the arguments of any op up in a schema; `torch.add` was generated for this
one. Which overload such a function calls depends on what it is given, so it is tried: on tensors without data
it must call exactly what the overload calls, once, with the very arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, NamedTuple

import torch

from shardwright.compat import TorchDispatchMode, nn_functions, tree_leaves, tree_map_only
from shardwright.remember import memo
from shardwright.rules.call import Kwargs, Op

_known: dict[tuple[Any, ...], Callable[..., Any] | None] = memo("bindings of ops", {})
_MANY = 4096


def binding_of(func: Op, args: Sequence[Any], kwargs: Kwargs) -> Callable[..., Any] | None:
    """A function that does with local arguments of these classes what the overload does; None: there is none.

    It must not be called where modes of torch change functions: they would see calls that nobody made.
    """
    key = (func, *map(_kind, args), *((name, _kind(value)) for name, value in kwargs.items()))
    if key not in _known:
        if len(_known) >= _MANY:
            _known.clear()
        _known[key] = _found(func, args, kwargs)
    return _known[key]


def _kind(value: Any) -> Any:
    """By what an overload is chosen: the classes of values and of members of lists."""
    if isinstance(value, list | tuple):
        return type(value), len(value), *sorted({type(each).__name__ for each in value})
    if isinstance(value, torch.Tensor):
        return type(value), value.dim() == 0  # one element may stand for a number
    return type(value)


def _found(func: Op, args: Sequence[Any], kwargs: Kwargs) -> Callable[..., Any] | None:
    if not all(
        type(x) is torch.Tensor
        for x in tree_leaves((list(args), dict(kwargs)))
        if isinstance(x, torch.Tensor)
    ):
        return None
    empty_args, empty_kwargs = tree_map_only(torch.Tensor, without_data, (list(args), dict(kwargs)))
    wanted = _asked(func, empty_args, empty_kwargs)
    if wanted is None:
        return None
    for candidate in _candidates(func):
        asked = _asked(candidate, empty_args, empty_kwargs)
        if asked is not None and _same(asked, wanted):
            return candidate
    return None


def _candidates(func: Op) -> Iterator[Callable[..., Any]]:
    """Functions of torch in C that have the op's name."""
    namespace, _, name = func._schema.name.partition("::")
    for home in (torch, torch.Tensor.__base__, nn_functions) if namespace == "aten" else ():
        found = getattr(home, name, None)
        if isinstance(found, BuiltinFunctionType | MethodDescriptorType):
            yield found


def without_data(x: torch.Tensor) -> torch.Tensor:
    """A tensor of the same sizes, strides and dtype that has no memory."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


class Heard(NamedTuple):
    """One op that was called, and what it gave."""

    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    returned: Any


_Asked = tuple[list[Heard], type]


class Listening(TorchDispatchMode):
    """Notes each op; none at all where there are more than `most`: what they gave is kept until the end."""

    def __init__(self, most: int = 16) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.asked: list[Heard] = []
        self.too_many = False
        self._most = most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        if len(self.asked) == self._most:
            self.asked.clear()
            self.too_many = True
        if not self.too_many:
            self.asked.append(Heard(func, args, kwargs or {}, returned))
        return returned


def _asked(call: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> _Asked | None:
    """The ops that a call consists of, and what it returns; None where it fails on tensors without data."""
    try:
        with Listening() as listening:
            returned = type(call(*args, **kwargs))
    except Exception:  # noqa: BLE001 - whatever it is: the overload is called then
        return None
    return listening.asked, tuple if returned is list else returned  # whose members are counted either way


def _same(mine: _Asked, theirs: _Asked) -> bool:
    """One op, the same, with the very tensors and equal values; a tuple of names is not a tuple."""
    (one, returned), (other, wanted) = mine, theirs
    if len(one) != 1 or len(other) != 1 or one[0].op is not other[0].op or returned is not wanted:
        return False
    given, asked = (tree_leaves((list(calls[0].args), calls[0].kwargs)) for calls in (one, other))
    return (
        len(given) == len(asked)
        and all(map(_equal, given, asked))
        and one[0].kwargs.keys() == other[0].kwargs.keys()
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    return type(one) is type(other) and bool(one == other)
