"""The norm over meshes is the norm of the full gradients, and clipping scales each element once."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_ as torch_clip

from shardwright.comm.record import Recorder
from shardwright.context import DeviceMeshParameters
from shardwright.errors import ConfigError, ParallelError
from shardwright.grads import GradientSynchronizer, NonFiniteNormError, clip_grad_norm_
from shardwright.parallel import parallelize_pipeline
from shardwright.placement import Partial, Replicate, Shard
from shardwright.tensor.distribute import distribute_tensor
from shardwright.tensor.dtensor import DTensor
from shardwright.testing import rank_mesh
from tests.tiers import only

SHAPES = [(5, 3), (4,), (8, 2, 3), (1, 6), (7,)]


def _full_gradients():
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _parameters(context):
    """Dense parameters replicated and sharded, experts on their own mesh, some ranks holding empty parts."""
    dense, expert = context.mesh_for("dense"), context.mesh_for("expert")
    where = [
        (dense[["dp_replicate", "dp_cp_shard"]], [Replicate(), Shard(0)]),
        (dense[["dp_replicate"]], [Replicate()]),
        (expert[["ep_replicate", "ep_shard"]], [Replicate(), Shard(0)]),
        (dense[["dp_replicate", "dp_cp_shard"]], [Shard(1), Shard(0)]),
        (dense[["dp_replicate", "dp_cp_shard"]], [Replicate(), Replicate()]),
    ]
    parameters = []
    for gradient, (mesh, placements) in zip(_full_gradients(), where, strict=True):
        parameter = nn.Parameter(distribute_tensor(torch.ones_like(gradient), mesh, placements))
        parameter.grad = distribute_tensor(gradient, mesh, placements)
        parameters.append(parameter)
    return parameters


def _context():
    return DeviceMeshParameters(data_parallel_replicate=2, data_parallel_shard=2, expert_parallel=4).build()


def _clip(max_norm, norm_type, foreach):
    parameters = _parameters(_context())
    total = clip_grad_norm_(parameters, max_norm, norm_type, foreach=foreach)
    assert type(total) is torch.Tensor
    assert total.shape == ()
    return total, [p.grad.full_tensor() for p in parameters]


def _reference(max_norm, norm_type):
    parameters = [nn.Parameter(torch.ones_like(g)) for g in _full_gradients()]
    for parameter, gradient in zip(parameters, _full_gradients(), strict=True):
        parameter.grad = gradient
    return torch_clip(parameters, max_norm, norm_type), [p.grad for p in parameters]


_NORMS = (2.0, 1.0, 3.0, math.inf)
_WAYS = ((0.5, None), (0.5, False), (1e6, True), (math.inf, None))
_CASES = [(*way, norm) for way, norm in itertools.product(_WAYS, _NORMS)]
_OFTEN = [case for at, case in enumerate(_CASES) if (at // 4 + at) % 2 == 0]  # each way, and each norm, twice


@pytest.mark.parametrize(("max_norm", "foreach", "norm_type"), only(_OFTEN, _CASES))
def test_norm_and_gradients_are_those_of_one_device(ranks, max_norm, norm_type, foreach):
    expected, gradients = _reference(max_norm, norm_type)
    results = ranks(4, _clip, max_norm, norm_type, foreach)
    for total, got in results:
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
        for a, b in zip(got, gradients, strict=True):
            torch.testing.assert_close(a, b)
    assert len({total.item() for total, _ in results}) == 1


def _of_frozen():
    parameters = _parameters(_context())
    for parameter in parameters[1:4]:
        parameter.requires_grad_(False)
    mesh = rank_mesh((dist.get_world_size(),), ("axis",))
    no_gradient = [
        nn.Parameter(distribute_tensor(torch.ones(5), mesh, [placement]), requires_grad=False)
        for placement in (Shard(0), Partial())
    ]
    total = clip_grad_norm_([*parameters, *no_gradient, torch.ones(3, dtype=torch.int64)], 0.5)
    assert all(parameter.grad is None for parameter in no_gradient)
    return total, [p.grad.full_tensor() for p in parameters]


def test_gradients_of_what_was_frozen_since_count(ranks):
    """A generative and an adversarial part with one optimizer: the other part is frozen in each backward."""
    expected_total, expected = _reference(0.5, 2.0)
    for total, gradients in ranks(4, _of_frozen):
        torch.testing.assert_close(total, expected_total)
        torch.testing.assert_close(gradients, expected)


def _some_ranks_lack():
    parameters = _parameters(_context())
    if dist.get_rank() == 2:
        for parameter in parameters:
            parameter.grad = None
    for parameter in parameters[3:]:
        parameter.grad = None
    total = clip_grad_norm_(parameters, 1e9)
    return total.item(), [None if p.grad is None else p.grad.full_tensor() for p in parameters]


def test_ranks_without_gradients_do_not_hang_their_peers(ranks):
    """They count as zeros there: rank 2 holds a replica, a shard and an expert."""
    results = ranks(4, _some_ranks_lack, timeout=20)
    assert all(result[1][3] is None and result[1][4] is None for result in results)
    experts = _full_gradients()[2]
    experts[4:6] = 0
    for _, gradients in results:
        assert torch.equal(gradients[2], experts)


def _pending():
    mesh = rank_mesh((2,), ("dp",))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.full((4,), float(dist.get_rank() + 1)), mesh, [Partial("sum")])
    return clip_grad_norm_([parameter], 3.0), parameter.grad.to_local(), list(parameter.grad.placements)


def test_a_pending_gradient_is_summed_before_its_norm_is_taken(ranks):
    """1 + 2 on four elements: norm 6. Norms of the terms would give sqrt(4) + sqrt(16), or 2 and 4."""
    for total, gradient, placements in ranks(2, _pending):
        assert total.item() == 6.0
        torch.testing.assert_close(gradient, torch.full((4,), 1.5))
        assert placements == [Replicate()]


def _empty_and_none():
    mesh = rank_mesh((2,), ("dp",))
    parameter = nn.Parameter(distribute_tensor(torch.ones(1, 2), mesh, [Shard(0)]))
    nothing = [clip_grad_norm_([], 1.0).item(), clip_grad_norm_([parameter], 1.0, math.inf).item()]
    parameter.grad = distribute_tensor(torch.tensor([[3.0, -4.0]]), mesh, [Shard(0)])
    return nothing, [clip_grad_norm_([parameter], 100.0, p).item() for p in (2.0, math.inf)]


def test_no_gradients_and_empty_parts_have_norm_zero(ranks):
    assert ranks(2, _empty_and_none, fresh=True) == [([0.0, 0.0], [5.0, 4.0])] * 2


def _nonfinite():
    mesh = rank_mesh((2,), ("dp",))
    parameter = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.tensor([1.0, math.inf]), mesh, [Shard(0)])
    with pytest.raises(NonFiniteNormError) as caught:
        clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)
    assert isinstance(caught.value, RuntimeError)
    unchanged = parameter.grad.full_tensor().tolist()
    return str(caught.value), unchanged, clip_grad_norm_([parameter], 1.0).item()


def test_a_norm_that_is_not_finite_is_the_same_error_on_every_rank(ranks):
    for message, unchanged, total in ranks(2, _nonfinite):
        assert message.startswith("the 2-norm of the gradients is inf, so they cannot be clipped; ")
        assert unchanged == [1.0, math.inf]
        assert total == math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_plain_gradients_on_one_process_are_clipped_as_by_torch(dtype):
    ours, theirs = nn.Linear(4, 3).to(dtype), nn.Linear(4, 3).to(dtype)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(5, 4, dtype=dtype)
    for module in (ours, theirs):
        module(x).square().sum().backward()
    total, expected = clip_grad_norm_(ours, 0.1), torch_clip(theirs.parameters(), 0.1)
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(
        total.to(dtype), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0
    )
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_many_elements_lose_no_precision():
    """torch's own float32 norm of these is 8e-5 away."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.rand(4_000_003, generator=generator), torch.rand(300, 200, generator=generator).t()]
    given.append(torch.full((5,), 40.0))  # a short one counts as much as a long one
    parameters = [nn.Parameter(torch.zeros(x.shape)) for x in given]
    for parameter, gradient in zip(parameters, given, strict=True):
        parameter.grad = gradient * 0.1
    expected = torch.cat([p.grad.double().flatten() for p in parameters]).norm()
    for foreach in (True, False):
        total = clip_grad_norm_(parameters, 1e9, foreach=foreach)
        torch.testing.assert_close(total.double(), expected, rtol=1e-7, atol=0)


def test_tied_parameters_count_once():
    x = nn.Parameter(torch.zeros(4))
    x.grad = torch.full((4,), 2.0)
    assert clip_grad_norm_([x, x], 1e9).item() == 4.0
    assert clip_grad_norm_([x, x], 2.0).item() == 4.0
    torch.testing.assert_close(x.grad, torch.ones(4))


@pytest.mark.parametrize("norm_type", [0, -1.0, math.nan])
def test_what_is_no_norm_is_refused(norm_type):
    with pytest.raises(ConfigError, match="is no norm; use a number above 0, or inf"):
        clip_grad_norm_([], 1.0, norm_type)


def _of_pending_parameters():
    mesh, (gradient, *_) = rank_mesh((2,), ("tp",)), _full_gradients()
    parameter = nn.Parameter(distribute_tensor(torch.ones_like(gradient), mesh, [Partial()]))
    parameter.grad = DTensor.from_local(gradient / 2, mesh, [Partial()])
    with pytest.raises(ConfigError, match=r"has no norm by parts; use torch.nn.utils.clip_grad_norm_"):
        clip_grad_norm_([parameter], 1.0)
    torch.testing.assert_close(torch_clip([parameter], 0.5).full_tensor(), gradient.norm())
    torch.testing.assert_close(parameter.grad.full_tensor(), gradient / gradient.norm() / 2)


def test_gradients_of_pending_parameters_are_refused(ranks):
    """Each rank has a term of the gradient, and the norm of a sum is no sum over its terms."""
    ranks(2, _of_pending_parameters)


def _events():
    parameters = _parameters(_context())
    with Recorder() as recorder:
        clip_grad_norm_(parameters, 1.0)
    return [(event.axis, event.bytes_sent) for event in recorder.collectives]


def test_one_sum_per_axis_is_norm_and_agreement(ranks):
    """Three kinds of cut and 128 numbers over all four ranks, on the mesh that has them in one axis."""
    assert ranks(4, _events)[0] == [("ep_shard", 8 * (3 + 128) * 2 * 3 // 4), ("dp_replicate", 8 * 128)]


@pytest.mark.parametrize("max_norm", ["x", None, [], -1.0, math.nan])
def test_a_limit_that_is_no_number_is_refused_and_nothing_is_scaled(max_norm):
    x = nn.Parameter(torch.zeros(4))
    x.grad = torch.full((4,), 2.0)
    with pytest.raises(ConfigError, match=r"max_norm=.* is no norm"):
        clip_grad_norm_([x], max_norm)
    assert x.grad.tolist() == [2.0] * 4


@pytest.mark.parametrize("given", [3, None, "x", [3], [("a",)], [("a", 3)], {"a": torch.ones(2)}])
def test_what_is_no_parameter_is_refused(given):
    for take in (lambda x: clip_grad_norm_(x, 1.0), GradientSynchronizer):
        with pytest.raises(ParallelError, match="is no module, no tensor, and no pair"):
            take(given)


@pytest.mark.parametrize("kind", [set, frozenset])
def test_parameters_without_an_order_are_refused_and_nothing_is_scaled(kind):
    """Ranks would pack gradients that are pending each in its own order."""
    x = nn.Parameter(torch.zeros(4))
    x.grad = torch.full((4,), 2.0)
    for take in (lambda given: clip_grad_norm_(given, 1.0), GradientSynchronizer):
        with pytest.raises(ParallelError, match=r"another order on each rank(.|\n)*fix: a list"):
            take(kind([x]))
    assert x.grad.tolist() == [2.0] * 4


@pytest.mark.parametrize("most", ["x", None, 0, 1.5, math.nan, True])
def test_buckets_of_no_bytes_are_refused(most):
    with pytest.raises(ParallelError, match=r"bucket_bytes=.* is no whole number above 0"):
        GradientSynchronizer([], most)


def _placed(cut):
    mesh = rank_mesh((2,), ("dp",))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0) if cut else Replicate()]))
    parameter.grad = distribute_tensor(torch.full((4, 4), 3.0), mesh, [Shard(0) if cut else Replicate()])
    return parameter


def _wrong_on_one(cut, how):
    parameter = _placed(cut)
    given = {"max_norm": 1.0}
    if dist.get_rank() == 1 and how != "gradient":
        given |= how
    if dist.get_rank() == 1 and how == "gradient":
        other = rank_mesh((2,), ("other",))
        parameter.grad = distribute_tensor(torch.ones(4, 4), other, [Replicate()], src_data_rank=None)
    with pytest.raises((ConfigError, ParallelError)) as caught:
        clip_grad_norm_(parameter, **given)
    fine = _placed(cut)
    norm = clip_grad_norm_(fine, 1.0).item()  # nobody is a message behind
    return str(caught.value), norm, parameter.grad.to_local().unique().item()


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(
    "how",
    [{"max_norm": -1.0}, {"max_norm": math.nan}, {"norm_type": 0.0}, {"error_if_nonfinite": 3}, "gradient"],
    ids=str,
)
def test_what_one_rank_cannot_clip_raises_on_all_and_changes_nothing(ranks, how, cut):
    """The others had waited for it."""
    (here, norm, kept), (there, also, _) = ranks(2, _wrong_on_one, cut, how, timeout=30)
    assert here.startswith("a rank of ('dp',) cannot go on with its gradients, as its own error says")
    assert ("the gradient of" if how == "gradient" else next(iter(how))) in there
    assert norm == also == 12.0
    assert kept == 3.0


def _wrong_infinity_norm():
    parameter = _placed(True)
    with pytest.raises((ConfigError, ParallelError)) as caught:
        clip_grad_norm_(parameter, -1.0 if dist.get_rank() else 1.0, math.inf)
    return str(caught.value)


def test_so_it_does_of_the_infinity_norm(ranks):
    here, there = ranks(2, _wrong_infinity_norm, timeout=30)
    assert here.startswith("a rank of ('dp',) cannot go on")
    assert there.startswith("max_norm=-1.0 is no norm")


def _wrong_in_one_stage():
    pair = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parallelize_pipeline(pair, rank_mesh((2,), ("pp",)), ["1"])
    for parameter in pair.parameters():
        if not parameter.is_meta:
            parameter.grad = torch.ones_like(parameter)
    with pytest.raises((ConfigError, ParallelError)) as caught:
        clip_grad_norm_(pair, -1.0 if dist.get_rank() else 1.0)
    return str(caught.value), clip_grad_norm_(pair, 1.0).item()


def test_what_one_stage_cannot_clip_raises_on_the_others(ranks):
    (here, norm), (there, also) = ranks(2, _wrong_in_one_stage, timeout=30, fresh=True)
    assert here == "clip_grad_norm_: a rank of another stage cannot go on, as its own error says"
    assert there.startswith("max_norm=-1.0 is no norm")
    assert norm == also == pytest.approx(math.sqrt(40))
