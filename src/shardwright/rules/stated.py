"""What a rule states is compared with the schemas of its op when it is stated: names, numbers of tensors.

Not whether it is true: that takes values (`shardwright.testing.check_rule`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator

import torch

from shardwright.compat import all_schemas
from shardwright.errors import RuleError
from shardwright.remember import remembered
from shardwright.rules.call import parameters_of
from shardwright.rules.formula import Formula, parse_hom
from shardwright.rules.notation import Ellipsis_, Group, Item, Label, Pattern, parse, parse_pattern

Overload = torch._ops.OpOverload


def overloads_of(key: str) -> tuple[Overload, ...]:
    """The overloads that a key (`ns::name` or `ns::name.overload`) names.

    Raises: RuleError: torch knows no such op, with the names that come closest.
    """
    name, _, overload = key.partition(".")
    namespace, _, plain = name.partition("::")
    try:
        packet = getattr(getattr(torch.ops, namespace), plain)
    except AttributeError:
        raise RuleError(_unknown(name)) from None
    known: list[str] = packet.overloads()
    if overload and overload not in known:
        near = _did_you_mean(overload, known, lambda found: f"{name}.{found}")
        raise RuleError(f"{key}: {name} has the overloads {', '.join(known)}{near}")
    return tuple(getattr(packet, found) for found in ([overload] if overload else known))


def _unknown(name: str) -> str:
    known = {schema.name for schema in all_schemas()}
    namespace = name.partition("::")[0]
    if not any(other.startswith(f"{namespace}::") for other in known):
        spaces = {other.partition("::")[0] for other in known}
        near = _did_you_mean(namespace, spaces, lambda found: f"{found}::")
        return (
            f"{name}: torch knows no op of {namespace!r} yet{near}; import the library that registers it "
            "first, or say later=True: then the rule is looked at when the op is first met"
        )
    return f"{name} is not an op that torch knows{_did_you_mean(name, known, str)}"


def _did_you_mean(name: str, known: Iterable[str], written: Callable[[str], str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.7)
    return f" (did you mean {' or '.join(map(written, near))}?)" if near else ""


def check_formula(key: str, stated: Formula, overloads: tuple[Overload, ...]) -> None:
    """Raise RuleError where a formula speaks of what none of these overloads of an op has."""
    for broken in _broken(stated, overloads):
        schemas = "\n".join(f"  {overload._schema}" for overload in overloads)
        raise RuleError(f"rule for {key}, {stated.text!r}: {broken}\n{schemas}")


@remembered(1024)
def fits_op(key: str, stated: Formula, op: Overload) -> bool:
    """Whether a formula that was stated before its op was known speaks of it; raises RuleError if not."""
    check_formula(key, stated, (op,))
    return True


def _broken(stated: Formula, overloads: tuple[Overload, ...]) -> Iterator[str]:
    tensors, arguments = _names(overloads, tensors=True), _names(overloads, tensors=False)
    for what, names, known in (
        ("hom", [arg for text in stated.hom for hom in parse_hom(text) for arg in hom.args], tensors),
        ("ints", [arg for arg, _ in stated.ints], arguments),
        ("shapes", [arg for arg, _ in stated.shapes], arguments),
        ("strides", stated.strides, arguments),
        ("depends", [arg for _, args in stated.depends for arg in args], arguments | tensors),
        ("[...: ]", sorted(_arguments(stated)), arguments),
    ):
        for name in names:
            if name not in known:
                kind = "tensor argument" if known is tensors else "argument"
                near = _did_you_mean(name, known, str)
                yield f"{what} speaks of {name!r}, but the op has no {kind} of that name{near}"
    yield from _unknown_labels(stated)
    yield from _made_of_nothing(stated)
    if not any(_counts_fit(stated, overload) for overload in overloads):
        yield _counts(stated)


def _names(overloads: tuple[Overload, ...], *, tensors: bool) -> set[str]:
    every = (parameter for overload in overloads for parameter in parameters_of(overload))
    return {parameter.name for parameter in every if parameter.is_tensor is tensors}


def _arguments(stated: Formula) -> set[str]:
    """The schema arguments that the notation names in `...[arg: labels]`."""
    items = (item for pattern in _patterns(stated) for item in pattern.items)
    return {subst.arg for item in items if isinstance(item, Ellipsis_) for subst in item.substs}


def _patterns(stated: Formula) -> list[Pattern]:
    notation = parse(stated.text)
    shapes = [parse_pattern(text) for _, text in stated.shapes if not text.startswith("@")]
    return [*notation.operands, *notation.results, *shapes]


def _unknown_labels(stated: Formula) -> Iterator[str]:
    known = {name for pattern in _patterns(stated) for item in pattern.items for name in _labels(item)}
    for what, names in (
        ("ints", [label for _, label in stated.ints]),
        ("prefix", [label for label in stated.prefix if label != "*"]),
        ("even", stated.even),
        ("held", stated.held),
    ):
        for name in names:
            if name not in known:
                near = _did_you_mean(name, known, str)
                yield f"{what} speaks of the label {name!r}, which is on no tensor{near}"


def _made_of_nothing(stated: Formula) -> Iterator[str]:
    """Labels that only a result has: what a rank should make of its part of them, nobody tells it."""
    notation = parse(stated.text)
    sizes = [parse_pattern(text) for _, text in stated.shapes if not text.startswith("@")]
    told = {
        name for pattern in (*notation.operands, *sizes) for item in pattern.items for name in _labels(item)
    }
    told |= {"_", *(label for _, label in stated.ints)}
    for pattern in notation.results:
        for name in (name for item in pattern.items for name in _labels(item)):
            if name not in told:
                near = _did_you_mean(name, told, str)
                yield f"the label {name!r} is on a result alone{near}; _ stands for a dim that is whole"


def _labels(item: Item) -> Iterator[str]:
    if isinstance(item, Label):
        yield item.name
    elif isinstance(item, Group):
        yield from (part.name for part in item.parts if isinstance(part, Label))
    elif isinstance(item, Ellipsis_):
        yield from (label.name for subst in item.substs for label in subst.labels)


# ------------------------------------------------------------------------------------------- numbers


def _counts_fit(stated: Formula, overload: Overload) -> bool:
    notation = parse(stated.text)
    tensors = [
        parameter for parameter in parameters_of(overload) if parameter.is_tensor and not parameter.out
    ]
    returns = [str(result.type) for result in overload._schema.returns]
    results = ["Tensor" in text for text in returns]
    needed = [parameter.required or parameter.default is not None for parameter in tensors]
    fits = any(parameter.is_list for parameter in tensors) or _fits(notation.operands, needed)
    return fits and (any("List[" in text for text in returns) or _fits(notation.results, results))


def _fits(patterns: tuple[Pattern, ...], needed: list[bool]) -> bool:
    """Whether patterns serve so many tensors; those at the end that are not needed may go without."""
    least = max((at + 1 for at, need in enumerate(needed) if need), default=0)
    if patterns and patterns[-1].star:
        return len(patterns) - 1 <= len(needed)
    return least <= len(patterns) <= len(needed)


def _counts(stated: Formula) -> str:
    notation = parse(stated.text)
    return (
        f"it describes {len(notation.operands)} operands and {len(notation.results)} results, "
        "which is not what the op takes and returns"
    )
