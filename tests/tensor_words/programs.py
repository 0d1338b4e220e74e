"""Models of `transformers` as they are, cut by the words that they bring, beside one device."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.grads import GradientSynchronizer, global_mean
from shardwright.parallel import parallelize_fsdp, parallelize_replicate, parallelize_tensor
from shardwright.testing.meshes import rank_mesh
from tests.models.check import ROWS, compare
from tests.models.configs import BY_NAME, Architecture, batch_of

STEPS = 3
# Those of the table that bring a plan.
BRINGING = (
    "llama", "qwen3", "mistral", "phi3", "gemma2", "gemma3_text", "smollm3", "cohere2", "qwen3_moe",
    "mixtral", "deepseek_v3", "llama4_text", "olmoe", "gpt_neox", "qwen2", "qwen2_moe", "deepseek_v2",
    "gemma", "granite", "granitemoe", "cohere", "olmo2", "glm4", "starcoder2", "phi", "nemotron",
    "ernie4_5", "seed_oss",
)  # fmt: skip
# Heads, a vocabulary and widths that no number of ranks here divides; fewer groups of heads than ranks.
ODD = {
    "llama, odd": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 24,
                             "vocab_size": 41, "intermediate_size": 25, "attention_bias": True}),
    "phi3, odd": ("phi3", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 24,
                           "vocab_size": 43, "intermediate_size": 25}),
    "phi3, one group": ("phi3", {"num_key_value_heads": 1}),
    "gpt_neox, odd": ("gpt_neox", {"num_attention_heads": 3, "hidden_size": 12, "vocab_size": 41}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True, "vocab_size": 41}),
    "olmo2, odd": ("olmo2", {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 12}),
}  # fmt: skip


def architecture_of(name: str) -> Architecture:
    """A row of the table, or one of the odd ones."""
    if name not in ODD:
        return BY_NAME[name]
    base, sizes = ODD[name]
    return dataclasses.replace(BY_NAME[base], sizes={**BY_NAME[base].sizes, **sizes})


Fault = Callable[[nn.Module], None]


def differing(
    name: str, sizes: tuple[int, ...], data: str, *, sequence: bool, fault: Fault | None = None
) -> list[str]:
    """What differs from one device after some steps, as lines.

    Args:
        sizes: of the mesh: data ranks, if any, and tensor-parallel ones.
        data: what places the parameters over the data ranks: "", "replicate" or "fsdp".
        fault: damages the gradients before they are compared.
    """
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    mesh = rank_mesh(sizes, ("dp", "tp")[-len(sizes) :])
    batch = batch_of(architecture_of(name), ROWS + (len(sizes) > 1))
    wanted = _trained(architecture_of(name).build(), batch)
    model = parallelize_tensor(architecture_of(name).build(), mesh["tp"], "auto", sequence_parallel=sequence)
    found = _trained(_placed(model, mesh, data), batch, mesh, fault)
    return list(compare(found, wanted)) + _unlike(model, architecture_of(name).build(), mesh)


def _placed(model: nn.Module, mesh: DeviceMesh, data: str) -> nn.Module:
    if data == "replicate":
        parallelize_replicate(model, mesh["dp"])
    elif data == "fsdp":
        for block in _layers(model):
            parallelize_fsdp(block, mesh["dp"])
        parallelize_fsdp(model, mesh["dp"])
    return model


def _layers(model: nn.Module) -> list[nn.Module]:
    return list(next(m for m in model.modules() if isinstance(m, nn.ModuleList)))


def _trained(
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    mesh: DeviceMesh | None = None,
    fault: Fault | None = None,
) -> dict[str, torch.Tensor | None]:
    """Losses, the gradients of the first step, parameters after some steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-2)
    synchronizer = GradientSynchronizer(model) if mesh is not None and mesh.ndim > 1 else None
    found: dict[str, Any] = {}
    for step in range(STEPS):
        found[f"loss {step}"] = _loss(model, batch, mesh)
        if synchronizer is not None:
            synchronizer.synchronize()
        if fault is not None:
            fault(model)
        if step == 0:
            found |= {f"gradient of {n}": _copied(p.grad) for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    found |= {f"parameter {n}": p.detach() for n, p in model.named_parameters()}
    return {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in found.items()}


def _copied(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else _clone(gradient)


def _clone(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.clone()


def _loss(model: nn.Module, batch: dict[str, torch.Tensor], mesh: DeviceMesh | None) -> torch.Tensor:
    """Forward and backward; the loss of the whole batch."""
    if mesh is None:
        loss = model(**batch).loss
        loss.backward()
        return loss.detach()
    with sw.spmd(mesh["tp"]):
        loss = model(**batch).loss if mesh.ndim == 1 else _mean_over_data(model, batch, mesh)
        loss.backward()
    return loss.detach()


def _mean_over_data(model: nn.Module, batch: dict[str, torch.Tensor], mesh: DeviceMesh) -> torch.Tensor:
    """Each data rank reads its own rows: of uneven number where these do not divide."""
    mine = {n: x.tensor_split(mesh["dp"].size())[mesh["dp"].get_local_rank()] for n, x in batch.items()}
    loss = model(**mine).loss
    count = mine["labels"][:, 1:].numel()
    total = loss * count
    return global_mean(total.full_tensor() if isinstance(total, DTensor) else total, count, mesh["dp"])


def _unlike(model: nn.Module, plain: nn.Module, mesh: DeviceMesh) -> list[str]:
    """Names of the state dict are the plain model's, and something is cut."""
    names, wanted = list(model.state_dict()), list(plain.state_dict())
    found = [] if names == wanted else [f"names {set(names) ^ set(wanted)}"]
    cut = [n for n, p in model.named_parameters() if isinstance(p, DTensor) and "tp" in str(sw.layout_of(p))]
    return found if cut or mesh["tp"].size() == 1 else [*found, "nothing is cut"]
