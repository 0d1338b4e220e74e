"""From a folder of `transformers` onto a mesh, a step of training, and back: what one device gives."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwright as sw
from shardwright.checkpoint import load_hf, rename, save_hf, stack, transpose
from shardwright.grads import GradientSynchronizer
from shardwright.moe import MoELayer
from shardwright.parallel import parallelize_expert_parallel, parallelize_fsdp, parallelize_tensor
from shardwright.testing import rank_mesh
from tests.checkpoint.test_hugging_face import MAPS, families
from tests.tiers import only

Ranks = Callable[..., list[Any]]
ROWS, COLUMNS = {"tp": sw.Shard(0)}, {"tp": sw.Shard(1)}
PLANS: dict[str, Any] = {  # for models that bring no words
    "gpt2": {
        "*.attn.c_attn.weight": {"tp": sw.Interleaved(1, 3)},
        "*.attn.c_attn.bias": {"tp": sw.Interleaved(0, 3)},
        "*.attn.c_proj.weight": ROWS,
        "*.mlp.c_fc.weight": COLUMNS,
        "*.mlp.c_fc.bias": ROWS,
        "*.mlp.c_proj.weight": ROWS,
        "*.wte.weight": ROWS,
    },
    "t5": {
        **dict.fromkeys(("*.q.weight", "*.k.weight", "*.v.weight", "*.wi.weight"), ROWS),
        **dict.fromkeys(("*.o.weight", "*.wo.weight", "*.relative_attention_bias.weight"), COLUMNS),
        "shared.weight": ROWS,
    },
}
WORLDS = {"fsdp": 2, "tensor": 2, "tensor, fsdp": 4, "experts": 2, "experts, fsdp": 4}
IN_EXPERTS = (
    rename(r"(.*\.mlp)\.router\.weight", r"\1.gate.weight"),
    stack(r"(.*\.experts)\.(gate|up|down)\.weight", r"\1.{index}.\2_proj.weight"),
    transpose(r".*\.experts\.\d+\.\w+_proj\.weight"),
)


def rows_of() -> torch.Tensor:
    return torch.arange(28).reshape(4, 7) * 5 % 59


def loss_sum(model: nn.Module, rows: torch.Tensor, family: str) -> torch.Tensor:
    """Summed over the tokens of these rows, of which each is told from those before it."""
    if family == "t5":
        logits = model(input_ids=rows, decoder_input_ids=rows).logits
    else:
        logits = model(input_ids=rows, use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")


def place(model: nn.Module, how: str, family: str) -> tuple[int, int, Any]:
    """Place it; of how many data ranks this is which, and the mesh that tensors are cut over."""
    if how == "fsdp":
        mesh = rank_mesh((2,), ("dp",))
        parallelize_fsdp(model, mesh)
        return 2, mesh.get_local_rank(), None
    if how.startswith("experts"):
        sizes = (1, 2) if how == "experts" else (2, 2)
        mesh = rank_mesh(sizes, ("ep_replicate", "ep_shard"))
        parallelize_expert_parallel(model, mesh)
        dense = rank_mesh((sizes[0] * sizes[1],), ("dp",))
        parallelize_fsdp(model, dense)
        return dense.size(), dense.get_local_rank(), None
    sizes = (1, 2) if how == "tensor" else (2, 2)
    mesh = rank_mesh(sizes, ("dp", "tp"))
    parallelize_tensor(model, mesh["tp"], PLANS.get(family, "auto"))
    if sizes[0] > 1:
        parallelize_fsdp(model, mesh["dp"])
    return sizes[0], mesh.get_local_rank("dp"), mesh["tp"]


def with_our_experts(model: nn.Module, config: Any) -> None:
    """The blocks of experts as this library computes them, tokens being exchanged."""
    for layer in model.model.layers:
        layer.mlp = MoELayer(
            config.hidden_size,
            config.moe_intermediate_size,
            config.num_experts,
            config.num_experts_per_tok,
            normalize=config.norm_topk_prob,
        )


def train(folder: Path, family: str, how: str) -> None:
    warnings.simplefilter("ignore")
    kind, config = families()[family]
    buffers = dict(kind.from_pretrained(folder / "in").named_buffers())
    with torch.device("meta"):
        model = kind(config)
        if how.startswith("experts"):
            with_our_experts(model, config)
    maps = IN_EXPERTS if how.startswith("experts") else MAPS.get(family, ())
    count, mine, mesh = place(model, how, family)
    load_hf(model, folder / "in", maps=maps, buffers=buffers)
    rows = rows_of()
    scene = contextlib.nullcontext() if mesh is None else sw.spmd(mesh)
    with scene:
        loss = loss_sum(model.eval(), rows.chunk(count)[mine], family) / rows[:, 1:].numel()
        loss.backward()
    GradientSynchronizer(model).synchronize()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    save_hf(model, folder / "out", maps=maps, max_shard_size=30_000)


CASES = [(family, how) for family in ("llama", "gpt2", "qwen3 moe", "t5") for how in WORLDS]
CASES = [(family, how) for family, how in CASES if not how.startswith("experts") or family == "qwen3 moe"]


@pytest.mark.parametrize(
    ("family", "how"), only([("llama", "tensor, fsdp"), ("qwen3 moe", "experts")], CASES)
)
def test_a_step_on_any_mesh_is_the_step_of_one_device(
    ranks: Ranks, tmp_path: Path, family: str, how: str
) -> None:
    """The reference is `transformers` on one device; what comes back is read by `from_pretrained`."""
    warnings.simplefilter("ignore")
    kind, config = families()[family]
    torch.manual_seed(0)
    model = kind(config).eval()
    model.save_pretrained(tmp_path / "in", max_shard_size="30KB")
    start = copy.deepcopy(model)
    rows = rows_of()
    (loss_sum(model, rows, family) / rows[:, 1:].numel()).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    ranks(WORLDS[how], train, tmp_path, family, how, timeout=170)
    config.save_pretrained(tmp_path / "out")
    again = kind.from_pretrained(tmp_path / "out").eval()
    more = {"decoder_input_ids": rows} if family == "t5" else {}
    with torch.no_grad():
        wanted, found, before = (one(input_ids=rows, **more).logits for one in (model, again, start))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert (before - wanted).abs().max() > 100 * (found - wanted).abs().max()
