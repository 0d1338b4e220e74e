"""Sequence parallelism: between the parts of blocks each rank holds some tokens of each row.

A block is a stream that is normed and added to, and parts (attention, MLP) that hold matrices. A part is
handed all tokens and leaves some: what it leaves is a pending sum, whose reduction sends half of what an
all-reduce does when each rank is handed its tokens only; the other half is the gather at the next part. So
norms, dropouts and additions compute on, and keep for the backward, 1/n of the stream.

Parts that stand side by side (Phi, GPT-NeoX) are summed before anything else reads them. Each by itself would
be reduced, and its gradient gathered, where one all-reduce serves them all: there the block is the part.
Where a part adds and norms the stream itself (BERT), its matrices are the parts.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace

from torch import nn

from shardwright.errors import ParallelError
from shardwright.parallel.tensor.borders import Border, Borders, Gathered
from shardwright.parallel.tensor.said import Spoken
from shardwright.parallel.tensor.words import Along
from shardwright.placement.base import Placement
from shardwright.tensor.modules.wrappers import unwrapped

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_ADDED = frozenset({"residual", "input_tensor"})  # what modules call the stream that they add to
_SIDE_BY_SIDE = ("use_parallel_residual", "parallel_attn")  # how blocks or their configurations say so


def read_blocks(module: nn.Module, said: Spoken, cuts: Mapping[str, Placement]) -> Borders:
    """Where the stream is gathered and cut.

    Raises: ParallelError: there are no blocks: no list of modules holds what the plan cuts.
    """
    along = _cut_modules(module, said, cuts)
    blocks = list(_blocks(module, set(along)))
    if not blocks:
        raise ParallelError(
            "parallelize_tensor: sequence parallelism cuts what stands between blocks, and "
            f"the plan cuts no parameter inside a list of modules (nn.ModuleList, nn.Sequential) of "
            f"{type(module).__name__}; it cuts {_cut_names(cuts)}\n"
            "  fix: name the matrices of the blocks in the plan, or leave sequence_parallel out"
        )
    borders: Borders = {}
    named = {module.get_submodule(path) for path, word in said.modules.items() if word.sequence}
    inside = {m for block in blocks for m in block.modules()}
    outside = [child for child in module.modules() if child not in inside]
    begins = any(isinstance(child, nn.Embedding) and child in along for child in outside)
    beside = Gathered(module)
    for block in blocks:
        borders |= _sharing(block, _parts(block, along, named))
        borders[block] = replace(borders.get(block, Border(cuts=not begins)), beside=beside)
    for child in outside:
        borders |= _outside(child, begins)
    for child in named:
        borders[child] = replace(borders.get(child, Border()), cuts=True, gathers=False)
    return borders


def of_the_stream(module: nn.Module, borders: Borders) -> Iterator[nn.Module]:
    """Modules of vectors that compute with this rank's tokens, such as norms: their gradients are terms.

    One that is handed all tokens after all (a norm before the first block) is right as well.
    """
    gathering = [child for child, border in borders.items() if border.gathers]
    apart = {inner for child in gathering for inner in child.modules()}
    for child in module.modules():
        if child not in apart and all(p.ndim <= 1 for p in child.parameters(recurse=False)):
            yield child


def _cut_names(cuts: Mapping[str, Placement]) -> str:
    names = [name for name, placement in cuts.items() if placement.is_partition]
    return f"{', '.join(names[:4])}{' and others' if len(names) > 4 else ''}" if names else "nothing"


def _cut_modules(module: nn.Module, said: Spoken, cuts: Mapping[str, Placement]) -> dict[nn.Module, Along]:
    """Modules that own a parameter which is cut, and along what its matrix is."""
    found: dict[nn.Module, Along] = {}
    for each in said.parameters:
        if each.name in cuts and cuts[each.name].is_partition:
            found[each.owner] = found[module.get_submodule(each.home)] = each.word.along
    for name, placement in cuts.items():
        if placement.is_partition:
            found.setdefault(module.get_submodule(name.rpartition(".")[0]), Along.NONE)
    return found


def _blocks(module: nn.Module, cut: set[nn.Module]) -> Iterator[nn.Module]:
    """What the outermost lists hold of which the plan cuts anything; the stream goes through all of it."""
    if isinstance(module, _LISTS) and not cut.isdisjoint(module.modules()):
        yield from map(unwrapped, module.children())
    elif module not in cut:
        for child in module.children():
            yield from _blocks(child, cut)


def _parts(block: nn.Module, along: Mapping[nn.Module, Along], named: Container[nn.Module]) -> Borders:
    """The parts of a block, which hold matrices; a list of parts (T5) is a list of blocks.

    Those too that the plan leaves whole: on some tokens, each rank would make a term of all their gradients.
    """
    children = [child for child in block.children() if _has_matrices(child)]
    opened = {child for child in children if any(_adds_to_the_stream(m, along) for m in child.modules())}
    if not opened and not any(m in named for m in block.modules()) and _stands_side_by_side(block, along):
        return {block: Border(gathers=True, leaves=True)}
    found: Borders = {}
    for child in children:
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            for item in child.children():
                found |= _parts(item, along, named)
        elif child in opened:
            found |= _parts(child, along, named)
        else:
            kind = along.get(child)
            found[child] = Border(gathers=kind is not Along.INPUTS, leaves=kind is not Along.OUTPUTS)
    return found


def _adds_to_the_stream(module: nn.Module, along: Mapping[nn.Module, Along]) -> bool:
    """Does the module add what its own matrix leaves to the stream: is it handed it, or norms it the sum?"""
    out_of = [child for child in module.children() if along.get(child) is Along.INPUTS]
    if not out_of or _ADDED & inspect.signature(module.forward).parameters.keys():
        return bool(out_of)
    wide = {n for child in out_of for p in child.parameters() for n in p.shape}
    return any(not wide.isdisjoint(p.shape) for norm in _norms(module) for p in norm.parameters())


def _norms(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.children() if "norm" in type(child).__name__.lower()]


def _has_matrices(module: nn.Module) -> bool:
    return any(p.ndim > 1 for p in module.parameters())


def _stands_side_by_side(block: nn.Module, along: Mapping[nn.Module, Along]) -> bool:
    """Do parts of the block read what no other part has written: fewer norms than parts that leave something?

    A block of which this is not true is right as well, and sends no more; its norms compute on all tokens.
    """
    words = (
        getattr(says, word, False) for says in (block, vars(block).get("config")) for word in _SIDE_BY_SIDE
    )
    if any(words):
        return True
    children = [child for child in block.children() if not isinstance(child, (nn.ModuleList, nn.ModuleDict))]
    parts = sum(_has_matrices(child) and along.get(child) is not Along.OUTPUTS for child in children)
    return 0 < len(_norms(block)) < parts


def _sharing(block: nn.Module, parts: Borders) -> Borders:
    """Parts that read one stream (Phi's attention and MLP) share what was gathered of it."""
    shared = Gathered(block) if len(parts) > 1 else None
    return {part: replace(border, shared=shared) for part, border in parts.items()}


def _outside(module: nn.Module, begins: bool) -> Borders:
    """Embeddings begin the stream where one is cut, else the first block; matrices read all of it."""
    if isinstance(module, nn.Embedding):
        return {module: Border(leaves=True)} if begins else {}
    reads = any(p.ndim > 1 for p in module.parameters(recurse=False))
    return {module: Border(gathers=True)} if reads else {}
