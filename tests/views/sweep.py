"""Every view of torch's operator database under every partition: values, gradients, aliasing, bytes.

Runs on every rank of a world; the reference is plain torch on the full tensor.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections import Counter
from itertools import islice, product
from math import prod

import torch

import shardwright as sw
from shardwright.errors import ShardwrightError
from shardwright.tensor.views.elements import tears
from tests.placement.user_placements import Band, Checkerboard, PermutedRows
from tests.torch_samples import op_db
from tests.views.placed import compare, mesh, place

# fmt: off
NAMES = (
    "__getitem__", "H", "T", "alias_copy", "as_strided", "as_strided_copy",
    "as_strided_scatter", "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors", "broadcast_to",
    "chunk", "conj", "contiguous", "diagonal", "diagonal_copy", "diagonal_scatter", "dsplit", "expand",
    "expand_as", "expand_copy", "flatten", "hsplit", "imag", "linalg.diagonal", "mH", "mT", "meshgrid",
    "movedim", "narrow", "narrow_copy", "permute", "permute_copy", "positive", "ravel", "real", "reshape",
    "reshape_as", "resolve_conj", "resolve_neg", "select", "select_scatter", "slice", "slice_scatter",
    "split", "split_with_sizes", "split_with_sizes_copy", "squeeze", "squeeze_copy", "t", "t_copy",
    "tensor_split", "transpose", "transpose_copy", "unbind", "unbind_copy", "unflatten", "unfold",
    "unfold_copy", "unsafe_chunk", "unsafe_split", "unsqueeze", "unsqueeze_copy", "view",
    "view_as", "view_as_complex", "view_as_real", "view_copy", "vsplit",
)
# fmt: on
def infos(names=()):
    """The OpInfos of views, or those of these names."""
    wanted = set(names or NAMES)
    return [info for info in op_db if info.name in wanted]


def partitions(shape, n):
    """Every kind of partition that a tensor of this shape can have on an axis of this size."""
    ndim = len(shape)
    units = tuple(range(1, n + 1))
    found = [sw.Owner(0), sw.Owner(n - 1)]
    for dim in range(ndim):
        found += [
            sw.Shard(dim),
            sw.Interleaved(dim, 2),
            sw.Interleaved(dim, 3),
            sw.ZigZag(dim),
            sw.BlockCyclic(dim, 1),
            sw.BlockCyclic(dim, 2),
            sw.Ragged(units, (dim,)),
        ]
    found += [sw.Ragged(units, (dim, dim + 1)) for dim in range(ndim - 1)]
    if ndim > 2:
        found.append(sw.Ragged(units, (0, ndim - 1)))
    if ndim and shape[0]:
        found.append(PermutedRows(3))
    if ndim == 2:
        found += [Band(), Checkerboard(2)]
    return found


def layouts(x, seed, pairs):
    """Every partition on one axis; on two a choice of pairs in both orders."""
    sizes = tuple(mesh().shape)
    shape = tuple(x.shape)
    if len(sizes) == 1:
        return [((p,), None) for p in partitions(shape, sizes[0])]
    chosen = list(product(*(partitions(shape, n) for n in sizes)))
    generator = random.Random(seed)
    same = [(p, p) for p in partitions(shape, sizes[0]) if sizes[0] == sizes[1] and p.cut_dims(shape, 2)]
    few = same[:: max(len(same) // pairs, 1)] + generator.sample(chosen, min(pairs, len(chosen)))
    return [(pair, generator.choice([("dp", "tp"), ("tp", "dp")])) for pair in few]


def samples(info, count):
    """The first inputs of an OpInfo whose tensors are one DTensor's worth."""
    dtype = torch.complex64 if info.name in {"imag", "view_as_real", "real", "conj"} else torch.float32
    if dtype not in info.supported_dtypes("cpu"):
        dtype = next(iter(info.supported_dtypes("cpu")))
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield from islice(info.sample_inputs("cpu", dtype, requires_grad=False), count)


def _tensors(out):
    return [v for v in torch.utils._pytree.tree_leaves(out) if isinstance(v, torch.Tensor)]


def _plain(value):
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


class MovedError(AssertionError):
    """A view communicated: so many bytes, and why."""


class OutsideError(Exception):
    """The single-device op raises too: the sample is a part of a memory that a tensor alone has not."""


def check(info, sample, placements, order):
    """One case: values, gradients, aliasing; no byte moves, forward, backward or in place.

    Every rank compares its own part, so that a rank that fails leaves no other one waiting. Returns: whether
    a cut tears complex numbers, which then move.
    """
    case = Case(info, sample, placements, order)
    case.values_and_gradients()
    if case.writable:
        case.writes()
    if case.sent and not case.torn:
        raise MovedError(case.sent, case.told[:3])
    return case.torn


class Case:
    """One sample of an operator under placements of its first tensors."""

    def __init__(self, info, sample, placements, order):
        self.info, self.sample, self.placements, self.order = info, sample, placements, order
        self.sent, self.told, self.writable = 0, [], False
        self.torn = info.name == "view_as_complex" and tears(
            sw.layout_of(place(sample.input, placements, order))
        )

    def call(self, first, wrapped):
        """The op on the first tensors; other tensors whole on every rank."""

        def given_as(value):
            value = _plain(value)
            whole = wrapped and isinstance(value, torch.Tensor)
            return place(value, [sw.Replicate()] * mesh().ndim, None) if whole else value

        args, kwargs = torch.utils._pytree.tree_map(given_as, (self.sample.args, self.sample.kwargs))
        return self.info.op(
            first if isinstance(self.sample.input, torch.Tensor) else [*first], *args, **kwargs
        )

    def firsts(self, *, wrapped, differentiable):
        """The first tensors, plain or placed: one, or those of a list."""

        def leaf(x):
            made = place(_plain(x), self.placements, self.order).detach() if wrapped else _plain(x)
            return made.requires_grad_(differentiable)

        return torch.utils._pytree.tree_map(leaf, self.sample.input)

    def values_and_gradients(self):
        """The result is torch's, and so is the gradient."""
        x = next(iter(_tensors(self.sample.input)))
        differentiable = x.is_floating_point() or x.is_complex()
        plain = self.firsts(wrapped=False, differentiable=differentiable)
        placed = self.firsts(wrapped=True, differentiable=differentiable)
        try:
            wanted = _tensors(self.call(plain, wrapped=False))
        except RuntimeError as error:
            raise OutsideError from error
        if self.info.name == "__getitem__" and differentiable and not all(w._is_view() for w in wanted):
            return  # a gather by an index tensor, which is no view
        self.writable = any(w._is_view() for w in wanted) and not self.info.name.endswith("scatter")
        with self.watched("forward"):
            got = _tensors(self.call(placed, wrapped=True))
        assert len(got) == len(wanted), f"{len(got)} results for {len(wanted)}"
        for g, w in zip(got, wanted, strict=True):
            compare("value", g, w)
        if differentiable and all(w.requires_grad for w in wanted):
            self._gradients(_tensors(plain), _tensors(placed), wanted, got)

    def _gradients(self, plain, placed, wanted, got):
        weights = [torch.cos(torch.arange(w.numel())).reshape(w.shape).to(w.dtype) for w in wanted]
        grads = torch.autograd.grad(wanted, plain, weights, allow_unused=True)
        given = [
            place(v, sw.layout_of(g).placements, sw.layout_of(g).order_names)
            for v, g in zip(weights, got, strict=True)
        ]
        with self.watched("backward"):
            made = torch.autograd.grad(got, placed, given, allow_unused=True)
        for m, grad in zip(made, grads, strict=True):
            if grad is not None:
                compare("gradient", m, grad)

    def writes(self):
        """A write into each result reaches the base, one into the base reaches the results."""
        plain = self.firsts(wrapped=False, differentiable=False)
        placed = self.firsts(wrapped=True, differentiable=False)
        with torch.no_grad(), self.watched("writes"):
            wanted = _tensors(self.call(plain, wrapped=False))
            got = _tensors(self.call(placed, wrapped=True))
            for w, g in zip(wanted, got, strict=True):
                if not _overlaps(w):  # torch says nothing of a write to one element in two places
                    w.mul_(2)
                    g.mul_(2)
            for w, g in zip(_tensors(plain), _tensors(placed), strict=True):
                w.add_(1)
                g.add_(1)
            fresh, fresh_base = [g * 1 for g in got], [g * 1 for g in _tensors(placed)]
        for w, g in zip(_tensors(plain), fresh_base, strict=True):
            compare("base after writes", g, w)
        for w, g in zip(wanted, fresh, strict=True):
            compare("result after writes", g, w)

    @contextlib.contextmanager
    def watched(self, what):
        """Count the bytes of a block."""
        with sw.trace() as t:
            yield
        self.sent += t.bytes
        self.told += [f"{what}: {row}" for row in t.decisions]


def _overlaps(x):
    """Is an element of memory at two places of a tensor?"""
    places = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(x.shape, x.stride(), strict=True):
        places = (places.unsqueeze(-1) + torch.arange(size) * stride).reshape(-1)
    return len(places.unique()) < x.numel()


def run(names, count, pairs, seed=0):
    """All cases of these ops: (counts, failures as text).

    Counted: "cases"; apart from them those where a cut tears complex numbers ("torn": the value is right, and
    moves); those that "moved", and the "bytes" that this rank sent; "errors".
    """
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    failures = []
    for info in infos(names):
        label = f"{info.name}{'/' + info.variant_test_name if info.variant_test_name else ''}"
        for index, sample in enumerate(samples(info, count)):
            firsts = _tensors(sample.input)
            if not firsts or prod(firsts[0].shape) > 10_000:
                continue
            for placements, order in layouts(firsts[0], seed * 1000 + index, pairs):
                if not fits(placements, order, firsts[1:]):
                    continue
                case = f"{label} {tuple(firsts[0].shape)} {sample.args} {sample.kwargs} {placements} {order}"
                try:
                    counts["torn" if check(info, sample, placements, order) else "cases"] += 1
                    continue
                except OutsideError:
                    break
                except MovedError as error:
                    counts["moved"] += 1
                    counts["bytes"] += error.args[0]
                    failures.append(f"{case}: {error.args[0]} bytes: {error.args[1]}")
                except Exception as error:  # noqa: BLE001 - every case is tried, all failures are told
                    counts["errors"] += 1
                    text = " / ".join(str(error).strip().splitlines()[:3])[:300]
                    failures.append(f"{case}: {type(error).__name__}: {text}")
                counts["cases"] += 1
    return counts, failures


def fits(placements, order, tensors):
    """Whether all these tensors can have the placements."""
    with contextlib.suppress(ShardwrightError, IndexError):
        return all(place(_plain(x), placements, order) is not None for x in tensors)
    return False
