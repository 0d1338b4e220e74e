"""What a step of a model that is cut by words sends and keeps, counted by torch's own profiler."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright as sw
from shardwright.parallel import parallelize_tensor
from shardwright.testing.meshes import rank_mesh
from tests.witness.witness import Witness, compare

ROWS, TOKENS, WIDTH = 2, 24, 48
_SIZES = {
    "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


class Counted(NamedTuple):
    """Of one rank and one step.

    Args:
        activations: bytes sent by forward and backward, beside the loss.
        gradients: bytes sent to finish gradients for the optimizer.
        norms: elements that the first norm of each block is handed, here.
    """

    activations: int
    gradients: int
    norms: tuple[int, ...]
    collectives: int


def step(sequence: bool, vocabulary: int) -> Counted:
    """One step of a Llama, tensor-parallel over all ranks."""
    warnings.simplefilter("ignore")
    mesh = rank_mesh((dist.get_world_size(),), ("tp",))
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **_SIZES))
    parallelize_tensor(model, mesh, "auto", sequence_parallel=sequence)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tokens = torch.randint(3, 96, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    seen = _norms(model)

    def compute() -> None:
        with sw.spmd(mesh, check=False):
            hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
            model.lm_head(hidden).square().sum().backward()

    compute()  # what the first step finds out about shapes is not counted
    optimizer.zero_grad()
    seen.clear()
    sent, calls = _witnessed(compute)
    finished, _ = _witnessed(optimizer.step)
    return Counted(sent, finished, tuple(seen), calls)


def _norms(model: nn.Module) -> list[int]:
    seen: list[int] = []
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_pre_hook(lambda _, args: seen.append(_local(args[0])))
    return seen


def _local(x: Any) -> int:
    """Elements on this rank; `to_local` would hand the memory out, of which nothing is kept then."""
    return int(x._local_tensor.numel() if isinstance(x, DTensor) else x.numel())


def _witnessed(function: Callable[[], object]) -> tuple[int, int]:
    """Bytes that leave this rank, and calls, by the profiler; the record must agree."""
    with Witness() as witness, sw.trace() as trace:
        function()
    lines = compare(witness.asked, trace.collectives, [rank_mesh((dist.get_world_size(),), ("tp",))])
    assert all(line.agrees for line in lines), lines
    return sum(line.witnessed_bytes for line in lines), sum(line.witnessed for line in lines)


def loss_of_cut_vocabulary(vocab: int, rows: int) -> tuple[int, int, bool]:
    """Bytes that a loss of cut logits sends, forward and backward; those of the logits; is all right?"""
    mesh = rank_mesh((dist.get_world_size(),), ("tp",))
    make = torch.Generator().manual_seed(vocab)
    full, labels = torch.randn(rows, vocab, generator=make), torch.randint(vocab, (rows,), generator=make)
    labels[::3] = -100
    plain = full.clone().requires_grad_()
    wanted = functional.cross_entropy(plain, labels)
    wanted.backward()
    logits = sw.distribute_tensor(full, mesh, [sw.Shard(1)]).requires_grad_()
    found: list[torch.Tensor] = []

    def compute() -> None:
        with sw.spmd(mesh, check=False):
            loss = functional.cross_entropy(logits, labels)
            loss.backward()
            found.append(loss.detach())

    sent, _ = _witnessed(compute)
    assert isinstance(logits.grad, DTensor)
    right = torch.allclose(found[0].full_tensor(), wanted) and logits.grad.placements == (sw.Shard(1),)
    right = right and torch.allclose(logits.grad.full_tensor(), plain.grad, atol=1e-6)
    return sent, full.nbytes, right
