"""What a word says of a parameter: its cut, between heads, one by one where matrices are fused. No ranks."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import shardwright as sw
from shardwright.errors import ParallelError
from shardwright.parallel.tensor.bring import brought_plan
from shardwright.parallel.tensor.cuts import placement_of
from shardwright.parallel.tensor.heads import Heads, heads_near
from shardwright.parallel.tensor.said import spoken
from shardwright.parallel.tensor.words import WORDS, word


class Attention(nn.Module):
    """Projections of `heads` heads of 4 that share `groups`; fused where it says so."""

    def __init__(self, heads: int, groups: int, *, fused: bool = False) -> None:
        super().__init__()
        self.head_dim = 4
        self.config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=groups, hidden_size=8)
        if fused:
            self.qkv = nn.Linear(8, 4 * (heads + 2 * groups))
        else:
            self.q, self.k = nn.Linear(8, 4 * heads), nn.Linear(8, 4 * groups)
        self.o = nn.Linear(4 * heads, 8)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(8, 2 * 12), nn.Linear(12, 8)


def _cut(module: nn.Module, plan: dict[str, str], n: int) -> dict[str, sw.Placement]:
    said = spoken(module, plan, strict=True)
    return {
        each.name: placement_of(each, module.get_submodule(each.path.rpartition(".")[0]), n)
        for each in said.parameters
    }


HALF, ROWS, COLUMNS, WHOLE = (2, 1), sw.Shard(0), sw.Shard(1), sw.Replicate()
PLAN = {"q": "colwise", "k": "colwise", "o": "rowwise"}


@pytest.mark.parametrize(
    ("heads", "groups", "n", "q", "k", "o"),
    [
        (4, 2, 2, ROWS, ROWS, COLUMNS),
        (6, 3, 2, sw.Ragged(HALF), sw.Ragged(HALF), sw.Ragged(HALF, (1,))),
        (4, 2, 4, ROWS, WHOLE, COLUMNS),  # fewer groups than ranks: queries are cut between heads
        (6, 2, 4, sw.Ragged((2, 2, 1, 1)), WHOLE, sw.Ragged((2, 2, 1, 1), (1,))),
        (3, 3, 4, ROWS, ROWS, COLUMNS),  # fewer heads than ranks: no rank is left without a part
    ],
)
def test_projections_are_cut_between_heads(heads, groups, n, q, k, o):
    found = _cut(Attention(heads, groups), PLAN, n)
    assert (found["q.weight"], found["k.weight"], found["o.weight"]) == (q, k, o)
    assert (found["q.bias"], found["k.bias"], found["o.bias"]) == (q, k, WHOLE)


@pytest.mark.parametrize(
    ("heads", "groups", "n", "placement", "after"),
    [
        (4, 4, 2, sw.Interleaved(0, 3), COLUMNS),
        (4, 2, 2, sw.Fused(0, (2, 1, 1)), COLUMNS),
        (6, 3, 2, sw.Fused(0, (2, 1, 1), HALF), sw.Ragged(HALF, (1,))),
        (4, 2, 4, sw.Fused(0, (2, 1, 1)), COLUMNS),
    ],
)
def test_fused_queries_keys_and_values_are_cut_one_by_one(heads, groups, n, placement, after):
    plan = {"qkv": "colwise_gather_output", "o": "rowwise_split_input"}
    found = _cut(Attention(heads, groups, fused=True), plan, n)
    assert (found["qkv.weight"], found["qkv.bias"], found["o.weight"]) == (placement, placement, after)


def test_a_fused_gate_is_cut_beside_what_it_multiplies():
    found = _cut(Gated(), {"gate_up": "colwise_gather_output", "down": "rowwise_split_input"}, 2)
    assert found["gate_up.weight"] == found["gate_up.bias"] == sw.Interleaved(0, 2)
    assert found["down.weight"] == COLUMNS


def test_heads_are_read_from_the_attention_or_its_config():
    assert heads_near(Attention(4, 2)) == Heads(4, 2, 4)
    assert heads_near(nn.Linear(2, 2)) is None
    strange = nn.Module()
    strange.num_heads, strange.config = 3, SimpleNamespace(num_key_value_heads=2, hidden_size=12)
    assert heads_near(strange) == Heads(3, 3, 4)


class Table(nn.Module):
    """One of each kind of owner."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.turned, self.window = nn.Embedding(6, 4), Conv1D(6, 4), nn.Conv2d(4, 6, 3)
        self.experts = nn.Module()
        for name, shape in {"up": (2, 6, 4), "up_bias": (2, 6), "scale": ()}.items():
            setattr(self.experts, name, nn.Parameter(torch.zeros(shape)))


@pytest.mark.parametrize(
    ("plan", "name", "placement"),
    [
        ({"table": "embedding_rowwise"}, "table.weight", ROWS),
        ({"table": "rowwise"}, "table.weight", ROWS),
        ({"table": "embedding_colwise"}, "table.weight", COLUMNS),
        ({"table": "colwise"}, "table.weight", COLUMNS),
        ({"turned": "colwise"}, "turned.weight", COLUMNS),
        ({"turned": "rowwise"}, "turned.weight", ROWS),
        ({"turned": "rowwise"}, "turned.bias", WHOLE),
        ({"window": "colwise"}, "window.weight", ROWS),
        ({"window": "rowwise"}, "window.weight", COLUMNS),
        ({"experts": "packed_colwise"}, "experts.up", sw.Interleaved(1, 2)),
        ({"experts": "packed_colwise"}, "experts.up_bias", sw.Interleaved(1, 2)),
        ({"experts": "rowwise"}, "experts.up", sw.Shard(2)),
        ({"experts": "rowwise"}, "experts.up_bias", WHOLE),
        ({"experts": "colwise"}, "experts.scale", WHOLE),
        ({"experts.up": "packed_rowwise", "experts": "replicate"}, "experts.up", sw.Interleaved(2, 2)),
        ({"experts": "replicate", "experts.up": "rowwise"}, "experts.up", sw.Shard(2)),
    ],
)
def test_each_kind_of_module_has_its_outputs_and_inputs(plan, name, placement):
    assert _cut(Table(), plan, 2)[name] == placement


def test_every_word_of_transformers_is_known_or_sent_elsewhere():
    from transformers.distributed import expert_parallel  # it adds its words when it is imported
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    assert expert_parallel
    refused = {name for name in ALL_PARALLEL_STYLES if name not in WORDS}
    assert refused == {"grouped_gemm", "ep_dispatch_experts"}
    for name in refused:
        with pytest.raises(ParallelError, match=r"word of expert parallelism.*'packed_colwise'"):
            word(name)


def test_a_plan_is_found_in_models_inside_a_module():
    inner = nn.Module()
    inner._tp_plan = {"layers.*.q": "colwise"}
    outer = nn.ModuleDict({"model": inner})
    assert brought_plan(outer) == {"model.layers.*.q": "colwise"}


def test_a_module_without_a_plan_is_told_what_to_write():
    with pytest.raises(ParallelError) as caught:
        brought_plan(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
    assert str(caught.value) == (
        "parallelize_tensor: Sequential brings no plan for 'auto' (transformers has none for this "
        "architecture). Write one, a word per matrix: {'0': ..., '1.*': ...} with 'colwise' for what enters "
        "heads or a wide space (query, key, value, up, gate), 'rowwise' for what leaves it, "
        "'embedding_rowwise' for the embedding, 'colwise_gather_output' for a head or for matrices "
        "fused in one"
    )
