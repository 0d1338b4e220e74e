"""A batch as micro-batches: what is cut, what is handed to all, what is refused."""

import pytest
import torch

from shardwright.errors import ParallelError
from shardwright.parallel.pipeline.batch import micro_batches


def test_rows_are_cut_and_one_row_is_for_all():
    x, row, scalar = torch.arange(8).view(4, 2), torch.arange(3)[None], torch.tensor(2.0)
    parts = micro_batches((x,), {"row": row, "scalar": scalar, "word": "a"}, {"labels": x + 1}, 2, {})
    assert [args[0].tolist() for args, _, _ in parts] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert all(kwargs["row"] is row and kwargs["scalar"] is scalar for _, kwargs, _ in parts)
    assert parts[1][2]["labels"].tolist() == [[5, 6], [7, 8]]


def test_the_dim_of_a_batch_is_named():
    x, places = torch.zeros(4, 2), torch.arange(12).view(3, 4)
    parts = micro_batches(
        (x,), {"places": places, "table": torch.zeros(7)}, None, 4, {"places": 1, "table": None}
    )
    assert [kwargs["places"][0].tolist() for _, kwargs, _ in parts] == [[0], [1], [2], [3]]


def test_a_named_dim_may_have_several_elements_for_each_row():
    """Patches of the images of all rows, one row's after another's; the rows are counted elsewhere."""
    patches, words = torch.arange(12).view(12, 1), torch.arange(4).view(4, 1)
    given = {"patches": patches, "words": words}
    parts = micro_batches((), given, None, 2, {"patches": 0})
    assert [kwargs["patches"].flatten().tolist() for _, kwargs, _ in parts] == [[*range(6)], [*range(6, 12)]]
    assert [kwargs["words"].flatten().tolist() for _, kwargs, _ in parts] == [[0, 1], [2, 3]]
    for wrong, dims in ((patches, {}), (patches[:10], {"patches": 0})):
        with pytest.raises(ParallelError, match=r"beside a batch of (4|12) rows"):
            micro_batches((), {**given, "patches": wrong}, None, 2, dims)


def test_what_is_given_by_position_has_the_names_of_the_forward():
    """A name of it was no argument of the step."""
    x, places = torch.zeros(4, 2), torch.arange(12).view(3, 4)

    def forward(tokens, places, *rest, mask=None): ...

    parts = micro_batches((x, places, x), {}, None, 4, {"places": 1, "tokens": 0}, forward)
    assert [args[1][0].tolist() for args, _, _ in parts] == [[0], [1], [2], [3]]
    with pytest.raises(ParallelError, match=r"no argument of this step; it has tokens$"):
        micro_batches((x,), {}, None, 4, {"mask": 1}, forward)


def test_a_batch_of_one_row_is_one_micro_batch():
    ((args, _, _),) = micro_batches((torch.zeros(1, 2),), {}, None, 1, {})
    assert args[0].shape == (1, 2)


@pytest.mark.parametrize(
    ("args", "n", "dims", "said"),
    [
        ((torch.zeros(6, 2),), 4, {}, "4 micro-batches do not divide a batch of 6 rows; choose"),
        ((torch.zeros(1, 2),), 2, {}, "2 micro-batches do not divide a batch of 1 rows"),
        ((torch.zeros(4, 2),), 0, {}, "0 micro-batches do not divide"),
        ((torch.zeros(4, 2), torch.zeros(3)), 2, {}, "a tensor of shape (3,) beside a batch of 4 rows"),
        (("a", torch.tensor(1.0)), 1, {}, "no tensor among the arguments has rows"),
        ((torch.zeros(4),), 2, {"mask": 1}, "batch_dims names 'mask', which is no argument"),
    ],
)
def test_what_cannot_be_cut_is_refused(args, n, dims, said):
    with pytest.raises(ParallelError) as caught:
        micro_batches(args, {}, None, n, dims)
    assert said in str(caught.value)


def test_a_dim_may_be_counted_from_the_last():
    x = torch.arange(24.0).view(2, 3, 4)
    parts = micro_batches((), {"x": x}, None, 2, {"x": -1})
    assert torch.equal(torch.cat([part[1]["x"] for part in parts], dim=2), x)
    with pytest.raises(ParallelError, match="batch_dims says 3"):
        micro_batches((), {"x": x}, None, 2, {"x": 3})
