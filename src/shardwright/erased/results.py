"""How a tensor that the program made is given back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.erased.tape import Tape
from shardwright.erased.walk import local_of
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.spec import Spec
from shardwright.tensor.views import write_back
from shardwright.tensor.wrap import offset_of, wrap


@dataclass(frozen=True, slots=True)
class Result:
    """value: its number on the tape. spec: of a DTensor. offset: where one device's begins in its storage."""

    value: int
    spec: Spec | None
    offset: int

    @staticmethod
    def of(x: torch.Tensor, tape: Tape) -> Result | None:
        """None: it cannot be made again (not on the tape, torch's own DTensor, a copied view)."""
        if (isinstance(x, TorchDTensor) and not isinstance(x, DTensor)) or x in write_back.origins:
            return None
        number = tape.find(local_of(x))
        if number is None:
            return None
        spec = x._spec.plain if isinstance(x, DTensor) else None
        return Result(number, spec, offset_of(x) if spec else 0)


def hollow(result: Result, local: torch.Tensor) -> torch.Tensor:
    """A tensor without data that lies like one that is made again of this local part."""
    empty = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")
    return made_again(result, empty)


def made_again(result: Result, local: torch.Tensor) -> torch.Tensor:
    """The tensor of this local part."""
    return local if result.spec is None else wrap(local, result.spec, offset=result.offset)
