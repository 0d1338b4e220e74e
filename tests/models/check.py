"""One architecture in one sharding beside one device: outputs, loss, every gradient, generated tokens."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import shardwright as sw
from shardwright.parallel import parallelize_fsdp
from shardwright.testing.meshes import rank_mesh

from .configs import BY_NAME, Architecture, batch_of
from .tensor_plan import tensor_plan

DATA, TENSOR, FSDP, CUT = "data", "tensor", "fsdp", "cut parameters"
SHARDINGS = (DATA, TENSOR, FSDP)
MORE_SHARDINGS = (CUT,)
TOLERANCE = 1e-4  # of the largest element
ROWS = 3  # uneven over two ranks
NEW_TOKENS = 5


def check(name: str, sharding: str) -> list[str]:
    """What differs from one device, as lines; nothing if all is right.

    Each rank computes the reference itself, with plain torch on the whole batch.
    """
    warnings.simplefilter("ignore")
    architecture = BY_NAME[name]
    plain, batch = architecture.build(), batch_of(architecture, ROWS)
    wanted = results(plain, batch, sharding)
    mesh = rank_mesh((dist.get_world_size(),), ("tp" if sharding == TENSOR else "dp",))
    model = place(architecture.build(), sharding, mesh)
    found = _sharded(model, batch, sharding, mesh)
    differing = list(compare(found, wanted))
    if architecture.generates and sharding in {TENSOR, FSDP}:
        differing += _generated(architecture, plain, model, sharding, mesh)
    return differing


def place(model: nn.Module, sharding: str, mesh: DeviceMesh) -> nn.Module:
    """The model in one of the shardings."""
    match sharding:
        case "tensor":
            return sw.distribute_module(model, mesh, tensor_plan(model))
        case "fsdp":
            for block in _blocks(model):
                parallelize_fsdp(block, mesh)
            return parallelize_fsdp(model, mesh)
        case "cut parameters":
            plan = {n: (sw.Shard(0),) if p.ndim else (sw.Replicate(),) for n, p in model.named_parameters()}
            return sw.distribute_module(model, mesh, plan)
        case _:
            return sw.distribute_module(model, mesh, {})


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The layers, as users of `fully_shard` choose them: what the module lists of the model hold."""
    outer = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    inner = {id(x) for m in outer for child in m for x in child.modules() if isinstance(x, nn.ModuleList)}
    return [
        child for m in outer if id(m) not in inner for child in m if any(True for _ in child.parameters())
    ]


def _sharded(
    model: nn.Module, batch: dict[str, torch.Tensor], sharding: str, mesh: DeviceMesh
) -> dict[str, torch.Tensor | None]:
    """What the ranks find together, as plain tensors of the whole batch."""
    if sharding == FSDP:
        mine = {name: _rows_of_rank(value) for name, value in batch.items()}
        return {name: _joined(name, value) for name, value in results(model, mine, sharding).items()}
    cut = sw.Replicate() if sharding == TENSOR else sw.Shard(0)
    placed = {name: sw.distribute_tensor(value, mesh, (cut,)) for name, value in batch.items()}
    with sw.spmd(mesh):
        found = results(model, placed, sharding)
    return {name: _full(value) for name, value in found.items()}


def _rows_of_rank(value: torch.Tensor) -> torch.Tensor:
    return value.tensor_split(dist.get_world_size())[dist.get_rank()]


def _joined(name: str, value: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient is whole by its placements; a loss is a term of the sum, an output has this rank's rows."""
    if value is None or isinstance(value, DTensor):
        return _full(value)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value)
    return torch.stack(parts).sum(0) if name == "loss" else torch.cat(parts)


def _full(value: torch.Tensor | None) -> torch.Tensor | None:
    return value.full_tensor() if isinstance(value, DTensor) else value


def results(
    model: nn.Module, batch: dict[str, torch.Tensor], sharding: str
) -> dict[str, torch.Tensor | None]:
    """The outputs, the loss and, after its backward, every gradient."""
    out = model(**batch)
    # Under FSDP each rank has its own rows: a sum over them adds up, a mean over their labels does not.
    own = None if sharding == FSDP else getattr(out, "loss", None)
    loss = _sum_of_outputs(out) if own is None else own
    loss.backward()
    found: dict[str, torch.Tensor | None] = {"loss": loss.detach()}
    for name in out:
        if name not in _NOT_COMPARED and not (sharding == FSDP and name in _OF_ALL_ROWS):
            found |= {f"{name}.{i}": x.detach() for i, x in enumerate(_tensors(out[name]))}
    return found | {f"gradient of {name}": p.grad for name, p in model.named_parameters()}


_NOT_COMPARED = {"loss", "past_key_values", "text_model_output", "vision_model_output"}
_OF_ALL_ROWS = {"logits_per_image", "logits_per_text"}  # mix the rows of a batch


def _tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]


def _sum_of_outputs(out: Any) -> torch.Tensor:
    """A weighted sum that tells rows' elements apart and adds up over rows."""
    names = ["logits"] if "logits" in out else ["image_embeds", "text_embeds"]
    total = torch.zeros(())
    for name in names:
        value = out[name]
        weights = torch.arange(value[0].numel()).reshape(value.shape[1:]).cos()
        total = total + (value * weights).sin().sum()
    return total


def compare(
    found: dict[str, torch.Tensor | None],
    wanted: dict[str, torch.Tensor | None],
    tolerance: float = TOLERANCE,
) -> Iterator[str]:
    """A line per value that is not one device's, within `tolerance` of its largest element.

    The bias of keys has a gradient of zero but for rounding, which is that of the terms that cancel out.
    """
    gradients = [_largest(v) for n, v in wanted.items() if v is not None and "gradient" in n]
    noise = _ROUNDING * max(gradients, default=0.0)
    for name, value in wanted.items():
        got = found.get(name)
        if value is None or got is None:
            if value is not got:
                yield f"{name}: {_said(got)} where one device has {_said(value)}"
            continue
        if got.shape != value.shape or got.dtype != value.dtype:
            yield f"{name}: {_said(got)} where one device has {_said(value)}"
            continue
        off = (got.double() - value.double()).abs().max().item() if value.numel() else 0.0
        largest = _largest(value)
        if not off <= tolerance * largest + noise:
            yield f"{name}: off by {off:.1e}, the largest element is {largest:.1e}"


_ROUNDING = 1e-7  # of the largest gradient of the model


def _largest(value: torch.Tensor) -> float:
    return value.double().abs().max().item() if value.numel() else 0.0


def _said(value: torch.Tensor | None) -> str:
    return "nothing" if value is None else f"{value.dtype} {tuple(value.shape)}"


def _generated(
    architecture: Architecture, plain: nn.Module, model: nn.Module, sharding: str, mesh: DeviceMesh
) -> list[str]:
    """Whether greedy generation with a cache gives one device's tokens."""
    batch = batch_of(architecture, ROWS)
    batch.pop("labels")
    wanted = generate(plain, batch)
    if sharding == FSDP:
        found = _joined("tokens", generate(model, {n: _rows_of_rank(v) for n, v in batch.items()}))
    else:
        placed = {n: sw.distribute_tensor(v, mesh, (sw.Replicate(),)) for n, v in batch.items()}
        with sw.spmd(mesh):
            found = _full(generate(model, placed))
    assert found is not None
    return [] if torch.equal(found, wanted) else [f"generated {found.tolist()}, one device {wanted.tolist()}"]


def generate(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Greedy tokens; as many on every rank, since ranks that compute a model together stop together."""
    model.eval()
    tokens: torch.Tensor = model.generate(
        **batch, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, use_cache=True
    )
    return tokens
