"""Which stage holds which part of a model: read off the names at which it is cut."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from shardwright.errors import ParallelError, refuse_other_kind

VERB = "parallelize_pipeline"
Stages = Mapping[str, int | Sequence[int]]


@dataclass(frozen=True)
class Place:
    """Where a part stands: `parent` has it under `name`; `stages` hold it, all of them where nothing is held.

    A part is a module that holds no cut and is no list or dict of modules, or a parameter of a module that
    holds parts. `key` is the first path of the same module: one module may stand in several places.
    """

    parent: nn.Module
    name: str
    path: str
    key: str
    stages: tuple[int, ...]
    is_parameter: bool = False

    def part(self) -> nn.Module:
        """The module that stands here."""
        part = self.parent._modules[self.name]
        if part is None:
            raise KeyError(self.path)
        return part


@dataclass
class Places:
    """All places of a model, in the order in which its modules are registered."""

    stages: int
    parts: list[Place] = field(default_factory=list)
    above: list[nn.Module] = field(default_factory=list)  # modules that hold parts, the model first

    def of_modules(self) -> Iterator[Place]:
        """Places of modules that hold something."""
        return (p for p in self.parts if not p.is_parameter)


def read_places(model: nn.Module, cuts: Sequence[str], given: Stages) -> Places:
    """Find the stage of every part: each cut begins one, and what is registered after it belongs to it.

    Parts without parameters and persistent buffers (activations, rotary tables) belong to all stages.

    Args: given: `{path: stage or stages}` where the order of registration is not that of computation; of two
        paths to one part the longer counts.
    Raises: ParallelError: no such module, cuts out of order or named twice, a stage without parameters.
    """
    _check_names(model, cuts)
    reader = _Reader(model, cuts)
    reader.read(model, "")
    if reader.met != list(cuts):
        raise ParallelError(
            f"{VERB}: the cuts {list(cuts)} are out of order: the modules of {type(model).__name__} stand in "
            f"the order {reader.met}\n  fix: name the first module of each stage, from input to output"
        )
    places = Places(len(cuts) + 1, _moved(reader.found, given, len(cuts) + 1), reader.above)
    _check_filled(places)
    return places


def _check_names(model: nn.Module, cuts: Sequence[str]) -> None:
    listed = not isinstance(cuts, str) and isinstance(cuts, Sequence)
    if not listed or not all(isinstance(cut, str) for cut in cuts):
        raise ParallelError(f"{VERB}: cuts={cuts!r:.60}; give a list of names of modules")
    known = {name for name, _ in model.named_modules(remove_duplicate=False) if name}
    for cut in cuts:
        if cut not in known:
            near = difflib.get_close_matches(cut, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ParallelError(f"{VERB}: {type(model).__name__} has no module {cut!r}{hint}")
    twice = [cut for cut in cuts if list(cuts).count(cut) > 1]
    if twice:
        raise ParallelError(f"{VERB}: {twice[0]!r} is named twice; each cut begins one stage")


class _Reader:
    """Walks the modules in the order of their registration, down to those that hold no cut."""

    def __init__(self, model: nn.Module, cuts: Sequence[str]) -> None:
        self.cuts = set(cuts)
        self.inside = {".".join(cut.split(".")[:i]) for cut in cuts for i in range(cut.count(".") + 1)} | {""}
        self.keys: dict[int, str] = {}
        for name, module in model.named_modules():
            self.keys[id(module)] = name
        self.met: list[str] = []
        self.found: list[Place] = []
        self.above: list[nn.Module] = []

    def read(self, module: nn.Module, path: str) -> None:
        self.above.append(module)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                full = _join(path, name)
                self.found.append(Place(module, name, full, full, (len(self.met),), is_parameter=True))
        for name, child in module._modules.items():
            if child is None:
                continue
            full = _join(path, name)
            if full in self.cuts:
                self.met.append(full)
            if full in self.inside or _is_container(child):
                self.read(child, full)
            elif _holds(child):
                self.found.append(Place(module, name, full, self.keys[id(child)], (len(self.met),)))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_container(module: nn.Module) -> bool:
    """Is it one whose members the code around it takes out and calls?"""
    return isinstance(module, nn.Sequential) or type(module).forward is nn.Module.forward


def _holds(module: nn.Module) -> bool:
    """Has it parameters, or buffers that a checkpoint keeps?"""
    if any(True for _ in module.parameters()):
        return True
    return any(set(m._buffers) - m._non_persistent_buffers_set for m in module.modules())


def _moved(found: list[Place], given: Stages, count: int) -> list[Place]:
    """The places with the stages that the caller gave; the name of a list or dict gives all in it."""
    fix = "stages={name of a module or parameter: number of its stage}"
    refuse_other_kind(f"{VERB}: stages", given, Mapping, ParallelError, fix=fix)
    naming = {place.path: [path for path in _paths_to(place.path) if path in given] for place in found}
    used = {path for paths in naming.values() for path in paths}
    for path in given:
        if path not in used:
            near = difflib.get_close_matches(str(path), naming, n=3)
            raise ParallelError(
                f"{VERB}: stages names {path!r}, which is no part that a stage holds as a whole\n"
                f"  near it: {', '.join(near) or ', '.join(sorted(naming)[:6])}"
            )
    return [
        replace(place, stages=_numbers(nearest[-1], given[nearest[-1]], count))
        if (nearest := naming[place.path])
        else place
        for place in found
    ]


def _paths_to(path: str) -> list[str]:
    """What holds it, the outermost first, and itself."""
    names = path.split(".")
    return [".".join(names[: i + 1]) for i in range(len(names))]


def _numbers(path: str, given: int | Sequence[int], count: int) -> tuple[int, ...]:
    numbers = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not numbers or any(type(n) is not int or not -count <= n < count for n in numbers):
        raise ParallelError(f"{VERB}: stages[{path!r}] = {given!r}, and there are stages 0 to {count - 1}")
    return tuple(sorted({n % count for n in numbers}))


def _check_filled(places: Places) -> None:
    """Every stage needs a parameter: without one it has no part in norms and checkpoints."""
    filled = {s for p in places.parts if p.is_parameter for s in p.stages}
    for place in places.of_modules():
        if any(True for _ in place.part().parameters()):
            filled |= set(place.stages)
    empty = sorted(set(range(places.stages)) - filled)
    if empty:
        raise ParallelError(
            f"{VERB}: stage {empty[0]} of {places.stages} would hold no parameter\n"
            "  fix: cut before another module, or say with stages={path: stage} what it holds"
        )
