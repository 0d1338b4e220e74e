"""What Dynamo is told of functions of ours without importing it, a second that few runs need."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from inspect import unwrap
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
)
from torch._C._dynamo.guards import compute_overlapping_tensors as compute_overlapping_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _python_dispatch

from shardwright.compat.graph_views import Watch, parts_of_arguments, watch_views

_Told = Callable[[Sequence[Any]], None]
_Asked = Callable[[Sequence[Any], Sequence[int]], None]
_F = TypeVar("_F", bound="Callable[..., Any]")
_DYNAMO = "torch._dynamo"
_BELOW = ("comm", "compat", "index", "layout", "placement", "plan", "rules", "tensor", "views")
_BELOW_TENSORS = tuple(f"shardwright.{name}" for name in _BELOW)
# What `local_map` returns is a function of the program's own; this one asks what holds where it is called.
_NOT_AS_THEY_ARE = ("shardwright.tensor.local_map", "shardwright.compat.dynamo")
_READ = "_gradients_as_they_lie"
_SKIP = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def call_in_graphs(*functions: Callable[..., Any], told: _Told, asked: _Asked, watch: Watch) -> None:
    """Have graphs hold calls of these as they are, as `torch.compiler.allow_in_graph` does.

    told: is called with the results of each graph that can be differentiated, before anybody has them.
    asked: is called with the arguments of each graph that writes some of them, and with their places, before.
    watch: is asked of what a graph returns.
    """
    if _DYNAMO in sys.modules:
        _allow(functions, told, asked, watch)
    else:
        sys.meta_path.insert(0, _AllowOnceImported(lambda: _allow(functions, told, asked, watch)))


def _allow(functions: Sequence[Callable[..., Any]], told: _Told, asked: _Asked, watch: Watch) -> None:
    for function in functions:
        torch.compiler.allow_in_graph(function)
    _run_as_they_are()
    _guard_sizes(sys.modules["torch._dynamo.guards"])
    wrappers = sys.modules["torch._functorch._aot_autograd.runtime_wrappers"]
    _tell_and_ask(wrappers.RuntimeWrapper, told, asked)
    _read_where_it_cannot_run(sys.modules["torch._dynamo.output_graph"].OutputGraph)
    watch_views(watch)
    if not hasattr(torch.compiler, "_compile_session_context"):
        _say_what_compiles(sys.modules["torch._dynamo.convert_frame"])


def _guard_sizes(guards: Any) -> None:
    """Let a graph ask our specs for the sizes that it holds for alone.

    Of a DTensor torch guards what lies on this rank, and of its logical sizes only what is still a symbol.
    """
    builder, concrete = guards.GuardBuilder, guards.convert_to_concrete_values
    ask = builder.DTENSOR_SPEC_MATCH

    @wraps(ask)
    def asks(self: Any, guard: Any) -> None:
        asked_by = getattr(self.get(guard), "asked_by_graph", None)
        if asked_by is None:
            ask(self, guard)
            return
        known = self.check_fn_manager.output_graph.input_source_to_sizes_strides
        fits = asked_by(concrete(known[guard.originating_source.base]["size"]))
        code = guards.get_verbose_code_parts(f"__sizes_of_spec_{id(fits)}", guard)
        self.get_guard_manager(guard).add_lambda_guard(fits, code, guard.user_stack)

    builder.DTENSOR_SPEC_MATCH = asks


def _tell_and_ask(maker: Any, told: _Told, asked: _Asked) -> None:
    finish = maker.post_compile

    @wraps(finish)
    def post_compile(self: Any, made: Any, *args: Any, runtime_metadata: Any, **kwargs: Any) -> Any:
        computes = _telling(made, told) if self.trace_joint else made
        graph = finish(self, computes, *args, runtime_metadata=runtime_metadata, **kwargs)
        _Numbers.asked = False
        written = [n for n, info in enumerate(runtime_metadata.input_info) if info.mutates_data]
        parts = parts_of_arguments(runtime_metadata)

        @wraps(graph)
        def run(given: Any) -> Any:
            try:
                asked(given, written)
            except RuntimeError as refused:
                vars(refused)[_NOTHING_RAN] = True
                raise
            arguments = {place: given[part.argument] for place, part in parts.items()}
            results = graph(given)
            for place, argument in arguments.items():
                results[place] = parts[place].settle(results[place], argument)
            return results

        _Writing.made += bool(written)
        return run if written or parts else graph

    maker.post_compile = post_compile


def _telling(made: Any, told: _Told) -> Any:
    """Results are what arguments become where the graph writes them, and those that the program gets."""

    @wraps(made)
    def run(*args: Any) -> Any:
        results = made(*args)
        told(results)
        return results

    return run


class _Writing:
    """made: so many graphs that write arguments, by all threads; torch makes one at a time."""

    made = 0


_NOTHING_RAN = "_refused_before_the_graph"


def _read_where_it_cannot_run(output: Any) -> None:
    """Have what Dynamo read run as it is, on arguments for which the graph that was made of it does not hold.

    Not where torch parts it into several graphs, some of which have run by then.
    """
    compiles = output.call_user_compiler

    @wraps(compiles)
    def call_user_compiler(self: Any, read: Any, *given: Any) -> Any:
        before = _Writing.made
        compiled = compiles(self, read, *given)

        @wraps(compiled)
        def runs(*args: Any) -> Any:
            try:
                return compiled(*args)
            except RuntimeError as refused:
                if not hasattr(refused, _NOTHING_RAN):
                    raise
            return read(*args)

        return runs if _Writing.made == before + 1 else compiled

    output.call_user_compiler = call_user_compiler


class _Numbers:
    """asked: while a graph is traced again, for numbers."""

    asked = False


def with_numbers() -> bool:
    """Is the graph that is traced one for numbers alone, as its backward asks for them?"""
    return _Numbers.asked


def trace_again_with_numbers(sizes: Sequence[Any]) -> None:
    """In a backward that is traced: begin anew, with numbers from the start. Elsewhere nothing.

    Torch parts a graph by the symbols that its backward reads, and fails where they became numbers there.
    """
    left = any(isinstance(size, torch.SymInt) and not size.node.expr.is_number for size in sizes)
    if left and torch._C._current_graph_task_id() != -1:
        _Numbers.asked = True
        errors = sys.modules["torch._dynamo.exc"]
        # Of the first kind passes through what makes graphs, of the second has Dynamo forget what it foresaw.
        kinds = errors.TensorifyScalarRestartAnalysis, errors.UnspecializeRestartAnalysis
        raise type("TraceAgain", kinds, {})(restart_reason="a backward asks for sizes")


def read_in_backward(node: Any, place: int, lay_out: Callable[[Any], Any]) -> None:
    """Have a graph's backward take what `lay_out` makes of a gradient; `node` made its results.

    A hook of the node cannot: torch makes zeros of the gradients that are None after its hooks.
    """
    graph = type(node)._forward_cls
    if not hasattr(graph, _READ):
        backward, boxed = graph.backward, getattr(graph, "boxed_grads_call", False)  # torch 2.13: in a list

        def reads(ctx: Any, *given: Any) -> Any:
            grads = given[0] if boxed else list(given)
            for n, laid_out in vars(ctx).get(_READ, {}).items():
                grads[n] = laid_out(grads[n])
            return backward(ctx, *(given if boxed else grads))

        graph.backward = staticmethod(reads)
        setattr(graph, _READ, True)
    vars(node).setdefault(_READ, {})[place] = lay_out


def _run_as_they_are() -> None:
    """Let Dynamo make no graphs of what tensors are made of, where a graph broke before; it may be inlined.

    Torch's own DTensor is in a list of files for this, which forbids that too. Such graphs are slow, and end
    in a crash where Dynamo cannot trace: it was never meant to see what plans, packs and pickles tensors.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(_BELOW_TENSORS) and name not in _NOT_AS_THEY_ARE:
            for code in _codes_of(module, name):
                set_code_exec_strategy(code, _SKIP)


def _codes_of(holder: ModuleType | type, module: str) -> Iterator[CodeType]:
    """Of all functions that a module defines, in classes and in functions too."""
    for held in list(vars(holder).values()):
        if getattr(held, "__module__", module) != module:
            continue
        function = unwrap(getattr(held, "__func__", getattr(held, "fget", held)))
        if isinstance(function, FunctionType):
            yield from _with_inner(function.__code__)
        elif isinstance(held, type):
            yield from _codes_of(held, module)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _say_what_compiles(frames: Any) -> None:
    """Let `torch.compiler.is_compiling()` hold until a graph is made, as from torch 2.13 on.

    Before, it holds while Dynamo reads a frame, and not where the ops of our tensors are traced.
    """
    names, compiles = vars(torch.compiler), frames._compile

    def says_so(*args: Any, **kwargs: Any) -> Any:
        before = names["_is_compiling_flag"]
        names["_is_compiling_flag"] = True
        try:
            return compiles(*args, **kwargs)
        finally:
            names["_is_compiling_flag"] = before

    frames._compile = says_so


def out_of_graph(mesh: DeviceMesh) -> DeviceMesh:
    """The program's own mesh, of what stands for it where a graph is traced that is given it by itself."""
    own: DeviceMesh = getattr(mesh, "real_obj", mesh)
    return own


def stands_in_graph(home: DeviceMesh, given: DeviceMesh) -> None:
    """In a graph that is given `given`, say so of an equal mesh on which tensors of the graph lie.

    Torch knows meshes by their objects: it would take `home` from a gradient's part, which no forward has.
    """
    mode = get_proxy_mode()
    known = {} if mode is None else getattr(mode.tracer, "_opaque_real_obj_proxy", {})  # from torch 2.13 on
    proxy = known.get(id(out_of_graph(given)))
    if proxy is not None:
        known[id(home)] = proxy


def never_traced(why: str) -> Callable[[_F], _F]:
    """A graph breaks at the call of what this decorates (`torch.compiler.disable`, which imports Dynamo).

    why: what Dynamo says of it where a graph may not break, and what to write instead.
    """

    def mark(function: _F) -> _F:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]  # nobody inlines it
        function._torchdynamo_disable_msg = why  # type: ignore[attr-defined]
        never_compiled_alone(function)
        return function

    return mark


def constant_in_graphs(function: _F) -> _F:
    """A graph holds what `function` gives while it is traced (`torch.compiler.assume_constant_result`)."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def never_compiled_alone(function: Callable[..., Any]) -> None:
    """Run `function` and what it calls as they are where Dynamo meets it as a frame; it may still be inlined.

    A frame compiled for the getter of one attribute is taken for that of another: their wrappers are made for
    each access and compared by address.
    """
    set_code_exec_strategy(function.__code__, _SKIP)


class TorchDispatchMode(_python_dispatch.TorchDispatchMode):
    """Torch's mode that sees each op, of which Dynamo compiles nothing.

    Torch has Dynamo disable a mode, for which it imports Dynamo when the first op is seen: a second of a
    program's first call.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)  # type: ignore[no-untyped-call]
        seen = cls.__dict__.get("__torch_dispatch__")
        if seen is not None:
            never_compiled_alone(seen)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's question, whether to have Dynamo disable it."""
        return False


def compiles_what_is_called() -> bool:
    """Does Dynamo compile the functions that are called here?"""
    return torch.compiler.is_compiling() or callable(get_eval_frame_callback())


class _AllowOnceImported(MetaPathFinder):
    """Finds Dynamo as Python does, and has it told once it was imported, which `torch.compile` does."""

    def __init__(self, allow: Callable[[], None]) -> None:
        self._allow = allow

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """How Dynamo is found and run; nothing for any other module."""
        found = PathFinder.find_spec(name, path, target) if name == _DYNAMO else None
        if found is not None and found.loader is not None:
            setattr(found.loader, "exec_module", self._then_allow(found.loader.exec_module))  # noqa: B010
        return found

    def _then_allow(self, execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._allow()

        return exec_module
