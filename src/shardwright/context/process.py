"""This process in its world: rank, device, and the default process group."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwright.errors import MeshError

_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


@dataclass(frozen=True, slots=True)
class ProcessWorld:
    """Rank, local rank and device of this process. Not a mesh: it knows no axes."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    owns_group: bool

    @classmethod
    def attach(cls, device: str | None, timeout: float | None) -> ProcessWorld:
        """Join the default process group; make it from the launcher's variables, or alone, if there is none.

        Raises:
            MeshError: the device is unknown or absent, or the group that exists cannot serve it.
        """
        owns_group = not dist.is_initialized()
        local_rank = _local_rank()
        kind = _device_kind(device)
        own_device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", local_rank)
        if kind == "cuda":
            torch.cuda.set_device(own_device)
        if owns_group:
            _init_process_group(_BACKENDS[kind], timeout)
        return cls(dist.get_rank(), dist.get_world_size(), local_rank, own_device, owns_group)

    def detach(self) -> None:
        """Destroy the default process group if `attach` made it."""
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()


def world_size_of_launch() -> int:
    """Return the size of the world that `attach` would join, without joining it.

    Raises:
        MeshError: the launcher's variables are incomplete or no number.
    """
    if dist.is_initialized():
        return dist.get_world_size()
    given = [name for name in _LAUNCH_VARIABLES if name in os.environ]
    if not given:
        return 1
    missing = [name for name in _LAUNCH_VARIABLES if name not in os.environ]
    if missing:
        raise MeshError(
            f"the environment sets {', '.join(given)} but not {', '.join(missing)}; "
            "start with torchrun, or unset them all to run as one process"
        )
    return _number_from_environment("WORLD_SIZE")


def _number_from_environment(name: str) -> int:
    """Return an environment variable as a number."""
    text = os.environ[name]
    if not text.isdecimal():
        raise MeshError(f"the environment variable {name}={text!r} is not a number; start with torchrun")
    return int(text)


def _local_rank() -> int:
    """Return the launcher's LOCAL_RANK; without one, as if ranks filled the machines in order."""
    if "LOCAL_RANK" in os.environ:
        return _number_from_environment("LOCAL_RANK")
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    per_machine = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return rank % per_machine if per_machine else rank


def _device_kind(asked: str | None) -> str:
    """Return "cpu" or "cuda": what was asked for, else what the group serves, else what the machine has."""
    if asked is None:
        return "cuda" if torch.cuda.is_available() and "cuda" in _kinds_served() else "cpu"
    if str(asked) not in _BACKENDS:
        raise MeshError(f"device {asked!r} is unknown; use one of {', '.join(_BACKENDS)}")
    if asked == "cuda" and not torch.cuda.is_available():
        raise MeshError("device 'cuda' was asked for, but torch sees no CUDA device; use device='cpu'")
    if asked not in _kinds_served():
        raise MeshError(
            f"the process group that exists has backend {dist.get_backend()!r}, which does not serve "
            f"{asked!r}; initialise it with backend={_BACKENDS[asked]!r}, or let build() make it"
        )
    return asked


def _kinds_served() -> tuple[str, ...]:
    """Return the devices that the default group serves; all where there is none yet."""
    if not dist.is_initialized():
        return tuple(_BACKENDS)
    pairs = dict(pair.split(":") for pair in str(dist.get_backend_config()).split(","))
    # gloo names cuda too, but stages every message through the host and knows few collectives there
    return tuple(kind for kind in _BACKENDS if kind in pairs and (kind == "cpu" or pairs[kind] != "gloo"))


def _init_process_group(backend: str, timeout: float | None) -> None:
    """Make the default group: from the launcher's variables if given, else a world of this process alone."""
    limit = None if timeout is None else timedelta(seconds=timeout)
    if "RANK" not in os.environ:
        dist.init_process_group(backend, timeout=limit, store=dist.HashStore(), rank=0, world_size=1)
        return
    try:
        dist.init_process_group(backend, timeout=limit)
    except (RuntimeError, ValueError) as error:  # torch's text goes on with frames of C++
        where = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        why = str(error).partition("\n")[0]
        raise MeshError(
            f"the ranks cannot meet at {where} (MASTER_ADDR, MASTER_PORT): {why}; "
            "start with torchrun, or give a port that is free and a network interface that is there"
        ) from error
