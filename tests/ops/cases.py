"""One comparison of one operator, and what came of it, as data that crosses processes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

OK, WRONG, ERROR, CRASH, LENIENT = "ok", "wrong", "error", "crash", "no error"
BAD = (WRONG, ERROR, CRASH)


@dataclass(frozen=True, slots=True)
class Options:
    """What to try of an operator. `mesh`: sizes of the axes; `dtypes`: names as in torch.

    under: one of `modes.MODES`, in which all runs; empty for none.
    """

    mesh: tuple[int, ...] = (2,)
    kinds: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("float32", "int64")
    samples: int = 3
    backward: bool = True
    under: str = ""
    source: str = "sample"  # which inputs of the database: see `database.SOURCES`

    def torch_dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(getattr(torch, name) for name in self.dtypes)


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison: an input of an operator under one kind of placement, in one way of calling it."""

    operator: str
    dtype: str
    sample: int
    form: str  # "call", "in place" or "out="
    kind: str
    mixed: bool

    def __str__(self) -> str:
        mixed = ", first axis only" if self.mixed else ""
        return f"{self.operator} {self.dtype} sample {self.sample}, {self.form}, {self.kind}{mixed}"


@dataclass(slots=True)
class Record:
    """What came of a case.

    Args:
        verdict: ok; wrong; error: one device has none; crash, or hang; no error: one device has one.
        text: the first line of what is wrong.
        bytes: what this rank sent, forward and backward.
        fallbacks: operators that gathered their operands for want of a rule.
        rules: ATen operators that ran, each with the reason that its decision gave.
    """

    case: Case
    mesh: tuple[int, ...]
    verdict: str
    text: str = ""
    stage: str = ""
    bytes: int = 0
    fallbacks: list[str] = field(default_factory=list)
    rules: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Record:
        return cls(**{**data, "case": Case(**data["case"]), "mesh": tuple(data["mesh"])})
