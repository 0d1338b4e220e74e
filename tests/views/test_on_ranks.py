"""Views on real ranks: a stated sample of `python -m tests.views`, and programs that write through views.

The sample: the first input of four operators under every partition on two ranks, of three others under
two pairs of partitions on four.
"""

import pytest
import torch

import shardwright as sw
from tests.placement.user_placements import Checkerboard
from tests.tiers import only
from tests.views.placed import mesh, place
from tests.views.sweep import run

SAMPLE = {2: ["slice", "split", "unfold", "reshape"], 4: ["select", "unbind", "diagonal"]}


@pytest.mark.parametrize("world", only([2], SAMPLE))
def test_no_view_moves_a_byte(ranks, world):
    for counts, failures in ranks(world, run, SAMPLE[world], 1, 2):
        assert not failures, "\n".join(failures)
        assert counts["cases"] > 5


def _weight(placements):
    full = torch.arange(48.0 * 5).reshape(48, 5)
    return full, place(full.clone(), placements, None)


def _fused(placements):
    """q, k, v = weight.chunk(3): used, differentiated, written in place."""
    full, placed = _weight(placements)
    placed, full = placed.detach().requires_grad_(), full.requires_grad_()
    weights = [torch.full((16, 5), float(i + 1)) for i in range(3)]
    (wanted,) = torch.autograd.grad([part * part for part in full.chunk(3)], [full], weights)
    with sw.trace() as t:
        parts = placed.chunk(3)
        out = [part * part for part in parts]
        pairs = zip(weights, [sw.layout_of(o) for o in out], strict=True)
        given = [place(w, layout.placements, layout.order_names) for w, layout in pairs]
        (grad,) = torch.autograd.grad(out, [placed], given)
        with torch.no_grad():
            placed.chunk(3)[1].mul_(2)
            placed[:, 1:3].zero_()
            placed[7].add_(1)
    with torch.no_grad():
        full.chunk(3)[1].mul_(2)
        full[:, 1:3].zero_()
        full[7].add_(1)
    torch.testing.assert_close(grad.full_tensor(), wanted)
    torch.testing.assert_close(placed.detach().full_tensor(), full.detach())
    return t.bytes, str(t), [str(p) for p in parts[0].placements]


FUSED = [sw.Shard(0), sw.Interleaved(0, 3), sw.BlockCyclic(0, 1), sw.ZigZag(0), sw.Ragged((1, 3), (0,))]


@pytest.mark.parametrize("placement", FUSED)
def test_a_fused_weight_is_split_and_written_through_its_parts(ranks, placement):
    for sent, told, placements in ranks(2, _fused, [placement]):
        assert sent == 0, told
        if placement == sw.Interleaved(0, 3):
            assert placements == ["S(0)"]


@pytest.mark.parametrize("first", [sw.Shard(0), sw.Interleaved(0, 3)])
def test_a_fused_weight_that_two_axes_cut_is_split_without_moving(ranks, first):
    for sent, told, _ in ranks(4, _fused, [first, sw.Shard(0)]):
        assert sent == 0, told


def _mixed():
    """Parts that lie on different ranks meet: what moves is recorded, and the value is right."""
    full, placed = _weight([sw.Shard(0)])
    with sw.trace() as t:
        q, k, v = placed.chunk(3)
        got = (q * k).softmax(0) @ v.T
    assert t.decisions
    wanted_q, wanted_k, wanted_v = full.chunk(3)
    torch.testing.assert_close(got.full_tensor(), (wanted_q * wanted_k).softmax(0) @ wanted_v.T)
    return t.bytes


def test_parts_on_different_ranks_meet_with_a_record(ranks):
    assert sum(ranks(2, _mixed)) > 0


def _stale():
    """A copy of a view follows its base, and the base its copy, without communication."""
    placed = place(torch.arange(24.0).reshape(12, 2), [sw.BlockCyclic(0, 3)], None)
    with sw.trace() as t:
        odd = placed[1::2]
        placed.mul_(10)
        odd.add_(1)
        both = odd + 0
        placed.mul_(1)
    assert t.bytes == 0
    wanted = torch.arange(24.0).reshape(12, 2) * 10
    wanted[1::2] += 1
    torch.testing.assert_close(placed.full_tensor(), wanted)
    torch.testing.assert_close(both.full_tensor(), wanted[1::2])
    placed.add_(5)
    torch.testing.assert_close(odd.full_tensor(), wanted[1::2] + 5)
    placed.add_(5)
    torch.testing.assert_close(odd.to_local(), (odd + 0).to_local())
    return str(mesh())


def test_a_view_that_had_to_copy_follows_its_base(ranks):
    ranks(2, _stale)


def _into_expanded(name, *where):
    """The copy of an expanded tensor has elements of its own: only those that are named change."""
    full = torch.arange(24.0).view(1, 2, 4, 3)
    seen = {
        "slice_scatter": lambda x: x.narrow(where[0], where[1], 1),
        "select_scatter": lambda x: x.select(*where),
    }
    values = -torch.ones(seen[name](full.expand(3, -1, -1, -1)).shape)
    values[0] = 7
    wanted = getattr(torch, name)(full.expand(3, -1, -1, -1), values, *where)
    for cut in (sw.Shard(1), sw.Shard(2), sw.Owner(1), sw.Replicate()):
        base = place(full, [cut], None).expand(3, -1, -1, -1)
        got = getattr(torch, name)(base, place(values, [sw.Replicate()], None), *where)
        assert torch.equal(got.full_tensor(), wanted), cut
        assert got.stride() == wanted.stride(), cut


@pytest.mark.parametrize(
    "call", [("slice_scatter", 3, 2, 3), ("slice_scatter", 1, 0, 1), ("select_scatter", 2, 1)]
)
def test_what_is_scattered_into_an_expanded_tensor_is_not_repeated(ranks, call):
    ranks(2, _into_expanded, *call)


BITS = [
    [sw.Shard(0), sw.ZigZag(0)],
    [sw.Fused(0, (1, 2)), sw.ZigZag(0)],
    [sw.Shard(1), sw.Owner(1)],
    [sw.Replicate(), Checkerboard(1)],
    [Checkerboard(1), sw.Replicate()],
]
TYPES = [(torch.float32, torch.int32), (torch.bool, torch.int8), (torch.float16, torch.bfloat16)]


def _reinterpreted(placements):
    """The bits of each element as another type that is as wide, and written in place through that."""
    for source, target in TYPES:
        full = torch.arange(35).view(7, 5).remainder(3).to(source)
        placed = place(full.clone(), placements, None)
        with sw.trace() as t:
            seen = placed.view(target)
            seen.zero_()[2:].fill_(1)
        wanted = full.view(target)
        assert seen.placements == placed.placements
        wanted.zero_()[2:].fill_(1)
        assert torch.equal(seen.full_tensor(), wanted)
        assert torch.equal(placed.full_tensor(), full)
        assert not t.bytes, str(t)
    pending = place(torch.arange(6.0).view(2, 3), [sw.Partial(), sw.Shard(1)], None)
    assert torch.equal(
        pending.view(torch.int32).full_tensor(), torch.arange(6.0).view(2, 3).view(torch.int32)
    )


@pytest.mark.parametrize("placements", BITS, ids=str)
def test_bits_are_read_anew_where_they_are(ranks, placements):
    ranks(4, _reinterpreted, placements)
