"""A plan that cannot be applied leaves the module as it was, and says what to write."""

import warnings

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

import shardwright as sw
from shardwright.errors import ParallelError
from shardwright.parallel import parallelize_fsdp, parallelize_replicate, parallelize_tensor
from shardwright.testing.meshes import rank_mesh
from tests.models.configs import BY_NAME


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Blocks, and a head whose weight is the embedding's."""

    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(6, 4), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


CUT = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
REFUSED = {
    "a pattern of nothing": (CUT | {"block.*.up": "colwise"}, {}),
    "a pattern behind a wider one": ({"blocks.*.*": "colwise", "blocks.*.down": "rowwise"}, {}),
    "an unknown word": (CUT | {"head": "columnwise"}, {}),
    "a misspelled word": (CUT | {"head": "colwis"}, {}),
    "a misspelled plan": ("atuo", {}),
    "a word of experts": (CUT | {"blocks.*.up": "grouped_gemm"}, {}),
    "a module without parameters": ({"blocks.*": "colwise"}, {}),
    "two words for one parameter": (CUT | {"embedding": "embedding_rowwise", "head": "rowwise"}, {}),
    "a style beside a word": (CUT | {"head": ColwiseParallel()}, {}),
    "nothing": ({}, {}),
    "no plan": ("auto", {}),
    "no word": ("columnwise", {}),
    "a sequence without words": ({"head.weight": {"tp": sw.Shard(0)}}, {"sequence_parallel": True}),
    "a sequence without blocks": ({"head": "colwise"}, {"sequence_parallel": True}),
    "a placement that does not fit": (CUT | {"head.weight": {"tp": sw.Shard(2)}}, {}),
    "two placements for one parameter": ({"head.*": {"tp": sw.Shard(0)}, "emb*": {"tp": sw.Shard(1)}}, {}),
}
SAYS = {
    "a pattern behind a wider one": "the first one counts\n  fix: put 'blocks.*.down' before it",
    "a pattern of nothing": "no module or parameter is named 'block.*.up'; a star stands for one name",
    "an unknown word": "the plan says of 'head': 'columnwise' is no word of a tensor-parallel plan",
    "a misspelled word": "'colwis' is no word of a tensor-parallel plan; did you mean 'colwise'?",
    "a misspelled plan": "'atuo' is no word of a tensor-parallel plan; did you mean 'auto'?",
    "a word of experts": "'grouped_gemm' is a word of expert parallelism",
    "a module without parameters": "'blocks.*' names blocks.0, a Block without parameters of its own; name "
    "what it holds: up, down",
    "two words for one parameter": "embedding.weight and head.weight are one parameter (tied weights), and "
    "the plan says S(0) by 'embedding' and S(1) by 'head'; give both the same word",
    "a style beside a word": "styles, or words and placements, at least one and not both",
    "nothing": "at least one",
    "no plan": "Model brings no plan for 'auto'",
    "no word": "'columnwise' is no word",
    "a sequence without words": "sequence_parallel=True goes with a plan of words",
    "a sequence without blocks": "cuts no parameter inside a list of modules",
    "a placement that does not fit": "head.weight",
    "two placements for one parameter": "embedding.weight and head.weight are one parameter (tied weights)",
}


def _state(model):
    hooks = [
        (n, type(m), len(m._forward_pre_hooks), len(m._forward_hooks), sorted(vars(m)))
        for n, m in model.named_modules()
    ]
    return hooks, [(n, id(p)) for n, p in model.named_parameters(remove_duplicate=False)]


def _texts():
    found = {}
    for name, (plan, more) in REFUSED.items():
        model = Model()
        before = _state(model)
        with pytest.raises(ParallelError) as caught:
            parallelize_tensor(model, rank_mesh((2,), ("tp",)), plan, **more)
        assert _state(model) == before, name
        found[name] = str(caught.value)
    return found


def test_what_is_refused_leaves_the_module_as_it_was(ranks):
    texts = ranks(2, _texts)[0]
    assert {name: SAYS[name] for name in texts if SAYS[name] not in texts[name]} == {}, texts


def _applied_twice():
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    found = []
    for between in (lambda m: m, lambda m: parallelize_replicate(m, mesh["dp"])):
        for again in (CUT, {"head": "colwise"}):
            model = Model()
            parallelize_tensor(model, mesh["tp"], CUT)
            between(model)
            before = _state(model)
            with pytest.raises(ParallelError) as caught:
                parallelize_tensor(model, mesh["tp"], again)
            assert _state(model) == before
            found.append(str(caught.value))
    model = parallelize_fsdp(Model(), mesh["dp"])
    before = _state(model)
    with pytest.raises(ParallelError) as caught:
        parallelize_tensor(model, mesh["tp"], CUT)
    assert _state(model) == before
    return [*found, str(caught.value)]


def test_applied_twice_it_says_so(ranks):
    *twice, sharded = ranks(4, _applied_twice)[0]
    assert all("axis 'tp' places" in text and "once per parameter" in text for text in twice)
    assert "before the strategy that placed it" in sharded


def _by_parts():
    """A part by words, the rest plain; a placement beside a word; one word for one module."""
    mesh, tokens = rank_mesh((2,), ("tp",)), torch.tensor([[0, 3, 5]])
    torch.manual_seed(0)
    one, model = Model(), Model()
    model.load_state_dict(one.state_dict())
    keys = list(model.state_dict())
    parallelize_tensor(model.blocks[0], mesh, {"up": "colwise", "down.weight": {"tp": sw.Shard(1)}})
    parallelize_tensor(model.blocks[1].up, mesh, "colwise")
    assert list(model.state_dict()) == keys
    assert model.head.weight is model.embedding.weight
    one(tokens).square().sum().backward()
    with sw.spmd(mesh):
        out = model(tokens)
        out.square().sum().backward()
    for name, p in one.named_parameters():
        grad = model.get_parameter(name).grad
        torch.testing.assert_close(grad.full_tensor() if isinstance(grad, sw.DTensor) else grad, p.grad)
    assert model.blocks[0].down.weight.placements == (sw.Shard(1),)


def test_parts_are_cut_one_by_one(ranks):
    ranks(2, _by_parts)


def _told():
    """The words of gpt_oss name its head alone."""
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize_tensor(BY_NAME["gpt_oss"].build(), rank_mesh((2,), ("tp",)), "auto")
    return [str(w.message) for w in caught if "parallelize_tensor" in str(w.message)]


def test_a_plan_that_cuts_no_block_is_told(ranks):
    (text,) = ranks(2, _told, timeout=170)[0]
    assert text.startswith("parallelize_tensor: the plan that GptOssForCausalLM brings cuts nothing in its")
