"""Ops that need a whole dim work on the shards of a cut one: right values, a few numbers per row moved."""

from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional

import shardwright as sw
from shardwright.errors import ImplicitRedistributionError, LayoutError, PlacementError
from shardwright.rules.registry import registry
from shardwright.testing.meshes import rank_mesh

from .along_cut_dims import CASES, sweep

FLOAT = 4


@pytest.mark.parametrize("sizes", [(3,), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def test_a_sample_of_the_table_equals_one_device(ranks, sizes):
    """The whole table: `python -m tests.tensor.along_cut_dims`."""
    world = 2 * len(sizes) if len(sizes) > 1 else sizes[0]
    found = ranks(world, sweep, list(CASES), sizes, 50)
    assert found == [[]] * world, "\n".join(dict.fromkeys(line for of_rank in found for line in of_rank))


# What `tensor/algorithms` itself runs, not a program in torch's ops.
SCANS_AND_ORDERS = (
    "cumsum",
    "cumsum, half",
    "cumprod",
    "logcumsumexp",
    "cummax, ties",
    "cummin",
    "topk",
    "kthvalue",
)


@pytest.mark.parametrize("sizes", [(1,), (2, 1), pytest.param((1, 2), marks=pytest.mark.slow)], ids=str)
def test_an_axis_of_one_coord_may_hold_a_dim_in_another_order(ranks, sizes):
    world = max(sizes)
    found = ranks(world, sweep, list(SCANS_AND_ORDERS), sizes)
    assert found == [[]] * world, "\n".join(dict.fromkeys(line for of_rank in found for line in of_rank))


@dataclass(frozen=True)
class OneBelowTheOther(sw.Partition):
    """All elements in their own order, in one column: a shape that the tensor has not, also of one coord."""

    def region(self, shape, n, coord):
        low, high = (i * shape[0] * shape[1] // n for i in (coord, coord + 1))
        return sw.Region([sw.Box(divmod(i, shape[1]), (1, 1)) for i in range(low, high)], (high - low, 1))

    def validate(self, shape, n):
        if len(shape) != 2:
            raise PlacementError("OneBelowTheOther is for matrices")


def _scanned_in_another_shape():
    full = torch.linspace(-1, 2, 42).view(7, 6)
    for sizes, placements in (
        ((1, 2), [OneBelowTheOther(), sw.Shard(1)]),
        ((1, 2), [OneBelowTheOther(), sw.Shard(0)]),
        ((2, 1), [sw.Shard(1), OneBelowTheOther()]),
    ):
        x = sw.distribute_tensor(full, rank_mesh(sizes), placements)
        for scan in (torch.cumsum, torch.cumprod, torch.logcumsumexp):
            torch.testing.assert_close(scan(x, 1).full_tensor(), scan(full, 1))
        torch.testing.assert_close(x.topk(2, 1).values.full_tensor(), full.topk(2, 1).values)


def test_an_axis_of_one_coord_may_hold_a_tensor_in_another_shape(ranks):
    ranks(2, _scanned_in_another_shape)


def all_reduce(numbers, n, itemsize=FLOAT):
    """What one rank sends to reduce that many numbers over n ranks: few go to all in one round."""
    size = numbers * itemsize
    return size * (n - 1) if size < 1 << 15 else 2 * size * (n - 1) // n


def _bytes_of(rows, length):
    """Bytes that this rank sends, forward and backward, for every op over a cut dim of this length."""
    mesh = rank_mesh((4,), ("tp",))
    whole = [sw.Replicate()]
    target = sw.distribute_tensor(torch.arange(rows) % length, mesh, whole)
    edge = sw.distribute_tensor(torch.ones(rows, 3), mesh, whole)
    short = sw.distribute_tensor(torch.ones(rows, 6), mesh, [sw.Shard(1)])
    ops = {
        "softmax": lambda x: x.softmax(1),
        "softmax, its gradient whole": lambda x: x.softmax(1).sum(),
        "log_softmax, its gradient whole": lambda x: x.log_softmax(1).sum(),
        "joined with what is whole": lambda x: torch.cat([edge, x, edge], 1),
        "joined, other lengths": lambda x: torch.cat([short, x, edge.repeat(1, length)], 1),
        "padded": lambda x: functional.pad(x, (2, -1, 0, 1)),
        "triangle": lambda x: x.tril().triu(-1),
        "trace": lambda x: x.trace(),
        "log_softmax": lambda x: x.log_softmax(1),
        "logsumexp": lambda x: x.logsumexp(1),
        "cross entropy": lambda x: functional.cross_entropy(x, target),
        "look-up": lambda x: x.gather(1, target[:, None]),
        "layer_norm": lambda x: functional.layer_norm(x, (length,)),
        "rms_norm": lambda x: functional.rms_norm(x, (length,)),
        "group_norm": lambda x: functional.group_norm(x, 4),
        "normalize": lambda x: functional.normalize(x, dim=1),
        "std": lambda x: x.std(1),
        "norm": lambda x: torch.linalg.vector_norm(x, 3, 1),
        "arg-max": lambda x: x.argmax(1),
        "max": lambda x: x.max(1).values,
        "top 2": lambda x: x.topk(2, 1).values,
        "scan": lambda x: x.detach().cumsum(1),
    }
    found = {}
    for name, op in ops.items():
        full = torch.randn(rows, length)
        x = sw.distribute_tensor(full, mesh, [sw.Shard(1)]).requires_grad_()
        with sw.trace() as forward:
            y = op(x)
        with sw.trace() as backward:
            if y.requires_grad:
                y.backward(torch.ones_like(y))
        found[name] = forward.bytes, backward.bytes
    return found


_FREE = ("joined with what is whole", "joined, other lengths", "padded", "triangle", "trace")


def test_a_cut_dim_of_any_length_moves_a_few_numbers_per_row(ranks):
    """The bytes are these formulas in the rows; they do not know the length of the cut dim."""
    for rows, length in ((8, 1024), (8200, 128)):
        row, index = all_reduce(rows, 4), all_reduce(rows, 4, 8)
        group = all_reduce(4 * rows, 4)
        expected = {
            "softmax": (2 * row, row),
            "softmax, its gradient whole": (2 * row, row),
            "log_softmax, its gradient whole": (2 * row, 0),
            **dict.fromkeys(_FREE, (0, 0)),
            "log_softmax": (2 * row, row),
            "logsumexp": (2 * row, 0),
            "cross entropy": (2 * row, row),
            "look-up": (0, 0),
            "layer_norm": (2 * row, 2 * row),
            "rms_norm": (2 * row, row),
            "group_norm": (2 * group, 2 * group),
            "normalize": (row, 2 * row),
            "std": (2 * row, row),
            "norm": (row, 0),
            "arg-max": (row + index, 0),
            "max": (row + index, 0),
            "top 2": (3 * 2 * rows * (FLOAT + 8), 0),
            "scan": (3 * rows * FLOAT, 0),
        }
        for found in ranks(4, _bytes_of, rows, length):
            assert found == expected, f"{rows} rows of {length}"


def _bytes_of_ends(length):
    """Bytes that this rank sends: for gradients of two columns, and for one column that repeats."""
    mesh = rank_mesh((4,), ("tp",))
    x = sw.distribute_tensor(torch.randn(8, length), mesh, [sw.Shard(1)]).requires_grad_()
    ends = x[:, 0] + x[:, -1]
    with sw.trace() as backward:
        ends.square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor()[:, 0], 2 * ends.full_tensor())
    first = x.detach()[:, :1].expand(8, length)
    with sw.trace() as repeated:
        made = first + x
    assert torch.equal(made.full_tensor(), first.full_tensor() + x.full_tensor())
    return backward.bytes, repeated.bytes


def _bytes_of_unlike(length):
    """Bytes that this rank sends: for a gradient of a softmax that is cut by rows, beside its cut result."""
    mesh = rank_mesh((4,), ("tp",))
    numbers = torch.arange(8.0 * length).view(8, length)
    out, grad = numbers.sin().softmax(1), numbers.cos()
    given = [sw.distribute_tensor(x, mesh, [sw.Shard(dim)]) for dim, x in enumerate((grad, out))]
    with sw.trace() as seen:
        found = torch.ops.aten._softmax_backward_data(*given, 1, torch.float32)
    wanted = torch.ops.aten._softmax_backward_data(grad, out, 1, torch.float32)
    torch.testing.assert_close(found.full_tensor(), wanted)
    return seen.bytes


def test_the_result_of_a_softmax_moves_once_to_a_gradient_that_is_cut_otherwise(ranks):
    assert sum(ranks(4, _bytes_of_unlike, 64)) == 8 * 64 * FLOAT * 3 // 4


def test_gradients_of_parts_and_repeated_parts_move_as_parts(ranks):
    column = 8 * FLOAT
    for length in (16, 1024):
        backward, repeated = zip(*ranks(4, _bytes_of_ends, length), strict=True)
        assert (sum(backward), sum(repeated)) == (column, 3 * column), length


def _language_model(steps, batch):
    """A tiny language model whose head is cut along the vocabulary trains as on one device."""
    mesh = rank_mesh((4,), ("tp",))
    vocabulary, width = 37, 8

    def model():
        torch.manual_seed(0)
        return torch.nn.ModuleDict(
            {
                "embed": torch.nn.Embedding(vocabulary, width),
                "norm": torch.nn.LayerNorm(width),
                "head": torch.nn.Linear(width, vocabulary, bias=False),
            }
        )

    def loss_of(m, tokens, targets):
        hidden = m["norm"](torch.tanh(m["embed"](tokens)))
        return functional.cross_entropy(m["head"](hidden).flatten(0, 1), targets.flatten(), ignore_index=3)

    plain, placed = model(), model()
    cut = {"embed.weight": {"tp": sw.Shard(0)}, "head.weight": {"tp": sw.Shard(0)}}
    sw.distribute_module(placed, mesh, cut)
    one, two = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (plain, placed))
    losses, sent = [], []
    for step in range(steps):
        tokens = torch.randint(vocabulary, batch, generator=torch.Generator().manual_seed(step))
        targets = (tokens * 5 + 1) % vocabulary
        wanted = loss_of(plain, tokens, targets)
        dist_tokens, dist_targets = (sw.distribute_tensor(t, mesh) for t in (tokens, targets))
        with sw.trace() as seen:
            got = loss_of(placed, dist_tokens, dist_targets)
        torch.testing.assert_close(got.full_tensor(), wanted.detach(), rtol=1e-4, atol=1e-5)
        for loss, optimizer in ((wanted, one), (got, two)):
            optimizer.zero_grad()
            loss.backward()
        for p, q in zip(placed.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-6)
        one.step()
        two.step()
        losses.append(wanted.item())
        sent.append(seen.bytes)
    return losses, sent, [sw.layout_of(p).placements for p in placed.parameters()]


def test_a_model_with_a_cut_vocabulary_trains_without_gathering_its_logits(ranks):
    """Forward: the looked-up rows are summed once, and two numbers per token for the loss."""
    tokens, width = 12, 8
    for losses, sent, placements in ranks(4, _language_model, 6, (3, 4)):
        assert losses[-1] < losses[0]
        assert set(sent) == {all_reduce(tokens * width, 4) + 2 * all_reduce(tokens, 4)}
        assert placements[0] == placements[-1] == (sw.Shard(0),)


def _chosen():
    mesh = rank_mesh((2,), ("tp",))
    x = sw.distribute_tensor(torch.randn(4, 1000), mesh, [sw.Shard(1)])
    rows = sw.distribute_tensor(torch.randn(4, 1000), mesh, [sw.Shard(0)])
    with sw.trace() as seen:
        x.softmax(1)
        rows.softmax(1)
    said = [(d.op, d.reason.split(":")[0], d.details.split(" ")[0]) for d in seen.decisions]
    assert said == [("aten::_softmax", "algorithm softmax", "instead")], seen.decisions
    text = str(sw.explain("aten::_softmax", sw.layout_of(x), 1, False))
    assert text.startswith("aten::_softmax: algorithm softmax: the maximum and the sum of each row")
    with sw.explicit():
        rows.softmax(1)
        with pytest.raises(ImplicitRedistributionError, match=r"aten::_softmax: needs .* algorithm softmax"):
            x.softmax(1)


def test_an_algorithm_is_recorded_explained_and_refused_in_explicit_mode(ranks):
    ranks(2, _chosen)


def _of_a_user():
    @torch.library.custom_op("cutdims::center", mutates_args=())
    def center(x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(-1, keepdim=True)

    @center.register_fake
    def _(x):
        return torch.empty_like(x)

    sw.rule("cutdims::center", "... d! -> ... d!")
    mesh = rank_mesh((2,), ("tp",))
    full = torch.randn(3, 50)
    x = sw.distribute_tensor(full, mesh, [sw.Shard(1)])
    with sw.trace() as gathered:
        torch.testing.assert_close(center(x).full_tensor(), center(full))

    @sw.register_algorithm("cutdims::center", cost=lambda _call, _layouts: 24)
    def centered(_op, x):
        """center: one sum per row."""
        return x - x.mean(-1, keepdim=True)

    with sw.trace() as seen:
        y = center(x)
    torch.testing.assert_close(y.full_tensor(), center(full))
    assert y.placements == (sw.Shard(1),)
    assert seen.bytes < gathered.bytes
    (entry,) = registry.algorithms_of(torch.ops.cutdims.center.default)
    registry.remove_algorithm(entry)

    @sw.register_algorithm("cutdims::center", cost=lambda _call, _layouts: 0)
    def wrong(_op, x):
        """center, planted: of another shape."""
        return x.mean(-1)

    with pytest.raises(LayoutError, match="the algorithm is wrong"):
        center(x)


def test_users_add_algorithms_and_wrong_shapes_go_red(ranks):
    ranks(2, _of_a_user)


def _written_where_nothing_is():
    """k is cut in 0 and 5: the rank without k holds the identity in `out=`, not what was there."""
    mesh = rank_mesh((2,), ("tp",))
    a, b = torch.randn(3, 5), torch.randn(5, 4)
    left = sw.distribute_tensor(a, mesh, [sw.Ragged((0, 1), (1,))])
    right = sw.distribute_tensor(b, mesh, [sw.Ragged((0, 1), (0,))])
    out = sw.DTensor.from_local(torch.full((3, 4), 7.0), mesh, [sw.Partial("sum")])
    torch.mm(left, right, out=out)
    torch.testing.assert_close(out.full_tensor(), a @ b)
    alone = sw.distribute_tensor(a, mesh, [sw.Owner(1)])
    with sw.trace() as seen:
        found = alone.softmax(1)
    assert (seen.bytes, found.placements) == (0, (sw.Owner(1),))
    torch.testing.assert_close(found.full_tensor(), a.softmax(1))


def test_a_rank_with_nothing_writes_the_identity_and_leaves_the_work_to_the_owner(ranks):
    ranks(2, _written_where_nothing_is)
