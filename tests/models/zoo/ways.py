"""Strategies on a tiny model beside one device: the loss, every gradient, the parameters after some steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import shardwright as sw
from shardwright.grads import GradientSynchronizer
from shardwright.parallel import (
    Pipeline,
    parallelize_context,
    parallelize_fsdp,
    parallelize_pipeline,
    parallelize_tensor,
)
from shardwright.testing.meshes import rank_mesh
from tests.models.check import compare
from tests.models.zoo.tiny import batch, brings_a_plan, build
from tests.sequence.models import Found, train, whole

STEPS = 3
NO_PLAN = "brings no plan"


def check(kind: str, way: str) -> list[str]:
    """What is not one device's, as lines; `NO_PLAN` where there is nothing to do."""
    if "tensor" in way and not brings_a_plan(build(kind)):
        return [NO_PLAN]
    found, wanted = WAYS[way](build(kind), build(kind))
    loss = {"loss": found["loss"]}, {"loss": wanted["loss"]}
    return [*compare(found, wanted), *compare(*loss, tolerance=1e-5)]


def _trained(
    plain: nn.Module, model: nn.Module, length: int, inside: Callable[[], AbstractContextManager[object]]
) -> tuple[Found, Found]:
    given = batch(length)
    wanted = train(plain, given, plain.parameters)
    with inside():
        return whole(train(model, given, model.parameters)), wanted


def _tensor(plain: nn.Module, model: nn.Module, *, sequence: bool = False) -> tuple[Found, Found]:
    mesh = rank_mesh((dist.get_world_size(),), ("tp",))
    parallelize_tensor(model, mesh["tp"], "auto", sequence_parallel=sequence)
    return _trained(plain, model, 12, lambda: sw.spmd(mesh["tp"]))


def _sequence(plain: nn.Module, model: nn.Module) -> tuple[Found, Found]:
    return _tensor(plain, model, sequence=True)


def _context(plain: nn.Module, model: nn.Module) -> tuple[Found, Found]:
    parallelize_context(model, rank_mesh((dist.get_world_size(),), ("cp",))["cp"])
    return _trained(plain, model, 13, nullcontext)


def _context_tensor(plain: nn.Module, model: nn.Module) -> tuple[Found, Found]:
    mesh = rank_mesh((2, dist.get_world_size() // 2), ("cp", "tp"))
    parallelize_tensor(model, mesh["tp"], "auto")
    parallelize_context(model, mesh["cp"])
    return _trained(plain, model, 13, lambda: sw.spmd(mesh["tp"]))


def _fsdp_tensor(plain: nn.Module, model: nn.Module) -> tuple[Found, Found]:
    """Every data rank reads all rows, and its term of the sum is a part of the loss."""
    mesh, given = rank_mesh((2, dist.get_world_size() // 2), ("dp", "tp")), batch(12)
    wanted = train(plain, given, plain.parameters)
    parallelize_tensor(model, mesh["tp"], "auto")
    for layer in _layers(model)[1]:
        parallelize_fsdp(layer, mesh["dp"])
    parallelize_fsdp(model, mesh["dp"])
    synchronizer, found = GradientSynchronizer(model), Found()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for step in range(STEPS):
        with sw.spmd(mesh["tp"]):
            loss = model(**given).loss
            (loss / 2).backward()
        synchronizer.synchronize()
        if step == 0:
            found["loss"] = loss.detach()
            found |= {
                f"gradient of {n}": None if p.grad is None else p.grad.clone()
                for n, p in model.named_parameters()
            }
        optimizer.step()
        optimizer.zero_grad()
    found |= {f"after steps: {n}": p.detach() for n, p in model.named_parameters()}
    return whole(found), {name: value for name, value in wanted.items() if name != "logits"}


def _pipeline(plain: nn.Module, model: nn.Module) -> tuple[Found, Found]:
    """Cut in the middle of the longest list of layers."""
    path, layers = _layers(model)
    parallelize_pipeline(model, rank_mesh((2,), ("pp",)), [f"{path}.{len(layers) // 2}"])
    pipeline, ids = Pipeline(model, _summed, micro_batches=2), batch(12, 4)["input_ids"]
    options = {"use_cache": False} if "use_cache" in inspect.signature(plain.forward).parameters else {}
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in (plain, model)]
    held, found, wanted = dict(model.named_parameters()), Found(), Found()
    for step in range(STEPS):
        total = torch.zeros(())
        for rows in ids.chunk(2):
            term = _summed(plain(input_ids=rows, **options), rows)
            term.backward()
            total += term.detach()
        wanted[f"loss {step}"] = total
        found[f"loss {step}"] = pipeline.step(input_ids=ids, target=ids, **options)
        if step == 0:
            for name, parameter in plain.named_parameters():
                if name in held:
                    wanted[f"gradient of {name}"] = _clone(parameter.grad)
                    found[f"gradient of {name}"] = _clone(held[name].grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for each in (found, wanted):
        each["loss"] = each[f"loss {STEPS - 1}"]
    return found, wanted


def _layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of modules that has most parameters, and where it is."""
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    return max(lists, key=lambda one: sum(p.numel() for p in one[1].parameters()))


def _summed(out: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    logits = out["logits"][:, :-1].flatten(0, 1)
    return functional.cross_entropy(logits, target[:, 1:].flatten(), reduction="sum")


def _clone(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.clone()


WAYS: dict[str, Callable[[nn.Module, nn.Module], tuple[Found, Found]]] = {
    "tensor": _tensor,
    "tensor, sequence": _sequence,
    "context": _context,
    "context, tensor": _context_tensor,
    "fsdp, tensor": _fsdp_tensor,
    "pipeline": _pipeline,
}
