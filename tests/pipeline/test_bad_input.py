"""What cannot be a pipeline is said once, on every rank, and nothing has been changed then."""

import math
import time
from unittest.mock import patch

import pytest
import torch
from torch import nn

from shardwright.errors import ParallelError
from shardwright.parallel import (
    Pipeline,
    parallelize_context,
    parallelize_fsdp,
    parallelize_hsdp,
    parallelize_pipeline,
    parallelize_replicate,
    parallelize_tensor,
)
from shardwright.parallel.pipeline import agreement, schedules
from shardwright.testing import rank_mesh
from tests.pipeline.models import HIDDEN, Block, Decoder, hugging_face, loss_sum


def _text(function, *args, **kwargs):
    with pytest.raises(ParallelError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def _cut(cuts, stages=None, tied=False):
    model = Decoder(tied)
    before = [(n, id(m), dict(m._parameters)) for n, m in model.named_modules()]
    text = _text(parallelize_pipeline, model, rank_mesh((2,), ("pp",)), cuts, stages=stages)
    assert [(n, id(m), dict(m._parameters)) for n, m in model.named_modules()] == before
    return text


@pytest.mark.parametrize(
    ("cuts", "stages", "said"),
    [
        (["layer.2"], None, "no module 'layer.2'; did you mean 'layers.2'"),
        (["layers.3", "layers.2", "layers.1"], None, "out of order"),
        (["layers.2", "layers.2", "layers.3"], None, "named twice"),
        ([], None, "0 cuts make 1 stages, and the axis has 2 ranks"),
        (["layers.1", "layers.2"], None, "2 cuts make 3 stages, and the axis has 2 ranks"),
        ("layers.2", None, "give a list of names"),
        (2, None, "cuts=2; give a list of names"),
        (["layers.2"], {"norms": 1}, "stages names 'norms'"),
        (["layers.2"], {"norm": 2}, "there are stages 0 to 1"),
        (["layers.2"], {3: 1}, "stages names 3"),
        (["layers.2"], (), "stages=() is no Mapping"),
        (["layers.0"], {"embedding": 1, "positions": 1}, "stage 0 of 2 would hold no parameter"),
    ],
)
def test_wrong_cuts_are_refused_before_anything_is_changed(ranks, cuts, stages, said):
    texts = ranks(2, _cut, cuts, stages)
    assert texts[0] == texts[1]
    assert said in texts[0]


def _other_verbs():
    mesh = rank_mesh((2, 1), ("pp", "dp"))
    model = Decoder()
    texts = [_text(parallelize_pipeline, model, mesh, ["layers.2"])]
    texts.append(_text(Pipeline, model, loss_sum, micro_batches=2))
    parallelize_pipeline(model, mesh["pp"], ["layers.2"])
    texts.append(_text(parallelize_pipeline, model, mesh["pp"], ["layers.2"]))
    texts.append(_text(parallelize_tensor, model, mesh["dp"], {"head": "colwise"}))
    texts.append(_text(model, torch.zeros(2, 4, dtype=torch.long)))
    texts.append(_text(Pipeline, model, loss_sum, micro_batches=2, schedule="2f2b"))
    texts.append(_text(Pipeline, model, loss_sum, micro_batches=2, schedule="interleaved"))
    texts.append(_text(Pipeline, model, loss_sum, micro_batches=1))
    texts.append(_text(Pipeline, model, loss_sum, micro_batches=0))
    sharded = Decoder()
    parallelize_fsdp(sharded, mesh["dp"])
    texts.append(_text(parallelize_pipeline, sharded, mesh["pp"], ["layers.2"]))
    return texts


def test_verbs_in_another_order_say_which_comes_first(ranks):
    said = [
        "takes one axis, got ('pp', 'dp')",
        "cut it with parallelize_pipeline",
        "is cut into stages already; cut it once",
        "apply it before parallelize_pipeline",
        "run the model with Pipeline(model, ...).step(...)",
        "schedule='2f2b'; there are 'gpipe', '1f1b'",
        "schedule='interleaved'; there are",
        "schedule '1f1b' needs as many micro-batches as stages, 2",
        "micro_batches=0 is no number of parts",
        "cut the model into stages before parallelize_fsdp",
    ]
    for texts in ranks(2, _other_verbs):
        for text, words in zip(texts, said, strict=True):
            assert words in text


class Hands(nn.Module):
    """A part that returns what the argument says."""

    def __init__(self, what):
        super().__init__()
        self.first, self.second = Block(), Block()
        self.what = what
        self.pick = Pick(what)

    def forward(self, x):
        return self.second(
            self.pick(self.first(x)).value if self.what == "object" else self.pick(self.first(x))
        )


class Box:
    def __init__(self, value):
        self.value = value


class Pick(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x):
        return Box(x * self.weight) if self.what == "object" else x * self.weight


class Registered(nn.Module):
    """The last part is registered first."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Late(Registered):
    """What is called first is registered last."""

    def __init__(self):
        super().__init__()
        self.first = nn.LayerNorm(HIDDEN)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def _steps(model, cuts, rows=4, micro=2, stages=None, **given):
    mesh = rank_mesh((2,), ("pp",))
    parallelize_pipeline(model, mesh, cuts, stages=stages)
    pipeline = Pipeline(model, lambda out, _: out.float().sum(), micro_batches=micro)
    before = [p.detach().clone() for p in model.parameters()]
    text = _text(pipeline.step, torch.ones(rows, 3, HIDDEN), **given)
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, model.parameters(), strict=True))
    return text


def _border(what):
    if what == "object":
        return _steps(Hands("object"), ["second"])
    if what == "registered":
        return _steps(Registered(), ["layers.1"])
    if what == "late":
        return _steps(Late(), ["layers.1"])
    if what == "rows":
        return _steps(Hands(""), ["second"], rows=5)
    return _steps(Hands(""), ["second"], target=torch.ones(3))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("object", "pick returns a Box, and what a stage hands to the next is tensors"),
        ("registered", "fix: parallelize_pipeline(..., stages={'norm': 1})"),
        (
            "late",
            "after first\n  fix: parallelize_pipeline(..., stages={'layers.0': 1}), or {'first': 0} where",
        ),
        ("rows", "2 micro-batches do not divide a batch of 5 rows; choose micro_batches from 1, 5"),
        ("target", "a tensor of shape (3,) beside a batch of 4 rows"),
    ],
)
def test_what_no_border_carries_is_said_on_every_rank(ranks, what, said):
    texts = ranks(2, _border, what)
    assert texts[0] == texts[1]
    assert said in texts[0]


STRATEGIES = {
    "replicate": parallelize_replicate,
    "fsdp": lambda m, mesh: (
        parallelize_fsdp(m, mesh) if mesh.ndim == 1 else parallelize_hsdp(m, mesh, shard_dim="dp")
    ),
    "context": parallelize_context,
    "tensor": lambda m, mesh: parallelize_tensor(m, mesh, {"linear": "colwise"}),
}


def _over_the_stages(name):
    """A strategy on ranks that hold other layers, of the model and of one layer, after the cut and before."""
    mesh, place = rank_mesh((2, 1), ("pp", "dp")), STRATEGIES[name]
    texts = []
    for given in (mesh["pp"], mesh) if name in {"replicate", "fsdp"} else (mesh["pp"],):
        model = Decoder()
        parallelize_pipeline(model, mesh["pp"], ["layers.2"])
        before = [p.detach().clone() for p in model.parameters()]
        layer = model.layers[0 if mesh.get_local_rank("pp") == 0 else 2]
        texts += [_text(place, part, given) for part in ((model, layer) if name != "tensor" else (layer,))]
        assert all(map(torch.equal, before, model.parameters()))
    if name in {"replicate", "context"}:
        model = place(Decoder(), mesh["pp"])
        text = _text(parallelize_pipeline, model, mesh["pp"], ["layers.2"])
        assert "is placed on ('pp',), whose ranks would hold other stages over 'pp'" in text
    return texts


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_over_the_stages_is_refused(ranks, name):
    for texts in ranks(2, _over_the_stages, name):
        for text in texts:
            assert "hold other stages of the pipeline over 'pp'" in text


def _moved():
    mesh = rank_mesh((2,), ("pp",))
    torch.manual_seed(0)
    model, whole = Registered(), Registered()
    whole.load_state_dict(model.state_dict())
    parallelize_pipeline(model, mesh, ["layers.1"], stages={"norm": 1})
    x = torch.randn(4, 3, HIDDEN)
    loss = Pipeline(model, lambda out, _: out.square().sum(), micro_batches=2).step(x)
    return float(loss), float(whole(x).square().sum().detach())


class NormsFirst(Registered):
    """One norm for each layer, in a list that is registered first."""

    def __init__(self):
        super().__init__()
        self.norm = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in self.layers)

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norm, strict=True):
            x = norm(layer(x))
        return x


def _list_moved(stages):
    torch.manual_seed(0)
    model, whole = NormsFirst(), NormsFirst()
    whole.load_state_dict(model.state_dict())
    parallelize_pipeline(model, rank_mesh((2,), ("pp",)), ["layers.1"], stages=stages)
    x = torch.randn(4, 3, HIDDEN)
    weights = torch.arange(float(HIDDEN))
    loss = Pipeline(model, lambda out, _: (out * weights).sum(), micro_batches=2).step(x)
    norms = [name for name in model.state_dict() if name.startswith("norm") and name.endswith("weight")]
    return norms, float(loss), float((whole(x) * weights).sum().detach())


def test_the_name_of_a_list_moves_what_it_holds_and_a_longer_name_counts_more(ranks):
    for rank, (norms, have, want) in enumerate(ranks(2, _list_moved, {"norm": 1, "norm.0": 0})):
        assert norms == [f"norm.{rank}.weight"]
        assert have == pytest.approx(want, rel=1e-4)


def test_a_part_that_is_registered_too_early_runs_in_the_stage_that_it_is_given(ranks):
    for have, want in ranks(2, _moved):
        assert have == pytest.approx(want, rel=1e-6)


def _recorded():
    model = hugging_face("mixtral", output_router_logits=True)
    parallelize_pipeline(model, rank_mesh((2,), ("pp",)), ["model.layers.2"])
    return _text(Pipeline, model, loss_sum, micro_batches=2)


def test_a_model_that_collects_from_all_its_layers_is_refused(ranks):
    for text in ranks(2, _recorded):
        assert "output_router_logits, which a model collects from all its layers" in text


NO_COUNTS = (torch.tensor([1, 2]), math.nan, math.inf, True, "4", [3], {})
NO_DIMS = ((), 0, "tokens", {"tokens": "a"}, {"tokens": True}, {"tokens": []})


def _bad_steps():
    """One rank only has no number, or no dims: both are told."""
    model = Decoder()
    mesh = rank_mesh((2,), ("pp",))
    parallelize_pipeline(model, mesh, ["layers.2"])
    pipeline = Pipeline(model, loss_sum, micro_batches=2)
    tokens, is_first = torch.zeros(2, 4, dtype=torch.long), mesh.get_local_rank() == 0
    counts = [_text(pipeline.step, tokens, count=no if is_first else torch.tensor(1)) for no in NO_COUNTS]
    dims = [_text(pipeline.step, tokens=tokens, batch_dims=no if is_first else None) for no in NO_DIMS]
    return counts, dims


def test_a_count_that_is_no_number_and_dims_that_are_none_are_told_to_all_ranks(ranks):
    for counts, dims in ranks(2, _bad_steps, timeout=30):
        assert all("is no number: how many tokens" in text for text in counts)
        assert all("is no Mapping" in text or "is no dim" in text for text in dims)


def _mean_with_a_count():
    model = parallelize_pipeline(Registered(), rank_mesh((2,), ("pp",)), ["layers.1"], stages={"norm": 1})
    x = torch.ones(4, 3, HIDDEN)
    return _text(Pipeline(model, nn.MSELoss(), micro_batches=2).step, x, target=x, count=12)


def test_a_mean_is_not_divided_by_a_count(ranks):
    """Gradients had been as many times too small as there are elements in a micro-batch."""
    assert all("fix: MSELoss(reduction='sum')" in text for text in ranks(2, _mean_with_a_count))


def _no_pipelines():
    model = parallelize_pipeline(Decoder(), rank_mesh((2,), ("pp",)), ["layers.2"])
    texts = [_text(Pipeline, None, loss_sum, micro_batches=2)]
    texts += [_text(Pipeline, model, loss, micro_batches=2) for loss in (3, "mean", {})]
    return texts + [_text(Pipeline, model, micro_batches=2, schedule=name) for name in ("", 0, [])]


def test_what_is_no_module_no_loss_and_no_schedule_is_said_before_a_step(ranks):
    said = ["takes a module, got NoneType"] + ["is no function of the output"] * 3 + ["there are 'gpipe'"] * 3
    for texts in ranks(2, _no_pipelines):
        assert all(words in text for text, words in zip(texts, said, strict=True))


def _taken_apart(way):
    mesh = rank_mesh((2, 1), ("pp", "dp"))
    model = Decoder()
    parallelize_pipeline(model, mesh["pp"], ["layers.1", "layers.2", "layers.3"])
    if way == "fsdp":
        parallelize_fsdp(model, mesh["dp"])
    else:
        next(model.parameters()).register_post_accumulate_grad_hook(lambda _: None)
    return _text(Pipeline, model, loss_sum, micro_batches=4, schedule="interleaved_zero_bubble")


@pytest.mark.parametrize("way", ["fsdp", "a hook"])
def test_a_backward_is_not_taken_apart_where_it_must_be_whole(ranks, way):
    for text in ranks(2, _taken_apart, way):
        assert "takes a backward apart" in text


@pytest.mark.parametrize("release", [(2, 11), (2, 12)])
def test_a_backward_is_not_taken_apart_by_older_releases_of_torch(monkeypatch, release):
    monkeypatch.setattr(schedules, "RELEASE", release)
    said = _text(schedules.check_schedule, "interleaved_zero_bubble", 4, 2, 4)
    assert "asks for torch 2.13 or later" in said
    assert schedules.check_schedule("interleaved_1f1b", 4, 2, 4) == "interleaved_1f1b"


def _other_cuts(what):
    rank = torch.distributed.get_rank()
    model = Decoder(tied=False)
    if what == "model" and rank:
        model.positions = nn.Parameter(torch.ones(9, 16))
    cuts = ["layers.2"] if rank == 0 or what != "cuts" else ["layers.1"]
    stages = {"norm": rank} if what == "stages" else None
    before = [id(m) for m in model.modules()]
    text = _text(parallelize_pipeline, model, rank_mesh((2,), ("pp",)), cuts, stages=stages)
    assert [id(m) for m in model.modules()] == before
    return text


@pytest.mark.parametrize(
    ("what", "one", "two"),
    [
        ("cuts", "{cuts: ['layers.2'], stages: None}", "{cuts: ['layers.1'], stages: None}"),
        ("stages", "{cuts: ['layers.2'], stages: {norm: 0}}", "{cuts: ['layers.2'], stages: {norm: 1}}"),
        ("model", "  positions: float32 (12, 16)", "  positions: float32 (9, 16)"),
    ],
)
def test_ranks_that_cut_in_other_ways_are_refused(ranks, what, one, two):
    """A layer had been on two ranks, and another on none."""
    first, second = ranks(2, _other_cuts, what)
    assert first == second
    assert first.startswith("parallelize_pipeline: the ranks differ in ")
    assert one in first.splitlines()[1]
    assert two in first.splitlines()[2]


def _other_settings(name):
    rank = torch.distributed.get_rank()
    model = parallelize_pipeline(Decoder(tied=True), rank_mesh((2,), ("pp",)), ["layers.2"])
    settings = {"schedule": "gpipe", "micro_batches": 2}
    settings[name] = {"schedule": ("gpipe", "1f1b"), "micro_batches": (2, 0)}[name][rank]
    return _text(Pipeline, model, loss_sum, **settings)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("schedule", "rank 0 with schedule='gpipe', rank 1 with schedule='1f1b'"),
        ("micro_batches", "rank 0 with micro_batches=2, rank 1 with micro_batches=0"),
    ],
)
def test_ranks_with_other_settings_are_refused(ranks, name, said):
    """They had waited for each other in the first step."""
    first, second = ranks(2, _other_settings, name)
    assert first == second
    assert f"pipeline: the ranks of the axis made it with different settings: {said}" in first


def _refused_on_one_stage(what):
    mesh = rank_mesh((2, 1), ("pp", "dp"))
    cuts = ["layers.1", "layers.2", "layers.3"] if what == "schedule" else ["layers.2"]
    model, is_last = parallelize_pipeline(Decoder(), mesh["pp"], cuts), mesh["pp"].get_local_rank() == 1
    if what == "loss":
        return _text(Pipeline, model, loss_sum if is_last else None, micro_batches=2)
    if what == "schedule":
        parallelize_fsdp(model.layers[3], mesh["dp"])  # does nothing where another rank has it
        return _text(Pipeline, model, loss_sum, micro_batches=4, schedule="interleaved_zero_bubble")
    if is_last:
        parallelize_replicate(model, mesh["dp"])
        return _text(parallelize_replicate, model, mesh["dp"])
    with patch.object(agreement, "_PATIENCE", 0.2):
        return _text(Pipeline, model, loss_sum, micro_batches=2)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("loss", "rank 0 with no loss, rank 1 with a loss"),
        ("schedule", "takes a backward apart"),
        ("strategy", "axis 'dp' places this parameter already"),
    ],
)
def test_what_is_refused_on_one_stage_is_told_to_those_that_wait(ranks, what, said):
    for text in ranks(2, _refused_on_one_stage, what):
        assert said in text


def _refused_and_done_right():
    mesh = rank_mesh((2, 1), ("pp", "dp"))
    model = parallelize_pipeline(Decoder(), mesh["pp"], ["layers.2"])
    if mesh["pp"].get_local_rank() == 1:
        _text(parallelize_hsdp, model, mesh["dp"])
    parallelize_fsdp(model, mesh["dp"])
    Pipeline(model, loss_sum, micro_batches=2)


def test_a_stage_that_was_refused_a_strategy_may_come_with_another(ranks):
    ranks(2, _refused_and_done_right)


def _comes_late():
    mesh = rank_mesh((2, 1), ("pp", "dp"))
    model = parallelize_pipeline(Decoder(), mesh["pp"], ["layers.2"])
    _text(parallelize_tensor, model, mesh["dp"], {"head": "colwise"})
    if mesh["pp"].get_local_rank() == 1:
        time.sleep(0.8)
    with patch.object(agreement, "_PATIENCE", 0.2):
        texts = [_text(Pipeline, model, loss_sum, micro_batches=n) for n in (2, 0)]
    Pipeline(model, loss_sum, micro_batches=2)
    return texts


def test_a_stage_that_comes_when_the_others_have_given_up_raises_as_they_did(ranks):
    """It had gone on with the next word that it found there, and waited for a message of the last call."""
    for late, none in ranks(2, _comes_late, timeout=30, fresh=True):
        assert late.startswith("Pipeline: a stage cannot go on\n  rank 1 of the axis: parallelize_tensor")
        assert none.startswith("pipeline: micro_batches=0 is no number of parts")


def _complex_loss():
    model = parallelize_pipeline(Registered(), rank_mesh((2,), ("pp",)), ["layers.1"], stages={"norm": 1})
    pipeline = Pipeline(model, lambda out, _: out.sum() * 1j, micro_batches=2)
    return [_text(run, torch.randn(4, 3, HIDDEN)) for run in (pipeline.step, pipeline.evaluate)]


def test_a_complex_loss_is_an_error_on_all_stages(ranks):
    """The last stage alone had failed, at the number that all were to hear of, and the others had waited."""
    for texts in ranks(2, _complex_loss):
        for text in texts:
            assert "the loss has to be a real scalar" in text
