"""A plan of torch's styles: a shared module once, everything checked before anything is changed."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

import shardwright as sw
from shardwright.errors import ParallelError
from shardwright.parallel import parallelize_fsdp, parallelize_tensor
from shardwright.testing.meshes import rank_mesh


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def _model():
    torch.manual_seed(0)
    model = nn.Sequential(_Block(), _Block(), nn.Conv1d(3, 3, 1))
    model[1].down = model[0].down
    return model


def _shared():
    model = _model()
    one, x = copy.deepcopy(model), torch.randn(3, 4)
    one(x).square().sum().backward()
    parallelize_tensor(
        model, rank_mesh((2,), ("tp",)), {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    )
    assert model[1].down is model[0].down
    out = model(x)
    torch.testing.assert_close(out, one(x))
    out.square().sum().backward()
    for name, p in one.named_parameters():
        grad = model.get_parameter(name).grad
        torch.testing.assert_close(grad.full_tensor() if hasattr(grad, "full_tensor") else grad, p.grad)


def test_a_module_that_two_blocks_share_is_styled_once(ranks):
    ranks(2, _shared)


def _kept():
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4), nn.Embedding(4, 4))
    called = []
    for index, p in enumerate(model.parameters()):
        p.tag = index
        if index % 2:
            p.requires_grad_(False)
        else:
            p.register_hook(lambda grad, index=index: called.append(index))
    wanted = [(n, p.requires_grad, p.tag) for n, p in model.named_parameters()]
    plan = {
        "0": SequenceParallel(sequence_dim=0), "1": ColwiseParallel(),
        "2": RowwiseParallel(), "3": RowwiseParallel(),
    }  # fmt: skip
    parallelize_tensor(model, rank_mesh((2,), ("tp",)), plan)
    assert all(type(p) is not nn.Parameter for p in model.parameters())
    assert [(n, p.requires_grad, p.tag) for n, p in model.named_parameters()] == wanted
    torch.autograd.backward([p.sum() for p in model.parameters() if p.requires_grad])
    assert sorted(called) == [0, 2, 4, 6]


def test_a_style_keeps_what_is_frozen_frozen_and_attributes_and_hooks(ranks):
    """Torch's own styles make a trainable norm of a frozen one."""
    ranks(2, _kept)


def _state(model):
    hooks = [(n, type(m), len(m._forward_pre_hooks), len(m._forward_hooks)) for n, m in model.named_modules()]
    return hooks, [(n, id(p)) for n, p in model.named_parameters(remove_duplicate=False)]


def _refused(prepare, plan):
    model, mesh = _model(), rank_mesh((2, 2), ("dp", "tp"))
    if prepare is not None:
        prepare(model, mesh["dp"])
    before = _state(model)
    with pytest.raises(ParallelError) as caught:
        parallelize_tensor(model, mesh["tp"], plan)
    assert _state(model) == before
    if prepare is None:  # and it is still whole: the right plan is taken
        parallelize_tensor(model, mesh["tp"], {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()})
    return str(caught.value)


def test_what_a_plan_cannot_mean_is_refused_with_the_module_unchanged(ranks):
    up = {"*.up": ColwiseParallel()}
    two = up | {"0.down": RowwiseParallel(), "1.down": ColwiseParallel()}
    assert ranks(4, _refused, None, two)[0] == (
        "0.down and 1.down are one module, and the plan has two styles for it: RowwiseParallel and "
        "ColwiseParallel; name one style for both"
    )
    assert ranks(4, _refused, None, up | {"*.upp": ColwiseParallel()})[0] == (
        "no module is named '*.upp'; Sequential has 0, 1, 2"
    )
    assert ranks(4, _refused, None, up | {"2": ColwiseParallel()})[0].startswith(
        "2: ColwiseParallel does not take a Conv1d ("
    )


def test_styles_after_a_unit_was_sharded_are_refused(ranks):
    """After `parallelize_replicate` they are applied, see test_order.py."""
    text = ranks(4, _refused, parallelize_fsdp, {"*.up": ColwiseParallel()})[0]
    assert text.startswith("0.up.weight is placed already (f32[6")
    assert text.endswith(
        "so ColwiseParallel cannot cut it; apply tensor parallelism before the strategies that place "
        "parameters over data ranks"
    )


_NORMS = {
    "rms": lambda affine: nn.RMSNorm((8, 10), elementwise_affine=affine),
    "layer": lambda affine: nn.LayerNorm((8, 10), elementwise_affine=affine),
    "dropout": lambda affine: nn.Dropout(0.0),
}


def _norm_of_a_sequence(name, affine):
    one = _NORMS[name](affine)
    model = parallelize_tensor(copy.deepcopy(one), rank_mesh((2,), ("tp",)), {"": SequenceParallel()})
    whole = torch.randn(3, 2 * dist.get_world_size(), 8, 10)
    x, mine = whole.clone().requires_grad_(), whole.chunk(2, 1)[dist.get_rank()].clone().requires_grad_()
    out = model(mine)
    assert type(out) is sw.DTensor
    torch.testing.assert_close(out.full_tensor(), one(x))
    out.square().sum().backward()
    one(x).square().sum().backward()
    torch.testing.assert_close(mine.grad, x.grad.chunk(2, 1)[dist.get_rank()])
    for key, p in one.named_parameters():
        torch.testing.assert_close(model.get_parameter(key).grad.full_tensor(), p.grad)


@pytest.mark.parametrize("affine", [True, False], ids=["with parameters", "without"])
@pytest.mark.parametrize("name", _NORMS)
def test_what_a_style_makes_of_an_input_is_ours(ranks, name, affine):
    """Torch's own DTensor took a norm over two dims apart, and refused to write what it had made."""
    ranks(2, _norm_of_a_sequence, name, affine)
