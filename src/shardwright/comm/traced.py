"""Tensors of a trace, which cannot be sent between pairs of ranks."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Parameter

from shardwright.errors import PlanError


def is_traced(x: Tensor) -> bool:
    """True for the fake and functional tensors of a trace."""
    return type(x) not in (Tensor, Parameter)


def refuse_between(what: object, local: Tensor) -> None:
    """Raises: PlanError: `what`, a move between two meshes with this local tensor, is traced."""
    if is_traced(local):
        raise PlanError(
            f"{what}: a traced graph cannot hold messages between two meshes; "
            "redistribute before the compiled function"
        )
