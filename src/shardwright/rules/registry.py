"""The rules that exist, by op. Open: a rule may be added at any time (the one mutable module state)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash

from shardwright.compat import decompositions, is_composite
from shardwright.errors import RuleError
from shardwright.remember import forget, memo, remembered
from shardwright.rules.call import Call, parameters_of
from shardwright.rules.formula import Formula

Maker = Callable[[Call], "Formula | str | None"]
Rewrite = Callable[..., Any]
OpName = str | torch._ops.OpOverload | torch._ops.OpOverloadPacket
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of the registry: the op's name, and what makes the formula for a call.

    any_size: the formula depends on the arguments and on how many dims there are, not on their sizes.
    """

    op: str
    make: Maker
    text: str
    any_size: bool = False

    def formula(self, call: Call) -> Formula | None:
        """The equation for this call, or None where the rule says nothing of it.

        Raises: RuleError: its function returned something else.
        """
        made = self.make(call)
        if made is None or isinstance(made, Formula):
            return made
        if isinstance(made, str):
            return Formula(made)
        raise RuleError(
            f"rule {self}: its function returned {made!r:.200} for {call.op}; it returns a formula "
            "(formula(...), or its text), or None where it says nothing of the call"
        )

    def __str__(self) -> str:
        return f"{self.op}: {self.text}"


class Registry:
    """Rules and rewrites by op name: `ns::name` serves all overloads, `ns::name.overload` one of them."""

    def __init__(self) -> None:
        self._rules: dict[str, list[Rule]] = defaultdict(list)
        self._rewrites: dict[str, Rewrite] = {}
        self._algorithms: dict[str, list[Any]] = defaultdict(list)
        self.generation = 0
        self._asked = False
        self._found: dict[torch._ops.OpOverload, tuple[Rule, ...]] = memo("rules of ops", {})
        # The catalog is checked by a test, over all releases of torch that are served, not at each import.
        self.open = False
        self.is_changed = False  # since the package was imported: decisions hold for this process only

    def changed(self) -> None:
        """What was decided before is not valid any more."""
        self.generation += 1
        self.is_changed = self.open
        if self._asked:  # else nothing was decided by what stands here, as while the package is imported
            self._asked = False
            forget()

    def add(self, rule: Rule) -> None:
        """Add a rule; it takes effect at once: what was decided without it is forgotten."""
        self._rules[rule.op].append(rule)
        self.changed()

    def remove(self, rule: Rule) -> None:
        """Take a rule out again. Raises: RuleError: it is not there."""
        if rule not in self._rules[rule.op]:
            raise RuleError(f"{rule} is not registered")
        self._rules[rule.op].remove(rule)
        self.changed()

    def add_rewrite(self, op: str, rewrite: Rewrite) -> None:
        """Have calls of `op` replaced by what `rewrite` does, before anything is sharded."""
        self._rewrites[op] = rewrite
        self.changed()

    def add_algorithm(self, algorithm: Any) -> None:
        """Add an `Algorithm`; it takes effect at once."""
        self._algorithms[algorithm.op].append(algorithm)
        self.changed()

    def remove_algorithm(self, algorithm: Any) -> None:
        """Take an algorithm out again. Raises: RuleError: it is not there."""
        if algorithm not in self._algorithms[algorithm.op]:
            raise RuleError(f"{algorithm} is not registered")
        self._algorithms[algorithm.op].remove(algorithm)
        self.changed()

    def algorithms_of(self, op: torch._ops.OpOverload) -> tuple[Any, ...]:
        """The algorithms that serve an overload, found like its rules."""
        self._asked = True
        for names in spellings(op):
            found = tuple(entry for name in names for entry in self._algorithms.get(name, ()))
            if found:
                return found
        return ()

    def rules_of(self, op: torch._ops.OpOverload) -> tuple[Rule, ...]:
        """The rules that serve an overload: its own, its name's, else those of the op it derives from."""
        known = self._found.get(op)
        if known is None:
            self._asked = True
            by_names = (
                tuple(r for name in names for r in self._rules.get(name, ())) for names in spellings(op)
            )
            known = self._found[op] = next(filter(None, by_names), ())
        return known

    def rewrite_of(self, op: torch._ops.OpOverload) -> Rewrite | None:
        """The rewriting of an overload, or None. In-place and out= forms have none of their own."""
        self._asked = True
        exact, packet = spellings(op)[0]
        return self._rewrites[exact] if exact in self._rewrites else self._rewrites.get(packet)

    def formulas(self, call: Call) -> Iterator[Formula]:
        """The equations that rules state for this call."""
        for rule in self.rules_of(call.op):
            made = rule.formula(call)
            if made is not None:
                yield made

    def __iter__(self) -> Iterator[Rule]:
        for rules in list(self._rules.values()):
            yield from rules


registry = Registry()


@remembered(1)
def sources() -> str:
    """Which state of this package decides: its files by name, size and time of change."""
    root = Path(__file__).parent.parent
    files = ((path.relative_to(root), path.stat()) for path in sorted(root.rglob("*.py")))
    return xxhash.xxh3_64_hexdigest(
        str([(str(name), s.st_size, s.st_mtime_ns) for name, s in files]).encode()
    )


def compare_with_schemas() -> None:
    """From now on what is registered is compared with the schemas of its ops."""
    registry.open = True


# In-place forms that change the shape or strides of the tensor object: no result of another op is like them.
_RESHAPED_IN_PLACE = frozenset(
    {
        "as_strided_",
        "detach_",
        "resize_",
        "resize_as_",
        "set_",
        "squeeze_",
        "swapaxes_",
        "swapdims_",
        "t_",
        "transpose_",
        "unsqueeze_",
    }
)


@remembered(8192)
def spellings(op: torch._ops.OpOverload) -> tuple[tuple[str, str], ...]:
    """Names under which rules for `op` may stand, nearest first, as (overload, all overloads) pairs.

    `add_.Tensor`: itself, then `add`; `_foreach_add_.List`: then `add`; `view_copy`: then `view`.
    """
    namespace, _, name = op._schema.name.partition("::")
    overload = op._schema.overload_name or "default"
    names = [name, *_bases(name)]
    return tuple((f"{namespace}::{base}.{overload}", f"{namespace}::{base}") for base in names)


def _bases(name: str) -> Iterator[str]:
    plain = name
    if name in _RESHAPED_IN_PLACE:
        return
    if plain.startswith("_foreach_"):
        plain = plain.removeprefix("_foreach_")
        yield plain
    if plain.startswith("__i") and plain.endswith("__"):
        plain = f"__{plain[3:]}"
        yield plain
    elif plain.endswith("_") and not plain.endswith("__"):
        plain = plain[:-1]
        yield plain
    if plain.endswith("_copy"):
        yield plain.removesuffix("_copy")


def op_key(op: OpName) -> str:
    """The name under which rules for `op` are kept. Raises: RuleError: not an op or a qualified name."""
    if isinstance(op, torch._ops.OpOverload):
        return f"{op._schema.name}.{op._schema.overload_name or 'default'}"
    if isinstance(op, torch._ops.OpOverloadPacket):
        return str(op._qualified_op_name)
    if "::" not in str(op):
        raise RuleError(f"{op!r} names no op; write 'ns::name', 'ns::name.overload', or pass the op itself")
    return op


def rewrite(*ops: str) -> Callable[[_F], _F]:
    """Register the function as the rewriting of these ops; it is called with the op's own arguments.

    It must be written in torch ops: each of them is dispatched again.
    """

    def register(function: _F) -> _F:
        for op in ops:
            registry.add_rewrite(op, function)
        return function

    return register


rewrite_of, rules_of = registry.rewrite_of, registry.rules_of


# Their decompositions make index tensors of their own, which would stand plain beside distributed ones.
_MAKE_INDICES = (
    "_upsample",
    "col2im",
    "grid_sampler",
    "im2col",
    "max_unpool",
    "reflection_pad",
    "replication_pad",
    "upsample",
)


@remembered(4096)
def fallback_decomposition(op: torch._ops.OpOverload) -> Rewrite | None:
    """What an op without a rule does in terms of simpler ops, from torch's own tables; None: nothing known.

    In-place and out= forms are left out: their decompositions write into tensors behind a wrapper's back. So
    are random ops, and those whose decompositions make tensors of their own.
    """
    if any(parameter.mutated for parameter in parameters_of(op)):
        return None
    name = op._schema.name.partition("::")[2]
    if torch.Tag.nondeterministic_seeded in op.tags or name.startswith(_MAKE_INDICES):
        return None
    found = decompositions().get(op)
    if found is not None:
        return found
    if is_composite(op):
        return op.decompose
    return None
