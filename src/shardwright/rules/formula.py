"""A rule for one call: the notation and the algebraic facts beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from shardwright.errors import RuleError
from shardwright.remember import remembered
from shardwright.rules.monoid import KEPT, pending_of

Pairs = tuple[tuple[str, str], ...]
# A local form: `(op, held, *args, **kwargs)` with what the coord holds of the labels that it asks for.
LocalForm = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Hom:
    """`args: source->target`: the op turns pending values of `args` jointly into a pending result.

    The operands that are not named must be finished and whole. `*` as source keeps any named reduction,
    `each` any at all.
    """

    args: tuple[str, ...]
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Formula:
    """One equation `map(op, in(x)) == out(op(x))` in label notation, with its facts.

    Args:
        text: the notation; see `shardwright.rules.notation`.
        reduce: how a result is reduced over a label that it lacks: one name, or one per result.
        hom: facts such as `"self+other: sum->sum"`.
        ints: schema arguments that are the size of a label: their local value is the local size.
        shapes: schema arguments that are a shape, with its labels (`@0`: those of result 0).
        strides: schema arguments that are the strides of result 0.
        depends: for a result, by index, the arguments on which alone it depends.
        elementwise: any partition of the elements will do, not only one along a label.
        prefix: labels whose sizes may disagree between operands; they are then whole.
        even: labels that may only be cut in parts of equal size.
        local: what a rank calls in place of the op when one of the labels `held` is cut: a function of the
            op, of what the rank holds of them ({label: Held}), and of the op's local arguments.
        held: the labels whose local index is not the logical one for the op: positions matter along them.
    """

    text: str
    reduce: str | tuple[str | None, ...] | None = None
    hom: tuple[str, ...] = ()
    ints: Pairs = ()
    shapes: Pairs = ()
    strides: tuple[str, ...] = ()
    depends: tuple[tuple[int, tuple[str, ...]], ...] = ()
    elementwise: bool = False
    prefix: tuple[str, ...] = ()
    even: tuple[str, ...] = ()
    local: LocalForm | None = None
    held: tuple[str, ...] = ()

    def reduce_of(self, result: int) -> str | None:
        """The reduction of one result over the labels that it lacks; None: it cannot lack any."""
        if isinstance(self.reduce, tuple):
            return self.reduce[result] if result < len(self.reduce) else None
        return self.reduce

    def __str__(self) -> str:
        facts = [f"reduce={self.reduce}"] if self.reduce else []
        facts += [f"hom {fact}" for fact in self.hom]
        return "; ".join([self.text, *facts])


class Facts(TypedDict, total=False):
    """The facts of a `Formula` as they are written: mappings, and one text where several may stand."""

    reduce: str | tuple[str | None, ...] | None
    hom: str | Iterable[str]
    ints: Mapping[str, str]
    shapes: Mapping[str, str]
    strides: tuple[str, ...]
    depends: Mapping[int, tuple[str, ...]]
    elementwise: bool
    prefix: tuple[str, ...]
    even: tuple[str, ...]
    local: LocalForm | None
    held: tuple[str, ...]


def formula(text: str, **facts: Unpack[Facts]) -> Formula:
    """A `Formula` of facts as they are written.

    Raises: RuleError: the text is none, a fact has an unknown name, or is of another type than its own.
    """
    if not isinstance(text, str):
        raise RuleError(f"rule {text!r:.200}: expected the text of an equation, such as 'm k, k n -> m n'")
    for name in facts.keys() - Facts.__annotations__.keys():
        raise RuleError(
            f"rule {text!r}: no fact is called {name!r}; facts are {', '.join(Facts.__annotations__)}"
        )
    try:
        return _formula(text, {**facts})
    except (TypeError, AttributeError, ValueError) as error:
        raise RuleError(f"rule {text!r}: its facts {facts} are not written as facts are: {error}") from error


_LISTED = frozenset({"hom", "strides", "prefix", "even", "held"})  # one text stands for one


def _formula(text: str, written: dict[str, Any]) -> Formula:
    reduce = written.get("reduce")
    for name in _LISTED & written.keys():
        given = written[name]
        written[name] = (given,) if isinstance(given, str) else tuple(given)
    for fact in written.get("hom", ()):
        parse_hom(fact)
    for name in reduce if isinstance(reduce, tuple) else (reduce,):
        if name is not None:
            pending_of(name)
    if not isinstance(written.get("elementwise", False), bool):
        raise TypeError("elementwise is True or False")
    if not (written.get("local") is None or callable(written["local"])):
        raise TypeError("local is a function")
    pairs = {name: tuple((written.get(name) or {}).items()) for name in ("ints", "shapes", "depends")}
    return Formula(text, **(written | pairs))


@remembered(4096)
def parse_hom(text: str) -> tuple[Hom, ...]:
    """`"self+other: sum->sum, max->max"` as one `Hom` per map. `"self: sum"` means `sum->sum`.

    What keeps sums keeps averages too (both are the linear combinations), so each `sum->sum`
    brings an `avg->avg`. Raises: RuleError: the text is not a fact.
    """
    names, colon, maps = text.partition(":")
    if not colon or not names.strip() or not maps.strip():
        raise RuleError(f"hom {text!r}: expected 'arg + arg: sum->sum'")
    args = tuple(name.strip() for name in names.split("+"))
    found: list[Hom] = []
    for part in maps.split(","):
        source, _, target = (piece.strip() for piece in part.partition("->"))
        found.append(Hom(args, source, target or source))
        for name in {found[-1].source, found[-1].target} - KEPT:
            pending_of(name)
    linear = [Hom(hom.args, "avg", "avg") for hom in found if (hom.source, hom.target) == ("sum", "sum")]
    return tuple(dict.fromkeys(found + linear))
