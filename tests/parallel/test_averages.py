"""Averages of a model's parameters over its steps, in the ways of `torch.optim.swa_utils` and by hand."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import shardwright as sw
from shardwright.grads import GradientSynchronizer
from shardwright.parallel import parallelize_fsdp, parallelize_replicate, parallelize_tensor
from shardwright.testing import rank_mesh

STEPS = 3


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, affine=False, momentum=0.0), nn.Linear(6, 2))


def _train(model, follow, rows, loss_of, settle=lambda: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        loss_of(model, rows).backward()
        settle()
        optimizer.step()
        optimizer.zero_grad()
        follow(model)


def _loss(model, rows):
    return model(rows).square().sum()


def _placed(how):
    """The model on two ranks, the rows of this one, and the block to compute in."""
    mesh, model = rank_mesh((2,), ("x",)), _model().eval()
    rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    if how == "tensor":
        parallelize_tensor(model, mesh, {"0": "colwise", "2": "rowwise"})
        return model, rows, lambda m, x: _inside(mesh, m, x)
    (parallelize_replicate if how == "replicate" else parallelize_fsdp)(model, mesh)
    return model, rows.chunk(2)[mesh.get_local_rank()], _loss


def _inside(mesh, model, rows):
    with sw.spmd(mesh):
        return _loss(model, rows)


def _averaged(how, average):
    model, rows, loss_of = _placed(how)
    one = _model().eval()
    wanted = AveragedModel(one, multi_avg_fn=average())
    whole_rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    _train(one, wanted.update_parameters, whole_rows, _loss)
    if how == "fsdp":
        found = _by_hand(model, rows, loss_of)
    else:
        averaged = AveragedModel(model, multi_avg_fn=average())
        _train(model, averaged.update_parameters, rows, loss_of, GradientSynchronizer(model).synchronize)
        found = averaged.module
    for name, parameter in found.named_parameters():
        torch.testing.assert_close(
            parameter.detach().full_tensor(), wanted.module.get_parameter(name).detach()
        )


def _by_hand(model, rows, loss_of):
    average: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def follow(model):
        for name, value in model.state_dict().items():
            if name not in average:
                average[name] = value.clone()
            elif value.is_floating_point():
                average[name].lerp_(value, 0.1)

    _train(model, follow, rows, loss_of, GradientSynchronizer(model).synchronize)
    model.load_state_dict(copy.deepcopy(average))
    return model


def _ema():
    return get_ema_multi_avg_fn(0.9)


@pytest.mark.parametrize(
    ("how", "average"),
    [
        ("replicate", _ema),
        ("replicate", get_swa_multi_avg_fn),
        ("tensor", _ema),
        ("tensor", get_swa_multi_avg_fn),
        ("fsdp", _ema),
    ],
)
def test_an_average_of_parameters_is_one_devices(ranks, how, average):
    ranks(2, _averaged, how, average)
