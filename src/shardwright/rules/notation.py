"""The label notation of rules: `"m k, k n -> m n"`, parsed once into frozen patterns.

    rule     := operand (',' operand)* '->' [result (',' result)*]
    operand  := ['*'] ['~'] item*            '*': this pattern serves all remaining operands
              | '-'                          always whole on every rank
              | '()'                         a tensor without dims
    item     := label ['!'] ['?'] | '_' | INT | '(' part+ ')' | '...' ['[' subst (';' subst)* ']']
    part     := label ['!'] | INT            outer to inner; an INT is an uncut factor
    subst    := ARG ':' (label ['!'] | '_')* the dims that schema argument ARG names; nothing: dropped

A label may be cut, in every operand and result that shows it alike. `!` must be whole; `_` is whole and
matches nothing else; `?` may be missing or of size 1 (broadcast). `...` stands for broadcastable dims
aligned at the right. `~` marks an operand of which only the metadata is read; `~` alone: not even its
shape matters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.errors import RuleError
from shardwright.remember import remembered

_TOKEN = re.compile(r"\s*(\.\.\.|[A-Za-z][A-Za-z0-9]*|\d+|[()\[\]:;!?_])")


@dataclass(frozen=True, slots=True)
class Label:
    """A named size: `!` sets `whole`, `?` sets `optional`. The name `_` matches nothing else."""

    name: str
    whole: bool = False
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Fixed:
    """An integer: a dim of that size, or a factor of a group, that is never cut."""

    size: int


@dataclass(frozen=True, slots=True)
class Group:
    """One dim made of several factors, outer to inner."""

    parts: tuple[Label | Fixed, ...]


@dataclass(frozen=True, slots=True)
class Subst:
    """`ARG: labels` inside `...[ ]`: the dims named by ARG get these labels, or are dropped."""

    arg: str
    labels: tuple[Label, ...]


@dataclass(frozen=True, slots=True)
class Ellipsis_:  # noqa: N801  the builtin owns the plain name
    """`...`, with what replaces the dims that schema arguments name."""

    substs: tuple[Subst, ...] = ()


Item = Label | Fixed | Group | Ellipsis_


@dataclass(frozen=True, slots=True)
class Pattern:
    """The dims of one operand or result.

    Args:
        items: the dims in order.
        star: the pattern serves all remaining operands (or results).
        metadata: only shape and dtype are read, so a pending value need not be reduced.
        replicate: `-`: always whole on every rank.
        anything: `~` alone: any placement will do.
    """

    items: tuple[Item, ...] = ()
    star: bool = False
    metadata: bool = False
    replicate: bool = False
    anything: bool = False


@dataclass(frozen=True, slots=True)
class Notation:
    """A parsed rule: one pattern per operand and per result."""

    text: str
    operands: tuple[Pattern, ...]
    results: tuple[Pattern, ...]


@remembered(8192)
def parse(text: str) -> Notation:
    """The patterns of a rule's text. Raises: RuleError: the text is not in the notation."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f"rule {text!r}: expected 'operands -> results'")
    operands = tuple(_pattern(part, text) for part in left.split(","))
    results = tuple(_pattern(part, text) for part in right.split(",")) if right.strip() else ()
    _check_stars(operands, text)
    _check_stars(results, text)
    return Notation(text, operands, results)


@remembered(2048)
def parse_pattern(text: str) -> Pattern:
    """The pattern of one operand."""
    return _pattern(text, text)


def _check_stars(patterns: tuple[Pattern, ...], text: str) -> None:
    if any(pattern.star for pattern in patterns[:-1]):
        raise RuleError(f"rule {text!r}: '*' serves all remaining tensors, so it must be the last one")


def _pattern(part: str, text: str) -> Pattern:
    body = part.strip()
    star = body.startswith("*")
    body = body.removeprefix("*").strip()
    metadata = body.startswith("~")
    body = body.removeprefix("~").strip()
    if body == "-":
        return Pattern(star=star, replicate=True)
    if metadata and not body:
        return Pattern(star=star, metadata=True, anything=True)
    if not body:
        raise RuleError(f"rule {text!r}: an operand is empty; write '()' for a tensor without dims")
    items = () if body == "()" else tuple(_items(_Tokens(body, text)))
    if sum(isinstance(item, Ellipsis_) for item in items) > 1:
        raise RuleError(f"rule {text!r}: an operand has more than one '...'")
    return Pattern(items, star=star, metadata=metadata)


class _Tokens:
    """The tokens of one operand, with one token of look-ahead."""

    def __init__(self, body: str, text: str) -> None:
        self.text = text
        self._tokens = list(self._split(body))
        self._at = 0

    def _split(self, body: str) -> Iterator[str]:
        at = 0
        while body[at:].strip():
            match = _TOKEN.match(body, at)
            if match is None:
                raise RuleError(f"rule {self.text!r}: cannot read {body[at:].strip()!r}")
            yield match.group(1)
            at = match.end()

    def peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def take(self, wanted: str | None = None) -> str:
        token = self.peek()
        if not token or (wanted is not None and token != wanted):
            found = repr(token) if token else "the end of the operand"
            raise RuleError(f"rule {self.text!r}: expected {wanted or 'a dim'!r}, found {found}")
        self._at += 1
        return token

    def accept(self, token: str) -> bool:
        if self.peek() != token:
            return False
        self._at += 1
        return True


def _items(tokens: _Tokens) -> Iterator[Item]:
    while tokens.peek():
        if tokens.accept("..."):
            yield Ellipsis_(_substs(tokens))
        elif tokens.accept("("):
            yield Group(tuple(_group(tokens)))
        else:
            yield _dim(tokens, optional=True)


def _group(tokens: _Tokens) -> Iterator[Label | Fixed]:
    while not tokens.accept(")"):
        part = _dim(tokens, optional=False)
        if isinstance(part, Label) and part.name == "_":
            raise RuleError(f"rule {tokens.text!r}: a factor needs a name or a size, '_' has neither")
        yield part


def _dim(tokens: _Tokens, *, optional: bool) -> Label | Fixed:
    token = tokens.take()
    if token.isdigit():
        return Fixed(int(token))
    if token == "_":
        return Label("_", whole=True)
    if not token[0].isalpha():
        raise RuleError(f"rule {tokens.text!r}: expected a label, found {token!r}")
    whole = tokens.accept("!")
    missing = optional and tokens.accept("?")
    return Label(token, whole or tokens.accept("!"), missing)


def _substs(tokens: _Tokens) -> tuple[Subst, ...]:
    if not tokens.accept("["):
        return ()
    found = [_subst(tokens)]
    while tokens.accept(";"):
        found.append(_subst(tokens))
    tokens.take("]")
    return tuple(found)


def _subst(tokens: _Tokens) -> Subst:
    # ARG is an identifier of the schema: it may hold underscores, which the tokens split.
    arg = tokens.take()
    while tokens.peek() not in (":", ""):
        arg += tokens.take()
    tokens.take(":")
    labels: list[Label] = []
    while tokens.peek() not in (";", "]", ""):
        label = _dim(tokens, optional=False)
        if isinstance(label, Fixed):
            raise RuleError(f"rule {tokens.text!r}: '...[{arg}: ]' takes labels, found {label.size}")
        labels.append(label)
    return Subst(arg, tuple(labels))
