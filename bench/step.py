"""A training step of a decoder and of a Llama, unmodified, tensor parallel, beside torch's styles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright as sw
from bench.decoder import WIDTH, decoder
from bench.turns import Found, Step, in_turns, told
from shardwright.testing import RankPool, rank_mesh

_TOKENS, _ROWS = 128, 8
_COLUMNS = ("q", "k", "v", "gate", "up")
_PLACES = dict.fromkeys(("q", "k", "v", "o"), "attention") | dict.fromkeys(("gate", "up", "down"), "mlp")
_LLAMA_PLACES = {f"self_attn.{name}_proj": ColwiseParallel for name in "qkv"} | {
    "self_attn.o_proj": RowwiseParallel,
    "mlp.gate_proj": ColwiseParallel,
    "mlp.up_proj": ColwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}


def run() -> int:
    """Print what was found; 1 if losses differ, or there are more collectives than with torch's styles."""
    console = Console(highlight=False, soft_wrap=True)
    bad = 0
    with RankPool() as pool:
        for name, measure in (("decoder", measure_decoder), ("Llama", measure_llama)):
            for ranks in (2, 4):
                found = pool.run(ranks, measure, timeout=600)
                mine, other = found[0].counts
                bad |= not told(console, f"{name}, {ranks} ranks", found) or mine > other
    return int(bad)


def measure_decoder() -> Found:
    """Our step beside torch's, of a decoder of this repository."""
    torch.set_num_threads(1)
    mesh = rank_mesh((dist.get_world_size(),), ("tp",))
    x = torch.randn(_ROWS, _TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    ours = _placed(decoder(), mesh, _COLUMNS, ("o", "down"))
    theirs = _in_styles(decoder(), mesh)
    return in_turns(
        *(_step(_squares(m, x), m, on) for m, on in ((ours, mesh), (theirs, None), (decoder(), None)))
    )


def measure_llama() -> Found:
    """Our step beside torch's, of a Llama as `transformers` has it, on tokens."""
    torch.set_num_threads(1)
    mesh = rank_mesh((dist.get_world_size(),), ("tp",))
    tokens = torch.randint(0, 512, (_ROWS, _TOKENS), generator=torch.Generator().manual_seed(1))
    columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    ours = _placed(_llama(), mesh, columns, ("o_proj", "down_proj"))
    theirs = _llama()
    for layer in theirs.model.layers:
        parallelize_module(layer, mesh, {place: style() for place, style in _LLAMA_PLACES.items()})
    return in_turns(
        *(_step(_next_tokens(m, tokens), m, on) for m, on in ((ours, mesh), (theirs, None), (_llama(), None)))
    )


def _placed(model: nn.Module, mesh: DeviceMesh, columns: Sequence[str], rows: Sequence[str]) -> nn.Module:
    """Weights by name, and nothing else said."""
    places = {f"*.{name}.weight": {"tp": sw.Shard(0)} for name in columns}
    return sw.distribute_module(
        model, mesh, places | {f"*.{name}.weight": {"tp": sw.Shard(1)} for name in rows}
    )


def _squares(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    return lambda: model(x).square().mean()


def _next_tokens(model: nn.Module, tokens: Tensor) -> Callable[[], Tensor]:
    return lambda: model(input_ids=tokens, labels=tokens, use_cache=False).loss


def _step(loss_of: Callable[[], Tensor], model: nn.Module, mesh: DeviceMesh | None) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        with nullcontext() if mesh is None else sw.spmd(mesh):
            loss = loss_of()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _in_styles(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {f"{_PLACES[name]}.{name}": ColwiseParallel() for name in _COLUMNS}
    plan |= {f"{_PLACES[name]}.{name}": RowwiseParallel() for name in ("o", "down")}
    for block in list(model.children())[:-1]:
        parallelize_module(block, mesh, plan)
    return model


def _llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
        )
    )
