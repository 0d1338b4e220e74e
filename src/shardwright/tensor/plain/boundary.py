"""Where the user's program hands tensors to torch: the one place that judges plain tensors beside DTensors.

What the user passes is judged here, under the name that the user called. What torch makes on the way
(the causal mask of an attention, a window, the grid of an interpolation) is the same on every rank, because
the program is; further down it counts as replicated.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.nn.functional import cross_entropy

from shardwright.compat import (
    DisableTorchFunctionSubclass,
    FakeTensor,
    FunctionalTensor,
    current_graph_task_id,
    get_unwrapped,
    implicitly_replicated,
    in_loss_parallel,
    is_functorch_wrapped_tensor,
)
from shardwright.compat.dynamo import constant_in_graphs
from shardwright.errors import RuleError
from shardwright.placement.base import Replicate
from shardwright.remember import memo
from shardwright.rules.call import Args
from shardwright.tensor.autograd import Adopt, apply
from shardwright.tensor.dispatch.ways.out import call_with_out, fills_itself
from shardwright.tensor.plain.host_reads import READING, WITH_LENGTHS, is_lengths, with_host_values
from shardwright.tensor.plain.mixed_lists import in_turn, positions_apart
from shardwright.tensor.plain.refuse import plain_among, tensors_in
from shardwright.tensor.plain.terms_of_ranks import marked_as, refuse_terms
from shardwright.tensor.wrap import CLASSES, as_replicated


class _State(threading.local):
    def __init__(self) -> None:  # no defaults of the class: Dynamo guards that an object has none of its own
        self.functions = self.blocks = self.rank_local = 0


state = _State()

# Functions that take a loss and parameters side by side, and must see the parameters themselves.
AUTOGRAD = frozenset({torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward})


# Functions that ask for sizes only: it does not matter where the elements of their arguments live.
OF_SIZES = frozenset({torch.is_same_size, torch.Tensor.is_same_size})


def _same_size(_func: Any, args: Args, kwargs: dict[str, Any]) -> bool:
    first, second = (*args, *kwargs.values())
    return bool(first.shape == second.shape)


def _cut_classes(args: Args, kwargs: dict[str, Any]) -> list[tuple[Any, bool]]:
    """Of a loss inside torch's `loss_parallel`: the placements of its logits, and which cut the classes."""
    logits = args[0] if args else kwargs.get("input")
    if not in_loss_parallel() or not isinstance(logits, TorchDTensor):
        return []
    classes = min(1, logits.dim() - 1)
    return [(p, getattr(p, "dim", None) == classes) for p in logits.placements]


def _is_parallel_loss(func: Any, args: Args, kwargs: dict[str, Any]) -> bool:
    """Is it a loss inside torch's `loss_parallel`, where plain labels and weights are the same on every rank?

    Not beside rows that are cut: labels of those may as well be this rank's own.
    """
    cuts = _cut_classes(args, kwargs) if func in LOSSES else []
    labels = args[1] if len(args) > 1 else kwargs.get("target")
    has_rows = isinstance(labels, TorchDTensor) or all(cut or p.is_replicate() for p, cut in cuts)
    return bool(cuts) and has_rows


def _loss(func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
    """Inside `loss_parallel` it is replicated over the axes that cut the classes, as torch promises."""
    loss, cuts = func(*args, **kwargs), _cut_classes(args, kwargs)
    if not cuts:
        return loss
    pairs = zip(loss.placements, cuts, strict=True)
    return loss.redistribute(placements=[Replicate() if cut else p for p, (_, cut) in pairs])


LOSSES = frozenset({cross_entropy})
Own = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
# Functions that the library does in its own way above autograd: `(func, args, kwargs) -> result`. Those that
# need what stands above this module are put in by `tensor.install`.
OWN: dict[Any, Own] = dict.fromkeys(OF_SIZES, _same_size) | dict.fromkeys(LOSSES, _loss)
OF_GRAPHS: dict[Any, Own] = dict.fromkeys(LOSSES, _loss)  # of these, what holds while a graph is made too


def helpers_allowed(within: int = 0) -> bool:
    """Do plain tensors that an op meets count as replicated here?

    Inside a function of torch (its own helpers), inside `spmd` or torch's `implicit_replication`, in the
    engine's backward formulas and while a graph is traced.

    Args: within: how many functions of torch the asker is known to be in; one of `OWN` is in itself.
    """
    return bool(
        state.functions > within
        or state.blocks
        or current_graph_task_id() != -1
        or torch.compiler.is_compiling()
        or implicitly_replicated()
    )


@contextmanager
def helpers() -> Iterator[None]:
    """Within the block plain tensors count as replicated: torch's own formulas make them."""
    state.functions += 1
    try:
        yield
    finally:
        state.functions -= 1


@contextmanager
def rank_local() -> Iterator[None]:
    """Within the block plain tensors are this rank's own, inside `spmd` and where a backward recomputes too.

    For a part of a program on distributed tensors that computes on local ones, by hand, and gives back what
    it made with a layout. Parameters that compute locally may stand beside them, other DTensors not.
    """
    state.rank_local += 1
    try:
        yield
    finally:
        state.rank_local -= 1


def call(
    cls: type,  # noqa: ARG001 - the signature is torch's
    func: Any,
    types: Any,  # noqa: ARG001
    args: Args = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Run a function of torch whose arguments hold a DTensor: it is `DTensor.__torch_function__`.

    Raises: RuleError: a plain tensor of more than one element among the arguments; it names the ways out.
    """
    kwargs = {} if kwargs is None else kwargs
    if torch.compiler.is_compiling():
        _judge_in_a_graph(func, args, kwargs)
        if torch.is_grad_enabled() and _has_plain_graph(args, kwargs) and not leaves_alone(func):
            args, kwargs = _taken_as_replicated(func, args, kwargs, _wants_gradient)
        with DisableTorchFunctionSubclass():
            own = OF_GRAPHS.get(func)
            out = func(*args, **kwargs) if own is None else own(func, args, kwargs)
            return judged(func, args, kwargs, out) if type(out) in _PLAIN_IN_GRAPHS else out
    depth, held = state.functions, None
    given = (*args, *kwargs.values()) if kwargs else args
    if state.rank_local:
        pass
    elif not _harmless.issuperset(map(type, given)) and (not depth or _recomputes()) and _has_foreign(given):
        args, kwargs = _adopted(func, args, kwargs)
        alike = _recomputes() or implicitly_replicated() or _is_parallel_loss(func, args, kwargs)
        if alike and not leaves_alone(func):
            args, kwargs = _taken_as_replicated(func, args, kwargs)
        elif not state.blocks:
            apart = positions_apart(func, args, kwargs)
            if apart is not None:
                return in_turn(func, args, kwargs, apart)
            _refuse_plain(func, args, kwargs)
            if torch.is_grad_enabled() and not leaves_alone(func):
                held = refuse_terms(func, args, kwargs)
                args, kwargs = _taken_as_replicated(func, args, kwargs, _wants_gradient)
    if func in READING:
        args, kwargs = with_host_values(func, args, kwargs)
    state.functions = depth + 1
    try:
        with DisableTorchFunctionSubclass():
            if kwargs and kwargs.get("out") is not None and not fills_itself(func):
                return call_with_out(func, args, kwargs)
            own = OWN.get(func)
            out = func(*args, **kwargs) if own is None else own(func, args, kwargs)
    finally:
        state.functions = depth
    if held is not None:
        marked_as(out, held)
    return out if out.__class__ is not torch.Tensor else judged(func, args, kwargs, out)


# The second stands for a plain tensor where a graph is taken apart.
_PLAIN_IN_GRAPHS = frozenset({FakeTensor, FunctionalTensor, torch.Tensor})


def _judge_in_a_graph(func: Any, args: Args, kwargs: dict[str, Any]) -> None:
    """Refuse what a call that is not compiled refuses, where Dynamo reads the program's own calls.

    Later, as the graph is taken apart, torch's own helpers are met here too.
    """
    if state.blocks or state.rank_local or not any(map(_is_read_by_dynamo, (*args, *kwargs.values()))):
        return
    alike = implicitly_replicated() or _is_parallel_loss(func, args, kwargs)
    if not alike and positions_apart(func, args, kwargs) is None:
        _refuse_plain(func, args, kwargs)


def _has_plain_graph(args: Args, kwargs: dict[str, Any]) -> bool:
    """Is one of a graph of plain tensors, where what Dynamo has read is taken apart?"""
    if state.blocks or state.rank_local:
        return False
    plain = (x for x in tensors_in((*args, *kwargs.values())) if not isinstance(x, TorchDTensor))
    return any(_wants_gradient(x) and type(x) is not FakeTensor for x in plain)


def _is_read_by_dynamo(value: Any) -> bool:
    """Is it a plain tensor, or a list with one, of those without data that Dynamo runs a call on?"""
    if isinstance(value, list | tuple):
        return any(map(_is_read_by_dynamo, value))
    return type(value) is FakeTensor


def judged(func: Any, args: Args, kwargs: dict[str, Any] | None, out: torch.Tensor) -> Any:
    """A plain tensor that a function of torch gave: as it is where a transform of `torch.func` wraps it."""
    return out if is_functorch_wrapped_tensor(out) else _made_by_torch(func, args, kwargs or {}, out)


def _recomputes() -> bool:
    """Does a backward run a forward again? Its plain tensors counted as replicated when it ran inside `spmd`.

    The block may be over by now, and what requires a gradient must get it here as it did there. All that is
    recomputed stands inside a function of torch where the backward begins at a DTensor.
    """
    return current_graph_task_id() != -1 and torch.is_grad_enabled()


# Functions whose result is plain because the user asks for it.
_ASK_FOR_PLAIN = frozenset({"__get__", "as_subclass"})


def _made_by_torch(func: Any, args: Args, kwargs: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
    """A plain tensor that torch made of none of its operands' data (the rank of a matrix without elements).

    The same on every rank, so the result is a DTensor as it is for other operands. One that was given and
    written into stays what it is.
    """
    given = list(tensors_in((*args, *kwargs.values())))
    ours = next((value for value in given if isinstance(value, TorchDTensor)), None)
    if ours is None or getattr(func, "__name__", "") in _ASK_FOR_PLAIN or any(out is v for v in given):
        return out
    if out.grad_fn is not None:
        raise RuleError(_IN_MEMORY_OF_ITS_OWN.format(getattr(func, "__name__", str(func))))
    return as_replicated(out, ours.device_mesh).requires_grad_(out.requires_grad)


_IN_MEMORY_OF_ITS_OWN = (
    "{}: torch writes its operands into plain memory of its own here, and no gradient finds its way back\n"
    "  fix: call it under torch.no_grad() if none is wanted; else make the result of the operands, "
    "with torch.cat or torch.stack"
)


def wraps_distributed(x: torch.Tensor) -> bool:
    """Is `x` what a transform of `torch.func` makes of a DTensor? Its class says plain; inside it is not."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return isinstance(x, TorchDTensor)


def is_same_everywhere(x: torch.Tensor) -> bool:
    """Has it nothing in which ranks could differ but one element?

    One element, or one repeated by a stride of 0, as torch writes a tangent that is zero; no data at all, as
    where torch asks what a sum with such a zero looks like.
    """
    if x.is_meta or x.numel() == 1:
        return True
    if is_functorch_wrapped_tensor(x) or x.layout is not torch.strided or not x.numel():
        return False
    return all(size == 1 or not stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _adopted(func: Any, args: Args, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """torch's own DTensors among the arguments as ours: their gradients reach torch in layouts it knows."""
    kept = args[0] if args and writes_first(func) else None

    def adopt(value: Any) -> Any:
        is_meant = type(value) is TorchDTensor and value is not kept and value.requires_grad
        return apply(Adopt, value) if is_meant else value

    if func in AUTOGRAD or not torch.is_grad_enabled():
        return args, kwargs
    named = {name: value if name == "out" else _in_lists(adopt, value) for name, value in kwargs.items()}
    return tuple(_in_lists(adopt, value) for value in args), named


def _in_lists(function: Callable[[Any], Any], value: Any) -> Any:
    """What a function makes of a value, or of each in a list that holds tensors."""
    if isinstance(value, list | tuple):
        if not any(isinstance(each, torch.Tensor | list | tuple) for each in value):
            return value
        return type(value)(_in_lists(function, each) for each in value)
    return function(value)


# Classes whose values are neither plain tensors, nor torch's own DTensors, nor lists of them, as met: asking
# a class is slow.
_harmless: set[type] = memo("classes that are no tensors", set())


def _wants_gradient(value: torch.Tensor) -> bool:
    """Is it of a graph of plain tensors, whose formulas take plain gradients only?"""
    return value.requires_grad and not is_functorch_wrapped_tensor(value)


def _taken_as_replicated(
    func: Any,
    args: Args,
    kwargs: dict[str, Any],
    wanted: Callable[[torch.Tensor], bool] = lambda value: not wraps_distributed(value),
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with those plain tensors that are wanted as replicated DTensors."""
    ours = [v for v in tensors_in((*args, *kwargs.values())) if isinstance(v, TorchDTensor)]
    if not ours:
        return args, kwargs
    mesh = max(ours, key=lambda v: (v.numel() != 1, v.device_mesh.ndim)).device_mesh  # numbers go along

    def replicate(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not isinstance(value, TorchDTensor) and wanted(value):
            return CLASSES[0].from_local(value, mesh, (Replicate(),) * mesh.ndim)
        return value

    return with_replicated(func, args, kwargs, partial(_in_lists, replicate))


def with_replicated(
    func: Any, args: Args, kwargs: dict[str, Any], replicate: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with plain tensors replaced by `replicate`, but for those that the function writes."""
    keep = args[0] if args and writes_first(func) else None
    named = {name: value if name == "out" else replicate(value) for name, value in kwargs.items()}
    return tuple(value if value is keep else replicate(value) for value in args), named


@constant_in_graphs
def _name_of(func: Any) -> str:
    return getattr(func, "__name__", "")


def leaves_alone(func: Any) -> bool:
    """Does the function take its plain tensors as they are, also where such count as replicated?"""
    if func in AUTOGRAD or func in OF_SIZES:
        return True
    name = _name_of(func)
    return name == "__set__" or name.startswith(("_foreach_", "_fused_"))


def _has_foreign(values: Iterable[Any]) -> bool:
    """Is a plain tensor, or torch's own DTensor, among the arguments? Mostly not; asked at every call."""
    for value in values:
        cls = value.__class__
        if cls in _harmless:
            continue
        if issubclass(cls, torch.Tensor) and (cls is TorchDTensor or not issubclass(cls, TorchDTensor)):
            if cls is TorchDTensor or not wraps_distributed(value):
                return True
            continue  # its class is that of any plain tensor: nothing is known of the class
        if issubclass(cls, list | tuple):
            if _has_foreign(value):
                return True
            continue
        _harmless.add(cls)
    return False


def _refuse_plain(func: Any, args: Args, kwargs: dict[str, Any]) -> None:
    if current_graph_task_id() != -1:
        return  # what a backward recomputes was judged in its forward
    for value in tensors_in((*args, *kwargs.values())):
        if is_same_everywhere(value) or wraps_distributed(value) or _is_written(func, value, args, kwargs):
            continue
        if func in AUTOGRAD or func in OF_SIZES or getattr(func, "__name__", "") in _EACH_FOR_ITSELF:
            return
        if (func in WITH_LENGTHS and is_lengths(value)) or _made_of_lengths():
            continue
        raise RuleError(
            plain_among(func, args, kwargs, value, lambda f, a, k: call(torch.Tensor, f, (), a, k))
        )


# A scaler looks at each gradient, and says of all together whether one is not finite.
_EACH_FOR_ITSELF = frozenset({"__set__", "_amp_foreach_non_finite_check_and_unscale_"})


def _made_of_lengths() -> bool:
    """Does torch pass on what it sorted of a packed sequence's lengths?

    It does that in plain Python, where nothing but the caller tells its tensors from the user's.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("shardwright."):
        frame = frame.f_back
    return bool(frame.f_globals.get("__name__") == "torch.nn.utils.rnn")


def _is_written(func: Any, value: torch.Tensor, args: Args, kwargs: dict[str, Any]) -> bool:
    """A plain tensor that the function writes into gets the full value."""
    if any(value is out for out in tensors_in((kwargs.get("out"),))):
        return True
    return bool(args) and value is args[0] and writes_first(func)


_CHANGING = frozenset(
    {
        "__set__",
        "__setitem__",
        "__iadd__",
        "__isub__",
        "__imul__",
        "__itruediv__",
        "__ipow__",
        "__ifloordiv__",
    }
)


def writes_first(func: Any) -> bool:
    """Does the function write into its first argument, by torch's rules of naming?"""
    name = _name_of(func)
    return name in _CHANGING or (name.endswith("_") and not name.endswith("__"))
