"""The compositions: which strategies, on which axes, in which order; and what has no meaning, and why."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

TENSOR, STYLES, SEQUENCE, BLOCKS, SOME = "tensor", "styles", "sequence", "blocks", "some"
WORDS, STREAM = "words", "stream"
REPLICATE, FSDP, HSDP, EXPERT = "replicate", "fsdp", "hsdp", "expert"
# By names in an spmd block; torch's styles; these with tokens cut between them; by names, block by block; by
# names in an spmd block, every second module alone; by the words that a model brings, and these with the
# stream between blocks cut.
_OF_ALL = (TENSOR, STYLES, SEQUENCE, BLOCKS)
BROUGHT = (WORDS, STREAM)
TENSORS = (*_OF_ALL, SOME, *BROUGHT)
EXPERT_AXES = ("ep_replicate", "ep_shard")


@dataclass(frozen=True)
class Step:
    """One strategy on some axes of the mesh; `by_blocks`: on each block first, then on the whole."""

    strategy: str
    axes: tuple[str, ...]
    by_blocks: bool = False

    def __str__(self) -> str:
        return self.strategy + (" by blocks" if self.by_blocks else "")


@dataclass(frozen=True)
class Composition:
    """Strategies in the order in which they are applied, on one mesh.

    Args:
        sizes: of the mesh's axes.
        axes: their names; all but `tp` are data axes.
        spread: how many ranks the experts are spread over, where they are.
    """

    steps: tuple[Step, ...]
    sizes: tuple[int, ...]
    axes: tuple[str, ...]
    spread: int = 0

    @property
    def world(self) -> int:
        """How many ranks."""
        return prod(self.sizes)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Axes whose ranks read other rows."""
        return tuple(axis for axis in self.axes if axis != "tp")

    @property
    def data_ranks(self) -> int:
        """How many ranks read other rows."""
        return prod(size for axis, size in zip(self.axes, self.sizes, strict=True) if axis != "tp")

    def uses(self, *strategies: str) -> bool:
        """Whether one of these is among the steps."""
        return any(step.strategy in strategies for step in self.steps)

    def __str__(self) -> str:
        mesh = " x ".join(f"{axis} {size}" for axis, size in zip(self.axes, self.sizes, strict=True))
        return f"{', '.join(map(str, self.steps))} on {mesh}"


def composition(text: str, spread: int = 0, **mesh: int) -> Composition:
    """`"tensor tp, hsdp* dr ds"` on `dr=2, ds=2, tp=2`; a star: by blocks.

    The steps and the axes of the mesh stand in the order given.
    """
    steps = []
    for part in text.split(", "):
        strategy, *axes = part.split()
        by_blocks = strategy.endswith("*")
        steps.append(Step(strategy.rstrip("*"), tuple(axes), by_blocks))
    return Composition(tuple(steps), tuple(mesh.values()), tuple(mesh), spread)


ALONE = (
    composition("tensor tp", tp=2),
    composition("tensor tp", tp=3),
    composition("styles tp", tp=2),
    composition("blocks tp", tp=2),
    composition("sequence tp", tp=2),
    composition("replicate dp", dp=2),
    composition("replicate dr cr", dr=2, cr=2),
    composition("replicate dp", dp=5),
    composition("fsdp dp", dp=2),
    composition("fsdp* dp", dp=3),
    composition("fsdp dr ds", dr=2, ds=2),
    composition("hsdp dr ds", dr=2, ds=2),
    composition("hsdp* dr ds", dr=2, ds=2),
    composition("hsdp dr ds", ds=2, dr=3),
    composition("expert", spread=2, dp=2),
    composition("expert", spread=2, dp=4),
)

_DATA = (
    composition("replicate cr, fsdp ds", ds=2, cr=2),
    composition("replicate cr, fsdp* ds", ds=2, cr=2),
    composition("replicate cr, fsdp dr ds", dr=2, ds=2, cr=2),
    composition("replicate cr, hsdp dr ds", dr=2, ds=2, cr=2),
    composition("replicate cr, hsdp* dr ds", cr=2, dr=2, ds=2),
)
_OF_UNITS = (composition("fsdp-blocks dr ds, hsdp dr ds", dr=2, ds=2),)


def _with_tensor(kind: str) -> tuple[Composition, ...]:
    return (
        composition(f"{kind} tp, replicate dp", dp=2, tp=2),
        composition(f"{kind} tp, replicate dp", tp=2, dp=2),
        composition(f"{kind} tp, replicate dp", dp=1, tp=2),
        composition(f"{kind} tp, replicate dp", dp=2, tp=1),
        composition(f"{kind} tp, fsdp dp", dp=2, tp=2),
        composition(f"{kind} tp, fsdp* dp", dp=3, tp=2),
        composition(f"{kind} tp, hsdp dr ds", dr=2, ds=2, tp=2),
        composition(f"{kind} tp, hsdp* dr ds", dr=2, ds=2, tp=2),
        composition(f"{kind} tp, replicate cr, fsdp ds", ds=2, cr=2, tp=2),
        composition(f"{kind} tp, replicate cr, fsdp* ds", ds=2, cr=2, tp=2),
        composition(f"{kind} tp, replicate cr, hsdp dr ds", dr=1, ds=2, cr=2, tp=2),
        composition(f"{kind} tp, fsdp-blocks dr ds, hsdp dr ds", dr=2, ds=2, tp=2),
    )


_WITH_EXPERTS = (
    composition("expert, replicate dp", spread=2, dp=2),
    composition("expert, replicate dp", spread=2, dp=4),
    composition("expert, fsdp dp", spread=2, dp=4),
    composition("expert, fsdp* dp", spread=4, dp=4),
    composition("expert, hsdp dr ds", spread=2, dr=2, ds=2),
    composition("expert, hsdp* dr ds", spread=4, dr=2, ds=2),
    composition("expert, replicate cr, fsdp ds", spread=2, ds=2, cr=2),
    composition("expert, replicate cr, hsdp dr ds", spread=2, dr=2, ds=2, cr=2),
    composition("expert, fsdp-blocks dr ds, hsdp dr ds", spread=2, dr=2, ds=2),
)


def _experts_with_tensor(kind: str) -> tuple[Composition, ...]:
    return (
        composition(f"{kind} tp, expert, replicate dp", spread=2, dp=2, tp=2),
        composition(f"{kind} tp, expert, fsdp dp", spread=2, dp=2, tp=2),
        composition(f"{kind} tp, expert, fsdp* dp", spread=2, dp=4, tp=2),
        composition(f"{kind} tp, expert, hsdp dr ds", spread=2, dr=2, ds=2, tp=2),
    )


# The tensor-parallel step last: it meets parameters that are placed over data axes.
LATE_TENSOR = (
    composition("replicate dp, tensor tp", dp=2, tp=2),
    composition("fsdp dp, tensor tp", dp=2, tp=2),
    composition("replicate dp, styles tp", dp=2, tp=2),
    composition("fsdp dp, styles tp", dp=2, tp=2),
)
# Two data-parallel strategies whose first shards: the second meets units that torch manages.
LATE_REPLICATE = (
    composition("fsdp ds, replicate cr", ds=2, cr=2),
    composition("hsdp dr ds, replicate cr", dr=1, ds=2, cr=2),
)
# The dense parameters stay plain, or on tp alone: nobody would add their gradients over the data ranks.
UNPLACED = (
    composition("expert", spread=2, dp=2),
    composition("styles tp, expert", spread=2, dp=2, tp=2),
    composition("tensor tp, replicate-blocks dp", dp=2, tp=2),
)

# Fine-tuning of experts alone: the dense parameters are frozen, and cut over tp. A plan for the whole model
# places the routers too, over tp alone: nobody would add their gradients unless a strategy does.
ROUTERS = (composition("tensor tp, expert", spread=2, dp=2, tp=2),)
_FROZEN = (*ROUTERS, composition("tensor tp, expert, replicate dp", spread=2, dp=2, tp=2))

DENSE = (*ALONE[:14], *_DATA, *_OF_UNITS, *(c for kind in _OF_ALL for c in _with_tensor(kind)))
PARTS = (composition("some tp", tp=2), *_with_tensor(SOME))
BY_WORDS = (
    *(composition(f"{kind} tp", tp=2) for kind in BROUGHT),
    *(c for k in BROUGHT for c in _with_tensor(k)),
)
EXPERTS = (*_WITH_EXPERTS, *(c for kind in (STYLES, BLOCKS, TENSOR) for c in _experts_with_tensor(kind)))
ONLY_EXPERTS = (*ALONE[14:], *_FROZEN)
