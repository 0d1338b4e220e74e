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
import torch.distributed as dist
from torch.testing._internal.common_methods_invocations import op_db

import shardwright as sw
from shardwright.layout.order import OrderedPlacements
from shardwright.testing.meshes import rank_mesh
from tests.placement.user_placements import Band, Checkerboard, PermutedRows

# fmt: off
NAMES = (
    "__getitem__", "H", "T", "adjoint", "alias_copy", "as_strided", "as_strided_copy",
    "as_strided_scatter", "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors", "broadcast_to",
    "chunk", "conj", "contiguous", "diagonal", "diagonal_copy", "diagonal_scatter", "dsplit", "expand",
    "expand_as", "expand_copy", "flatten", "hsplit", "imag", "linalg.diagonal", "mH", "mT", "movedim",
    "narrow", "narrow_copy", "permute", "permute_copy", "ravel", "real", "reshape", "reshape_as",
    "resolve_conj", "resolve_neg", "select", "select_scatter", "slice", "slice_scatter", "split",
    "split_with_sizes", "split_with_sizes_copy", "squeeze", "squeeze_copy", "t", "t_copy",
    "tensor_split", "transpose", "transpose_copy", "unbind", "unbind_copy", "unflatten", "unfold",
    "unfold_copy", "unsqueeze", "unsqueeze_copy", "view", "view_as", "view_as_complex", "view_as_real",
    "view_copy", "vsplit",
)
# fmt: on
MESHES = {2: ((2,), ("tp",)), 3: ((3,), ("tp",)), 4: ((2, 2), ("dp", "tp")), 6: ((2, 3), ("dp", "tp"))}


def mesh():
    """The mesh of this world."""
    return rank_mesh(*MESHES[dist.get_world_size()])


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


def place(x, placements, order):
    """The leaf of these placements, made without communication."""
    stride = tuple(x.stride())
    layout = sw.Layout(mesh(), placements, tuple(x.shape), dtype=x.dtype, stride=stride, order=order)
    local = layout.split(x, tuple(mesh().get_coordinate())).clone()
    given = OrderedPlacements(placements, order)
    return sw.DTensor.from_local(local, mesh(), given, shape=x.shape, stride=x.stride())


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


def check(info, sample, placements, order):
    """One case: values, gradients, aliasing; no byte moves, forward, backward or in place."""
    tree_map = torch.utils._pytree.tree_map
    x = sample.input[0] if isinstance(sample.input, list | tuple) else sample.input
    if not isinstance(x, torch.Tensor):
        return
    rest = tree_map(_plain, (sample.args, sample.kwargs))
    others = isinstance(sample.input, list | tuple)

    def call(first, wrapped):
        def given_as(v):
            whole = wrapped and isinstance(v, torch.Tensor)
            return place(v, [sw.Replicate()] * mesh().ndim, None) if whole else v

        args, kwargs = tree_map(given_as, rest)
        given = [first] if others else first
        return info.op(given, *args, **kwargs)

    differentiable = x.is_floating_point() or x.is_complex()
    plain = _plain(x).requires_grad_(differentiable)
    placed = place(_plain(x), placements, order).detach().requires_grad_(differentiable)
    wanted = _tensors(call(plain, False))
    if info.name == "__getitem__" and differentiable and not all(w._is_view() for w in wanted):
        return  # a gather by an index tensor, which is no view
    found = Found()
    with found.watched("forward"):
        got = _tensors(call(placed, True))
    assert len(got) == len(wanted)
    for g, w in zip(got, wanted, strict=True):
        found.compare("value", g, w)
    # torch's gradient of as_strided scatters into a storage of its own, which is gathered.
    if differentiable and all(w.requires_grad for w in wanted) and not info.name.startswith("as_strided"):
        weights = [torch.cos(torch.arange(w.numel())).reshape(w.shape).to(w.dtype) for w in wanted]
        (grad,) = torch.autograd.grad(wanted, [plain], weights, allow_unused=True)
        pairs = zip(weights, got, strict=True)
        given = [place(v, g.layout.placements, g.layout.order_names) for v, g in pairs]
        with found.watched("backward"):
            (made,) = torch.autograd.grad(got, [placed], given, allow_unused=True)
        if grad is not None:
            found.compare("gradient", made, grad)
    if any(w._is_view() for w in wanted) and not info.name.endswith("scatter"):
        _check_writes(found, call, x, placements, order)
    found.tell()


class MovedError(AssertionError):
    """A view communicated."""


class Found:
    """What was seen of one case. It is told at the end, so that no rank leaves the others alone."""

    def __init__(self):
        self.pairs, self.sent, self.told = [], 0, []

    @contextlib.contextmanager
    def watched(self, what):
        """Count the bytes of a block."""
        with sw.trace() as t:
            yield
        self.sent += t.bytes
        self.told += [f"{what}: {row}" for row in t.decisions]

    def compare(self, what, got, wanted):
        """Gather one value."""
        whole = got.full_tensor() if isinstance(got, sw.DTensor) else got
        self.pairs.append((what, whole.detach(), wanted.detach().clone()))

    def tell(self):
        """Raise for a wrong value or a byte."""
        for what, got, wanted in self.pairs:
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6, msg=lambda m, w=what: f"{w}: {m}")
        if self.sent:
            raise MovedError(f"{self.sent} bytes: {self.told[:3]}")


def _check_writes(found, call, x, placements, order):
    """A write into each result reaches the base, one into the base reaches the results; nothing moves."""
    plain, placed = _plain(x), place(_plain(x), placements, order)
    with torch.no_grad():
        with found.watched("writes"):
            wanted, got = _tensors(call(plain, False)), _tensors(call(placed, True))
            for w, g in zip(wanted, got, strict=True):
                if not _overlaps(w):  # torch says nothing of a write to one element in two places
                    w.mul_(2)
                    g.mul_(2)
            plain.add_(1)
            placed.add_(1)
            fresh, fresh_base = [g * 1 for g in got], placed * 1
        found.compare("base after writes", fresh_base, plain)
        for w, g in zip(wanted, fresh, strict=True):
            found.compare("result after writes", g, w)


def _overlaps(x):
    """Is an element of memory at two places of a tensor?"""
    places = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(x.shape, x.stride(), strict=True):
        places = (places.unsqueeze(-1) + torch.arange(size) * stride).reshape(-1)
    return len(places.unique()) < x.numel()


def run(names, count, pairs, limit=None):
    """All cases of these ops: (counts, failures as text)."""
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    failures = []
    for info in infos(names):
        label = f"{info.name}{'/' + info.variant_test_name if info.variant_test_name else ''}"
        for index, sample in enumerate(samples(info, count)):
            x = sample.input[0] if isinstance(sample.input, list | tuple) and sample.input else sample.input
            if not isinstance(x, torch.Tensor) or prod(x.shape) > 1500:
                continue
            for placements, order in layouts(x, index, pairs):
                counts["cases"] += 1
                case = f"{label} {tuple(x.shape)} {sample.args} {sample.kwargs} {placements} {order}"
                try:
                    check(info, sample, placements, order)
                except MovedError as error:
                    counts["moved"] += 1
                    failures.append(f"{case}: {error}")
                except Exception as error:  # noqa: BLE001 - every case is tried, all failures are told
                    counts["errors"] += 1
                    text = " / ".join(str(error).strip().splitlines()[:3])[:300]
                    failures.append(f"{case}: {type(error).__name__}: {text}")
                if limit is not None and len(failures) >= limit:
                    return counts, failures
    return counts, failures
