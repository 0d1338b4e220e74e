"""Terms that a program declares have the gradients that plain torch finds in their reduction."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.errors import RuleError
from shardwright.testing import rank_mesh

_WEIGHTS = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
_WHOLE = {
    "sum": lambda t: t.sum(0),
    "avg": lambda t: t.mean(0),
    "max": lambda t: t.amax(0),
    "min": lambda t: t.amin(0),
    "product": lambda t: t.prod(0),
    "norm2": lambda t: t.square().sum(0).sqrt(),
}


class Weighed(sw.Pending):
    """One of the program's own: the first term counts half, the others twice."""

    def combine(self, locals):  # noqa: A002 - the word of the laws
        return 0.5 * locals[0] + sum(2 * t for t in locals[1:])

    def embed(self, x, n, coord):
        return 2 * x if coord == 0 else torch.zeros_like(x)

    def __eq__(self, other):
        return type(other) is type(self)

    def __hash__(self):
        return hash(type(self))


class LastWriter(Weighed):
    """One term counts alone, and the others not at all; it writes into them."""

    def combine(self, locals):  # noqa: A002 - the word of the laws
        locals[0].zero_()
        return locals[-1].clone()

    def embed(self, x, n, coord):
        return x.clone() if coord == n - 1 else torch.zeros_like(x)


class Hidden(Weighed):
    """Autograd does not see what it does."""

    def combine(self, locals):  # noqa: A002 - the word of the laws
        return super().combine([t.detach() for t in locals])


def _terms():
    torch.manual_seed(4)
    return torch.rand(4, 2, 3) + 0.5


def _gradients(placements, cut):
    mesh = rank_mesh((2, 2), ("a", "b"))
    at = dist.get_rank()
    terms = _terms()
    mine = (terms[at][:, at % 2 : at % 2 + 1] if cut else terms[at]).clone().requires_grad_()
    shape = {"shape": (2, 2), "stride": (2, 1)} if cut else {}
    made = sw.DTensor.from_local(mine, mesh, placements, **shape)
    weights = _WEIGHTS[:, :2] if cut else _WEIGHTS
    with sw.spmd(mesh):
        (made * weights).sum().backward()
    return mine.grad


def _of_one_device(inner, outer):
    terms = _terms().requires_grad_()
    value = outer(torch.stack([inner(terms[:2]), inner(terms[2:])]))
    (value * _WEIGHTS).sum().backward()
    return terms.grad


@pytest.mark.parametrize("op", _WHOLE)
def test_a_term_has_its_own_gradient(ranks, op):
    """Each had the gradient of a sum, in silence."""
    whole = _WHOLE[op]
    for placements, inner, outer in (
        ([sw.Partial(op), sw.Partial(op)], whole, whole),
        ([sw.Partial("sum"), sw.Partial(op)], whole, _WHOLE["sum"]),
        ([sw.Partial(op), sw.Partial("avg")], _WHOLE["avg"], whole),
    ):
        wanted = _of_one_device(inner, outer)
        for rank, found in enumerate(ranks(4, _gradients, placements, False)):
            torch.testing.assert_close(found, wanted[rank])


def test_terms_of_a_cut_tensor_have_theirs(ranks):
    terms = _terms().requires_grad_()
    parts = [terms[rank][:, rank % 2] for rank in range(4)]  # the columns of a rank, and its term
    whole = torch.stack([torch.maximum(parts[0], parts[2]), torch.maximum(parts[1], parts[3])], 1)
    (whole * _WEIGHTS[:, :2]).sum().backward()
    for rank, found in enumerate(ranks(4, _gradients, [sw.Partial("max"), sw.Shard(1)], True)):
        torch.testing.assert_close(found[:, 0], terms.grad[rank][:, rank % 2])


@pytest.mark.parametrize("own", [Weighed(), LastWriter()], ids=lambda own: type(own).__name__)
def test_a_reduction_of_one_s_own_is_differentiated(ranks, own):
    terms = _terms().requires_grad_()
    value = own.combine([terms[:2].sum(0), terms[2:].sum(0)])
    (value * _WEIGHTS).sum().backward()
    for rank, found in enumerate(ranks(4, _gradients, [own, sw.Partial("sum")], False)):
        torch.testing.assert_close(found, terms.grad[rank])


def _refused():
    mesh = rank_mesh((2,), ("a",))
    term = torch.ones(2, 3, requires_grad=True)
    with sw.spmd(mesh), pytest.raises(RuleError, match="is not differentiable by autograd"):
        (sw.DTensor.from_local(term, mesh, [Hidden()]) * _WEIGHTS).sum().backward()
    product = [sw.Partial("product")]
    first = torch.autograd.grad((sw.DTensor.from_local(term, mesh, product) ** 2).sum().to_local(), term)
    assert first[0].shape == (2, 3)
    value = (sw.DTensor.from_local(term, mesh, product) ** 2).sum().to_local()
    with pytest.raises(RuleError, match="a second derivative of terms"):
        torch.autograd.grad(value, term, create_graph=True)


def test_what_has_no_gradient_says_so(ranks):
    ranks(2, _refused)


def _mapped():
    """A mean of what each rank computes by itself, in a program that trains."""
    mesh, rank = rank_mesh((2,), ("a",)), dist.get_rank()
    torch.manual_seed(0)
    x, model, alone = torch.randn(4, 3), nn.Linear(3, 2), nn.Linear(3, 2)
    alone.load_state_dict(model.state_dict())
    mean = sw.local_map(
        lambda rows: model(rows).square().mean(0), out_placements=[sw.Partial("avg")], device_mesh=mesh
    )
    mine = sw.DTensor.from_local(x[2 * rank : 2 * rank + 2], mesh, [sw.Shard(0)])
    loss = mean(mine).redistribute(placements=[sw.Replicate()]).sum().to_local()
    loss.backward()
    wanted = alone(x).square().mean(0).sum()
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        dist.all_reduce(p.grad)
        torch.testing.assert_close(p.grad, q.grad)


def test_a_mean_of_a_mapped_function_is_divided(ranks):
    ranks(2, _mapped)
