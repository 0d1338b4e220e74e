"""Everything that differs between the supported versions of torch, and the private names that others use.

Supported: torch 2.11 to 2.15. Nothing else in the package asks for a version.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._C import DisableTorchFunction as DisableTorchFunction
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
from torch._C import DispatchKey as DispatchKey
from torch._C import TensorType as TensorType
from torch._C import _functorch
from torch._C._functorch import get_unwrapped as get_unwrapped
from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_wrapped_tensor
from torch._functorch import pyfunctorch
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup, device_mesh, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import ShardOrderEntry as ShardOrderEntry
from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta
from torch.distributed.tensor.placement_types import Shard
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.fx.experimental.proxy_tensor import get_proxy_mode as get_proxy_mode
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils import _python_dispatch, _pytree
from torch.utils._mode_utils import no_dispatch as no_dispatch
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_unflatten as tree_unflatten

from shardwright.compat.dynamo import TorchDispatchMode as TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.tensor.placement_types import Placement as TorchPlacement


# Private names of torch, one line each, those above included: no other module says one.

EnableTorchFunction = torch._C._EnableTorchFunction
flatten_dense_tensors = torch._C._nn.flatten_dense_tensors
unflatten_dense_tensors = torch._C._nn.unflatten_dense_tensors
all_schemas = torch._C._jit_get_all_schemas
assert_async = torch._assert_async
compiler_names = vars(torch.compiler)  # `_is_compiling_flag` is what `is_compiling()` answers
current_autograd_node = torch._C._current_autograd_node
current_graph_task_id = torch._C._current_graph_task_id  # -1: no backward is running in this thread
function_modes_on = torch._C._len_torch_function_stack  # how many modes see each function
exclude_key = torch._C._dispatch_tls_set_dispatch_key_excluded
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
forward_names = vars(forward_ad)  # `_current_level` is -1 where no derivative is taken forward
foreach_norm = torch._foreach_norm
increment_versions = torch._C._increment_version
is_key_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
modes_on = torch._C._len_torch_dispatch_stack  # how many modes see each op
mesh_resources = device_mesh._mesh_resources
neg_view = torch._neg_view
nn_functions = torch._C._nn
outside_transforms = pyfunctorch.temporarily_clear_interpreter_stack
pack_padded_rows = torch._pack_padded_sequence
pad_packed_rows = torch._pad_packed_sequence
pad_sequences = torch._C._nn.pad_sequence
modes_stack = _python_dispatch._get_current_dispatch_mode_stack
preserve_version_counter = torch.autograd._unsafe_preserve_version_counter
transforms_on = torch._C._are_functorch_transforms_active
unwrap_if_dead = _functorch.unwrap_if_dead
use_count = torch.Tensor._use_count  # type: ignore[attr-defined]  # by torch itself; all of Python counts as one
is_batch_of_gradients = _functorch.is_legacy_batchedtensor
batch_of_gradients, members_of_batch = torch._add_batch_dim, torch._remove_batch_dim
view_tracking = torch.autograd._force_original_view_tracking
without_modes = _python_dispatch._disable_current_modes
RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
# Does torch's pipeline wait for gradients of integers; does it send them where nobody waits?
WAITS_FOR_ALL_GRADIENTS, SENDS_ALL_GRADIENTS = RELEASE == (2, 11), RELEASE == (2, 12)
# What says that a tensor's strides do not merge to a view: the kernels, and torch's descriptions of them.
CANNOT_VIEW = (RuntimeError, ValueError)
# Calls a function below the classes of its arguments: (function, types, args, kwargs).
without_subclasses = torch._C._disabled_torch_function_impl
# What packs the tensors that graphs save, if anybody does.
packing = partial(torch._C._autograd._top_saved_tensors_default_hooks, False)
# A block in which torch's dispatcher skips autograd: nothing is recorded, and nobody is asked.
below_autograd = torch._C._AutoDispatchBelowAutograd


# What stands between a function of torch and its ops on tensors: each says 0 or False where it is off. The
# first change or follow what is computed.
UNSEEN = (
    modes_on,
    function_modes_on,
    torch.is_inference_mode_enabled,
    transforms_on,
    torch._C._is_any_autocast_enabled,
    torch._C._is_tracing,
)
QUIET = (*UNSEEN, torch._C._autograd._profiler_enabled)


def view_again(view: Any, base: Any) -> Any:
    """The view of another base that `view` is of its own: each view that led to it, once more."""
    with view_tracking(True):
        return view._view_func_unsafe(base)


def tree_leaves(tree: Any) -> list[Any]:
    """As torch's, in a fraction of the time where containers are Python's own and leaves plain."""
    found: list[Any] = []
    todo = [tree]
    while todo:
        each = todo.pop()
        kind = type(each)
        if kind in _LEAVES or issubclass(kind, torch.Tensor):
            found.append(each)
        elif kind is tuple or kind is list:
            todo += reversed(each)
        elif kind is dict:
            todo += reversed(each.values())
        else:
            found += _pytree.tree_leaves(each)
    return found


_LEAVES = frozenset({torch.Tensor, int, float, bool, str, type(None), torch.dtype, torch.device})


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """As torch's, in a fraction of the time where containers are Python's own and leaves plain."""
    return _mapped(function, tree, None)


def tree_map_only(wanted: Any, function: Callable[[Any], Any], tree: Any) -> Any:
    """The same of the leaves of a class, or of several; the others stay as they are."""
    return _mapped(function, tree, wanted)


def _mapped(function: Callable[[Any], Any], tree: Any, wanted: Any) -> Any:
    kind = type(tree)
    if kind is tuple or kind is list:
        made = []
        for each in tree:
            plain = type(each) in _LEAVES or isinstance(each, torch.Tensor)
            if plain and wanted is not None and not isinstance(each, wanted):
                made.append(each)
            else:
                made.append(function(each) if plain else _mapped(function, each, wanted))
        return made if kind is list else tuple(made)
    if kind is dict:
        return dict(zip(tree, _mapped(function, list(tree.values()), wanted), strict=True)) if tree else {}
    if wanted is None:
        is_leaf = kind in _LEAVES or issubclass(kind, torch.Tensor)
        return function(tree) if is_leaf else _pytree.tree_map(function, tree)
    return function(tree) if isinstance(tree, wanted) else _pytree.tree_map_only(wanted, function, tree)


def will_run(node: Any, place: int) -> bool:
    """Does the running backward want the gradient that a node gives at this place?"""
    following = node.next_functions[place][0]
    try:
        return following is not None and bool(torch._C._will_engine_execute_node(following))
    except RuntimeError:  # an input of `torch.autograd.grad`
        return True


def function_of(node: Any) -> type[torch.autograd.Function] | None:
    """The `torch.autograd.Function` that a node of a graph is the backward of; None of torch's own nodes."""
    function: type[torch.autograd.Function] | None = getattr(type(node), "_forward_cls", None)
    return function


def unfollowed(x: torch.Tensor) -> torch.Tensor | None:
    """The tensor itself where no transform follows it, else None.

    A transform that differentiates wraps whatever is made inside of it (`torch.arange(3)`), followed or not.
    Each wrapper is asked at its own level: from one further in, a tangent does not show.
    """
    with ExitStack() as outer:
        while is_functorch_wrapped_tensor(x):
            level = _functorch.maybe_get_level(x)
            while _functorch.peek_interpreter_stack().level() > level:
                outer.enter_context(pyfunctorch.temporarily_pop_interpreter_stack())
            if not _functorch.is_gradtrackingtensor(x) or x.requires_grad:
                return None
            if forward_ad.unpack_dual(x).tangent is not None:
                return None
            x = get_unwrapped(x)
    return x


def records_a_graph() -> bool:
    """Is a graph recorded of what is run, by `torch.compile` or `make_fx`?"""
    if torch.compiler.is_dynamo_compiling() or compiler_names["_is_compiling_flag"]:
        return True
    return modes_on() > 0 and get_proxy_mode() is not None


class WithoutTangents:
    """Forward-mode derivatives are off inside.

    What torch registers for tensors without data calls overload packets, and a packet writes the arguments
    down for each overload that does not take them: a tensor's text asks for its tangent, which below
    autograd nobody can give. The error leaves the process without autograd.
    """

    def __enter__(self) -> None:
        self._level = forward_ad._current_level
        forward_ad._current_level = -1

    def __exit__(self, *error: object) -> None:
        forward_ad._current_level = self._level


class TensorClass(torch._C._TensorMeta):
    """What the class of tensors is an object of."""


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """torch's table of ops in terms of others; half a second to import, which few runs need."""
    from torch._decomp import decomposition_table  # noqa: PLC0415

    return decomposition_table


def is_composite(op: torch._ops.OpOverload) -> bool:
    """Does torch compose it of other ops, gradients and all?"""
    return bool(op.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd))


def argument_name(op: str, position: int) -> str:
    """What this release calls an argument of an op: `grad` of `_cdist_backward`, from 2.14 `grad_output`."""
    namespace, _, name = op.partition("::")
    return str(getattr(getattr(torch.ops, namespace), name).default._schema.arguments[position].name)


# The releases of torch that were tried, first and last; pyproject.toml asks for these.
TRIED = ("2.11", "2.15")


def warn_if_untried(version: str) -> None:
    """Say that a release of torch was not tried: what differs between releases is written down by hand."""
    release = tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:2])
    first, last = (tuple(map(int, known.split("."))) for known in TRIED)
    if not first <= release <= last:
        warnings.warn(
            f"shardwright was tried with torch {TRIED[0]} to {TRIED[1]}, this is {version}: it may fail; "
            f"install 'torch>={TRIED[0]},<{last[0]}.{last[1] + 1}'",
            stacklevel=2,
        )


warn_if_untried(torch.__version__)


class _ByTorch(type):
    """The class of a stand-in for torch's DTensor: of its objects torch runs the ops, in C++."""

    def __instancecheck__(cls, x: object) -> bool:
        own = DTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]
        return isinstance(x, DTensor) and getattr(type(x).__torch_dispatch__, "__func__", None) is own


class _Probe(DTensor):
    """A DTensor with a dispatch of its own, and nothing else."""

    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (1,))

    def __init__(self) -> None:
        """It has no parts."""

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        return torch.empty(1)


def ask_subclasses() -> None:
    """torch 2.11 runs the ops of every DTensor itself, those with a dispatch of their own too: tell it which.

    It looks the class up at the first op on any subclass of Tensor, and keeps it; that op is run here.

    Raises: RuntimeError: there was one before.
    """
    distributed = sys.modules[DTensor.__module__]
    distributed.DTensor = _ByTorch("DTensor", (), {})  # type: ignore[attr-defined]
    try:
        torch.neg(_Probe())
    except AttributeError:  # torch's own way read what the probe has not
        raise RuntimeError(
            "torch 2.11 has run an op on a tensor subclass, and will not ask others' DTensors any more: "
            "import shardwright.DTensor before that, or install torch 2.12 or later"
        ) from None
    finally:
        distributed.DTensor = DTensor  # type: ignore[attr-defined]


if RELEASE == (2, 11):
    ask_subclasses()


def overload_for(
    packet: torch._ops.OpOverloadPacket, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> torch._ops.OpOverload:
    """The overload that a call of the packet with these arguments takes."""
    name = torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)
    found: torch._ops.OpOverload = getattr(packet, name)
    return found


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of a mesh's axes; an unnamed mesh gets `axis0`, `axis1`, ..."""
    names = mesh.mesh_dim_names
    return tuple(names) if names is not None else tuple(f"axis{i}" for i in range(mesh.ndim))


def on_axes(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """The mesh of some axes of another: itself where they are all of its axes, so that it needs no names."""
    return mesh if tuple(names) == axis_names(mesh) else mesh[tuple(names)]


def implicitly_replicated() -> bool:
    """Is torch's `implicit_replication` on: does the user take plain tensors to be the same on every rank?"""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


def in_loss_parallel() -> bool:
    """Is torch's `loss_parallel` on?"""
    return torch.ops.aten.nll_loss_forward.default in DTensor._op_dispatcher._custom_op_handlers


def asked_by_context_parallel() -> bool:
    """Is the caller of this library torch's own `context_parallel`, which was handed a DTensor?"""
    names = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return "._context_parallel." in next((n for n in names if not n.startswith("shardwright.")), "")


# `set_model_state_dict` with whole tensors, `distributed.checkpoint` of meta tensors, pipelines, `local_map`.
_REBUILDING = frozenset({
    "_distribute_tensors", "_distribute_state_dict", "_init_state_dict.<locals>.dtensor_func",
    "_split_tensor", "merge_chunks", "_DTensorMeta.from_dtensor", "_local_map_wrapped",
})  # fmt: skip


def rebuilds_by_placements() -> str:
    """The name of the function of torch that asks for placements to cut, make or take parts by, or ""."""
    frame = sys._getframe(3)
    name = frame.f_code.co_qualname
    return name if name in _REBUILDING and frame.f_globals["__name__"].startswith("torch.") else ""


def saves_for_hugging_face() -> bool:
    """Does torch's `distributed.checkpoint` ask, for files in which a tensor has one piece for each rank?"""
    seen = (frame.f_locals.get("storage_writer") for frame, _ in traceback.walk_stack(sys._getframe(1)))
    kinds = type(next((writer for writer in seen if writer is not None), None)).__mro__
    return any(kind.__module__ == "torch.distributed.checkpoint.hf_storage" for kind in kinds)


def sharding_of_users(op: torch._ops.OpOverload) -> bool:
    """Did the user state with torch's `register_sharding` how the op shards?"""
    made = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs.get(op)
    return isinstance(made, partial) and made.func.__qualname__.startswith("register_sharding.")


def root_ranks(mesh: DeviceMesh) -> frozenset[int]:
    """The ranks of the mesh that this one is a slice of; its own if it is none."""
    return frozenset(root_mesh(mesh).mesh.flatten().tolist())


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that this one is a slice of; itself if it is none."""
    root: DeviceMesh = mesh._get_root_mesh()
    return root


def shard_order_axes(spec: DTensorSpec) -> tuple[tuple[TorchPlacement, ...], tuple[str, ...] | None]:
    """Placements and order of application that a spec of torch means.

    torch writes an order that is not left to right in one of two ways: strided shards, or `shard_order`.
    A strided shard that no order explains stays as it is.
    """
    placements = tuple(spec.placements)
    entries = getattr(spec, "shard_order", None)
    if any(isinstance(p, StridedShard) for p in placements):
        decode = getattr(DTensorSpec, "_maybe_convert_StridedShard_to_shard_order", None)
        entries = decode(placements, spec.mesh) if decode is not None else None
        if entries is None:
            return placements, None
        placements = tuple(_unstrided(p) for p in placements)
    return placements, _order_names(entries, axis_names(spec.mesh))


def torch_shard_order(
    placements: Sequence[TorchPlacement], order: Sequence[int]
) -> tuple[ShardOrderEntry, ...]:
    """How torch writes an order of application: per cut dim, its mesh axes in that order."""
    axes_of_dim: dict[int, list[int]] = {}
    for axis in order:
        placement = placements[axis]
        if placement.is_shard():
            axes_of_dim.setdefault(int(placement.dim), []).append(axis)  # type: ignore[attr-defined]
    return tuple(ShardOrderEntry(dim, tuple(axes)) for dim, axes in sorted(axes_of_dim.items()))


def _unstrided(placement: TorchPlacement) -> TorchPlacement:
    return Shard(placement.dim) if isinstance(placement, StridedShard) else placement


def _order_names(entries: Any, names: tuple[str, ...]) -> tuple[str, ...] | None:
    """One order of all axes that has every entry's axes in the entry's order."""
    if not entries or all(list(e.mesh_dims) == sorted(e.mesh_dims) for e in entries):
        return None
    order = [axis for entry in entries for axis in entry.mesh_dims]
    order += [axis for axis in range(len(names)) if axis not in order]
    return tuple(names[axis] for axis in order)


def before_each_call(
    names: Sequence[str], tell: Callable[[str, tuple[Any, ...]], None]
) -> Callable[[], None]:
    """Call `tell(name, args)` before collectives run, whoever calls them, from Python or C++, in any thread.

    Below every dispatch mode and subclass: what is told of really runs. Returns: what undoes it.
    """
    library = torch.library.Library("c10d", "IMPL")
    for name in names:
        op = getattr(torch.ops.c10d, name).default
        library.impl(name, _telling(name, op, tell), "BackendSelect", with_keyset=True)
    return library._destroy


def _telling(
    name: str, op: torch._ops.OpOverload, tell: Callable[[str, tuple[Any, ...]], None]
) -> Callable[..., Any]:
    key = torch._C.DispatchKey.BackendSelect

    def kernel(keys: Any, *args: Any) -> Any:
        tell(name, args)
        return op.redispatch(keys.remove(key), *args)

    return kernel


def group_of(boxed: Any) -> ProcessGroup:
    """The process group that an operator was given."""
    return boxed if isinstance(boxed, ProcessGroup) else ProcessGroup.unbox(boxed)


def default_store() -> Any:
    """The store through which the processes of the default group found each other."""
    return distributed_c10d._get_default_store()


def saved_tensors_hooks_on() -> object:
    """The pair of hooks that sees what is saved for a backward now, as in a checkpoint; None without one."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def leave_checkpoints(error: BaseException) -> None:
    """Take off the hooks of checkpoints that an error has left: up to torch 2.12 frames keep them on."""
    for frame, _ in traceback.walk_tb(error.__traceback__ if RELEASE < (2, 13) else None):
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            frame.clear()


def version_of(x: torch.Tensor) -> int | None:
    """torch's count of writes, shared by a base and its views; None for inference tensors."""
    return None if x.is_inference() else x._version


def is_held_elsewhere(gradient: torch.Tensor, *, in_a_hook: bool = False) -> bool:
    """Has anybody beside the backward that got this gradient it too? What torch asks before it keeps one.

    Args: in_a_hook: asked of what a hook got, of which the caller of the hook keeps one more.
    """
    return bool(gradient._use_count() > 1 + in_a_hook)  # type: ignore[attr-defined]


def is_memory_shared(x: torch.Tensor) -> bool:
    """Does anything but this tensor hold its memory: a view of it, an array, the storage itself?"""
    return _holders(x) != _holders(torch.empty(0))


def _holders(x: torch.Tensor) -> tuple[int, int]:
    """Of its storage, in C and in Python; how many those of torch itself are depends on its release."""
    storage = x.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def level_of_batches() -> int:
    """The batch that is innermost where `is_grads_batched` runs a backward."""
    level: int = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    return level - 1


def hooks_of_loads(module: nn.Module) -> list[Callable[[], object]]:
    """What a module and those in it do when their state has been loaded, the inner ones first."""
    none, every = _IncompatibleKeys([], []), reversed(list(module.modules()))
    return [partial(hook, one, none) for one in every for hook in one._load_state_dict_post_hooks.values()]


def saved_hooks_on() -> bool:
    """Does somebody pack and unpack what graphs save (`torch.autograd.graph.saved_tensors_hooks`)?"""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def hooks_of_optimizer(optimizer: torch.optim.Optimizer, moment: str) -> list[Callable[..., Any]]:
    """Args: moment: `state_dict_pre`, `state_dict_post`, `load_state_dict_pre` or `load_state_dict_post`."""
    return list(getattr(optimizer, f"_optimizer_{moment}_hooks").values())


def intercept_calls(module: nn.Module, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let `around(what a call of this one module did)` answer its calls from now on, before any hook.

    torch keeps a compiled call of a module in the same place; one that is there is called, one that
    `module.compile()` puts there later takes the place of this.
    """
    before = module._compiled_call_impl
    module._compiled_call_impl = around(module._call_impl if before is None else before)
