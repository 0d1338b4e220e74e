"""Heads: a projection of an attention is cut between heads, so that each rank attends with whole ones.

Where an axis divides the number of key-value heads, a plain cut does that. Else ranks get whole groups (a
key-value head and its queries), some one more than others; and where there are fewer groups than ranks, the
queries are cut between heads, and keys and values are whole on every rank. Where there are fewer heads of
queries than ranks, a plain cut tears them: no rank is left without a part, which `fully_shard` does not take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwright.placement.base import Placement, Replicate
from shardwright.placement.fused import Fused
from shardwright.placement.interleaved import Interleaved
from shardwright.placement.ragged import Ragged
from shardwright.placement.shard import Shard

_QUERIES = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_GROUPS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_SIZE = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")


@dataclass(frozen=True, slots=True)
class Heads:
    """An attention: heads of queries, heads of keys and values that they share, features of a head."""

    queries: int
    groups: int
    size: int

    def cut(self, dim: int, features: int, n: int) -> Placement:
        """The cut of a dim of `features` over n ranks: between heads where each rank gets one."""
        if self._few(n) and features == self.groups * self.size:
            return Replicate()
        units = self.queries if self._few(n) else self.groups
        if units % n == 0 or features % units or units < n:
            return Shard(dim)
        return Ragged(balanced(units, n), (dim,))

    def _few(self, n: int) -> bool:
        """Are there ranks without a head of keys, which could have one of queries?"""
        return self.groups < n and self.groups < self.queries

    def is_fused(self, features: int) -> bool:
        """Are these the features of queries, keys and values, one after the other?"""
        return features == (self.queries + 2 * self.groups) * self.size

    def cut_fused(self, dim: int, n: int) -> Placement:
        """The cut of a dim with all queries, then all keys, then all values: each of them between groups.

        Not so where there are fewer groups than ranks: then keys are cut inside their heads.
        """
        even = self.groups % n == 0 or self.groups < n
        if even and self.queries == self.groups:
            return Interleaved(dim, 3)
        parts = (self.queries // self.groups, 1, 1)
        return Fused(dim, parts, None if even else balanced(self.groups, n))


def balanced(units: int, n: int) -> tuple[int, ...]:
    """How many of `units` each of n ranks gets: as equal as can be, the first ones more."""
    return tuple(units // n + (coord < units % n) for coord in range(n))


def heads_near(*modules: nn.Module) -> Heads | None:
    """The heads of the first of these modules that is an attention: it says how many it has, or how large.

    The sizes stand on the module itself, or in its `config`.
    """
    for module in modules:
        if _first(module, (*_QUERIES, *_GROUPS, *_SIZE)) or hasattr(module, "num_key_value_groups"):
            return _read(module)
    return None


def _read(module: nn.Module) -> Heads | None:
    config: Any = getattr(module, "config", None)
    queries = _first(module, _QUERIES) or _first(config, _QUERIES)
    if not queries:
        return None
    shared = _first(module, ("num_key_value_groups",))
    groups = _first(module, _GROUPS) or (queries // shared if shared else _first(config, _GROUPS)) or queries
    size = _first(module, _SIZE) or _first(config, _SIZE) or (_first(config, ("hidden_size",)) // queries)
    return Heads(queries, queries if queries % groups else groups, size)


def _first(of: Any, names: tuple[str, ...]) -> int:
    """The first of these attributes that is a number of something; 0 if none is."""
    found = (getattr(of, name, None) for name in names)
    return next((value for value in found if type(value) is int and value > 0), 0)
