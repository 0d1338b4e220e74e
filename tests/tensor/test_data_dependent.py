"""Ops whose shapes or control flow depend on the data; complex, integer, 0-dim and empty tensors."""

import pytest
import torch
from torch.nn import functional

import shardwright as sw
from shardwright.errors import ImplicitRedistributionError, RuleError
from tests.tiers import only

from .cases import close, full, layouts_of, mesh, place


def _written(write):
    """What a function that writes into a tensor leaves there."""

    def function(x):
        target = x * 1
        write(target)
        return target

    return function


def _counts(x):
    return (x.abs() * 3).long()


DATA_DEPENDENT = {
    "nonzero": lambda x: torch.nonzero(x > 0),
    "nonzero of each dim": lambda x: torch.nonzero(x > 0, as_tuple=True),
    "nonzero of a known count": lambda x: torch.nonzero_static(x > 0, size=4),
    "argwhere": lambda x: torch.argwhere(x > 0),
    "where": lambda x: torch.where(x > 0),
    "unique": lambda x: torch.unique((x * 2).round(), return_inverse=True, return_counts=True),
    "unique rows": lambda x: torch.unique((x * 2).round(), dim=0),
    "unique neighbours": lambda x: torch.unique_consecutive((x * 2).round(), return_counts=True),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "x[mask]": lambda x: x[x > 0],
    "x[rows]": lambda x: x[x[:, 0] > 0],
    "x[:, columns]": lambda x: x[:, x[0] > 0],
    "x[mask] = number": _written(lambda y: y.__setitem__(y > 0, 3.0)),
    "x[mask] = tensor": _written(lambda y: y.__setitem__(y > 0, y[y > 0] * 2)),
    "x[rows] = number": _written(lambda y: y.__setitem__(y[:, 0] > 0, 1.5)),
    "index_put adds": lambda x: x.index_put((x > 0,), x.new_ones(()), accumulate=True),
    "bincount": lambda x: torch.bincount(_counts(x).reshape(-1)),
    "weighted bincount": lambda x: torch.bincount(_counts(x)[0], weights=x[0]),
    "histc": lambda x: torch.histc(x, 5),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, _counts(x)[0], dim=1),
    "repeats alone": lambda x: torch.repeat_interleave(_counts(x)[0]),
    "one_hot": lambda x: functional.one_hot(_counts(x)),
    "item": lambda x: torch.tensor(x.sum().item()),
    "if any": lambda x: torch.tensor(1 if (x > 1).any() else 0),
    "if all": lambda x: torch.tensor(bool((x > -9).all())),
    "int": lambda x: torch.tensor(int(x.abs().sum())),
    "tolist": lambda x: torch.tensor(x.tolist()),
    "out= of nonzero": lambda x: torch.nonzero(x > 0, out=x.new_empty(0, dtype=torch.long)),
    "out= of masked_select": lambda x: torch.masked_select(x, x > 0, out=x.new_empty(0)),
    "nonzero of nothing": lambda x: torch.nonzero(x[:0]),
    "tensordot": lambda x: torch.tensordot(x, x, dims=([0, 1], [0, 1])),
}
KINDS = {
    "complex product": lambda x: torch.complex(x, x) * torch.complex(x, -x),
    "lazy conjugate": lambda x: torch.complex(x, x).conj().sum(),
    "conjugate": lambda x: torch.complex(x, x).conj(),
    "imaginary part of a conjugate": lambda x: torch.complex(x, x).conj().imag,
    "adjoint": lambda x: torch.complex(x, x) @ torch.complex(x, x).mH,
    "conjugate inside a kernel": lambda x: (
        torch.linalg.lstsq(
            torch.complex(x.t(), 1 - x.t()), torch.complex(x.t(), x.t() + 2), driver="gels"
        ).residuals
    ),
    "angle": lambda x: torch.polar(x.abs(), x).angle(),
    "parts": lambda x: torch.view_as_complex(torch.stack([x, x], -1)).real,
    "fft": lambda x: torch.fft.fft(x, dim=0),
    "fft back": lambda x: torch.fft.irfft(torch.fft.rfft(x), 7),
    "integers": lambda x: ((x * 4).int() // 3).sum(0),
    "bits": lambda x: (x * 4).int() & 3,
    "uint8": lambda x: (x.abs() * 9).to(torch.uint8).cumsum(1),
    "bools": lambda x: (x > 0).any(1),
    "0-dim": lambda x: x.sum().exp() + x.mean().reshape(1, 1).expand(3, 2),
    "one element": lambda x: x[2, 3],
    "empty sum": lambda x: x[:0].sum() + x[:, :0].sum(1),
    "empty mean": lambda x: x[:0].mean(),
    "empty matrices": lambda x: x[:, :0] @ x[:, :0].t(),
    "empty and not": lambda x: torch.cat([x[:0], x]),
    "statistics of half": lambda x: torch.native_layer_norm((x * 0).bfloat16(), (7,), None, None, 1e-5)[1],
    "made of nothing read": lambda x: x.new_ones(2, 3) + x.new_full((), 2.0),
}


def _values(kind):
    cases = {"shapes": DATA_DEPENDENT, "kinds": KINDS}[kind]
    x = full(5, 7)
    layouts = layouts_of(2)
    if mesh().ndim == 1:
        layouts = [*layouts, (sw.Interleaved(1, 2),), (sw.Ragged((1, 3), (0, 1)),), (sw.Owner(1),)]
    for name, function in cases.items():
        wanted = function(x)
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        for layout in layouts:
            got = function(place(x, layout))
            got = got if isinstance(got, tuple) else (got,)
            for g, w in zip(got, wanted, strict=True):
                torch.testing.assert_close(
                    g.full_tensor() if isinstance(g, sw.DTensor) else g,
                    w,
                    rtol=2e-5,
                    atol=2e-5,
                    equal_nan=True,
                    msg=lambda m, where=f"{name} {layout}": f"{where}: {m}",
                )


@pytest.mark.parametrize("world", only([2], [2, 4]))
def test_shapes_that_depend_on_the_data_are_those_of_one_device(ranks, world):
    ranks(world, _values, "shapes")


@pytest.mark.parametrize("world", only([2], [2, 4]))
def test_complex_integer_scalar_and_empty_tensors_are_those_of_one_device(ranks, world):
    ranks(world, _values, "kinds")


def _seen():
    d = place(full(5, 7), [sw.Shard(0)])
    for name in ("nonzero", "x[mask]", "bincount", "if any", "repeat_interleave"):
        with sw.trace() as t:
            DATA_DEPENDENT[name](d)
        assert t.decisions, f"{name}: gathers in silence"
    for call in (lambda: torch.nonzero(d > 0), lambda: torch.geqrf(d), lambda: torch.linalg.lstsq(d, d)):
        with sw.explicit(), pytest.raises(ImplicitRedistributionError, match="fix"):
            call()


def _masked():
    """As many places as there are, all get the same: no rank has to know how many the others have."""
    x = full(6, 7)
    writes = {
        "numbers": lambda y: y.__setitem__(y > 0, 3.0),
        "rows": lambda y: y.__setitem__(y[:, 0] > 0, y[0].detach().clone()),
        "columns": lambda y: y.__setitem__((slice(None), y[0] > 0), y[:, :1].detach().clone()),
        "added": lambda y: y.index_put_((y > 0,), y.new_ones(()), accumulate=True),
    }
    for name, write in writes.items():
        plain = x.clone().requires_grad_()
        wanted = _written(write)(plain)
        wanted.square().sum().backward()
        d = place(x, [sw.Shard(0)] * mesh().ndim, requires_grad=True)
        with sw.trace() as t:
            got = _written(write)(d)
            got.square().sum().backward()
        close(got.detach(), wanted.detach(), name)
        close(d.grad, plain.grad, name)
        assert not any(decision.reason.startswith("fallback") for decision in t.decisions), name
        assert name in {"rows", "columns"} or t.bytes == 0, f"{name}: {t.bytes} B"


def test_what_is_written_where_a_mask_says_so_gathers_nothing(ranks):
    ranks(2, _masked)


def test_gathers_for_shapes_are_recorded_and_refused_in_explicit_mode(ranks):
    ranks(2, _seen)


def _expanded():
    """The gradient of a selection from an expanded pending value asks for zeros like it."""
    for mask in (torch.tensor([True, False, True]), torch.zeros(3, dtype=torch.bool)):
        x = place(torch.tensor(2.5), [sw.Partial()], requires_grad=True)
        torch.masked_select(x, sw.distribute_tensor(mask, mesh())).sum().backward()
        close(x.grad, mask.sum().to(x.dtype))


def test_a_selection_from_an_expanded_pending_value_has_a_gradient(ranks):
    ranks(2, _expanded)


def _two_meshes():
    x = full(4, 6)
    square, line = mesh(), sw.init_device_mesh("cpu", (4,), mesh_dim_names=("w",))
    a, b = (
        sw.distribute_tensor(x, square, [sw.Shard(0), sw.Replicate()]),
        sw.distribute_tensor(x, line, [sw.Shard(0)]),
    )
    again = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    close(a + sw.distribute_tensor(x, again, [sw.Shard(0), sw.Shard(1)]), x + x)  # an equal mesh is the same
    close(a + b.redistribute(square, [sw.Shard(0), sw.Replicate()]), x + x)
    texts = []
    for other in (b, sw.distribute_tensor(x, square["tp"], [sw.Shard(1)])):
        with pytest.raises(RuleError) as error:
            torch.add(a, other)
        texts.append(str(error.value))
    return texts


def test_operands_on_two_meshes_are_refused_by_name_with_the_way_out(ranks):
    line, part = ranks(4, _two_meshes)[0]
    assert "live on different meshes" in line
    assert "MeshShape(dp=2, tp=2)" in line
    assert "MeshShape(w=4)" in line
    assert "redistribute(" in line
    assert "MeshShape(tp=2)" in part
