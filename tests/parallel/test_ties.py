"""A tied weight is one parameter whatever is placed first, or the second placing is refused by both names."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import shardwright as sw
from shardwright.errors import ParallelError
from shardwright.grads import GradientSynchronizer
from shardwright.parallel import (
    ToLocalParallel,
    parallelize_fsdp,
    parallelize_hsdp,
    parallelize_replicate,
    parallelize_tensor,
)
from shardwright.testing.meshes import rank_mesh

from .residual import check, one_device


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.middle(self.embedding(tokens)).tanh())

    def parts(self):
        return self.embedding, self.middle, self.head


def _tied():
    torch.manual_seed(0)
    return Tied()


def _mesh():
    return rank_mesh((2, 1), ("dp", "tp"))


def _by_function(name, child, mesh):
    """torch's way to place: each module registers its own."""
    for key, p in list(child._parameters.items()):
        if p is not None:
            child.register_parameter(key, nn.Parameter(sw.distribute_tensor(p.detach(), mesh, [sw.Shard(0)])))


SUMMED = ToLocalParallel(sw.Replicate(), sw.Partial("sum"))
REPLICATED = {
    "replicate": lambda part, mesh: parallelize_replicate(part, mesh["dp"]),
    "to local": lambda part, mesh: SUMMED._apply(part, mesh["dp"]),
}
TIED = {
    **REPLICATED,
    "distribute_module": lambda part, mesh: sw.distribute_module(part, mesh["dp"]),
    "a plan": lambda part, mesh: sw.distribute_module(part, mesh["dp"], {"weight": {"dp": sw.Shard(0)}}),
    "a function": lambda part, mesh: sw.distribute_module(part, mesh["dp"], _by_function),
}
REFUSED = {
    "fsdp": lambda part, mesh: parallelize_fsdp(part, mesh["dp"]),
    "hsdp": lambda part, mesh: parallelize_hsdp(part, mesh, "dp"),
}


def _by_parts(name):
    model, mesh = _tied(), _mesh()
    for part in model.parts():
        TIED[name](part, mesh)
    assert model.head.weight is model.embedding.weight
    assert isinstance(model.head.weight, sw.DTensor)
    if name not in REPLICATED:
        return
    tokens = torch.arange(6).reshape(3, 2)
    wanted = one_device(_tied(), tokens)
    for _ in range(2):
        model(tokens.split((1, 2))[mesh.get_local_rank("dp")]).square().sum().backward()
        GradientSynchronizer(model).synchronize()
        check(model, wanted)
        model.zero_grad()


@pytest.mark.parametrize("name", TIED)
def test_parts_placed_one_by_one_stay_tied(ranks, name):
    ranks(2, _by_parts, name)


def _strategies_over_parts():
    """Replicate over two axes, one after the other, each over all parts."""
    model, mesh = _tied(), _mesh()
    for axis in ("dp", "tp"):
        for part in model.parts():
            parallelize_replicate(part, mesh[axis])
    return model.head.weight is model.embedding.weight


def test_two_strategies_over_all_parts_keep_the_tie(ranks):
    assert ranks(2, _strategies_over_parts) == [True, True]


def _state(model):
    return [
        (n, type(child), dict(child._parameters), len(child._forward_pre_hooks), len(child._forward_hooks))
        for n, child in model.named_modules()
    ]


def _same(left, right):
    return all(
        a[:2] == b[:2] and a[3:] == b[3:] and all(a[2][key] is b[2][key] for key in {*a[2], *b[2]})
        for a, b in zip(left, right, strict=True)
    )


def _refused(model, call):
    before = _state(model)
    with pytest.raises(ParallelError) as caught:
        call()
    assert _same(_state(model), before)
    return str(caught.value)


def _units(name):
    model, mesh = _tied(), _mesh()
    REFUSED[name](model.head, mesh)
    by_part = _refused(model, lambda: REFUSED[name](model.embedding, mesh))
    by_root = _refused(model, lambda: REFUSED[name](model, mesh))
    fresh = REFUSED[name](_tied(), mesh)
    return by_part, by_root, fresh.head.weight is fresh.embedding.weight


@pytest.mark.parametrize("name", REFUSED)
def test_a_sharded_unit_that_took_one_name_is_refused_at_the_other(ranks, name):
    by_part, by_root, whole = ranks(2, _units, name)[0]
    assert "weight of Embedding and weight of " in by_part
    assert "embedding.weight of Tied and head.weight of Tied are one parameter (tied weights)" in by_root
    assert by_root.endswith("place both in one call, on a module that holds both")
    assert whole


def _rows_cut(part, mesh):
    parallelize_tensor(part, mesh["dp"], RowwiseParallel())


def _placed_differently():
    mesh = _mesh()
    texts = []
    for first, second in (
        (REPLICATED["replicate"], TIED["a plan"]),
        (TIED["a plan"], REPLICATED["replicate"]),
        (_rows_cut, TIED["distribute_module"]),
    ):
        model = _tied()
        first(model.embedding, mesh)
        texts.append(_refused(model, lambda m=model, place=second: place(m.head, mesh)))
    for plan in ({"head": ColwiseParallel()}, {"embedding": ColwiseParallel(), "head": ColwiseParallel()}):
        model = _tied()
        texts.append(_refused(model, lambda m=model, p=plan: parallelize_tensor(m, mesh["dp"], p)))
    return texts


def test_names_that_would_be_placed_differently_are_refused(ranks):
    for text in ranks(2, _placed_differently)[0]:
        assert "are one parameter (tied weights), and it would not stay one" in text


def _cut_alike():
    model, mesh = _tied(), _mesh()
    plan = {"embedding": RowwiseParallel(), "head": ColwiseParallel()}
    parallelize_tensor(model, mesh["dp"], plan)
    layout = str(model.head.weight._spec.layout)
    return layout, model.head.weight is model.embedding.weight


def test_torchs_styles_that_cut_both_names_alike_keep_the_tie(ranks):
    assert ranks(2, _cut_alike)[0] == ("f32[6@dp, 4]", True)
