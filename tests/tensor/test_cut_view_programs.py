"""Views of cut dims in small programs: what a stranger writes gives what one device gives."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

import shardwright as sw

from .cases import close, full, mesh, place

CUTS = {
    2: [(sw.Interleaved(2, 3),), (sw.ZigZag(2),), (sw.Shard(2),), (sw.Ragged((1, 2), 2),)],
    4: [
        (sw.Interleaved(2, 3), sw.Interleaved(0, 2)),
        (sw.Interleaved(2, 3), sw.Shard(0)),
        (sw.ZigZag(2), sw.Shard(1)),
        (sw.Shard(2), sw.Shard(2)),
    ],
}


def _attends(x):
    b, s, _ = x.shape
    q, k, v = (t.transpose(1, 2) for t in x.view(b, s, 3, 3, 4).unbind(2))
    heads = (q @ k.transpose(-1, -2)).softmax(-1) @ v
    return heads.transpose(1, 2).reshape(b, s, 12)


def _torn_heads(cuts):
    """A cut that tears heads: merging batch and heads for the product moves elements past the sequence."""
    x = full(8, 6, 36).requires_grad_()
    wanted = _attends(x)
    wanted.sum().backward()
    for cut in cuts:
        d = place(x.detach(), cut, requires_grad=True)
        got = _attends(d)
        close(got, wanted.detach(), str(cut))
        got.sum().backward()
        close(d.grad, x.grad, str(cut))


@pytest.mark.parametrize("world", CUTS)
def test_heads_that_are_torn_apart_attend_as_on_one_device(ranks, world):
    ranks(world, _torn_heads, CUTS[world])


def _without_elements():
    x = torch.empty(0, 4, 6)
    for cut in (sw.Owner(1), sw.Shard(1), sw.Shard(2), sw.ZigZag(0)):
        d = place(x, (cut,))
        assert d.view(-1, 6)[:, ::2].shape == (0, 3)
        assert d.flatten()[2:5].shape == (0,)
        assert d.transpose(0, 1).reshape(4, 0).t().shape == (0, 4)


def test_reshapes_without_elements(ranks):
    ranks(2, _without_elements)


def _windows():
    """The gradient of windows that were never taken here: a part has a dim that its base has not."""
    x = full(3, 3, 3, 4)
    wanted = torch.ops.aten.unfold_backward(x, [3, 3, 8], 2, 4, 2)
    for cut in (sw.Shard(3), sw.Shard(2), sw.Owner(1)):
        close(torch.ops.aten.unfold_backward(place(x, (cut,)), [3, 3, 8], 2, 4, 2), wanted, str(cut))
    less = (torch.arange(x.numel()).view(x.shape) // 4 + dist.get_rank()) % 2  # each is largest on one rank
    largest = sw.DTensor.from_local(x - less, mesh(), [sw.Partial("max")])
    close(torch.ops.aten.unfold_backward(largest, [3, 3, 8], 2, 4, 2), wanted)


def test_a_gradient_of_windows_cut_inside_them(ranks):
    ranks(2, _windows)


def _in_inference_mode():
    x = full(5, 6)
    for cut in (sw.Shard(0), sw.Shard(1), sw.Owner(1), sw.Replicate()):
        d = place(x, (cut,))
        with torch.inference_mode():
            for got, wanted in zip(d.chunk(3, 1), x.chunk(3, 1), strict=True):
                assert not got.is_inference()
                close(got, wanted, str(cut))
            close(d.unbind(1)[2] + d.split(2)[0][0, 0], x[:, 2] + x[0, 0], str(cut))
            close(functional.rms_norm(d, (6,)), functional.rms_norm(x, (6,)), str(cut))


def test_lists_of_views_and_norms_in_inference_mode(ranks):
    ranks(2, _in_inference_mode)


def _read_after_inference_mode():
    """A view that had to copy is derived again where it is read, also when the mode is over."""
    for cut in (sw.BlockCyclic(1, 2), sw.Interleaved(1, 2)):
        with torch.inference_mode():
            d = place(full(4, 9), (cut,)) * 2
            view = d.view(-1)[1::3]
            d.add_(1)
        close(view, (full(4, 9) * 2 + 1).view(-1)[1::3], str(cut))


def test_a_view_of_inference_mode_is_read_outside(ranks):
    ranks(2, _read_after_inference_mode)


def _copied():
    """A view starts inside its base's storage, on some ranks; the copy has one of its own."""
    for cut in (sw.Shard(0), sw.Shard(1), sw.BlockCyclic(1, 2), sw.Replicate()):
        base = place(full(4, 6), (cut,))
        view = base.detach()[1:, 1::2].t()
        view.tag = "kept"
        twin = copy.deepcopy(view)
        assert twin.tag == "kept"
        assert sw.layout_of(twin).placements == sw.layout_of(view).placements
        twin.zero_()
        close(base, full(4, 6), str(cut))
        leaf = view.requires_grad_()
        (leaf * 2).sum().backward()
        pair = copy.deepcopy([leaf, leaf])
        assert pair[0] is pair[1]
        assert pair[0].requires_grad
        close(pair[0].grad, torch.full((3, 3), 2.0), str(cut))
        with pytest.raises(RuntimeError, match="leaves"):
            copy.deepcopy(leaf * 2)
    assert mesh().ndim == 1


def test_a_deep_copy_of_a_view(ranks):
    ranks(2, _copied)
