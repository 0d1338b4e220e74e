"""The degrees of a run: how many ranks each kind of parallelism takes. Pure arithmetic, no process group."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from shardwright.errors import MeshError, refuse_no_number


@dataclass(frozen=True, slots=True)
class Degrees:
    """Degrees of parallelism, checked on construction: all that a domain is a function of.

    The world is the product of all degrees but `expert_parallel`: experts reuse the data and context ranks,
    so `expert_parallel` must divide the product of those four. Each is a number of ranks; 1 leaves it out.

    Args:
        pipeline_parallel: ranks that hold consecutive stages of the model.
        data_parallel_replicate: ranks that read other rows, and hold copies of the dense parameters.
        data_parallel_shard: ranks that read other rows, and may cut parameters over them.
        context_parallel_replicate: ranks that read other parts of a sequence; for dense parameters an axis of
            their own (`cp_replicate`).
        context_parallel_shard: ranks that read other parts of a sequence; for dense parameters one axis with
            `data_parallel_shard` (`dp_cp_shard`).
        tensor_parallel: ranks that read the same rows and compute a part of each layer.
        expert_parallel: ranks over which the experts are spread, out of the data and context ranks.
    Raises:
        MeshError: a degree is not a positive int, or `expert_parallel` does not divide.
    """

    pipeline_parallel: int = 1
    data_parallel_replicate: int = 1
    data_parallel_shard: int = 1
    context_parallel_replicate: int = 1
    context_parallel_shard: int = 1
    tensor_parallel: int = 1
    expert_parallel: int = 1

    def __post_init__(self) -> None:
        """Refuse degrees that no world could have."""
        for field in fields(self):
            value, fix = getattr(self, field.name), "give a number of ranks, 1 to leave it out"
            refuse_no_number(field.name, value, MeshError, whole=True, fix=fix)
        if self.data_and_context % self.expert_parallel:
            raise MeshError(
                f"expert_parallel={self.expert_parallel} does not divide the {self.data_and_context} data "
                f"and context ranks, over which experts are spread; "
                f"use one of {_divisors(self.data_and_context)}"
            )

    @property
    def data_and_context(self) -> int:
        """Return the number of ranks that read different data or different parts of a sequence."""
        return (
            self.data_parallel_replicate
            * self.data_parallel_shard
            * self.context_parallel_shard
            * self.context_parallel_replicate
        )

    @property
    def world_size(self) -> int:
        """Return the number of ranks that these degrees need."""
        return self.pipeline_parallel * self.data_and_context * self.tensor_parallel

    def check_world(self, world_size: int) -> None:
        """Raise MeshError unless the degrees multiply to `world_size`."""
        refuse_no_number("world_size", world_size, MeshError, whole=True)
        if self.world_size == world_size:
            return
        raise MeshError(
            f"{self._product_text()} = {self.world_size} ranks, but the world has {world_size}; "
            f"choose degrees that multiply to {world_size}, or start {self.world_size} processes"
        )

    def _product_text(self) -> str:
        """Return `a=2 x b=3`, the degrees above one that span the world."""
        spanning = [field.name for field in fields(self) if field.name != "expert_parallel"]
        above_one = [f"{name}={getattr(self, name)}" for name in spanning if getattr(self, name) > 1]
        return " x ".join(above_one) or "all degrees 1"


def _divisors(number: int) -> str:
    """Return the divisors of `number` as text."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return ", ".join(str(d) for d in sorted({*low, *(number // d for d in low)}))
