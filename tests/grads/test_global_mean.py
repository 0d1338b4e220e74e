"""A mean over all ranks' items: right value on every rank, and gradients that only need to be added up."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

import shardwright as sw
from shardwright.errors import ParallelError
from shardwright.grads import global_mean
from shardwright.testing import rank_mesh


def _mean_of_squares(counts, mesh_shape):
    """Each rank holds `counts[rank]` of the items; the model is one weight per feature."""
    mesh = rank_mesh(mesh_shape, ("dp", "cp")[: len(mesh_shape)])
    items = torch.randn(sum(counts), 3, generator=torch.Generator().manual_seed(2))
    mine = items.split(counts)[dist.get_rank()]
    weight = torch.ones(3, requires_grad=True)
    loss = global_mean((mine * weight).square().sum(), torch.tensor(len(mine)), mesh)
    loss.backward()
    dist.all_reduce(weight.grad)
    return loss.detach(), weight.grad


def _reference(counts):
    items = torch.randn(sum(counts), 3, generator=torch.Generator().manual_seed(2))
    weight = torch.ones(3, requires_grad=True)
    loss = (items * weight).square().sum() / max(len(items), 1)
    loss.backward()
    return loss.detach(), weight.grad


@pytest.mark.parametrize(
    ("counts", "mesh_shape"),
    [((5, 5), (2,)), ((1, 6), (2,)), ((7, 0), (2,)), ((3, 0, 1, 9), (2, 2)), ((0, 0), (2,)), ((4,), (1,))],
)
def test_value_and_summed_gradient_are_those_of_one_device(ranks, counts, mesh_shape):
    """An average of local means, or a sum divided by the world size, is red for the uneven counts."""
    loss, gradient = _reference(counts)
    for got_loss, got_gradient in ranks(len(counts), _mean_of_squares, counts, mesh_shape):
        torch.testing.assert_close(got_loss, loss)
        torch.testing.assert_close(got_gradient, gradient)


def _over_one_axis():
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    rank = dist.get_rank()
    return global_mean(torch.tensor(float(rank // 2)), 1, mesh["dp"]).item()


def test_only_the_axes_given_are_counted(ranks):
    """Ranks of a tensor-parallel group read the same items; their mesh axis is left out."""
    assert ranks(4, _over_one_axis) == [0.5] * 4


def _of_whole_numbers():
    right = torch.arange(dist.get_rank() + 2) > 0  # 1 of 2, and 2 of 3
    return global_mean(right.sum(), len(right), rank_mesh((2,), ("dp",)))


def test_a_mean_of_whole_numbers_is_none(ranks):
    for mean in ranks(2, _of_whole_numbers):
        torch.testing.assert_close(mean, torch.tensor(3 / 5))


def _refusals():
    mesh = rank_mesh((2,), ("dp",))
    messages = []
    for bad in (torch.ones(2), DTensor.from_local(torch.ones(()), mesh, [Replicate()])):
        with pytest.raises(ParallelError) as caught:
            global_mean(bad, 1, mesh)
        messages.append(str(caught.value))
    return messages


def test_what_has_no_mean_over_these_ranks_is_refused(ranks):
    vector, distributed = ranks(2, _refusals)[0]
    assert vector.startswith(
        "global_mean takes this rank's sum of losses as a scalar, got Tensor of shape (2,)"
    )
    assert "over ('dp',): the loss lives on ('dp',) and is global over these ranks already" in distributed


def _global_over_tp(counts):
    """Each pair of tp ranks holds the items of its dp coord cut in two; the weight is cut too."""
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    items = torch.randn(sum(counts), 3, generator=torch.Generator().manual_seed(2))
    mine = items.split(counts)[mesh.get_local_rank("dp")]
    weight = sw.distribute_tensor(torch.ones(3), mesh["tp"], [sw.Shard(0)]).requires_grad_()
    x = sw.distribute_tensor(mine, mesh["tp"], [sw.Shard(1)])
    count = (x.abs().sum(1) >= 0).sum()
    loss = global_mean((x * weight).square().sum(), count, mesh["dp"])
    loss.backward()
    gradient = weight.grad.full_tensor()
    dist.all_reduce(gradient, group=mesh.get_group("dp"))
    assert type(loss) is torch.Tensor
    return loss.detach(), gradient


@pytest.mark.parametrize("counts", [(2, 3), (4, 0)])
def test_a_loss_that_is_global_over_tp_gets_its_mean_over_dp(ranks, counts):
    loss, gradient = _reference(counts)
    for got_loss, got_gradient in ranks(4, _global_over_tp, counts):
        torch.testing.assert_close(got_loss, loss)
        torch.testing.assert_close(got_gradient, gradient)


def _keeps_dtype():
    mesh = rank_mesh((2,), ("dp",))
    x = torch.tensor(3.0, dtype=torch.bfloat16, requires_grad=True)
    loss = global_mean(x, 2**25 + 1, mesh)
    loss.backward()
    return loss.dtype, x.grad.item()


def test_the_count_is_exact_whatever_the_dtype_of_the_loss(ranks):
    dtype, gradient = ranks(2, _keeps_dtype)[1]
    assert dtype == torch.bfloat16
    assert gradient == torch.tensor(1 / (2**26 + 2)).bfloat16().item()


@pytest.mark.parametrize("count", [math.nan, math.inf, -1, "x", None, 1j])
def test_what_is_no_count_is_refused(count):
    with pytest.raises(ParallelError, match="takes how many items this rank summed"):
        global_mean(torch.tensor(3.0), count, None)


@pytest.mark.parametrize("mesh", [None, 3, "dp"])
def test_what_is_no_mesh_is_refused(mesh):
    with pytest.raises(ParallelError, match="takes the mesh of ranks"):
        global_mean(torch.tensor(3.0), 1, mesh)


_LOST = "global_mean over ('dp',): a rank has no sum of losses or no count to add"


def _wrong_on_one(loss_sum, count):
    mesh = rank_mesh((2,), ("dp",))
    given = (loss_sum, count) if dist.get_rank() else (torch.tensor(2.0), 1)
    try:
        said = global_mean(*given, mesh).item()
    except ParallelError as error:
        said = str(error)
    again = global_mean(torch.tensor(2.0), 1, mesh).item()  # nobody is a message behind
    return said, again


@pytest.mark.parametrize(
    ("loss_sum", "count", "why"),
    [
        (torch.ones(2), 1, "takes this rank's sum of losses as a scalar"),
        (None, 1, "takes this rank's sum of losses as a scalar"),
        (torch.ones(()), -1, "takes how many items this rank summed, got -1"),
        (torch.ones(()), True, "takes how many items this rank summed, got True"),
        (torch.ones(()), torch.tensor(math.nan), _LOST),
    ],
)
def test_what_one_rank_cannot_add_raises_on_all(ranks, loss_sum, count, why):
    """The others had waited for it."""
    (here, again), (there, also) = ranks(2, _wrong_on_one, loss_sum, count, timeout=30)
    assert here.startswith(_LOST)
    assert why in there
    assert again == also == 2.0
