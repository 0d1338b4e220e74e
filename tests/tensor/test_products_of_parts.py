"""A product of rows that are being gathered begins with those that are there."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import linear
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright as sw
from shardwright.comm import mailbox
from shardwright.grads import GradientSynchronizer
from shardwright.parallel import parallelize_fsdp, parallelize_tensor
from shardwright.show import trace
from shardwright.tensor import products_of_parts
from shardwright.testing import rank_mesh

R, S0, S1 = sw.Replicate(), sw.Shard(0), sw.Shard(1)


class _Products:
    """What was multiplied in parts, by shape; `then` is called after each."""

    def __init__(self, then=lambda: None):
        self.shapes, self.then = [], then

    def __enter__(self):
        self.original = products_of_parts._multiply
        products_of_parts._multiply = self._multiply
        return self

    def __exit__(self, *_):
        products_of_parts._multiply = self.original

    def _multiply(self, x, *others):
        self.original(x, *others)
        self.shapes.append(tuple(x.shape))
        self.then()


def _of_any_size(mesh):
    """Also parts of a few bytes are multiplied one by one."""
    sw.use_network(sw.Network(one_round_bytes=0))
    return mesh


def _operands(shape, bias):
    made = torch.Generator().manual_seed(1)
    shapes = [shape, (8, shape[-1]), *([(8,)] if bias else [])]
    return [torch.randn(each, generator=made) for each in shapes]


def _beside_one_device(mesh, shape, source, cut, *, bias):
    """Values, gradients and the layout are those of a gather that is waited for."""
    plain = _operands(shape, bias)
    one = [x.clone().requires_grad_() for x in plain]
    wanted = linear(*one)
    wanted.square().sum().backward()
    whole = [sw.Replicate() if p in (S0, S1) and axis in cut else p for axis, p in source.items()]
    weights = {axis: S0 if axis in cut else R for axis in source}
    placed = [sw.distribute_tensor(plain[0], mesh, list(source.values()))]
    placed += [sw.distribute_tensor(x, mesh, list(weights.values())) for x in plain[1:]]
    placed = [x.requires_grad_() for x in placed]
    with _Products() as products:
        out = linear(placed[0].redistribute(mesh, whole, async_op=True), *placed[1:])
    waited = linear(placed[0].redistribute(mesh, whole), *placed[1:])
    assert sw.layout_of(out) == sw.layout_of(waited)
    torch.testing.assert_close(out.full_tensor(), wanted)
    out.square().sum().backward()
    for x, y in zip(placed, one, strict=True):
        torch.testing.assert_close(x.grad.full_tensor(), y.grad)
    return products.shapes


def _of_one_axis():
    mesh = _of_any_size(rank_mesh((dist.get_world_size(),), ("tp",)))
    n = mesh.size()
    for shape, dim in (((3, 8, 6), S1), ((1, 8, 6), S1), ((8, 6), S0), ((4, 4, 6), S0), ((2, 7, 6), S1)):
        for bias in (False, True):
            seen = _beside_one_device(mesh, shape, {"tp": dim}, ("tp",), bias=bias)
            assert len(seen) == n, (shape, seen)
    seen = _beside_one_device(mesh, (3, 16, 6), {"tp": sw.ZigZag(1)}, (), bias=True)
    assert not seen  # nothing is gathered


def _in_one_batch():
    """As NCCL posts them: all messages together, which are waited for together, once."""
    original, mailbox._posts_singly = mailbox._posts_singly, lambda _: False
    try:
        _of_one_axis()
    finally:
        mailbox._posts_singly = original


def test_messages_that_are_posted_as_one_batch_are_waited_for_once(ranks):
    ranks(2, _in_one_batch)


@pytest.mark.parametrize("world", [2, 4])
def test_values_and_gradients_are_those_of_one_device(ranks, world):
    ranks(world, _of_one_axis)


def _of_two_axes():
    mesh = _of_any_size(rank_mesh((2, 2), ("dp", "tp")))
    assert len(_beside_one_device(mesh, (4, 6, 6), {"dp": S0, "tp": S1}, ("tp",), bias=True)) == 2
    # rows that two axes cut, of which one stays
    assert len(_beside_one_device(mesh, (2, 8, 6), {"dp": S1, "tp": S1}, ("tp",), bias=False)) == 2
    # each of the four has some
    assert len(_beside_one_device(mesh, (2, 8, 6), {"dp": S1, "tp": S1}, ("dp", "tp"), bias=False)) == 4


def test_beside_another_axis_and_over_two(ranks):
    ranks(4, _of_two_axes)


def _begins_before_others_have_sent():
    """Rank 1 sends once rank 0 has multiplied its own rows: who waits for all rows first waits for ever."""
    mesh = _of_any_size(rank_mesh((2,), ("tp",)))
    store = dist.distributed_c10d._get_default_store()
    x, weight = (sw.distribute_tensor(each, mesh, [S0]) for each in _operands((8, 6), False))
    if dist.get_rank() == 1:
        store.wait(["multiplied by 0"], timedelta(seconds=60))
    with _Products(lambda: store.set(f"multiplied by {dist.get_rank()}", "")) as products:
        out = linear(x.redistribute([R], async_op=True), weight)
    assert products.shapes == [(4, 6), (4, 6)]
    torch.testing.assert_close(out.full_tensor(), linear(*_operands((8, 6), False)))


def test_its_own_rows_are_multiplied_before_others_arrive(ranks):
    ranks(2, _begins_before_others_have_sent)


def _elsewhere():
    """Where calls are followed, cast or refused, the rows are waited for."""
    mesh = _of_any_size(rank_mesh((2,), ("tp",)))
    plain = _operands((8, 6), False)
    x, weight = (sw.distribute_tensor(each, mesh, [S0]) for each in plain)
    rows = sw.distribute_tensor(torch.ones(8, 3), mesh, [S0])
    with _Products() as products:
        with torch.autocast("cpu", torch.bfloat16):
            assert linear(x.redistribute([R], async_op=True), weight).dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            linear(rows.redistribute([R], async_op=True), weight)
        crossed = sw.distribute_tensor(plain[1], mesh, [S1])  # a product in terms
        torch.testing.assert_close(
            linear(x.redistribute([R], async_op=True), crossed).full_tensor(), linear(*plain)
        )
        torch.testing.assert_close((x.redistribute([R], async_op=True) + 1).full_tensor(), plain[0] + 1)
    sw.use_network(sw.Network())
    with _Products() as small:
        linear(x.redistribute([R], async_op=True), weight)
    assert not products.shapes
    assert not small.shapes


def test_elsewhere_the_rows_are_waited_for(ranks):
    ranks(2, _elsewhere)


def _model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _trained(model, ids, mesh):
    with sw.spmd(mesh), trace() as seen, _Products() as products:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return (
        loss.full_tensor(),
        gradients,
        sum(c.bytes_sent for c in seen.collectives if c.axis == "tp"),
        products.shapes,
    )


def _on_slow_links(length):
    mesh = rank_mesh((2,), ("tp",))
    ids = torch.randint(64, (2, length), generator=torch.Generator().manual_seed(2))
    one = _model()
    wanted = one(input_ids=ids, labels=ids).loss
    wanted.backward()
    sent = []
    for network in (sw.Network(one_round_bytes=64), sw.Network(("tp",), 64), sw.Network(("tp",))):
        sw.use_network(network)
        model = parallelize_tensor(_model(), mesh, "auto", sequence_parallel=True)
        loss, gradients, bytes_sent, shapes = _trained(model, ids, mesh)
        torch.testing.assert_close(loss, wanted)
        for name, p in one.named_parameters():
            torch.testing.assert_close(gradients[name], p.grad, msg=name)
        # the first product of each of 4 parts of blocks, and the head's
        is_stated = bool(network.slow_axes) and network.one_round_bytes is not None
        assert len(shapes) == (10 if is_stated else 0), shapes
        sent.append(bytes_sent)
    sw.use_network(sw.Network())
    assert sent[0] == sent[1], sent


@pytest.mark.parametrize("length", [16, 15])
def test_a_model_by_words_does_so_where_the_links_are_said_to_be_slow(ranks, length):
    ranks(2, _on_slow_links, length)


def _sharded():
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    sw.use_network(sw.Network(("tp",), 64))
    ids = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(2))
    one = _model()
    one(input_ids=ids, labels=ids).loss.backward()
    model = parallelize_tensor(_model(), mesh["tp"], "auto", sequence_parallel=True)
    for unit in (*model.model.layers, model):
        parallelize_fsdp(unit, mesh["dp"])
    mine = ids.chunk(2)[mesh.get_local_rank("dp")]
    with sw.spmd(mesh["tp"]), _Products() as products:
        (model(input_ids=mine, labels=mine).loss / 2).backward()
    GradientSynchronizer(model.parameters()).synchronize()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), one.get_parameter(name).grad, msg=name)
    sw.use_network(sw.Network())
    return len(products.shapes)


def test_beside_sharded_units(ranks):
    assert ranks(4, _sharded) == [10] * 4
