"""From a word to the placement of a parameter: whatever is chosen, values are one device's; bytes differ."""

from __future__ import annotations

import re

from torch import nn

from shardwright.parallel.tensor.heads import heads_near
from shardwright.parallel.tensor.said import Said
from shardwright.parallel.tensor.words import Along
from shardwright.placement.base import Placement, Replicate
from shardwright.placement.interleaved import Interleaved
from shardwright.placement.shard import Shard

_BIAS = re.compile(r"(^|_)bias(_|$)")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def placement_of(said: Said, parent: nn.Module, n: int) -> Placement:
    """Where the parameter lives on an axis of n ranks.

    Args: parent: the module that holds the owner; what it says of its heads decides where a cut may fall.
    """
    dim = cut_dim(said)
    if dim is None:
        return Replicate()
    features = said.parameter.shape[dim]
    if said.word.along in (Along.ROWS, Along.COLUMNS) or isinstance(said.owner, nn.Embedding):
        return Shard(dim)
    if said.word.packed:
        return Interleaved(dim, 2)
    heads = heads_near(said.owner, parent)
    if said.word.gathers and heads is not None and heads.is_fused(features):
        return heads.cut_fused(dim, n)
    if said.word.gathers and _is_pair(features, parent):
        return Interleaved(dim, 2)
    return Shard(dim) if heads is None else heads.cut(dim, features, n)


def cut_dim(said: Said) -> int | None:
    """The dim of the parameter that the word cuts; None where it stays whole.

    A bias has outputs alone. A linear is [outputs, inputs], stacked experts [experts, outputs, inputs] in the
    words of plans whichever they multiply; `Conv1D` of GPT-2 stands transposed; convolutions have their
    windows last.
    """
    ndim, along = said.parameter.ndim, said.word.along
    if ndim == 0 or along is Along.NONE:
        return None
    table = isinstance(said.owner, nn.Embedding)
    if along is Along.ROWS or (table and along is Along.INPUTS):
        return 0
    if along is Along.COLUMNS or table:
        return ndim - 1
    if ndim == 1 or _BIAS.search(said.leaf):
        return ndim - 1 if along is Along.OUTPUTS else None
    outputs, inputs = (0, 1) if isinstance(said.owner, _CONVOLUTIONS) else (ndim - 2, ndim - 1)
    if type(said.owner).__name__ == "Conv1D":
        outputs, inputs = inputs, outputs
    return outputs if along is Along.OUTPUTS else inputs


def _is_pair(features: int, parent: nn.Module) -> bool:
    """Do two matrices stand in these outputs, whose product with each other another child reads?"""
    widths = {getattr(child, "in_features", None) for child in parent.children()}
    return features % 2 == 0 and features // 2 in widths and features not in widths
