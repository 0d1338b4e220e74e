"""The state of the random generators of one rank."""

from __future__ import annotations

import random
from typing import Any

import torch


def read_rng() -> dict[str, Any]:
    """The generators that this process uses: torch's (CPU, and CUDA once it is in use) and Python's."""
    cuda = torch.cuda.get_rng_state() if _cuda_in_use() else None
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate()}


def write_rng(state: dict[str, Any]) -> None:
    """Set the generators to a state that `read_rng` gave."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if state["cuda"] is not None and _cuda_in_use():
        torch.cuda.set_rng_state(state["cuda"])


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
