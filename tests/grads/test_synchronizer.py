"""Pending gradients are summed once, whichever ranks have them, and labelled as what they then are."""

import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import distribute_tensor as torch_distribute

import shardwright as sw
from shardwright.comm import functional
from shardwright.comm.record import Recorder
from shardwright.errors import ParallelError
from shardwright.grads import GradientSynchronizer
from shardwright.parallel import parallelize_fsdp, parallelize_replicate
from shardwright.placement import Partial, Replicate, Shard
from shardwright.tensor.distribute import distribute_tensor
from shardwright.tensor.dtensor import DTensor
from shardwright.testing import rank_mesh

SUM = Partial("sum")


def _mesh(*shape):
    return rank_mesh(shape, ("a", "b", "c")[: len(shape)])


def _parameter(mesh, placements, shape=(4, 6)):
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    return nn.Parameter(distribute_tensor(full, mesh, placements))


def _term(shape, salt=0):
    """This rank's own term of a gradient, exact in float32."""
    generator = torch.Generator().manual_seed(100 * salt + dist.get_rank())
    return torch.randint(-9, 9, shape, generator=generator).float()


def _pending(parameter, placements, salt=0):
    """A gradient in these placements whose local part is this rank's own."""
    local = _term(parameter.to_local().shape, salt)
    return DTensor.from_local(
        local, parameter.device_mesh, placements, shape=parameter.shape, stride=parameter.stride()
    )


CASES = [
    pytest.param((4,), [Replicate()], [SUM], id="one axis"),
    pytest.param((2, 2), [Replicate(), Replicate()], [SUM, SUM], id="two axes"),
    pytest.param((2, 2), [Replicate(), Shard(0)], [SUM, Shard(0)], id="beside a shard"),
    pytest.param((2, 2), [Replicate(), Shard(1)], [Replicate(), Shard(1)], id="nothing pending"),
    pytest.param((2, 2), [Shard(0), Replicate()], [Shard(0), SUM], id="shard first, uneven"),
    pytest.param((4,), [Replicate()], [Partial("avg")], id="an average"),
    pytest.param((4,), [Shard(0)], [Replicate()], id="finished, but whole"),
    pytest.param((1, 4), [Replicate(), Replicate()], [SUM, SUM], id="an axis of one rank"),
]


def _synchronise(mesh_shape, placements, pending):
    parameter = _parameter(_mesh(*mesh_shape), placements, (5, 6))
    whole = [
        p if not p.is_partition or p == q else Replicate() for p, q in zip(pending, placements, strict=True)
    ]
    if pending == [Replicate()]:
        gradient = distribute_tensor(torch.ones(5, 6) * 3, parameter.device_mesh, whole)
    elif pending == placements:
        gradient = distribute_tensor(torch.ones(5, 6) * 2, parameter.device_mesh, placements)
    else:
        gradient = _pending(parameter, pending)
    expected = gradient.full_tensor()
    parameter.grad = gradient
    synchronizer = GradientSynchronizer([parameter])
    synchronizer.synchronize()
    once = parameter.grad
    synchronizer.synchronize()
    assert parameter.grad is once
    assert tuple(once.placements) == tuple(placements)
    assert sw.layout_of(once) == sw.layout_of(parameter)
    return once.full_tensor(), expected


@pytest.mark.parametrize(("mesh_shape", "placements", "pending"), CASES)
def test_the_gradient_gets_the_placements_of_the_parameter_and_keeps_its_value(
    ranks, mesh_shape, placements, pending
):
    for got, expected in ranks(4, _synchronise, mesh_shape, placements, pending):
        assert torch.equal(got, expected)


def _explicit_sum():
    """The same without any DTensor in the expectation."""
    parameter = _parameter(_mesh(2, 2), [Replicate(), Shard(0)])
    parameter.grad = _pending(parameter, [SUM, Shard(0)])
    GradientSynchronizer([parameter]).synchronize()
    return parameter.grad.to_local(), _term((2, 6))


def test_the_sum_is_over_the_pending_axis_only(ranks):
    results = ranks(4, _explicit_sum)
    for rank, (got, _) in enumerate(results):
        assert torch.equal(got, results[rank % 2][1] + results[rank % 2 + 2][1])


def _missing_on(ranks_without, *, other_missing_everywhere):
    mesh = _mesh(4)
    parameters = {name: _parameter(mesh, [Replicate()]) for name in ("x", "y", "z")}
    for salt, (name, parameter) in enumerate(parameters.items()):
        if name == "y" and dist.get_rank() in ranks_without:
            continue
        if name == "z" and other_missing_everywhere:
            continue
        parameter.grad = _pending(parameter, [SUM], salt)
    GradientSynchronizer(parameters.items()).synchronize()
    terms = [torch.zeros(4, 6) if dist.get_rank() in ranks_without else _term((4, 6), 1)]
    return {n: None if p.grad is None else p.grad.to_local() for n, p in parameters.items()}, terms[0]


@pytest.mark.parametrize("ranks_without", [(0,), (3,), (0, 1, 2)])
def test_a_gradient_that_some_ranks_lack_counts_as_zeros_and_nobody_waits(ranks, ranks_without):
    """The naive loop over `p.grad is not None` hangs here, or adds x of one rank to y of another."""
    results = ranks(4, _missing_on, ranks_without, other_missing_everywhere=True, timeout=20)
    expected = sum(term for _, term in results)
    for gradients, _ in results:
        assert torch.equal(gradients["y"], expected)
        assert gradients["x"] is not None
        assert gradients["z"] is None


def _missing_beside_shards():
    parameter = _parameter(_mesh(2, 2), [Replicate(), Shard(0)], (3, 2))
    if dist.get_rank() == 0:
        parameter.grad = _pending(parameter, [SUM, Shard(0)])
    GradientSynchronizer([parameter]).synchronize()
    return parameter.grad.to_local(), parameter.grad.placements == parameter.placements, _term((2, 2))


def test_missing_parts_of_a_sharded_gradient_become_zeros(ranks):
    results = ranks(4, _missing_beside_shards, timeout=20)
    assert all(same for _, same, _ in results)
    assert torch.equal(results[2][0], results[0][2])
    assert not results[1][0].any()
    assert results[1][0].shape == (1, 2)


def _bytes(bucket_bytes, count, static):
    mesh = _mesh(2)
    parameters = [_parameter(mesh, [Replicate()], (10,)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = _pending(parameter, [SUM])
    with Recorder() as recorder:
        GradientSynchronizer(parameters, bucket_bytes, static=static).synchronize()
    return [(event.reason, event.bytes_sent) for event in recorder.collectives]


def test_small_gradients_travel_together_and_large_ones_alone(ranks):
    agreement = ("which ranks have which gradients", 5 * 4)
    assert ranks(2, _bytes, 10**6, 5, False)[0] == [agreement, ("sum gradients", 5 * 40)]
    assert ranks(2, _bytes, 80, 5, False)[0] == [
        agreement,
        ("sum gradients", 80),
        ("sum gradients", 80),
        ("sum gradients", 40),
    ]
    assert ranks(2, _bytes, 10**6, 5, True)[0] == [("sum gradients", 5 * 40)]


def _let_go():
    """How many terms are there still as each bucket is sent; one that somebody holds stays what it is."""
    mesh = _mesh(2)
    parameters = [_parameter(mesh, [Replicate()]) for _ in range(4)]
    for i, parameter in enumerate(parameters):
        parameter.grad = _pending(parameter, [SUM], salt=i)
    held, before = parameters[0].grad, parameters[0].grad.to_local().clone()
    terms = [weakref.ref(parameter.grad._local_tensor) for parameter in parameters]
    alive, start = [], functional.start_sum

    def counted(*args, **kwargs):
        alive.append(sum(term() is not None for term in terms))
        return start(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "start_sum", counted)
        GradientSynchronizer(parameters, bucket_bytes=1).synchronize()
    assert torch.equal(held.to_local(), before)
    return alive


def test_terms_are_let_go_as_their_sums_are_made(ranks):
    assert ranks(2, _let_go) == [[4, 4, 3, 2]] * 2  # somebody holds the first


def _two_dtypes_and_meshes():
    mesh = _mesh(2, 2)
    parameters = [
        _parameter(mesh, [Replicate(), Replicate()]),
        nn.Parameter(distribute_tensor(torch.ones(3).double(), mesh, [Replicate(), Replicate()])),
        _parameter(mesh["b"], [Replicate()]),
    ]
    parameters[0].grad = _pending(parameters[0], [SUM, SUM])
    parameters[1].grad = DTensor.from_local(torch.ones(3).double(), mesh, [SUM, Replicate()])
    parameters[2].grad = _pending(parameters[2], [SUM])
    expected = [p.grad.full_tensor() for p in parameters]
    GradientSynchronizer(parameters).synchronize()
    return [torch.equal(p.grad.to_local(), e) for p, e in zip(parameters, expected, strict=True)]


def test_dtypes_axes_and_meshes_do_not_mix(ranks):
    assert ranks(4, _two_dtypes_and_meshes) == [[True] * 3] * 4


def _transposed():
    mesh = _mesh(2)
    parameter = _parameter(mesh, [Replicate()], (4, 6))
    local = _term((6, 4)).t()
    parameter.grad = DTensor.from_local(local, mesh, [SUM], shape=(4, 6), stride=local.stride())
    expected = parameter.grad.full_tensor()
    GradientSynchronizer([parameter]).synchronize()
    assert parameter.grad.to_local().stride() == parameter.grad.stride()
    return torch.equal(parameter.grad.full_tensor(), expected)


def test_a_transposed_gradient_keeps_its_strides(ranks):
    assert ranks(2, _transposed) == [True, True]


def _other_on_some_data_ranks(pairs):
    """The ranks of one data coord have cut what those of the other hold whole, or still as terms of a sum."""
    mesh = _mesh(2, 2)
    parameter = _parameter(mesh, [Replicate(), Shard(0)])
    values = [torch.arange(24.0).view(4, 6), 7 - torch.arange(24.0).view(4, 6).square()]
    data, at = mesh.get_coordinate()
    local, inner = {
        "home": (values[data].chunk(2, 0)[at], Shard(0)),
        "whole": (values[data], Replicate()),
        "turned": (values[data].chunk(2, 1)[at], Shard(1)),
        "terms": (values[data] * (at + 1) / 3, SUM),
    }[pairs[data]]
    parameter.grad = DTensor.from_local(
        local.contiguous(), mesh, [SUM, inner], shape=(4, 6), stride=(6, 1), run_check=False
    )
    GradientSynchronizer([("w", parameter)]).synchronize()
    assert tuple(parameter.grad.placements) == (Replicate(), Shard(0))
    torch.testing.assert_close(parameter.grad.full_tensor(), sum(values))


@pytest.mark.parametrize(
    "pairs", [("home", "whole"), ("turned", "home"), ("terms", "home"), ("home", "terms")]
)
def test_data_ranks_whose_gradients_lie_otherwise_bring_each_home(ranks, pairs):
    ranks(4, _other_on_some_data_ranks, pairs)


def _states_differ():
    mesh = _mesh(2)
    parameter = _parameter(mesh, [Replicate()])
    parameter.grad = _pending(parameter, [SUM])
    if dist.get_rank():
        parameter.grad = DTensor.from_local(torch.ones(2, 6), mesh, [Shard(0)])
    with pytest.raises(ParallelError) as caught:
        GradientSynchronizer([("w", parameter)]).synchronize()
    return str(caught.value)


def test_ranks_that_disagree_all_raise(ranks):
    for message in ranks(2, _states_differ, timeout=20):
        assert message == (
            "gradients of w have other layouts on some ranks than on their peers; "
            "run the same backward passes on all ranks"
        )


def _plain_parameters():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    messages = []
    for parameters in (module, module.parameters()):
        with pytest.raises(ParallelError) as caught:
            GradientSynchronizer(parameters)
        messages.append(str(caught.value))
    GradientSynchronizer(module.requires_grad_(False))
    return messages


def test_plain_trainable_parameters_are_refused_by_name(ranks):
    named, positions = ranks(2, _plain_parameters)[0]
    assert named == (
        "0.weight, 0.bias, 1.weight, 1.bias: plain trainable tensors in a world of 2 ranks, whose gradients "
        "nobody would sum; place them with parallelize_replicate(module, mesh), or freeze them"
    )
    assert "parameter 1 of shape (2,)" in positions


def _replaced_and_frozen():
    mesh = _mesh(2)
    module = nn.Linear(3, 2)
    for name, plain in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(distribute_tensor(plain.detach(), mesh, [Replicate()])))
    synchronizer = GradientSynchronizer(module)
    module.weight = nn.Parameter(distribute_tensor(torch.ones(2, 3), mesh, [Replicate()]))
    module.bias.requires_grad_(False)
    module.weight.grad = _pending(module.weight, [SUM])
    synchronizer.synchronize()
    return list(module.weight.grad.placements), module.bias.grad


def test_parameters_that_a_module_replaced_are_found_and_frozen_ones_left_alone(ranks):
    """A list taken once would leave the new weight's gradient unsummed, silently."""
    assert ranks(2, _replaced_and_frozen) == [([Replicate()], None)] * 2


def test_one_process_needs_no_mesh():
    module = nn.Linear(2, 2)
    module(torch.ones(1, 2)).sum().backward()
    before = module.weight.grad.clone()
    GradientSynchronizer(module).synchronize()
    assert torch.equal(module.weight.grad, before)


def _torch_class():
    """Parameters and gradients of torch's own class, as `fully_shard` hands them back."""
    mesh = _mesh(2)
    placements = [Replicate()]
    parameter = nn.Parameter(torch_distribute(torch.ones(3), mesh, placements))
    parameter.grad = TorchDTensor.from_local(_term((3,)), mesh, [torch.distributed.tensor.Partial()])
    expected = parameter.grad.full_tensor()
    GradientSynchronizer([parameter]).synchronize()
    return torch.equal(parameter.grad.full_tensor(), expected), list(parameter.grad.placements) == placements


def test_torchs_own_class_is_taken_too(ranks):
    assert ranks(2, _torch_class) == [(True, True)] * 2


def _term_on_some_ranks(mesh_shape, finished_on):
    """A sum, then a second term on some ranks only; where there is none the gradient stays finished."""
    mesh = _mesh(*mesh_shape)
    parameter = _parameter(mesh, [Replicate()] * mesh.ndim)
    before = torch.full((4, 6), 5.0)
    if dist.get_rank() in finished_on:
        parameter.grad = DTensor.from_local(before, mesh, [Replicate()] * mesh.ndim)
        mine = torch.zeros(4, 6)
    else:
        share = before if dist.get_rank() == 0 else torch.zeros(4, 6)
        mine = _term((4, 6))
        parameter.grad = DTensor.from_local(share + mine, mesh, [SUM] * mesh.ndim)
    GradientSynchronizer([parameter]).synchronize()
    return parameter.grad.to_local(), before, mine


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
@pytest.mark.parametrize("finished_on", [(0,), (3,), (1, 2, 3), (0, 1, 2)])
def test_a_finished_gradient_beside_new_terms_of_peers_counts_once(ranks, mesh_shape, finished_on):
    """Some ranks used the parameter in a second backward, others did not."""
    results = ranks(4, _term_on_some_ranks, mesh_shape, finished_on, timeout=20)
    expected = results[0][1] + sum(mine for _, _, mine in results)
    assert all(torch.equal(got, expected) for got, _, _ in results)


def _second_backward():
    """Gradients of a second pass, added to finished ones, are complete after a second synchronisation."""
    mesh = _mesh(2)
    parameter = _parameter(mesh, [Replicate()])
    synchronizer = GradientSynchronizer([parameter])
    total = torch.zeros(4, 6)
    for salt in range(3):
        term = _pending(parameter, [SUM], salt)
        total += term.full_tensor()
        parameter.grad = term if parameter.grad is None else parameter.grad + term
        synchronizer.synchronize()
    return torch.equal(parameter.grad.full_tensor(), total)


def test_a_second_backward_after_synchronising_adds_up(ranks):
    assert ranks(2, _second_backward) == [True, True]


def _half_placed(first, second):
    """Tensor parallel as a whole, data parallel in one half only."""
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    sw.distribute_module(module, mesh["tp"], {"*.weight": {"tp": sw.Shard(0)}})
    strategies = {"replicate": parallelize_replicate, "fsdp": parallelize_fsdp}
    strategies[first](module[0], mesh["dp"])
    with pytest.raises(ParallelError) as caught:
        GradientSynchronizer(module)
    strategies[second](module[1], mesh["dp"])
    GradientSynchronizer(module)
    return str(caught.value)


@pytest.mark.parametrize(("first", "second"), [("replicate", "fsdp"), ("fsdp", "replicate")])
def test_a_parameter_that_data_parallelism_left_out_is_refused_by_name(ranks, first, second):
    texts = ranks(4, _half_placed, first, second)
    assert texts[0] == (
        "1.weight: placed on ('tp',) only, while the gradients of others are summed over ranks [2] too, so "
        "nobody would sum these; place them over the same ranks with the strategy that places the others, or "
        "freeze them"
    )
    assert "ranks [0] too" in texts[2]


def _other_gradients_than_promised():
    """Each rank reaches a layer of its own beside one that both reach; nobody reaches the last."""
    layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(4))
    parallelize_replicate(layers, _mesh(2))
    rank, rows = dist.get_rank(), torch.ones(1, 2)
    synchronizer = GradientSynchronizer(layers, static=True)
    for _ in range(2):
        (layers[0](rows) + (10 if rank else 1) * layers[1 + rank](rows)).sum().backward()
        with Recorder() as recorder:
            synchronizer.synchronize()
    assert [event.reason for event in recorder.collectives] == ["sum gradients"]
    assert layers[3].weight.grad is None
    return [layer.weight.grad.to_local().unique().tolist() for layer in layers[:3]]


def test_a_promise_of_same_gradients_that_a_rank_breaks_mixes_nothing(ranks):
    """Those of different parameters were added up where they had one size, or no rank went on."""
    assert ranks(2, _other_gradients_than_promised, timeout=30) == [[[4.0], [2.0], [20.0]]] * 2


def _foreign_on_one():
    mesh = _mesh(2)
    parameters = [_parameter(mesh, [Replicate()]), _parameter(mesh, [Replicate()])]
    for parameter in parameters:
        parameter.grad = DTensor.from_local(torch.ones(4, 6), mesh, [SUM])
    if dist.get_rank() == 1:
        other = rank_mesh((2,), ("other",))
        parameters[1].grad = distribute_tensor(torch.ones(4, 6), other, [Replicate()], src_data_rank=None)
    synchronizer = GradientSynchronizer(parameters)
    with pytest.raises(ParallelError) as caught:
        synchronizer.synchronize()
    assert parameters[0].grad.placements == (SUM,)
    parameters[1].grad = DTensor.from_local(torch.ones(4, 6), mesh, [SUM])
    synchronizer.synchronize()
    return str(caught.value), parameters[0].grad.to_local().unique().item()


def test_a_gradient_that_one_rank_cannot_sum_raises_on_all(ranks):
    """The others had waited for it."""
    (here, total), (there, also) = ranks(2, _foreign_on_one, timeout=30)
    assert here == "a rank of ('a',) cannot go on with its gradients, as its own error says; none was changed"
    assert there.startswith("the gradient of parameter 1 of shape (4, 6) is on")
    assert total == also == 2.0
