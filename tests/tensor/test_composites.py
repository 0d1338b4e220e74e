"""Operators that torch composes of others, on views: what a composite reads of memory is one rank's.

`storage_offset`, strides and addresses of a wrapper are no facts of the logical tensor.
"""

import pytest
import torch

from .cases import close, full, layouts_of, place, whole

# Views of a matrix of 9 x 10: what makes memory begin elsewhere, or lie in another order.
VIEWS = {
    "sliced": lambda x: x[:, 6:],
    "inside": lambda x: x[2:8, 1:5],
    "transposed": lambda x: x.mT[3:],
    "stepped": lambda x: x[1::2, ::3],
    "narrow": lambda x: x[:, 7:9],
}


def _filled():
    """Law: `fill_diagonal_` of a view writes the view's diagonal, and nothing else of the base."""
    for name, view in VIEWS.items():
        for wrap in (False, True):
            for layout in layouts_of(2):
                plain = full(9, 10, dtype=torch.float64)
                placed = place(plain, layout)
                view(plain).fill_diagonal_(2, wrap=wrap)
                view(placed).fill_diagonal_(2, wrap)
                assert torch.equal(whole(placed), plain), (name, wrap, layout)
        leaf, twin = (v.requires_grad_() for v in (full(9, 10), place(full(9, 10), layouts_of(2)[1])))
        for x in (leaf, twin):
            base = x * 2
            view(base).fill_diagonal_(2)
            (base * base).sum().backward()
        close(twin.grad, leaf.grad, name)


@pytest.mark.parametrize("world", [2])
def test_a_diagonal_is_filled_where_the_logical_tensor_has_it(ranks, world):
    ranks(world, _filled, timeout=120)


# What autograd would take apart before a subclass sees it: inside `inference_mode` the whole of it comes.
WHOLE = {
    "expand_as": lambda x: x[:, 2:3].expand_as(x),
    "view_as": lambda x: x[3:].view_as(x[:6].reshape(5, 12)),
    "reshape_as": lambda x: x[3:].reshape_as(x[:6].reshape(5, 12)),
    "narrow by a tensor": lambda x: x.narrow(0, (x[0, 0] * 0 + 2).long(), 3),
    "normalize": torch.nn.functional.normalize,
    "cosine_similarity": lambda x: torch.nn.functional.cosine_similarity(x, x.flip(0)),
    "hfft": lambda x: torch.fft.hfft(torch.complex(x, x.flip(0))),
    "solve": lambda x: torch.linalg.solve(x @ x.mT + torch.diag_embed(x[:, 0] * 0 + 9), x),
}


def _taken_apart_in_inference():
    """Law: a composite of computed tensors is the same in inference mode, and begins in memory there too."""
    for name, function in WHOLE.items():
        for layout in layouts_of(2):
            for _ in range(2):  # the second may be a known call
                plain = full(9, 10, dtype=torch.float64)
                placed = place(plain, layout)
                with torch.inference_mode():
                    wanted, got = function(plain * 2), function(placed * 2)
                    close(got, wanted, (name, layout))
                assert got.storage_offset() == wanted.storage_offset(), (name, layout)


def test_composites_are_taken_apart_in_inference_mode(ranks):
    ranks(2, _taken_apart_in_inference)


# Views, and what is a view or a copy, of an ordinary tensor.
OF_A_MODEL = {
    "T": lambda x: x.T,
    "flatten": lambda x: x.flatten(),
    "reshape, a copy": lambda x: x.T.reshape(-1),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "tensor_split": lambda x: x.tensor_split(2)[1],
    "narrow": lambda x: x.narrow(0, 1, 2),
    "chunk": lambda x: x.chunk(2)[0],
    "expand_as": lambda x: x[:, 2:3].expand_as(x),
    "to itself": lambda x: x.to(x.dtype),
    "to another dtype": lambda x: x.to(torch.int32),
    "contiguous": lambda x: x.T.contiguous(),
}
WRITES = {
    "view": lambda x: x.T.mul_(2),
    "composite": torch.Tensor.negative_,
    "a diagonal": lambda x: x.fill_diagonal_(3),
}


def _kinds(function, x):
    y = function(x)
    return y.is_inference(), y.requires_grad, y._base is x


def _written_after_it_was_saved(write, x):
    loss = (x * x).sum()
    with torch.inference_mode():
        write(x.detach())
    loss.backward()


def _of_a_model_in_inference():
    """Law: views of what was made before the mode share its count of writes; copies belong to the mode."""
    plain = full(4, 6, dtype=torch.float64)
    for requires_grad in (False, True):
        for layout in layouts_of(2):
            leaf = plain.clone().requires_grad_(requires_grad)
            placed = place(plain, layout).requires_grad_(requires_grad)
            for name, function in OF_A_MODEL.items():
                with torch.inference_mode():
                    assert _kinds(function, placed) == _kinds(function, leaf), (name, layout, requires_grad)
    for name, write in WRITES.items():
        for x in (plain.clone(), place(plain, layouts_of(2)[0])):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                _written_after_it_was_saved(write, x.requires_grad_())
            assert x.grad is None, name


def test_what_a_model_has_stays_ordinary_in_inference_mode(ranks):
    ranks(2, _of_a_model_in_inference)
