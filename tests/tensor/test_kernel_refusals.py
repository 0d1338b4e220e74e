"""What the kernel of one device refuses is refused by every rank, those without data too."""

import contextlib
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

import shardwright as sw
from tests.cycles import tensors_in_cycles

from .cases import close, place

_X = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))
_IMAGE, _GRID = torch.ones(1, 2, 4, 4), torch.zeros(1, 4, 4, 2)
_SAMPLE = partial(functional.grid_sample, align_corners=True)
_INDEX = torch.tensor([0, 2])

REFUSED = {
    "linear": (functional.linear, _X, _X.double()),
    "a product of half and single": (torch.matmul, _X.half(), _X),
    "index_add": (torch.index_add, _X, 0, _INDEX, _X[:2].double()),
    "index_copy": (torch.index_copy, _X, 0, _INDEX, _X[:2].to(torch.complex64)),
    "grid_sample of integers": (_SAMPLE, _IMAGE.long(), _GRID.long()),
    "grid_sample": (_SAMPLE, _IMAGE, _GRID.double()),
    "batch_norm": (functional.batch_norm, _X, _X[0].double(), _X[1].double()),
    "nll_loss": (functional.nll_loss, _X, _X[0]),
    "logcumsumexp of integers": (torch.logcumsumexp, _X.long(), 0),
    "clamp by nothing": (torch.clamp, _X),
    "a rounding that is none": (partial(torch.div, rounding_mode="bad"), _X, _X),
    "imaginary integers": (torch.complex, _X, _X.long()),
    "classes in a matrix": (functional.nll_loss, _X, torch.zeros(4, 4).long()),
    "rows of a vector": (functional.embedding, _INDEX, _X[0]),
    "a grid without dims": (_SAMPLE, _IMAGE, _X),
    "a product of bools": (torch.dot, _X[0].bool(), _X[0].bool()),
    "the largest of bools": (torch.argmax, _X.bool()),
    "a polynomial of halves": (torch.special.hermite_polynomial_h, _X.half(), torch.tensor([2])),
    "places among bools": (torch.searchsorted, _X.bool(), _X.bool()),
    "windows of a matrix": (functional.max_pool2d, _X, 2),
}
BY_SHAPE = {
    "softmax along a dim that is not there": (torch.softmax, _X, 3),
    "sort along a dim that is not there": (torch.sort, _X, 2),
    "bucketize by a matrix": (torch.bucketize, _X, _X),
    "a reduction that is none": (torch.index_reduce, _X, 0, _INDEX, _X[:2], "bad"),
    "the largest of nothing": (torch.max, _X[:0]),
    "the largest of no row": (torch.max, _X[:0], 0),
    "the median of no row": (torch.median, _X[:0], 0),
}


def _refused(name):
    function, *arguments = {**REFUSED, **BY_SHAPE}[name]
    even = () if name in BY_SHAPE else (sw.Shard(0), sw.Replicate())  # all ranks ask the kernel
    with pytest.raises((RuntimeError, IndexError)) as wanted:
        function(*arguments)
    for cut in (sw.Owner(1), sw.Ragged((0, 1), 0), *even):
        placed = [place(x, (cut,)) if isinstance(x, torch.Tensor) else x for x in arguments]
        with sw.trace() as trace, pytest.raises(type(wanted.value)):
            function(*placed)
        assert not trace.collectives, cut
    dist.barrier()  # nobody waits for anybody


@pytest.mark.parametrize("name", [*REFUSED, *BY_SHAPE])
def test_all_ranks_refuse_what_one_device_refuses(name, ranks):
    ranks(2, _refused, name, timeout=60)


def _taken():
    weight = torch.linspace(0, 1, 4)
    half = _X.to(torch.bfloat16)
    for cut in (sw.Owner(1), sw.Shard(0)):
        x, w = place(half, (cut,)), place(weight, (sw.Replicate(),))
        close(
            functional.layer_norm(x, (4,), w, w),
            functional.layer_norm(half, (4,), weight, weight),
            "layer_norm",
        )
        close(place(_X, (cut,)) + x, _X + half, "add")
        large = place(torch.zeros(1, 1 << 15), (cut,))
        close(large @ place(torch.ones(1 << 15, 2), (sw.Replicate(),)), torch.zeros(1, 2), "large")
        roots = place(4 * torch.eye(4), (cut,))  # zeros have none, and no inverse
        close(torch.linalg.solve(roots, torch.linalg.cholesky(roots)), torch.eye(4) / 2, "roots")
        close(x.long() // place(torch.full((4, 4), 2), (cut,)), half.long() // 2, "division by no zero")
        with pytest.raises(RuntimeError):
            large @ place(torch.ones(1 << 15, 2).double(), (sw.Replicate(),))


def test_dtypes_that_one_device_takes_together_are_taken(ranks):
    ranks(2, _taken, timeout=60)


def _left_by_a_refusal():
    placed, other = place(_X, (sw.Shard(0),)), place(_X.double(), (sw.Shard(0),))
    with tensors_in_cycles() as left, contextlib.suppress(RuntimeError):
        torch.mm(placed, other)
    return left


def test_a_refusal_that_is_caught_leaves_no_operand_to_the_collector(ranks):
    """Who tries a larger batch, and catches what it raises, has the memory back."""
    assert ranks(2, _left_by_a_refusal) == [[], []]


_FAR, _NINE = torch.full((4,), 9), torch.tensor([9])
KINDS = {
    "a polynomial of halves": (torch.special.hermite_polynomial_h, _X.half(), torch.tensor([2])),
    "places among bools": (torch.searchsorted, _X.bool(), _X.bool()),
    "windows of a matrix": (functional.unfold, _X, 2),
    "a stride of 0": (partial(functional.conv1d, stride=0), _X[None], torch.ones(1, 4, 2)),
    "a shift of numbers": (torch.bitwise_left_shift, _X, _X),
    "a shift by a number": (torch.Tensor.__lshift__, _X, 1.5),
    "gather": (torch.gather, _X, 0, _FAR[:1, None]),
    "scatter": (torch.scatter, _X, 0, _FAR[:1, None], 1.0),
    "index_add": (torch.index_add, _X, 0, _NINE, _X[:1]),
    "index_copy": (torch.index_copy, _X, 0, _NINE, _X[:1]),
    "index_select": (torch.index_select, _X, 0, _NINE),
    "rows": (lambda x, i: x[i], _X, _NINE),
    "embedding": (functional.embedding, _NINE, _X),
    "classes": (functional.cross_entropy, _X, _FAR),
    "classes of logarithms": (partial(functional.nll_loss, reduction="none"), _X, _FAR),
    "a sum": (torch.sum, _X, 7),
    "a view": (torch.Tensor.view, _X, 3, 5),
    "a product": (torch.mm, _X, _X[:3]),
}


def _kinds(name, dim):
    function, *given = KINDS[name]
    with pytest.raises(Exception) as wanted:  # noqa: PT011  whatever it is
        function(*given)
    mesh = sw.testing.rank_mesh((2,), ("tp",))
    placement = sw.Replicate() if dim is None else sw.Shard(dim)
    placed = [sw.distribute_tensor(x, mesh, [placement], src_data_rank=None) if x is _X else x for x in given]
    with sw.spmd(mesh, check=False), pytest.raises(wanted.type):
        function(*placed)


@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("name", KINDS)
def test_bad_calls_raise_the_kind_of_error_of_one_device(ranks, name, dim):
    """What is told without data, and what is told of an index that a rank looks for, had kinds of its own."""
    ranks(2, _kinds, name, dim)
