"""All ranks of a stage go on, or all raise the same error: before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.context.submesh import groups_above_one
from shardwright.errors import ParallelError
from shardwright.parallel.buffers import digest_of, digests_of
from shardwright.parallel.table.rehearsal import Placed
from shardwright.parallel.table.rows import Row
from shardwright.tensor.modules.same_model import told_alike


@dataclass(frozen=True, slots=True)
class Word:
    """What one rank tells the others.

    Args:
        error: why it cannot go on; "" if it can.
        table: of its rows.
        names: of its parameters.
        parameters: what each is: shape and dtype, and its values where ranks cut them unasked.
        buffers: the values of plain ones.
        generator: the state that weights are to be drawn from; 0 where none are.
        local_bytes: of each parameter.
    """

    rank: int
    error: str
    table: int = 0
    names: tuple[str, ...] = ()
    parameters: tuple[int, ...] = ()
    buffers: tuple[tuple[str, int], ...] = ()
    generator: int = 0
    local_bytes: tuple[int, ...] = ()


def word_of(rank: int, module: nn.Module, rows: Sequence[Row], placed: Sequence[Placed]) -> Word:
    """The word of a rank that can go on."""
    cut = {each.name for each in placed if {"fsdp", "hsdp"} & set(each.by)}
    named = list(module.named_parameters())
    return Word(
        rank=rank,
        error="",
        table=_digest(repr([(r.pattern, r.strategy, r.said, told_alike(r.options)) for r in rows])),
        names=tuple(name for name, _ in named),
        parameters=tuple(_parameter(p, values=name in cut) for name, p in named),
        buffers=tuple(digests_of(module).items()),
        generator=_digest(torch.get_rng_state().numpy().tobytes()) if any(p.is_meta for _, p in named) else 0,
        local_bytes=tuple(each.local_bytes for each in placed),
    )


def _parameter(p: nn.Parameter, *, values: bool) -> int:
    told = _digest(f"{tuple(p.shape)} {p.dtype} {p.requires_grad}")
    if not values or p.is_meta or isinstance(p, TorchDTensor):
        return told
    return told ^ digest_of(p)


def _digest(of: Any) -> int:
    return xxhash.xxh3_64_intdigest(of.encode() if isinstance(of, str) else of)


def agree(word: Word, stage: DeviceMesh) -> list[Word]:
    """The words of all ranks of the stage.

    Raises: ParallelError: a rank cannot go on, or the ranks do not mean the same; the same text on all.
    Cost: an all-gather of 16 bytes per parameter over each axis.
    """
    words = [word]
    for _, group in groups_above_one(stage):
        everybody: list[list[Word]] = [[] for _ in range(group.size())]
        dist.all_gather_object(everybody, words, group=group)
        words = [each for some in everybody for each in some]
    words.sort(key=lambda each: each.rank)
    failed = [each for each in words if each.error]
    if failed:
        alone = len(failed) < len(words)
        where = f"on rank {failed[0].rank}" + (f" and {len(failed) - 1} more" if failed[1:] else "")
        raise ParallelError(f"{failed[0].error}\n  ({where} only)" if alone else failed[0].error)
    for other in words[1:]:
        _refuse_difference(words[0], other)
    return words


def _refuse_difference(one: Word, other: Word) -> None:
    ranks = f"ranks {one.rank} and {other.rank}"
    text = ""
    if one.table != other.table:
        text = f"{ranks} have other tables; give every rank the same"
    elif one.names != other.names:
        name = next(iter(sorted(set(one.names) ^ set(other.names))), "the order of the parameters")
        text = f"{ranks} have other models: {name}"
    elif one.parameters != other.parameters:
        pairs = zip(one.names, one.parameters, other.parameters, strict=True)
        name = next(name for name, mine, theirs in pairs if mine != theirs)
        text = (
            f"{ranks} have another {name} (its shape, dtype or values), of which every rank would keep a "
            "part\n  fix: context.seed(seed) before the model is made, or load it on every rank"
        )
    elif one.buffers != other.buffers:
        differing = dict(sorted(set(one.buffers) ^ set(other.buffers)))
        text = (
            f"{ranks} have other buffers: {', '.join(differing)}\n"
            "  fix: make or load the model alike on every rank"
        )
    elif one.generator != other.generator:
        text = (
            f"the generators of {ranks} are in other states, from which weights are to be drawn\n"
            "  fix: context.seed(seed) before parallelize"
        )
    if text:
        raise ParallelError(f"parallelize: {text}; nothing was changed")
