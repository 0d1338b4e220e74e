"""The plan that a model brings: `_tp_plan` of `transformers`, of the model itself or of models inside it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from shardwright.errors import ParallelError

_SHOWN = 8


def brought_plan(module: nn.Module) -> dict[str, str]:
    """The words of the plans that the module, or else the modules inside it, bring: `{pattern: word}`.

    Raises: ParallelError: none brings one; the text names the matrices that a plan of one's own may name.
    """
    found = dict(_plans("", module))
    if not found:
        raise ParallelError(
            f"parallelize_tensor: {type(module).__name__} brings no plan for 'auto' (transformers has "
            f"none for this architecture). Write one, a word per matrix: {_suggestion(module)}"
        )
    return found


def _plans(prefix: str, module: nn.Module) -> Iterator[tuple[str, str]]:
    """Of the outermost modules that have one, patterns from the top of the tree."""
    plan: Any = _own(module, "_tp_plan") or _own(module, "tp_plan")
    if isinstance(plan, Mapping) and plan:
        for pattern, word in plan.items():
            yield prefix + pattern, word
        return
    for name, child in module.named_children():
        yield from _plans(f"{prefix}{name}.", child)


def _own(module: nn.Module, name: str) -> Any:
    """An attribute that is not handed on from a module inside, as wrappers do: its names begin there."""
    is_its_own = name in vars(module) or hasattr(type(module), name)
    return getattr(module, name, None) if is_its_own else None


def _suggestion(module: nn.Module) -> str:
    """The matrices of the module by pattern, with a place for a word."""
    patterns = dict.fromkeys(
        re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
        for path, owner in module.named_modules()
        if any(p is not None and p.ndim > 1 for p in owner._parameters.values()) and path
    )
    shown = ", ".join(f"{pattern!r}: ..." for pattern in list(patterns)[:_SHOWN])
    more = ", ..." if len(patterns) > _SHOWN else ""
    return (
        f"{{{shown}{more}}} with 'colwise' for what enters heads or a wide space (query, key, value, up, "
        "gate), 'rowwise' for what leaves it, 'embedding_rowwise' for the embedding, 'colwise_gather_output' "
        "for a head or for matrices fused in one"
    )
