"""Modules that stand in place of another and hold it, and what that puts into names."""

from __future__ import annotations

import re

from torch import nn

# torch.compile, and torch's wrapper of activation checkpointing.
OF_TORCH = ("_orig_mod", "_checkpoint_wrapped_module")
# Layers of adapters, as PEFT makes them: the layer that is adapted, and copies of one that is trained whole.
_OF_ADAPTERS = (BASE := "base_layer", "original_module", r"modules_to_save\.[^.]+")

_ANYWHERE = re.compile(rf"(?:^|\.)(?:{'|'.join((*OF_TORCH, *_OF_ADAPTERS))})(?=\.|$)")
_AT_THE_END = re.compile(rf"(?:{_ANYWHERE.pattern})+$")


def plain_path(path: str) -> str:
    """A path in a module tree without what wrappers put into it."""
    return _ANYWHERE.sub("", path).removeprefix(".")


def stands_for(path: str) -> str:
    """The path of the outermost wrapper of a module; of a module that is not wrapped its own."""
    return _AT_THE_END.sub("", path)


def unwrapped(module: nn.Module) -> nn.Module:
    """What torch's wrappers hold, themselves wrapped or not."""
    while (inner := next((module._modules[n] for n in OF_TORCH if n in module._modules), None)) is not None:
        module = inner
    return module
