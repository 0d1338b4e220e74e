"""What `shard_placement_fn` is asked about, what it may answer, and what a refused answer leaves behind."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor as TorchDTensor

import shardwright as sw
from shardwright.errors import ParallelError
from shardwright.parallel import parallelize_fsdp, parallelize_hsdp, parallelize_replicate, parallelize_tensor
from shardwright.testing.meshes import rank_mesh


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def _by(model, answer):
    """A function that knows this model's parameters by identity, and fails for any other."""
    known = {p: name for name, p in model.named_parameters()}
    return lambda p: answer(known[p], p)


def _largest(name, parameter):
    assert name != "2.bias" or tuple(parameter.shape) == (4,)
    return None if parameter.ndim == 1 else sw.Shard(parameter.shape.index(max(parameter.shape)))


def _opposite(_, parameter):
    """The dim that tensor parallelism has not cut."""
    cut = [p.dim for p in parameter.placements if p.is_shard()] if isinstance(parameter, TorchDTensor) else []
    return sw.Shard(1 - cut[0]) if cut and parameter.ndim == 2 else None


def _own_parameters():
    mesh = rank_mesh((2, 2), ("one", "two"))
    inner, outer, both = mesh["two"], mesh["one"], rank_mesh((2, 2), ("one", "two"))
    plain, x = _model(), torch.randn(4, 4)
    found = {}
    for name, place, answer in (
        ("fsdp", lambda m, f: parallelize_fsdp(m, inner, shard_placement_fn=f), _largest),
        ("two axes", lambda m, f: parallelize_fsdp(m, both, shard_placement_fn=f), _largest),
        ("hsdp", lambda m, f: parallelize_hsdp(m, both, "two", shard_placement_fn=f), _largest),
        ("beside tensor", lambda m, f: parallelize_fsdp(m, outer, shard_placement_fn=f), _opposite),
        ("beside replicate", lambda m, f: parallelize_fsdp(m, outer, shard_placement_fn=f), _largest),
    ):
        model = _model()
        if name == "beside tensor":
            parallelize_tensor(model, inner, {"0": "colwise", "2": "rowwise"})
        if name == "beside replicate":
            parallelize_replicate(model, inner)
        place(model, _by(model, answer))
        with torch.no_grad(), sw.spmd(inner) if name == "beside tensor" else nullcontext():
            out = model(x)
        out = out.full_tensor() if isinstance(out, TorchDTensor) else out
        torch.testing.assert_close(out, plain(x))
        for (path, whole), part in zip(plain.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(part.full_tensor(), whole.detach(), msg=f"{name} {path}")
        found[name] = [str(sw.layout_of(model[number].weight)) for number in (0, 2)]
    return found


def test_functions_are_asked_about_the_callers_parameters(ranks):
    for found in ranks(4, _own_parameters):
        assert found == {
            "fsdp": ["f32[8@two, 4]", "f32[4, 8@two]"],
            "two axes": ["f32[8@two, 4]", "f32[4, 8@two]"],
            "hsdp": ["f32[8@two, 4]", "f32[4, 8@two]"],
            "beside tensor": ["f32[8@two, 4@one]", "f32[4@one, 8@two]"],
            "beside replicate": ["f32[8@one, 4]", "f32[4, 8@one]"],
        }


def _asks_for_more(p):
    return 1 / 0


def _refused_answers():
    mesh = rank_mesh((2, 2), ("one", "two"))
    outer, inner = mesh["one"], mesh["two"]
    elsewhere = ShardPlacementResult(placement=sw.Shard(0), mesh_info=FSDPMeshInfo(outer, 0))
    here = ShardPlacementResult(placement=sw.Shard(0), mesh_info=FSDPMeshInfo(inner, 0))
    x, plain = torch.randn(3, 4), _model()
    for kwargs, error in (
        ({"shard_placement_fn": lambda _: elsewhere}, ParallelError),
        ({"shard_placement_fn": lambda _: sw.Shard(1)}, ParallelError),  # biases have one dim
        ({"shard_placement_fn": lambda _: sw.ZigZag(0)}, ValueError),
        ({"shard_placement_fn": _asks_for_more}, ZeroDivisionError),
        ({"reshard_after_forward": 7}, ValueError),
    ):
        model = copy.deepcopy(plain)
        parallelize_fsdp(model[0], inner)
        before = {name: (type(m), set(vars(m)), dict(m._parameters)) for name, m in model.named_modules()}
        for _ in range(2):  # what is refused is refused again, with the same words
            with pytest.raises(error):
                parallelize_fsdp(model, inner, **kwargs)
        for name, m in model.named_modules():
            assert before[name] == (type(m), set(vars(m)), dict(m._parameters))
        parallelize_fsdp(model, inner, shard_placement_fn=lambda _: here)
        torch.testing.assert_close(model(x), plain(x))
        model(x).sum().backward()


def test_a_refused_answer_changes_nothing(ranks):
    ranks(4, _refused_answers)


def _names_a_mesh_for_what_lives_elsewhere():
    """torch cuts over the axis that the answer names; here the axis of the unit cuts, or nothing does."""
    experts, data = rank_mesh((2, 2), ("efsdp", "ep")), rank_mesh((4,), ("dp",))

    def made():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        whole = model[1].weight.detach()
        model[1].weight = nn.Parameter(sw.distribute_tensor(whole, experts, [sw.Replicate(), sw.Shard(0)]))
        return model, model[1].weight

    model, spread = made()
    named = ShardPlacementResult(placement=sw.Shard(0), mesh_info=FSDPMeshInfo(experts["efsdp"], 0))
    said = r"1\.weight: .* names the axes \('efsdp',\) .* on \('efsdp', 'ep'\)"
    with pytest.raises(ParallelError, match=said):
        parallelize_fsdp(model, data, shard_placement_fn=lambda p: named if p is spread else None)
    assert not any(isinstance(p, TorchDTensor) for p in model[0].parameters())
    parallelize_fsdp(model, data, shard_placement_fn=lambda _: None)
    assert model[1].weight is spread
    model, spread = made()
    parallelize_fsdp(
        model, data, ignored_params={spread}, shard_placement_fn=lambda p: named if p is spread else None
    )


def test_a_mesh_that_is_named_for_what_stays_is_refused(ranks):
    ranks(4, _names_a_mesh_for_what_lives_elsewhere)
