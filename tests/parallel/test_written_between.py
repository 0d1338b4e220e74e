"""A parameter that computes as its local tensor, written between a forward and its backward."""

import torch
from torch import nn

from shardwright.parallel import parallelize_replicate
from shardwright.testing import rank_mesh


def _stepped(model, **how):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.1, **how).step()


WRITES = {
    "multiplied": lambda model: model[2].weight.mul_(2.0),
    "copied": lambda model: model[2].weight.copy_(model[2].weight * 2),
    "drawn": lambda model: nn.init.normal_(model[2].weight),
    "one element": lambda model: model[2].weight[0].fill_(1.0),
    "a view": lambda model: model[2].weight.view(-1).mul_(2.0),
    "detached": lambda model: model[2].weight.detach().mul_(2.0),
    "a list": lambda model: torch._foreach_mul_([model[2].weight], 2.0),
    "stepped": lambda model: _stepped(model, foreach=False),
    "stepped as a list": lambda model: _stepped(model, foreach=True),
}


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def _outcome(model, write):
    loss = model(torch.ones(2, 4)).square().sum()
    with torch.no_grad():
        write(model)
    try:
        loss.backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error) or "modified inplace" in str(error)
    return False


def _refused():
    mesh = rank_mesh((2,), ("dp",))
    for _ in range(2):  # what a call does is known the second time
        for name, write in WRITES.items():
            assert _outcome(_model(), write), name
            model = _model()
            parallelize_replicate(model, mesh)
            assert _outcome(model, write), name


def test_a_gradient_of_other_values_is_an_error_as_on_one_device(ranks):
    ranks(2, _refused)


def _taken():
    mesh, whole = rank_mesh((2,), ("dp",)), _model()
    model = _model()
    parallelize_replicate(model, mesh)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (whole, model)]
    x = torch.randn(2, 4)
    for _ in range(3):
        for each, optimizer in zip((whole, model), optimizers, strict=True):
            rows = x if each is whole else x[mesh.get_local_rank()][None]
            with torch.no_grad():
                each[0].weight.clamp_(-1, 1)
            loss = each(rows).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), whole.get_parameter(name))


def test_writes_before_a_forward_and_after_its_backward_are_taken(ranks):
    ranks(2, _taken)


def _fused_into_the_backward():
    mesh, whole = rank_mesh((2,), ("dp",)), _model()
    model = _model()
    parallelize_replicate(model, mesh)
    x = torch.randn(2, 4)
    for each in (whole, model):

        def step(parameter):
            with torch.no_grad():
                parameter.add_(parameter.grad, alpha=-0.1)
            parameter.grad = None

        for parameter in each.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        rows = x if each is whole else x[mesh.get_local_rank()][None]
        for _ in range(2):
            each(rows).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), whole.get_parameter(name))


def test_a_step_inside_of_the_backward_is_taken(ranks):
    ranks(2, _fused_into_the_backward)
