"""A call on a pending value that was finished before: on the finished form, which is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from shardwright.compat import increment_versions
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.rules.op import is_view
from shardwright.tensor import finished_forms
from shardwright.tensor.dispatch import derived
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.spec import Spec
from shardwright.tensor.views import write_back
from shardwright.tensor.wrap import CLASSES, held_outside

_Forms = list[tuple[DTensor, DTensor]]  # values, with what is read for them


class KeptForm:
    """Takes finished forms where they still hold, and runs the call on what is then given."""

    __slots__ = ("again",)

    def __init__(self, again: Callable[..., Any]) -> None:
        self.again = again

    def run(self, func: Op, args: Args, kwargs: Kwargs, tensors: Sequence[DTensor]) -> Any:
        """The same call on finished forms; what it writes, and what it is a view of, is the value itself."""
        if is_view(func):
            return self._view(func, args, kwargs, tensors)
        derived.finish_beside(func.name(), tensors)
        return self.again(func, *_exchanged(_forms_of(_asking(tensors), func, args, kwargs), args, kwargs))

    def _view(self, func: Op, args: Args, kwargs: Kwargs, tensors: Sequence[DTensor]) -> Any:
        """A view of the value itself; calls on it ask for the finished form too."""
        asking = _asking(tensors)
        held = [(x, spec) for x, spec in asking if finished_forms.holds(x) or derived.remembers(x)]
        for x, spec in asking:
            x._spec = spec.plain
        out = self.again(func, args, kwargs)
        for x, spec in held:
            x._spec = spec
        results = out if isinstance(out, list | tuple) else (out,)
        for made in results if held else ():
            if isinstance(made, CLASSES[0]) and finished_forms.may_keep(made):
                finished_forms.ask(made)
        return out


def with_forms(
    func: Op, args: Args, kwargs: Kwargs, tensors: Sequence[DTensor]
) -> tuple[tuple[Any, ...], Mapping[str, Any]] | None:
    """What a call of `short.on_forms` is given for what it reads; None: nothing was finished before."""
    asking = _asking(tensors)
    for _, spec in asking:
        if spec.form is None:
            derived.finish_beside(func.name(), tensors)
            asking = _asking(tensors)
            break
    values = asking or [(x, x._spec) for x in tensors if x._spec.pending]
    forms = _forms_of(values, func, args, kwargs)
    return _exchanged(forms, args, kwargs) if forms or asking else None


def _forms_of(asking: Iterable[tuple[DTensor, Spec]], func: Op, args: Args, kwargs: Kwargs) -> _Forms:
    """The finished forms of those of these values that the call only reads; one without asks no more."""
    own = write_back.written_by(func, args, kwargs) if func._schema.is_mutable else ()
    forms: _Forms = []
    for x, spec in asking:
        form = None if any(x is each for each in own) else finished_forms.known(x)
        if form is None:
            x._spec = spec.plain
        else:
            forms.append((x, form))
            finished_forms.taken(func, x, form)
    return forms


def _exchanged(forms: _Forms, args: Args, kwargs: Kwargs) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    given = list(args)
    for place, value in enumerate(given):
        if isinstance(value, torch.Tensor | list | tuple):
            given[place] = _with_form(value, forms)
    return tuple(given), {n: _with_form(value, forms) for n, value in kwargs.items()} if kwargs else kwargs


def _asking(tensors: Iterable[DTensor]) -> list[tuple[DTensor, Spec]]:
    """The operands of which a finished form is known, perhaps, with the specs that say so."""
    return [(x, x._spec) for x in tensors if x._spec.plain is not x._spec]


def _with_form(value: Any, forms: _Forms) -> Any:
    """The finished form of an operand, also in lists: a residual stream is read so at every layer."""
    for x, form in forms:
        if value is x:
            return form
    return [_with_form(each, forms) for each in value] if isinstance(value, list | tuple) else value


def counting_writes(route: Callable[..., Any], func: Op, args: Args, kwargs: Kwargs) -> Any:
    """An op that writes; forms of what it writes hold no longer."""
    written = write_back.written_by(func, args, kwargs)
    try:
        return route(func, args, kwargs)
    finally:
        finished_forms.count_writes(written)
        if held_outside or torch.compiler.is_compiling():  # a graph may take a local part of what it writes
            increment_versions(_local_memories(written))


def _local_memories(written: Sequence[DTensor]) -> list[torch.Tensor]:
    """Local tensors that count a write: what a program gave to `from_local` it may have saved for a backward.

    torch counts what is written above its dispatcher, and the local call runs below it. Nor does a local view
    share the count of its base there.
    """
    bases = [x._base for x in written if isinstance(x._base, DTensor)]
    return [x._local_tensor for x in (*written, *bases)]
