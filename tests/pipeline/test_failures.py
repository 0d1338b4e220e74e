"""What goes wrong in one stage is raised on every rank within the step, and says what it was."""

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright.errors import ParallelError
from shardwright.parallel import Pipeline, parallelize_fsdp, parallelize_pipeline
from shardwright.testing import rank_mesh
from tests.pipeline import own_code
from tests.pipeline.models import Decoder
from tests.pipeline.own_code import H, total

SECONDS = 20.0  # far below the time limit of a process group


def _cut(make=own_code.Base, cuts=("layers.2",), micro=2, **options):
    torch.manual_seed(0)
    model = make()
    parallelize_pipeline(model, rank_mesh((dist.get_world_size(),), ("pp",)), list(cuts))
    return model, Pipeline(model, total, micro_batches=micro, **options)


def _raised(call, kind=ParallelError):
    begun = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    assert time.monotonic() - begun < SECONDS
    return str(caught.value)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("no backward today")


def _fail(way, rank, schedule=None, cuts=("layers.2",), micro=2):
    """A hook that raises on one rank, in the middle of a step that follows a right one."""
    model, pipeline = _cut(cuts=cuts, schedule=schedule, micro=micro)
    x = torch.randn(2 * micro, H)
    first = float(pipeline.step(x))
    model.zero_grad()
    mine = next(layer for layer in model.layers if isinstance(layer, own_code.Part))
    hook = None
    if dist.get_rank() == rank:
        hook = mine.register_forward_hook(_failing(way))
    text = _raised(lambda: pipeline.step(x), RuntimeError if hook else ParallelError)
    if hook is not None:
        hook.remove()
    model.zero_grad()
    assert float(pipeline.step(x)) == pytest.approx(first, rel=1e-6)  # the pipeline goes on
    return text


def _failing(way):
    def hook(_, args, out):
        if way == "forward":
            raise RuntimeError("no forward today")
        return _Fails.apply(out)

    return hook


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("schedule", "cuts"),
    [
        (None, ("layers.2",)),
        ("interleaved_1f1b", ("layers.1", "layers.2", "layers.3")),
        ("interleaved_zero_bubble", ("layers.1", "layers.2", "layers.3")),
    ],
)
def test_an_error_of_one_stage_is_told_to_all(ranks, way, rank, schedule, cuts):
    texts = ranks(2, _fail, way, rank, schedule, cuts)
    assert f"no {way} today" in texts[rank]
    assert f"pipeline, rank {rank} of the axis: RuntimeError: " in texts[1 - rank]
    assert f"no {way} today" in texts[1 - rank]


def test_the_middle_stage_of_three_is_told_of_too(ranks):
    texts = ranks(3, _fail, "forward", 1, "gpipe", ("layers.1", "layers.3"), 3)
    assert all("no forward today" in text for text in texts)


def _differ(what):
    model, pipeline = _cut(own_code.Branches if what in ("flag", "attribute") else own_code.Scales)
    me = dist.get_rank()
    x = torch.randn(4, H)
    if what == "rows":
        return _raised(lambda: pipeline.step(x[: 4 - 2 * me]))
    if what == "not divisible":
        return _raised(lambda: pipeline.step(x[: 4 - me]))
    if what == "method":
        return _raised(lambda: pipeline.step(x) if me else pipeline.evaluate(x))
    pipeline.step(x, torch.zeros(4)) if what == "flag" else pipeline.step(x)
    if what == "flag":
        return _raised(lambda: pipeline.step(x, torch.ones(4)))
    if what == "attribute":
        model.use = True
        return _raised(lambda: pipeline.step(x))
    model.scale = 2.0
    assert pipeline.step(x) > 0  # the same on all ranks
    model.scale = 2.0 + me
    return _raised(lambda: pipeline.step(x))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("rows", "called with different arguments: rank 0 with a tensor torch.float32 (2, 8)"),
        ("not divisible", "2 micro-batches do not divide a batch of 3 rows"),
        ("method", "called with different arguments: rank 0 with evaluate, rank 1 with step"),
        ("flag", "the forward took another branch since"),
        ("attribute", "the forward took another branch since"),
        ("scale", "own code did not do the same in the stages 0 and 1 in this step"),
    ],
)
def test_ranks_that_do_other_things_are_told_so(ranks, what, said):
    assert all(said in text for text in ranks(2, _differ, what))


class _Object:
    factor = 1.0


class _TakesAnObject(own_code.Base):
    def forward(self, x, given):
        return super().forward(x * given.factor)


def _other_objects():
    _, pipeline = _cut(_TakesAnObject)
    x, kept = torch.randn(4, H), _Object()
    return [float(pipeline.step(x, kept)), float(pipeline.step(x, kept if dist.get_rank() else _Object()))]


def test_an_object_of_the_same_class_is_no_other_argument(ranks):
    for one, other in ranks(2, _other_objects):
        assert one == other


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(H, H), nn.Linear(H, H)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))


def _tied():
    """Gradients of earlier steps stay where a step fails."""
    model, pipeline = _cut(_Tied, ("b",))
    x = torch.randn(4, H)
    pipeline.step(x)
    weight = next(p for n, p in model.named_parameters() if n.endswith("weight"))
    before = weight.grad.clone()
    _raised(lambda: pipeline.step(x[:3]))
    return bool(torch.equal(weight.grad, before))


def test_gradients_are_kept_where_nothing_was_computed(ranks):
    assert ranks(2, _tied) == [True, True]


def _fail_beside_data_ranks(stage, at, schedule, together=False):
    """One of two data ranks raises in a layer, before what its peer goes on to gather."""
    mesh = rank_mesh((2, 2), ("pp", "dp"))
    cuts = ["layers.2"] if schedule is None else ["layers.1", "layers.2", "layers.3"]
    torch.manual_seed(0)
    model = own_code.Base()
    parallelize_pipeline(model, mesh["pp"], cuts)
    mine = [layer for layer in model.layers if type(layer) is own_code.Part]
    for unit in [mine] if together else mine:
        parallelize_fsdp(unit, mesh["dp"])
    parallelize_fsdp(model, mesh["dp"])
    pipeline = Pipeline(model, total, micro_batches=2, schedule=schedule, data=mesh["dp"])
    x = torch.randn(4, H)
    first = float(pipeline.step(x))
    model.zero_grad()
    fails = tuple(mesh.get_coordinate()) == (stage, 0)
    hook = mine[at].linear.register_forward_hook(_failing("forward")) if fails else None
    text = _raised(lambda: pipeline.step(x), RuntimeError if fails else ParallelError)
    if hook is not None:
        hook.remove()
    model.zero_grad()
    assert float(pipeline.step(x)) == pytest.approx(first, rel=1e-6)
    return text


@pytest.mark.parametrize("schedule", [None, "interleaved_1f1b", "one unit"])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("stage", [0, 1])
def test_data_peers_of_a_rank_that_fails_do_not_wait_for_it(ranks, stage, at, schedule):
    how = (None, True) if schedule == "one unit" else (schedule,)
    texts = ranks(4, _fail_beside_data_ranks, stage, at, *how, timeout=60)
    own = [text for i, text in enumerate(texts) if i % 2 == 0]
    assert "no forward today" in " ".join(own)
    assert all("failed on ranks of other data" in text for text in texts[1::2])


def _with_loss(loss):
    torch.manual_seed(0)
    model = Decoder()
    parallelize_pipeline(model, rank_mesh((2,), ("pp",)), ["layers.2"])
    tokens = torch.randint(30, (4, 5))
    pipeline = Pipeline(model, WRONG_LOSSES[loss], micro_batches=2)
    return [_raised(partial(run, tokens, target=tokens)) for run in (pipeline.step, pipeline.evaluate)]


WRONG_LOSSES = {
    "vector": lambda out, labels: out.sum((1, 2)),
    "number": lambda out, labels: out.sum().item(),
    "none": lambda out, labels: None,
}


@pytest.mark.parametrize("loss", list(WRONG_LOSSES))
def test_a_loss_that_is_no_scalar_is_told_to_all(ranks, loss):
    """The last stage had failed alone, after the schedule, and the others waited for it."""
    for texts in ranks(2, _with_loss, loss, timeout=30):
        assert all("the loss has to be a real scalar" in text for text in texts)


def _with_data(data):
    mesh = rank_mesh((2, 1), ("pp", "dp"))
    model = Decoder()
    parallelize_pipeline(model, mesh["pp"], ["layers.2"])
    one = {"name": "dp", "whole": mesh, "stages": mesh["pp"]}[data]
    made = _raised(lambda: Pipeline(model, None, micro_batches=2, data=one))
    tokens = torch.zeros(2, 4, dtype=torch.long)
    pipeline = Pipeline(model, lambda out, labels: out.sum(), micro_batches=2, data=mesh["dp"])
    return made, _raised(lambda: pipeline.step(tokens, target=tokens, count=-8))


@pytest.mark.parametrize("data", ["name", "whole", "stages"])
def test_axes_of_data_that_hold_stages_are_refused(ranks, data):
    """The ranks of the last stage had asked the others for a count, and the step never ended."""
    for made, counted in ranks(2, _with_data, data, timeout=30):
        assert "needs a mesh with axis names" in made or "has ranks of other stages" in made
        assert "is no number" in counted


def _copies_part(names, change):
    """A program changes one weight by some of its names, between two steps."""
    model, pipeline = _cut(_Tied, ("b",))
    x = torch.randn(4, H)
    pipeline.step(x)
    model.zero_grad()
    with torch.no_grad():
        for name in names:
            change(getattr(model, name).weight)
    if len(names) == 1:
        return _raised(lambda: pipeline.step(x))
    pipeline.step(x)
    weight = next(p for n, p in model.named_parameters() if n.endswith("weight"))
    return weight.requires_grad, weight.grad is not None


def _freeze(weight):
    weight.requires_grad_(False)


def _clamp(weight):
    weight.clamp_(-0.1, 0.1)


@pytest.mark.parametrize(
    ("change", "message"), [(_freeze, "has frozen its copy"), (_clamp, "are not equal any more")]
)
@pytest.mark.parametrize("name", ["a", "b"])
def test_copies_of_a_tied_weight_do_not_part(ranks, name, change, message):
    """On one device each of the names is the weight; here each rank has one of them."""
    for text in ranks(2, _copies_part, (name,), change):
        assert "a.weight and b.weight are one weight" in text
        assert message in text


@pytest.mark.parametrize(("change", "trained"), [(_freeze, False), (_clamp, True)])
def test_a_tied_weight_is_changed_by_each_of_its_names(ranks, change, trained):
    assert ranks(2, _copies_part, ("a", "b"), change) == [(trained, trained)] * 2
