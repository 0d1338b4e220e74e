"""Views of its arguments that a graph returns: torch is told of them, and takes them anew of the argument.

So it does with plain tensors. Of a subclass it sees only whether two objects share a storage, and each of our
wrappers has its own: such a result was what the graph had computed, a copy where it writes the argument.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._C import _functionalization


def share_storage(view: Tensor, base: Tensor) -> None:
    """Have torch see the storage of one wrapper in another, whose sizes stay."""
    torch._functionalize_unsafe_set(view, base)


def is_written(x: Tensor) -> bool:
    """Was what stands for an argument written, in the function that was traced?"""
    found: bool = sys.modules[f"{_TORCHS}._aot_autograd.functional_utils"].has_data_mutation(x)
    return found


def views_of(x: Any) -> Any:
    """How what stands for a tensor is seen in the memory that it is a view of; None where symbols decide."""
    views = sys.modules[f"{_TORCHS}._aot_autograd.functional_utils"].ViewMetaSequence(x).sequence
    return None if any(view.has_symbolic_inputs for view in views) else views


def seen_again(memory: Tensor, views: Any) -> Tensor:
    """The same views of a tensor with values."""
    seen: Tensor = _functionalization.apply_view_meta_sequence(memory, views) if views else memory
    return seen


@dataclass(frozen=True, slots=True)
class Watch:
    """Who is asked of functions that are traced.

    concerns: is it asked of one with these arguments? recording: entered while such a one is traced.
    found: of its arguments and results: what is known of a result, by its place.
    """

    concerns: Callable[[Sequence[Any]], bool]
    recording: Callable[[], AbstractContextManager[None]]
    found: Callable[[Sequence[Any], Sequence[Any]], Mapping[int, Any]]


def watch_views(watch: Watch) -> None:
    """Have torch's analysis of what a graph writes and returns ask `watch`. Dynamo is imported."""
    analysis = sys.modules[f"{_TORCHS}._aot_autograd.collect_metadata_analysis"]
    collects = _tell_of_views(getattr(analysis, _ANALYSIS), watch)
    for module in (analysis, sys.modules.get(f"{_TORCHS}.aot_autograd")):  # which takes the name from there
        if module is not None:
            setattr(module, _ANALYSIS, collects)
    _take_anew(sys.modules[f"{_TORCHS}._aot_autograd.runtime_wrappers"])


_TORCHS = "torch._functorch"
_ANALYSIS = "run_functionalized_fw_and_collect_metadata"


def _tell_of_views(collect: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    @wraps(collect)
    def collects(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        known: dict[int, Any] = {}

        @wraps(function)
        def runs(*args: Any) -> Any:
            if not watch.concerns(args):
                return function(*args)
            with watch.recording():
                results = function(*args)
            known.update(watch.found(args, results))
            return results

        def finds(*args: Any) -> Any:
            with _gradients_like_arguments() if watch.concerns(args) else nullcontext():
                found = inner(*args)
            for place, view in known.items():
                found.output_info[place] = replace(found.output_info[place], view_meta_sequence=view)
            return found

        inner = collect(runs, **how)
        return wraps(inner)(finds)

    return collects


def _gradients_like_arguments() -> AbstractContextManager[None]:
    """Of what a graph writes torch takes the gradient to be plain zeros, as if nothing read it later."""
    with_views: AbstractContextManager[None] = sys.modules[f"{_TORCHS}.config"].patch(
        disable_guess_zero_tangent_for_mutated_input_subclass=True
    )
    return with_views


def _take_anew(wrappers: Any) -> None:
    generate = wrappers.gen_alias_from_base

    @wraps(generate)
    def takes(base: Tensor, result: Tensor, wants_gradient: bool, view: Any = None, **how: Any) -> Tensor:
        if not hasattr(view, "of"):
            made: Tensor = generate(base, result, wants_gradient, view, **how)
            return made
        made = view.of(base)
        if base.requires_grad and not wants_gradient:
            return made.detach()
        return made if base.requires_grad or not wants_gradient else made.requires_grad_()

    wrappers.gen_alias_from_base = takes


def parts_of_arguments(metadata: Any) -> dict[int, Any]:
    """The results, by place, that get the memory of an argument once the graph has written it."""
    known = ((place, info.view_meta_sequence) for place, info in enumerate(metadata.output_info))
    return {place: view for place, view in known if hasattr(view, "settle")}
