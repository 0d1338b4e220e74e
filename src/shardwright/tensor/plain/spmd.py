"""`spmd(mesh)`: single-device semantics for a block; plain tensors met inside count as replicated."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from shardwright.comm.dtype import as_bytes
from shardwright.comm.record import source_line
from shardwright.compat import (
    FakeTensor,
    compiler_names,
    function_modes_on,
    outside_transforms,
    transforms_on,
    unfollowed,
    version_of,
)
from shardwright.compat.dynamo import never_traced
from shardwright.errors import SpmdError
from shardwright.layout.mesh_shape import MeshShape, are_relatives, as_mesh_shape
from shardwright.placement.base import Replicate
from shardwright.rules.call import Args
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.plain.boundary import leaves_alone, state, with_replicated, wraps_distributed
from shardwright.tensor.plain.refuse import tensors_in

Check = Literal["first"] | bool


_TRANSFORMED = (
    "{}: a plain tensor of shape {} that a torch.func transform follows meets a DTensor inside spmd: what "
    "the transform made of it cannot be placed. fix: sw.distribute_tensor it before the transform"
)
_on_the_host = never_traced(
    "spmd compares plain tensors between the ranks, which no graph holds; fix: spmd(mesh, check=False)"
)
# Arguments beside which there is no plain tensor: DTensors, and what can hold none.
SIMPLE = frozenset({DTensor, bool, int, float, type(None), torch.dtype})
_OURS = (DTensor,)
# Lists that are given to these are read in C, below all dispatch.
_READ_IN_C = frozenset({torch.tensor, torch.as_tensor})
# A line, and the mesh of its block: the ranks that compare together. None where nothing is compared.
_Site = tuple[str, int, MeshShape] | None
# What its ranks know together of a line: how many values were compared there, and whether a block has ended
# that compared some. What else one of them did in a block (an error, or nothing) the others do not know.
_compared: dict[_Site, tuple[int, bool]] = {}


def at_once(func: Any, types: Any, args: Args, kwargs: dict[str, Any] | None) -> Any:
    """The call, where a block has nothing to do for it and nobody else is asked; else NotImplemented."""
    if types != _OURS or compiler_names["_is_compiling_flag"]:
        return NotImplemented
    given = (*args, *kwargs.values()) if kwargs else args
    if not SIMPLE.issuperset(map(type, given)) or function_modes_on():
        return NotImplemented
    return DTensor.__torch_function__(func, types, args, kwargs)


class Entrance:
    """Holds `at_once`, or the one in C that stands before it (`doors.py`)."""

    at_once: Any = staticmethod(at_once)


class spmd(TorchFunctionMode):  # noqa: N801 - a context manager, named like the verb that users write
    """Within the block a program written for one device runs on DTensors.

    A plain tensor beside a DTensor counts as replicated: every rank is taken to hold the same values. Its
    gradient is plain and complete. A DTensor written into a plain tensor writes its full value. The backward
    of what was computed inside needs no block of its own.

    Args:
        mesh: where plain tensors count as replicated; one of one element beside DTensors of a larger mesh, of
            which this one is a slice, counts so there, as it does outside of the block.
        check: compare plain tensors across the ranks: "first" (the first time that this line of the program
            runs), True (always) or False. Raises SpmdError that names the line of one that differs.
    Cost: none for the program's own tensors; each comparison is one small all-reduce per axis.
    """

    def __init__(self, mesh: DeviceMesh, *, check: Check = "first") -> None:
        super().__init__()
        if not isinstance(mesh, DeviceMesh):
            raise SpmdError(
                f"spmd takes the mesh on which plain tensors count as replicated, got {mesh!r:.60}"
            )
        if check is not True and check is not False and check != "first":
            raise SpmdError(f'spmd(check={check!r:.60}): it is "first" (the default), True (always) or False')
        self._mesh = mesh
        self._site: _Site = _site_of(mesh) if check else None
        self._check = check if check != "first" or not _compared.get(self._site, (0, False))[1] else False
        self._met = 0  # values that were compared here, or at an earlier pass of the line
        self._seen: dict[int, tuple[torch.Tensor, int | None]] = {}

    def __enter__(self) -> Self:
        state.blocks += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        state.blocks -= 1
        if kind is not None and issubclass(kind, SpmdError):
            _compared.pop(self._site, None)  # where they differ, all of them know
        elif kind is None and self._met:
            _compared[self._site] = _compared.get(self._site, (0, False))[0], True
        self._seen.clear()
        self._met = 0
        super().__exit__(kind, *error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: Args = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            out = Entrance.at_once(func, types, args, kwargs)
            if out is not NotImplemented:
                return out
        kwargs = kwargs or {}
        if func in _READ_IN_C:
            args, kwargs = tuple(map(_readable, args)), {k: _readable(v) for k, v in kwargs.items()}
        if not state.rank_local and _mixed(args, kwargs) and not leaves_alone(func):
            replicate = partial(self._replicate, beside=(*args, *kwargs.values()))
            args, kwargs = with_replicated(func, args, kwargs, replicate)
        if func is torch.Tensor.unflatten and torch.compiler.is_compiling():  # as Dynamo can read it
            func = torch.unflatten
        return func(*args, **kwargs)

    def replicated(self, value: torch.Tensor) -> DTensor:
        """A plain tensor as the block takes it: the same on every rank, compared if the block compares."""
        made: DTensor = self._replicate(value)
        return made

    def _replicate(self, value: Any, beside: Any = ()) -> Any:
        if isinstance(value, torch.Tensor) and not _is_distributed(value):
            if torch.compiler.is_compiling() or not transforms_on():
                return self._replicated(value, beside)
            constant = unfollowed(value)
            if constant is None:
                raise SpmdError(_TRANSFORMED.format(source_line(), tuple(value.shape)))
            with outside_transforms():
                return self._replicated(constant, beside)
        if isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value):
            return type(value)(self._replicate(v, beside) for v in value)
        return value

    def _replicated(self, value: torch.Tensor, beside: Any) -> DTensor:
        if self._check and value.device.type != "meta":
            self._compare(value)
        mesh = self._mesh
        if not torch.compiler.is_compiling() and value.numel() == 1:
            mesh = self._home_of_numbers(beside)
        return DTensor.from_local(value, mesh, (Replicate(),) * mesh.ndim)

    def _home_of_numbers(self, beside: Any) -> DeviceMesh:
        """The mesh of the DTensors beside a plain tensor of one element, where the block's is a slice of it.

        As outside of a block. Anything larger may be this slice's own rows of a batch. A parameter that
        computes as its local tensor says nothing: it computes on the slice.
        """
        distributed = (x for x in tensors_in(beside) if isinstance(x, torch.distributed.tensor.DTensor))
        meshes = {
            as_mesh_shape(x.device_mesh): x.device_mesh
            for x in distributed
            if not isinstance(x, DTensor) or x._spec.use is None
        }
        own = as_mesh_shape(self._mesh)
        home = next(iter(meshes)) if len(meshes) == 1 else own
        larger = len(home.axes) > len(own.axes) and are_relatives(own, home)
        return meshes[home] if larger else self._mesh

    def _is_due(self, value: torch.Tensor) -> bool:
        """Is the value to be compared: not twice in a block, and not again at a line ("first")?"""
        version = version_of(value)  # of inference tensors, None: nothing counts how often they are written
        if version is not None and self._seen.get(id(value)) == (value, version):
            return False
        self._seen[id(value)] = (value, version)
        self._met += 1
        count, ended = _compared.get(self._site, (0, False))
        if self._check == "first" and (ended or self._met <= count):
            return False
        _compared[self._site] = max(count, self._met), ended
        return True

    @_on_the_host
    def _compare(self, value: torch.Tensor) -> None:
        """Raise if the ranks of the mesh hold different bytes here, where that is to be asked."""
        if not self._is_due(value):
            return
        digest = _digest(value)
        pair = torch.tensor([digest, -digest], dtype=torch.int64, device=self._mesh.device_type)
        for axis in range(self._mesh.ndim):
            dist.all_reduce(pair, dist.ReduceOp.MAX, group=self._mesh.get_group(axis))
        if int(pair[0]) != -int(pair[1]):
            raise SpmdError(
                f"{source_line()}: a plain tensor of shape {tuple(value.shape)} differs between the ranks of "
                f"{self._mesh.mesh_dim_names}; inside spmd it must be the same everywhere. "
                "fix: make it from the same seed or data everywhere, or use DTensor.from_local"
            )


@_on_the_host
def _site_of(mesh: DeviceMesh) -> _Site:
    """Where the block stands that is being made."""
    frame = sys._getframe(2)
    return frame.f_code.co_filename, frame.f_lineno, as_mesh_shape(mesh)


def _digest(value: torch.Tensor) -> int:
    """62 bits of a hash of the values, so that its negative is an int64 as well.

    Of a copy: numpy would hold on to the memory itself, which `fully_shard` resizes.
    """
    data = as_bytes(value.detach().to("cpu", copy=True).contiguous()).numpy().tobytes()
    return xxhash.xxh3_64_intdigest(data + str((tuple(value.shape), value.dtype)).encode()) >> 2


def _is_distributed(x: torch.Tensor) -> bool:
    """A DTensor, or what a transform made of one; a trace meets no transforms, and cannot ask."""
    if isinstance(x, torch.distributed.tensor.DTensor):
        return True
    return not torch.compiler.is_compiling() and wraps_distributed(x)


def _readable(given: Any) -> Any:
    """Of an argument that is a list with DTensors, of one number each, the same list of plain tensors."""
    if not isinstance(given, list | tuple) or not any(map(_is_distributed, tensors_in(given))):
        return given
    return _numbers(given)


def _numbers(given: Any) -> Any:
    if isinstance(given, list | tuple):
        return [_numbers(one) for one in given]
    if not isinstance(given, torch.distributed.tensor.DTensor):
        return given
    return torch.tensor(given.item(), dtype=given.dtype, device="cpu")


def _mixed(args: Args, kwargs: dict[str, Any]) -> bool:
    """Are there DTensors and plain tensors of more than one element side by side?

    Not where the plain one is hollow, and the DTensor is not: a DTensor made of both would have no values and
    not say so. Whoever made the hollow one follows it.
    """
    distributed = plain = hollow = False
    stack: list[Any] = [*args, *kwargs.values()]
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            if _is_distributed(value):
                distributed = True
            else:
                plain = True
                hollow = hollow or isinstance(value, FakeTensor)
        elif isinstance(value, list | tuple):
            stack.extend(value)
    return distributed and plain and not (hollow and _has_values((*args, *kwargs.values())))


def _has_values(values: Args) -> bool:
    """Is there a DTensor whose local tensor is in memory?"""
    distributed = (x for x in tensors_in(values) if isinstance(x, DTensor))
    return any(not isinstance(x._local_tensor, FakeTensor) for x in distributed)
