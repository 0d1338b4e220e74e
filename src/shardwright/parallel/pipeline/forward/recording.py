"""Models that record what their layers return, beside what they hand on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from shardwright.errors import ParallelError

_RECORDERS = "transformers.utils.output_capturing"
_FLAGS = ("output_hidden_states", "output_attentions", "output_router_logits")


def refuse_recording(module: nn.Module, given: Mapping[str, Any]) -> None:
    """Raise ParallelError where a model of `transformers` is asked to return what single layers made.

    It collects that by hooks: each stage would have that of its own layers only, and a loss that adds it up
    (of routers) would be another one, silently.
    """
    configured = [child for child in module.modules() if "config" in child.__dict__]
    for flag in _FLAGS:
        asked = given.get(flag)
        where = "the arguments" if asked else ""
        for child in configured if asked is None else ():
            if getattr(child.__dict__["config"], flag, False):
                where = f"the configuration of {type(child).__name__}"
        if where:
            raise ParallelError(
                f"pipeline: {where} asks for {flag}, which a model collects from all its layers, and "
                f"each stage has some of them only\n  fix: {flag}=False, or return it from the layers"
            )


def hook_recorders(module: nn.Module) -> None:
    """Let models of `transformers` hook their layers now, and not when own code first asks for their states.

    What own code asks for, such as the states that an image's features are, a stage must have of all layers.
    """
    of: Any = sys.modules.get(_RECORDERS)
    for child in module.modules() if of is not None else ():
        hooked = any("_output_capturing_hooks_installed" in vars(m) for m in child.modules())
        if not hooked and of._CAN_RECORD_REGISTRY.get(child):
            of.maybe_install_capturing_hooks(child)


def record_elsewhere(part: nn.Module, stand_in: nn.Module) -> None:
    """What stands for a part is recorded as the part is; what modules inside of it return is unknown here."""
    for hook in _recorders(part):
        nn.Module.register_forward_hook(stand_in, hook)
    inside = [(m, hook) for m in part.modules() if m is not part for hook in _recorders(m)]

    def refuse(_module: nn.Module, _args: Any, _out: Any) -> None:
        of = sys.modules[_RECORDERS]._active_collector
        asked = of.get()
        if not asked:
            return
        found: dict[str, list[Any]] = {key: [] for key in asked}
        token = of.set(found)
        for module, hook in inside:
            hook(module, (None,), object())
        of.reset(token)
        for key, values in found.items():
            if values:
                raise ParallelError(
                    f"pipeline: the model's own code asks for {key} of {type(module).__name__}, which stands "
                    "inside of a layer that another stage holds\n  fix: return it from the layer"
                )

    if inside:
        nn.Module.register_forward_hook(stand_in, refuse)


def _recorders(module: nn.Module) -> Iterator[Callable[..., Any]]:
    return (hook for hook in module._forward_hooks.values() if hook.__module__ == _RECORDERS)
