"""What users do with a module once it is placed: load, cast, copy, evaluate, read."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as torchs
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor

import shardwright as sw
from shardwright.parallel import parallelize_fsdp, parallelize_replicate
from shardwright.testing.meshes import rank_mesh

from .models import check_full_gradients, finish, one_device_gradients, part_of, sum_loss, token_batch, tricky
from .strategies import STRATEGIES, place

NAMES = ["replicate", "fsdp", "fsdp 2-D", "hsdp", "replicate, then fsdp"]
everywhere = pytest.mark.parametrize("name", NAMES)


def _placed(name):
    return place(name, tricky())


def _is_right(model, name, dtype=torch.float32):
    """Gradients on the global batch equal those of one device."""
    world = dist.get_world_size()
    batch = token_batch(world)
    plain = tricky().to(dtype)
    plain.load_state_dict(
        {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in model.state_dict().items()}
    )
    wanted = one_device_gradients(plain, batch)
    model.zero_grad()
    sum_loss(model, part_of(batch, [1] * world, dist.get_rank()), batch[0].numel()).backward()
    check_full_gradients(model, wanted)
    assert name


def _cast_while_a_loss_lives(name):
    model = _placed(name)
    batch = part_of(token_batch(dist.get_world_size()), [1] * dist.get_world_size(), dist.get_rank())
    loss = sum_loss(model, batch, 8)
    loss.backward()
    model.zero_grad()
    model.to(torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert loss.grad_fn is not None
    _is_right(model, name, torch.float64)


@everywhere
def test_a_cast_while_the_graph_of_a_loss_lives(ranks, name):
    ranks(STRATEGIES[name].world, _cast_while_a_loss_lives, name)


def _state_dict(name):
    plain = tricky()
    keys = list(plain.state_dict())
    model = _placed(name)
    state = model.state_dict()
    assert list(state) == keys
    for key, value in state.items():
        if key != "shift":
            assert isinstance(value, sw.DTensor), key
            torch.testing.assert_close(value.full_tensor(), plain.state_dict()[key], rtol=0, atol=0)
    other = {key: value.clone() for key, value in state.items()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    model.load_state_dict(other)
    for key, value in model.state_dict().items():
        if key != "shift":
            assert type(value) is type(state[key])
            torch.testing.assert_close(value.full_tensor(), plain.state_dict()[key], rtol=0, atol=0)
    assert model.head.weight is model.embed.weight
    _is_right(model, name)


@everywhere
def test_a_state_dict_has_the_keys_and_values_of_the_plain_module_and_loads(ranks, name):
    ranks(STRATEGIES[name].world, _state_dict, name)


def _cast(name, how):
    model = _placed(name)
    if how == "after a step":
        _is_right(model, name)
    if how == "assign":
        model.load_state_dict({k: v.double() for k, v in model.state_dict().items()}, assign=True)
    else:
        assert model.double() is model
    for p in model.parameters():
        assert p.dtype == torch.float64
        assert isinstance(p, sw.DTensor)
        assert isinstance(p, nn.Parameter)
    _is_right(model, name, torch.float64)
    assert all(p.grad.dtype == torch.float64 for p in model.parameters() if p.grad is not None)
    model.to(torch.float32)
    _is_right(model, name)


@pytest.mark.parametrize("how", ["fresh", "after a step"])
@everywhere
def test_double_and_to_keep_layouts_and_gradients(ranks, name, how):
    ranks(STRATEGIES[name].world, _cast, name, how)


def _assigned():
    """What knows nothing of the strategy computes, and is summed, as the parameters whose places it takes."""
    mesh = rank_mesh((2,), ("dp",))
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(4, 4)
    plain(x).square().sum().backward()
    for make in (torchs.distribute_tensor, sw.distribute_tensor):
        model = parallelize_replicate(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), mesh)
        state = {key: make(value, mesh, [torchs.Replicate()]) for key, value in plain.state_dict().items()}
        model.load_state_dict(state, assign=True)
        model(x.chunk(2)[mesh.get_local_rank()]).square().sum().backward()
        for mine, one in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), one.grad)
        others = {"cut": make(torch.zeros(3, 4), mesh, [torchs.Shard(0)])}
        others["pending"] = torchs.DTensor.from_local(torch.zeros(3, 4), mesh, [torchs.Partial()])
        for other in others.values():
            with pytest.raises(RuntimeError, match=r"Linear\.weight: .* is assigned in the place of"):
                model.load_state_dict({**state, "0.weight": other}, assign=True)


def test_dtensors_that_know_no_strategy_are_assigned(ranks):
    ranks(2, _assigned)


def _copies():
    model = _placed("replicate")
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embed.weight
    assert twin.first.weight is not model.first.weight
    with torch.no_grad():
        twin.first.weight.mul_(2)
    torch.testing.assert_close(twin.first.weight.full_tensor(), 2 * model.first.weight.full_tensor())
    _is_right(twin, "replicate")
    _is_right(model, "replicate")


def test_a_deep_copy_is_independent_and_placed_alike(ranks):
    ranks(2, _copies)


def _evaluates(name):
    plain = tricky().eval()
    model = place(name, tricky()).eval()
    tokens, _ = token_batch(2)
    wanted = plain(tokens)
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            out = model(tokens)
            assert type(out) is torch.Tensor
            torch.testing.assert_close(out, wanted)


@everywhere
def test_evaluation_is_the_plain_forward(ranks, name):
    ranks(STRATEGIES[name].world, _evaluates, name)


def _autocast(name):
    plain, model = tricky(), _placed(name)
    tokens, _ = token_batch(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(model(tokens), plain(tokens))


def test_autocast_is_that_of_the_plain_module(ranks):
    ranks(2, _autocast, "replicate")


def _freezes_later():
    model = _placed("replicate")
    model.first.requires_grad_(False)
    loss = sum_loss(model, token_batch(1), 4)
    loss.backward()
    assert model.first.weight.grad is None
    assert model.norm.weight.grad is not None
    model.first.requires_grad_(True)
    model.zero_grad()
    sum_loss(model, token_batch(1), 4).backward()
    assert model.first.weight.grad is not None


def test_parameters_can_be_frozen_and_thawed_after_placement(ranks):
    ranks(2, _freezes_later)


def _hooks_after():
    """Hooks set after placement see the parameter and its truthful gradient."""
    model = _placed("replicate")
    seen = []
    model.first.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.placements[0]))
    model.first.weight.register_hook(lambda g: seen.append(type(g).__name__))
    sum_loss(model, token_batch(1), 4).backward()
    assert seen == ["DTensor", sw.Partial("sum")]


def test_hooks_set_after_placement_see_the_pending_gradient(ranks):
    ranks(2, _hooks_after)


def _initialises_after(name):
    """`nn.init` and in-place arithmetic on placed parameters draw what one device draws, ranks agree."""
    model, plain = _placed(name), tricky()
    for m in (model, plain):
        torch.manual_seed(5)
        with torch.no_grad():
            nn.init.normal_(m.embed.weight, std=0.5)
            nn.init.kaiming_uniform_(m.first.weight)
            nn.init.trunc_normal_(m.first.bias)
            nn.init.ones_(m.gain)
            m.norm.weight.mul_(2).add_(1)
            m.norm.bias.copy_(torch.arange(6.0)) if m is plain else m.norm.bias.copy_(
                sw.distribute_tensor(torch.arange(6.0), m.norm.bias.device_mesh, m.norm.bias.placements)
            )
    for (n, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q.detach(), msg=lambda m, n=n: f"{n}: {m}")


@everywhere
def test_initialising_placed_parameters_is_that_of_one_device(ranks, name):
    ranks(STRATEGIES[name].world, _initialises_after, name)


def _different_values_before():
    """Rank 0's values count unless every rank is told to keep its own."""
    torch.manual_seed(100 + dist.get_rank())
    model = parallelize_replicate(nn.Linear(3, 3), rank_mesh((2,), ("dp",)))
    return model.weight.to_local().detach()


def test_ranks_that_start_with_other_values_take_those_of_the_first(ranks):
    first, second = ranks(2, _different_values_before)
    assert torch.equal(first, second)
    torch.manual_seed(100)
    assert torch.equal(first, nn.Linear(3, 3).weight.detach())


def _one_root(convert):
    mesh = rank_mesh((2,), ("dp",))
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    for block in model:
        parallelize_fsdp(block, mesh)
    model[0].weight.of_mine = 3
    convert(model)
    parallelize_fsdp(model, mesh)
    assert model[0].weight.of_mine == 3
    model(torch.randn(2, 4, dtype=model[0].weight.dtype)).sum().backward()
    roots = [m._get_fsdp_state()._is_root for m in model.modules()]
    units = [m._get_fsdp_state()._fsdp_param_group for m in model]
    assert all(unit is not None for unit in units)
    assert all(unit.is_sharded for unit in units)
    return roots


@pytest.mark.parametrize("convert", [nn.Module.train, nn.Module.double])
def test_blocks_then_root_give_one_fsdp_root(ranks, convert):
    assert ranks(2, _one_root, convert)[0] == [True, False, False, False]


def _each_its_own_root():
    mesh = rank_mesh((2,), ("dp",))
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    for block in model:
        parallelize_fsdp(block, mesh)
    model(torch.randn(2, 4)).sum().backward()
    return [m._get_fsdp_state()._is_root for m in model]


def test_blocks_alone_are_a_root_each(ranks):
    """What the check above looks for, planted."""
    assert ranks(2, _each_its_own_root)[0] == [True, True, True]


def _world_of_one():
    mesh = rank_mesh((1,), ("dp",))
    batch = token_batch(2)
    for strategy in (parallelize_replicate, parallelize_fsdp):
        plain = tricky()
        wanted = one_device_gradients(plain, batch)
        model = strategy(plain, mesh)
        assert isinstance(model.first.weight, TorchDTensor)
        sum_loss(model, batch, batch[0].numel()).backward()
        check_full_gradients(model, wanted)
        finish(model)
        check_full_gradients(model, wanted)


def test_a_world_of_one_process_works_with_the_same_calls(ranks):
    ranks(1, _world_of_one)
