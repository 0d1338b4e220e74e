"""Dropout by logical index: on every mesh the masks, losses and gradients of one device."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.context import BATCH_DOMAIN, REGULAR_DOMAIN
from shardwright.context.randomness import forget_waiting
from shardwright.errors import ParallelError, RuleError
from shardwright.grads import GradientSynchronizer, global_mean
from shardwright.parallel import logical_dropout, parallelize
from tests.parallel.table.worlds import context
from tests.tiers import only

from .models import batch, made
from .philox_in_numpy import Dropout, kept, words

WORLDS = {
    "replicate": ({"data_parallel_replicate": 2}, {"": "replicate"}),
    "fsdp": ({"data_parallel_shard": 2}, {"": "fsdp", "layers.*": "fsdp"}),
    "hsdp": ({"data_parallel_replicate": 2, "data_parallel_shard": 2}, {"": "hsdp", "layers.*": "hsdp"}),
    "context": ({"data_parallel_replicate": 2, "context_parallel_shard": 2}, {"": ["context", "replicate"]}),
    "context, fsdp": ({"data_parallel_shard": 2, "context_parallel_shard": 2}, {"": ["context", "fsdp"]}),
    "tensor": (
        {"data_parallel_shard": 2, "tensor_parallel": 2},
        {"layers.*.up": "colwise", "layers.*.down": "rowwise", "": "fsdp", "layers.*": "fsdp"},
    ),
    "sequence": (
        {"data_parallel_replicate": 2, "tensor_parallel": 2},
        {"layers.*.up": "colwise", "layers.*.down": "rowwise", "": ["sequence", "replicate"]},
    ),
}


def _differences(model, one):
    found = []
    for name, p in model.named_parameters():
        wanted = one.get_parameter(name).grad
        got = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        error = float((got - wanted).abs().max() / wanted.abs().max())
        if not error < 1e-4:
            found.append((name, error))
    return found


def _rows(tokens, dp):
    """Uneven parts, one after the other: the first rank has one row, the others share the rest."""
    n, at = dp.size(), dp.get_local_rank()
    parts = (1, *[1] * (n - 2), tokens.shape[0] - (n - 1))
    return tokens[sum(parts[:at]) : sum(parts[: at + 1])]


def _train(degrees, plan, recompute, planted=False):
    at = context(**degrees)
    at.seed(11, dropout="logical")
    one, model = made(dropout=Dropout), made(recompute=recompute)
    parallelize(model, at, plan, report=None)
    dp = at.mesh_for(BATCH_DOMAIN)["dp"]
    batches = [batch(9)[:4], batch(9)[4:]]  # two before one sum
    torch.manual_seed(5)
    expected = sum(one(tokens) / tokens.numel() for tokens in batches)
    expected.backward()
    torch.manual_seed(5)
    tp = "tensor_parallel" in degrees
    losses = []
    with sw.spmd(at.mesh_for(REGULAR_DOMAIN)["tp"]) if tp else nullcontext():
        for tokens in batches:
            mine = _rows(tokens, dp)
            if planted:
                mine = mine.flip(0)
            losses.append(global_mean(model(mine), mine.numel(), dp))
            losses[-1].backward()
    GradientSynchronizer(model).synchronize()
    torch.testing.assert_close(sum(losses).detach(), expected.detach(), rtol=1e-5, atol=0)
    return _differences(model, one)


# What "hsdp" and "context" draw, "fsdp" and "context, fsdp" draw as well; what "tensor" does, "sequence".
CASES = [(name, recompute) for recompute in ("saved", False, "reentrant") for name in WORLDS]
OFTEN = [(name, "saved") for name in WORLDS if name not in ("hsdp", "context", "tensor")]


@pytest.mark.parametrize(("name", "recompute"), only(OFTEN, CASES))
def test_masks_losses_and_gradients_are_those_of_one_device(ranks, name, recompute):
    degrees, plan = WORLDS[name]
    world = int(torch.tensor(list(degrees.values())).prod())
    assert ranks(world, _train, degrees, plan, recompute) == [[]] * world


def test_rows_in_another_order_than_the_batch_are_seen(ranks):
    with pytest.raises(Exception, match="not close"):
        ranks(2, _train, *WORLDS["replicate"], False, True)


def test_the_reference_gives_the_published_answers():
    """Philox4x32-10 of counter 0 and key 0 (Salmon and others)."""
    assert [hex(w) for w in words(4, 0)] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


class _Forms(nn.Module):
    def forward(self, x):
        out = [
            functional.dropout1d(x, 0.5),
            functional.dropout(x.flatten(0, 1), 0.5),
            functional.dropout(x.clone(), 0.5, inplace=True),
        ]
        q = x[:, None]
        out.append(functional.scaled_dot_product_attention(q, q, q * 0 + 1, dropout_p=0.5))
        return out


def _forms():
    at = context(data_parallel_replicate=2)
    at.seed(0, dropout="logical")
    module = logical_dropout(_Forms(), at.mesh_for(BATCH_DOMAIN)["dp"])
    me = at.rank
    x = torch.ones(5, 3, 8)
    mine = x[:2] if me == 0 else x[2:]
    torch.manual_seed(4)
    channels, merged, in_place, attention = module(mine)
    torch.manual_seed(4)
    rows = slice(0, 2) if me == 0 else slice(2, 5)
    assert torch.equal(channels, (kept((5, 3, 1), 0.5) * 2 * x)[rows])
    assert torch.equal(merged, (kept((15, 8), 0.5) * 2)[rows.start * 3 : rows.stop * 3])
    assert torch.equal(in_place, (kept((5, 3, 8), 0.5) * 2)[rows])
    weights = kept((5, 1, 3, 3), 0.5) * 2 / 3
    torch.testing.assert_close(attention, (weights @ x[:, None])[rows])


def test_every_form_of_dropout_takes_its_part_of_the_whole_mask(ranks):
    ranks(2, _forms)


class _Odd(nn.Module):
    """Dropout in places where nobody could say which rows it is about."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.part = kind, nn.Dropout(0.5)

    def forward(self, x):
        if self.kind == "sequence first":
            return self.part(x.transpose(0, 1).contiguous())
        if self.kind == "function":
            return checkpoint(lambda y: functional.dropout(y, 0.5), x, use_reentrant=False)
        return self.part(x)


def _refusals():
    at = context(data_parallel_replicate=2)
    dp = at.mesh_for(BATCH_DOMAIN)["dp"]
    x = torch.ones(2, 3, requires_grad=True)
    found = []
    for kind in ("sequence first", "function", "state", "part"):
        torch.manual_seed(at.rank if kind == "state" else 0)
        module = logical_dropout(_Odd(kind), dp)
        try:
            (module.part if kind == "part" else module)(x)
        except (RuleError, ParallelError) as error:
            found.append(str(error).splitlines()[0])
        torch.manual_seed(0)
        if kind not in ("sequence first", "function"):
            assert module(x).shape == x.shape  # an error leaves nothing open
    try:
        logical_dropout(module, dp)
    except ParallelError as error:
        found.append(str(error))
    return found


def test_what_has_no_place_in_the_batch_is_refused_and_leaves_nothing_behind(ranks):
    for found in ranks(2, _refusals):
        for text, wanted in zip(
            found,
            ("does not begin with the batch's rows", "a function that is checkpointed", "in other states",
             "belongs to no call", "apply it once"),
            strict=True,
        ):  # fmt: skip
            assert wanted in text


def _not_applied():
    at = context(data_parallel_shard=2)
    at.seed(0, dropout="logical")
    model = made()
    sw.parallel.parallelize_fsdp(model, at.mesh_for(REGULAR_DOMAIN)["dp_shard"])
    try:
        model(batch(2))
    except ParallelError as error:
        return "nothing draws the masks" in str(error)


def test_a_placed_model_that_nobody_told_is_refused_at_its_first_call(ranks):
    assert ranks(2, _not_applied) == [True] * 2


class _Attends(nn.Module):
    """Dropout of four kinds, each by its own key, one of them twice."""

    def __init__(self):
        super().__init__()
        self.drop, self.last = nn.Dropout(0.5), nn.Dropout(0.25)
        self.alpha, self.channels = nn.AlphaDropout(0.5), nn.Dropout1d(0.5)

    def forward(self, x):
        y = self.drop(x) + self.drop(x)
        y = y + self.channels(self.alpha(x))
        return self.last(y + functional.dropout(x, 0.3))


def _parts(sizes, raises):
    """The parts of three calls, the second without gradients, a rank's error between them caught on all."""
    at = context(data_parallel_shard=len(sizes))
    at.seed(0, dropout="logical")
    module = logical_dropout(_Attends(), at.mesh_for(BATCH_DOMAIN)["dp"])
    x = torch.ones(sum(sizes), 3, 4).split(sizes)[at.rank]
    torch.manual_seed(4)
    found = []
    for call in range(4):
        with torch.no_grad() if call == 1 else nullcontext():
            found.append(module(x))
        if call == raises:
            with pytest.raises(TypeError):
                module(x, "another argument")
    forget_waiting()  # a module without parameters ends no wait
    return found, torch.get_rng_state()


@pytest.mark.parametrize("sizes", [(4, 0), (0, 4), (0, 3, 1), (1, 0, 3), (0, 0)])
def test_a_rank_without_rows_keeps_its_generator_with_the_others(ranks, sizes):
    ((wanted, state),) = ranks(1, _parts, (sum(sizes),), 2)
    found = ranks(len(sizes), _parts, sizes, 2, timeout=60)
    assert all(torch.equal(each, state) for _, each in found)
    for call, whole in enumerate(wanted):
        assert torch.equal(torch.cat([parts[call] for parts, _ in found]), whole)
