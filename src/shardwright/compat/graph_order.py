"""What a graph that is traced keeps of what ranks send: each call, once, in its phase, in one order.

torch takes the graphs of all ranks to be alike: it drops what a rank's results are not made of, merges equal
calls, parts forward and backward by what the rank saves and needs, and orders calls that do not read each
other as it likes. A rank that holds nothing of a tensor, or less than its peers, has another graph. What it
left out or sent at another time its peers would wait for, or take what is sent next in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy

from shardwright.compat import current_graph_task_id, get_proxy_mode, records_a_graph
from shardwright.remember import memo

_TAG = "partitioner_tag"  # read by torch._functorch.partitioners
_library = torch.library.Library("shardwright", "FRAGMENT")
_library.define("made_of(Tensor out, Tensor[] sources) -> Tensor")
# An op of its own: a decomposition of torch's, `cat` with parts without elements say, reads what matters.
_library.impl("made_of", lambda out, _: out.clone(), "CompositeExplicitAutograd")


def nothing_of(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor without elements; in a graph it is made of `x`, see `made_of`."""
    if not records_a_graph():
        return x.new_empty(tuple(shape))
    row = x if x.dim() else x.unsqueeze(0)
    return row.narrow(0, 0, 0).view(tuple(shape))  # views that torch follows where they are written


def made_of(out: Tensor, *sources: Tensor) -> Tensor:
    """`out`, for which this rank reads nothing of the sources; in a graph it is made of them all the same."""
    if not records_a_graph():
        return out
    made: Tensor = torch.ops.shardwright.made_of(out, list(sources))
    return made


def noted_as_written(x: Tensor) -> None:
    """In a graph: what is written where this rank holds nothing; who reads it may want its gradient."""
    if records_a_graph():
        x.copy_(x.clone())


class _Phase:
    """What was sent in one phase of one graph. unlike: since then each call follows the one before."""

    def __init__(self, *, backward: bool) -> None:
        self.backward, self.unlike = backward, False
        self.last: list[Tensor] = []


# By graph: of the forward, of the backward.
_phases: WeakKeyDictionary[Any, list[_Phase]] = memo("phases of graphs", WeakKeyDictionary())


def _traced() -> _Phase | None:
    """The phase that is traced now; None: no graph is recorded, or Dynamo reads this very line."""
    mode = None if torch.compiler.is_dynamo_compiling() else get_proxy_mode()
    if mode is None:
        return None
    graph = mode.tracer.graph
    phases = _phases.setdefault(graph, [])
    if not phases:
        phases.append(_Phase(backward=False))
    if current_graph_task_id() != -1 and not phases[-1].backward:
        _keep_forwards(graph)
        phases.append(_Phase(backward=True))
    return phases[-1]


def part_ways() -> None:
    """What is sent next may be another call to other ranks: from here on, calls keep their order."""
    phase = _traced()
    if phase is not None:
        phase.unlike = True


def kept(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """What a functional collective makes of `x`, waited for: once in this phase of what is traced.

    Where ranks parted ways it is made of what was sent before, which thus comes before it, or of new memory:
    equal calls are one, and those of a rank may be equal where those of a peer are not.
    """
    phase = _traced()
    if phase is None:
        return _waited(call(x))
    with _in_backward() if phase.backward else nullcontext():
        if phase.unlike:
            x = made_of(x, *(phase.last or [torch.empty(0, dtype=x.dtype, device=x.device)]))
        result = _waited(call(x))
    phase.last = [result] if phase.unlike else [*phase.last, result]
    return result


def _waited(sent: Tensor) -> Tensor:
    """What was sent, once it is there; on the CPU behind an op of its own, which costs a copy.

    Inductor's C++ code forgets that a kernel reads after the wait where it fuses it with one of other sizes,
    and computes with what has not arrived.
    """
    result: Tensor = torch.ops._c10d_functional.wait_tensor(sent)
    return made_of(result) if result.device.type == "cpu" else result


@contextmanager
def _in_backward() -> Iterator[None]:
    before = traceback.current_meta.get(_TAG)
    traceback.current_meta[_TAG] = "must_be_in_backward"
    try:
        yield
    finally:
        traceback.current_meta[_TAG] = before


def _keep_forwards(graph: torch.fx.Graph) -> None:
    """Of those of the forward it can be said only now: torch labels all nodes anew when a forward ends."""
    for node in graph.nodes:
        sends = getattr(node.target, "namespace", "") == "_c10d_functional"
        if sends and node.meta.get(_TAG) == "is_forward":
            node.meta[_TAG] = "must_be_in_forward"
            if "recompute" in node.meta and node.target is torch.ops._c10d_functional.wait_tensor.default:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # a checkpoint would send it again
