"""The sequence of a part of a model is cut: what is outside has its whole gradient on each of these ranks."""

import pytest
import torch
from torch import nn

from shardwright.errors import ParallelError
from shardwright.grads import GradientSynchronizer, clip_grad_norm_
from shardwright.parallel import parallelize, parallelize_context, parallelize_fsdp, parallelize_replicate
from shardwright.testing import rank_mesh
from tests.parallel.table.worlds import context


class _Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(8, 8), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return (self.inner(x) * self.scale).tanh()


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.part, self.after = nn.Linear(8, 8), _Part(), nn.Linear(8, 3)
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return (self.after(self.part(self.before(x))) * self.gain).square().sum()


def _batch():
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


def _differing(model, row):
    one = _Net()
    one(_batch()).backward()
    model(_batch()[row][None]).backward()
    GradientSynchronizer(model).synchronize()
    wanted = {name: p.grad for name, p in one.named_parameters()}
    norm = torch.cat([gradient.flatten() for gradient in wanted.values()]).norm()
    torch.testing.assert_close(clip_grad_norm_(model, 1e9), norm, rtol=1e-4, atol=0)
    return [
        name
        for name, p in model.named_parameters()
        if not torch.allclose(p.grad.full_tensor(), wanted[name], rtol=1e-4, atol=1e-5)
    ]


def _by_calls(data):
    mesh, model = rank_mesh((2, 2), ("dp", "cp")), _Net()
    parallelize_context(model.part, mesh["cp"], output="whole")
    (parallelize_replicate if data == "replicate" else parallelize_fsdp)(model, mesh["dp"])
    return _differing(model, mesh.get_local_rank("dp"))


@pytest.mark.parametrize("data", ["replicate", "fsdp"])
def test_only_the_terms_of_the_part_are_summed_over_its_ranks(ranks, data):
    assert ranks(4, _by_calls, data) == [[]] * 4


TABLES = {
    "a part, fsdp": {"part": {"context": {"output": "whole"}}, "": "fsdp"},
    "a part, units": {"part": [{"context": {"output": "whole"}}, "fsdp"], "": "fsdp"},
    "all, fsdp": {"": ["context", "fsdp"]},
    "all, units": {"": ["context", "fsdp"], "part": "fsdp"},
    "all, copies of units": {"": ["context", "hsdp"], "part": "hsdp"},
}


def _by_table(name):
    data = {"data_parallel_replicate": 2} if "copies" in name else {"data_parallel_shard": 2}
    at, model = context(**data, context_parallel_shard=2), _Net()
    parallelize(model, at, TABLES[name], report=None)
    return _differing(model, at.mesh_for("batch")["dp"].get_local_rank())


@pytest.mark.parametrize("name", TABLES)
def test_a_table_sums_each_gradient_once_also_of_parameters_without_dims(ranks, name):
    assert ranks(4, _by_table, name) == [[]] * 4


def _over_all(which):
    mesh, model = rank_mesh((2, 2), ("dp", "cp")), _Net()
    del model.gain
    del model.part.scale
    over_all = mesh["dp", "cp"]._flatten("dp_cp")
    parallelize_context(model.part, mesh["cp"], output="whole")
    if which == "units":
        parallelize_fsdp(model.part, over_all)
    if which == "in another dtype":
        model.double()
    if which == "assigned":
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    before = dict(model.named_parameters())
    with pytest.raises(ParallelError) as caught:
        parallelize_fsdp(model, over_all)
    assert dict(model.named_parameters()) == before
    return str(caught.value)


@pytest.mark.parametrize("which", ["root", "units", "in another dtype", "assigned"])
def test_units_that_would_count_what_is_outside_once_for_each_rank_are_refused(ranks, which):
    for said in ranks(4, _over_all, which):
        assert (
            "before.weight: ('dp_cp',) holds the ranks of ('cp',), which cut the activations of a part"
            in said
        )
        assert "fix: parallelize_context of the model that holds both" in said


def _replicated_before():
    mesh, model = rank_mesh((2, 2), ("dp", "cp")), _Net()
    parallelize_replicate(model, mesh["dp", "cp"]._flatten("dp_cp"))
    with pytest.raises(ParallelError) as caught:
        parallelize_context(model.part, mesh["cp"], output="whole")
    return str(caught.value)


def test_a_part_of_what_counts_these_ranks_as_data_is_refused(ranks):
    for said in ranks(4, _replicated_before):
        assert "scale: it is replicated on ('dp_cp',), which hold the ranks of ('cp',)" in said
        assert "fix: parallelize_context first" in said
