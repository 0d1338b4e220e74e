"""What a forward has left on another rank: there is something, and nobody here knows what."""

from __future__ import annotations

from typing import Any, NoReturn

from shardwright.errors import ParallelError

# fmt: off
_USES = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod",
    "rmod", "pow", "rpow", "matmul", "rmatmul", "neg", "pos", "abs", "eq", "ne", "lt", "le", "gt", "ge",
    "bool", "int", "float", "complex", "index", "len", "iter", "next", "getitem", "setitem", "contains",
    "call", "format", "str", "and", "or", "xor", "invert", "round", "enter",
)
# fmt: on


class Unknown:
    """Raises a ParallelError, whatever is done with it."""

    def __init__(self, name: str, part: str | None) -> None:
        self.__dict__["_told"] = (
            f"{name} is set by the forward of {part}, which another rank holds, and is read on this one, "
            f"where {part} does not run\n  fix: return it from {part}"
            if part is not None
            else f"{name} is set by the model's own code behind a border, and is read on a rank whose stages "
            "end before\n  fix: set it where the forward begins, or in the training loop on every rank"
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # it may be copied
            raise AttributeError(name)
        raise ParallelError(self.__dict__["_told"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """A function of torch was given it."""
        found = next((x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Unknown)), None)
        raise ParallelError(
            found.__dict__["_told"] if found is not None else "an unknown attribute of a layer"
        )

    def __repr__(self) -> str:
        """Its name: an error message may show it."""
        return "<set by a layer on another rank>"


def _used(self: Unknown, *_: Any) -> NoReturn:
    raise ParallelError(self.__dict__["_told"])


for _name in _USES:
    setattr(Unknown, f"__{_name}__", _used)
Unknown.__hash__ = object.__hash__  # type: ignore[method-assign]  # `__eq__` above took it away
