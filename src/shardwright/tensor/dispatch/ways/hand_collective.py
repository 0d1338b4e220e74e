"""Collectives of `torch.distributed` on distributed tensors, which say nothing that one device would do.

Their ops write what they name among their inputs, and do not say so in their schemas: taken for ops that give
new tensors they would move the operands and lose what they wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from shardwright.errors import RuleError
from shardwright.rules.call import Args, Kwargs, Op


def refuse_collectives(func: Op) -> Callable[..., Any] | None:
    """What runs an op of a process group: an error on every rank that calls it."""
    return _refuse if func.namespace == "c10d" else None


def _refuse(func: Op, _: Args, __: Kwargs) -> NoReturn:
    name = func._schema.name.partition("::")[2]
    raise RuleError(
        f"{name}: a collective of torch.distributed takes what each rank has for itself, and a DTensor is "
        "one tensor of all ranks: they would disagree about it\n"
        "  fix: x.redistribute(...) or x.full_tensor(), which send what its layout asks for (a pending sum "
        "is reduced so)\n"
        "  or: the collective on x.to_local(), this rank's part"
    )
