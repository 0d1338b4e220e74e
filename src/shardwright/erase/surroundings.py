"""What stands around a call and decides how it runs: modes, flags, blocks."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.comm import guard
from shardwright.comm.record import recording
from shardwright.compat import function_modes_on, implicitly_replicated, modes_on, under_transforms
from shardwright.rules import registry
from shardwright.tensor.explicit_mode import is_explicit
from shardwright.tensor.random import mode as random_mode

_DEVICES = ("cpu", "cuda")


def flags() -> tuple[Any, ...]:
    """What a recording holds for, beside its arguments and what the program reaches."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *(autocast_of(device) for device in _DEVICES),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        *_attention(),
        is_explicit(),
        random_mode.is_counter(),
        registry.registry.generation,
        implicitly_replicated(),
    )


def autocast_devices() -> tuple[str, ...]:
    """Where autocast is on."""
    return tuple(device for device in _DEVICES if torch.is_autocast_enabled(device))


def autocast_of(device: str) -> Any:
    """None outside; else the dtype, and whether casts are kept."""
    if not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()


def _attention() -> tuple[bool, ...]:
    """Which kernels of attention torch may choose."""
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()


def why_unerased() -> str:
    """Why a call here is run as it is, "" where it may be replayed."""
    if torch.compiler.is_compiling():
        return "torch.compile traces it"
    if recording():
        return "sw.trace() looks at it, with the program's own lines"
    if guard.on:
        return "sw.guarded() compares what it sends, line by line"
    if under_transforms():
        return "a transform of torch.func follows it"
    if modes_on():
        return "a dispatch mode of torch looks at each operator"
    if function_modes_on():
        return "a mode changes torch's functions around the call (sw.spmd, a default device): put it inside"
    return ""
