"""Collectives of `torch.distributed` on distributed tensors, which say nothing that one device would do.

Their ops write what they name among their inputs, and do not say so in their schemas: taken for ops that give
new tensors they would move the operands and lose what they wrote.
"""

from __future__ import annotations

from typing import NoReturn

from shardwright.errors import RuleError
from shardwright.rules.call import Args, Kwargs, Op


def refuse_collective(func: Op, _: Args, __: Kwargs) -> NoReturn:
    """Raise RuleError for an op of a process group, on every rank that calls it."""
    name = func._schema.name.partition("::")[2]
    raise RuleError(
        f"{name}: a collective of torch.distributed takes what each rank has for itself, and a DTensor is "
        "one tensor of all ranks: they would disagree about it\n"
        "  fix: x.redistribute(...) or x.full_tensor(), which send what its layout asks for (a pending sum "
        "is reduced so)\n"
        "  or: the collective on x.to_local(), this rank's part"
    )
