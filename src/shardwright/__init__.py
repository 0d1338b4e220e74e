"""Shardwright: distributed tensors with open placements, and the parallelism strategies built on them.

The public names are loaded on first use, so that the command line answers without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    from shardwright.comm import guarded, use_network
    from shardwright.erased import erase
    from shardwright.layout import Layout, from_partition_spec, layout_of, to_partition_spec
    from shardwright.placement import (
        BlockCyclic,
        Box,
        Fused,
        Interleaved,
        Owner,
        Partial,
        Partition,
        Pending,
        Placement,
        Ragged,
        Region,
        Replicate,
        Shard,
        ZigZag,
    )
    from shardwright.plan import Network, Packing, Plan, pack_blocks, plan_redistribution
    from shardwright.rules import register_algorithm, register_rule, rule, rules_of
    from shardwright.show import explain, trace, visualize
    from shardwright.tensor import (
        DTensor,
        distribute_module,
        distribute_tensor,
        empty,
        explicit,
        full,
        local_map,
        ones,
        rand,
        randn,
        random_mode,
        redistribute_many,
        spmd,
        zeros,
    )

__version__ = "0.1.0"

_HOME = {
    "torch.distributed.device_mesh": ("DeviceMesh", "init_device_mesh"),
    "shardwright.comm": ("guarded", "use_network"),
    "shardwright.erased": ("erase",),
    "shardwright.show": ("explain", "trace", "visualize"),
    "shardwright.layout": ("Layout", "from_partition_spec", "layout_of", "to_partition_spec"),
    "shardwright.placement": (
        "BlockCyclic",
        "Box",
        "Fused",
        "Interleaved",
        "Owner",
        "Partial",
        "Partition",
        "Pending",
        "Placement",
        "Ragged",
        "Region",
        "Replicate",
        "Shard",
        "ZigZag",
    ),
    "shardwright.plan": ("Network", "Packing", "Plan", "pack_blocks", "plan_redistribution"),
    "shardwright.rules": ("register_algorithm", "register_rule", "rule", "rules_of"),
    "shardwright.tensor": (
        "DTensor",
        "distribute_module",
        "distribute_tensor",
        "empty",
        "explicit",
        "full",
        "local_map",
        "ones",
        "rand",
        "randn",
        "random_mode",
        "redistribute_many",
        "spmd",
        "zeros",
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "BlockCyclic",
    "Box",
    "DTensor",
    "DeviceMesh",
    "Fused",
    "Interleaved",
    "Layout",
    "Network",
    "Owner",
    "Packing",
    "Partial",
    "Partition",
    "Pending",
    "Placement",
    "Plan",
    "Ragged",
    "Region",
    "Replicate",
    "Shard",
    "ZigZag",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "erase",
    "explain",
    "explicit",
    "from_partition_spec",
    "full",
    "guarded",
    "init_device_mesh",
    "layout_of",
    "local_map",
    "ones",
    "pack_blocks",
    "plan_redistribution",
    "rand",
    "randn",
    "random_mode",
    "redistribute_many",
    "register_algorithm",
    "register_rule",
    "rule",
    "rules_of",
    "spmd",
    "to_partition_spec",
    "trace",
    "use_network",
    "visualize",
    "zeros",
]


# Public packages beside this one: `sw.checkpoint.save` needs no import of its own.
_PACKAGES = ("checkpoint", "context", "grads", "moe", "parallel", "testing")


def __getattr__(name: str) -> Any:
    """Load a public name, or a public package, from its home on first use."""
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES])
