"""The state of the random generators of one rank."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

KEY = "rng"


def read_rng() -> dict[str, Any]:
    """The generators that this process uses: torch's (CPU, and CUDA once it is in use), Python's, numpy's."""
    version, words, gauss = random.getstate()
    name, keys, place, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002  the global one
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if _cuda_in_use() else None,
        "python": (version, np.array(words, dtype=np.uint32), gauss),
        "numpy": (str(name), np.array(keys), int(place), int(has_gauss), float(cached)),
    }


def write_rng(state: dict[str, Any]) -> None:
    """Set the generators to a state that `read_rng` gave."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(int(word) for word in words), gauss))
    np.random.set_state(state["numpy"])  # noqa: NPY002  the global one
    if state["cuda"] is not None and _cuda_in_use():
        torch.cuda.set_rng_state(state["cuda"])


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
