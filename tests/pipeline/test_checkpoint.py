"""What a pipeline saves, any other split and no pipeline load; optimizer included."""

import pytest
import torch
from torch import nn

from shardwright.checkpoint import load, read_manifest, save
from shardwright.grads import GradientSynchronizer
from shardwright.parallel import Pipeline, parallelize_pipeline
from shardwright.testing import rank_mesh
from shardwright.testing.rank_device import here
from tests.pipeline.models import arguments, batch, loss_sum, make
from tests.pipeline.ranks import Case, place, whole


def _trained(case, steps, folder=None, resume=None):
    """Parameters after some steps, whole, of those that this rank holds; saved, or gone on from."""
    mesh, model = place(case)
    if resume is not None:
        model.to("meta").to_empty(device=here())  # all that it is comes from the checkpoint
    pipeline = Pipeline(model, loss_sum, micro_batches=case.micro)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    if resume is not None:
        assert load(resume, model=model, optimizer=optimizer).step == 2
    synchronizer = GradientSynchronizer(model) if len(case.how) > 1 else None
    for step in steps:
        tokens, mask, labels = batch(4, seed=step)
        if "dp" in case.axes:
            tokens, mask, labels = (x.chunk(2)[mesh["dp"].get_local_rank()] for x in (tokens, mask, labels))
        pipeline.step(**arguments(case.name, tokens, mask, labels), target=labels)
        if synchronizer:
            synchronizer.synchronize()
        optimizer.step()
        optimizer.zero_grad()
    if folder is not None:
        save(folder, model=model, optimizer=optimizer, step=len(steps))
    return {n: whole(p.detach()) for n, p in model.named_parameters(remove_duplicate=False)}


def _alone(name, steps, resume=None):
    """The same steps on one device."""
    model = make(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    if resume is not None:
        load(resume, model=model, optimizer=optimizer)
    for step in steps:
        tokens, mask, labels = batch(4, seed=step)
        loss_sum(model(**arguments(name, tokens, mask, labels)), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)}


def _assert_same(results, want):
    assert set().union(*results) == set(want)
    for held in results:
        for name, value in held.items():
            torch.testing.assert_close(value, want[name], atol=2e-5, rtol=1e-4)


OTHERS = [Case("", {"pp": 2}, stages=4, micro=2), Case("", {"pp": 2, "dp": 2}, ("pipeline", "fsdp"), micro=2)]


@pytest.mark.parametrize("name", ["decoder", "tied"])
@pytest.mark.parametrize("other", OTHERS, ids=["four stages", "fsdp"])
def test_another_split_goes_on_from_a_checkpoint(ranks, tmp_path, name, other):
    first = Case(name, {"pp": 2}, micro=2)
    ranks(2, _trained, first, [0, 1], tmp_path / "a")
    then = Case(name, other.axes, other.how, other.stages, other.micro)
    results = ranks(then.world, _trained, then, [2, 3], None, tmp_path / "a")
    _assert_same(results, _alone(name, [0, 1, 2, 3]))


@pytest.mark.parametrize("name", ["decoder", "tied"])
def test_one_device_goes_on_from_a_pipeline_and_back(ranks, tmp_path, name):
    case = Case(name, {"pp": 2, "dp": 2}, ("pipeline", "fsdp"), micro=2)
    ranks(4, _trained, case, [0, 1], tmp_path / "a")
    (alone,) = ranks(1, _alone, name, [2, 3], tmp_path / "a")
    want = _alone(name, [0, 1, 2, 3])
    _assert_same([alone], want)


def _saved_alone(name, folder):
    model = make(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    for step in (0, 1):
        tokens, mask, labels = batch(4, seed=step)
        loss_sum(model(**arguments(name, tokens, mask, labels)), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    save(folder, model=model, optimizer=optimizer, step=2)


@pytest.mark.parametrize("name", ["decoder", "tied"])
def test_a_pipeline_goes_on_from_one_device(ranks, tmp_path, name):
    ranks(1, _saved_alone, name, tmp_path / "a")
    case = Case(name, {"pp": 2}, micro=2)
    _assert_same(ranks(2, _trained, case, [2, 3], None, tmp_path / "a"), _alone(name, [0, 1, 2, 3]))


class Read(nn.Module):
    """Layers behind an embedding, and the way back to words by its weight."""

    def __init__(self, embed):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.embed = nn.Linear(8, 20, bias=False)
        self.embed.weight = embed.weight

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.embed(x)


class Alike(nn.Module):
    """One weight with two names, of which one ends as the other."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(20, 8)
        self.decoder = Read(self.embed)

    def forward(self, tokens):
        return self.decoder(self.embed(tokens))


def _kept_alike(folder, seed, cut):
    model = Alike(seed)
    if cut:
        parallelize_pipeline(model, rank_mesh((2,), ("pp",)), [cut])
    if seed == 0:
        save(folder, model)
    else:
        load(folder, model)
    wanted = Alike(0).state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    return sorted(read_manifest(folder).ties)


def test_a_tied_weight_may_be_called_as_another_name_ends(ranks, tmp_path):
    """A false tie was saved, with which nothing could load the checkpoint."""
    ties = ranks(2, _kept_alike, tmp_path / "c", 0, "decoder.layers.2")
    assert ties == [["model/decoder.embed.weight"]] * 2
    for cut in ("decoder.layers.2", "decoder.layers.1", None):
        ranks(2, _kept_alike, tmp_path / "c", 3, cut)
