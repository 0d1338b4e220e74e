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

from shardwright.compat import compiler_names, modes_on, without_subclasses
from shardwright.tensor.dispatch import short
from shardwright.tensor.dispatch.call import dispatch
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.localized import LocalizedDTensor, call_localized
from shardwright.tensor.plain import boundary
from shardwright.tensor.plain.host_reads import READING
from shardwright.tensor.views import write_back
from shardwright.tensor.wrap import wrap

_VARIABLE = "SHARDWRIGHT_EXTENSION"
_MODULE = "shardwright.tensor.extension.known_call"
_BUILT = 2  # `VERSION` of the C file
# Classes whose values `call._collect` tells apart by class and value.
_SCALARS = frozenset(
    {bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format}
)


def open_doors(*, extension: bool = True) -> str:
    """Put in the doors of C where they can be had (and `extension`), else those of Python.

    Returns: why those of C cannot be had; empty where they can.
    """
    why = why_python()
    if why or not extension:
        _put(classmethod(boundary.call), classmethod(call_localized), classmethod(dispatch))
    else:
        made = _module()
        both = _boundary(made, boundary.call), _boundary(made, call_localized, (DTensor, LocalizedDTensor))
        _put(*both, _dispatch(made))
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
    if (getattr(made, "VERSION", 1), made.FIELDS) != (_BUILT, len(short.Short._fields)):
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


def _boundary(made: ModuleType, call: Any, of_one_mesh: tuple[type, ...] = ()) -> Any:
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
        of_one_mesh=of_one_mesh,
        spec_of=TorchDTensor.__dict__["_spec"],
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
    )
