"""Where a rank infers what it was not told, all ranks infer the same, or all refuse alike."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from shardwright.errors import LayoutError
from shardwright.testing import rank_mesh


def _refused(call):
    with pytest.raises(LayoutError) as caught:
        call()
    return str(caught.value)


def _from_local():
    rank, tp = dist.get_rank(), rank_mesh((2,), ("tp",))
    from_local, shard, whole = sw.DTensor.from_local, [sw.Shard(0)], [sw.Replicate()]
    uneven, plain = torch.ones(4 - rank, 3), torch.ones(4, 3)
    said = {
        "shapes": _refused(lambda: from_local(uneven, tp, shard, run_check=True)),
        "replicas": _refused(lambda: from_local(uneven, tp, whole, run_check=True)),
        "dims": _refused(lambda: from_local(plain if rank else plain[0], tp, shard, run_check=True)),
        "dtypes": _refused(
            lambda: from_local(plain.to(torch.int32 if rank else torch.float32), tp, shard, run_check=True)
        ),
        "placements": _refused(lambda: from_local(plain, tp, [sw.Shard(rank)], run_check=True)),
        "one wrong part": _refused(
            lambda: from_local(uneven, tp, shard, run_check=True, shape=(8, 3), stride=(3, 1))
        ),
        "gradients": _refused(
            lambda: from_local(torch.ones(4, 3, requires_grad=rank == 0), tp, shard, run_check=True)
        ),
        "memory": _refused(
            lambda: from_local(torch.ones(3, 3).t() if rank else torch.ones(3, 3), tp, shard, run_check=True)
        ),
        "two shapes": _refused(
            lambda: from_local(uneven, tp, shard, run_check=True, shape=(7 + rank, 3), stride=(3, 1))
        ),
    }
    x = from_local(uneven, tp, shard, run_check=True, shape=(7, 3), stride=(3, 1))
    assert torch.equal(x.full_tensor(), torch.ones(7, 3))
    turned = from_local(torch.ones(3, 4 - rank).t(), tp, shard, run_check=True, shape=(7, 3), stride=(1, 7))
    assert torch.equal(turned.full_tensor(), torch.ones(7, 3))
    replicated = from_local(torch.full((2,), float(rank)), tp, whole, run_check=True)
    assert torch.equal(replicated.to_local(), torch.zeros(2))
    with sw.trace() as trace:
        from_local(plain, tp, shard)
    assert not trace.collectives, "torch's own form costs nothing"
    return said


def test_run_check_refuses_what_differs_on_all_ranks_alike(ranks):
    first, second = ranks(2, _from_local)
    assert first == second
    what, *rows = first["shapes"].splitlines()
    assert what.startswith("DTensor.from_local(run_check=True): without shape= every rank is taken to hold")
    assert rows == [
        "  rank 0  float32 (4, 3)   would be part of (8, 3)",
        "  rank 1  float32 (3, 3)   would be part of (6, 3)",
        "  fix (checked): DTensor.from_local(..., shape=(7, 3), stride=(3, 1))",
    ]
    assert "different dtypes" in first["dtypes"]
    assert "rank 1  int32 (4, 3)" in first["dtypes"]
    assert "different numbers of dims" in first["dims"]
    assert "other placements" in first["placements"]
    assert "rank 1  float32 (3, 3)   should be (4, 3)" in first["one wrong part"]
    for words in ("two shapes", "gradients", "memory"):
        assert "other placements, shape=, requires_grad or order of dims in memory" in first[words]


def _mapped():
    rank, tp = dist.get_rank(), rank_mesh((2,), ("tp",))
    shard = [sw.Shard(0)]
    x = torch.arange(5.0)
    cut, whole = sw.distribute_tensor(x, tp, shard), sw.distribute_tensor(x, tp, [sw.Replicate()])
    double = sw.local_map(lambda a: a * 2, out_placements=shard)
    own_rows = sw.local_map(lambda a: a[3 * rank : 3 * rank + 3], out_placements=shard)
    twice = sw.local_map(lambda a: torch.cat([a, a]), out_placements=[sw.Interleaved(0, 2)])
    for mapped, given, wanted in (
        (double, cut, x * 2),
        (own_rows, whole, x),  # even arguments, uneven parts
        (twice, cut, torch.cat([x, x])),
    ):
        with sw.trace() as first:
            made = mapped(given)
        with sw.trace() as second:
            again = mapped(given)
        assert made.shape == again.shape == wanted.shape
        assert torch.equal(again.full_tensor(), wanted)
        assert [(c.op, c.reason) for c in first.collectives] == [
            ("all_gather", "local_map: the shapes of an output")
        ]
        assert not second.collectives, "what was told is remembered"
    grads = whole.clone().requires_grad_()
    double_rows = sw.local_map(
        lambda a: a[3 * rank : 3 * rank + 3] * 2,
        out_placements=shard,
        in_grad_placements=[[sw.Partial()]],
        out_shapes=[(5,)],
    )
    with sw.trace() as trace:
        made = double_rows(grads)
    assert not trace.collectives
    made.sum().backward()
    assert torch.equal(grads.grad.full_tensor(), torch.full((5,), 2.0))
    wrong = sw.local_map(lambda a: torch.ones(1 + 3 * rank), out_placements=shard)
    by_data = sw.local_map(lambda a: a[a > a.max() - 1], out_placements=shard)
    by_data(sw.distribute_tensor(torch.tensor([1.0, 2.0, 3.0, 4.0]), tp, shard))
    return (
        _refused(lambda: wrong(cut)),
        _refused(lambda: by_data(sw.distribute_tensor(torch.ones(4), tp, shard))),
        _refused(lambda: sw.local_map(torch.neg, out_placements=shard, out_shapes=[(4,), (4,)])(cut)),
    )


def test_local_map_agrees_on_the_shape_of_an_uneven_output(ranks):
    (first, data, count), second = ranks(2, _mapped)
    assert (first, data, count) == second
    assert "rank 1  float32 (4,)" in first
    assert "depends on more than those" in data
    assert "2 out_shapes for 1 outputs" in count


def _on_a_grid():
    grid = rank_mesh((2, 2), ("dp", "tp"))
    x = torch.arange(35.0).view(5, 7)
    cut = sw.distribute_tensor(x, grid, [sw.Shard(0), sw.Shard(1)])
    doubled = sw.local_map(lambda a: a * 2, out_placements=[sw.Shard(0), sw.Shard(1)])(cut)
    assert torch.equal(doubled.full_tensor(), x * 2)
    both = sw.distribute_tensor(x, grid, [sw.Shard(0), sw.Shard(0)])
    shifted = sw.local_map(lambda a: a + 1, out_placements=[sw.Shard(0), sw.Shard(0)])(both)
    assert torch.equal(shifted.full_tensor(), x + 1)
    return _refused(
        lambda: sw.DTensor.from_local(cut.to_local(), grid, [sw.Shard(0), sw.Shard(1)], run_check=True)
    )


def test_two_axes_agree_too(ranks):
    said = ranks(4, _on_a_grid)
    assert len(set(said)) == 1
    assert "fix (checked): DTensor.from_local(..., shape=(5, 7), stride=(7, 1))" in said[0]


def _with_own_arguments(how):
    """Rank 1 met other numbers and asked, where rank 0 knew: it was aborted, or both waited."""
    rank, at = dist.get_rank(), rank_mesh((2,), ("x",))
    mapped = sw.local_map(
        lambda part, n: part * float(n),
        out_placements=[sw.Shard(0)],
        in_placements=None if how == "named" else ([sw.Shard(0)], None),
        device_mesh=at,
    )
    for step in range(3):
        own = 5 + rank * step
        x = sw.DTensor.from_local(torch.ones(2), at, [sw.Shard(0)])
        n = torch.tensor(own) if how == "tensor" else own
        y = mapped(x, n=n) if how == "named" else mapped(x, n)
        assert y.full_tensor().tolist() == [5.0, 5.0, 5.0 + step, 5.0 + step]


@pytest.mark.parametrize("how", ["placed", "named", "tensor"])
def test_arguments_of_a_rank_s_own_do_not_let_it_ask_alone(ranks, how):
    ranks(2, _with_own_arguments, how, timeout=60)


def _what_is_asked():
    """Nothing again where all is known alike; each time where a length may be among the arguments."""
    at = rank_mesh((2,), ("x",))
    x = sw.DTensor.from_local(torch.ones(2, 3), at, [sw.Shard(0)])
    scaled = sw.local_map(lambda part, by: part * by, out_placements=[sw.Shard(0)], device_mesh=at)
    longer = sw.local_map(lambda part, n: part.repeat(n, 1), out_placements=[sw.Shard(0)], device_mesh=at)
    asked = []
    for call in (lambda k: scaled(x, 0.5 * k), lambda k: longer(x, k)):
        for k in (1, 2, 3):
            with sw.trace() as seen:
                made = call(k)
            asked.append(len(seen.collectives))
    assert made.shape == (12, 3)
    return asked


def test_what_was_told_is_remembered_where_all_is_known_alike(ranks):
    assert ranks(2, _what_is_asked) == [[1, 0, 0, 1, 1, 1]] * 2


def _with_other_kinds():
    """A fraction here and None there; two ranks that asked so often on their own that they forgot."""
    whole, own = rank_mesh((3,), ("x",)), sw.DeviceMesh("cpu", [0, 1], mesh_dim_names=("y",))
    mapped = sw.local_map(lambda part, w=None: part * (w or 1.0), out_placements=[sw.Shard(0)])
    x = sw.DTensor.from_local(torch.ones(2), whole, [sw.Shard(0)])
    mapped(x)
    rank, ones = dist.get_rank(), [1.0] * 4
    assert mapped(x, 2.0 if rank == 1 else None).full_tensor().tolist() == [1.0, 1.0, 2.0, 2.0, 1.0, 1.0]
    assert mapped(x, **({"w": 3.0} if rank == 2 else {})).full_tensor().tolist() == [*ones, 3.0, 3.0]
    for n in range(1, 300 if rank < 2 else 1):
        mapped(sw.DTensor.from_local(torch.ones(n), own, [sw.Shard(0)]))
    assert mapped(x).full_tensor().tolist() == [1.0] * 6


def test_what_ranks_know_together_hangs_on_nothing_else(ranks):
    ranks(3, _with_other_kinds, timeout=60)


def _in_a_graph():
    """Even parts are known without asking; for uneven ones the graph breaks, or is refused before it runs."""
    warnings.simplefilter("ignore")  # torch's own, while it traces
    tp = rank_mesh((2,), ("tp",))
    mapped = sw.local_map(
        lambda x, w: (x @ w, x.sum()),
        ([sw.Shard(0)], [sw.Partial()]),
        ([sw.Shard(0)], {"tp": sw.Replicate()}),
        (None, {"tp": sw.Partial()}),
        redistribute_inputs=True,
    )
    for rows, placement, whole in ((4, sw.Shard(0), True), (4, sw.Shard(1), True), (5, sw.Shard(0), False)):
        graph = torch.compile(lambda x, w: mapped(x * 2, w), backend="aot_eager", fullgraph=whole)
        plain = [torch.arange(3.0 * n).view(n, 3).requires_grad_() for n in (rows, 3)]
        given = [
            sw.distribute_tensor(x.detach(), tp, [cut], src_data_rank=None).requires_grad_()
            for x, cut in zip(plain, (placement, sw.Replicate()), strict=True)
        ]
        product, total = graph(*given)
        x, w = plain
        wanted = 2 * x @ w
        torch.testing.assert_close(product.full_tensor(), wanted)
        torch.testing.assert_close(total.full_tensor(), 2 * x.sum())
        (product.sum() + total).backward()
        (wanted.sum() + 2 * x.sum()).backward()
        for one, other in zip(given, plain, strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)
    with pytest.raises(Exception, match="which no graph holds; fix: local_map"):
        torch.compile(mapped, backend="eager", fullgraph=True)(*given)
    torch._dynamo.reset()


def test_a_graph_holds_a_function_of_even_parts(ranks):
    ranks(2, _in_a_graph, timeout=60)
