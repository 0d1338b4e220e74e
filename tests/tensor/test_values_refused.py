"""What torch's kernels refuse by looking at values and numbers is refused where steps stand for a kernel."""

import pytest
import torch
from torch.nn import functional

import shardwright as sw

from .cases import close, full, place

_HALF = torch.full((4,), 0.5)
_OUTSIDE = torch.tensor([2.0, 0.5, 0.25, -1.0])  # on both ranks of a tensor that is cut in two
_NAN = torch.tensor([torch.nan, 0.5, 0.25, torch.nan])
_SPLITS = torch.tensor([1, 2])

CALLS = {
    "a class too large": lambda put: functional.one_hot(put(torch.tensor([3, 0, 1, 2])), 2),
    "classes in words": lambda put: functional.one_hot(input=put(torch.tensor([3, 0, 1, 2])), num_classes=2),
    "a class below 0": lambda put: functional.one_hot(put(torch.tensor([-1, 0, 1, -1]))),
    "a class below 0 of 5": lambda put: functional.one_hot(put(torch.tensor([-1, 0, 1, -1])), 5),
    "no classes": lambda put: functional.one_hot(put(torch.tensor([3, 0, 1, 2])), 0),
    "classes of nothing": lambda put: functional.one_hot(put(torch.tensor([], dtype=torch.int64)), 0),
    "the op itself": lambda put: torch.ops.aten.one_hot(put(torch.tensor([3, 0, 1, 2])), 2),
    **{
        f"cross-entropy of {name}, {reduction}": lambda put, pair=pair, reduction=reduction: (
            functional.binary_cross_entropy(put(pair[0]), put(pair[1]), reduction=reduction)
        )
        for reduction in ("none", "mean")
        for name, pair in {
            "inputs outside": (_OUTSIDE, _HALF),
            "targets outside": (_HALF, _OUTSIDE),
            "no number": (_NAN, _HALF),
        }.items()
    },
    "smooth_l1": lambda put: functional.smooth_l1_loss(put(_HALF), put(_OUTSIDE), beta=-1.0),
    "smooth_l1 of no number": lambda put: functional.smooth_l1_loss(put(_HALF), put(_HALF), beta=torch.nan),
    "huber": lambda put: functional.huber_loss(put(_HALF), put(_OUTSIDE), delta=0.0),
}
# In words of our own: torch's speak of its kernels.
ELSE = {
    "weights of more dims": lambda put: functional.binary_cross_entropy(
        put(_HALF), put(_HALF), put(_HALF[None]), reduction="none"
    ),
    "moments in two dims": lambda put: functional.batch_norm(
        put(full(2, 3)), put(torch.zeros(1, 3)), put(torch.ones(1, 3))
    ),
    "points that are bytes": lambda put: torch.tensor_split(put(_HALF), put(_SPLITS.to(torch.uint8))),
}
CUTS = (sw.Replicate(), sw.Shard(0))


def _as_one_device():
    for name, call in (CALLS | ELSE).items():
        with pytest.raises(RuntimeError) as one_device:
            call(lambda x: x)
        for cut in CUTS:
            with pytest.raises(RuntimeError) as ours:
                call(lambda x, cut=cut: place(x, (cut,)))
            assert name in ELSE or str(ours.value) == str(one_device.value), f"{name} {cut}"


def test_what_one_device_refuses_is_refused(ranks):
    ranks(2, _as_one_device)


def _one_rank_alone():
    """Only the rank that holds the value raises: nothing is sent for looking."""
    x = torch.tensor([0.5, 0.25, 0.75, 2.0])
    classes = torch.tensor([0, 1, 0, 7])
    calls = (
        lambda cut: functional.binary_cross_entropy(place(x, cut), place(_HALF, cut), reduction="none"),
        lambda cut: functional.one_hot(place(classes, cut), 2),
    )
    for call in calls:
        with sw.trace() as trace:
            try:
                call((sw.Shard(0),))
                raised = False
            except RuntimeError:
                raised = True
        assert raised == (torch.distributed.get_rank() == 1)
        assert not trace.bytes


def test_the_rank_that_holds_the_value_raises(ranks):
    ranks(2, _one_rank_alone)


def _values_at_the_bounds():
    x, y = torch.tensor([0.0, 1.0, 0.5, 0.25]), torch.tensor([1.0, 0.0, 0.5, 1.0])
    classes = torch.tensor([[0, 2], [1, 0], [2, 2]])
    for cut in (*CUTS, sw.Partial()):
        got = functional.binary_cross_entropy(place(x, (cut,)), place(y, (cut,)))
        close(got, functional.binary_cross_entropy(x, y))
    for cut in (*CUTS, sw.Shard(1)):
        for count in (3, 5, -1):
            wanted = functional.one_hot(classes, count)
            close(functional.one_hot(place(classes, (cut,)), count), wanted, f"{cut} {count}")


def test_values_at_the_bounds_are_taken(ranks):
    ranks(2, _values_at_the_bounds)


def _in_a_graph():
    """A graph looks at no values, as torch's own steps do not."""
    x, y = torch.rand(4, 3), torch.rand(4, 3)
    compiled = torch.compile(functional.binary_cross_entropy, backend="aot_eager", fullgraph=True)
    close(compiled(place(x, (sw.Shard(0),)), place(y, (sw.Shard(0),))), functional.binary_cross_entropy(x, y))
    hot = torch.compile(lambda c: functional.one_hot(c, 3), backend="aot_eager", fullgraph=True)
    classes = torch.tensor([0, 1, 2])
    close(hot(place(classes, (sw.Shard(0),))), functional.one_hot(classes, 3))


def test_a_graph_takes_them_as_they_are(ranks):
    ranks(2, _in_a_graph)


_ROWS = full(4, 3)
_BELOW = torch.tensor([-1, 1, -1, 0])
_NEXT = _BELOW[:, None].expand(4, 3).contiguous()
# On one device none of these counts an index below 0 from the end.
BELOW = {
    "gather": lambda put: put(_ROWS).gather(0, put(_NEXT)),
    "index_select": lambda put: put(_ROWS).index_select(0, put(_BELOW)),
    "embedding": lambda put: functional.embedding(put(_BELOW), put(_ROWS)),
    "embedding_bag": lambda put: functional.embedding_bag(put(_BELOW[:, None]), put(_ROWS)),
    "scatter": lambda put: put(_ROWS).scatter(0, put(_NEXT), 1.0),
    "scatter_add": lambda put: put(_ROWS).scatter_add(0, put(_NEXT), put(_ROWS)),
    "scatter_reduce": lambda put: put(_ROWS).scatter_reduce(0, put(_NEXT), put(_ROWS), "sum"),
    "index_add": lambda put: put(_ROWS).index_add(0, put(_BELOW), put(_ROWS)),
    "index_add_": lambda put: put(_ROWS).index_add_(0, put(_BELOW), put(_ROWS)),
    "index_copy": lambda put: put(_ROWS).index_copy(0, put(_BELOW), put(_ROWS)),
    "nll_loss": lambda put: functional.nll_loss(put(_ROWS), put(_BELOW)),
    "targets of another shape": lambda put: functional.nll_loss(
        put(full(2, 3, 2, 2)), put(torch.zeros(2, 2, 1, dtype=torch.int64))
    ),
    "a bag of whole numbers": lambda put: functional.embedding_bag(
        put(_BELOW[:, None].abs()), put(_ROWS.long()), mode="sum"
    ),
    "a bag of other weights": lambda put: functional.embedding_bag(
        put(_BELOW[:, None].abs()), put(_ROWS), mode="sum", per_sample_weights=put(full(4, 1).double())
    ),
}
FROM_THE_END = {
    "index": lambda put: put(_ROWS)[put(_BELOW)],
    "index_put": lambda put: put(_ROWS).index_put((put(_BELOW),), put(_ROWS), accumulate=True),
    "index_fill": lambda put: put(_ROWS).index_fill(0, put(_BELOW), 1.0),
    "take_along_dim": lambda put: torch.take_along_dim(put(_ROWS), put(_NEXT), 0),
}


def _is_refused(call, put):
    try:
        call(put)
    except (RuntimeError, IndexError):
        return True
    return False


def _below_zero():
    for cut in (*CUTS, sw.Shard(1)):

        def put(x, cut=cut):
            return place(x, (cut if x.dim() > 1 else sw.Replicate(),))

        for name, call in BELOW.items():
            assert _is_refused(call, lambda x: x), name
            assert _is_refused(call, put), f"{name} {cut}"
        for name, call in FROM_THE_END.items():
            close(call(put), call(lambda x: x), f"{name} {cut}")


def test_an_index_below_0_counts_from_the_end_where_it_does_on_one_device(ranks):
    ranks(2, _below_zero)
