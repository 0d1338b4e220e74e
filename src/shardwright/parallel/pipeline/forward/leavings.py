"""What a forward leaves in modules beside its result, where other ranks cannot know it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

from shardwright.parallel.pipeline.forward.borders import Told
from shardwright.parallel.pipeline.forward.conductor import Elsewhere
from shardwright.parallel.pipeline.forward.held import Held
from shardwright.parallel.pipeline.forward.memory import Memory
from shardwright.parallel.pipeline.forward.unknown import Unknown

Name = tuple[str, str]  # the path of a module, and an attribute of it


@dataclass(frozen=True)
class Found:
    """What one rank says after a step: attributes that changed there and never did so before.

    of_parts: of layers that it has; above: of modules that all ranks have; generators: among the latter.
    read: what own code has read of layers of other ranks; what ends in a dot is a module, with all in it.
    """

    of_parts: frozenset[Name] = frozenset()
    above: frozenset[Name] = frozenset()
    generators: frozenset[Name] = frozenset()
    read: frozenset[str] = frozenset()

    @property
    def is_news(self) -> bool:
        """Is there anything that other ranks must know?"""
        return bool(self.of_parts or self.above)


@dataclass
class Leavings:
    """Attributes that forwards are known to set, and what stands for them where they do not run.

    of_parts: set by layers. by_own_code: set in layers by the model's own code, which every rank runs. above:
    of modules above the parts, and the ranks whose own code comes to where they are set.
    """

    part_of: Callable[[str], str | None]
    of_parts: set[Name] = field(default_factory=set)
    by_own_code: set[Name] = field(default_factory=set)
    above: dict[Name, set[int]] = field(default_factory=dict)
    are_news: bool = False  # not placed yet

    def add(self, told: Told, rank: int) -> None:
        """Take what a stage has left on its rank while the borders were learned."""
        self.of_parts |= told.left
        self.by_own_code |= told.left_by_own_code
        for name in told.left_above:
            self.above.setdefault(name, set()).add(rank)

    def merge(self, everybody: Sequence[Found]) -> str | None:
        """Take what all ranks have found; the text of an error where it was read in the same step."""
        self.are_news = True
        for rank, found in enumerate(everybody):
            self.of_parts |= found.of_parts
            for name in found.above:
                self.above.setdefault(name, set()).add(rank)
        return self._clash(everybody)

    def _clash(self, everybody: Sequence[Found]) -> str | None:
        read = frozenset().union(*(found.read for found in everybody))
        for found in everybody:
            for path, name in sorted(found.generators):
                return f"pipeline: {own_generator(f'{path}.{name}'.lstrip('.'))}"
            for path, name in sorted(found.of_parts):
                if _is_read(f"{path}.{name}", read):
                    part = self.part_of(path)
                    return (
                        f"pipeline: {path}.{name} was set by the forward of {part} in this step for the "
                        f"first time, and read where {part} does not run\n  fix: return it from {part}"
                    )
        return None

    def watch(self, model: nn.Module) -> Watch:
        """Begin to look at what is left on this rank."""
        return Watch(self, model)

    def place(self, model: nn.Module, parts: Iterable[Held], rank: int) -> None:
        """Note for each part of this rank what it leaves, and put stand-ins where no stage here sets it."""
        self.are_news = False
        for part in parts:
            for path, name in self.of_parts:
                if self.part_of(path) == part.key:
                    inner = path[len(part.key) + 1 :]
                    part.left[inner, name] = Unknown(f"{path}.{name}", part.key)
        modules = dict(model.named_modules())
        for there in modules.values():
            if type(there) is Elsewhere:
                there.forget()
        for (path, name), ranks in self.above.items():
            if rank not in ranks and path in modules:
                modules[path].__dict__[name] = Unknown(f"{path}.{name}".lstrip("."), None)


class Watch:
    """What changes in the modules of one rank during a step."""

    def __init__(self, known: Leavings, model: nn.Module) -> None:
        self._known = known
        modules = {p: m for p, m in model.named_modules() if type(m) is not Elsewhere}
        self._memory = Memory(modules, values=False, buffers=True)

    def found(self, read: Iterable[str]) -> Found:
        """What is new."""
        changed = set(self._memory.changed())
        parts = {name for name in changed if self._known.part_of(name[0]) is not None}
        above = changed - parts - set(self._known.above)
        drew = {name for name in self._memory.changed_generators() if name in above} if above else set()
        return Found(
            frozenset(parts - self._known.of_parts - self._known.by_own_code),
            frozenset(above),
            frozenset(drew),
            frozenset(read),
        )


def _is_read(full: str, read: Iterable[str]) -> bool:
    """Has own code read this attribute of a layer?"""
    return any(full == one or (one.endswith(".") and full.startswith(one)) for one in read)


def own_generator(name: str) -> str:
    """The text of the error for own code that draws from this."""
    return (
        f"the model's own code draws from a generator of its own, {name}, and each stage would take other "
        "numbers from its copy\n  fix: draw in a layer that one stage holds, or from torch's own"
    )
