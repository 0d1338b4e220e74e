"""What a forward leaves behind is as on one device, or refused in the step in which it would be read."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist

from shardwright.errors import ParallelError
from shardwright.parallel import Pipeline, parallelize_pipeline
from shardwright.testing import rank_mesh
from tests.pipeline import left_behind
from tests.pipeline.left_behind import FITS, GENERATORS
from tests.pipeline.own_code import H, total

HALF, QUARTERS = ["layers.2"], ["layers.1", "layers.2", "layers.3"]


def _cut(name, *given, cuts=HALF):
    torch.manual_seed(0)
    model = getattr(left_behind, name)(*given)
    alone = copy.deepcopy(model)
    parallelize_pipeline(model, rank_mesh((2,), ("pp",)), cuts)
    return model, alone, Pipeline(model, total, micro_batches=2)


def _late(model):
    for module in model.modules():
        module.late = True
        if hasattr(module, "inner"):
            module.inner.late = True


def _same_step(alone, pipeline):
    x = torch.randn(4, H)
    wanted = sum(float(total(alone(rows.clone()), None).detach()) for rows in x.chunk(2))
    assert float(pipeline.step(x)) == pytest.approx(wanted, rel=1e-5)


def _refused(pipeline):
    with pytest.raises(ParallelError) as caught:
        pipeline.step(torch.randn(4, H))
    return str(caught.value)


def _refused_late(name):
    model, alone, pipeline = _cut(name)
    for _ in range(2):
        _same_step(alone, pipeline)
    _late(model)
    first = _refused(pipeline)
    return first, _refused(pipeline)


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        ("ReadsLate", "layers.0.term was set by the forward of layers.0 in this step for the first time", ""),
        ("InAnObject", "layers.0.state was set by the forward of layers.0 in this step for the", ""),
        ("InATensor", "layers.0.stat was set by the forward of layers.0 in this step for the first", ""),
        ("WithinALayer", "layers.0.inner.term was set by the forward of layers.0 in this step", ""),
        ("WritesLate", "layers.1 returned is written into in place, and was not", "written into in place"),
    ],
)
def test_what_begins_after_learning_is_refused_in_its_step(ranks, name, first, then):
    for one, other in ranks(2, _refused_late, name):
        assert first in one
        assert (then or "is set by the forward of layers.0, which another rank holds") in other


def _refused_at_once(name, given, cuts):
    return _refused(_cut(name, *given, cuts=cuts)[2])


@pytest.mark.parametrize(
    ("name", "given", "cuts", "said"),
    [
        ("InAnObject", [True], HALF, "layers.0.state is set by the forward of layers.0"),
        ("InATensor", [True], HALF, "layers.0.stat is set by the forward of layers.0"),
        ("OnATensor", ["table"], HALF, "layers.0.table is set by the forward of layers.0"),
        ("OnATensor", ["mean"], HALF, "layers.0.mean is set by the forward of layers.0"),
        ("OnAResult", [], HALF, "layers.0 returns a tensor with an attribute of its own, 'scale'"),
        ("ResetBefore", [], HALF, "layers.0.term is set by the forward of layers.0"),
        ("ReadsAnotherStage", [], QUARTERS, "layers.1.term is set by the forward of layers.1"),
        ("HandsOverACounter", [], HALF, "n is set by the model's own code behind a border"),
        ("SharedMemory", [], HALF, "writes in place into a tensor that shares memory with what layers.1"),
        *(("OwnNoise", [kind], HALF, "draws from a generator of its own") for kind in GENERATORS),
    ],
)
def test_what_a_stage_cannot_know_is_refused(ranks, name, given, cuts, said):
    for text in ranks(2, _refused_at_once, name, given, cuts):
        assert said in text


def _iterator(kind):
    torch.manual_seed(0)  # a generator cannot be copied: there is no other model beside this one
    model = left_behind.Advances(kind)
    parallelize_pipeline(model, rank_mesh((2,), ("pp",)), HALF)
    text = _refused(Pipeline(model, total, micro_batches=2))
    return text, [next(layer.numbers) for layer in model.layers if hasattr(layer, "numbers")]


@pytest.mark.parametrize("kind", left_behind.ITERATORS)
def test_an_iterator_is_refused_before_it_is_advanced(ranks, kind):
    for text, following in ranks(2, _iterator, kind):
        assert "layers.0.numbers leads to an iterator" in text
        assert set(following) == {1}


def _right(name, given, cuts, *, late):
    model, alone, pipeline = _cut(name, *given, cuts=cuts)
    for step in range(4):
        if late and step == 2:
            _late(model)
        _same_step(alone, pipeline)
    copy.deepcopy(model.state_dict())


@pytest.mark.parametrize("cuts", [HALF, QUARTERS])
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("ReadsNothingLate", []),
        ("KeepsForTheUser", []),
        ("MakesWhatItReads", []),
        ("SameMemory", []),
        ("HooksOnce", []),
        ("Advances", ["bytearray"]),
        ("Advances", ["parameter"]),
        *(("FitsOnce", [kind]) for kind in FITS),
        ("Transposes", []),
        *(("LayerNoise", [kind]) for kind in GENERATORS),
    ],
)
def test_what_nobody_reads_elsewhere_is_as_on_one_device(ranks, name, given, cuts):
    ranks(2, functools.partial(_right, late=True), name, given, cuts)


def _exits(*, late):
    model, alone, pipeline = _cut("Exits")
    if late:
        _same_step(alone, pipeline)
    _late(model)
    with pytest.raises(SystemExit if dist.get_rank() == 0 else ParallelError) as caught:
        pipeline.step(torch.randn(4, H))
    return str(caught.value)


@pytest.mark.parametrize("late", [False, True])
def test_a_layer_that_exits_is_told_to_the_other_ranks(ranks, late):
    own, other = ranks(2, functools.partial(_exits, late=late))
    assert own == "3"
    assert "SystemExit: 3" in other


def _alone_on_the_axis():
    torch.manual_seed(0)
    model = left_behind.ReadsTheStepBefore()
    parallelize_pipeline(model, rank_mesh((1,), ("pp",)), HALF)
    pipeline = Pipeline(model, total, micro_batches=2)
    return _refused(pipeline)


def test_what_an_earlier_stage_of_the_rank_left_is_of_another_micro_batch(ranks):
    assert "layers.0.term is set by the forward of layers.0" in ranks(1, _alone_on_the_axis)[0]


def _outside(name):
    _, _, pipeline = _cut(name)
    return _refused(pipeline)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("InAGlobal", "AUX, a global of tests.pipeline.left_behind, is changed by the forward of layers.0"),
        ("OnAClass", "Total.value, is changed by the forward of layers.0"),
        ("OnAClassThatInherits", "Counts.calls, is changed by the forward of layers.0"),
        ("InSlots", "layers.0.state is set by the forward of layers.0"),
    ],
)
def test_what_layers_leave_outside_of_modules_and_own_code_reads_is_refused(ranks, name, said):
    for text in ranks(2, _outside, name):
        assert said in text


def _total_and_aux(out, _):
    return total(out, None) + sum(left_behind.AUX)


def _loss_reads():
    model = left_behind.InAGlobal.__bases__[0](left_behind.InAGlobal.Adds)
    parallelize_pipeline(model, rank_mesh((2,), ("pp",)), HALF)
    return _refused(Pipeline(model, _total_and_aux, micro_batches=2))


def test_what_the_loss_reads_of_earlier_stages_is_refused(ranks):
    for text in ranks(2, _loss_reads):
        assert "AUX, a global of tests.pipeline.left_behind, is changed by the forward of layers.0" in text


def _counted():
    _, alone, pipeline = _cut("CountsItsCalls")
    left_behind.CALLS = 0
    pipeline.step(torch.randn(4, H))
    here = left_behind.CALLS
    left_behind.CALLS = 0
    for rows in torch.randn(4, H).chunk(2):
        alone(rows)
    return here, left_behind.CALLS


def test_the_run_that_learns_borders_leaves_nothing_in_globals(ranks):
    """Of four layers each rank has two, and calls them for two micro-batches."""
    assert ranks(2, _counted) == [(4, 8)] * 2
