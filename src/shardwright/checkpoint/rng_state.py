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
_USUAL = "MT19937"


def read_rng() -> dict[str, Any]:
    """The generators that this process uses: torch's (CPU, and CUDA once it is in use), Python's, numpy's."""
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if _cuda_in_use() else None,
        "python": (version, np.array(words, dtype=np.uint32), gauss),
        "numpy": _numpys(),
        "undivided": undivided(),
    }


def _numpys() -> Any:
    """The state of numpy's global generator; a dict where it is none of the usual kind."""
    state = np.random.get_state(legacy=False)  # noqa: NPY002  the global one
    if _kind_of(state) != _USUAL:
        return state
    twister = state["state"]
    gauss = int(state["has_gauss"]), float(state["gauss"])
    return _USUAL, np.array(twister["key"]), int(twister["pos"]), *gauss


def _kind_of(state: Any) -> str:
    return str(state["bit_generator"] if isinstance(state, dict) else state[0])


def check_rng(state: Any) -> None:
    """Try a state on generators that nobody uses. Raises: CheckpointError: it is none."""
    try:
        torch.Generator("cpu").set_state(state["torch"])
        version, words, gauss = state["python"]
        random.Random().setstate((version, tuple(int(word) for word in words), gauss))
        was, here = _kind_of(state["numpy"]), _kind_of(_numpys())
        if was != here:
            raise TypeError(f"numpy's generator was a {was} and is a {here} here")
        np.random.RandomState(getattr(np.random, here)()).set_state(state["numpy"])
        if state["cuda"] is not None and not isinstance(state["cuda"], torch.Tensor):
            raise TypeError("cuda's is no tensor")
        if type(state.get("undivided")) not in (int, NoneType):
            raise TypeError("the seed of undivided streams is no number")
    except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError, AttributeError) as error:
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
