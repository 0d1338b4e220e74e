"""Counts of rows that do not fit are refused in words: the kernels would write beside their memory."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.errors import ConfigError, ParallelError
from shardwright.moe import ExpertCommunicator, GroupedExperts, GroupedLinear
from shardwright.parallel import parallelize_replicate
from shardwright.placement import Shard
from shardwright.testing import rank_mesh


def _modules():
    """With the grouped kernel, without it, and three in a row."""
    return [GroupedLinear(2, 4, 4), GroupedLinear(2, 3, 5).double(), GroupedExperts(2, 4, 8)]


def _rows(module):
    weight = next(module.parameters())
    return torch.ones(3, weight.shape[1], dtype=weight.dtype)


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        pytest.param([1, 1], r"counts \[1, 1\] do not say how the 3 rows .* sum is 2", id="fewer than rows"),
        pytest.param([4, 4], "their sum is 8, the smallest 4", id="more than rows"),
        pytest.param([5, -2], "their sum is 3, the smallest -2", id="negative"),
        pytest.param([1, 1, 1], "here are 3 counts for the 2 groups", id="one more than groups"),
        pytest.param([3], "here are 1 counts for the 2 groups", id="one less"),
        pytest.param([1.5, 1.5], r"got torch.float32 of shape \(2,\)", id="no whole numbers"),
        pytest.param([True, True], "got torch.bool", id="truths"),
        pytest.param([[1, 2]], r"got torch.int64 of shape \(1, 2\)", id="a matrix"),
    ],
)
def test_counts_that_do_not_fit_are_refused(counts, said):
    """They had left rows unwritten, or had memory overwritten."""
    for module in _modules():
        with pytest.raises(ConfigError, match=said):
            module(_rows(module), torch.tensor(counts))


@pytest.mark.parametrize("counts", [[1, 2], (1, 2), None, 3])
def test_counts_that_are_no_tensor_are_refused(counts):
    for module in _modules():
        with pytest.raises(ConfigError, match=f"one int64 tensor of shape .*got {type(counts).__name__}"):
            module(_rows(module), counts)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_counts_that_fit_are_taken(dtype):
    for module in _modules():
        rows = _rows(module)
        for counts in ([3, 0], [0, 3], [1, 2]):
            assert module(rows, torch.tensor(counts, dtype=dtype)).shape[0] == 3
        assert module(rows[:0], torch.tensor([0, 0])).shape[0] == 0


def test_numbers_on_an_accelerator_are_not_waited_for():
    """The shape and dtype are known on the host; `meta` has no numbers, and reading them would fail."""
    module = GroupedLinear(2, 3, 5).to("meta")
    rows = torch.ones(3, 3, device="meta")
    with pytest.raises(ConfigError, match="here are 3 counts for the 2 groups"):
        module(rows, torch.ones(3, dtype=torch.int64, device="meta"))
    with pytest.raises(ConfigError, match=r"got torch\.float32"):
        module(rows, torch.ones(2, device="meta"))


def _placed():
    mesh = rank_mesh((2,), ("dp",))
    whole = parallelize_replicate(GroupedLinear(2, 4, 4), mesh)
    assert whole(torch.ones(3, 4), torch.tensor([1, 2])).shape == (3, 4)
    cut = GroupedLinear(2, 4, 4)
    cut.weight = nn.Parameter(sw.distribute_tensor(cut.weight.detach(), mesh, [Shard(0)]))
    texts = []
    for module, counts in ((whole, [3]), (whole, [2, 2])):
        with pytest.raises(ConfigError, match="counts") as refused:
            module(torch.ones(3, 4), torch.tensor(counts))
        texts.append(str(refused.value))
    return texts


def _announced():
    communicator = ExpertCommunicator(dist.group.WORLD, 3)
    for counts in (torch.tensor([1, 1]), torch.tensor([[1, 1, 1]]), torch.ones(3)):
        with pytest.raises(ParallelError, match="each of the 3 experts gets, in int64 of shape"):
            communicator.announce(counts)
    return communicator.announce(torch.tensor([1, 0, 2])).counts.tolist()


def test_counts_that_are_announced_are_one_for_each_expert(ranks):
    """They had been an error of torch about split sizes, or read as other numbers."""
    assert ranks(2, _announced) == [[2, 0], [4]]


def test_weights_that_are_placed_count_the_groups_of_their_rank(ranks):
    for few, many in ranks(2, _placed):
        assert "1 counts for the 2 groups of the weight on this rank" in few
        assert "the 3 rows" in many
