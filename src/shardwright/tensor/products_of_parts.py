"""`F.linear` of rows that are still being gathered: each rank's rows are multiplied as they arrive.

The rows of this rank are there from the beginning, so on n ranks up to (n - 1)/n of the product is computed
while others travel. The gradients are those of the whole product: by then all rows are here.

Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep
Learning Models", ASPLOS 2023, section 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.async_result import Later
from shardwright.compat import UNSEEN, nn_functions
from shardwright.errors import RuleError
from shardwright.layout.layout import Layout, all_hold_some
from shardwright.remember import remembered
from shardwright.rules.call import Args, Kwargs
from shardwright.tensor.autograd import apply
from shardwright.tensor.dispatch.one_node import NODES, Linear, is_simple
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.explicit_mode import explicit
from shardwright.tensor.spec import Spec, Token
from shardwright.tensor.wrap import wrap

# Of each rank the stretches of a dim that it has: where they begin, and how long they are.
Stretches = Mapping[int, Sequence[tuple[int, int]]]
_linear = nn_functions.linear


@remembered(1024)
def stretches_of(source: Layout, target: Layout, coords: tuple[int, ...]) -> tuple[int, Stretches] | None:
    """The dim of which each rank of a gather sends stretches to these coords; None: not so simple a move."""
    if source.pending_axes or target.pending_axes or source.mesh_shape != target.mesh_shape:
        return None
    whole, cut = target.region(coords).boxes, set[int]()
    of_ranks: dict[int, list[tuple[Sequence[int], Sequence[int]]]] = {}
    if len(whole) != 1:
        return None
    (all_of_it,) = whole
    for rank in source.ranks:
        at = source.coords_of(rank)
        if target.region(at).boxes != whole:
            continue
        part = source.region(at).boxes
        cut.update(d for box in part for d, size in enumerate(box.size) if size != all_of_it.size[d])
        of_ranks[rank] = [(box.offset, box.size) for box in part]
    if len(cut) != 1:
        return None
    (dim,) = cut
    return dim, {
        rank: [(offset[dim] - all_of_it.offset[dim], size[dim]) for offset, size in boxes]
        for rank, boxes in of_ranks.items()
    }


def linear_of_parts(stretches: tuple[int, Stretches], later: Later, args: Args, kwargs: Kwargs) -> Any:
    """`F.linear` of an operand that is under way; NotImplemented: it is not to be taken apart.

    Args: later: the local tensor of the operand, of which ranks have these stretches of a dim.
    """
    x, weight, bias = NODES[_linear].in_order(args, kwargs)
    given = [weight] if bias is None else [weight, bias]
    dim, of_ranks = stretches
    is_product = all(_is_beside(each, x) for each in given) and weight.dim() == 2 and dim + 1 < x.dim()
    if not is_product or not is_simple(x) or any(seen() for seen in UNSEEN):
        return NotImplemented
    spec = _result(*(each._spec.token for each in (x, *given)))
    if spec is None:
        return NotImplemented
    return apply(_LinearOfParts, spec, x, weight, bias, (dim, of_ranks, later))


def _is_beside(weight: Any, x: DTensor) -> bool:
    return type(weight) is DTensor and weight.device_mesh == x.device_mesh and is_simple(weight)


class _LinearOfParts(torch.autograd.Function):
    """Forward in parts; backward as a whole."""

    @staticmethod
    def forward(
        ctx: Any,
        spec: Spec,
        x: DTensor,
        weight: DTensor,
        bias: DTensor | None,
        arriving: tuple[int, Stretches, Later],
    ) -> DTensor:
        """The product first: what is saved of `x` is there by then."""
        local = None if bias is None else bias._local_tensor
        out = _product(arriving, weight._local_tensor, local)
        Linear.keep(ctx, x, weight, bias)
        return wrap(out, spec)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """That of the whole product."""
        found: tuple[Tensor | None, ...] = Linear.backward(ctx, grad)
        return (*found, None)


def _product(arriving: tuple[int, Stretches, Later], weight: Tensor, bias: Tensor | None) -> Tensor:
    """The local product of all rows, in the order in which they arrive."""
    dim, of_ranks, later = arriving
    left, parts = dict(of_ranks), _as_they_come(later, of_ranks)
    first = next(parts)
    out = first[1].new_empty((*first[1].shape[:-1], weight.shape[0]))
    for rank, x in chain([first], parts):
        for start, length in left.pop(rank, ()):
            _multiply(x.narrow(dim, start, length), weight, bias, out.narrow(dim, start, length))
    return out


def _as_they_come(later: Later, ranks: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
    """The ranks whose rows are there, one after another; at the end those that nobody told apart."""
    yield from later.parts()
    whole = later.wait()
    yield from ((rank, whole) for rank in ranks)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if prod(x.shape[:-2]) != 1 or not out.is_contiguous():
        out.copy_(_linear(x, weight, bias))
        return
    matrices = x.reshape(-1, x.shape[-1]), weight.t()
    flat = out.view(-1, out.shape[-1])
    if bias is None:
        torch.mm(*matrices, out=flat)
    else:
        torch.addmm(bias, *matrices, out=flat)


@remembered(1024)
def _result(*tokens: Token) -> Spec | None:
    """The spec of the product of all rows; None where that would send, or has rows in parts."""
    layouts = [token.spec.layout for token in tokens]
    if not all(map(all_hold_some, layouts)):  # as other nodes
        return None
    blanks = [_blank(token.spec) for token in tokens]
    try:
        with torch.no_grad(), explicit():
            out: Any = _linear(*blanks)
    except (RuleError, RuntimeError):  # which the call itself raises in its own words
        return None
    same = out._local_tensor.shape[:-1] == blanks[0]._local_tensor.shape[:-1]
    fits = same and not out._spec.pending and all_hold_some(out._spec.layout)
    return out._spec if fits else None


def _blank(spec: Spec) -> DTensor:
    shape = spec.layout.local_shape(spec.coords or (0,) * len(spec.layout.sizes))
    return wrap(torch.empty(shape, dtype=spec.layout.dtype, device="meta"), spec)
