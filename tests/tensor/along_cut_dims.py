"""A table of ops that need a whole dim, run where that dim is cut, beside plain torch: value and gradient.

`python -m tests.tensor.along_cut_dims [NAME ...]` runs the whole table on worlds 2, 3, 4 and (2, 2), and with
axes of one coord; the tests run a sample of it.
"""

import contextlib
import itertools
import random
import sys
import traceback
from dataclasses import dataclass

import torch
from torch.nn import functional

import shardwright as sw
from shardwright.errors import PlacementError
from shardwright.rules.algorithms.algorithm import Chosen
from shardwright.rules.registry import registry
from shardwright.tensor.dispatch.ways import algorithm as ways
from shardwright.testing import forget, rank_mesh

ROWS, LONG = 5, 11


def values(*shape, seed=0, dtype=torch.float32):
    """The same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def special(*shape):
    """Values with ties, -inf, a row of -inf, NaN."""
    x = values(*shape).mul(2).round() / 2
    x[0, 1:4] = -torch.inf
    x[1] = -torch.inf
    x[2, 7] = torch.nan
    x[3, 2] = torch.inf
    return x


def integers(high, *shape, seed=0):
    """Random indices."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Descending(sw.Partition):
    """Coord i of n holds a run of a dim, the last index of it first: also where it is the only coord."""

    dim: int

    def validate(self, shape, n):
        """It cuts a dim that the tensor has."""
        if not -len(shape) <= self.dim < len(shape):
            raise PlacementError(f"there is no dim {self.dim}")

    def region(self, shape, n, coord):
        """One box per index, and per index of the dims before."""
        low, high = (i * shape[self.dim] // n for i in (coord, coord + 1))
        before, after = shape[: self.dim], shape[self.dim + 1 :]
        cells = itertools.product(*map(range, before), range(high - 1, low - 1, -1))
        ones = (1,) * (len(before) + 1)
        boxes = [sw.Box((*cell, *[0] * len(after)), (*ones, *after)) for cell in cells]
        return sw.Region(boxes, (*before, high - low, *after))


def line_ways(n):
    """Partitions of one axis along dim 1, dim 0 and of elements."""
    ways = [sw.Shard(1), sw.Interleaved(1, 2), sw.ZigZag(1), sw.BlockCyclic(1, 2), sw.Owner(n - 1)]
    ways += [sw.Shard(0), sw.Ragged((*range(1, n + 1),), (1,)), sw.Ragged((0, *[1] * (n - 1)), (1,))]
    return [(way,) for way in ways]


def layouts(sizes):
    """Placements for a mesh of these sizes, for a tensor of two dims."""
    if 1 in sizes:
        return ways_of_one_coord(sizes)
    if len(sizes) == 1:
        return line_ways(sizes[0])
    return [
        (sw.Shard(1), sw.Shard(1)),
        (sw.Shard(0), sw.Shard(1)),
        (sw.Shard(1), sw.Shard(0)),
        (sw.ZigZag(1), sw.Shard(0)),
        (sw.Replicate(), sw.Interleaved(1, 2)),
        (sw.BlockCyclic(1, 2), sw.Ragged((1, 2), (1,))),
    ]


def ways_of_one_coord(sizes):
    """An axis of one coord that holds dim 1 in another order, beside what the other axis may do."""
    beside = (sw.Shard(1), sw.Shard(0), sw.Replicate(), Descending(1)) if len(sizes) > 1 else (None,)
    pairs = [tuple(Descending(1) if n == 1 else p for n in sizes) for p in beside]
    return [*pairs, tuple(Descending(0) if n == 1 else sw.Shard(1) for n in sizes)]


def run_case(name, sizes, placements):
    """One function on one layout of its first operand. Returns: what is wrong, or ''."""
    function, operands, gradient = CASES[name]
    mesh = rank_mesh(tuple(sizes))
    rest = [sw.Replicate()] * mesh.ndim
    wants = [gradient and x.is_floating_point() and x is not WEIGHT for x in operands]
    plain = [x.clone().requires_grad_(grad) for x, grad in zip(operands, wants, strict=True)]
    placed = [
        sw.distribute_tensor(x, mesh, placements if i == 0 else rest).requires_grad_(wants[i])
        for i, x in enumerate(operands)
    ]
    wanted, got = function(*plain), function(*placed)
    wanted, got = (v if isinstance(v, tuple | list) else (v,) for v in (wanted, got))
    assert len(wanted) == len(got)
    totals = [0.0, 0.0]
    for w, g in zip(wanted, got, strict=True):
        assert g.shape == w.shape, (g.shape, w.shape)
        assert g.dtype == w.dtype, (g.dtype, w.dtype)
        close(g.full_tensor(), w)
        if gradient and w.requires_grad:
            weight = torch.cos(torch.arange(w.numel())).reshape(w.shape).to(w.dtype)
            totals[0] = totals[0] + (w * weight).sum()
            totals[1] = totals[1] + (g * sw.distribute_tensor(weight, mesh, rest)).sum()
    if gradient and isinstance(totals[0], torch.Tensor):
        totals[0].backward()
        totals[1].backward()
        for x, p in zip(placed, plain, strict=True):
            if p.grad is not None:
                assert x.grad is not None
                close(x.grad.full_tensor(), p.grad)


def close(got, wanted):
    """Bit-near."""
    half = wanted.dtype in {torch.float16, torch.bfloat16}
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if half else {"rtol": 2e-5, "atol": 2e-5}
    torch.testing.assert_close(got, wanted, equal_nan=True, **tolerance)


@contextlib.contextmanager
def algorithms_always():
    """Every algorithm that applies is chosen, whatever it costs: small tensors test them too."""

    def first(call, layouts, decision):
        if not (decision.cost_bytes or decision.fallback or decision.rewrites):
            return None
        priced = [Chosen(a, a.cost(call, layouts)) for a in registry.algorithms_of(call.op)]
        return next((chosen for chosen in priced if chosen.bytes is not None), None)

    priced = ways.algorithm_for
    ways.algorithm_for = first
    forget()
    try:
        yield
    finally:
        ways.algorithm_for = priced
        forget()


def sweep(names, sizes, budget=None, seed=0, force=True):
    """Run (a sample of) the table on this world. Returns: failures, and which ops fell back."""
    with algorithms_always() if force else contextlib.nullcontext():
        return _sweep(names, sizes, budget, seed)


def _sweep(names, sizes, budget, seed):
    wrong = []
    pairs = [(name, way) for name in names for way in layouts(tuple(sizes))]
    if budget is not None:
        pairs = random.Random(seed).sample(pairs, min(budget, len(pairs)))
    for name, way in pairs:
        try:
            with sw.trace() as seen:
                run_case(name, sizes, way)
        except Exception as error:  # noqa: BLE001  a table of all failures
            lines = traceback.format_exc().strip().splitlines()
            where = [line.strip() for line in lines if "File" in line][-1]
            wrong.append(f"{name} {way}: {type(error).__name__} {str(error)[:600]} {where}")
            continue
        gathers = {f"{d.op}: {d.reason[:90]}" for d in seen.decisions if d.reason.startswith("fallback")}
        if gathers:
            wrong.append(f"{name} {way}: (fell back) {sorted(gathers)}")
    return wrong


def _loss(**kwargs):
    return lambda x, *rest: functional.cross_entropy(x, *rest, **kwargs)


TARGET = torch.tensor([3, 0, 10, 7, 5])
IGNORED = torch.tensor([3, -100, 10, -100, 5])
WEIGHT = values(LONG, seed=5).abs() + 0.1
X = values(ROWS, LONG)
PROBABILITIES = values(ROWS, LONG, seed=3).softmax(-1)

# name -> (function, operands, with gradient); the first operand is the one that is cut along dim 1
CASES = {
    "softmax": (lambda x: x.softmax(1), [X], True),
    "softmax of rows": (lambda x: x.softmax(0), [X], True),
    "softmax, 3-d": (lambda x: x.softmax(1), [values(3, LONG, 4)], True),
    "softmax, half": (lambda x: x.softmax(1), [X.bfloat16()], True),
    "softmax, half to float": (lambda x: x.softmax(1, dtype=torch.float32), [X.bfloat16()], True),
    "softmax, special": (lambda x: x.softmax(1), [special(ROWS, LONG)], False),
    "log_softmax": (lambda x: x.log_softmax(1), [X], True),
    "log_softmax, half": (lambda x: x.log_softmax(-1), [X.bfloat16()], True),
    "log_softmax, special": (lambda x: x.log_softmax(1), [special(ROWS, LONG)], False),
    "logsumexp": (lambda x: x.logsumexp(1), [X], True),
    "logsumexp, both dims": (lambda x: x.logsumexp((0, 1), keepdim=True), [X], True),
    "logsumexp, special": (lambda x: x.logsumexp(1), [special(ROWS, LONG)], False),
    "logsumexp of complex": (lambda x: torch.view_as_real(torch.complex(x, x.sin()).logsumexp(1)), [X], True),
    "logsumexp of integers": (lambda x: x.logsumexp(1), [integers(5, ROWS, LONG)], False),
    "softmin": (lambda x: functional.softmin(x, dim=1), [X], True),
    "cross entropy": (_loss(), [X, TARGET], True),
    "cross entropy, ignored": (_loss(), [X, IGNORED], True),
    "cross entropy, sum": (_loss(reduction="sum"), [X, IGNORED], True),
    "cross entropy, none": (_loss(reduction="none"), [X, IGNORED], True),
    "cross entropy, weights": (_loss(), [X, IGNORED, WEIGHT], True),
    "cross entropy, weights, none": (_loss(reduction="none"), [X, TARGET, WEIGHT], True),
    "cross entropy, smoothed": (_loss(label_smoothing=0.1), [X, IGNORED, WEIGHT], True),
    "cross entropy, smoothed sum": (_loss(label_smoothing=0.2, reduction="sum"), [X, TARGET], True),
    "cross entropy, probabilities": (_loss(), [X, PROBABILITIES], True),
    "cross entropy, probabilities and weights": (
        lambda x, p, w: functional.cross_entropy(x, p, w, label_smoothing=0.1),
        [X, PROBABILITIES, WEIGHT],
        True,
    ),
    "cross entropy, images": (_loss(), [values(2, LONG, 3, 2), integers(LONG, 2, 3, 2)], True),
    "cross entropy, half": (_loss(), [X.bfloat16(), TARGET], True),
    "nll": (functional.nll_loss, [X, TARGET], True),
    "kl_div": (
        lambda x, p: functional.kl_div(x.log_softmax(1), p, reduction="batchmean"),
        [X, PROBABILITIES],
        True,
    ),
    "gather": (lambda x, i: x.gather(1, i), [X, integers(LONG, ROWS, 3)], True),
    "gather many": (lambda x, i: x.gather(1, i), [X, integers(LONG, ROWS, 20)], True),
    "gather of bools": (lambda x, i: x.gather(1, i), [X > 0, integers(LONG, ROWS, 3)], False),
    "take_along_dim": (lambda x, i: torch.take_along_dim(x, i, 1), [X, integers(LONG, ROWS, 3)], True),
    "index_select": (lambda x, i: x.index_select(1, i), [X, integers(LONG, 4)], True),
    "index": (lambda x, i: x[:, i], [X, integers(LONG, 4)], True),
    "index from the end": (lambda x, i: x[:, i], [X, integers(LONG, 4) - LONG], True),
    "index twice": (lambda x, i, j: x[i, j], [X, integers(ROWS, 4), integers(LONG, 4)], True),
    "index table": (lambda x, i: x[:, i], [X, integers(LONG, 2, 2)], True),
    "scatter": (lambda x, i, s: x.scatter(1, i, s), [X, integers(LONG, ROWS, 1), values(ROWS, 1)], True),
    "scatter a value": (lambda x, i: x.scatter(1, i, 2.5), [X, integers(LONG, ROWS, 3)], True),
    "scatter_add": (
        lambda x, i, s: x.scatter_add(1, i, s),
        [X, integers(LONG, ROWS, 7), values(ROWS, 7)],
        True,
    ),
    "scatter_reduce": (
        lambda x, i, s: x.scatter_reduce(1, i, s, "amax"),
        [X, integers(LONG, ROWS, 7), values(ROWS, 7)],
        False,
    ),
    "index_add": (lambda x, i, s: x.index_add(1, i, s), [X, integers(LONG, 7), values(ROWS, 7)], True),
    "index_copy": (
        lambda x, i, s: x.index_copy(1, i, s),
        [X, torch.tensor([7, 0, 3]), values(ROWS, 3)],
        True,
    ),
    "index_fill": (lambda x, i: x.index_fill(1, i, 0.5), [X, torch.tensor([7, 0, 3])], True),
    "index_fill_": (lambda x, i: x.clone().index_fill_(1, i, 3.0), [X, torch.tensor([7, 0])], True),
    "index_put": (
        lambda x, i, j, s: x.index_put((i, j), s),
        [X, torch.tensor([0, 3]), torch.tensor([7, 10]), values(2)],
        True,
    ),
    "index_put, accumulated": (
        lambda x, i, s: torch.ops.aten.index_put(x, [None, i], s, True),
        [X, integers(LONG, 6), values(ROWS, 6)],
        True,
    ),
    "index_put_": (
        lambda x, i, s: torch.ops.aten.index_put_(x.clone(), [None, i], s),
        [X, torch.tensor([7, 0, 3]), values(ROWS, 3)],
        True,
    ),
    "embedding": (lambda w, i: functional.embedding(i, w), [values(LONG, 4), integers(LONG, 3, 2)], True),
    "embedding, padded": (
        lambda w, i: functional.embedding(i, w, padding_idx=2),
        [values(LONG, 4), torch.tensor([[2, 1], [0, 2], [10, 5]])],
        True,
    ),
    "embedding_renorm_": (
        lambda w, i: torch.embedding_renorm_(w.clone(), i, 0.5, 2.0),
        [values(LONG, 4), integers(LONG, 3, 2)],
        False,
    ),
    "layer_norm": (
        lambda x, w, b: functional.layer_norm(x, (LONG,), w, b),
        [X, values(LONG, seed=1), values(LONG, seed=2)],
        True,
    ),
    "layer_norm, no weights": (lambda x: functional.layer_norm(x, (LONG,)), [X], True),
    "layer_norm, two dims": (
        lambda x, w: functional.layer_norm(x, (LONG, 4), w),
        [values(3, LONG, 4), values(LONG, 4, seed=1)],
        True,
    ),
    "layer_norm, half": (
        lambda x, w: functional.layer_norm(x, (LONG,), w),
        [X.bfloat16(), values(LONG, seed=1).bfloat16()],
        False,
    ),
    "rms_norm": (lambda x, w: functional.rms_norm(x, (LONG,), w), [X, values(LONG, seed=1)], True),
    "group_norm": (
        lambda x, w, b: functional.group_norm(x, 3, w, b),
        [values(2, 12, 3, 2), values(12, seed=1), values(12, seed=2)],
        True,
    ),
    "group_norm, rows": (lambda x: functional.group_norm(x, 4), [values(5, 12)], True),
    "batch_norm": (
        lambda x, w, b: functional.batch_norm(x, None, None, w, b, training=True),
        [values(5, LONG, 3), values(LONG, seed=1), values(LONG, seed=2)],
        True,
    ),
    "batch_norm, eval": (
        lambda x, m, v, w: functional.batch_norm(x, m, v.abs() + 0.1, w),
        [values(5, LONG, 3), values(LONG, seed=1), values(LONG, seed=2), values(LONG, seed=3)],
        False,
    ),
    "instance_norm": (functional.instance_norm, [values(5, LONG, 3)], True),
    "var": (lambda x: x.var(1), [X], True),
    "var of all": (lambda x: x.var(), [X], True),
    "std_mean": (lambda x: torch.std_mean(x, 1, correction=0, keepdim=True), [X], True),
    "var_mean, half": (lambda x: torch.var_mean(x, 1), [X.bfloat16()], False),
    "mean": (lambda x: x.mean(1), [X], True),
    "normalize": (lambda x: functional.normalize(x, dim=1), [X], True),
    "cosine_similarity": (lambda x, y: functional.cosine_similarity(x, y, 1), [X, PROBABILITIES], True),
    "vector_norm 3": (lambda x: torch.linalg.vector_norm(x, 3, 1), [X], True),
    "vector_norm 0.5": (lambda x: torch.linalg.vector_norm(x, 0.5, (0, 1), keepdim=True), [X], False),
    "vector_norm inf": (lambda x: torch.linalg.vector_norm(x, torch.inf, 1), [X], False),
    "vector_norm 1": (lambda x: torch.linalg.vector_norm(x, 1, 1), [X], True),
    "matrix_norm": (torch.linalg.matrix_norm, [X], True),
    "matrix_norm 1": (lambda x: torch.linalg.matrix_norm(x, 1), [X], False),
    "argmax": (lambda x: x.argmax(1), [X], False),
    "argmax of all": (lambda x: x.argmax(), [X], False),
    "argmin of all": (lambda x: x.argmin(), [integers(3, ROWS, LONG)], False),
    "argmin, ties": (lambda x: x.argmin(1, keepdim=True), [integers(3, ROWS, LONG)], False),
    "argmax, special": (lambda x: x.argmax(1), [special(ROWS, LONG)], False),
    "argmin, special": (lambda x: x.argmin(1), [special(ROWS, LONG)], False),
    "argmax of floats with ties": (lambda x: x.argmax(1), [(X * 2).round()], False),
    "max along": (lambda x: tuple(x.max(1)), [X], True),
    "min along, integers": (lambda x: tuple(x.min(1, keepdim=True)), [integers(3, ROWS, LONG)], False),
    "max along, bools": (lambda x: tuple(x.max(1)), [X > 0.5], False),
    "max along, special": (lambda x: tuple(x.max(1)), [special(ROWS, LONG)], False),
    "max along, half": (lambda x: tuple(x.max(1)), [X.bfloat16()], False),
    "aminmax": (lambda x: tuple(torch.aminmax(x, dim=1)), [X], True),
    "aminmax of all": (lambda x: tuple(torch.aminmax(x)), [X], False),
    "topk": (lambda x: tuple(x.topk(3, 1)), [X], True),
    "topk, smallest": (lambda x: tuple(x.topk(2, 1, largest=False)), [X], True),
    "topk, most": (lambda x: tuple(x.topk(10, 1)), [X], True),
    "topk, none": (lambda x: tuple(x.topk(0, 1)), [X], True),
    "topk, half": (lambda x: x.topk(3, 1).values, [X.bfloat16()], False),
    "topk, special": (lambda x: x.topk(4, 1).values, [special(ROWS, LONG)], False),
    "kthvalue": (lambda x: tuple(x.kthvalue(4, 1)), [X], True),
    "kthvalue, kept": (lambda x: tuple(x.kthvalue(1, -1, keepdim=True)), [X], False),
    "cumsum": (lambda x: x.cumsum(1), [X], True),
    "cumsum of integers": (lambda x: x.cumsum(1), [integers(9, ROWS, LONG).int()], False),
    "cumsum, half": (lambda x: x.cumsum(1), [X.bfloat16()], False),
    "cumsum, dtype": (lambda x: x.cumsum(1, dtype=torch.float64), [X], False),
    "cumsum of bools": (lambda x: (x > 0).cumsum(-1), [X], False),
    "cumsum, special": (lambda x: x.cumsum(1), [special(ROWS, LONG)], False),
    "cumsum_": (lambda x: x.clone().cumsum_(1), [X], False),
    "cumprod": (lambda x: x.cumprod(1), [X], True),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), [X], True),
    "logcumsumexp, special": (lambda x: x.logcumsumexp(1), [special(ROWS, LONG)], False),
    "cummax": (lambda x: tuple(x.cummax(1)), [X], True),
    "cummax, ties": (lambda x: tuple(x.cummax(1)), [(X * 2).round()], False),
    "cummax, special": (lambda x: tuple(x.cummax(1)), [special(ROWS, LONG)], False),
    "cummin": (lambda x: tuple(x.cummin(1)), [X], True),
    "joined": (lambda x, y: torch.cat([y, x, x, y], 1), [X, values(ROWS, 1)], True),
    "padded": (lambda x: functional.pad(x, (2, -1, 0, 1), value=0.5), [X], True),
    "tril": (lambda x: x.tril(1), [values(2, LONG, 4)], True),
    "triu_": (lambda x: x.clone().triu_(-1), [X], False),
    "trace": (lambda x: x.trace(), [X], True),
    "cummin, integers": (lambda x: tuple(x.cummin(1)), [integers(3, ROWS, LONG)], False),
}

WORLDS = ((2,), (3,), (4,), (2, 2), (1,), (2, 1), (1, 2))


def main():
    """The whole table, or the cases that are named."""
    from shardwright.testing.pool import RankPool

    names = [name for name in CASES if not sys.argv[1:] or any(a in name for a in sys.argv[1:])]
    failed = 0
    with RankPool(preload=("shardwright.parallel", "tests.tensor.along_cut_dims")) as pool:
        for sizes in WORLDS:
            world = 1
            for size in sizes:
                world *= size
            for start in range(0, len(names), 8):
                found = pool.run(world, sweep, names[start : start + 8], sizes, timeout=240)
                wrong = list(dict.fromkeys(line for of_rank in found for line in of_rank))
                failed += len(wrong)
                for line in wrong:
                    print(sizes, line, flush=True)
            print(f"mesh {sizes}: done", flush=True)
    print(f"{len(names)} cases on {len(WORLDS)} meshes, {failed} findings")
    return failed


if __name__ == "__main__":
    from tests.tensor.along_cut_dims import main as run  # pickled by this name

    sys.exit(bool(run()))
