"""Who hears the calls of parts on a rank, and what stands where another rank holds the part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from shardwright.compat import current_graph_task_id
from shardwright.errors import ParallelError
from shardwright.parallel.pipeline.forward.held import Held
from shardwright.parallel.pipeline.forward.run import Run
from shardwright.parallel.pipeline.mark import StandIn

_BY_STEP = "run the model with Pipeline(model, ...).step(...)"
_ONE_STAGE = "activations that are computed again are of one stage\n  fix: checkpoint each layer by itself"


class Conductor:
    """Hears every call of a part on this rank while a stage runs; else calls are what they were."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self.heard: list[Held] = []
        self.absentees: list[Held] = []
        self.in_loss = False
        self.read: set[str] = set()  # of parts of other ranks, in this step; what ends in a dot is a module

    @property
    def parts(self) -> Iterator[Held]:
        """All parts, of this rank and of others."""
        yield from self.heard
        yield from self.absentees

    def holds(self, part: Held) -> bool:
        """Does this rank hold the part's module, in another place?"""
        return any(one.module is part.module for one in self.heard)

    @property
    def reads(self) -> bool:
        """Does code of the user run that may look at the parts: the model's own, or a loss?"""
        return self.run is not None or self.in_loss

    def hears(self, part: Held, original: Callable[..., Any]) -> Callable[..., Any]:
        """A call of a part that this rank holds."""

        def called(*args: Any, **kwargs: Any) -> Any:
            if self.run is None:
                return original(*args, **kwargs)
            run, made = self.run, lambda: original(*args, **kwargs)
            return run.call(part, made, (args, kwargs))

        called.heard_by = self  # type: ignore[attr-defined]
        return called

    def absent(self, part: Held, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a part that another rank holds."""
        if self.run is None:
            way = _BY_STEP if current_graph_task_id() == -1 else _ONE_STAGE
            raise ParallelError(f"{part.key} is held by stage {part.stages[0]}, on another rank: {way}")
        return self.run.call(part, None, (args, kwargs))


class Elsewhere(StandIn):
    """Stands where a part stood that another rank holds. Reads like the part, but has no parameters.

    While a stage runs, `isinstance` finds the part's class; a strategy that walks through the model does not.
    """

    def __init__(self, conductor: Conductor, part: Held, shell: nn.Module) -> None:
        super().__init__()
        self.__dict__["told"] = (conductor, part, shell)

    @property  # type: ignore[misc]  # as mocks do
    def __class__(self) -> type:
        told = self.__dict__.get("told")
        return type(self) if told is None or not told[0].reads else type(told[2])

    @property
    def shell(self) -> nn.Module:
        """The part, without its weights."""
        found: nn.Module = self.__dict__["told"][2]
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the part returned on its own rank."""
        conductor, part, _ = self.__dict__["told"]
        out = conductor.absent(part, args, kwargs)
        for _, name in part.left:
            self.__dict__.pop(name, None)  # own code has set it before, and the part has since
        return out

    def forget(self) -> None:
        """What the part leaves is unknown here."""
        conductor, part, _ = self.__dict__["told"]
        if part.left and not conductor.holds(part):
            part.hide()

    def _reads(self, name: str) -> None:
        conductor, part, _ = self.__dict__["told"]
        if conductor.reads:
            conductor.read.add(f"{part.key}.{name}")

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """While a stage runs those of the part, whose parameters have no values; else this one alone.

        So are `modules`, `parameters` and `buffers` of a module above it.
        """
        there = self.shell if self.__dict__["told"][0].reads else None
        if there is None:
            yield from super().named_modules(memo, prefix, remove_duplicate)
        else:
            self._reads("")
            yield from there.named_modules(memo, prefix, remove_duplicate)

    def train(self, mode: bool = True) -> Elsewhere:
        """As torch's; the part's layers are told too, for own code may ask them."""
        super().train(mode)
        if "told" in self.__dict__:
            self.shell.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        """Any other attribute is the part's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            self._reads(name)  # also where there is none yet
            found = getattr(self.shell, name)
            if isinstance(found, nn.Module):
                self._reads(f"{name}.")
            return found

    def __iter__(self) -> Iterator[Any]:
        """The part's items."""
        self._reads("")
        yield from self.shell  # type: ignore[misc]

    def __len__(self) -> int:
        """The part's length."""
        return len(self.shell)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        """As the part, true where that has no length."""
        return bool(self.shell)

    def __getitem__(self, key: Any) -> Any:
        """The part's item."""
        self._reads("")
        return self.shell[key]  # type: ignore[index]

    def extra_repr(self) -> str:
        """Which part, and where it is."""
        part = self.__dict__["told"][1]
        return f"{part.key}, in stage {part.stages[0]}"


def _on_the_part(name: str) -> Any:
    """A method that hooks the part, which runs on its own rank: run here, a hook would be own code."""

    def register(self: Elsewhere, *hook: Any, **how: Any) -> Any:
        return getattr(self.shell, name)(*hook, **how)

    return register


for _kind in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
    setattr(Elsewhere, f"register_{_kind}_hook", _on_the_part(f"register_{_kind}_hook"))
