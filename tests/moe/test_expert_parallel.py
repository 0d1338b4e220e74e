"""Experts spread over ranks give what one device gives: outputs, token gradients, parameter gradients."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwright.comm.record import Recorder
from shardwright.context import DeviceMeshParameters
from shardwright.errors import ParallelError
from shardwright.moe import MoELayer

DIM = 8


def _layer(num_experts, top_k, dim=DIM, shared=None):
    torch.manual_seed(7)
    return MoELayer(dim, 12, num_experts, top_k, shared_expert_dim=shared)


def _spread(layer, mesh):
    """Keep this rank's experts only, as plain tensors, and connect the layer to its group."""
    layer.enable_distributed_communicator(mesh.get_group("ep_shard"))
    for linear in layer.experts.children():
        pieces = linear.weight.detach().split(layer.communicator.experts_of_member)
        linear.weight = nn.Parameter(pieces[mesh.get_local_rank("ep_shard")].clone())
    return layer


def _tokens(counts, dim=DIM):
    torch.manual_seed(11)
    return torch.randn(sum(counts), dim), torch.randn(sum(counts), dim)


def _train_step(counts, num_experts, top_k, ep, mode="plain", shared=None, dim=DIM):
    """One forward and backward; returns this rank's output and gradients."""
    context = DeviceMeshParameters(data_parallel_shard=dist.get_world_size(), expert_parallel=ep).build()
    layer = _spread(_layer(num_experts, top_k, dim, shared), context.mesh_for("expert"))
    x, probe = (full.split(counts)[context.rank] for full in _tokens(counts, dim))
    x = x.clone().requires_grad_()
    out = layer(x) if mode == "plain" else checkpoint(layer, x, use_reentrant=mode == "reentrant")
    (out * probe).sum().backward()
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    return out.detach(), x.grad, gradients, layer.tokens_per_expert


def _one_device(counts, num_experts, top_k, shared=None, dim=DIM):
    layer = _layer(num_experts, top_k, dim, shared)
    x, probe = _tokens(counts, dim)
    x.requires_grad_()
    out = layer(x)
    (out * probe).sum().backward()
    return (
        out.detach(),
        x.grad,
        {name: p.grad for name, p in layer.named_parameters()},
        layer.tokens_per_expert,
    )


def _check(results, expected, ep):
    out, x_grad, gradients, load = expected
    torch.testing.assert_close(torch.cat([r[0] for r in results]), out)
    torch.testing.assert_close(torch.cat([r[1] for r in results]), x_grad)
    assert torch.equal(sum(r[3] for r in results), load)
    for name, wanted in gradients.items():
        assert all(r[2][name] is not None for r in results), name
        terms = [r[2][name] for r in results]
        if name.startswith("experts."):
            groups = [terms[start : start + ep] for start in range(0, len(terms), ep)]
            got = sum(torch.cat(group) for group in groups)
        else:
            got = sum(terms)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


CASES = [
    pytest.param((6, 6, 6, 6), 8, 2, 4, id="two experts per rank"),
    pytest.param((6, 6, 6, 6), 8, 2, 2, id="two replicas of the experts"),
    pytest.param((5, 0, 9, 1), 8, 3, 4, id="uneven, one rank without tokens"),
    pytest.param((0, 0, 7, 0), 8, 2, 4, id="tokens on one rank only"),
    pytest.param((1, 0, 0, 0), 8, 1, 4, id="one token, most ranks get none"),
    pytest.param((0, 0, 0, 0), 8, 2, 4, id="no tokens at all"),
    pytest.param((4, 3, 2, 5), 5, 2, 4, id="5 experts on 4 ranks: the last holds none"),
    pytest.param((4, 3, 2, 5), 2, 2, 4, id="2 experts on 4 ranks"),
    pytest.param((3, 4), 4, 2, 2, id="2 ranks"),
]


@pytest.mark.parametrize(("counts", "num_experts", "top_k", "ep"), CASES)
def test_spread_experts_are_the_experts_of_one_device(ranks, counts, num_experts, top_k, ep):
    results = ranks(len(counts), _train_step, counts, num_experts, top_k, ep)
    _check(results, _one_device(counts, num_experts, top_k), ep)


def test_sizes_that_the_kernel_refuses_and_a_shared_expert(ranks):
    results = ranks(2, _train_step, (5, 2), 4, 2, 2, "plain", 6, 7)
    _check(results, _one_device((5, 2), 4, 2, 6, 7), 2)


@pytest.mark.parametrize("mode", ["reentrant", "saved tensors"])
@pytest.mark.parametrize("counts", [(5, 0, 9, 1), (0, 0, 7, 0)])
def test_recomputed_exchanges_meet_their_peers(ranks, mode, counts):
    """Activation checkpointing repeats the all-to-alls in the backward pass, on ranks without tokens too."""
    results = ranks(4, _train_step, counts, 8, 2, 4, mode)
    _check(results, _one_device(counts, 8, 2), 4)


def _all_to_one_expert():
    context = DeviceMeshParameters(data_parallel_shard=2, expert_parallel=2).build()
    layer = _layer(4, 1)
    with torch.no_grad():
        layer.router.weight.zero_()[3] = 1.0
    layer = _spread(layer, context.mesh_for("expert"))
    layer(torch.rand(3, DIM)).sum().backward()
    return layer.tokens_per_expert.tolist(), [p.grad for p in layer.experts.parameters()]


def test_a_rank_whose_experts_get_nothing_has_zero_gradients(ranks):
    first, second = ranks(2, _all_to_one_expert)
    assert first[0] == [0, 0, 0, 3]
    assert not any(grad.any() for grad in first[1])
    assert all(grad[1].any() and not grad[0].any() for grad in second[1])


def _evaluate():
    context = DeviceMeshParameters(data_parallel_shard=2, expert_parallel=2).build()
    layer = _spread(_layer(4, 2), context.mesh_for("expert")).eval()
    x = torch.randn(5, DIM)
    with torch.no_grad():
        under_no_grad = layer(x)
    with torch.inference_mode():
        under_inference = layer(x)
    return torch.equal(layer(x), under_no_grad) and torch.equal(under_no_grad, under_inference)


def test_eval_under_no_grad_and_inference_mode_is_the_same_value(ranks):
    assert ranks(2, _evaluate) == [True, True]


def _count_bytes():
    context = DeviceMeshParameters(data_parallel_shard=2, expert_parallel=2).build()
    layer = _spread(_layer(4, 4), context.mesh_for("expert"))
    with Recorder() as recorder:
        layer(torch.randn(6, DIM))
    return [(event.axis, event.reason, event.bytes_sent) for event in recorder.collectives]


def test_exactly_the_tokens_of_other_ranks_experts_are_sent(ranks):
    """top 4 of 4: each rank sends half of its 24 rows of 8 floats away, and as many results back."""
    assert ranks(2, _count_bytes)[0] == [
        ("ep_shard", "token counts of experts", 2 * 8),
        ("ep_shard", "dispatch tokens to experts", 12 * DIM * 4),
        ("ep_shard", "return expert results", 12 * DIM * 4),
    ]


def _copy_and_twice():
    context = DeviceMeshParameters(data_parallel_shard=2, expert_parallel=2).build()
    mesh = context.mesh_for("expert")
    layer = _spread(_layer(4, 2), mesh)
    layer.enable_distributed_communicator(mesh.get_group("ep_shard"))
    x = torch.randn(5, DIM)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    with pytest.raises(ParallelError) as caught:
        layer.enable_distributed_communicator(mesh.get_group("ep_replicate"))
    return str(caught.value)


def test_a_copy_talks_to_the_same_peers_and_a_second_group_is_refused(ranks):
    assert ranks(2, _copy_and_twice)[0] == (
        "this MoELayer exchanges tokens in another group already; apply expert parallelism once"
    )
