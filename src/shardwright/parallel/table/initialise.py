"""Weights of a model that was made on the meta device: those of one device, drawn where they live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.errors import ParallelError
from shardwright.parallel.pipeline.split import find_split
from shardwright.tensor.modules.slots import Slot, slots_of
from shardwright.tensor.plain.spmd import spmd
from shardwright.tensor.wrap import as_ours

Init = Callable[[nn.Module], Any]
_BY_ITSELF = ("reset_parameters", "_reset_parameters")
_SHOWN = 8


def materialise(module: nn.Module, device: torch.device, init: Init | None = None) -> None:
    """Give every parameter and buffer memory for this rank's part, and a value.

    Values are drawn from the default generator, whole and then cut: those of one device whose generator was
    in this state when it made the model. That holds where a constructor draws as its modules are registered,
    each by `reset_parameters` (torch's do), then by `transformers`' `_init_weights`; not where one draws
    otherwise (`Conv1D` of GPT-2): weights are then alike on every mesh, and others than a constructor's. Of
    a parameter that nothing can give a value (`nn.Parameter(torch.randn(3))`) the name is said.

    Args: init: a function of the module that gives all values, in place of that.
    Raises: ParallelError: a parameter or buffer that got none.
    Cost: nothing is sent; time and transient memory of the largest parameter, whole, on every rank.
    """
    module.to_empty(device=device)
    with torch.no_grad(), _plain_buffers(module), _one_program(module):
        before = _versions(module)
        if init is not None:
            init(module)
        else:
            with _untied(module):
                for child in _as_constructed(module):
                    _start(child)
        _refuse_untouched(before, _versions(module))


def refuse_cut(module: nn.Module) -> None:
    """Raise ParallelError for a stage on the meta device: it knows not what earlier stages would draw."""
    is_new = any(p.is_meta for p in module.parameters())
    if is_new and any(find_split(child) is not None for child in module.modules()):
        raise ParallelError(
            "parallelize: the model was made on the meta device and cut into stages: every stage would draw "
            "as if it were the first, and none has the weights of one device; nothing was changed\n"
            "  fix: make it with memory before parallelize_pipeline, or parallelize(..., init=function) "
            "which writes all parameters and buffers"
        )


def _versions(module: nn.Module) -> Mapping[str, tuple[int, int]]:
    """Of every tensor with elements: which it is, and how often it was written."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: (id(x), x._version) for name, x in tensors if x.numel()}


def _refuse_untouched(before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]) -> None:
    untouched = [name for name, version in after.items() if before.get(name) == version]
    if untouched:
        more = f" and {len(untouched) - _SHOWN} more" if len(untouched) > _SHOWN else ""
        raise ParallelError(
            f"parallelize: nothing gives a value to {', '.join(untouched[:_SHOWN])}{more}: the model was "
            "made on the meta device, and what its constructor computed is not there\n"
            "  fix: a reset_parameters() of the module that owns it, or parallelize(..., init=function) "
            "which writes all parameters and buffers"
        )


def _as_constructed(module: nn.Module) -> Iterator[nn.Module]:
    """Children before their parent, each once: in the order in which constructors end."""
    return _below(module, set())


def _below(parent: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    for child in parent.children():
        if child not in seen:
            seen.add(child)
            yield from _below(child, seen)
    yield parent


def _start(module: nn.Module) -> None:
    """What a constructor does at its end."""
    names = [name for name in _BY_ITSELF if callable(getattr(module, name, None))]
    for name in names[:1]:
        getattr(module, name)()
    # A model of transformers draws all of it anew, but what an inner model of its kind has drawn.
    everything = getattr(module, "initialize_weights", None)
    if callable(everything) and hasattr(module, "_init_weights"):
        with _as_its_own_class(module):
            everything()


@contextmanager
def _as_its_own_class(module: nn.Module) -> Iterator[None]:
    """`transformers` asks where a class was defined, and gives others less: a unit's class is of torch."""
    own = next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))
    asked = getattr(own, "is_custom_code", None)
    if own is type(module) or asked is None:
        yield
        return
    vars(module)["is_custom_code"] = asked
    try:
        yield
    finally:
        del vars(module)["is_custom_code"]


@contextmanager
def _plain_buffers(module: nn.Module) -> Iterator[None]:
    """Buffers that are whole on every rank are written as plain tensors, as their owner made them."""
    found = [
        (child, name, as_ours(value))
        for child in module.modules()
        for name, value in child._buffers.items()
        if isinstance(value, TorchDTensor) and as_ours(value)._spec.layout.is_fully_replicated
    ]
    for child, name, value in found:
        child._buffers[name] = value._local_tensor
    try:
        yield
    finally:
        for child, name, value in found:
            written = child._buffers[name]
            if written is not None and written is not value._local_tensor:
                value._local_tensor.copy_(written)  # its owner has put another in its place
            child._buffers[name] = value


def _one_program(module: nn.Module) -> AbstractContextManager[Any]:
    """What is computed on the way, plain, counts as whole: `A_log.copy_(torch.arange(16).log())`."""
    meshes = Counter(p.device_mesh for p in module.parameters() if isinstance(p, TorchDTensor))
    return spmd(meshes.most_common(1)[0][0], check=False) if meshes else nullcontext()


@contextmanager
def _untied(module: nn.Module) -> Iterator[None]:
    """Each name of a tied parameter draws for itself, as on one device, and that of its source stays."""
    by_parameter: dict[nn.Parameter, list[Slot]] = {}
    for slot in slots_of(module):
        by_parameter.setdefault(slot.get(), []).append(slot)
    sources = _sources(module)
    others: list[tuple[Slot, nn.Parameter]] = []
    for parameter, slots in by_parameter.items():
        source = next((slot for slot in slots if slot.path in sources), slots[0])
        others += [(slot, parameter) for slot in slots if slot is not source]
    try:
        for slot, parameter in others:
            slot.put(nn.Parameter(torch.empty_like(parameter), requires_grad=parameter.requires_grad))
        yield
    finally:
        for slot, parameter in others:
            slot.put(parameter)


def _sources(module: nn.Module) -> set[str]:
    """Names that `transformers` ties others to."""
    found: set[str] = set()
    for path, child in module.named_modules():
        tied = getattr(child, "all_tied_weights_keys", None)
        if isinstance(tied, Mapping):
            found |= {f"{path}.{name}" if path else name for name in tied.values()}
    return found
