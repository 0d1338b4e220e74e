"""Derivatives that look at a tensor's strides see how it lies, and strides are what kernels gave."""

import torch
from torch.nn.functional import scaled_dot_product_attention

import shardwright as sw
from shardwright.testing.meshes import rank_mesh

from .cases import close, full, place

_PRE = {
    "as it is": lambda x: x,
    "transposed": lambda x: x.mT,
    "of a decomposition": lambda x: torch.linalg.svd(x)[2] + 2 * torch.linalg.svd(x)[2].triu(),
    "columns of one": lambda x: torch.linalg.qr(x)[0] + 2 * torch.linalg.qr(x)[0].triu(),
    "inverse": torch.linalg.inv,
}
_CALLS = {
    "det": torch.linalg.det,
    "slogdet": lambda x: torch.linalg.slogdet(x)[1],
    "solve": lambda x: torch.linalg.solve(x, x[0]),
}


def _derivatives(x, call):
    (first,) = torch.autograd.grad(call(x).exp().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.abs().sum(), x)
    return first, second


def _determinants():
    for dtype in (torch.float64, torch.complex128):
        value = full(4, 4).to(dtype) + torch.eye(4)
        for cut in (sw.Replicate(), sw.Shard(0), sw.Shard(1)):
            for prepared, before in _PRE.items():
                for name, call in _CALLS.items():
                    plain, ours = (before(x).detach().requires_grad_() for x in (value, place(value, (cut,))))
                    found = [_derivatives(x, lambda x, call=call: call(x).abs()) for x in (plain, ours)]
                    for wanted, got in zip(*found, strict=True):
                        close(got, wanted, f"{name} {prepared} {cut}")


def _of_strides_that_are_said():
    value = full(4, 4).double() + torch.eye(4)
    mesh = rank_mesh((2,))
    for local, stride in ((value.mT, (4, 1)), (value, (1, 4))):
        ours = sw.DTensor.from_local(
            local, mesh, [sw.Replicate()], shape=torch.Size((4, 4)), stride=stride
        ).requires_grad_()
        plain = local.clone().requires_grad_()
        for x in (ours, plain):
            torch.linalg.det(x).backward()
        close(ours.grad, plain.grad, str(stride))


def _determinants_of_views_that_move():
    """What is brought to a rank lies there in an order of its own."""
    value = full(4, 6).double()
    for placement in (sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.ZigZag(0), sw.Partial("sum")):
        for name, call in {k: call for k, call in _CALLS.items() if k != "solve"}.items():
            for view in (lambda x: x[:, :4], lambda x: x.t()[:4]):
                plain, ours = (x.requires_grad_() for x in (value.clone(), place(value, (placement,))))
                for x in (plain, ours):
                    call(view(x)).backward()
                close(ours.grad, plain.grad, f"{name} {placement}")


def _attention_of_parts_in_another_order():
    """The kernels step through a row by 1, and torch asks the whole tensor whether they may."""
    value = full(2, 4, 6, 8)
    others = place(value, (sw.Replicate(),)), place(value, (sw.Shard(2),))
    mesh, stride = others[0].device_mesh, value.stride()
    for dim in range(4):
        part = value.chunk(2, dim)[mesh.get_local_rank()].mT.contiguous().mT
        ours = sw.DTensor.from_local(part, mesh, [sw.Shard(dim)], shape=value.shape, stride=stride)
        for other, causal in ((ours, True), (others[0], False), (others[1], True)):
            plain, x = value.clone().requires_grad_(), ours.detach().requires_grad_()
            wanted = scaled_dot_product_attention(plain, value, plain, is_causal=causal)
            got = scaled_dot_product_attention(x, other, x, is_causal=causal)
            close(got, wanted, f"{dim} {sw.layout_of(other)}")
            wanted.square().sum().backward()
            got.square().sum().backward()
            close(x.grad, plain.grad, f"{dim} {sw.layout_of(other)}")


def _as_the_kernels_have_it():
    value = full(2, 4, 6)
    calls = {
        "svd": lambda x: torch.linalg.svd(x)[2],
        "rfftn": torch.fft.rfftn,
        "hfft2": lambda x: torch.fft.hfft2(x.to(torch.complex64)),
        "floor_divide": lambda x: torch.floor_divide(x.mT, x.mT + 9),
    }
    for name, call in calls.items():
        ours, plain = call(place(value, (sw.Replicate(),))), call(value)
        assert ours.stride() == plain.stride() == ours.to_local().stride(), name


def _copies_of_expanded_values():
    mesh = rank_mesh((2,))
    for shape, sizes in (((1, 3), (2, 3)), ((4, 1, 3), (4, 5, 3)), ((1, 4, 4, 2), (3, 4, 4, 2))):
        for number, placement in enumerate((sw.Owner(1), sw.Shard(0), sw.Partial("sum"), sw.Replicate())):
            # Another size each, lest one be remembered for the next.
            plain = full(*shape, 2 + number).expand(*sizes, -1)
            given = sw.distribute_tensor(full(*shape, 2 + number), mesh, [placement])
            ours = given.expand(*sizes, -1).redistribute(placements=[sw.Replicate()]).clone()
            plain = plain.clone()
            assert ours.stride() == plain.stride(), (shape, placement, ours.stride(), plain.stride())
            for x in (ours, plain):
                x.reshape(-1, 3).zero_()  # a view on one device
            close(ours, plain, f"{shape} {placement}")


def _a_result_of_what_lies_otherwise():
    """Its strides are not remembered for what lies as it says."""
    mesh = rank_mesh((2,))
    value = full(4, 6)
    lies = sw.DTensor.from_local(
        value.mT.contiguous().mT, mesh, [sw.Replicate()], shape=torch.Size((4, 6)), stride=(6, 1)
    )
    for x in (lies, sw.distribute_tensor(value, mesh, [sw.Replicate()])):
        assert x.exp().stride() == (6, 1)


def _medians_of_expanded_values():
    """The reference is the median of a copy: torch's own is wrong where the expanded dim is innermost."""
    mesh = rank_mesh((2,))
    value = torch.tensor([[5.0, 1.0, 4.0, 2.0], [3.0, 9.0, 7.0, 8.0]])
    for cut in (sw.Shard(0), sw.Shard(1), sw.Owner(1), sw.Replicate(), sw.Partial("sum")):
        x = sw.distribute_tensor(value, mesh, [cut], src_data_rank=None).unsqueeze(-1).expand(2, 4, 3)
        whole = value.unsqueeze(-1).expand(2, 4, 3).contiguous()
        for dim in (0, 1, 2):
            for call in (torch.median, torch.nanmedian):
                close(call(x, dim).values, call(whole, dim).values, f"{call.__name__} {dim} {cut}")


def test_determinants_have_their_derivatives_however_they_lie(ranks):
    ranks(2, _determinants)


def test_a_stride_that_is_said_is_no_stride_that_is(ranks):
    ranks(2, _of_strides_that_are_said)


def test_determinants_of_what_moves_have_their_derivatives(ranks):
    ranks(2, _determinants_of_views_that_move)


def test_attention_takes_parts_in_another_order(ranks):
    ranks(2, _attention_of_parts_in_another_order)


def test_results_lie_as_kernels_put_them(ranks):
    ranks(2, _as_the_kernels_have_it)


def test_copies_of_expanded_values_lie_as_on_one_device(ranks):
    ranks(2, _copies_of_expanded_values)


def test_what_lies_otherwise_than_said_decides_no_strides(ranks):
    ranks(2, _a_result_of_what_lies_otherwise)


def test_medians_of_expanded_values(ranks):
    ranks(2, _medians_of_expanded_values)


_NEW = {
    "a power of a number": lambda x: 2**x,
    "of one": lambda x: torch.pow(1.0, x) + x[:, :1],
    "of a tensor": lambda x: x.abs() ** x,
    "in place": lambda x: x.clone().abs_().pow_(2),
    "its reshape": lambda x: (2**x).view(-1),
    "found among others": lambda x: torch.isin(x, x.flatten()[:3]),
    "padded sequences": lambda x: _padded(x, batch_first=True),
    "padded, steps first": lambda x: _padded(x, batch_first=False),
}


def _padded(x, batch_first):
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, [3, 2, 1, 1], batch_first=True)
    return torch.nn.utils.rnn.pad_packed_sequence(packed, batch_first=batch_first)[0]


def _strides_of_new_results():
    value = full(4, 2, 3).mT
    for name, make in _NEW.items():
        for cut in (sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Shard(2)):
            wanted, got = make(value), make(place(full(4, 2, 3), (cut,)).mT)
            close(got, wanted, f"{name} {cut}")
            assert got.stride() == wanted.stride(), f"{name} {cut}"


def test_new_results_lie_as_on_one_device(ranks):
    ranks(2, _strides_of_new_results)
