"""What each rank of a test runs: a pipeline, and the same steps on one device."""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_ as torch_clip

from shardwright.grads import GradientSynchronizer, clip_grad_norm_
from shardwright.parallel import (
    Pipeline,
    parallelize_context,
    parallelize_fsdp,
    parallelize_hsdp,
    parallelize_pipeline,
    parallelize_replicate,
    parallelize_tensor,
)
from shardwright.placement import ZigZag
from shardwright.tensor.distribute import distribute_tensor
from shardwright.tensor.plain.spmd import spmd
from shardwright.testing import rank_mesh
from tests.cycles import tensors_in_cycles
from tests.pipeline.models import CUTS, arguments, batch, loss_sum, make, stages_for

ROWS, CLIP = 8, 0.5
STEPS = 3  # the first learns, the second does what was learned, the third from what that one made


def whole(x):
    """A plain tensor."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def error(have, want):
    """The largest difference, as a part of the largest element."""
    return float((have - want).abs().max() / want.abs().max().clamp(min=1e-9))


def cuts_for(name, stages):
    """As many of the model's cuts as make this number of stages, spread over it."""
    cuts = CUTS[name]
    every = (len(cuts) + 1) // stages
    return cuts[every - 1 :: every]


def place_data(model, how, mesh):
    """The strategy over the data ranks, if there is one."""
    if how == "replicate":
        parallelize_replicate(model, mesh["dp"])
    if how == "hsdp":
        parallelize_hsdp(model, mesh["copies", "dp"], shard_dim="dp")
    if how == "fsdp":
        for module in list(model.modules()):
            if type(module).__name__ in ("Block", "TwoBlocks", "LlamaDecoderLayer") and module is not model:
                parallelize_fsdp(module, mesh["dp"])
        parallelize_fsdp(model, mesh["dp"])
    if how == "fsdp at once":
        parallelize_fsdp(model, mesh["dp"])


def optimizer_of(model, name):
    """Steps that are large enough to be seen, and no larger than rounding allows."""
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.3)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)


@cache  # of the tests that follow on these ranks, many compare with the same
def reference(name, steps=STEPS, accumulate=1, optimizer="AdamW"):
    """Loss, gradients and norm of the first step on one device, and the parameters after all."""
    model = make(name)
    optimizer = optimizer_of(model, optimizer)
    seen = None
    for step in range(steps):
        losses = []
        for part in range(accumulate):
            tokens, mask, labels = batch(ROWS, seed=10 * step + part)
            loss = loss_sum(model(**arguments(name, tokens, mask, labels)), labels) / (labels >= 0).sum()
            loss.backward()
            losses.append(float(loss.detach()))
        gradients = {n: p.grad.clone() for n, p in _named(model) if p.grad is not None}
        norm = float(torch_clip(model.parameters(), CLIP))
        seen = seen or (losses, gradients, norm)
        optimizer.step()
        optimizer.zero_grad()
    return (*seen, {n: p.detach() for n, p in _named(model)})


def _named(model):
    return list(model.named_parameters(remove_duplicate=False))


@dataclass(frozen=True)
class Case:
    """A model on a mesh, and how its stages run.

    axes: of the mesh, by size; `dp` reads other rows, all others the same. how: strategies, in this order,
    `pipeline` among them.
    """

    name: str
    axes: dict[str, int]
    how: tuple[str, ...] = ("pipeline",)
    stages: int = 2
    micro: int = 4
    schedule: str | None = None
    accumulate: int = 1
    steps: int = STEPS
    optimizer: str = "AdamW"

    @property
    def world(self):
        return math.prod(self.axes.values())


def place(case):
    """The model of a case, placed."""
    mesh = rank_mesh(tuple(case.axes.values()), tuple(case.axes))
    model = make(case.name)
    for word in case.how:
        if word == "pipeline":
            cuts, stages = cuts_for(case.name, case.stages), stages_for(case.name, case.stages)
            parallelize_pipeline(model, mesh["pp"], cuts, stages=stages)
        elif word in ("tensor", "sequence"):
            parallelize_tensor(model, mesh["tp"], "auto", sequence_parallel=word == "sequence")
        elif word == "context":
            parallelize_context(model, mesh["cp"])
        else:
            place_data(model, word, mesh)
    return mesh, model


def inside(case, mesh):
    """What surrounds a step: tensor parallelism by words runs in one program."""
    by_words = {"tensor", "sequence"} & set(case.how) and "context" not in case.how
    return spmd(mesh["tp"]) if by_words else nullcontext()


def beside_one_device(case):
    """The largest errors of loss, gradients, norm and parameters, and the names of what this rank holds."""
    mesh, model = place(case)
    data = _data_of(case, mesh)
    pipeline = Pipeline(model, loss_sum, micro_batches=case.micro, schedule=case.schedule, data=data)
    synchronizer = GradientSynchronizer(model) if len(case.how) > 1 else None
    optimizer = optimizer_of(model, case.optimizer)
    losses, gradients, norm, parameters = reference(case.name, case.steps, case.accumulate, case.optimizer)
    worst = {"loss": 0.0}
    for step in range(case.steps):
        for part in range(case.accumulate):
            last = 0 < step == case.steps - 1 and part == case.accumulate - 1  # a first step learns
            with tensors_in_cycles() if last else nullcontext([]) as left:
                loss = _step(case, mesh, pipeline, 10 * step + part)
            if step == 0:
                worst["loss"] = max(worst["loss"], abs(float(loss) - losses[part]))
        if synchronizer:
            synchronizer.synchronize()
        if step == 0:
            worst["gradient"] = _gradient_error(model, gradients)
        have = float(clip_grad_norm_(model, CLIP))
        if step == 0:
            worst["norm"] = abs(have - norm) / norm
        optimizer.step()
        optimizer.zero_grad()
    worst["left"] = float(len(left))
    held = dict(_named(model))
    worst["parameter"] = max(error(whole(p.detach()), parameters[n]) for n, p in held.items())
    return worst, sorted(held)


def _data_of(case, mesh):
    """The axes whose ranks read other rows."""
    if "copies" in case.axes:
        return mesh["copies", "dp"]
    return mesh["dp"] if "dp" in case.axes else None


def _step(case, mesh, pipeline, seed):
    tokens, mask, labels = batch(ROWS, seed=seed)
    for axis in ("copies", "dp"):
        if axis in case.axes:
            coord = mesh[axis].get_local_rank()
            tokens, mask, labels = (x.chunk(case.axes[axis])[coord] for x in (tokens, mask, labels))
    given, count = arguments(case.name, tokens, mask, labels), (labels >= 0).sum()
    if "context" in case.how:
        whole_axes = mesh["cp", "tp"] if "tp" in case.axes else mesh["cp"]
        labels = distribute_tensor(labels, whole_axes, {"cp": ZigZag(1)}, src_data_rank=None)
    with inside(case, mesh):
        return pipeline.step(**given, target=labels, count=count)


def _gradient_error(model, gradients):
    worst = 0.0
    for name, parameter in _named(model):
        if name in gradients:
            worst = max(worst, error(whole(parameter.grad), gradients[name]))
        else:
            assert parameter.grad is None or not whole(parameter.grad).any()
    return worst


def assert_right(results, names=None):
    """Bounds: losses 1e-5, the rest 1e-4 of the largest element; every name is held by some rank."""
    for worst, _ in results:
        assert worst["loss"] <= 1e-5, worst
        assert max(worst["gradient"], worst["norm"], worst["parameter"]) <= 1e-4, worst
        assert worst["left"] == 0, worst  # tensors that wait for the garbage collector
    if names is not None:
        assert set().union(*(held for _, held in results)) == set(names)
