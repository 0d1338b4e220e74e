"""Norms of half tensors with float32 parameters, as autocast makes them, beside one device."""

import pytest
import torch
from torch.nn import functional

import shardwright as sw

from .cases import full, mesh, whole

# What keeps statistics for its backward: by name, of x, a weight, a bias and running statistics.
NORMS = {
    "batch norm": lambda x, w, b, m, v: functional.batch_norm(x, m, v, w, b, training=True),
    "batch norm, evaluated": lambda x, w, b, m, v: functional.batch_norm(x, m, v, w, b),
    "instance norm": lambda x, w, b, m, v: functional.instance_norm(x, m, v, w, b),
    "group norm": lambda x, w, b, m, v: functional.group_norm(x, 2, w, b),
    "layer norm": lambda x, w, b, m, v: functional.layer_norm(x, (4, 6), w[:, None].expand(4, 6)),
}


def _value_and_gradient(norm, x, *parameters):
    for each in (x, *parameters[:2]):
        each.requires_grad_()
    value = norm(x, *parameters)
    (value.float() * functional.pad(x.detach().float()[..., 1:], (0, 1))).sum().backward()
    read = [each for each in (x, *parameters[:2]) if each.grad is not None]  # some read no bias
    return [whole(value.detach()), *(whole(each.grad) for each in read)]


def _of_all_norms(dtype):
    """Far from 0, so that a mean which is rounded to half would stand out in the gradient."""
    off = {}
    for name, norm in NORMS.items():
        x = (full(4, 4, 6) + 30).to(dtype)
        parameters = [full(4, seed=1), full(4, seed=2), full(4, seed=3) + 30, full(4, seed=4) ** 2 + 0.5]
        wanted = _value_and_gradient(norm, x.clone(), *(p.clone() for p in parameters))
        for placement in (sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Shard(2)):
            put = [sw.distribute_tensor(p, mesh(), [sw.Replicate()]) for p in parameters]
            got = _value_and_gradient(norm, sw.distribute_tensor(x, mesh(), [placement]), *put)
            for what, a, b in zip(("value", "gradient", "weight", "bias"), got, wanted, strict=False):
                error = (a.double() - b.double()).abs().max() / b.double().abs().max()
                if a.dtype != b.dtype or error > 2 * torch.finfo(dtype).eps:
                    off[f"{name} under {placement}: {what}"] = float(error)
    return off


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_are_as_wide_as_on_one_device(ranks, dtype):
    assert ranks(2, _of_all_norms, dtype) == [{}] * 2
