"""The state of the random generators of one rank."""

from __future__ import annotations

import random
from types import NoneType
from typing import Any

import numpy as np
import torch

from shardwright.context.randomness import go_on_undivided, undivided
from shardwright.errors import CheckpointError

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
        "undivided": undivided(),
    }


def check_rng(state: Any) -> None:
    """Try a state on generators that nobody uses. Raises: CheckpointError: it is none."""
    try:
        torch.Generator("cpu").set_state(state["torch"])
        version, words, gauss = state["python"]
        random.Random().setstate((version, tuple(int(word) for word in words), gauss))
        np.random.RandomState().set_state(state["numpy"])
        if state["cuda"] is not None and not isinstance(state["cuda"], torch.Tensor):
            raise TypeError("cuda's is no tensor")
        if type(state.get("undivided")) not in (int, NoneType):
            raise TypeError("the seed of undivided streams is no number")
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"the state of the generators is none ({error})") from None


def check_generator(generator: torch.Generator, state: Any, path: str) -> None:
    """Try a state on a generator of the same device. Raises: CheckpointError: it is none."""
    try:
        torch.Generator(generator.device).set_state(state)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} is no state of a generator on {generator.device} ({error})") from None


def write_rng(state: dict[str, Any]) -> None:
    """Set the generators to a state that `read_rng` gave."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(int(word) for word in words), gauss))
    np.random.set_state(state["numpy"])  # noqa: NPY002  the global one
    if state["cuda"] is not None and _cuda_in_use():
        torch.cuda.set_rng_state(state["cuda"])
    go_on_undivided(state.get("undivided"))


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
