"""What a plan of words says of each parameter: the nearest pattern wins, and the first among equals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from shardwright.errors import ParallelError
from shardwright.parallel.names import matches
from shardwright.parallel.tensor.words import Along, Word, word
from shardwright.tensor.modules.wrappers import stands_for


@dataclass(frozen=True, slots=True)
class Said:
    """A parameter, under one of its names, and the word for it.

    Args:
        path: of the module that owns it; "" for the whole.
        home: of the module in the model's own tree, which may have been wrapped.
        leaf: its name there.
        pattern: that names it.
    """

    path: str
    home: str
    leaf: str
    owner: nn.Module
    parameter: nn.Parameter
    word: Word
    pattern: str

    @property
    def name(self) -> str:
        """The qualified name of the parameter."""
        return f"{self.path}.{self.leaf}" if self.path else self.leaf


@dataclass(frozen=True, slots=True)
class Spoken:
    """All that a plan says.

    Args:
        parameters: those that a word reaches, each name of a tied one.
        modules: the modules that a pattern names, by path, and the word.
        idle: patterns of matrices that are cut which reach no parameter.
        strict: it is a plan of the user's, every word of which must have an effect.
    """

    parameters: tuple[Said, ...]
    modules: Mapping[str, Word]
    idle: tuple[str, ...]
    strict: bool


def spoken(module: nn.Module, plan: Mapping[str, str], *, strict: bool) -> Spoken:
    """Read a plan of words beside the module.

    Args: strict: every pattern must name something, and every word that cuts must reach a parameter.
    Raises: ParallelError: an unknown word; with `strict`, a pattern without effect.
    """
    words = {pattern: _checked(pattern, name) for pattern, name in plan.items()}
    owners = list(module.named_modules(remove_duplicate=False))
    parameters = tuple(_parameters(owners, words))
    modules = {path: words[found] for path, _ in owners if (found := _pattern(path, words)) is not None}
    reached = {said.pattern for said in parameters}
    named = reached | {found for path, _ in owners if (found := _pattern(path, words)) is not None}
    idle = tuple(p for p in words if p in named - reached and words[p].along is not Along.NONE)
    if strict:
        _refuse_unknown(module, words, [p for p in words if p not in named])
        _refuse_idle(module, idle)
    return Spoken(parameters, modules, idle, strict)


def _checked(pattern: str, name: str) -> Word:
    try:
        return word(name)
    except ParallelError as error:
        raise ParallelError(f"parallelize_tensor: the plan says of {pattern!r}: {error}") from None


def _parameters(owners: list[tuple[str, nn.Module]], words: Mapping[str, Word]) -> Iterator[Said]:
    for path, owner in owners:
        home = stands_for(path)
        of_owner = _pattern(path, words) or _pattern(home, words)
        for leaf, parameter in owner._parameters.items():
            if parameter is None:
                continue
            own = _pattern(f"{path}.{leaf}" if path else leaf, words)
            pattern = of_owner if own is None else own
            if pattern is not None:
                yield Said(path, home, leaf, owner, parameter, words[pattern], pattern)


def _pattern(path: str, words: Mapping[str, Word]) -> str | None:
    return next((pattern for pattern in words if matches(path, pattern)), None)


def _refuse_unknown(module: nn.Module, words: Mapping[str, Word], patterns: list[str]) -> None:
    if not patterns:
        return
    first = patterns[0]
    for path, owner in module.named_modules(remove_duplicate=False):
        leaves = (f"{path}.{leaf}".removeprefix(".") for leaf in owner._parameters)
        if (name := next((name for name in (path, *leaves) if matches(name, first)), None)) is not None:
            raise ParallelError(
                f"parallelize_tensor: all that {first!r} names is named by a pattern before it, as {name} "
                f"is by {_pattern(name, words)!r}, and the first one counts\n  fix: put {first!r} before it"
            )
    some = ", ".join(name for name, _ in list(module.named_children())[:6])
    raise ParallelError(
        f"parallelize_tensor: no module or parameter is named {first!r}; a star stands for one "
        f"name; {type(module).__name__} has {some}"
    )


def _refuse_idle(module: nn.Module, patterns: tuple[str, ...]) -> None:
    if patterns:
        named = module.named_modules(remove_duplicate=False)
        path, found = next((path, m) for path, m in named if matches(path, patterns[0]))
        inside = ", ".join(name for name, _ in list(found.named_children())[:6]) or "nothing"
        raise ParallelError(
            f"parallelize_tensor: {patterns[0]!r} names {path or 'the module'}, a {type(found).__name__} "
            f"without parameters of its own; name what it holds: {inside}"
        )
