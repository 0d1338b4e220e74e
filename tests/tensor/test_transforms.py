"""Transforms of `torch.func`, forward-mode AD and traced graphs: on DTensors as on one device.

A transform wraps the tensors that a function sees, so that the class of what is inside does not show.
"""

import itertools
import warnings

import pytest
import torch
from torch import func
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import shardwright as sw
from shardwright.errors import LayoutError, RuleError, SpmdError
from shardwright.testing.meshes import rank_mesh
from tests.tiers import all_but

from .cases import close, full, layouts_of, place

# Functions of two matrices, of which the second is seen as it is; per row they are functions of a row too.
FUNCTIONS = {
    "pointwise": lambda p, q: p.sin() * q + p * p,
    "matrix": lambda p, q: (p @ q.mT).tanh(),
    "reduced": lambda p, q: (p * q).std(-1) + p.amax(-1),
    "normed": lambda p, q: functional.layer_norm(p, p.shape[-1:]) * q,
    "softmax": lambda p, q: (p + q).softmax(-1) + p.log_softmax(0),
    "viewed": lambda p, q: torch.cat([p.flip(0)[..., 1:], q[..., :1]], -1).cumsum(-1).mT,
    "loss": lambda p, q: functional.cross_entropy(p + q.sin(), (q > 0).double().softmax(-1)),
    "written": lambda p, q: (p * 2).mul_(q).add_(p),
}


def _total(f):
    return lambda p, q: (f(p, q) ** 2).sum()


def _forward_mode(f, a, b):
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(f(forward_ad.make_dual(a, b), b))
        return out.primal, out.tangent


TRANSFORMS = {
    "grad": lambda f, a, b: func.grad(lambda p: _total(f)(p, b))(a),
    "grad of both": lambda f, a, b: func.grad_and_value(_total(f), argnums=(0, 1))(a, b),
    "grad of grad": lambda f, a, b: func.grad(lambda p: func.grad(_total(f))(p, b).sin().sum())(a),
    "vjp": lambda f, a, b: (v := func.vjp(lambda p: f(p, b), a))[1](torch.ones_like(v[0]) * 2),
    "jvp": lambda f, a, b: func.jvp(f, (a, b), (b, a)),
    "jvp of one": lambda f, a, b: func.jvp(lambda p: f(p, b), (a,), (b,)),
    "jacrev": lambda f, a, b: func.jacrev(f, argnums=1)(a, b),
    "jacfwd": lambda f, a, b: func.jacfwd(lambda p: f(p, b))(a),
    "linearize": lambda f, a, b: (lin := func.linearize(lambda p: f(p, b), a))[1](b + 1) + lin[0],
    "vmap": lambda f, a, b: func.vmap(f)(torch.stack([a, b]), torch.stack([b, a])),
    "vmap of one": lambda f, a, b: func.vmap(lambda p: f(p, b))(torch.stack([a, b, a + b])),
    "vmap of a dim": lambda f, a, b: func.vmap(f, in_dims=(1, None))(torch.stack([a, b], 1), b),
    "forward mode": _forward_mode,
    "traced": lambda f, a, b: make_fx(lambda p: f(p, b))(b)(a),
}  # fmt: skip


# An error of torch: it folds the tangent of a constant, a zero, into a plain parameter, and asserts that the
# tangent of a view has the strides of its primal.
ERRORS = {("linearize", "viewed")}


def _same(name, transform, f, a, b):
    wanted = transform(f, a, b)
    for layout in layouts_of(2):
        got = transform(f, place(a, layout), place(b, layout))
        wanted_list, got_list = (v if isinstance(v, tuple) else (v,) for v in (wanted, got))
        for g, w in zip(got_list, wanted_list, strict=True):
            if isinstance(w, tuple):
                [close(*pair, f"{name} {layout}") for pair in zip(g, w, strict=True)]
            else:
                close(g, w, f"{name} {layout}")


def _transformed(name):
    a, b = full(5, 4, dtype=torch.float64), full(5, 4, seed=1, dtype=torch.float64)
    with warnings.catch_warnings():
        # torch's own graph of a linearized function names constants that it has not stored yet.
        warnings.filterwarnings("ignore", "Attempted to insert a get_attr Node", UserWarning)
        for of, f in FUNCTIONS.items():
            if (name, of) not in ERRORS:
                _same(of, TRANSFORMS[name], f, a, b)


LEFT = ["linearize", "grad", "grad of both", "jvp of one", "vmap of one", "vmap of a dim", "jacfwd"]


@pytest.mark.parametrize("name", all_but(LEFT, TRANSFORMS))
def test_a_transformed_function_is_that_of_one_device(ranks, name):
    ranks(2, _transformed, name, timeout=150)


def _written_in_forward_mode():
    """Ops that torch describes with an overload packet: it writes its arguments down, tangents and all."""
    shapes = (4, 6), (4, 6), (4, 6)
    calls = {
        "lerp_": lambda x, y, z: (x * 2).lerp_(y, z),
        "quantile": lambda x, y, z: (x * y + z).quantile(0.3, dim=1),
        "hypot_": lambda x, y, z: (x + z).hypot_(y),
    }
    for name, call in calls.items():
        for cut in (sw.Shard(0), sw.Shard(1), sw.Replicate()):
            values = [full(*shape, seed=seed).double() for seed, shape in enumerate(shapes)]
            found = []
            for made in (lambda x: x.clone(), lambda x, cut=cut: place(x, (cut,))):
                x, y, z = (made(value) for value in values)
                with forward_ad.dual_level():
                    out = call(forward_ad.make_dual(x, z), forward_ad.make_dual(y, x), z)
                    found.append(forward_ad.unpack_dual(out))
            for got, wanted in zip(found[1], found[0], strict=True):
                close(got, wanted, f"{name} {cut}")


def test_what_is_written_has_its_tangent(ranks):
    ranks(2, _written_in_forward_mode)


def _views_of_unlike_tangents():
    """A view has its tangent, however that lies, and nothing is sent to see that they fit."""
    x, y = full(4, 6).double(), full(4, 6, seed=1).double()
    calls = (lambda x: (x * 2)[1:, 0], lambda x: (x * 2).narrow(1, 0, 2), lambda x: (x * 2).t()[0])
    for call in calls:
        _, wanted = func.jvp(call, (x,), (y,))
        for one, other in itertools.permutations((sw.Shard(0), sw.Shard(1), sw.Replicate()), 2):
            value, given = place(x, (one,)), place(y, (other,))
            with sw.explicit(), sw.trace() as seen:
                _, tangent = func.jvp(call, (value,), (given,))
            assert seen.bytes == 0, f"{one} {other}"
            close(tangent, wanted, f"{one} {other}")
    columns = y.t().contiguous().t()
    for cut in (sw.Shard(0), sw.Shard(1), sw.Replicate()):
        with sw.explicit():
            _, tangent = func.jvp(torch.sin, (place(x, (cut,)),), (place(columns, (cut,)),))
        assert tangent.placements == (cut,)
        close(tangent, x.cos() * y, f"{cut} in columns")
        close(func.jacfwd(torch.sin)(place(columns, (cut,))), func.jacfwd(torch.sin)(columns), f"{cut} batch")


def test_a_view_has_a_tangent_that_lies_unlike_it(ranks):
    ranks(2, _views_of_unlike_tangents)


def _models():
    """Law: per-sample gradients, a gradient of `functional_call` and a Hessian are those of one device."""
    layer, rows = torch.nn.Linear(4, 4, dtype=torch.float64), full(5, 4, dtype=torch.float64)
    weight, bias = full(4, 4, seed=1, dtype=torch.float64), full(4, seed=2, dtype=torch.float64)

    def loss(parameters, x):
        return func.functional_call(layer, parameters, (x,)).pow(2).sum()

    programs = {
        "whole": lambda w, v, x: func.grad(loss)({"weight": w, "bias": v}, x),
        "per sample": lambda w, v, x: func.vmap(func.grad(loss), (None, 0))({"weight": w, "bias": v}, x),
    }
    for name, program in programs.items():
        wanted = program(weight, bias, rows)
        for layout in layouts_of(2):
            got = program(place(weight, layout), place(bias, (sw.Replicate(),)), place(rows, layout))
            for key in wanted:
                close(got[key], wanted[key], f"{name} {key} {layout}")
    hessian = func.hessian(lambda x: (x.softmax(-1) ** 3).sum())
    for layout in layouts_of(2):
        close(hessian(place(rows, layout)), hessian(rows), f"hessian {layout}")
        linear = [func.hessian(lambda x, b=b: b @ x)(b) for b in (place(bias, (sw.Replicate(),)), bias)]
        close(*linear, f"hessian of a line {layout}")  # its tangents are zeros without memory


def test_gradients_of_a_functional_call_are_those_of_one_device(ranks):
    ranks(2, _models, timeout=150)


def _refused():
    """Law: a plain tensor beside a DTensor is refused inside a transform too."""
    x, row = place(full(5, 4), (sw.Shard(0),)), full(4)
    with pytest.raises(RuleError, match="a plain tensor of shape"):
        func.vmap(lambda p: p * row)(x)
    with pytest.raises(RuleError, match="a plain tensor of shape"):
        func.jvp(torch.sin, (x,), (full(5, 4),))


def test_a_plain_tensor_is_refused_inside_a_transform(ranks):
    ranks(2, _refused)


def _closed_over_in_spmd():
    mesh = rank_mesh((2,), ("tp",))
    x, weight = full(3, 4), full(5, 4)
    placed = sw.distribute_tensor(weight, mesh, [sw.Shard(0)], src_data_rank=None)

    def loss(w):
        return functional.linear(x, w).square().sum()

    calls = {
        "grad": func.grad(loss),
        "jacrev": func.jacrev(lambda v: functional.linear(x, v).sin()),
        "hessian": func.hessian(loss),
        "jvp": lambda w: func.jvp(loss, (w,), (w,))[1],
        "vmap": func.vmap(lambda row: (x @ row).exp()),
        "grad of grad": func.grad(lambda v: func.grad(loss)(v).sin().sum()),
    }
    for check in (True, False):
        for name, call in calls.items():
            with sw.spmd(mesh, check=check):
                got = call(placed)
            close(got, call(weight), f"{name}, check={check}")
        with sw.spmd(mesh, check=check), pytest.raises(SpmdError, match="distribute_tensor it before"):
            func.grad(lambda v: functional.linear(v, placed).sum())(x)

    def made_inside(w):
        return (w * torch.arange(4.0).double() + w.detach().sum() * torch.eye(4).double()[0]).sin().sum()

    with sw.spmd(mesh):
        for call in (func.grad, func.hessian, lambda f: lambda w: func.jvp(func.grad(f), (w,), (w,))[1]):
            close(call(made_inside)(placed), call(made_inside)(weight), "what is made inside")
        for outer in (func.grad, lambda f: lambda v: func.jvp(f, (v,), (v,))):
            with pytest.raises(SpmdError, match="distribute_tensor it before"):
                outer(lambda v: func.jvp(lambda w: (w * v[0]).sum(), (placed,), (placed,))[1])(x)


def _distributed_inside():
    """Law: what is made a DTensor inside of a transform is a constant of it, or refused on every rank."""
    mesh = rank_mesh((2,), ("tp",))
    cut, row = [sw.Shard(0)], full(4)
    x, placed = full(3, 4), place(full(3, 4), (sw.Shard(0),))
    made = {
        "distribute_tensor": lambda: sw.distribute_tensor(row * 1, mesh, cut),
        "of what is made inside": lambda: sw.distribute_tensor(torch.eye(4).double()[0], mesh, cut),
        "from_local": lambda: sw.DTensor.from_local(row * 1, mesh, [sw.Replicate()]),
        "full": lambda: sw.full((4,), 2.0, dtype=torch.float64, device_mesh=mesh, placements=cut),
        "randn": lambda: sw.randn(4, dtype=torch.float64, device_mesh=mesh, placements=cut),
    }
    for name, make in made.items():
        for call in (func.grad, func.hessian, lambda f: func.vmap(func.grad(f))):
            torch.manual_seed(0)
            got = call(lambda v, m=make: (v.sin() * m()).sum())(placed)
            torch.manual_seed(0)
            whole = make().full_tensor()
            close(got, call(lambda v, w=whole: (v.sin() * w).sum())(x), name)
    for verb in (sw.distribute_tensor, sw.DTensor.from_local):
        with pytest.raises(LayoutError, match="distribute_tensor it before the transform"):
            func.grad(lambda v, to=verb: to(v, mesh, cut).sum())(x)


def test_a_tensor_may_be_distributed_inside_a_transform(ranks):
    ranks(2, _distributed_inside, timeout=60)


def test_plain_tensors_in_spmd_are_constants_of_a_transform(ranks):
    ranks(2, _closed_over_in_spmd, timeout=60)
