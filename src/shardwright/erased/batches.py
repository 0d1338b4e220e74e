"""Objects that hold a batch: a dataclass, a `UserDict`, a namespace, an object of the user's own class.

They are new ones at each call, as the lists and dicts are that hold a batch elsewhere, and count as those do:
by their class, the names of their attributes and what these are.
"""

from __future__ import annotations

import abc
import argparse
import enum
import types
from collections import UserDict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwright.erased.owners import is_of_a_library, module_of
from shardwright.erased.walk import SCALARS, slots_of
from shardwright.remember import remembered

_OF_PYTHON = (UserDict, types.SimpleNamespace, argparse.Namespace)
_BASES = frozenset({"abc", "argparse", "collections.abc", "typing"})
_LEAVES = (torch.Tensor, *SCALARS, enum.Enum)
_CONTAINERS = (dict, list, tuple, deque)
_LONGEST = 1000
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def state_of(x: Any) -> dict[str, Any] | None:
    """Its attributes by name; None of an object that may be more than those, or that holds no batch."""
    cls: Any = type(x)
    if not _has_attributes_alone(cls):
        return None
    state = {**getattr(x, "__dict__", {}), **{n: getattr(x, n) for n in slots_of(cls) if hasattr(x, n)}}
    return state if all(map(_may_be_in_a_batch, state.values())) else None


def is_a_batch(leaves: Sequence[Any]) -> bool:
    """Are these tensors that were loaded or computed, and numbers? Not what a model or an optimizer has."""
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    if not tensors or any(isinstance(x, torch.nn.Parameter) or _hooked(x) for x in tensors):
        return False
    return all(isinstance(x, _LEAVES) for x in leaves)


def _may_be_in_a_batch(x: Any) -> bool:
    """Asked at each call of whatever its arguments hold: not of each thing in a long list."""
    if isinstance(x, _CONTAINERS):
        return len(x) <= _LONGEST
    cls: Any = type(x)
    return isinstance(x, _LEAVES) or _has_attributes_alone(cls)


def object_of(cls: type, state: Mapping[str, Any]) -> Any:
    """Another object of the class, with these attributes."""
    base: Any = types.SimpleNamespace if issubclass(cls, types.SimpleNamespace) else object
    made = base.__new__(cls)
    fill(made, state)
    return made


def fill(x: Any, state: Mapping[str, Any]) -> None:
    """Give an object these attributes, and no others."""
    slots = [name for name in slots_of(type(x)) if hasattr(x, name)]
    for name in slots:
        object.__delattr__(x, name)
    fields = getattr(x, "__dict__", {})
    fields.clear()
    for name, value in state.items():
        if name in slots_of(type(x)):
            object.__setattr__(x, name, value)
        else:
            fields[name] = value


def _hooked(x: torch.Tensor) -> bool:
    return x.requires_grad and x.is_leaf and any(getattr(x, name, None) for name in _HOOKS)


@remembered(256)
def _has_attributes_alone(cls: Any) -> bool:
    """A class of Python, whose objects are nothing beside what they hold: no tensor, number, member, lock."""
    own = [base for base in cls.__mro__[:-1] if base not in _OF_PYTHON]
    if type(cls) not in (type, abc.ABCMeta) or hasattr(cls, "__del__"):
        return False
    return cls is not object and all(map(_is_plain, own))


def _is_plain(base: type) -> bool:
    module = module_of(base)
    if is_of_a_library(module):
        return module in _BASES or module.startswith("torch.distributions.")
    return "__slots__" in vars(base) or any("__dict__" in vars(each) for each in base.__mro__[:-1])
