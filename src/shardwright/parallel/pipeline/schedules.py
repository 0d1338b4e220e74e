"""The schedules of torch, by name, and which rank runs which stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.distributed import pipelining
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import RELEASE
from shardwright.errors import ParallelError
from shardwright.parallel.sequence_scope import find_scope
from shardwright.tensor.wrap import as_ours

LOOP, V = "loop", "v"
SINGLE: Mapping[str, Any] = MappingProxyType(
    {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
)
MULTI: Mapping[str, Any] = MappingProxyType(
    {
        "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
        "looped_bfs": pipelining.ScheduleLoopedBFS,
        "interleaved_zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    }
)
KNOWN = (*SINGLE, *MULTI)
_TAKE_APART = ("interleaved_zero_bubble",)  # a backward: gradients of what arrived first, of weights later


def rank_of_stage(stages: int, ranks: int) -> tuple[int, ...]:
    """The rank of the axis that runs each stage: in turn, so that each has as many.

    Raises: ParallelError: the stages do not share out evenly.
    """
    if stages < ranks or stages % ranks:
        raise ParallelError(
            f"parallelize_pipeline: {stages - 1} cuts make {stages} stages, and the axis has {ranks} ranks\n"
            f"  fix: give {ranks - 1} cuts, or {ranks * 2 - 1} for two stages on each rank; each stage needs "
            "a module of its own to begin with"
        )
    return tuple(stage % ranks for stage in range(stages))


def named_schedule(name: str | None, stages: int, ranks: int) -> str:
    """The name that was given; by default one-forward-one-backward."""
    return ("1f1b" if stages == ranks else "interleaved_1f1b") if name is None else name


def check_schedule(name: str | None, stages: int, ranks: int, count: int) -> str:
    """The schedule that is meant.

    Raises: ParallelError: an unknown one, one for another number of stages on each rank, or for more
        micro-batches than `count`.
    """
    name = named_schedule(name, stages, ranks)
    if type(count) is not int or count < 1:
        raise ParallelError(f"pipeline: micro_batches={count!r} is no number of parts of a batch")
    if name == "1f1b" and count < stages:
        raise ParallelError(
            f"pipeline: schedule '1f1b' needs as many micro-batches as stages, {stages}, and micro_batches="
            f"{count}\n  fix: more micro-batches, or schedule='gpipe'"
        )
    if name not in KNOWN:
        raise ParallelError(f"pipeline: schedule={name!r}; there are {', '.join(map(repr, KNOWN))}")
    if name in _TAKE_APART and RELEASE < (2, 13):
        raise ParallelError(
            f"pipeline: schedule {name!r} asks for torch 2.13 or later, which leaves out no gradient of a "
            "weight where it takes a backward apart\n  fix: schedule='interleaved_1f1b'"
        )
    if name in SINGLE and stages != ranks:
        raise ParallelError(
            f"pipeline: schedule {name!r} runs one stage on each rank, and there are {stages} stages on "
            f"{ranks} ranks\n  fix: {' or '.join(map(repr, MULTI))}, or {ranks - 1} cuts"
        )
    return name


def refuse_taken_apart(name: str, model: nn.Module) -> None:
    """Raise ParallelError where a schedule takes backwards apart that only run as a whole.

    torch's second half writes gradients of weights without the hooks that reduce them, and it follows no
    tensor that a rank has a part of.
    """
    if name in _TAKE_APART and any(map(_is_sharded, model.modules())):
        raise ParallelError(
            f"pipeline: schedule {name!r} takes a backward apart, which goes with parameters that a rank has "
            "whole and that have no hooks, and this model is sharded (fsdp, tensor, context), or has some\n"
            "  fix: schedule='interleaved_1f1b'; or replicate the stages over the data ranks"
        )


def _is_sharded(module: nn.Module) -> bool:
    if isinstance(module, FSDPModule) or find_scope(module) is not None:
        return True
    if any(p._post_accumulate_grad_hooks for p in module.parameters(recurse=False)):
        return True
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    specs = [as_ours(x)._spec for x in own if isinstance(x, TorchDTensor)]
    return any(p.is_partition for spec in specs for p in spec.layout.placements)


def make_schedule(
    name: str, stages: Sequence[Any], count: int, loss: Callable[[Any, Any], Any] | None
) -> Any:
    """A schedule object of torch: gradients are sums over micro-batches, never averages.

    Raises: ParallelError: what the schedule says of this number of micro-batches.
    """
    try:
        if name in SINGLE:
            return SINGLE[name](stages[0], count, loss_fn=loss, scale_grads=False)
        return MULTI[name](list(stages), count, loss_fn=loss, scale_grads=False)
    except ValueError as error:
        raise ParallelError(f"pipeline: schedule {name!r} with {count} micro-batches: {error}") from None
