"""One table: what it refuses, on every rank and with the module as it was, and what it does."""

import json

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.errors import ParallelError
from shardwright.grads import GradientSynchronizer, global_mean
from shardwright.moe import MoELayer
from shardwright.parallel import parallelize, parallelize_fsdp
from tests.parallel.randomness.models import batch, made

from .worlds import context

TENSOR = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
DP, TP = {"data_parallel_shard": 2}, {"data_parallel_shard": 2, "tensor_parallel": 2}
CP = {"data_parallel_shard": 2, "context_parallel_shard": 2}


def _state(module):
    """All that hangs on each module: hooks, registries, class."""
    return [
        (type(m), {k: dict(v) if isinstance(v, dict) else v for k, v in vars(m).items()})
        for m in module.modules()
    ]


def _same(left, right):
    for (cls, one), (other, two) in zip(left, right, strict=True):
        if cls is not other or one.keys() != two.keys():
            return False
        for key, value in one.items():
            pairs = zip(value.items(), two[key].items(), strict=False) if isinstance(value, dict) else ()
            if any(k != n or v is not w for (k, v), (n, w) in pairs):
                return False
            if isinstance(value, dict) and len(value) != len(two[key]):
                return False
    return True


def _refused(degrees, plan, model=None):
    at = context(**degrees)
    module = made() if model is None else model()
    before, values = _state(module), [p.detach().clone() for p in module.parameters()]
    with pytest.raises(ParallelError) as caught:
        parallelize(module, at, plan, report=None)
    assert _same(before, _state(module))
    assert all(map(torch.equal, values, module.parameters()))
    return str(caught.value)


def _of_experts():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), MoELayer(8, 8, 3, 1))


BAD = {
    "word": (DP, {"": "fdsp"}, "did you mean 'fsdp'"),
    "pattern": (DP, {"": "fsdp", "layer.*": "fsdp"}, "no module is named so in Model (it has embed, drop"),
    "two at once": (DP, {"": "fsdpx", "nothing": "colwisee"}, "'nothing': 'colwisee' is no word"),
    "no row": (DP, {}, "the table has no row"),
    "pattern of a parameter": (DP, {"head.weight": "fsdp"}, "a parameter is named so"),
    "no text": (DP, {3: "fsdp"}, "a pattern is a text"),
    "no value": (DP, {"": 3}, "give a word"),
    "no table": (DP, ["fsdp"], "['fsdp'] is no table: give {pattern: strategies}, a word for the model"),
    "nothing": (DP, None, "None is no table"),
    "policy": (DP, {"": {"fsdp": {"mp_policy": "bfloat16"}}}, "is no MixedPrecisionPolicy"),
    "other policy": (DP, {"": {"fsdp": {"offload_policy": "cpu"}}}, "is no OffloadPolicy"),
    "option": (DP, {"": {"fsdp": {"reshard": True}}}, "fsdp has no option 'reshard'"),
    "axis tp": (DP, {"": ["fsdp"], **TENSOR}, "tensor_parallel is 1 in this context"),
    "axis cp": (DP, {"": ["fsdp", "context"]}, "context_parallel_shard is 1 in this context"),
    "no row for tp": (TP, {"": "fsdp"}, "tensor_parallel is 2, and no row uses it"),
    "fsdp for hsdp": ({"data_parallel_replicate": 2, "data_parallel_shard": 2}, {"": "fsdp"}, "fix: 'hsdp'"),
    "fsdp beside copies": (
        {"context_parallel_replicate": 4},
        {"": ["context", "fsdp"]},
        "over ranks that share a sequence 'hsdp' replicates, and 'fsdp' cuts where they are context_",
    ),
    "fsdp over nobody": ({"data_parallel_replicate": 2}, {"": "fsdp"}, "fix: 'hsdp'"),
    "contradiction": (
        DP,
        {"": "replicate", "layers.*": "fsdp"},
        "contradict each other: both place layers.0",
    ),
    "two of one module": (DP, {"layers.*": "fsdp", "layers.0": "replicate", "": "fsdp"}, "contradict"),
    "two words": (TP, {"": "fsdp", **TENSOR, "layers.0.up": "rowwise"}, "both name layers.0.up"),
    "auto and words": (TP, {"": ["auto", "fsdp"], **TENSOR}, "'auto' is the plan that the model brings"),
    "auto of a part": (TP, {"layers": "auto", "": "fsdp"}, "said of the whole model"),
    "sequence alone": (TP, {"": ["sequence", "fsdp"]}, "add 'auto' or words"),
    "context twice": (CP, {"": ["context", "fsdp"], "layers.0": "context"}, "is inside of the model"),
    "unplaced": (DP, {"layers.*": "fsdp"}, "nothing places embed.weight, head.weight, head.bias"),
    "not over data": (TP, TENSOR, "nothing places embed.weight, layers.0.norm.weight"),
    "no experts": (DP, {"": ["expert", "fsdp"]}, "no MoELayer"),
    "no norm": (DP, {"": ["batch_norm", "fsdp"]}, "no batch norm of torch is there"),
    "container": (DP, {"layers": "fsdp", "": "fsdp"}, "a ModuleList has no forward"),
    "auto without a plan": (TP, {"": ["auto", "fsdp"]}, "brings no plan for 'auto'"),
    "no such file": (DP, "somewhere.toml", "cannot be read"),
    "yaml": (DP, __import__("pathlib").Path("plan.yaml"), "write it as .toml or .json"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_table_is_one_error_on_all_ranks_and_changes_nothing(ranks, name):
    degrees, plan, says = BAD[name]
    world = 1
    for n in degrees.values():
        world *= n
    first, *others = ranks(world, _refused, degrees, plan)
    assert all(text == first for text in others)
    assert says in first


def test_a_late_failure_changes_nothing_either(ranks):
    """The experts do not divide: found when their turn comes, after tensor parallelism was rehearsed."""
    degrees = {"data_parallel_shard": 2, "expert_parallel": 2}
    for text in ranks(2, _refused, degrees, {"": ["expert", "fsdp"]}, _of_experts):
        assert "3 experts do not divide" in text
        assert "'' = 'expert'" in text


def _on_one_rank(kind):
    at = context(**DP)
    module, plan = made(), {"": "fsdp"}
    if at.rank == 1:
        if kind == "plan":
            plan = {"": "fsdp", "layers.*": "fsdp"}
        elif kind == "word":
            plan = {"": "nothing"}
        elif kind == "model":
            module = nn.Linear(2, 2)
        elif kind == "values":
            module.head.bias.data.add_(1e-3)
        else:
            module.head.bias.requires_grad_(requires_grad=False)
    with pytest.raises(ParallelError) as caught:
        parallelize(module, at, plan, report=None)
    assert not any(isinstance(p, DTensor) for p in module.parameters())
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("plan", "ranks 0 and 1 have other tables"),
        ("word", "(on rank 1 only)"),
        ("model", "ranks 0 and 1 have other models"),
        ("values", "ranks 0 and 1 have another head.bias"),
        ("frozen", "ranks 0 and 1 have another head.bias"),
    ],
)
def test_ranks_that_do_not_mean_the_same_hear_it_together(ranks, kind, says):
    first, second = ranks(2, _on_one_rank, kind)
    assert first == second
    assert says in first


def _twice():
    at = context(**DP)
    plan = {"": "fsdp", "layers.*": "fsdp"}
    module = parallelize(made(), at, plan, report=None)
    before = _state(module)
    with pytest.raises(ParallelError) as caught:
        parallelize(module, at, plan, report=None)
    assert _same(before, _state(module))
    module(batch(2)).backward()  # it trains as before
    return str(caught.value)


def test_applied_twice_it_says_so(ranks):
    for text in ranks(2, _twice):
        assert "places this module already" in text


def _again():
    """A module that was put back, by a table or by an error half-way, may be sharded afterwards."""
    at = context(**DP)
    module = made()
    for bad in ({"layers.*": "fsdp"}, {"": ["fsdp", "expert"]}):
        with pytest.raises(ParallelError):
            parallelize(module, at, bad, report=None)
    parallelize(module, at, {"": "fsdp", "layers.*": "fsdp"}, report=None)
    wrong = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    mesh = at.mesh_for("dense")["dp_cp_shard"]
    with pytest.raises(ParallelError):
        parallelize_fsdp(wrong, mesh)
    parallelize_fsdp(wrong.float(), mesh)
    assert module(batch(2)).isfinite()


def test_a_module_that_was_refused_can_be_placed(ranks):
    ranks(2, _again)


def _from_file(path):
    at = context(**TP)
    told = []
    module = parallelize(made(), at, path, report=told.append)
    one = made()
    tokens = batch(4)
    dp = at.mesh_for("batch")["dp"]
    torch.manual_seed(0)
    module.eval(), one.eval()
    one(tokens).div(tokens.numel()).backward()
    with sw.spmd(at.mesh_for("dense")["tp"]):
        mine = tokens[dp.get_local_rank() :: 2]
        global_mean(module(mine), mine.numel(), dp).backward()
    GradientSynchronizer(module).synchronize()
    for name, p in module.named_parameters():
        wanted = one.get_parameter(name).grad
        error = (p.grad.full_tensor() - wanted).abs().max() / wanted.abs().max()
        assert error < 1e-4, name
    held = sum(p._local_tensor.numel() * 4 for p in module.parameters())
    assert len(told) == (at.rank == 0)
    return held, (str(told[0]), told[0].shares[-1]) if told else None


@pytest.mark.parametrize("kind", ["toml", "json"])
def test_a_file_is_read_and_what_was_done_is_told(ranks, tmp_path, kind):
    plan = {"": "fsdp", "layers.*": {"fsdp": {"reshard_after_forward": False}}, **TENSOR}
    path = tmp_path / f"plan.{kind}"
    if kind == "json":
        path.write_text(json.dumps(plan))
    else:
        path.write_text(
            '"" = "fsdp"\n"layers.*.up" = "colwise"\n"layers.*.down" = "rowwise"\n'
            '["layers.*".fsdp]\nreshard_after_forward = false\n'
        )
    found = ranks(4, _from_file, str(path))
    text, share = found[0][1]
    held = [bytes_ for bytes_, _ in found]
    assert (share.least, share.most) == (min(held), max(held))
    assert share.parameters == len(list(made().parameters()))
    assert share.bytes == sum(p.numel() * 4 for p in made().parameters())
    assert "and 1 more" in text
    assert "tensor + fsdp" in text
    assert "dp_cp_shard 2" in text
    assert "sw.spmd" in text


class Logits(nn.Module):
    """Two layers between an embedding and its head, which leave the loss to the caller."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, tokens):
        return self.head(self.down(self.up(self.embed(tokens)).tanh()))


def _loss_outside(degrees, plan):
    at, told = context(**degrees), []
    torch.manual_seed(0)
    one, module = Logits(), Logits()
    module.load_state_dict(one.state_dict())
    parallelize(module, at, plan, report=told.append)
    batch_mesh, tokens = at.mesh_for("batch"), batch(3)
    loss = nn.functional.cross_entropy(one(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    with sw.spmd(batch_mesh["cp", "tp"] if "up" in plan else batch_mesh["cp"]):
        cut = nn.functional.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten())
        cut.backward()
    torch.testing.assert_close(cut.full_tensor(), loss)
    for name, p in module.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), one.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
    return told[0].notes[0] if told else None


@pytest.mark.parametrize(
    ("degrees", "plan", "axes"),
    [
        ({"context_parallel_shard": 2}, {"": "context"}, '"cp"'),
        (
            {"context_parallel_shard": 2, "tensor_parallel": 2},
            {"up": "colwise", "down": "rowwise", "": "context"},
            '"cp", "tp"',
        ),
    ],
    ids=["context", "context, tensor"],
)
def test_a_loss_outside_of_a_model_of_cut_sequences_runs_where_the_report_says(ranks, degrees, plan, axes):
    first, *_ = ranks(2 ** len(degrees), _loss_outside, degrees, plan)
    assert first == f'run a loss outside of the model inside of sw.spmd(context.mesh_for("batch")[{axes}])'


def _no_context():
    with pytest.raises(ParallelError, match="takes a context"):
        parallelize(made(), context(**DP).mesh_for("dense"), "fsdp")


def test_a_mesh_in_place_of_a_context_is_refused(ranks):
    ranks(2, _no_context)


def _alone():
    at = context()
    one, module = made(), made()
    parallelize(module, at, {**TENSOR, "": ["context", "fsdp"], "layers.*": "fsdp"}, report=None)
    one.eval(), module.eval()
    one(batch(3)).backward()
    loss = module(batch(3))
    loss.backward()
    GradientSynchronizer(module).synchronize()
    for name, p in module.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), one.get_parameter(name).grad, rtol=1e-4, atol=1e-5)


def test_on_one_rank_every_row_is_what_one_device_does(ranks):
    """A table is tried before it goes to many: no axis has two ranks, and none is missed."""
    ranks(1, _alone)
