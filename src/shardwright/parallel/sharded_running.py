"""What a sharded unit hears of while its modules run and are loaded, and what it refuses then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import tree_leaves
from shardwright.compat.fully_shard.units import begin_at_the_root, is_around, replaced_parameters
from shardwright.errors import ParallelError
from shardwright.layout.of_tensor import layout_of
from shardwright.layout.strided import same_regions
from shardwright.tensor.modules.slots import slots_of


def told(x: torch.Tensor) -> object:
    """How it lies, to be printed."""
    return layout_of(x) if isinstance(x, TorchDTensor) else f"a plain tensor of shape {tuple(x.shape)}"


def unit_of(parameter: nn.Parameter) -> str:
    """The axis over which a unit has cut it; empty for any other."""
    return getattr(parameter, "_fully_sharded", "")


def follow_unit(part: nn.Module, *, alone: bool) -> None:
    """Hear when one module of a unit is called and loaded; `alone`: it may become the root."""
    for hook in (_begin, _refuse_replaced):
        part.register_forward_pre_hook(hook, prepend=True)  # before torch's own
    part.register_load_state_dict_pre_hook(_refuse_assigned)
    if alone:
        part.register_forward_hook(_reshard_without_backward)
    for inner in part.modules():
        if inner is not part and isinstance(inner, FSDPModule):
            is_around(part, inner)


def _refuse_replaced(module: nn.Module, _args: Any) -> None:
    """Raise ParallelError for tensors in the places of parameters: torch gathers its own over them."""
    replaced = [] if torch.compiler.is_compiling() else replaced_parameters(module)
    if replaced:
        raise ParallelError(
            f"{replaced[0]}: another tensor, or none, stands in the place of a parameter that fully_shard "
            "gathers, which would compute with its own\n"
            "  fix: parametrize, prune and remove before sharding; under torch.func.functional_call use "
            "parallelize_replicate; to set values, write into the parameters (load_state_dict without "
            "assign=True)"
        )


def refuse_lost(module: nn.Module, name: str) -> None:
    """Raise ParallelError for what was written into a gathered parameter."""
    raise ParallelError(
        f"{name}: the forward of {type(module).__name__} wrote into what fully_shard had gathered of it, "
        "which is lost with the copy\n  fix: write after the step, into the sharded parameter (`with "
        "torch.no_grad(): module.weight.clamp_(-1, 1)`), or use parallelize_replicate"
    )


def refuse_hidden(module: nn.Module, result: object) -> None:
    """Raise ParallelError for results in which nobody finds a tensor."""
    kind = type(result).__name__
    raise ParallelError(
        f"the forward of {type(module).__name__} returned a {kind}, in which fully_shard finds no tensor "
        "with a graph: its backward would gather nothing, and leave no gradient\n  fix: return tensors in "
        f"lists, tuples, dicts or dataclasses, or torch.utils._pytree.register_pytree_node({kind}, ...)"
    )


def refuse_graph(module: nn.Module) -> None:
    """Raise ParallelError for a backward with `create_graph=True` (a gradient penalty)."""
    raise ParallelError(
        f"a backward with create_graph=True goes through {type(module).__qualname__}, a sharded unit: a "
        "second one would read parameters that it has given back, and nobody would sum what it leaves\n"
        "  fix: parallelize_replicate for this module; or freeze it, and set_reshard_after_backward(False)"
    )


def _begin(module: nn.Module, _args: Any) -> None:
    if not torch.compiler.is_compiling():
        begin_at_the_root(module)


def _refuse_assigned(
    module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_rest: Any
) -> None:
    """Raise ParallelError for what `load_state_dict(assign=True)` would gather as if it lay as before."""
    if not metadata.get("assign_to_params_buffers"):
        return
    for slot in slots_of(module):
        given, mine = state.get(f"{prefix}{slot.path}"), slot.get()
        if unit_of(mine) and isinstance(given, torch.Tensor) and not _lies_as(given, mine):
            raise ParallelError(
                f"{prefix}{slot.path}: load_state_dict(assign=True) would put {told(given)} in the place of "
                f"a sharded parameter, {told(mine)}; nothing was loaded\n  fix: sw.distribute_tensor(it, "
                "parameter.device_mesh, parameter.placements), or load before parallelize_fsdp"
            )


def _lies_as(given: torch.Tensor, parameter: nn.Parameter) -> bool:
    return isinstance(given, TorchDTensor) and same_regions(layout_of(given), layout_of(parameter))


def _reshard_without_backward(module: nn.Module, _args: Any, out: Any) -> None:
    """torch leaves a root gathered for its backward; where none can come, nobody would free the memory."""
    if isinstance(module, FSDPModule) and not _expects_backward(out):
        module.reshard()


def _expects_backward(out: Any) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in tree_leaves(out)
    )
