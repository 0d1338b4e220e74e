"""Where the ranks of a pool compute: on the CPU over gloo, or all of them on one GPU over NCCL.

NCCL takes no two ranks of one host on one GPU. So each says that it is a host of its own, and they meet over
the loopback interface: slower than on GPUs of their own, by the same calls.
"""

from __future__ import annotations

import os
import warnings

import torch

from shardwright.errors import ConfigError

VARIABLE = "SHARDWRIGHT_RANKS_ON"  # "cpu" (the default) or "cuda"


def device_of_ranks() -> str:
    """The device type of the tensors of ranks, by the environment. Raises: ConfigError: no such one."""
    found = os.environ.get(VARIABLE, "cpu")
    if found not in ("cpu", "cuda"):
        raise ConfigError(f"{VARIABLE}={found!r:.60} is no device of ranks: use 'cpu' or 'cuda'")
    return found


def here() -> torch.device:
    """Where this process makes tensors; `torch.get_default_device` knows of no default type."""
    return torch.empty(0).device


def take_device(rank: int) -> str:
    """Make the device that of this process. Returns: the backend that serves it."""
    if device_of_ranks() == "cpu":
        return "gloo"
    os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_SOCKET_IFNAME="lo", LOCAL_RANK="0")
    torch.cuda.set_device(0)
    torch.cuda.init()
    torch.backends.cudnn.allow_tf32 = False  # as of products of matrices
    with warnings.catch_warnings(action="ignore"):  # `set_default_device` would stand around every call
        torch.set_default_tensor_type("torch.cuda.FloatTensor")
    return "cpu:gloo,cuda:nccl"
