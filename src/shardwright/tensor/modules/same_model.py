"""Verbs that place modules look at their own arguments, then ranks compare what they are to place.

What differs would be broadcast into memory of another size, or cut into parts of different tensors, and be
noticed a step later by nobody but the backend. One number each is compared; what it stands for is told only
where they differ.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import partial
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from shardwright.comm.dtype import as_bytes
from shardwright.comm.functional import reduce_over
from shardwright.comm.in_passing import tell_in_passing
from shardwright.comm.record import because
from shardwright.comm.told import told
from shardwright.compat import FakeTensor, axis_names
from shardwright.context.submesh import groups_above_one
from shardwright.errors import ParallelError
from shardwright.placement.base import Placement
from shardwright.tensor.modules.slots import local_plain

_REASON = "compare the parameters to place"
_NO_MORE, _ERROR = "no more parameters", "error: "
_SAMPLES = 16  # of each parameter: who draws from another stream differs in all of them
_SHOWN = 8
_FIX = (
    "  fix: make the module alike on every rank: the same layers in the same order, with the same shapes, "
    "dtypes, ties and requires_grad, and ask for the same placements"
)
# What every process writes in the same way; of other objects the class is compared.
_WRITTEN_ALIKE = (str, bytes, int, float, bool, NoneType, Enum, torch.dtype, torch.device, Placement)
_FIX_OF_OPTIONS = "  fix: the same call on every rank"


class _Here(threading.local):
    """trusted: the ranks have compared the whole model already, or try out without a word to each other."""

    trusted = False


_here = _Here()


@contextmanager
def compared_before() -> Iterator[None]:
    """Inside, nothing is compared: the caller has the ranks compare all of it at once."""
    before, _here.trusted = _here.trusted, True
    try:
        yield
    finally:
        _here.trusted = before


@dataclass
class Said:
    """What a call of such a verb says to the other ranks, filled in while its own arguments are looked at.

    Args:
        options: those of the call.
        left_alone: parameters that this call does not place: a rank may have some of its own.
        becomes: `{name: what it shall be}`, of buffers too where the call places them.
        cut, over: those of which each rank of this axis keeps a part of its own.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    left_alone: Collection[nn.Parameter] = ()
    becomes: Mapping[str, str] = field(default_factory=dict)
    cut: Iterable[nn.Parameter] = ()
    over: str = ""


@contextmanager
def agreed(verb: str, module: Any, mesh: Any) -> Iterator[Said]:
    """Inside, a verb looks at its own arguments; after it all ranks of `mesh` go on, or all raise.

    Compared are names of parameters and their order, shapes, dtypes, `requires_grad`, which are tied, which
    axes place them already, and the options. Values are not, for a checkpoint may be loaded afterwards: where
    ranks keep parts of other values, that is said once.

    Args: module, mesh: as they were given; what is none is an error that is raised inside.
    Raises: ParallelError: the ranks differ, or one of them could not go on, which raises its own error.
    Cost: an all-reduce of 40 bytes over each axis; a few elements of each of `cut` are read.
    """
    said, error = Said(), None
    try:
        yield said
    except Exception as failed:  # noqa: BLE001  whatever it is, the other ranks wait
        error = failed
    if not (_here.trusted or isinstance(torch.empty(0), FakeTensor) or _is_alone(mesh)):
        facts = _facts(module, said) if error is None else [f"{_ERROR}{error}"]
        values = _sampled(said.cut)
        are_same, values_are = _compared(_digest("\n".join(facts).encode()), values, mesh, said.over)
        if not are_same:
            _refuse(verb, facts, mesh, error)
        if not values_are:
            _warn(said.over)
    if error is not None:
        raise error


@contextmanager
def tells_errors(verb: str, module: Any, mesh: Any) -> Iterator[None]:
    """Around what a caller does before `agreed`: the ranks that wait there hear of his error, and raise.

    Those that stand elsewhere do not: what is done inside may send messages of its own.
    """
    try:
        yield
    except Exception as error:
        failed = error

        def tell() -> None:
            with agreed(verb, module, mesh):
                raise failed

        tell_in_passing(tell)
        raise


def _is_alone(mesh: object) -> bool:
    return not isinstance(mesh, DeviceMesh) or mesh.get_coordinate() is None


def _facts(module: nn.Module, said: Said) -> list[str]:
    """What must be the same: a line of the options, and one for each name of a tensor to place."""
    first, left_alone = dict[Tensor, str](), set[Tensor](said.left_alone)
    lines = [f"options: {told_alike(said.options)}"]
    buffers = module.named_buffers(remove_duplicate=False)
    placed = ((name, buffer) for name, buffer in buffers if name in said.becomes)
    for name, x in (*module.named_parameters(remove_duplicate=False), *placed):
        if x not in left_alone:
            known = first.setdefault(x, name)
            words = [f"{name}: {_described(x)}"]
            if said.becomes.get(name):
                words.append(f"to be {said.becomes[name]}")
            if known != name:
                words.append(f"tied to {known}")
            lines.append(", ".join(words))
    return lines


def _described(x: Tensor) -> str:
    if isinstance(x, UninitializedParameter | UninitializedBuffer):
        return "no shape yet"
    words = [f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"]
    if isinstance(x, TorchDTensor):
        words.append(f"placed {tuple(x.placements)} on {axis_names(x.device_mesh)}")
    if isinstance(x, nn.Parameter) and not x.requires_grad:
        words.append("requires_grad=False")
    return ", ".join(words)


def told_alike(value: Any) -> str:
    """An option as every process writes it: functions by name, sets in order, no values and no addresses."""
    if isinstance(value, Mapping):
        pairs = sorted(
            f"{key if isinstance(key, str) else told_alike(key)}: {told_alike(each)}"
            for key, each in value.items()
        )
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(told_alike, value)))}}}"
    if isinstance(value, Tensor):
        return f"a tensor {value.dtype} {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(told_alike, value))}]"
    if isinstance(value, partial):
        return f"{told_alike(value.func)}{told_alike(value.args)}{told_alike(value.keywords)}"
    if hasattr(value, "__qualname__"):  # a generator has no module
        return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
    if is_dataclass(value) and not isinstance(value, type):
        return (
            f"{told_alike(type(value))}{told_alike({f.name: getattr(value, f.name) for f in fields(value)})}"
        )
    return repr(value) if isinstance(value, _WRITTEN_ALIKE) else told_alike(type(value))


def _sampled(cut: Iterable[nn.Parameter]) -> int:
    """A digest of a few elements of each, as far as they are on a device; one copy to the host for each."""
    samples: dict[torch.device, list[Tensor]] = {}
    for parameter in cut:
        x = local_plain(parameter)
        if type(x) is Tensor and not x.is_meta and x.layout is torch.strided and x.numel():
            step = max(x.numel() // _SAMPLES, 1)
            values = x.reshape(-1)[::step].resolve_conj().resolve_neg()
            samples.setdefault(x.device, []).append(as_bytes(values))
    held = [torch.cat(parts).cpu().numpy().tobytes() for parts in samples.values()]
    return _digest(b"".join(held))


def _digest(data: bytes) -> int:
    """A number whose negative fits a signed one of 64 bits as well."""
    return xxhash.xxh3_64_intdigest(data) >> 2


def _compared(what: int, values: int, mesh: DeviceMesh, over: str) -> tuple[bool, bool]:
    """Have all ranks of the mesh the one, and those of each line of the axis the other?

    A number is the same everywhere where its largest is its smallest, whatever the number of ranks.
    """
    numbers = torch.tensor([what, -what, values, -values, 0], dtype=torch.int64, device=mesh.device_type)
    for axis, group in sorted(groups_above_one(mesh), key=lambda each: each[0] != over):
        numbers = reduce_over(numbers, "max", group, axis=axis, reason=_REASON)
        if axis == over:
            numbers[4] = numbers[2] != -numbers[3]
    high, low, _, _, differ = told(numbers)
    return high == -low, not differ


def _refuse(verb: str, facts: list[str], mesh: DeviceMesh, error: Exception | None) -> None:
    """Raise the error of this rank, or of the first that has one, or the first difference. Collective."""
    known = [(dist.get_rank(), facts)]
    for _, group in groups_above_one(mesh):
        everybody: list[list[tuple[int, list[str]]]] = [[] for _ in range(group.size())]
        with because(_REASON):
            dist.all_gather_object(everybody, known, group=group)
        known = [each for some in everybody for each in some]
    if error is not None:
        raise error
    known.sort(key=lambda each: each[0])
    for rank, lines in known:
        if lines[0].startswith(_ERROR):
            why = lines[0].removeprefix(_ERROR)
            raise ParallelError(f"{verb}: rank {rank} cannot go on; nothing was changed\n  there: {why}")
    longest = max(len(lines) for _, lines in known)
    at = next(i for i in range(longest) if len({_line(lines, i) for _, lines in known}) > 1)
    listed = [f"  rank {rank}  {_line(lines, at)}" for rank, lines in known[:_SHOWN]]
    more = [f"  and {len(known) - _SHOWN} more"] if known[_SHOWN:] else []
    names = [line.partition(":")[0] for _, lines in known if (line := _line(lines, at)) != _NO_MORE]
    text = "\n".join([*listed, *more, _FIX if at else _FIX_OF_OPTIONS])
    raise ParallelError(f"{verb}: the ranks differ in {names[0]}; nothing was changed\n{text}")


def _line(lines: Sequence[str], at: int) -> str:
    return lines[at] if at < len(lines) else _NO_MORE


def _warn(axis: str) -> None:
    warnings.warn(
        f"the ranks of axis {axis!r} have other values of the parameters that are sharded over it, and each "
        "keeps its own part: together they are a tensor that nobody drew. Seed alike on every rank before "
        "the module is made (context.seed(seed) in a new program, torch.manual_seed in the midst of one), or "
        "load values afterwards",
        stacklevel=1,  # one place for all units, so that it is said once
    )
