"""`context.seed`: the same weights everywhere, masks of their own where ranks read other rows."""

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright import checkpoint
from shardwright.context import BATCH_DOMAIN, DENSE_DOMAIN
from shardwright.errors import ConfigError
from shardwright.parallel import parallelize_fsdp, parallelize_replicate
from tests.parallel.table.worlds import context

DEGREES = {"data_parallel_shard": 2, "context_parallel_shard": 2, "tensor_parallel": 2}


def _model():
    return nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))


def _drawn(shared):
    at = context(**DEGREES)
    at.seed(7, **({} if shared is None else {"shared": shared}))
    model = _model()
    weight = model[0].weight.detach().clone()
    parallelize_replicate(model, at.mesh_for(DENSE_DOMAIN)["dp_cp_shard"])
    mask = model(torch.ones(1, 64)) == 0
    batch = at.mesh_for(BATCH_DOMAIN)
    return [batch.get_local_rank(axis) for axis in ("dp", "cp", "tp")], weight.tolist(), mask.tolist()


@pytest.mark.parametrize("shared", [None, ("tp",)])
def test_weights_are_equal_and_masks_where_data_is(ranks, shared):
    found = ranks(8, _drawn, shared)
    torch.manual_seed(7)
    one = _model()
    assert all(weight == one[0].weight.tolist() for _, weight, _ in found)
    masks = {}
    for (dp, cp, _), _, mask in found:
        masks.setdefault((dp, cp) if shared else dp, []).append(mask)
    assert all(mask == same[0] for same in masks.values() for mask in same)
    assert len({str(same[0]) for same in masks.values()}) == len(masks)
    assert found[0][2] == (one(torch.ones(1, 64)) == 0).tolist()  # the first goes on as one device


def _resumed(folder):
    at = context(data_parallel_shard=2)

    def start():
        at.seed(3)
        model = _model()
        parallelize_fsdp(model, at.mesh_for(DENSE_DOMAIN)["dp_cp_shard"])
        return model

    x = torch.ones(2, 64)
    model = start()
    model(x)
    checkpoint.save(folder, model)
    wanted = [model(x) == 0 for _ in range(2)]
    again = start()
    assert checkpoint.load(folder, again).rng_restored
    got = [again(x) == 0 for _ in range(2)]
    assert all(map(torch.equal, wanted, got))
    return wanted[0].tolist()


def test_a_checkpoint_restores_the_masks_of_each_rank(ranks, tmp_path):
    first, second = ranks(2, _resumed, str(tmp_path / "at"))
    assert first != second


def _seeded_anew():
    at = context(data_parallel_shard=2)
    at.seed(3)
    model = _model()
    parallelize_replicate(model, at.mesh_for(DENSE_DOMAIN)["dp_cp_shard"])
    torch.manual_seed(40 + at.rank)
    state = torch.get_rng_state()
    model.eval()(torch.ones(2, 64))
    return torch.equal(state, torch.get_rng_state())


def test_a_generator_that_was_seeded_by_hand_is_left_alone(ranks):
    assert ranks(2, _seeded_anew) == [True, True]


def _refused():
    at = context(data_parallel_shard=2)
    found = []
    for given, kwargs in (
        (-1, {}),
        (True, {}),
        (2**63, {}),
        (1, {"dropout": "same"}),
        (1, {"shared": ("x",)}),
    ):
        before = torch.get_rng_state()
        with pytest.raises(ConfigError) as caught:
            at.seed(given, **kwargs)
        assert torch.equal(before, torch.get_rng_state())
        found.append(str(caught.value))
    return found


def test_what_is_no_seed_is_refused_and_changes_nothing(ranks):
    words = ("no seed", "no seed", "no seed", "'own' and 'logical'", "no axis 'x'")
    for found in ranks(2, _refused):
        assert all(word in text for word, text in zip(words, found, strict=True))


def _in_spmd():
    """Tensor parallel ranks draw for the whole tensor: their streams must not part."""
    at = context(tensor_parallel=2)
    at.seed(9)
    model = _model()
    tp = at.mesh_for(DENSE_DOMAIN)["tp"]
    sw.distribute_module(model, tp, {"0.weight": {"tp": sw.Shard(0)}, "0.bias": {"tp": sw.Shard(0)}})
    with sw.spmd(tp):
        return model(torch.ones(3, 64)).full_tensor().tolist()


def test_masks_of_tensor_parallel_ranks_are_those_of_one_device(ranks):
    torch.manual_seed(9)
    one = _model()
    expected = one(torch.ones(3, 64))
    for got in ranks(2, _in_spmd):
        torch.testing.assert_close(torch.tensor(got), expected)


def _drawn_after(folder, seed, saves):
    """The mask of the first forward, where the checkpoint is saved before it or loaded before it."""
    at = context(data_parallel_shard=2)
    at.seed(seed)
    model = _model()
    parallelize_fsdp(model, at.mesh_for(DENSE_DOMAIN)["dp_cp_shard"])
    if saves:
        checkpoint.save(folder, model)
    else:
        assert checkpoint.load(folder, model).rng_restored
    return (model(torch.ones(2, 64)) == 0).tolist()


def test_streams_that_had_not_parted_when_they_were_saved_part_under_any_seed(ranks, tmp_path):
    """All ranks drew the same masks where the run that loaded was seeded otherwise."""
    wanted = ranks(2, _drawn_after, str(tmp_path / "at"), 0, True)
    assert wanted[0] != wanted[1]
    assert ranks(2, _drawn_after, str(tmp_path / "at"), 7, False) == wanted
