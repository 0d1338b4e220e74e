"""Results lie in the memory format that one device's kernels give them, and derivatives are right in it."""

import torch
from torch import nn
from torch.nn import functional

import shardwright as sw
from shardwright.testing.meshes import rank_mesh

from .cases import close, full

LAST = torch.channels_last


def _image(*shape, memory_format=LAST):
    return full(*shape).contiguous(memory_format=memory_format)


def _pooled(mesh, x, cut):
    return sw.distribute_tensor(x.detach(), mesh, [cut], src_data_rank=None).requires_grad_(x.requires_grad)


NETS = {
    "convolution": lambda: [nn.Conv2d(4, 8, 3, padding=1)],
    "dilated": lambda: [nn.Conv2d(4, 8, 3, padding=2, dilation=2)],
    "depthwise": lambda: [nn.Conv2d(4, 8, 3, padding=1, groups=4)],
    "transposed": lambda: [nn.ConvTranspose2d(4, 8, 2, stride=2)],
    "padded": lambda: [nn.ReflectionPad2d(1), nn.Conv2d(4, 8, 3)],
    "replicated rim": lambda: [nn.Conv2d(4, 8, 1), nn.ReplicationPad2d(1)],
    "shuffled": lambda: [nn.Conv2d(4, 8, 1), nn.ChannelShuffle(2)],
    "pixels": lambda: [nn.Conv2d(4, 32, 1), nn.PixelShuffle(2)],
    "batch norm": lambda: [nn.Conv2d(4, 8, 1, bias=False), nn.BatchNorm2d(8)],
    "pooled": lambda: [nn.Conv2d(4, 8, 1), nn.MaxPool2d(2)],
}


def _networks():
    """A batch cut by rows and weights on every rank; the norm of groups reads what comes before it."""
    mesh = rank_mesh((2,))
    for name, layers in NETS.items():
        torch.manual_seed(0)
        plain = nn.Sequential(*layers(), nn.GroupNorm(2, 8)).to(memory_format=LAST)
        torch.manual_seed(0)
        ours = nn.Sequential(*layers(), nn.GroupNorm(2, 8)).to(memory_format=LAST)
        sw.distribute_module(ours, mesh, {})
        for format_, cut in (
            (LAST, sw.Shard(0)),
            (torch.contiguous_format, sw.Shard(0)),
            (LAST, sw.Shard(2)),
        ):
            x = _image(4, 4, 8, 8, memory_format=format_)
            wanted, got = plain(x), ours(_pooled(mesh, x, cut))
            assert got.stride() == wanted.stride(), (name, cut, got.stride(), wanted.stride())
            weights = full(*wanted.shape)
            (wanted * weights).sum().backward()
            (got * sw.distribute_tensor(weights, mesh, [cut], src_data_rank=None)).sum().backward()
            for (parameter, one), two in zip(plain.named_parameters(), ours.parameters(), strict=True):
                close(two.grad, one.grad, f"{name}: {parameter}, {cut}")
                one.grad = two.grad = None


def _written_through():
    """Which reshapes are views, and reach what they are views of."""
    mesh = rank_mesh((2,))
    weight = full(8, 4, 3, 3)
    for cut in (sw.Shard(0), sw.Shard(1), sw.Shard(2), sw.Replicate()):
        for form in (lambda h: h.reshape(4, -1), lambda h: h.permute(0, 2, 3, 1).reshape(4, -1)):
            x = _image(4, 4, 8, 8)
            ours, wanted = (
                functional.conv2d(x, w, padding=1)
                for x, w in ((_pooled(mesh, x, cut), _pooled(mesh, weight, sw.Replicate())), (x, weight))
            )
            for h in (ours, wanted):
                form(h).zero_()
            close(ours, wanted, f"{cut}")


def _of_other_orders():
    """Ops of elements, factors and transforms."""
    mesh = rank_mesh((2,))
    value = full(2, 4, 6).double()
    calls = {
        "svd": lambda x: torch.linalg.svd(x)[2],
        "eig": lambda x: torch.linalg.eig(x[..., :4])[1],
        "rfftn": torch.fft.rfftn,
        "div": lambda x: torch.div(x.mT, x.new_tensor(2.0), rounding_mode="floor"),
        "copysign": lambda x: torch.copysign(x.mT, x.mT[0]),
        "logaddexp": lambda x: torch.logaddexp(x.mT, x.mT[0]),
        "logsigmoid": lambda x: functional.logsigmoid(x.mT),
    }
    for name, call in calls.items():
        for cut in (sw.Shard(0), sw.Replicate()):
            wanted, got = call(value), call(_pooled(mesh, value, cut))
            assert got.stride() == wanted.stride(), (name, cut, got.stride(), wanted.stride())


def _of_whole_numbers():
    """The kernel multiplies by a float: what is given an order keeps the dtype of the result."""
    mesh = rank_mesh((2,))
    gradient, kept = torch.arange(10).view(5, 2), torch.arange(10).view(5, 2) % 3 > 0
    for turned in (False, True):
        operands = [x.mT if turned else x for x in (gradient, kept)]
        wanted = torch.ops.aten.native_dropout_backward(*operands, 0.5)
        got = torch.ops.aten.native_dropout_backward(*(_pooled(mesh, x, sw.Shard(0)) for x in operands), 0.5)
        assert sw.layout_of(got).dtype == wanted.dtype == torch.float32
        assert got.stride() == wanted.stride()
        close(got, wanted)


def test_networks_with_channels_last(ranks):
    ranks(2, _networks, timeout=120)


def test_views_of_images_are_those_of_one_device(ranks):
    ranks(2, _written_through, timeout=60)


def test_strides_are_one_devices_wherever_a_tensor_lies(ranks):
    ranks(2, _of_other_orders, timeout=60)


def test_whole_numbers_times_a_float_are_floats(ranks):
    ranks(2, _of_whole_numbers, timeout=60)
