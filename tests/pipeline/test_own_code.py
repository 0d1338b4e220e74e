"""What a model's own code reads and leaves beside tensors is as on one device, or refused by name."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright.context import DeviceMeshParameters
from shardwright.errors import ParallelError
from shardwright.parallel import Pipeline, parallelize_pipeline
from shardwright.testing import rank_mesh
from tests.pipeline import own_code
from tests.pipeline.own_code import H, total

HALF, QUARTERS = ["layers.2"], ["layers.1", "layers.2", "layers.3"]


def _cut(make, cuts, **options):
    torch.manual_seed(0)
    model = make()
    alone = copy.deepcopy(model)
    parallelize_pipeline(model, rank_mesh((2,), ("pp",)), cuts)
    return model, alone, Pipeline(model, total, micro_batches=2, **options)


def _beside(name, cuts, steps=3, **given):
    """Steps of a model and of a pipeline of it: loss, gradients, buffers."""
    model, alone, pipeline = _cut(getattr(own_code, name), cuts)
    for step in range(steps):
        x = torch.randn(4, H) + step
        wanted = 0.0
        for rows in x.clone().chunk(2):
            term = total(alone(rows.clone(), **given), None)
            term.backward()
            wanted += float(term.detach())
        assert float(pipeline.step(x, **given)) == pytest.approx(wanted, rel=1e-5), step
    known, buffers = dict(alone.named_parameters(remove_duplicate=False)), dict(alone.named_buffers())
    for path, parameter in model.named_parameters():
        assert (parameter.grad is None) == (known[path].grad is None), path
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, known[path].grad, rtol=1e-4, atol=1e-4)
    for path, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, buffers[path])


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("ReturnsAFloat", HALF),
        ("WritesIntoResults", HALF),
        ("WritesIntoResults", QUARTERS),
        ("AsksTheClass", HALF),
        ("ReplacesABuffer", HALF),
        ("CountsParameters", HALF),
        ("AsksForAGradient", HALF),
        ("HandsOverAnObject", HALF),
        ("SetsAnAttribute", HALF),
        ("HooksAnActivation", HALF),
        ("HooksAnActivation", QUARTERS),
        ("Counts", HALF),
        ("Counts", QUARTERS),
        ("Adds", HALF),
        ("Adds", QUARTERS),
        ("Catches", HALF),
        ("WritesItsArgument", HALF),
        ("WritesItsArgument", QUARTERS),
        ("CountsAbove", HALF),
        ("AsksWhetherGradientsAreRecorded", HALF),
        ("DiffersInALayer", HALF),
        ("DiffersInALayer", QUARTERS),
    ],
)
def test_it_gives_what_one_device_gives(ranks, name, cuts):
    ranks(2, _beside, name, cuts)


@pytest.mark.parametrize("given", [{}, {"aux": True}])
def test_tied_weights_have_a_gradient_where_one_device_has_one(ranks, given):
    ranks(2, _beside_unused, given)


def _beside_unused(given):
    _beside("Unused", ["b"], 2, **given)


def _refused(name, cuts, said):
    _, _, pipeline = _cut(getattr(own_code, name), cuts)
    with pytest.raises(ParallelError) as caught:
        pipeline.step(torch.randn(4, H))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "cuts", "said"),
    [
        ("ReturnsAnInt", HALF, "later stages go on from what it returned when the borders were learned"),
        ("Routes", HALF, "while the borders were learned, from zeros where another stage returns something"),
        ("AsksTheType", HALF, "own code does not do the same in the stages 0 and 1"),
        ("TypeWithoutFunctions", HALF, "own code does not do the same in the stages 0 and 1"),
        ("SharedNorm", HALF, "layers.1 writes into its buffers, and is called in the stages [0, 1]"),
        (
            "CountsAbove",
            QUARTERS,
            "writes into steps in its forward, and each rank runs that code once for each",
        ),
        ("CountsAtTheEnd", HALF, "writes into steps in its forward, and only the stages [1] come to where"),
        ("LeavesOnItself", HALF, "layers.0.term is set by the forward of layers.0, which another rank holds"),
        ("WalksOverModules", HALF, "layers.0.inner.aux is set by the forward of layers.0"),
        ("WalksOverParameters", HALF, "is held by another stage, and the model's own code uses it"),
        ("WritesIntoADict", HALF, "layers.0.state is set by the forward of layers.0"),
        ("FillsAListOfTheModel", HALF, "layers.0.sink is one object with what other modules have"),
        ("DiffersInForward", HALF, "asks for gradients inside of its forward"),
        ("HasAGenerator", HALF, "draws from a generator of its own"),
        ("DrawsAroundCheckpoints", HALF, "draws random numbers inside of a checkpoint"),
        ("CallsForward", HALF, "call it there as a module: layer(x), not layer.forward(x)"),
    ],
)
def test_it_is_refused_by_name_on_every_rank(ranks, name, cuts, said):
    ranks(2, _refused, name, cuts, said)


def _zero(draw, cuts):
    model = own_code.Zero(draw)
    parallelize_pipeline(model, rank_mesh((2,), ("pp",)), cuts)
    pipeline = Pipeline(model, lambda out, _: out.abs().max(), micro_batches=2)
    torch.manual_seed(dist.get_rank())
    seen = []
    if dist.get_rank():
        model.second.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten().tolist()))
    for _ in range(2):
        assert float(pipeline.step(torch.zeros(4, H) + 1)) <= 1e-5
    assert all(one != other for i, one in enumerate(seen[-4:]) for other in seen[-4:][:i])  # each its own


@pytest.mark.parametrize("draw", ["torch", "dropout", "after a mask of what is not here", "python"])
def test_both_sides_of_a_cut_draw_the_same(ranks, draw):
    ranks(2, _zero, draw, ["second"])


class _Masks(nn.Module):
    """Layers that keep the mask which they drew."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(_Mask() for _ in range(2))

    def forward(self, x):
        return self.layers[1](self.layers[0](x))


class _Mask(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(H, H)
        self.mask = None

    def forward(self, x):
        self.mask = nn.functional.dropout(torch.ones(64))
        return self.linear(x)


def _seeded():
    context = DeviceMeshParameters(pipeline_parallel=2).build(device="cpu")
    context.seed(0)
    model = _Masks()
    mine = model.layers[dist.get_rank()]
    weight = mine.linear.weight.detach().clone()
    parallelize_pipeline(model, context.mesh_for("regular")["pp"], ["layers.1"])
    Pipeline(model, total, micro_batches=2).step(torch.randn(4, H))
    return weight, mine.mask


def test_a_seed_of_the_context_parts_the_streams_of_the_stages(ranks):
    torch.manual_seed(0)
    alone = _Masks()
    found = ranks(2, _seeded, fresh=True)
    for layer, (weight, _) in zip(alone.layers, found, strict=True):
        assert torch.equal(layer.linear.weight, weight)
    assert not torch.equal(found[0][1], found[1][1])


def _compiled():
    model, alone, pipeline = _cut(own_code.Base, HALF)
    for layer in model.layers:
        if isinstance(layer, own_code.Part):
            layer.compile(backend="eager")
    x = torch.randn(4, H)
    with warnings.catch_warnings():  # the compiler asks activations for `.grad`
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        value = float(pipeline.step(x))
    assert value == pytest.approx(float(total(alone(x), None).detach()), rel=1e-5)


def test_parts_that_are_compiled_after_the_cut_are_heard(ranks):
    ranks(2, _compiled, fresh=True)


def _dtypes():
    model, _, _ = _cut(own_code.Base, HALF)
    pipeline = Pipeline(model, lambda out, _: out.double().sum(), micro_batches=2)
    return pipeline.step(torch.randn(4, H)).dtype


def test_the_loss_has_one_dtype_on_all_ranks(ranks):
    assert ranks(2, _dtypes) == [torch.float64] * 2


def _flipped():
    model, alone, pipeline = _cut(own_code.AsksALayerElsewhere, HALF)
    x = torch.randn(4, H)
    for training in (False, True):
        with torch.no_grad():
            wanted = sum(float(total(alone.train(training)(rows), None)) for rows in x.chunk(2))
        model.train(training)
        assert float(pipeline.evaluate(x)) == pytest.approx(wanted, rel=1e-5)


def test_layers_elsewhere_know_whether_they_train(ranks):
    ranks(2, _flipped)


def _weighed():
    """A loss that reads what only the first stage has."""
    model, _, _ = _cut(own_code.Base, HALF)

    def loss(out, _):
        return total(out, _) + sum(p.square().sum() for p in model.parameters())

    with pytest.raises(ParallelError, match=r"the loss is computed with tensors of another stage.*layers\.0"):
        Pipeline(model, loss, micro_batches=2).step(torch.randn(4, H))


def test_a_loss_over_parameters_of_other_stages_is_refused(ranks):
    ranks(2, _weighed)
