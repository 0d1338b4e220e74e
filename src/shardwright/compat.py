"""Everything that differs between the supported versions of torch, and the private names that strategies use.

Supported: torch 2.11 to 2.13. Nothing else in the package asks for a version.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
from torch._C import DispatchKey as DispatchKey
from torch._C import TensorType as TensorType
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._C._functorch import get_unwrapped as get_unwrapped
from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_wrapped_tensor
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch._functorch import pyfunctorch
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup, device_mesh, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather as DefaultAllGather
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter as DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import ShardOrderEntry as ShardOrderEntry
from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta
from torch.distributed.tensor.placement_types import Shard, _StridedShard
from torch.utils import _python_dispatch
from torch.utils._mode_utils import no_dispatch as no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.tensor.placement_types import Placement as TorchPlacement


# Private names of torch, one line each, those above included: no other module says one.

EnableTorchFunction = torch._C._EnableTorchFunction
all_schemas = torch._C._jit_get_all_schemas
assert_async = torch._assert_async
current_autograd_node = torch._C._current_autograd_node
current_graph_task_id = torch._C._current_graph_task_id  # -1: no backward is running in this thread
exclude_key = torch._C._dispatch_tls_set_dispatch_key_excluded
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
is_key_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
modes_on = torch._C._len_torch_dispatch_stack  # how many modes see each op
mesh_resources = device_mesh._mesh_resources
neg_view = torch._neg_view
nn_functions = torch._C._nn
outside_transforms = pyfunctorch.temporarily_clear_interpreter_stack
pack_padded_rows = torch._pack_padded_sequence
pad_packed_rows = torch._pad_packed_sequence
pad_kernel = torch._C._nn.pad
modes_stack = _python_dispatch._get_current_dispatch_mode_stack
preserve_version_counter = torch.autograd._unsafe_preserve_version_counter
without_modes = _python_dispatch._disable_current_modes


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


def under_transforms() -> bool:
    """Is a function of `torch.func` running?"""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_composite(op: torch._ops.OpOverload) -> bool:
    """Does torch compose it of other ops, gradients and all?"""
    return bool(op.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd))


# The releases of torch that were tried, first and last; pyproject.toml asks for these.
TRIED = ("2.11", "2.13")


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


def implicitly_replicated() -> bool:
    """Is torch's `implicit_replication` on: does the user take plain tensors to be the same on every rank?"""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


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
    if any(isinstance(p, _StridedShard) for p in placements):
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
    return Shard(placement.dim) if isinstance(placement, _StridedShard) else placement


def _order_names(entries: Any, names: tuple[str, ...]) -> tuple[str, ...] | None:
    """One order of all axes that has every entry's axes in the entry's order."""
    if not entries or all(list(e.mesh_dims) == sorted(e.mesh_dims) for e in entries):
        return None
    order = [axis for entry in entries for axis in entry.mesh_dims]
    order += [axis for axis in range(len(names)) if axis not in order]
    return tuple(names[axis] for axis in order)


def union_mesh(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the axes of several sub-meshes of one root, outermost axis first.

    Axes of one rank, which are neither inside nor outside of others, stay where they were given.
    Cost: none, the process groups of the axes are kept. Source: torch's own FSDP joins meshes in this way.
    """
    axes = list({name: mesh[name] for mesh in meshes for name in axis_names(mesh)}.values())
    outermost_first = iter(sorted((a for a in axes if a.size() > 1), key=_step, reverse=True))
    ordered = [next(outermost_first) if axis.size() > 1 else axis for axis in axes]
    return ordered[0] if len(ordered) == 1 else DeviceMesh._concatenate(ordered)


def _step(axis: DeviceMesh) -> int:
    """How far apart neighbours on the axis are in the numbering of ranks."""
    first, second = axis.mesh.flatten()[:2].tolist()
    return int(second - first)


@dataclass(frozen=True)
class FsdpParameter:
    """One parameter that `fully_shard` manages, through the few private names that relabelling needs."""

    inner: Any

    @property
    def owner(self) -> nn.Module:
        """The module that the parameter is registered on."""
        owner: nn.Module = self.inner._module_info.module
        return owner

    @property
    def name(self) -> str:
        """Its name there."""
        return str(self.inner._module_info.param_name)

    @property
    def parameter(self) -> nn.Parameter:
        """The sharded parameter."""
        parameter: nn.Parameter = self.inner.sharded_param
        return parameter

    @property
    def local(self) -> torch.Tensor:
        """Its part on this rank, a view of the buffer that is gathered."""
        local: torch.Tensor = self.inner.sharded_param._local_tensor
        return local

    @property
    def dim(self) -> int:
        """The dim that is cut."""
        return int(self.inner.fsdp_placement.dim)

    def adopt(
        self,
        parameter: nn.Parameter,
        make_gradient: Callable[[torch.Tensor], torch.Tensor],
        as_term: Callable[[torch.Tensor], torch.Tensor],
        inner_spec: Any,
        wrap_inner: Callable[[torch.Tensor, Any], torch.Tensor],
    ) -> None:
        """Use `parameter` (same local tensor) as the sharded one and `make_gradient` for its gradients.

        as_term: brings the gradient that is there to the layout of `make_gradient`; torch adds the next one
            to its local tensor without looking at its layout.
        inner_spec: the spec of the unsharded parameter where it stays a DTensor on other axes, else None.
        Overrides are set on this one object, not on torch's class.
        """
        fsdp = self.inner
        fsdp.sharded_param = parameter
        fsdp._sharding_spec = parameter._spec  # type: ignore[attr-defined]
        fsdp._setattr_on_modules(parameter)
        fsdp.to_sharded_dtensor = make_gradient
        _managed[id(parameter)] = fsdp
        self._before_adding(as_term)
        if inner_spec is not None:
            self._keep_distributed(inner_spec, wrap_inner)

    @property
    def is_gathered(self) -> bool:
        """Does the unit hold the whole parameter in the place of this one now?"""
        return self.owner._parameters[self.name] is not self.inner.sharded_param

    def follow_local(self) -> None:
        """Gather from the local tensor that the sharded parameter has now."""
        self.inner.reset_sharded_param()

    def _before_adding(self, as_term: Callable[[torch.Tensor], torch.Tensor]) -> None:
        fsdp = self.inner
        original = fsdp.accumulate_unsharded_grad_if_needed

        def accumulate_unsharded_grad_if_needed() -> None:
            original()
            if fsdp.sharded_param.grad is not None:
                fsdp.sharded_param.grad = as_term(fsdp.sharded_param.grad)

        fsdp.accumulate_unsharded_grad_if_needed = accumulate_unsharded_grad_if_needed

    def _keep_distributed(self, spec: Any, wrap_inner: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
        fsdp = self.inner
        fsdp.is_dtensor = True
        fsdp._unsharded_dtensor_spec = None
        original = fsdp.init_unsharded_param

        def init_unsharded_param() -> None:
            known = hasattr(fsdp, "_unsharded_param")
            if not known:
                fsdp._unsharded_dtensor_spec = None
            original()
            if not known:
                plain = fsdp._unsharded_param
                wrapped = wrap_inner(plain.detach(), spec)
                fsdp._unsharded_param = nn.Parameter(wrapped, requires_grad=plain.requires_grad)
                fsdp._unsharded_dtensor_spec = wrapped._spec  # type: ignore[attr-defined]

        fsdp.init_unsharded_param = init_unsharded_param


@dataclass(frozen=True, slots=True)
class FsdpUnit:
    """What torch does around the forward of a sharded unit."""

    module: nn.Module

    @property
    def is_idle(self) -> bool:
        """Neither in its forward nor in its backward."""
        idle: bool = self._state._training_state == TrainingState.IDLE
        return idle

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather the parameters, before a forward with these arguments; they may be cast."""
        entered: tuple[tuple[Any, ...], dict[str, Any]] = self._state._pre_forward(self.module, args, kwargs)
        return entered

    def leave(self, args: tuple[Any, ...], out: Any) -> Any:
        """Free what `enter` gathered; a backward of `out` gathers it again."""
        return self._state._post_forward(self.module, args, out)

    @property
    def _state(self) -> Any:
        return self.module._get_fsdp_state()  # type: ignore[operator]


# What manages a parameter, by its identity: not in the parameters, which are pickled, and not by references
# to them, for torch swaps no tensor that has a weak one (`model.double()`).
_managed: WeakValueDictionary[int, Any] = WeakValueDictionary()


def managing_unit(parameter: torch.Tensor) -> FsdpParameter | None:
    """What `fully_shard` knows of a sharded parameter, None for any other tensor."""
    inner = _managed.get(id(parameter))
    return None if inner is None or inner.sharded_param is not parameter else FsdpParameter(inner)


def fsdp_parameters(module: nn.Module) -> list[FsdpParameter]:
    """The parameters that the `fully_shard` of this very module manages."""
    return [FsdpParameter(p) for group in _fsdp_groups(module) for p in group.fsdp_params]


def replaced_parameters(module: nn.Module) -> list[str]:
    """The parameters of a `fully_shard` unit in whose place tensors stand that it would pass over.

    Once it has started, any others; before, it takes over parameters (`load_state_dict(assign=True)`).
    """
    started = module._get_fsdp_state()._is_root is not None  # type: ignore[operator]
    found = []
    for managed in fsdp_parameters(module):
        held, inner = managed.owner._parameters.get(managed.name), managed.inner
        own = (None, inner.sharded_param, getattr(inner, "_unsharded_param", None))
        if not any(held is each for each in own) and (started or not isinstance(held, nn.Parameter)):
            found.append(str(inner._param_fqn or managed.name))
    return found


def _fsdp_groups(module: nn.Module) -> list[Any]:
    state = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = state._fsdp_param_group
    return [] if group is None else [group]


def follow_dtype(module: nn.Module) -> None:
    """Let `module.to(dtype)` change the dtype of a `fully_shard` unit after its first forward as well."""
    for group in _fsdp_groups(module):
        for parameter in group.fsdp_params:
            _follow_dtype(parameter, group)


def _follow_dtype(fsdp: Any, group: Any) -> None:
    original = fsdp.reset_sharded_param

    def reset_sharded_param() -> None:
        original()
        if getattr(fsdp, "orig_dtype", fsdp.sharded_param.dtype) != fsdp.sharded_param.dtype:
            for each in group.fsdp_params:
                each.all_gather_outputs = []
                each.__dict__.pop("_unsharded_param", None)
            group._init_mp_dtypes()

    fsdp.reset_sharded_param = reset_sharded_param


def never_compiled_alone(function: Callable[..., Any]) -> None:
    """Run `function` and what it calls as they are where Dynamo meets it as a frame; it may still be inlined.

    A frame compiled for the getter of one attribute is taken for that of another: their wrappers are made for
    each access and compared by address.
    """
    skip = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)


def before_each_call(
    namespace: str, names: Sequence[str], tell: Callable[[str, tuple[Any, ...]], None]
) -> Callable[[], None]:
    """Call `tell(name, args)` before operators run, whoever calls them, from Python or C++, in any thread.

    Below every dispatch mode and subclass: what is told of really runs. Returns: what undoes it.
    """
    library = torch.library.Library(namespace, "IMPL")
    for name in names:
        op = getattr(getattr(torch.ops, namespace), name).default
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
