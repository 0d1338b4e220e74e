"""Recording: a call runs as it is, and every operator on local tensors below it goes on a tape.

The mode stands above the DTensor's dispatch and lets it pass; what dispatch calls on local tensors, and what
a backward calls, comes by here. The call really runs: a recording costs one call more slowly, sends what the
call sends, and nothing of it is a rehearsal.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.comm.record import Recorder as Events
from shardwright.comm.record import source_line
from shardwright.comm.told import told
from shardwright.compat import FakeTensorMode, TorchDispatchMode, modes_stack
from shardwright.erased import numbers
from shardwright.erased.catching import Catching
from shardwright.erased.operands import FUNCTIONAL, Kind, flat, mapped, tensors_among, written_among
from shardwright.erased.rates import OPTIMIZERS, Following
from shardwright.erased.refuse import Refusal
from shardwright.erased.tape import Line, Ref, Tape, kept_state, put_back
from shardwright.erased.walk import local_of
from shardwright.erased.watch import Pause, kernel
from shardwright.tensor.plain import boundary
from shardwright.tensor.plain.spmd import spmd
from shardwright.tensor.plain.terms_of_ranks import SumWithTerms

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from shardwright.erased.rates import Rate

aten = torch.ops.aten
# Between an operator and whoever asked for it.
_BETWEEN = (
    "torch/_dynamo/eval_frame.py", "torch/_compile.py", "torch/utils/_pytree.py", "torch/utils/_device.py",
)  # fmt: skip
# The same of this package. Not their files: what a block compares, it reads itself.
_DOORS = (
    spmd.__torch_function__.__code__,
    boundary.call.__code__,
    SumWithTerms.__torch_function__.__func__.__code__,  # type: ignore[attr-defined]
)
_HERE = "shardwright/erased"
_SCALER = "torch/amp/grad_scaler.py"  # reads whether all gradients are finite
_READS = frozenset({aten._local_scalar_dense.default, aten.item.default})
_REPLACES_MEMORY = frozenset({"aten::set_", "aten::resize_", "aten::resize_as_", "aten::_resize_output_"})
_ASKS_FOR_GRADIENTS = frozenset({"aten::mkldnn_rnn_layer"})  # what its backward needs is None without
DATA = "aten::lift_fresh"
_FROM_NOWHERE = "it takes a tensor that is neither given nor found in the program"


class Recording(TorchDispatchMode):
    """One call on its way to a tape. refusals: what it did that a replay cannot do.

    truths: by the number of a value that the host has read, what it said, and the lines that make it.
    decides: has the host read a truth of what the call made? A replay that makes another one is undone.
    asks: may such values be asked for? Not what a backward reads outside, which comes later.

    rates: numbers of optimizers that are followed.
    give_up_if: asked at each operator whether there is no use in going on. gave_up: it said so.
    """

    give_up_if: Callable[[], bool] | None = None
    gave_up = False
    asks = True
    decides = False

    def __init__(self, rates: Sequence[Rate] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = Tape()
        self.refusals: list[Refusal] = []
        self.events = Events()
        self.catching = Catching(self.refuse)
        self.truths: dict[int, tuple[bool | float, list[Line]]] = {}
        self._kinds: dict[int, Kind] = {}  # by the `id` of an operator, which lives as long as torch
        self._numbers = 0
        self._followed: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None
        self.following = Following(rates, self.refuse)
        self.tape.names = self.following.names

    # -- what the recording is told -------------------------------------------------------------------

    def refuse(self, what: str, why: str, where: str | None = None) -> None:
        """Note what cannot be replayed; the call goes on as it is."""
        self.refusals.append(Refusal(what, why, source_line() if where is None else where))

    def values_read(self, x: torch.Tensor, what: str) -> None:
        """The host looks at the values of a tensor beside the dispatcher."""
        local = local_of(x)
        if not self.tape.varies(local):
            return
        if _is_told():
            self.tape.expect(local)
        else:
            self.refuse(what, "the host reads values of a tensor")

    def state_of_generator(self, state: torch.Tensor, *, kept: bool) -> None:
        """That of the CPU was kept, or is put back."""
        number = self.tape.enter(state) if kept else self.tape.find(state)
        if number is None:
            self.refuse("Generator.set_state", "the state is neither given nor made by the program")
        elif kept:
            self.tape.lines.append(Line(kept_state, (), {}, (number,), False, source_line()))
        else:
            self.tape.lines.append(Line(put_back, (Ref(number),), {}, (), False, source_line()))

    # -- one operator ---------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.gave_up or (self.give_up_if is not None and self.give_up_if()):
            self.gave_up = True
            return _unrecorded(func, args, kwargs or {})
        with Pause() as pause:
            return self._dispatched(pause, func, types, args, kwargs or {})

    def _dispatched(
        self, pause: Pause, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        kwargs = self.following.with_handed(func, kwargs)
        if any(issubclass(cls, TorchDTensor) for cls in types):
            return self._on_dtensors(pause, func, args, kwargs)
        tensors = tensors_among(flat(args, kwargs))
        if without_data(tensors):
            return pause.watched(func, args, kwargs)
        if func in _READS:
            return self._read(args[0])
        return self._on_locals(func, args, kwargs, tensors)

    def _on_dtensors(self, pause: Pause, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Left to the DTensor's own dispatch, which gets plain numbers for those that are followed."""
        operands = flat(args, kwargs)
        tensors = tensors_among(operands)
        for x in tensors:
            if not isinstance(x, TorchDTensor) and self.tape.find(x) is None:
                self.refuse(str(func), _FROM_NOWHERE)
        kind = self._kind_of(func)
        if kind.may_raise(tensors):
            self.catching.ran(kind.namespace)  # what dispatch asks of values on the host, no operator shows
        if not any(type(value) is torch.SymFloat and numbers.is_followed(value) for value in operands):
            return NotImplemented
        outer, self._followed = self._followed, (func, args, kwargs)
        try:
            with self:
                return pause.watched(func, mapped(numbers.plain, args), mapped(numbers.plain, kwargs))
        finally:
            self._followed = outer

    def _read(self, x: torch.Tensor) -> Any:
        """The host asks for a number."""
        value = x.item()
        number = self.tape.find(x)
        if number is None or not self.tape.values[number].varies:
            return value
        first = _first_file()
        if isinstance(value, float) and first.startswith(OPTIMIZERS):
            name = f"n{self._numbers}"
            self._numbers += 1
            self.tape.lines.append(Line(torch.Tensor.item, (Ref(number),), {}, (), False, "", number=name))
            return numbers.followed(value, name, lambda why: self.refuse("a step count", why))
        if not (self.asks and (isinstance(value, bool) or first.endswith(_SCALER))):
            self.refuse("item()", "the host reads a value; what it does with it is not known")
            return value
        question = self.tape.question(number)
        if question is None:
            self.decides = True
            self.tape.expect(x)
        else:
            self.truths[number] = value, question
        return value

    def _on_locals(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        line_args, line_kwargs = self._operands(func, args, kwargs)
        try:
            out = kernel(func, mapped(numbers.plain, args), mapped(numbers.plain, kwargs))
        except Exception:  # whoever catches it takes a branch: by values, or by sizes and strides
            if self._kind_of(func).may_raise(tensors):
                self.refuse(str(func), "it raised, and the program may go on otherwise where it does not")
            raise
        results = out if isinstance(out, list | tuple) else (out,)
        if without_data([x for x in results if isinstance(x, torch.Tensor)]):
            return out
        kind = self._kind_of(func)
        varies = kind.draws or kind.namespace == FUNCTIONAL or any(self.tape.varies(x) for x in tensors)
        self._refuse_op(kind, args, kwargs, results, varies)
        if varies and kind.may_raise(tensors):
            self.catching.ran(kind.namespace)
        if kind.name == DATA:  # a constant of the program, which it may write: a fresh one each time
            self.tape.forget(out)
        outs = tuple(self._result(x, varies) for x in results)
        several = isinstance(out, list | tuple)
        self.tape.lines.append(
            Line(
                func,
                line_args,
                line_kwargs,
                outs,
                several,
                source_line(),
                sent=self._sent(kind),
                places=varies and kind.takes_places(tensors),
            )
        )
        if varies and kind.mutable:
            self._written(func, args, kwargs)
        return out

    def _operands(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self._followed is not None:
            args, kwargs = self._with_followed(func, args, kwargs)

        def line_of(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return self._known(func, value)
            return numbers.text_of(value) if numbers.is_followed(value) else value

        return mapped(line_of, args), mapped(line_of, kwargs)

    def _with_followed(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The numbers that were followed into an op on DTensors, at their places in the local op."""
        assert self._followed is not None  # noqa: S101 - the caller asked
        outer, given, named = self._followed
        if outer is not func or len(given) != len(args):
            if func._schema.name == DATA or any(isinstance(value, float) for value in flat(args, kwargs)):
                self.refuse(str(outer), "a number that is followed into it is used by another operator")
            return args, kwargs  # what stands for it where a rank holds nothing takes none
        placed = tuple(_placed(a, g) for a, g in zip(args, given, strict=True))
        return placed, {name: _placed(value, named.get(name)) for name, value in kwargs.items()}

    def _known(self, func: Any, x: torch.Tensor) -> Ref:
        number = self.tape.find(x)
        if number is None:
            number = self.tape.enter(x, "constant", varies=False)
            if func._schema.name == DATA:
                self.tape.copied(number)
                if self.tape.is_made_of_others(x):
                    self.refuse("a tensor of a list of tensors", "the host reads their values")
            elif not _of_a_mesh():
                self.refuse(str(func), _FROM_NOWHERE)
        return Ref(number)

    def _result(self, x: Any, varies: bool) -> int | None:
        if not isinstance(x, torch.Tensor):
            return None
        return None if self.tape.knows(x) else self.tape.enter(x, varies=varies)

    def _written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What is written (`out=` too) varies as what was written into it does."""
        for x in tensors_among(flat(written_among(func, args, kwargs))):
            number = self.tape.find(x)
            if number is not None:
                self._vary(func, number)

    def _vary(self, func: Any, number: int) -> None:
        self.tape.vary(number)
        if self.tape.values[number].source == "constant":
            self.refuse(str(func), "it writes a tensor that is neither given nor found in the program")

    def _refuse_op(self, kind: Kind, args: Any, kwargs: Any, results: Any, varies: bool) -> None:
        name = kind.name
        if name in _REPLACES_MEMORY:
            self.refuse(name, "it gives a tensor other memory")
        elif name in _ASKS_FOR_GRADIENTS and torch.is_grad_enabled():
            self.refuse(name, "its kernel does otherwise without gradients, and a replay records none")
        elif kind.namespace == "c10d":
            self.refuse(name, "it talks to a process group beside the functional collectives")
        elif varies and kind.looked_at and not _by_places(name, args):
            self.refuse(name, "its result depends on values")
        elif any(isinstance(x, torch.Tensor) and x.is_nested for x in results):
            self.refuse(name, "it gives a nested tensor, which has no sizes")
        elif torch.Generator in [type(value) for value in flat(args, kwargs)]:
            self.refuse(name, "it draws from a generator of its own")
        elif varies and any(isinstance(x, bool | int | float) for x in results):
            self.refuse(name, "the host gets a number")

    def _kind_of(self, func: Any) -> Kind:
        if id(func) not in self._kinds:
            self._kinds[id(func)] = Kind.of(func)
        return self._kinds[id(func)]

    def _sent(self, kind: Kind) -> tuple[Any, ...]:
        """The collective that the library is about: it noted it just before it called."""
        if kind.namespace != FUNCTIONAL or kind.name.endswith("wait_tensor"):
            return ()
        event = self.events.collectives[-1]
        return event.op, event.axis, event.bytes_sent, event.reason


def _unrecorded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What it gives; a number that an optimizer has read before may be among its operands."""
    if any(numbers.is_followed(value) for value in flat(args, kwargs)):
        args, kwargs = mapped(numbers.plain, args), mapped(numbers.plain, kwargs)
    return func(*args, **kwargs)


def _placed(value: Any, given: Any) -> Any:
    if isinstance(given, list | tuple) and isinstance(value, list | tuple) and len(given) == len(value):
        return [_placed(v, g) for v, g in zip(value, given, strict=True)]
    return given if numbers.is_followed(given) else value


def _by_places(name: str, args: Any) -> bool:
    """Does it index by whole numbers? Masks alone make results of as many elements as they say."""
    masks = (torch.bool, torch.uint8)
    return name == "aten::index" and not any(x is not None and x.dtype in masks for x in args[1])


def without_data(tensors: list[torch.Tensor]) -> bool:
    """Are they of a rehearsal, which is no part of the program?"""
    if any(x.is_meta for x in tensors):
        return True
    return any(isinstance(mode, FakeTensorMode) for mode in modes_stack())


def _is_told() -> bool:
    """Do ranks read what they told each other about their programs? Inside of a block, perhaps."""
    frame = _first_frame()
    return frame is not None and frame.f_code is told.__code__


def _of_a_mesh() -> bool:
    """Does a mesh read the numbers of its ranks? They are what it is made of."""
    return _first_file().endswith(("distributed/device_mesh.py", "distributed/_mesh_layout.py"))


def _first_file() -> str:
    frame = _first_frame()
    return frame.f_code.co_filename if frame is not None else ""


def _first_frame() -> FrameType | None:
    """Of whoever asked, below those that only hand on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code, name = frame.f_code, frame.f_code.co_filename
        door = code is _DOORS[0] or code is _DOORS[1]  # a code computes its hash anew each time
        if not (door or f"{_HERE}/" in name or any(part in name for part in _BETWEEN)):
            break
        frame = frame.f_back
    return frame
