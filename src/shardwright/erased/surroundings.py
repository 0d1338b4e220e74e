"""What stands around a call and decides how it runs: modes, flags, blocks."""

from __future__ import annotations

import decimal
import gc
import logging
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from shardwright.comm import guard
from shardwright.comm.record import recording
from shardwright.compat import (
    forward_names,
    function_modes_on,
    implicitly_replicated,
    in_loss_parallel,
    modes_on,
    saved_hooks_on,
    transforms_on,
)
from shardwright.compat.function_modes import default_devices
from shardwright.rules import registry
from shardwright.tensor import explicit_mode
from shardwright.tensor.random import mode as random_mode

_DEVICES = ("cpu", "cuda")
_TRANSFORM = "a transform of torch.func follows it"
_FORWARD = "derivatives are taken forward"
# Where the graph around goes through the call: an edge has a derivative backward only.
WITHOUT_EDGE = frozenset({_TRANSFORM, _FORWARD})


def _autocast() -> tuple[Any, ...]:
    """Per device None outside; else the dtype, and whether casts are kept."""
    return tuple(
        (torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled())
        if torch.is_autocast_enabled(device)
        else None
        for device in _DEVICES
    )


# What is asked at every call, by its name.
FLAGS: dict[str, Callable[[], Any]] = {
    "grad mode": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "autocast": _autocast,
    "default dtype": torch.get_default_dtype,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "deterministic, warn only": torch.is_deterministic_algorithms_warn_only_enabled,
    "precision of products": torch.get_float32_matmul_precision,
    "flash attention": torch.backends.cuda.flash_sdp_enabled,
    "memory-efficient attention": torch.backends.cuda.mem_efficient_sdp_enabled,
    "attention in steps": torch.backends.cuda.math_sdp_enabled,
    "explicit": lambda: explicit_mode.here.explicit,
    "random mode": random_mode.is_counter,
    "rules": lambda: registry.registry.generation,
    "implicit replication": implicitly_replicated,
    "loss parallel": in_loss_parallel,
    "default device": lambda: default_devices() if function_modes_on() else (),
}

# Of a thread and of the interpreter: what is not asked at each call, but may not be changed by one.
_OF_THE_INTERPRETER: dict[str, Callable[[], Any]] = {
    "number of threads": torch.get_num_threads,
    "name of the thread": lambda: threading.current_thread().name,
    "decimal context": lambda: (decimal.getcontext().prec, decimal.getcontext().rounding),
    "level of the root logger": lambda: logging.getLogger().level,
    "filters of warnings": lambda: tuple(warnings.filters),
    "recursion limit": sys.getrecursionlimit,
    "collector of garbage": gc.isenabled,
}


def standing() -> dict[str, Any]:
    """All that a call has to leave as it was, by name: a replay changes none of it."""
    return {name: ask() for name, ask in {**FLAGS, **_OF_THE_INTERPRETER}.items()}


def flags() -> tuple[Any, ...]:
    """What a recording holds for, beside its arguments and what the program reaches."""
    return tuple([ask() for ask in FLAGS.values()])


def autocast_devices() -> tuple[str, ...]:
    """Where autocast is on."""
    return tuple(device for device in _DEVICES if torch.is_autocast_enabled(device))


def why_unerased() -> str:
    """Why a call here is run as it is, "" where it may be replayed."""
    if recording():
        return "sw.trace() looks at it, with the program's own lines"
    if guard.on:
        return "sw.guarded() compares what it sends, line by line"
    if transforms_on():
        return _TRANSFORM
    if torch.is_anomaly_enabled():
        return "torch looks for anomalies in each backward"
    if forward_names["_current_level"] >= 0:
        return _FORWARD
    if saved_hooks_on():
        return "hooks look at each tensor that is saved for a backward"
    if modes_on():
        return "a dispatch mode of torch looks at each operator"
    if function_modes_on() and default_devices() is None:
        return "a mode changes torch's functions around the call (sw.spmd): put it inside"
    return ""
