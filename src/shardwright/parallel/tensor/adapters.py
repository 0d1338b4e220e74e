"""Layers of adapters beside a matrix that a word cuts, as PEFT makes them: small ones, cut as it is.

Such a layer stands in place of a matrix and holds it (`base_layer`). What it adds is computed by linears of
its own: the one whose outputs are the matrix's is cut along outputs where that is, and the one whose inputs
are along inputs, so that the sum sends no more than the matrix alone. What else it has is whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from shardwright.parallel.tensor.cuts import cut_dim
from shardwright.parallel.tensor.said import Said, Spoken
from shardwright.parallel.tensor.words import Along
from shardwright.tensor.modules.wrappers import BASE


def with_adapters(module: nn.Module, said: Spoken) -> Spoken:
    """What a plan says, and what that means for adapters of which it says nothing."""
    own = {each.parameter for each in said.parameters}
    found = (one for each in said.parameters for one in _of_one(module, each) if one.parameter not in own)
    return replace(said, parameters=(*said.parameters, *found))


def _of_one(module: nn.Module, said: Said) -> Iterator[Said]:
    dim = cut_dim(said)
    if dim is None or said.parameter.ndim != 2 or said.path.rpartition(".")[2] != BASE:
        return
    features = said.parameter.shape[dim]
    for path, child in module.get_submodule(said.home).named_modules(prefix=said.home):
        weight = child._parameters.get("weight")
        if type(child) is nn.Linear and child is not said.owner and weight is not None:
            outputs = said.word.along is Along.OUTPUTS
            if features == (child.out_features if outputs else child.in_features):
                yield replace(said, path=path, leaf="weight", owner=child, parameter=weight)
