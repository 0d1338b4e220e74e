"""The two doors of every call, `__torch_function__` and `__torch_dispatch__` of a DTensor: C or Python.

In C stands only what a known call needs (`extension/known_call.c`); what it does not know goes on to the
functions in Python, which stand there alone where the extension was not built, does not fit, or is off.
Values, errors and records are the same.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import (
    QUIET,
    compiler_names,
    forward_names,
    function_modes_on,
    increment_versions,
    modes_on,
    packing,
    without_subclasses,
)
from shardwright.tensor import finished_forms
from shardwright.tensor.dispatch import any_number, one_node, short, whole_functions
from shardwright.tensor.dispatch.call import dispatch
from shardwright.tensor.dispatch.ways import kept_form
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.localized import LOOKUPS, MIXING, LocalizedDTensor, call_localized, compute_view
from shardwright.tensor.plain import boundary, spmd
from shardwright.tensor.plain.host_reads import READING
from shardwright.tensor.views import write_back
from shardwright.tensor.wrap import held_outside, wrap

_VARIABLE = "SHARDWRIGHT_EXTENSION"
_MODULE = "shardwright.tensor.extension.known_call"
_BUILT = 16  # `VERSION` of the C file
# Classes whose values `call._collect` tells apart by class and value.
_SCALARS = frozenset(
    {bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format}
)
# What a tensor says of itself, without an op and without other tensors.
_LOOKS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in (
        "grad", "requires_grad", "is_leaf", "grad_fn", "shape", "ndim", "dtype", "device", "layout",
        "is_sparse", "is_cpu", "is_cuda", "is_meta", "_version",
    )
) | {
    torch.is_complex, torch.is_floating_point, torch.Tensor.is_complex, torch.Tensor.is_floating_point,
    torch.Tensor.numel, torch.Tensor.dim, torch.Tensor.size, torch.Tensor.stride, torch.Tensor.element_size,
    torch.Tensor.storage_offset,
}  # fmt: skip


def open_doors(*, extension: bool = True) -> str:
    """Put in the doors of C where they can be had (and `extension`), else those of Python.

    Returns: why those of C cannot be had; empty where they can.
    """
    why = why_python()
    if why or not extension:
        _put(classmethod(boundary.call), classmethod(call_localized), classmethod(dispatch))
        spmd.Entrance.at_once = staticmethod(spmd.at_once)
    else:
        made = _module()
        below = _dispatch(made)
        _put(_boundary(made, boundary.call, below), _boundary(made, call_localized, below), below)
        spmd.Entrance.at_once = _block(made, DTensor.__torch_function__)
    short.reader.there = not why
    return why


@contextmanager
def in_python() -> Iterator[None]:
    """Known calls run in Python inside the block, in all threads: to see how they run, or to compare."""
    open_doors(extension=False)
    try:
        yield
    finally:
        open_doors()


def why_python() -> str:
    """Why known calls run in Python; empty where they run in C."""
    if os.environ.get(_VARIABLE) == "0":
        return f"{_VARIABLE}=0 turns it off"
    try:
        made = _module()
    except ImportError as error:
        return f"it was not built when the library was installed ({error})"
    fields = len(short.Short._fields), len(short.ShortList._fields)
    if (getattr(made, "VERSION", 1), made.FIELDS, getattr(made, "FIELDS_OF_LISTS", 0)) != (_BUILT, *fields):
        return "it was built from another version of the library"
    if not all(isinstance(slot, MemberDescriptorType) for slot in _slots()):
        return "this torch keeps the parts of a DTensor otherwise"
    return ""


def uses_extension() -> bool:
    """Do known calls run in C, but for blocks that run them in Python?"""
    return short.reader.there


def _slots() -> tuple[Any, Any]:
    """Where a DTensor has its local tensor and its spec."""
    held = vars(TorchDTensor)
    return held.get("_local_tensor"), held.get("_spec")


def _module() -> Any:
    return importlib.import_module(_MODULE)


def _put(function: Any, localized: Any, below: Any) -> None:
    DTensor.__torch_function__ = function
    LocalizedDTensor.__torch_function__ = localized
    DTensor.__torch_dispatch__ = below  # type: ignore[method-assign]


def _boundary(made: ModuleType, call: Any, below_it: Any) -> Any:
    localized = call is call_localized
    return made.Boundary(
        call,
        compiler=compiler_names,
        harmless=boundary._harmless,
        reading=READING,
        own=boundary.OWN,
        state=boundary.state,
        below=without_subclasses,
        plain=torch.Tensor,
        made=boundary.judged,
        of_one_mesh=(DTensor, LocalizedDTensor) if localized else (),
        spec_of=TorchDTensor.__dict__["_spec"],
        of_lists=whole_functions.OF_LISTS,
        lookups=LOOKUPS if localized else frozenset(),
        looks=_LOOKS,
        ours=(DTensor, LocalizedDTensor),
        below_it=below_it,
        functions=whole_functions.functions,
        meet=whole_functions.meet,
        whole=whole_functions.whole,
        whole_lists=whole_functions.whole_lists,
        first=whole_functions.first,
        quiet=QUIET,
        forward=forward_names,
        gradients=torch.is_grad_enabled,
        of_any_number=any_number.functions,
        mixing=MIXING,
        localize=compute_view,
        nodes=one_node.NODES,
        node_calls=one_node.calls,
        packing=packing,
    )


def _block(made: ModuleType, entrance: Any) -> Any:
    return made.Block(
        spmd.at_once,
        compiler=compiler_names,
        function_modes=function_modes_on,
        simple=spmd.SIMPLE,
        ours=DTensor,
        boundary=entrance,
    )


def _dispatch(made: ModuleType) -> Any:
    local, spec = _slots()
    return made.Dispatch(
        dispatch,
        recipes=short.recipes,
        recipe=short.Short,
        copies=write_back.origins.data,
        modes=modes_on,
        inference=torch.is_inference_mode_enabled,
        scalars=_SCALARS,
        ordinary=DTensor,
        localized=LocalizedDTensor,
        new=DTensor.__new__,
        wrap=wrap,
        local=local,
        spec=spec,
        made_by={"requires_grad": False},
        lists=short.lists,
        list_ops=short.list_ops,
        tensor=torch.Tensor,
        helpers=boundary.helpers_allowed,
        raise_versions=increment_versions,
        watching=finished_forms.watching,
        held_outside=held_outside,
        function_modes=function_modes_on,
        ops_of_any_number=any_number.ops,
        on_forms=short.on_forms,
        with_forms=kept_form.with_forms,
    )
