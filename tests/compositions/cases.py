"""One case: a model, a composition and a variant; all of them, and a way to choose among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby

from tests.compositions import table
from tests.compositions.models import MODELS
from tests.compositions.table import (
    BLOCKS,
    EXPERT,
    FSDP,
    HSDP,
    REPLICATE,
    SEQUENCE,
    STYLES,
    TENSORS,
    Composition,
)


@dataclass(frozen=True)
class Variant:
    """What a model and its data may do that strategies must not break.

    Args:
        rows: of the ranks: "even", "uneven", or "none" for one of them.
        tied: the head's weight is the embedding's.
        frozen: every fourth parameter is.
        twice: one block's submodule is used by another too.
        checkpointing: "", "saved" or "reentrant".
        backwards: how many, of other rows each, before one synchronisation.
        idle: a rank without rows does not run at all.
        dtype: of the parameters.
    """

    rows: str = "even"
    tied: bool = False
    frozen: bool = False
    twice: bool = False
    checkpointing: str = ""
    backwards: int = 1
    idle: bool = False
    dtype: str = "float32"

    def __str__(self) -> str:
        said = [
            f"{name}={value}" if isinstance(value, str | int) and not isinstance(value, bool) else name
            for name, value in asdict(self).items()
            if value != getattr(_PLAIN, name)
        ]
        return ", ".join(said) or "plain"


_PLAIN = Variant()

VARIANTS: dict[str, Variant] = {
    "plain": _PLAIN,
    "uneven": Variant(rows="uneven"),
    "no rows": Variant(rows="none", backwards=2),
    "idle": Variant(rows="none", idle=True, tied=True),
    "tied": Variant(tied=True, rows="uneven"),
    "frozen": Variant(frozen=True, rows="uneven"),
    "twice": Variant(twice=True),
    "checkpointing": Variant(checkpointing="saved", rows="uneven"),
    "reentrant": Variant(checkpointing="reentrant", tied=True),
    "two backwards": Variant(backwards=2, rows="uneven"),
    "double": Variant(dtype="float64", rows="uneven"),
    "half": Variant(dtype="bfloat16", rows="uneven", tied=True),
    "everything": Variant("none", tied=True, frozen=True, twice=True, checkpointing="saved", backwards=2),
}


@dataclass(frozen=True)
class Refusal:
    """A combination without a meaning: which, why, what to do instead, and what the error says.

    either: some forms of it can be done, and are then right.
    """

    what: str
    why: str
    instead: str
    says: str
    either: bool = False


_UNITS = Refusal(
    "`fsdp` or `hsdp` by blocks, where two blocks share a parameter",
    "a parameter that two sharded units use has two owners, who would each gather and sum it",
    "shard a module that holds both",
    "one unit",
)
_LATE = Refusal(
    "`tensor` after a data-parallel strategy",
    "tensor parallelism decides what a module computes on; data parallelism then places what is left",
    "`tensor` first",
    "before",
    either=True,
)
_MANAGED = Refusal(
    "`replicate` after `fsdp` or `hsdp`",
    "a sharded parameter belongs to its unit, which gathers and sums it",
    "`replicate` first, or `parallelize_hsdp`",
    "first",
)
_UNPLACED = Refusal(
    "a trained parameter that no data-parallel strategy places, at the first `GradientSynchronizer`",
    "ranks that read other rows must add the gradients of every parameter that is trained",
    "place it too, or freeze it",
    "nobody would sum",
)


@dataclass(frozen=True)
class Case:
    """What one run on the ranks proves."""

    model: str
    composition: Composition
    variant: Variant

    def __str__(self) -> str:
        return f"{self.model} | {self.composition} | {self.variant}"

    @property
    def refusal(self) -> Refusal | None:
        """Why the case has no meaning; None for those that must be right."""
        if self.composition in table.LATE_TENSOR:
            return _LATE
        if self.composition in table.LATE_REPLICATE:
            return _MANAGED
        if self.composition in table.UNPLACED and self.model != "stack of experts":
            return _UNPLACED
        if self.composition in table.ROUTERS:
            return _UNPLACED
        by_blocks = any(s.by_blocks or s.strategy == "fsdp-blocks" for s in self.composition.steps)
        shared = self.variant.twice and MODELS[self.model].shared
        if not (by_blocks and shared):
            return None
        # What two blocks share may be an expert layer, which no unit takes: then the case is right.
        return replace(_UNITS, either=True) if MODELS[self.model].experts else _UNITS

    @property
    def no_rows(self) -> bool:
        """Whether a rank may read a batch of no rows."""
        return MODELS[self.model].no_rows


def cases() -> Iterator[Case]:
    """Every case: those that must be right, and those that must be refused."""
    for model in MODELS:
        for composition in compositions_of(model):
            for variant in VARIANTS.values():
                if _makes_sense(model, composition, variant):
                    yield Case(model, composition, variant)
    for composition in (*table.LATE_TENSOR, *table.LATE_REPLICATE, table.UNPLACED[2]):
        yield Case("decoder", composition, _PLAIN)
    for composition in table.UNPLACED[:2]:
        yield Case("decoder with experts", composition, _PLAIN)


def rotated(found: Iterable[Case]) -> Iterator[Case]:
    """Of every model and composition: plain, everything, and three more variants, which take turns."""
    turn: Counter[str] = Counter()
    rare = [name for name in VARIANTS.values() if name not in (_PLAIN, VARIANTS["everything"])]
    for (model, placed), group in groupby(found, key=lambda case: (case.model, case.composition)):
        some = {rare[(turn[model] + step) % len(rare)] for step in range(3)}
        turn[model] += 3
        for case in group:
            if case.variant in some or case.variant not in rare or case.refusal:
                yield Case(model, placed, case.variant)


def compositions_of(model: str) -> tuple[Composition, ...]:
    """The compositions that this model can be placed by."""
    family = MODELS[model]
    if model == "stack of experts":
        return table.ONLY_EXPERTS
    chosen = table.EXPERTS if family.experts else (*table.DENSE, *table.PARTS, *table.BY_WORDS)
    return tuple(c for c in chosen if _can_be_cut(model, c))


def _can_be_cut(model: str, composition: Composition) -> bool:
    family = MODELS[model]
    if composition.uses(SEQUENCE) and not family.sequence:
        return False
    if composition.uses(STYLES) and not family.by_style:
        return False
    if composition.uses(*table.BROUGHT) and not family.words:
        return False
    return model.startswith("decoder") or not composition.uses(BLOCKS)


def _makes_sense(model: str, composition: Composition, variant: Variant) -> bool:
    """An idle rank joins no collective of a forward: nothing may be sharded over data ranks.

    A router's choices depend on the last bit: in a half type, tokens go elsewhere on another mesh. Torch has
    no kernel for the product of Mixtral's experts in double precision.
    """
    if variant.dtype == "float64" and model == "mixtral":
        return False
    if variant.dtype == "bfloat16" and (MODELS[model].experts or model == "mixtral"):
        return False
    if variant.idle and (composition.uses(FSDP, "fsdp-blocks", HSDP, EXPERT) or composition.data_ranks == 1):
        return False
    if variant.rows != "even" and composition.data_ranks == 1:
        return variant == VARIANTS["everything"]
    return True


def chosen(
    found: Iterable[Case], *, models: str = "", strategies: str = "", variants: str = ""
) -> list[Case]:
    """Those whose model, strategies ("tensor+fsdp", in any order) and variant are among the given."""
    wanted_models, wanted_variants = _split(models), [VARIANTS[v] for v in _split(variants)]
    wanted = [sorted(text.split("+")) for text in _split(strategies)]
    return [
        case
        for case in found
        if (not wanted_models or case.model in wanted_models)
        and (not wanted_variants or case.variant in wanted_variants)
        and (not wanted or _strategies(case.composition) in wanted)
    ]


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def name_of(composition: Composition) -> str:
    """Its strategies in one fixed order: "tensor+fsdp"."""
    return "+".join(sorted(_strategies(composition), key=_ORDER.index))


_ORDER = (*TENSORS, EXPERT, REPLICATE, FSDP, HSDP)


def _strategies(composition: Composition) -> list[str]:
    return sorted({step.strategy.removesuffix("-blocks") for step in composition.steps})
