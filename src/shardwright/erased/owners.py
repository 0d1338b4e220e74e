"""Whose a piece of code, a class or an attribute of a tensor is: the user's, or a library's."""

from __future__ import annotations

import sys
from typing import Any

from shardwright.comm.record import of_library

STANDARD = sys.stdlib_module_names - {"__main__"}
_LIBRARIES = frozenset({"torch", "shardwright", "numpy", *STANDARD})
_TYPED = ("<stdin>", "<string>", "<ipython-input", "<python-input")
# Beside these, numpy and what stands in for a newer `typing`.
_HELPERS = ("/site-packages/numpy/", "/site-packages/typing_extensions.py")
# What this package and torch hang on a tensor.
_OF_LIBRARIES_ON_TENSORS = frozenset(
    {
        "_local_tensor", "_spec", "_derived", "_is_param", "_fsdp_orig_uid", "shared_by_stages",
        "names_in_stages", "in_hands",
    }
)  # fmt: skip

# What Python itself and `dataclasses` put into a class.
OF_PYTHON = frozenset(
    {
        *vars(object), "__dict__", "__weakref__", "__module__", "__slots__", "__annotations__",
        "__match_args__", "__dataclass_fields__", "__dataclass_params__", "__orig_bases__", "__parameters__",
        "__type_params__", "__abstractmethods__", "__static_attributes__", "__firstlineno__",
        "__annotate_func__", "__annotations_cache__",
    }
)  # fmt: skip


def is_of_a_library(module: str) -> bool:
    """Is a module of this name torch's, this package's, numpy's or the standard library's?"""
    return module.partition(".")[0] in _LIBRARIES


def module_of(cls: type) -> str:
    """Where a class is from; one of C may hold there how it tells that of its objects."""
    name: object = cls.__module__
    return name if isinstance(name, str) else "builtins"


def is_library(filename: str, globals_: dict[str, Any]) -> bool:
    """torch, this package, the standard library, or code without a file that they made."""
    if filename.startswith(_TYPED):
        module = str(globals_.get("__name__"))
        return is_of_a_library(module) or module.startswith("namedtuple_")
    return of_library(filename) or any(part in filename for part in _HELPERS)


def is_the_users(name: str) -> bool:
    """Is this attribute of a tensor one that the program has hung on it?"""
    return name not in _OF_LIBRARIES_ON_TENSORS
