"""Whether all ranks have the same gradients in the same states, told in the tail of another sum.

A rank says 64 bits that stand for all it has. Each bit travels as two numbers, itself and its opposite: a
sum then tells whether all ranks agree, exactly, in any dtype, for where they do one of the two is zero. Ranks
that do not agree tell each other what they have (`state.agree`); all learn from the same sums that they must.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
import xxhash
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.comm.functional import reduce_over
from shardwright.comm.told import told
from shardwright.compat import DisableTorchFunctionSubclass
from shardwright.context.submesh import groups_above_one
from shardwright.grads.grid import axes_above_one
from shardwright.grads.state import GradientState
from shardwright.layout.mesh_shape import ranks_of
from shardwright.remember import remembered
from shardwright.tensor.spec import Token
from shardwright.tensor.wrap import as_ours

_BITS = 64
NUMBERS = 2 * _BITS
_MISSING, _FINISHED = 0, 1


@dataclass
class Crowd:
    """Parameters whose meshes are of the same ranks, and one of these meshes: that of the fewest axes."""

    mesh: DeviceMesh
    parameters: dict[str, TorchDTensor] = field(default_factory=dict)

    def states(self) -> tuple[int, bool]:
        """64 bits for the states of all gradients on this rank; whether none is left to be moved or summed.

        Raises: ParallelError: a gradient is no DTensor on its parameter's mesh.
        """
        with DisableTorchFunctionSubclass():
            gradients = [parameter.grad for parameter in self.parameters.values()]
        codes = array("Q", _codes(self.parameters.items(), gradients))
        return xxhash.xxh3_64_intdigest(codes.tobytes()), max(codes, default=_MISSING) <= _FINISHED

    def total(self, numbers: Tensor, digest: int | None, *, reason: str) -> tuple[Tensor, bool]:
        """Sums of numbers over the ranks, and whether all of them are in this state.  [k] float -> [k].

        Args: digest: that of `states`; None, which is like no other: this rank has none to tell.
        Cost: an all-reduce of k + 128 numbers per axis of more than one rank.
        """
        sums = torch.cat((numbers, in_numbers(digest, numbers.dtype, numbers.device)))
        for axis, group in groups_above_one(self.mesh):
            sums = reduce_over(sums, "sum", group, axis=axis, reason=reason)
        return sums[: len(numbers)], are_alike(sums)


def crowds_of(parameters: Mapping[str, TorchDTensor]) -> dict[frozenset[int], Crowd]:
    """Parameters by the ranks that they live on, in the order in which these are met."""
    found: dict[frozenset[int], Crowd] = {}
    of_mesh: dict[int, Crowd] = {}
    for name, parameter in parameters.items():
        mesh = parameter._spec.mesh
        crowd = of_mesh.get(id(mesh))
        if crowd is None:
            crowd = of_mesh[id(mesh)] = found.setdefault(ranks_of(mesh), Crowd(mesh))
            if axes_above_one(mesh) < axes_above_one(crowd.mesh):
                crowd.mesh = mesh
        crowd.parameters[name] = parameter
    return found


def in_numbers(digest: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """64 bits as what `are_alike` reads from a sum:  [128]."""
    if digest is None:
        return torch.ones(NUMBERS, dtype=dtype, device=device)
    bits = [digest >> i & 1 for i in range(_BITS)]
    return torch.tensor(bits + [1 - bit for bit in bits], dtype=dtype, device=device)


def are_alike(sums: Tensor) -> bool:
    """Whether all terms of a sum had the same bits in its last 128 numbers."""
    numbers = told(sums[-NUMBERS:])
    return not any(one and other for one, other in zip(numbers[:_BITS], numbers[_BITS:], strict=True))


def _codes(
    parameters: Iterable[tuple[str, TorchDTensor]], gradients: Iterable[Tensor | None]
) -> Iterator[int]:
    for (name, parameter), gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            yield _MISSING
            continue
        state = GradientState.of(name, gradient, as_ours(parameter))
        if state.finished and not state.partial:
            yield _FINISHED
        else:
            lies = as_ours(cast("TorchDTensor", gradient))._spec.token
            yield (_code(lies) ^ state.partial) | 2


@remembered(4096)
def _code(gradient: Token) -> int:
    """A number for the layout of a gradient that is not its parameter's."""
    return xxhash.xxh3_64_intdigest(str(gradient.spec.layout).encode()) | 2
