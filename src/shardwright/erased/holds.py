"""Does what the program reached still stand as it stood when it was recorded? Compiled into one function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from keyword import iskeyword
from typing import Any

import torch

from shardwright.erased.facts import FLOAT, Fact, answers_itself, content, each_of, item_of, length_of
from shardwright.erased.given import of_tensor
from shardwright.erased.held_by_c import is_alive, remembers
from shardwright.erased.program import compiled
from shardwright.erased.walk import SCALARS
from shardwright.tensor.dtensor import DTensor

# The last but one of `==` of tensors, the last of proxies whose things are gone.
_GONE = (KeyError, IndexError, AttributeError, ValueError, RuntimeError, ReferenceError)
_COMPARED = frozenset({"length", "keys", "members", "content"})  # as a whole: by identity, else by `==`
_READ = {
    "item": "item_of({holder}, {key})",
    "cell": "{holder}.cell_contents",
    "attribute": "getattr({holder}, {key})",
    "length": "length_of({holder})",
    "keys": "[*each_of({holder})]",
    "members": "({holder}.__bases__, *vars({holder}).values())",
    "context": "{holder}.get({key})",
    "content": "content({holder})",
    "answers": "remembers({holder}, {key})",
    "alive": "is_alive({holder})",
    "unset": "(not hasattr({holder}, {key}))",
    "absent": "({key} not in {holder})",
    FLOAT: "{holder}[{key}]",
}
# The same in a fraction of the time, where C answers.
_QUICK = {"item": "{holder}[{key}]", "length": "len({holder})", "keys": "[*{holder}]"}
_FUNCTIONS = {each.__name__: each for each in (content, remembers, is_alive, item_of, length_of, each_of)}
_FUNCTION = "def read(holder, key): return "
_AGAIN = {
    kind: compiled(_FUNCTION + text.format(holder="holder", key="key"), {**_FUNCTIONS}, "read")
    for kind, text in _READ.items()
}


def guard_of(
    facts: Sequence[Fact], tensors: Iterable[torch.Tensor], gradients: Mapping[int, Any]
) -> Callable[[], bool]:
    """A function that says whether all facts hold, and the tensors lie as they did.

    Asked in the order of the walk, each before what it leads to: a replaced module is noticed before its
    parameters are looked up.
    """
    names = dict[str, Any](same=same, gone=_GONE, of_tensor=of_tensor, gradient=gradient_of)
    names |= _FUNCTIONS
    lines = ["def holds():", " try:", "  pass", *(f"  {_asked(fact, names)}" for fact in facts)]
    for place, x in enumerate(tensors):
        names[f"t{place}"] = x
        lines += _of_tensor(place, x, names)
        if id(x) in gradients and may_have_gradient(x):
            kind = names[f"g{place}"] = gradients[id(x)]
            found = f"t{place}.grad" if kind is None else f"gradient(t{place})"
            lines.append(f"  if {found} {'is not' if kind is None else '!='} g{place}: return False")
    lines.append(" except gone: return False\n return True")
    made: Callable[[], bool] = compiled("\n".join(lines), names, "holds")
    return made


def _word(names: dict[str, Any], value: Any, *literals: type) -> str:
    """What stands for a value in the text: itself where it is a literal, which is read in half the time."""
    if value is None or type(value) in literals:
        return repr(value)
    names[name := f"v{id(value)}"] = value
    return name


def _asked(fact: Fact, names: dict[str, Any]) -> str:
    """A line that ends the search where the fact holds no more."""
    holder, value = _word(names, fact.holder), _word(names, fact.value, bool)
    read = _form_of(fact).format(holder=holder, key=_word(names, fact.key, str, int, bool))
    if fact.kind == "attribute" and fact.key.isidentifier() and not iskeyword(fact.key):
        read = f"{holder}.{fact.key}"  # half the time of getattr
    if fact.kind in _COMPARED:
        return f"if {read} != {value}: return False"
    if fact.kind == FLOAT:
        return f"if type({read}) is not float: return False"
    if isinstance(fact.value, SCALARS) and not isinstance(fact.value, bool | None):
        return f"if (v := {read}) is not {value} and not same(v, {value}): return False"
    return f"if {read} is not {value}: return False"


def _form_of(fact: Fact) -> str:
    own = answers_itself(fact.holder) or hasattr(type(fact.holder), "__missing__")
    return _READ[fact.kind] if own else _QUICK.get(fact.kind, _READ[fact.kind])


def _of_tensor(place: int, x: torch.Tensor, names: dict[str, Any]) -> list[str]:
    """It is where it was: what an identity does not say of a tensor that may be given other data."""
    asked = [f"t{place}.requires_grad is not {x.requires_grad}"]
    if isinstance(x, DTensor):
        names |= {f"l{place}": x._local_tensor, f"s{place}": x._spec.plain.token}
        asked += [f"t{place}._local_tensor is not l{place}", f"t{place}._spec.plain.token is not s{place}"]
    else:
        names[f"s{place}"] = of_tensor(x)
        asked.append(f"of_tensor(t{place}) != s{place}")
    return [f"  if {' or '.join(asked)}: return False"]


def may_have_gradient(x: torch.Tensor) -> bool:
    """A parameter that was frozen keeps the gradient that it had, and steps go on to read and clear it."""
    return x.is_leaf and (x.requires_grad or isinstance(x, torch.nn.Parameter))


def gradient_of(x: torch.Tensor) -> Any:
    """What a recording holds for of the gradient that a parameter has when the call begins."""
    gradient = x.grad if x.is_leaf else None
    return None if gradient is None else of_tensor(gradient)


def same(one: Any, other: Any) -> bool:
    """The same value of the same type; -0.0 is not 0.0, and nan is nan."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float | complex):
        return repr(one) == repr(other)
    return bool(one == other)


def changed(facts: Iterable[Fact]) -> list[str]:
    """Which facts hold no more, in words."""
    found = []
    for fact in facts:
        try:
            now = _read(fact)
            if _differs(fact, now):
                found.append(f"{fact.path}: {_in_words(fact, now)}")
        except _GONE:
            found.append(f"{fact.path} is gone")
    return found


def has_changed(fact: Fact) -> bool:
    """Does it hold no more?"""
    return bool(changed([fact]))


def _differs(fact: Fact, now: Any) -> bool:
    if fact.kind == FLOAT:
        return type(now) is not float
    if fact.kind in _COMPARED:
        return bool(now != fact.value)
    return now is not fact.value and not (isinstance(now, SCALARS) and same(now, fact.value))


def _read(fact: Fact) -> Any:
    return _AGAIN[fact.kind](fact.holder, fact.key)


def _in_words(fact: Fact, now: Any) -> str:
    """What it was, and is: of the keys of a dict how many."""
    if fact.kind != "keys":
        return f"{_short(fact.value)} -> {_short(now)}"
    before, after = len(fact.value), len(now)
    return f"{before} -> {after}" if before != after else "other keys, or in another order"


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, SCALARS) else f"<{type(value).__name__}>"
