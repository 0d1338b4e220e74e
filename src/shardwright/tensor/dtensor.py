"""The distributed tensor: a logical tensor, its layout, and the local tensor of this rank."""

from __future__ import annotations

import copy
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import DisableTorchFunctionSubclass, DTensorSpec, TensorClass
from shardwright.compat.dynamo import never_traced
from shardwright.errors import LayoutError
from shardwright.layout.layout import Layout
from shardwright.layout.of_tensor import layout_of_spec
from shardwright.placement.base import Placement
from shardwright.plan import network
from shardwright.rules.registry import registry, sources
from shardwright.tensor.chunks import chunk_list, refuse_pending, shard_of, write_items
from shardwright.tensor.flattened import Kept, as_gradient, constants_of, hand_over, spec_again
from shardwright.tensor.graph_spec import GraphSpec
from shardwright.tensor.placements import PlacementsArgument, gradient_layout, placements_of
from shardwright.tensor.spec import Spec, finished, spec_of
from shardwright.tensor.wrap import REMEMBERED, hand_out, hold_outside, offset_of, up_to_date, wrap


class _Above:
    """What methods of `DTensor` call and needs the class itself: `tensor.install` puts it in.

    Rejected: a base class with the fields alone, for all that is below the class with the methods. What makes
    tensors is below it and used everywhere, so sixty files would say one class here and the other there.

    to_local: of a tensor that needs a gradient, with the layout that the gradient has.
    """

    from_local: Callable[..., DTensor]
    to_local: Callable[[DTensor, Layout | Spec], torch.Tensor]
    redistribute: Callable[..., DTensor]
    replicated: Callable[[DTensor], DTensor]
    term_of: Callable[[DTensor, torch.Tensor], DTensor | None]
    laid_out: Callable[[DTensor, torch.Tensor], DTensor]


above = _Above()
_KNOWN = ("shardwright.", "torch.")
_PROCESS = uuid.uuid4().hex  # and of those that are forked from it: they began with the same rules
read_gradient, _put_gradient, _drop_gradient = (
    getattr(torch.Tensor.grad, name) for name in ("__get__", "__set__", "__delete__")
)


class _StandsForTorchs(TensorClass):
    """The class of our class, which is equal to torch's own by `==`.

    torch's debugging modes ask `type(x) == DTensor` whether a tensor is one that they must let run, to see
    what it sends; a subclass would run unseen. A class is still found by itself in dicts and sets: only what
    compares it sees torch's class there.
    """

    def __eq__(self, other: object) -> bool:
        return self is other or other is TorchDTensor

    __hash__ = type.__hash__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A call of the class. Raises: LayoutError: what is no local tensor with its spec."""
        try:
            return super().__call__(*args, **kwargs)
        except (AttributeError, TypeError) as error:
            raise LayoutError(
                f"{self.__name__} is made of a local tensor and its spec: {error}\n"
                "  fix: sw.distribute_tensor(whole, mesh, placements), or DTensor.from_local(part, ...)"
            ) from error


class DTensor(TorchDTensor, metaclass=_StandsForTorchs):
    """A tensor of one logical shape whose elements live on the ranks of a mesh, as its layout says.

    It is a `torch.distributed.tensor.DTensor`: optimizers, `fully_shard` and torch's distributed checkpoints
    accept it. Every op on it gives the single-device answer or a clear error.
    Not a layout (no data there), not a process group.
    """

    _spec: Spec
    _local_tensor: torch.Tensor  # no `__slots__` of its own: torch stages for saving what its own class names
    # `tensor.install` sets this and `__torch_dispatch__`: what they are needs this class.
    __torch_function__: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Of a local tensor and a spec, torch's too, as programs on its DTensor call it: checks nothing."""
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
        given: DTensorSpec = self._spec
        if not isinstance(given, Spec):
            self._spec = spec_of(layout_of_spec(given), given.mesh)

    # -- what it is -----------------------------------------------------------------------------------

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DTensor({self._spec.layout}, local={self._local_tensor})"

    def __format__(self, spec: str) -> str:
        """Of one number that number, as torch's: `getattr(self, f"expert_{i}")`.

        Without a spec one that is still to be summed says so: what is printed by one rank must not send.
        """
        at_hand = spec or all(p.is_replicated for p in self.placements)
        return self.item().__format__(spec) if at_hand and self.dim() == 0 else object.__format__(self, spec)

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, as torch keeps it; of a local use it gets its layout. Optimizers read it three times.

        What torch computed of zeros that it made of a size is plain, and lies as the tensor does; a plain one
        that was assigned stays as it is.

        Torch's own attribute asks `__torch_function__` first, which takes a microsecond to say nothing. No
        descriptor in C: `torch.compile` reads functions.
        """
        with DisableTorchFunctionSubclass():
            gradient: torch.Tensor | None = read_gradient(self)
        if gradient is None:
            return gradient
        use = self._spec.use
        if isinstance(gradient, TorchDTensor) and (use is None or gradient._spec.mesh is self._spec.mesh):
            return gradient
        if use is None and getattr(self, "_assigned", lambda: None)() is gradient:
            return gradient
        term = above.laid_out(self, gradient) if use is None else above.term_of(self, gradient)
        if term is None:
            return gradient
        self.grad = term
        return term

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        with DisableTorchFunctionSubclass():
            _put_gradient(self, gradient)
        if gradient is not None and not isinstance(gradient, TorchDTensor):
            self._assigned = weakref.ref(gradient)

    @grad.deleter
    def grad(self) -> None:
        with DisableTorchFunctionSubclass():
            _drop_gradient(self)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One per axis of the mesh; where they do not apply left to right, they know their order."""
        return placements_of(self._spec.shown.layout)

    # -- in and out -----------------------------------------------------------------------------------

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: PlacementsArgument | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: PlacementsArgument | None = None,
    ) -> DTensor:
        """The DTensor whose part on this rank is `local_tensor`.

        Args:
            local_tensor: this rank's part, in the shape that the layout gives it.
            placements: one per mesh axis, or `{axis name: placement}` naming all of them; Replicate if None.
            run_check: the ranks tell each other shapes, dtypes, placements, `requires_grad` and the order of
                dims in memory, and refuse what does not fit, all alike and before anything else; then
                replicated parts are broadcast from the first.
            shape: the logical one; without it every rank is taken to hold a part of equal shape. Where parts
                are not equal (5 rows over 2) it must be given: a rank cannot see it alone.
            stride: the logical one, beside `shape`; row-major if None.
            grad_placements: where the gradient is brought before it is handed to `local_tensor`.
        Raises: LayoutError: the local shape is not the one that the layout gives this rank; with `run_check`,
            that of any rank.
        Cost: none; with `run_check` an all-gather of 536 bytes over each axis, and a broadcast per replicated
            axis.
        """
        return above.from_local(
            local_tensor,
            device_mesh,
            placements,
            run_check=run_check,
            shape=shape,
            stride=stride,
            grad_placements=grad_placements,
        )

    def to_local(self, *, grad_placements: PlacementsArgument | None = None) -> torch.Tensor:
        """This rank's part, differentiable; a view of it, not a copy.

        Args: grad_placements: what the gradient of the local part is to the logical tensor; as torch, by
            default the tensor's own placements with pending ones finished. Without an order of their own
                they apply in that of the tensor.
        Raises: LayoutError: parts of the gradient would have another shape than those of the tensor.
        Cost: none.
        """
        up_to_date(self)
        hold_outside("to_local")
        if self._spec.pending and not torch.compiler.is_compiling():
            hand_out(self._local_tensor)
        with DisableTorchFunctionSubclass():
            differentiable = self.requires_grad
        if not torch.is_grad_enabled() or not differentiable:
            if grad_placements is not None:  # what is refused does not depend on whether it is needed
                gradient_layout(self.device_mesh, self._spec.shown.layout, grad_placements, default="layout")
            return self._local_tensor.view_as(self._local_tensor) if differentiable else self._local_tensor
        own = self._spec.shown.layout
        if grad_placements is None:
            grad_layout = finished(own) if self._spec.pending else own
        else:
            grad_layout = gradient_layout(self.device_mesh, own, grad_placements, default="layout")
        if isinstance(self._spec, GraphSpec):
            return above.to_local(self, self._spec.placed(lambda _: grad_layout))
        return above.to_local(self, grad_layout)

    def redistribute(
        self,
        device_mesh: DeviceMesh | PlacementsArgument | None = None,
        placements: PlacementsArgument | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
        order: Sequence[str] | None = None,
    ) -> DTensor:
        """The same values in another layout, differentiable.

        Args:
            device_mesh: the tensor's own mesh or another one, or already the placements as a mapping. To
                another mesh every rank of both calls, also one that holds nothing of `self` (there it is a
                DTensor with an empty local part).
            placements: one per axis, or `{axis name: placement}`; axes not named stay as they are (on
                another mesh: as on the axis of this name, Replicate if there was none).
            async_op: return as soon as the last step has been posted; whoever first uses the result waits.
                What is sent is copied, so `self` may be changed meanwhile. Earlier rounds, a move to another
                mesh, a traced graph and the backward are complete when they return.
            forward_dtype, backward_dtype: cast before moving, and the gradient before it moves back.
            order: axes in order of application, if not left to right.
        Raises: LayoutError: unknown axis, wrong count, a mesh of other devices. PlanError: no way to the
            target.
        Cost: `plan_redistribution(sw.layout_of(x), target).total_bytes` over all ranks.
        """
        return above.redistribute(
            self,
            device_mesh,
            placements,
            forward_dtype=forward_dtype,
            backward_dtype=backward_dtype,
            order=order,
            async_op=async_op,
        )

    def full_tensor(self, *, grad_placements: PlacementsArgument | None = None) -> torch.Tensor:
        """The logical tensor, whole and finished, on every rank; differentiable.

        Args: grad_placements: where the gradient is brought, as in `to_local`.
        Cost: a redistribution to Replicate on all axes.
        """
        return above.replicated(self).to_local(grad_placements=grad_placements)

    # -- protocol: tracing ----------------------------------------------------------------------------

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Any], flatten_spec: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> DTensor:
        spec = spec_again(inner_tensors, flatten_spec, outer_size, outer_stride)
        local, offset = as_gradient(inner_tensors["_local_tensor"]), getattr(flatten_spec, "offset", 0)
        return wrap(local, spec, requires_grad=flatten_spec[-1], offset=offset)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        hand_over(self._local_tensor)
        names, kept = super().__tensor_flatten__()  # type: ignore[no-untyped-call]
        offset = int(offset_of(self))
        return names, Kept(kept, offset) if offset else kept

    def _stable_hash_for_caching(self) -> str:
        """What a compiled program is found by: whose it is, the groups that it names, and what decided.

        With rules or placements of a program's own it holds for this process: they may be changed.
        """
        mesh, placements = self.device_mesh, self._spec.shown.layout.placements
        own = any(not type(p).__module__.startswith(_KNOWN) for p in placements)
        decided = _PROCESS if own or registry.is_changed else sources()
        groups = [mesh.get_group(axis).group_name for axis in range(mesh.ndim)] if self._spec.coords else []
        of = f"{dist.get_rank()} at {self._spec.coords} of {mesh.mesh.tolist()}, groups {groups}"
        of = f"{super()._stable_hash_for_caching()} from {offset_of(self)} on {of}"
        return f"{of} by {decided}, {network.current}"

    def __coerce_tangent_metadata__(self) -> DTensor:
        """A compiled backward expects finished gradients of finished values."""
        if not self._spec.pending:
            return self
        return self.redistribute(placements=finished(self._spec.shown.layout).placements)

    def __coerce_same_metadata_as_tangent__(
        self, flatten_spec: tuple[Any, ...], expected_type: type | None = None
    ) -> DTensor | None:
        if expected_type is not None:
            return None
        return self.redistribute(self.device_mesh, constants_of(flatten_spec)[1])

    # -- protocol: pickling ---------------------------------------------------------------------------

    @never_traced("deepcopy makes a new leaf, which no graph holds; fix: x.clone(), or copy outside of it")
    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        """A leaf of the same layout, `requires_grad`, gradient and attributes; a parameter's has no gradient.

        Cost: none.

        Not torch's: it looks for a storage where the local tensor starts inside one (a row of a table).
        Raises: RuntimeError: not a leaf, as for a plain tensor.
        """
        if id(self) in memo:
            return cast("DTensor", memo[id(self)])
        if not self.is_leaf:
            raise RuntimeError(
                "only leaves of the autograd graph can be deep-copied\n  fix: copy `x.detach()`"
            )
        up_to_date(self)
        local = copy.deepcopy(self._local_tensor.detach(), memo)  # two that share memory do so again
        twin = wrap(local, self._spec.plain, offset=cast("int", self.storage_offset()))
        memo[id(self)] = twin.requires_grad_(self.requires_grad)
        vars(twin).update(copy.deepcopy(_attributes(self), memo))
        if self.grad is not None and not isinstance(self, torch.nn.Parameter):  # as that of a plain one
            twin.grad = copy.deepcopy(self.grad, memo)
        return twin

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        up_to_date(self)
        local, offset = self._local_tensor.detach(), cast("int", self.storage_offset())
        return _rebuild, (local, self._spec, self.requires_grad, _attributes(self), offset)

    # -- protocol: torch's distributed checkpoint -------------------------------------------------------

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        return write_items(self._spec, self.to_local(), fqn)

    def __create_chunk_list__(self) -> list[Any]:
        return chunk_list(self._spec)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return shard_of(self._spec, self._local_tensor, index)

    def _raise_if_contains_partial_placements(self) -> None:
        refuse_pending(self._spec.layout)


def _attributes(x: DTensor) -> dict[str, Any]:
    """What the program hung on it: not what the library remembers of this very tensor."""
    return {name: value for name, value in vars(x).items() if name not in REMEMBERED}


def _rebuild(
    local: torch.Tensor, spec: Spec, requires_grad: bool, attributes: dict[str, Any], offset: int = 0
) -> DTensor:
    """A pickled DTensor, on the same mesh."""
    made = wrap(local, spec_of(spec.layout, spec.mesh, spec.use), requires_grad=requires_grad, offset=offset)
    vars(made).update(attributes)
    return made
