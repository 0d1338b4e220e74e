"""The host reads the finished value of a pending one, and arithmetic on terms is arithmetic on sums."""

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from shardwright.testing.meshes import rank_mesh

from .cases import close, full


def _pending(local, op="sum"):
    return sw.DTensor.from_local(local, rank_mesh((2,), ("tp",)), [sw.Partial(op)])


def _host_reads():
    rank = dist.get_rank()
    term = _pending(torch.tensor(float(1 - 2 * rank)))  # 1 and -1: the sum is 0
    assert term.item() == 0.0
    assert not bool(term)
    assert float(term) == 0.0
    assert int(_pending(torch.tensor(2 + rank))) == 5
    assert (term == 0).item()
    if _pending(torch.tensor(0.5)) < 0.8:
        raise AssertionError("each term is below, the sum is not")
    x = sw.distribute_tensor(torch.tensor([0.0, 0.0, 0.0, 5.0]), rank_mesh((2,), ("tp",)), [sw.Shard(0)])
    assert (x > 4).any()
    assert not (x > 4).all()
    assert x.any().item() is True
    assert (x > 4).sum().item() == 1
    assert x.max().item() == 5.0
    assert x.argmax().item() == 3
    assert f"{x.sum():.1f}" == "5.0"
    assert x.nonzero().full_tensor().tolist() == [[3]]
    return "any" if x.any() else "none"


def test_the_host_reads_the_finished_value_on_every_rank(ranks):
    assert ranks(2, _host_reads) == ["any", "any"]


def _any_is_no_sum():
    """Every rank says yes: the result is yes, a bool, and not 2."""
    x = sw.distribute_tensor(torch.ones(4, dtype=torch.bool), rank_mesh((2,), ("tp",)), [sw.Shard(0)])
    for result in (x.any(), x.all(), x.any(0, keepdim=True)):
        assert result.dtype == torch.bool
        assert result.full_tensor().item() is True
    assert x.any().int().full_tensor().item() == 1
    assert x.sum().full_tensor().item() == 4


def test_any_of_bools_is_a_bool(ranks):
    ranks(2, _any_is_no_sum)


def _arithmetic():
    rank = dist.get_rank()
    a = _pending(torch.full((3,), 1.0 + rank))  # 3
    b = _pending(torch.full((3,), 2.0 - rank))  # 3
    for result, wanted in [
        (a + b, 6.0),
        (a - b, 0.0),
        (a * b, 9.0),
        (a * a, 9.0),
        (a / b, 1.0),
        (a + 1, 4.0),
        (1 - a, -2.0),
        (a * 2, 6.0),
        (a / 2, 1.5),
        (2 / a, 2 / 3),
        (a**2, 9.0),
        (a.exp(), 20.085537),
        (-a, -3.0),
        (a.abs(), 3.0),
        (a.relu(), 3.0),
        (a.maximum(b), 3.0),
        (a.sum(), 9.0),
        (a.mean(), 3.0),
        (a.max(), 3.0),
        (torch.add(a, b, alpha=2), 9.0),
        (torch.dot(a, b), 27.0),
        (torch.where(a > 2.5, a, b), 3.0),
        (a > 2.5, 1.0),
        (a.clone(), 3.0),
        (torch.cat([a, b]).sum(), 18.0),
        (torch.stack([a, b]).amax(), 3.0),
        (torch.nn.functional.dropout(a, 0.5, training=False), 3.0),
    ]:
        torch.testing.assert_close(result.full_tensor().float(), torch.full(result.shape, wanted))


def test_arithmetic_on_terms_is_arithmetic_on_the_sum(ranks):
    ranks(2, _arithmetic)


def _narrower():
    """A cast of terms to a narrower type must not round terms that cancel or that are too small alone."""
    rank = dist.get_rank()
    big = _pending(torch.tensor([3e38 * (1 - 2 * rank), 1.0]))
    half = _pending(torch.tensor([60000.0 * (1 - 2 * rank) + 10000 * rank, 1.0]))
    assert torch.equal(big.to(torch.float16).full_tensor(), torch.tensor([0.0, 2.0], dtype=torch.float16))
    assert half.to(torch.float16).full_tensor()[0] == 10000.0
    thirds = _pending(torch.tensor([1 / 3 + rank, 1e-3]))
    exact = thirds.full_tensor()
    assert torch.equal(thirds.bfloat16().full_tensor(), exact.bfloat16())
    ints = _pending(torch.tensor([0.6, 0.7]))
    assert torch.equal(ints.long().full_tensor(), torch.tensor([1, 1]))


def test_a_cast_rounds_the_sum_and_not_its_terms(ranks):
    ranks(2, _narrower)


def _other_reductions():
    rank = dist.get_rank()
    for op, wanted in (("avg", 1.5), ("max", 2.0), ("min", 1.0), ("product", 2.0)):
        x = _pending(torch.full((3,), 1.0 + rank), op)
        torch.testing.assert_close(x.full_tensor(), torch.full((3,), wanted))
        torch.testing.assert_close((x + x).full_tensor(), torch.full((3,), 2 * wanted))
        torch.testing.assert_close((x * -2).full_tensor(), torch.full((3,), -2 * wanted))
        torch.testing.assert_close((x + 1).full_tensor(), torch.full((3,), wanted + 1))
        torch.testing.assert_close(x.sum().full_tensor(), torch.tensor(3 * wanted))
        assert x.sum().item() == pytest.approx(3 * wanted)


def test_other_reductions_than_sums_are_finished_where_they_must_be(ranks):
    ranks(2, _other_reductions)


def _max_of_negative_numbers():
    """A rank without rows contributes nothing, not zero."""
    grid = rank_mesh((3,), ("tp",))
    x = -full(2, 3).abs() - 1
    d = sw.distribute_tensor(x, grid, [sw.Shard(0)])
    close(d.amax(0), x.amax(0))
    close(d.max(), x.max())
    close(d.max(0).values, x.max(0).values)
    assert torch.equal(d.max(0).indices.full_tensor(), x.max(0).indices)
    close(d.logsumexp(0), x.logsumexp(0))
    close(d.softmax(0), x.softmax(0))
    close(d.prod(0), x.prod(0))
    close(d.mean(), x.mean())
    close(d.var(), x.var())
    ints = sw.distribute_tensor(torch.tensor([-5, -7]), grid, [sw.Shard(0)])
    assert ints.max().item() == -5
    assert ints.min().item() == -7


def test_a_rank_without_elements_adds_nothing_to_a_maximum(ranks):
    ranks(3, _max_of_negative_numbers)


def _not_a_number():
    x = torch.tensor([1.0, float("nan"), 2.0, 3.0])
    d = sw.distribute_tensor(x, rank_mesh((2,), ("tp",)), [sw.Shard(0)])
    assert d.max().isnan().item()
    assert d.amin(0).isnan().item()
    assert d.isnan().any().item()
    assert d.sum().isnan().item()


def test_not_a_number_is_not_lost(ranks):
    ranks(2, _not_a_number)


def _reads_of_written_views():
    """A view written through another view derives its gradient anew when autograd meets it, not below."""
    grid = rank_mesh((2,), ("tp",))
    for read in (bool, int, lambda x: x.item(), lambda x: x.detach().tolist()):
        number = sw.distribute_tensor(torch.tensor(5.0), grid, [sw.Replicate()]).requires_grad_()
        total = sw.distribute_tensor(torch.ones(2, 2, 2), grid, [sw.Shard(0)]).sum((0, 1, 2), keepdim=True)
        view = total.permute(2, 1, 0)
        view[:, :, ::3] = number
        read(view)
        (view * 3).sum().backward()
        assert number.grad.full_tensor().item() == 3.0


def test_the_host_reads_a_view_of_a_pending_value_that_was_written(ranks):
    ranks(2, _reads_of_written_views)
