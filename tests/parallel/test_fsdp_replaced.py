"""Tensors in the places of sharded parameters are refused, and writes into what `fully_shard` gathered."""

import copy

import pytest
import torch
import torch.distributed.tensor as torchs
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.utils import parametrizations

import shardwright as sw
from shardwright.errors import ParallelError
from shardwright.parallel import parallelize_fsdp, parallelize_tensor
from shardwright.testing.meshes import rank_mesh


def _model(mesh):
    model = _plain()
    parallelize_fsdp(model[0], mesh)
    return parallelize_fsdp(model, mesh)


def _substituted():
    mesh = rank_mesh((2,), ("dp",))
    x = torch.randn(3, 4)
    for earlier in (False, True):
        for given in (lambda p: p.detach() * 2, lambda p: nn.Parameter(p.detach() * 2)):
            model = _model(mesh)
            if earlier:
                model(x).sum().backward()
            elif given(torch.ones(1)).requires_grad:
                continue  # before the first forward a parameter may be put in another's place
            held = dict(model.named_parameters())
            with pytest.raises(ParallelError, match="functional_call"):
                torch.func.functional_call(model, {name: given(p) for name, p in held.items()}, (x,))
            after = dict(model.named_parameters())
            assert all(after[name] is p for name, p in held.items())
            torch.func.functional_call(model, held, (x,)).sum().backward()
            model(x).sum().backward()
        for takes_away in (parametrizations.weight_norm, lambda layer: setattr(layer, "bias", None)):
            model = _model(mesh)
            if earlier:
                model(x).sum().backward()
            takes_away(model[2])
            with pytest.raises(ParallelError, match="before sharding"):
                model(x)


def test_functional_call_with_other_tensors_is_refused(ranks):
    ranks(2, _substituted)


def _swapped():
    """By `torch.utils.swap_tensors`, which keeps the object: at first, and between two steps."""
    mesh, x = rank_mesh((2,), ("dp",)), torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    one, model = _plain(), _model(mesh)
    for steps in range(2):
        for held in (one, model):
            for parameter in list(held.parameters()):
                torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() * (0.5 + steps)))
            held.zero_grad()
            loss = held(x).square().sum()
            loss.backward()
        torch.testing.assert_close(loss, one(x).square().sum())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor() / 2, one.get_parameter(name).grad)


def _plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def test_what_is_swapped_into_a_parameter_is_gathered(ranks):
    """The unit computed with the memory that it had before, in silence."""
    ranks(2, _swapped)


def _swapped_for_another():
    mesh = rank_mesh((2,), ("dp",))
    for given, placement in (
        (torch.ones(2), sw.Replicate()),
        (torch.ones(4), sw.Shard(0)),
        (torch.ones(2).double(), sw.Shard(0)),
    ):
        model = _model(mesh)
        other = sw.distribute_tensor(given, mesh, [placement], src_data_rank=None)
        torch.utils.swap_tensors(model[2].bias, nn.Parameter(other))
        with pytest.raises(ParallelError, match="bias: another tensor"):
            model(torch.ones(3, 4))


def test_what_lies_otherwise_is_not(ranks):
    ranks(2, _swapped_for_another)


class _Writes(nn.Module):
    """Its forward writes into its parameters, or into none."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.table = nn.Embedding(6, 4, max_norm=0.1 if how == "renorm" else None)
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, rows):
        with torch.no_grad():
            if self.how == "clamp":
                self.weight.clamp_(-0.1, 0.1)
            elif self.how == "other memory":
                self.weight.data = nn.functional.normalize(self.weight)
        return self.table(rows) @ self.weight


def _lost(how, cut_apart, keep):
    torch.manual_seed(0)
    mesh, model = rank_mesh((2,), ("dp",)), _Writes(how)
    if cut_apart:
        parallelize_fsdp(model.table, mesh)
    parallelize_fsdp(model, mesh, reshard_after_forward=not keep)
    rows = torch.tensor([1, 2])
    if how == "nothing":
        for _ in range(3):
            model(rows).sum().backward()
            with torch.no_grad():
                model(rows)
            model.reshard()
            for parameter in model.parameters():
                with torch.no_grad():
                    parameter.clamp_(-0.1, 0.1)
        return ""
    with pytest.raises(ParallelError) as caught:
        model(rows)
    return str(caught.value)


@pytest.mark.parametrize("cut_apart", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("how", ["clamp", "other memory", "renorm", "nothing"])
def test_what_a_forward_writes_into_gathered_parameters_is_refused(ranks, how, cut_apart, keep):
    for said in ranks(2, _lost, how, cut_apart, keep):
        assert how == "nothing" or "weight: the forward of FSDP" in said


def _used_as_ever():
    """What puts parameters in place itself: dtypes, devices, states, gathered roots, forwards in a row."""
    mesh = rank_mesh((2,), ("dp",))
    x = torch.randn(3, 4)
    model = _model(mesh)
    model(x)
    with torch.no_grad():
        model(x)
    model(x).sum().backward()
    model.double()
    model(x.double()).sum().backward()
    model.load_state_dict(model.state_dict())
    model.eval()
    model(x.double())
    model[0](x.double())
    model(x.double()).sum().backward()


def test_other_uses_are_taken(ranks):
    ranks(2, _used_as_ever)


def _cut_over_a_few_between():
    """A forward after a forward, where torch holds the parameters cut over 2 of the 4 ranks in between."""
    mesh = rank_mesh((4,), ("dp",))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    model = copy.deepcopy(plain)
    for part in (model[0], model):
        parallelize_fsdp(part, mesh, reshard_after_forward=2)
    x = torch.randn(8, 4)
    for quiet in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for _ in range(2):
            with quiet():
                torch.testing.assert_close(model(x), plain(x))
        (model(x.chunk(4)[mesh.get_local_rank()]).square().sum()).backward()
        plain(x).square().sum().backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
    model(x)
    with pytest.raises(ParallelError, match="functional_call"):
        torch.func.functional_call(model, {"2.bias": plain[2].bias}, (x,))


def test_a_forward_follows_one_that_cut_over_a_few_ranks(ranks):
    ranks(4, _cut_over_a_few_between)


def _assigned():
    mesh = rank_mesh((2,), ("dp",))
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).state_dict()
    for earlier in (False, True):
        model = _model(mesh)
        if earlier:
            model(torch.randn(3, 4))
        before = {name: p.full_tensor().clone() for name, p in model.state_dict().items()}
        with pytest.raises(ParallelError, match=r"assign=True.*plain tensor.*nothing was loaded"):
            model.load_state_dict(plain, assign=True)
        for name, p in model.state_dict().items():
            assert torch.equal(p.full_tensor(), before[name])
        placed = {
            name: sw.distribute_tensor(plain[name], p.device_mesh, p.placements)
            for name, p in model.state_dict().items()
        }
        model.load_state_dict(placed, assign=not earlier)  # torch takes over parameters before its start
        for name, p in model.state_dict().items():
            assert torch.equal(p.full_tensor(), plain[name])


def test_plain_tensors_are_not_assigned(ranks):
    ranks(2, _assigned)


def _assigned_elsewhere():
    """`load_state_dict(assign=True)` takes what lies as the parameters do, and nothing else."""
    mesh, x = rank_mesh((2, 2), ("dp", "tp")), torch.randn(3, 8)
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    for make in (sw.distribute_tensor, torchs.distribute_tensor):
        model = copy.deepcopy(plain)
        parallelize_tensor(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        parallelize_fsdp(model, mesh["dp"])
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        held = dict(model.named_parameters())
        state = {
            name: make(whole.detach(), held[name].device_mesh, held[name].placements)
            for name, whole in plain.named_parameters()
        }
        if make is torchs.distribute_tensor:  # it does not know the order
            order = {"0.weight": torchs.Shard(1), "0.bias": torchs.Replicate()}
            for name, other in order.items():
                whole = plain.get_parameter(name).detach()
                given = {**state, name: make(whole, mesh, [other, torchs.Shard(0)])}
                with pytest.raises(ParallelError, match=r"0\..*: .*assign=True.* would put f32"):
                    model.load_state_dict(given, assign=True)
            strided = [_StridedShard(0, split_factor=2), torchs.Shard(0)]
            for name in order:
                state[name] = make(plain.get_parameter(name).detach(), mesh, strided)
        model.load_state_dict(state, assign=True)
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x))


def test_assigned_states_lie_as_the_parameters(ranks):
    ranks(4, _assigned_elsewhere)
