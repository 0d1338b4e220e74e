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
