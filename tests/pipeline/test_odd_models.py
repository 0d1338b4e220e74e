"""Models that write in place, take lists apart, freeze, share or look at their activations."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.errors import ParallelError
from shardwright.grads import GradientSynchronizer, clip_grad_norm_
from shardwright.parallel import (
    Pipeline,
    parallelize_fsdp,
    parallelize_pipeline,
    parallelize_replicate,
    parallelize_tensor,
)
from shardwright.testing import rank_mesh
from shardwright.testing.rank_device import here
from tests.pipeline.own_code import Base, H, Part, Stops
from tests.pipeline.ranks import whole


class WritesBetween(Base):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x += 0.5
        return x


class Frozen(Base):
    def __init__(self):
        super().__init__()
        self.layers[:2].requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Shared(Frozen):
    """One block that both stages call."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(True)
        self.layers[3] = self.layers[1]


class SharesInside(Base):
    """Blocks of both stages hold one and the same layer, each beside weights of its own."""

    class Outer(Part):
        def forward(self, x):
            return super().forward(self.inner(x))

    def __init__(self):
        super().__init__(self.Outer)
        inner = nn.Linear(H, H)
        for layer in self.layers:
            layer.inner = inner


class Looks(Base):
    """Its own code branches on an activation."""

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if x.abs().max() > 1e6:
                x = x / 2
        return x


class Checkpointed(Base):
    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Iterates(nn.Module):
    """Takes the members of an nn.Sequential, whose last one writes in place."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(H, H)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(H, H), nn.ReLU(inplace=True)) for _ in range(4))
        )
        self.head = nn.Linear(H, 2)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Dicts(nn.Module):
    def __init__(self):
        super().__init__()
        self.pairs = nn.ModuleList(nn.ModuleDict({"a": Part(), "b": Part()}) for _ in range(2))

    def forward(self, x):
        for pair in self.pairs:
            x = x + pair["b"](pair["a"](x))
        return x


class Norms(nn.Module):
    """Batch norms see the micro-batches one by one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(H, H), nn.BatchNorm1d(H))
        self.second = nn.Sequential(nn.Linear(H, H), nn.BatchNorm1d(H))

    def forward(self, x):
        return self.second(self.first(x))


class Numbers(nn.Module):
    """Integers and a plain number cross the border."""

    class Picks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(H, H)

        def forward(self, x):
            y = self.linear(x)
            return y, y.argmax(-1), 3

    def __init__(self):
        super().__init__()
        self.picks, self.then, self.table = self.Picks(), Part(), nn.Embedding(H, H)

    def forward(self, x):
        y, index, number = self.picks(x)
        return self.then(y * number) + self.table(index)


class StopsOneStream(Stops):
    """Of two streams one is detached."""

    def forward(self, x):
        beside, x = self.layers[0](x), self.layers[1](x)
        return self.layers[2](x) + self.layers[3](beside)


class Recurrent(Base):
    """A layer that lists its parameters beside, where sharded units replace them."""

    def __init__(self):
        super().__init__()
        self.layers[0] = nn.GRU(H, H)

    def forward(self, x):
        x = self.layers[0](x)[0]
        for layer in self.layers[1:]:
            x = layer(x)
        return x


CASES = {
    "writes between": (WritesBetween, ["layers.2"]),
    "frozen": (Frozen, ["layers.2"]),
    "shared": (Shared, ["layers.2"]),
    "shares inside": (SharesInside, ["layers.2"]),
    "looks": (Looks, ["layers.2"]),
    "checkpointed": (Checkpointed, ["layers.2"]),
    "iterates": (Iterates, ["blocks.2"]),
    "inside a block": (Iterates, ["blocks.1.1"]),
    "dicts": (Dicts, ["pairs.0.b"]),
    "dicts whole": (Dicts, ["pairs.1"]),
    "norms": (Norms, ["second"]),
    "numbers": (Numbers, ["then"]),
    "detached": (Stops, ["layers.2"]),
    "a detached stream": (StopsOneStream, ["layers.2"]),
    "detached by the last stage": (Stops, ["layers.3"]),
    "hooked after the cut": (Base, ["layers.2"]),
    "recurrent, sharded": (Recurrent, ["layers.1", "layers.2", "layers.3"]),
}


def _loss(out, _):
    return out.square().sum()


def _steps(name):
    make, cuts = CASES[name]
    torch.manual_seed(0)
    model = make()
    alone = copy.deepcopy(model)
    x = torch.randn(4, H)
    mesh = rank_mesh((2, 1), ("pp", "dp"))
    parallelize_pipeline(model, mesh["pp"], cuts)
    if "sharded" in name:
        parallelize_fsdp(model, mesh["dp"])
    for each in (model, alone) if "hooked" in name else ():
        each.layers[1].register_forward_pre_hook(lambda _, given: (given[0] + 1,))
        each.layers[1].register_forward_hook(lambda _, given, out: out * given[0])
    pipeline = Pipeline(model, _loss, micro_batches=2)
    for _ in range(2):
        value = float(pipeline.step(x))
        wanted = 0.0
        for rows in x.chunk(2):
            term = _loss(alone(rows), None)
            term.backward()
            wanted += float(term.detach())
        assert value == pytest.approx(wanted, rel=1e-5)
    known = dict(alone.named_parameters(remove_duplicate=False))
    for path, parameter in model.named_parameters():
        assert (parameter.grad is None) == (known[path].grad is None)
        if parameter.grad is not None:
            torch.testing.assert_close(whole(parameter.grad), known[path].grad, rtol=1e-4, atol=1e-4)
    for path, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, dict(alone.named_buffers())[path])
    norm = clip_grad_norm_(model, 1.0)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(alone.parameters(), 1.0), rtol=1e-5, atol=0)
    assert pipeline.evaluate(x).isfinite()


@pytest.mark.parametrize("name", CASES)
def test_they_give_what_one_device_gives(ranks, name):
    ranks(2, _steps, name)


def _norm_of_all_stages(strategy, convert):
    mesh = sw.init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    model = Frozen()
    alone = copy.deepcopy(model).double()
    parallelize_pipeline(model, mesh["pp"], ["layers.2"])
    strategy(model, mesh["dp"])
    convert(model)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            value = alone.get_parameter(path).to(parameter.dtype)
            getattr(parameter, "_local_tensor", parameter).copy_(value)  # one rank of `dp`
    x = torch.randn(4, H)
    Pipeline(model, _loss, micro_batches=2).step(x.to(next(model.parameters()).dtype))
    _loss(alone(x.double()), None).backward()
    wanted = nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 1.0).double(), wanted, rtol=1e-5, atol=0)


def _alone(model, _mesh):
    return model


def _without_memory(model):
    model.to("meta").to_empty(device=here())


@pytest.mark.parametrize("strategy", [_alone, parallelize_replicate, parallelize_fsdp])
@pytest.mark.parametrize("convert", [nn.Module.double, _without_memory])
def test_a_norm_is_that_of_all_stages_after_a_conversion(ranks, strategy, convert):
    """torch puts other tensors in the places of parameters, without what hung on them."""
    ranks(2, _norm_of_all_stages, strategy, convert)


class WritesInside(nn.Module):
    class Doubles(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(H, H)

        def forward(self, x):
            return self.linear(x.mul_(2.0))

    def __init__(self):
        super().__init__()
        self.first, self.doubles = nn.Linear(H, H), self.Doubles()
        self.third, self.last = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x):
        x = self.first(x)
        return self.last(self.third(self.doubles(x)) + x)


def _refused():
    model = WritesInside()
    parallelize_pipeline(model, rank_mesh((2,), ("pp",)), ["third"])
    with pytest.raises(ParallelError, match="doubles writes in place into what first returned, and stage 1"):
        Pipeline(model, _loss, micro_batches=2).step(torch.ones(4, H))


def test_a_part_that_writes_into_what_a_later_stage_reads_is_refused(ranks):
    ranks(2, _refused)


class CheckpointedAtOnce(Base):
    def forward(self, x):
        return checkpoint(
            lambda x: self.layers[3](self.layers[2](self.layers[1](self.layers[0](x)))),
            x,
            use_reentrant=False,
        )


def _checkpoints_over_a_border():
    model = CheckpointedAtOnce()
    parallelize_pipeline(model, rank_mesh((2,), ("pp",)), ["layers.2"])
    with pytest.raises(ParallelError, match=r"computed again are of one stage(.|\n)*each layer by itself"):
        Pipeline(model, _loss, micro_batches=2).step(torch.randn(4, H))


def test_a_checkpoint_over_a_border_is_refused(ranks):
    ranks(2, _checkpoints_over_a_border)


def _first_feature(out, _target):
    return out[..., 0].square().sum()


def _one_rank_has_the_loss() -> None:
    """The last layer is cut by its features, and the loss reads one of them."""
    torch.manual_seed(0)
    model, rows = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)), torch.randn(4, 4)
    one = copy.deepcopy(model)
    mesh = rank_mesh((2, 2), ("pp", "tp"))
    parallelize_tensor(model, mesh["tp"], {"2.weight": {"tp": sw.Shard(0)}, "2.bias": {"tp": sw.Shard(0)}})
    parallelize_pipeline(model, mesh["pp"], ["2"])
    pipeline = Pipeline(model, _first_feature, micro_batches=2)
    with sw.spmd(mesh["tp"]):
        value = pipeline.step(rows, target=rows)
    wanted = _first_feature(one(rows), rows)
    wanted.backward()
    torch.testing.assert_close(value, wanted.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), one.get_parameter(name).grad, msg=name)


def test_a_loss_that_one_tensor_parallel_rank_has(ranks):
    """Its peers hold nothing of it, and their backwards failed while it waited for them."""
    ranks(4, _one_rank_has_the_loss)


class TiedHead(nn.Module):
    """The weight of the first stage is a head in the last, beside a head that some losses read alone."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(H, H, bias=False), Part()
        self.tied, self.other = nn.Linear(H, H, bias=False), nn.Linear(H, H)
        self.tied.weight = self.first.weight

    def forward(self, x):
        x = self.second(self.first(x))
        return self.tied(x), self.other(x), self.tied(x.detach())


def _of_heads(out, target):
    return out[int(target[0])].square().sum()


def _data_ranks_read_other_heads(heads):
    torch.manual_seed(0)
    model, rows = TiedHead(), torch.randn(8, H)
    one, mesh = copy.deepcopy(model), rank_mesh((2, 2), ("pp", "dp"))
    parallelize_pipeline(model, mesh["pp"], ["second"])
    parallelize_replicate(model, mesh["dp"])
    own = mesh.get_local_rank("dp")
    pipeline = Pipeline(model, _of_heads, micro_batches=2)
    for _ in range(2):
        pipeline.step(rows.chunk(2)[own], target=torch.full((4,), heads[own]))
        for part, head in zip(rows.chunk(2), heads, strict=True):
            _of_heads(one(part), [head]).backward()
    GradientSynchronizer(model).synchronize()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(whole(parameter.grad), one.get_parameter(name).grad, msg=name)


@pytest.mark.parametrize("heads", [(1, 0), (2, 0)])
def test_data_ranks_may_use_one_copy_of_a_tied_weight_alone(ranks, heads):
    """Gradients of a copy were finished over the data ranks, of which one had none: they waited."""
    ranks(4, _data_ranks_read_other_heads, heads, timeout=30)
