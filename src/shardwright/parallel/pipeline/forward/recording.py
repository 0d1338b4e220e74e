"""Models that record what their layers return, beside what they hand on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwright.errors import ParallelError

_FLAGS = ("output_hidden_states", "output_attentions", "output_router_logits")


def refuse_recording(module: nn.Module, given: Mapping[str, Any]) -> None:
    """Raise ParallelError where a model of `transformers` is asked to return what single layers made.

    It collects that by hooks: each stage would have that of its own layers only, and a loss that adds it up
    (of routers) would be another one, silently.
    """
    for flag in _FLAGS:
        asked = given.get(flag)
        where = "the arguments" if asked else ""
        for child in module.modules() if asked is None else ():
            config = child.__dict__.get("config")
            if getattr(config, flag, False):
                where = f"the configuration of {type(child).__name__}"
        if where:
            raise ParallelError(
                f"pipeline: {where} asks for {flag}, which a model collects from all its layers, and "
                f"each stage has some of them only\n  fix: {flag}=False, or return it from the layers"
            )
