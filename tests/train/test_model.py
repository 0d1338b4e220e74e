"""The decoder and its reference are one function, and a batch without sequences is a batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from shardwright.train.config import TrainConfig
from shardwright.train.model import Decoder, ModelShape, count_parameters, init_weights, rotary_tables
from shardwright.train.optim import make_optimizer, schedule, set_learning_rate
from shardwright.train.reference import ReferenceMoE
from shardwright.train.routes import Routes
from shardwright.train.routing import largest_gap, routing_differences
from shardwright.train.sample import write_text

SHAPE = ModelShape(layers=2, hidden=16, heads=2, seq_len=12, experts=4, top_k=2, expert_hidden=8)


def decoder(seed: int = 0, **changes) -> Decoder:
    model = Decoder(SHAPE, **changes)
    init_weights(model, seed)
    return model


def tokens(rows: int) -> torch.Tensor:
    return torch.arange(rows * 12).remainder(251).view(rows, 12)


def test_the_default_model_has_the_size_that_was_asked_for():
    shape = ModelShape.of(TrainConfig.parse())
    assert count_parameters(Decoder(shape)) >= 1_500_000
    assert (shape.layers, shape.experts, shape.top_k, shape.seq_len) == (3, 8, 2, 128)


def test_the_reference_has_the_same_names_weights_and_outputs():
    ours, plain = decoder(), decoder(make=ReferenceMoE)
    assert {n: p.shape for n, p in ours.named_parameters()} == {
        n: p.shape for n, p in plain.named_parameters()
    }
    torch.testing.assert_close(ours(tokens(3)), plain(tokens(3)), rtol=1e-5, atol=1e-5)
    for model in (ours, plain):
        model(tokens(3)).square().sum().backward()
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad - q.grad).abs().max() <= 1e-5 * q.grad.abs().max(), name


def test_a_batch_without_sequences_gives_zero_gradients_everywhere():
    model = decoder()
    logits = model(tokens(3)[:0])
    assert logits.shape == (0, 12, 256)
    functional.cross_entropy(logits.flatten(0, 1), tokens(0).flatten(), reduction="sum").backward()
    assert all(torch.count_nonzero(p.grad) == 0 for p in model.parameters())


def test_no_position_sees_a_later_one():
    model, text = decoder(), tokens(1)
    changed = text.clone()
    changed[0, 7] = 9
    torch.testing.assert_close(model(text)[:, :7], model(changed)[:, :7], rtol=0, atol=1e-6)
    assert not torch.allclose(model(text)[:, 7:], model(changed)[:, 7:])


def test_attention_depends_on_distances_only():
    """Rotary positions: the score of q at i with k at j depends on i - j."""
    attention = decoder().blocks[0].attention
    x = torch.randn(1, 1, 1, 8).expand(1, 1, 12, 8)
    turned = attention.core._turn(x)
    scores = turned @ turned.transpose(-1, -2)
    torch.testing.assert_close(scores[0, 0, 3, 1], scores[0, 0, 9, 7])
    assert rotary_tables(12, 8)[0].shape == (12, 4)


def test_weights_depend_on_the_seed_only():
    same, other = decoder(0), decoder(1)
    assert all(torch.equal(p, q) for p, q in zip(decoder(0).parameters(), same.parameters(), strict=True))
    assert not torch.equal(same.head.weight, other.head.weight)


def test_the_reference_replays_what_another_run_chose():
    model = decoder(make=ReferenceMoE)
    before = model(tokens(2))
    layer = model.blocks[0].moe
    layer.replay = layer.choices
    torch.testing.assert_close(model(tokens(2)), before, rtol=0, atol=0)
    layer.replay = (layer.choices + 1) % 4
    assert not torch.allclose(model(tokens(2)), before)


def test_routing_differences_name_layer_tokens_and_gap():
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.4, 0.25, 0.25, 0.1]])
    agreed, tied = torch.tensor([[1, 0], [1, 0]]), torch.tensor([[0, 1], [0, 2]])
    assert routing_differences([scores], [agreed]) == []
    found = routing_differences([scores] * 3, [agreed, torch.tensor([[0, 2], [0, 1]]), tied])
    assert [(d.layer, d.tokens) for d in found] == [(1, 1), (2, 1)]
    assert [d.gap for d in found] == pytest.approx([0.1, 0.0])
    assert largest_gap(found) == pytest.approx(0.1)


def test_a_sample_begins_with_the_prompt_and_depends_on_the_seed():
    model = decoder()
    text = write_text(model, 20, 0)
    assert text.startswith("def ")
    assert text == write_text(model, 20, 0) != write_text(model, 20, 1)


def test_the_learning_rate_depends_on_the_step_only():
    config = TrainConfig.parse(warmup=10, steps=100, lr=1.0)
    optimizer = make_optimizer(decoder(), config)
    assert set_learning_rate(optimizer, config, 50) == optimizer.param_groups[0]["lr"]
    assert schedule(5, 10, 100) == pytest.approx(0.5, rel=0.01)
    assert schedule(100, 10, 100) == pytest.approx(0.1)
    assert all(math.isfinite(schedule(step, 0, 1)) for step in range(3))


def test_norms_are_not_decayed():
    groups = make_optimizer(decoder(), TrainConfig.parse()).param_groups
    assert {(p.dim() > 1, g["weight_decay"] > 0) for g in groups for p in g["params"]} == {
        (True, True),
        (False, False),
    }


def test_routes_are_those_of_a_step_and_not_of_what_ran_before_it():
    """A pipeline learns its borders on zeros: these had counted in the loads of a first step."""
    model = decoder()
    routes = Routes(model, 2)
    heard = []
    for number in (0, 0, 7, 9):
        model(torch.full((1, 3), number))
        heard.append(routes.choices()[1][-3:])
    assert torch.equal(routes.choices()[1], torch.cat(heard[2:]))
    counts = torch.cat(heard[2:]).flatten().bincount(minlength=4)
    assert routes.counts(2, 4, torch.device("cpu"))[1].tolist() == counts.tolist()
    routes.begin()
    assert routes.choices() == {}


def test_a_model_that_has_diverged_writes_what_it_can():
    model = decoder()
    model.requires_grad_(False).embedding.weight.fill_(math.nan)
    assert write_text(model, 5, 0).startswith("def  [no further: the outputs of the model are not finite")
