"""A pipeline gives what one device gives: loss, every gradient, clipped norm, parameters after steps."""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwright.errors import ConfigError
from shardwright.grads import GradientSynchronizer, clip_grad_norm_
from shardwright.parallel import Pipeline, parallelize_pipeline
from shardwright.testing import rank_mesh
from tests.pipeline.models import make
from tests.pipeline.ranks import Case, assert_right, beside_one_device
from tests.tiers import all_but, one_in, only


def _right(ranks, case):
    names = [n for n, _ in make(case.name).named_parameters(remove_duplicate=False)]
    assert_right(ranks(case.world, beside_one_device, case), names)


MODELS = ["decoder", "tied", "skip", "two streams", "llama", "tied llama", "gpt2", "t5", "mixtral", "gemma2"]


@pytest.mark.parametrize("name", all_but(["decoder", "llama", "gpt2"], MODELS))  # others are these and more
def test_two_stages_give_what_one_device_gives(ranks, name):
    _right(ranks, Case(name, {"pp": 2}))


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [("gpipe", 2), ("1f1b", 2), ("interleaved_1f1b", 4), ("looped_bfs", 4), ("interleaved_zero_bubble", 4)],
)
@pytest.mark.parametrize("name", ["tied", "skip"])
def test_every_schedule_gives_what_one_device_gives(ranks, name, schedule, stages):
    _right(ranks, Case(name, {"pp": 2}, stages=stages, schedule=schedule))


OVER_DATA = [
    ("tied", 2, 3, "fsdp"), ("llama", 4, 1, "fsdp"), ("llama", 4, 1, "replicate"),
    ("tied", 2, 3, "replicate"), ("llama", 4, 1, "fsdp at once"), ("tied", 2, 3, "fsdp at once"),
    ("two streams", 2, 1, "replicate"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "stages", "accumulate", "how"), one_in(2, OVER_DATA))
def test_stages_over_data_ranks_give_what_one_device_gives(ranks, name, how, stages, accumulate):
    order = ("pipeline", how)
    _right(ranks, Case(name, {"pp": 2, "dp": 2}, order, stages, micro=2, accumulate=accumulate))


CUT = [(name, (how, "pipeline")) for name in ("llama", "tied llama") for how in ("sequence", "tensor")]


@pytest.mark.parametrize(("name", "how"), only([CUT[0], CUT[3]], CUT))
def test_stages_of_tensor_parallel_parts_give_what_one_device_gives(ranks, name, how):
    _right(ranks, Case(name, {"pp": 2, "tp": 2}, how, micro=2))


@pytest.mark.parametrize(
    "how", [("context", "pipeline"), pytest.param(("pipeline", "context"), marks=pytest.mark.slow)]
)
def test_stages_of_cut_sequences_give_what_one_device_gives(ranks, how):
    _right(ranks, Case("llama", {"pp": 2, "cp": 2}, how, micro=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "how"),
    [
        ({"pp": 2, "dp": 2, "tp": 2}, ("tensor", "pipeline", "fsdp")),
        ({"pp": 2, "dp": 2, "tp": 2}, ("sequence", "replicate", "pipeline")),
        ({"pp": 2, "dp": 2, "cp": 2}, ("context", "pipeline", "fsdp")),
        ({"pp": 2, "cp": 2, "tp": 2}, ("sequence", "context", "pipeline")),
    ],
)
@pytest.mark.parametrize("name", ["llama", "tied llama"])
def test_stages_of_two_strategies_give_what_one_device_gives(ranks, name, axes, how):
    _right(ranks, Case(name, axes, how, micro=2, steps=2))


kept = []  # models that live


def _clips_a_list():
    """The first stage is frozen: its rank hands over no parameters, and has the norm of the others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    alone = copy.deepcopy(model)
    parallelize_pipeline(model, rank_mesh((2,), ("pp",)), ["1"])
    x = torch.randn(4, 4)
    alone(x).square().sum().backward()
    Pipeline(model, lambda out, _: out.square().sum(), micro_batches=2).step(x)
    wanted = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
    mine = [p for p in model.parameters() if p.requires_grad]
    torch.testing.assert_close(clip_grad_norm_(mine, 0.5), wanted)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, alone.get_parameter(name).grad)
    return len(mine)


def test_a_list_without_a_frozen_stage_is_clipped_together(ranks):
    assert ranks(2, _clips_a_list, timeout=30, fresh=True) == [0, 2]


def _clips_nothing_where_a_model_is_gone():
    mesh = rank_mesh((2,), ("pp",))
    pair = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parallelize_pipeline(pair, mesh, ["1"])
    kept.append(pair)
    del pair
    if dist.get_rank() == 0:
        kept.clear()
        gc.collect()
    return clip_grad_norm_([], 1.0).item(), dist.all_reduce(torch.ones(3))


def test_the_norm_of_nothing_does_not_ask_which_models_still_live(ranks):
    """The garbage collector of each rank decides that, and the ranks would meet the wrong collectives."""
    assert ranks(2, _clips_nothing_where_a_model_is_gone, timeout=30, fresh=True) == [(0.0, None)] * 2


def _clips_nothing_beside_two():
    for name in ("a", "b"):
        pair = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        parallelize_pipeline(pair, init_device_mesh("cpu", (2,), mesh_dim_names=(name,)), ["1"])
        kept.append(pair)
    with pytest.raises(ConfigError, match="cut into stages over several axes"):
        clip_grad_norm_([], 1.0)
    kept.clear()


def test_no_parameters_beside_two_pipelines_is_an_error(ranks):
    ranks(2, _clips_nothing_beside_two, fresh=True)


class _Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return x


def _summed(out, wanted):
    return (out - wanted).square().sum()


def _blocks():
    torch.manual_seed(0)
    model, x = _Blocks(), torch.randn(6, 4)
    alone = copy.deepcopy(model)
    _summed(alone(x), x).backward()
    parallelize_pipeline(model, rank_mesh((2,), ("pp",)), ["blocks.2"])
    return model, x, alone


def _leaves_behind():
    """How many outputs of layers a step makes, and how many of them live on where nobody collects cycles."""
    model, x, _ = _blocks()
    made = []
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _args, out: made.append(weakref.ref(out)))
    pipeline = Pipeline(model, _summed, micro_batches=2)
    pipeline.step(x, target=x)
    made.clear()
    gc.collect()
    gc.disable()
    try:
        pipeline.step(x, target=x)
        return len(made), sum(each() is not None for each in made)
    finally:
        gc.enable()


def test_a_step_lets_go_of_what_its_stages_have_computed(ranks):
    for made, alive in ranks(2, _leaves_behind):
        assert made
        assert not alive


def _sums_where_each_rank_is_a_stage(overlapped):
    model, x, alone = _blocks()
    synchronizer = GradientSynchronizer(model)
    with synchronizer.overlapped() if overlapped else contextlib.nullcontext():
        Pipeline(model, _summed, micro_batches=2).step(x, target=x)
    synchronizer.synchronize()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, alone.get_parameter(name).grad)


@pytest.mark.parametrize("overlapped", [False, True], ids=["", "overlapped"])
def test_the_gradients_of_stages_alone_need_no_sum(ranks, overlapped):
    """A loop that is written for any mesh runs where the stages are all ranks."""
    ranks(2, _sums_where_each_rank_is_a_stage, overlapped)


def _evaluates_in_inference_mode(first):
    model, x, alone = _blocks()
    pipeline = Pipeline(model, _summed, micro_batches=2)
    wanted = _summed(alone(x), x).detach()
    for inference in (first, not first):
        with torch.inference_mode(mode=inference):
            rows = x.clone()
            torch.testing.assert_close(pipeline.evaluate(rows, target=rows), wanted)
            outputs = pipeline.outputs(rows)
        if outputs is not None:
            torch.testing.assert_close(torch.cat(outputs), alone(x).detach())
        torch.testing.assert_close(pipeline.step(x, target=x), wanted)


@pytest.mark.parametrize("first", [True, False], ids=["", "after a training step"])
def test_a_pipeline_is_evaluated_in_inference_mode(ranks, first):
    ranks(2, _evaluates_in_inference_mode, first)
