"""What the stages of a pipeline know of each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardwright.compat import tree_leaves
from shardwright.errors import ParallelError
from shardwright.parallel.pipeline.border import Leaf
from shardwright.parallel.pipeline.forward.hollow import Call, Value
from shardwright.parallel.pipeline.forward.journal import first_difference


@dataclass
class Told:
    """What the rank of a stage tells all others.

    What its calls returned, what it needed for them, and what it wrote into: values of `rewritten` by the
    model's own code, of `written` by a part. stained: parts whose buffers changed; above: buffers of the
    modules above the parts that changed; counts: numbers among the attributes of those; left: (module, name)
    of what parts have left in themselves; left_by_own_code: of what own code has left in them; left_above: of
    what it has left in the modules above. lines: its journal. writes_batch: does it write into the
    model's arguments? draws, draws_python: does its own code draw random numbers, of
    torch, of Python and numpy?
    """

    trees: dict[Call, Any] = field(default_factory=dict)
    needs: frozenset[Value] = frozenset()
    rewritten: frozenset[Value] = frozenset()
    written: dict[Value, str] = field(default_factory=dict)
    stained: frozenset[str] = frozenset()
    above: frozenset[str] = frozenset()
    counts: frozenset[str] = frozenset()
    left: frozenset[tuple[str, str]] = frozenset()
    left_by_own_code: frozenset[tuple[str, str]] = frozenset()
    left_above: frozenset[tuple[str, str]] = frozenset()
    lines: tuple[str, ...] = ()
    writes_batch: bool = False
    draws: bool = False
    draws_python: bool = False
    error: str | None = None


@dataclass
class Borders:
    """What stages know of each other.

    known: what each call of a part returns, its tensors as `Leaf`. crossing: for each border, numbered by the
    stage behind it, the values that are sent, in order. rewritten: values that the model's own code writes
    into.
    """

    stages: int
    told: dict[int, Told] = field(default_factory=dict)
    known: dict[Call, Any] = field(default_factory=dict)
    made_by: dict[Call, int] = field(default_factory=dict)
    crossing: dict[int, tuple[Value, ...]] = field(default_factory=dict)
    rewritten: set[Value] = field(default_factory=set)

    def add(self, stage: int, told: Told) -> None:
        """Take what a stage tells."""
        self.told[stage] = told
        self.known.update(told.trees)
        self.made_by.update(dict.fromkeys(told.trees, stage))
        self.rewritten |= told.rewritten

    def finish(self) -> None:
        """All stages have told: find what crosses."""
        for behind in range(1, self.stages):
            late = frozenset().union(*(self.told[s].needs for s in range(behind, self.stages)))
            self.crossing[behind] = tuple(sorted(v for v in late if self.made_by[v.call] < behind))

    @property
    def writes_batch(self) -> bool:
        """Does a stage write into the model's arguments?"""
        return any(told.writes_batch for told in self.told.values())

    @property
    def draws(self) -> bool:
        """Does the model's own code draw random numbers?"""
        return self.draws_python or any(told.draws for told in self.told.values())

    @property
    def draws_python(self) -> bool:
        """Does it draw those of Python or numpy?"""
        return any(told.draws_python for told in self.told.values())

    def leaf(self, value: Value) -> Leaf:
        """What is known of a value."""
        leaves = [x for x in tree_leaves(self.known[value.call]) if isinstance(x, Leaf)]
        return leaves[value.leaf]

    def earlier(self, stage: int) -> dict[Call, Any]:
        """What calls before this stage returned."""
        return {call: tree for call, tree in self.known.items() if self.made_by[call] < stage}

    def made(self, stage: int) -> frozenset[Value]:
        """The values of this stage itself that later ones need."""
        needed = frozenset().union(*(self.crossing.values()))
        return frozenset(v for v in needed if self.made_by[v.call] == stage)

    def check(self, *, several: bool) -> None:
        """Raise ParallelError for what stages cannot do as one device does. several: stages on each rank."""
        self._check_written()
        self._check_shared_memory()
        self._check_buffers(several=several)

    def _check_written(self) -> None:
        """A value that a part of one stage writes into, and a later stage reads.

        Where the part and the reader are of one stage, and the value of an earlier one, it is as on one
        device.
        """
        written: dict[Value, str] = {}
        for told in self.told.values():
            written |= told.written
        for behind, values in self.crossing.items():
            for value in values:
                part = written.get(value)
                if part is not None and self._stages_of(part)[0] < behind:
                    raise ParallelError(
                        f"pipeline: {part} writes in place into what {value.call.key} returned, and stage "
                        f"{behind} reads that\n  fix: return a new tensor from {part}, or cut elsewhere"
                    )

    def _check_shared_memory(self) -> None:
        """A value that changes where it is made, since own code writes into another one in the same memory.

        In a later stage both are tensors of their own, and own code writes into one of them.
        """
        for behind in range(1, self.stages):
            told = self.told[behind]
            for value in sorted(told.needs & self.rewritten):
                seen = [s for s in range(self.made_by[value.call], behind) if value in self.told[s].rewritten]
                if seen and value not in told.rewritten:
                    raise ParallelError(
                        f"pipeline: the model's own code writes in place into a tensor that shares memory "
                        f"with what {value.call.key} returned, and stage {behind} is sent the latter alone\n"
                        f"  fix: return a copy from {value.call.key}, or write into a new tensor"
                    )

    def _stages_of(self, part: str) -> list[int]:
        return sorted({stage for call, stage in self.made_by.items() if call.key == part})

    def check_journal(self, stage: int) -> None:
        """Raise ParallelError where own code does not do what it did in the stage before, up to its end."""
        if stage:
            found = first_difference(self.told[stage - 1].lines, self.told[stage].lines)
            if found is not None:
                raise ParallelError(differs(stage - 1, *found))

    def _check_buffers(self, *, several: bool) -> None:
        for part in frozenset().union(*(told.stained for told in self.told.values())):
            stages = self._stages_of(part)
            if len(stages) > 1:
                raise ParallelError(
                    f"pipeline: {part} writes into its buffers, and is called in the stages {stages}, each "
                    "of which would write into a copy\n  fix: give each stage a module of its own"
                )
        for kind in ("above", "counts"):
            for name in sorted(frozenset().union(*(getattr(t, kind) for t in self.told.values()))):
                stages = [s for s, told in self.told.items() if name in getattr(told, kind)]
                if several or (kind == "above" and len(stages) < self.stages):
                    raise ParallelError(_written_above(name, stages, several=several))


def differs(stage: int, before: str, one: str, other: str) -> str:
    """The text of the error for own code that goes two ways."""
    return (
        f"pipeline: the model's own code does not do the same in the stages {stage} and {stage + 1}: after "
        f"{before} it calls {one} in the one and {other} in the other\n  fix: let it read no attribute or "
        "class (type(layer)) of a layer that one stage has, no rank, no time and no tensor's class; move "
        "that code into the layers"
    )


def _written_above(name: str, stages: list[int], *, several: bool) -> str:
    why = (
        "each rank runs that code once for each of its stages"
        if several
        else f"only the stages {stages} come to where it does"
    )
    return (
        f"pipeline: the model's own code writes into {name} in its forward, and {why}\n  fix: write it in a "
        "layer that one stage has, or in the training loop"
    )
