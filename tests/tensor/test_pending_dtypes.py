"""A pending value is reduced in its own dtype, whatever the op that reads it makes of it."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from shardwright.testing.meshes import rank_mesh

from .cases import whole

_READERS = {
    "sum": torch.sum,
    "sum of a dim": lambda x: x.sum(0),
    "sum in int64": lambda x: torch.sum(x, dtype=torch.int64),
    "sum in double": lambda x: torch.sum(x, dtype=torch.float64),
    "prod": torch.prod,
    "mean in double": lambda x: torch.mean(x, dtype=torch.float64),
    "cumsum": lambda x: x.cumsum(0),
    "to int64": lambda x: x.to(torch.int64),
    "to int8": lambda x: x.to(torch.int8),
    "to float": lambda x: x.float(),
    "to double": lambda x: x.double(),
    "to half": lambda x: x.half(),
    "to complex": lambda x: x.to(torch.complex64),
    "to bool": lambda x: x.bool(),
    "plus int64": lambda x: x + torch.arange(x.numel()),
    "plus double": lambda x: x + torch.arange(x.numel(), dtype=torch.float64),
    "minus twice": lambda x: torch.sub(x, x.flip(0), alpha=2),
    "times double": lambda x: x * torch.arange(x.numel(), dtype=torch.float64),
    "halved": lambda x: x / 2,
    "negative": torch.neg,
    "where": lambda x: torch.where(x > 3, x, x.to(torch.int64).flip(0)),
    "cat": lambda x: torch.cat([x, x.to(torch.float64)]),
    "stack": lambda x: torch.stack([x, x.flip(0)]),
    "added into wider": lambda x: torch.zeros(x.numel(), dtype=torch.float64).add_(x),
    "out of another type": lambda x: torch.add(x, x, out=x.new_empty(x.shape, dtype=torch.float64)),
    "copied": lambda x: x.new_zeros(x.shape, dtype=torch.float64).copy_(x),
    "list": lambda x: torch._foreach_add([x], [x.to(torch.float64)])[0],
    "maximum": lambda x: torch.maximum(x, x.to(torch.int32).flip(0)),
    "amax": lambda x: x.amax(0),
    "norm": lambda x: torch.linalg.vector_norm(x.double()),
    "filled": lambda x: x.to(torch.float64).masked_fill(x > 2, 0),
    "index add": lambda x: torch.zeros(4, dtype=x.dtype).index_add(0, torch.tensor([1, 1, 3]), x),
}

# dtype -> what two ranks hold; combined, they leave the range of integers and the precision of floats
_PARTS = {
    torch.uint8: ([200, 1, 255], [156, 2, 255]),
    torch.int8: ([100, -128, 3], [100, -1, 4]),
    torch.int32: ([2**31 - 1, 5, -(2**31)], [1, -7, -1]),
    torch.bfloat16: ([256.0, 0.5, 3.0], [1.0, 0.001, -3.0]),
    torch.float16: ([2048.0, 3000.0, 1.0], [1.0, 4001.0, 1e-4]),
    torch.float32: ([2.0**24, 1.0, 0.1], [1.0, 2.0**-30, 0.2]),
    torch.bool: ([True, False, False], [True, True, False]),
    torch.complex64: ([1 + 1j, 2.0**24, 1j], [1 - 1j, 1.0, -1j]),
}


def _read(names):
    """What differs from the same reader of the combined parts on one device."""
    warnings.filterwarnings("ignore", "Casting complex values to real")
    mesh = rank_mesh((2,), ("tp",))
    wrong = {}
    for dtype, parts in _PARTS.items():
        locals_ = [torch.tensor(part, dtype=dtype) for part in parts]
        for name in names:
            placement = sw.Partial(name)
            if not placement.in_domain(locals_[0]) or not placement.in_domain(locals_[1]):
                continue
            value = placement.combine(locals_)
            for reader, read in _READERS.items():
                x = sw.DTensor.from_local(locals_[dist.get_rank()].clone(), mesh, [placement])
                problem = _differs(read, x, value, mesh)
                if problem:
                    wrong[f"{reader} of {name} in {dtype}"] = problem
    return wrong


def _differs(read, x, value, mesh):
    try:
        expected = read(value.clone())
    except (RuntimeError, TypeError):  # torch 2.15 has no `maximum` of complex numbers and others
        return None
    with sw.spmd(mesh, check=False):
        found = whole(read(x))
    if found.dtype != expected.dtype:
        return f"{found.dtype} instead of {expected.dtype}"
    # What is computed from the value may round once more; an integer, a copy or an extreme is exact.
    exact = not (expected.is_floating_point() or expected.is_complex())
    tolerance = 0.0 if exact else {torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(expected.dtype, 1e-6)
    same = torch.allclose(found, expected, rtol=tolerance, atol=0.0, equal_nan=True)
    return None if same else f"{found} instead of {expected}"


@pytest.mark.parametrize(
    "names",
    [("sum", "max"), pytest.param(("avg", "product", "min", "norm2", "bor", "band"), marks=pytest.mark.slow)],
)
def test_every_reader_sees_the_value_that_one_device_has(ranks, names):
    found = ranks(2, _read, names)
    assert found == [{}, {}], "\n".join(f"{k}: {v}" for k, v in found[0].items())


_JOINS = {
    "add": torch.add,
    "add twice": lambda a, b: torch.add(a, b, alpha=2),
    "add_": lambda a, b: a.add_(b),
    "mul": torch.mul,
    "where": lambda a, b: torch.where(a > 0, a, b),
    "cat": lambda a, b: torch.cat([a, b]),
    "hstack": lambda a, b: torch.hstack([b, a]),
    "stack": lambda a, b: torch.stack([a, b]),
    "copy_": lambda a, b: a.copy_(b),
    "lists": lambda a, b: torch._foreach_add([a], [b])[0],
    "masked_fill": lambda a, b: a.masked_fill(a > 0, b[0]),
}
_OTHERS = ((torch.bool, sw.Replicate()), (torch.int64, sw.Replicate()), (torch.float16, sw.Shard(0)))


def _beside(kind):
    """A pending value beside a finished one of a dtype that cannot be a term of it."""
    mesh = rank_mesh((2,), ("tp",))
    values = torch.tensor([1.5, 2.0, 3.0, 0.25])
    wrong = {}
    for dtype, placement in _OTHERS:
        other = torch.tensor([1, 0, 2, 3]).to(dtype)
        for name, join in _JOINS.items():
            if _raises(join, values, other):
                continue
            expected = join(values.clone(), other)
            a = sw.distribute_tensor(values, mesh, [sw.Replicate()]).redistribute(mesh, [sw.Partial(kind)])
            try:
                found = join(a, sw.distribute_tensor(other, mesh, [placement])).full_tensor()
            except (RuntimeError, ValueError) as error:
                wrong[f"{name} of {kind} and {dtype}"] = str(error)
                continue
            if found.dtype != expected.dtype or not torch.allclose(found, expected, rtol=1e-6):
                wrong[f"{name} of {kind} and {dtype}"] = f"{found} instead of {expected}"
    return wrong


def _raises(join, *operands):
    try:
        join(*(x.clone() for x in operands))
    except RuntimeError:
        return True
    return False


@pytest.mark.parametrize("kind", ["sum", "avg", "max", "min", "product", "norm2"])
def test_what_cannot_be_a_term_of_it_stands_beside_a_pending_value(ranks, kind):
    found = ranks(2, _beside, kind)
    assert found == [{}, {}], "\n".join(f"{k}: {v}" for k, v in found[0].items())


def _complex_pairs():
    mesh = rank_mesh((2,), ("tp",))
    pairs = torch.randn(3, 2, generator=torch.Generator().manual_seed(1))
    for kind in ("min", "max", "sum", "avg", "product"):
        x = sw.distribute_tensor(pairs, mesh, [sw.Replicate()]).redistribute(mesh, [sw.Partial(kind)])
        assert torch.allclose(torch.view_as_complex(x).full_tensor(), torch.view_as_complex(pairs))
        seen = torch.view_as_complex(x)
        seen.mul_(2 + 1j)
        expected = pairs.clone()
        torch.view_as_complex(expected).mul_(2 + 1j)
        assert torch.allclose(x.full_tensor(), expected)


def test_pairs_of_pending_numbers_are_complex_numbers(ranks):
    ranks(2, _complex_pairs)


def _complex_halves():
    """torch cannot divide or reduce them, but they are read and added up on one device."""
    warnings.filterwarnings("ignore", "ComplexHalf")
    wrong = {}
    for sizes in ((2,), (1,)):
        mesh = rank_mesh(sizes)
        if mesh is None or dist.get_rank() >= sizes[0]:
            continue
        parts = [torch.tensor([1 + 2j, -3j, 0.5, 2.0**10]), torch.tensor([1 - 1j, 4.0, 1j, 1.0])][: sizes[0]]
        values = {"sum": sum(parts), "avg": sum(parts) / len(parts), "product": math.prod(parts)}
        for name, value in values.items():
            local = parts[dist.get_rank()].to(torch.complex32)
            x = sw.DTensor.from_local(local, mesh, [sw.Partial(name)])
            for target in (sw.Replicate(), sw.Shard(0)):
                found = x.redistribute(mesh, [target]).full_tensor()
                same = torch.allclose(found.to(torch.complex64), value, rtol=2e-3)
                if not same or found.dtype != torch.complex32:
                    wrong[f"{name} to {target} over {sizes}"] = f"{found} instead of {value}"
    return wrong


def test_a_pending_value_of_complex_halves_is_combined(ranks):
    assert ranks(2, _complex_halves) == [{}, {}]
