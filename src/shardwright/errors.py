"""One family of errors. Each class says its cause; the message says what, where, why, and what to do."""

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any


class ShardwrightError(Exception):
    """Base of everything that Shardwright raises on purpose."""


class PlacementError(ShardwrightError, ValueError):
    """A placement has no meaning for this tensor or this axis."""


class LayoutError(ShardwrightError, ValueError, RuntimeError):
    """Mesh, placements, order and shape do not fit together: where torch raises the one or the other."""


class MeshError(ShardwrightError, ValueError):
    """A mesh, a degree or an axis name cannot be what was asked for."""


class ParallelError(ShardwrightError, ValueError, RuntimeError):
    """A strategy cannot be applied to this module: where torch raises the one or the other."""


class ConfigError(ShardwrightError, ValueError):
    """A setting that a person gave cannot be used."""


class CheckpointError(ShardwrightError, ValueError):
    """A checkpoint cannot be written, found or read."""


class PlanError(ShardwrightError, RuntimeError):
    """No redistribution leads from one layout to the other."""


class RuleError(ShardwrightError, RuntimeError):
    """An op has no meaning on these layouts."""


class ImplicitRedistributionError(RuleError):
    """An op would communicate implicitly where only explicit communication is allowed."""


class SpmdError(ShardwrightError, RuntimeError):
    """A program that must be the same on all ranks is not."""


class OutsideError(ShardwrightError, IndexError, RuntimeError):
    """An index is none of its dim's: where torch raises the one or the other, by op."""


class EraseError(ShardwrightError, RuntimeError):
    """What is asked of an erased function's result is not in its recording."""


def words_of(error: BaseException) -> str:
    """The class and the text of an error, whoever wrote it: of one that cannot be printed the class alone.

    Of what the system refuses it is what the system says, and of which file.
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  what tells of an error must not fail for it
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def printable(text: str) -> str:
    """A text of which a terminal shows all: what would control it stands as Python writes it."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def reason_of(error: BaseException) -> str:
    """The text of an error whose file is named beside it: of what the system refuses, why."""
    return getattr(error, "strerror", None) or str(error)


def refuse_other_kind(name: str, value: Any, kinds: Any, error: type[ShardwrightError], *, fix: str) -> None:
    """Raise `error` unless what a caller gave is of one of these kinds.

    Args: fix: what to give, in words that follow "fix: ".
    """
    if not isinstance(value, kinds):
        each = kinds if isinstance(kinds, tuple) else (kinds,)
        words = " or ".join("None" if kind is type(None) else kind.__name__ for kind in each)
        raise error(f"{name}={value!r:.60} is no {words}\n  fix: {fix}")


def as_several(
    name: str, value: Any, error: type[ShardwrightError], *, fix: str, ordered: bool = True
) -> tuple[Any, ...]:
    """What a caller gave where several values are due; raise `error` for one text, and what has no members.

    Args:
        fix: what to give, in words that follow "fix: ".
        ordered: their order counts. That of a set may be another one on each rank.
    """
    for kind, words in _NO_SEQUENCES[: None if ordered else 1]:
        if isinstance(value, kind):
            raise error(f"{name}={value!r:.60} is {words}, where a sequence is due\n  fix: {fix}")
    try:
        return tuple(value)
    except TypeError:
        raise error(f"{name}={value!r:.60} is no sequence\n  fix: {fix}") from None


_NO_SEQUENCES: Any = ((str, "one text"), (Mapping, "a mapping"), (set | frozenset, "a set, without an order"))


def refuse_no_number(
    name: str, value: Any, error: type[ShardwrightError], *, whole: bool = False, fix: str = "give one"
) -> None:
    """Raise `error` unless what a caller gave is a finite number above 0; True is none."""
    kinds: Any = Integral if whole else Real
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
        raise error(f"{name}={value!r:.60} is no {'whole ' if whole else ''}number above 0; {fix}")
