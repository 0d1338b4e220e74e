"""The inside of torch's `fully_shard`: the private names that relabelling its parameters needs.

Nothing of it is imported here: tensors ask who manages them, in programs without FSDP as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.distributed import _composable_state


@dataclass(frozen=True)
class Inside:
    """What the computation sees of a gathered parameter, where that is a DTensor on other axes.

    wrap:     of the gathered tensor.
    gradient: the spec that its gradient is brought to, before the unit sums it.
    """

    wrap: Callable[[torch.Tensor], torch.Tensor]
    gradient: Any


@dataclass(frozen=True)
class FsdpParameter:
    """One parameter that `fully_shard` manages, through the few private names that relabelling needs."""

    inner: Any
    group: Any = None

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
        inside: Inside | None,
        pending: tuple[str, ...],
    ) -> None:
        """Use `parameter` (same local tensor) as the sharded one and `make_gradient` for its gradients.

        as_term: brings the gradient that is there to the layout of `make_gradient`; torch adds the next one
            to its local tensor without looking at its layout.
        inside: how the unsharded parameter stays a DTensor, where it does.
        pending: see the property.
        Overrides are set on this one object, not on torch's class.
        """
        fsdp = self.inner
        fsdp.sharded_param, fsdp.pending = parameter, pending
        fsdp._sharding_spec = parameter._spec  # type: ignore[attr-defined]
        fsdp._setattr_on_modules(parameter)
        fsdp.to_sharded_dtensor = make_gradient
        _managed[id(parameter)] = fsdp
        self._keep_what_hangs()
        self._before_adding(as_term)
        if inside is not None:
            self._keep_distributed(inside)
        elif isinstance(self.owner, nn.RNNBase):
            self._stay_where_gathered()
        self._allocate_outside_inference()

    @property
    def pending(self) -> tuple[str, ...]:
        """The axes on which its gradient is a term still, once the unit has summed it."""
        axes: tuple[str, ...] = self.inner.pending
        return axes

    @property
    def is_gathered(self) -> bool:
        """Does the unit hold the whole parameter in the place of this one now?"""
        return self.owner._parameters[self.name] is not self.inner.sharded_param

    @property
    def reached(self) -> int:
        """A number for the backwards of this rank that its gradient, or its last one, is the sum of."""
        return int(self.inner.reached)

    @property
    def partial(self) -> int:
        """The same, above 0, where a backward of this rank has left it out since `settle`; else 0."""
        return 1 + self.reached if self.inner.was_left_out else 0

    def settle(self) -> None:
        """The ranks have compared what reached it."""
        self.inner.was_left_out = False

    def hand_out(self) -> None:
        """Somebody may write the sharded parameter from here on, in memory whose versions are others."""
        self.inner.handed_out += 1

    def follow_local(self) -> None:
        """Gather from the local tensor that the sharded parameter has now."""
        self.inner.reset_sharded_param()

    def follow_swapped(self) -> bool:
        """Gather from what `torch.utils.swap_tensors` has put into the sharded parameter.

        Returns: whether that lies as the parameter did, which alone can be gathered.
        """
        new = self.inner.sharded_param
        if getattr(new, "_local_tensor", None) is self.inner.followed:
            return True
        before = self.inner._sharding_spec
        alike = isinstance(new, nn.Parameter) and getattr(new, "_spec", None) is not None
        if not alike or (new._spec, new.dtype) != (before, before.tensor_meta.dtype):
            return False
        new._spec = before
        self.follow_local()
        return True

    def _keep_what_hangs(self) -> None:
        """Attributes of the parameter stay with what `module.to()` or a load makes of it.

        torch swaps all that a tensor subclass is with what it was converted to, which has no attributes.
        """
        fsdp = self.inner
        original, hung = fsdp.reset_sharded_param, vars(fsdp.sharded_param)
        fsdp.followed = fsdp.sharded_param._local_tensor

        def reset_sharded_param() -> None:
            nonlocal hung
            original()
            fsdp.followed = fsdp.sharded_param._local_tensor
            before, hung = hung, vars(fsdp.sharded_param)
            if hung is not before:
                _managed[id(fsdp.sharded_param)] = fsdp
                kept = {k: v for k, v in before.items() if k == "_fully_sharded" or not k.startswith("_")}
                hung.update({**kept, **hung})

        fsdp.reset_sharded_param = reset_sharded_param

    def _before_adding(self, as_term: Callable[[torch.Tensor], torch.Tensor]) -> None:
        fsdp, group = self.inner, self.group
        fsdp.reached, fsdp.was_left_out, fsdp.handed_out = 0, False, 0
        backwards = count(1)

        def before_it_is_sent() -> None:
            number, gradient = next(backwards), fsdp.sharded_param.grad
            if not _is_sent(fsdp, group):
                fsdp.was_left_out = True
            else:
                fsdp.reached = ((0 if gradient is None else fsdp.reached) * _MORE + number) % _PRIME
            if gradient is not None:
                fsdp.sharded_param.grad = as_term(gradient)

        _before_sums(fsdp, group, before_it_is_sent)

    def _stay_where_gathered(self) -> None:
        """Let the layer compute with what is gathered, each time.

        On CUDA it copies its weights into one buffer when it first sees them, and has them point there: torch
        would gather into memory that nobody reads any more.
        """
        fsdp = self.inner
        original = fsdp.init_unsharded_param

        def init_unsharded_param() -> None:
            original()
            (gathered,), whole = fsdp.all_gather_outputs, fsdp._unsharded_param
            if whole.untyped_storage().data_ptr() != gathered.untyped_storage().data_ptr():
                whole.data = gathered.as_strided(fsdp._orig_size, fsdp._contiguous_orig_stride, 0)

        fsdp.init_unsharded_param = init_unsharded_param

    def _allocate_outside_inference(self) -> None:
        """Let a first forward in `torch.inference_mode()` leave buffers that a training step may write."""
        fsdp = self.inner
        for name in ("init_all_gather_outputs", "init_unsharded_param"):
            setattr(fsdp, name, torch.inference_mode(mode=False)(getattr(fsdp, name)))

    def _keep_distributed(self, inside: Inside) -> None:
        fsdp = self.inner
        fsdp.is_dtensor = True
        fsdp._unsharded_dtensor_spec = None
        original = fsdp.init_unsharded_param

        def init_unsharded_param() -> None:
            known = hasattr(fsdp, "_unsharded_param")
            if not known:
                fsdp.is_dtensor, fsdp._unsharded_dtensor_spec = False, None
            original()
            if not known:
                plain = fsdp._unsharded_param
                wrapped = inside.wrap(plain.detach())
                fsdp._unsharded_param = nn.Parameter(wrapped, requires_grad=plain.requires_grad)
                if getattr(plain, "_has_grad_dtype_override", False):  # from torch 2.15 on
                    fsdp._unsharded_param.grad_dtype = plain.grad_dtype
                # Torch brings the gradient there. The second is its name in torch 2.11.
                fsdp._unsharded_dtensor_spec = fsdp._tp_spec = inside.gradient
                fsdp.is_dtensor = True

        fsdp.init_unsharded_param = init_unsharded_param


_MORE, _PRIME = 1_000_003, 2**61 - 1


def _before_sums(fsdp: Any, group: Any, run: Callable[[], None]) -> None:
    """Run this where torch takes the gradient of a backward to send it; what stays goes with the next."""
    if not hasattr(fsdp, "accumulate_unsharded_grad_if_needed"):  # from torch 2.15 on the group adds up
        if not hasattr(group, "before_sums"):
            group.before_sums = []
            group._take_unsharded_grads_to_reduce = _run_before(group, group._take_unsharded_grads_to_reduce)
        group.before_sums.append(run)
        return
    original = fsdp.accumulate_unsharded_grad_if_needed

    def accumulate_unsharded_grad_if_needed() -> None:  # torch calls it after each backward
        original()
        if group.reduce_grads:
            run()

    fsdp.accumulate_unsharded_grad_if_needed = accumulate_unsharded_grad_if_needed


def _run_before(group: Any, original: Callable[[], Any]) -> Callable[[], Any]:
    def take_unsharded_grads_to_reduce() -> Any:
        for run in group.before_sums:
            run()
        return original()

    return take_unsharded_grads_to_reduce


def _is_sent(fsdp: Any, group: Any) -> bool:
    """Has torch a gradient of it to send, at the end of a backward?"""
    whole = getattr(fsdp, "_unsharded_param", None)
    if whole is None:
        return False
    unused = getattr(group, "reduce_scatter_unused_params", False) and whole.requires_grad
    return unused or whole.grad is not None or fsdp.unsharded_accumulated_grad is not None


# What manages a parameter, by its identity: not in the parameters, which are pickled, and not by references
# to them, for torch swaps no tensor that has a weak one (`model.double()`).
_managed: WeakValueDictionary[int, Any] = WeakValueDictionary()


def managing_unit(parameter: torch.Tensor) -> FsdpParameter | None:
    """What `fully_shard` knows of a sharded parameter, None for any other tensor."""
    inner = _managed.get(id(parameter))
    return None if inner is None or inner.sharded_param is not parameter else FsdpParameter(inner)


def sharded_behind(gathered: torch.Tensor) -> nn.Parameter | None:
    """The sharded parameter of one of our units that this is the whole of; None for any other tensor."""
    units = _managed.values()
    found: Iterator[nn.Parameter] = (
        unit.sharded_param for unit in units if getattr(unit, "_unsharded_param", None) is gathered
    )
    return next(found, None)


def gathered_by_units() -> set[int]:
    """What all sharded units, torch's own too, have gathered, by `id`: a unit reads its `.grad`."""
    states = [state() for state in _composable_state._module_state_mapping.values()]
    units = [state for state in states if any(hasattr(state, f"_fsdp_param_group{s}") for s in ("", "s"))]
    managed = [each for state in units for group in groups_of(state) for each in group.fsdp_params]
    return {id(each._unsharded_param) for each in managed if hasattr(each, "_unsharded_param")}


def fsdp_parameters(module: nn.Module) -> list[FsdpParameter]:
    """The parameters that the `fully_shard` of this very module manages."""
    return [FsdpParameter(p, group) for group in _fsdp_groups(module) for p in group.fsdp_params]


def _fsdp_groups(module: nn.Module) -> list[Any]:
    return groups_of(module._get_fsdp_state())  # type: ignore[operator]


def groups_of(state: Any) -> list[Any]:
    """The groups of parameters of one unit's state."""
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
        now = {each.sharded_param.dtype for each in group.fsdp_params if each.sharded_param.requires_grad}
        if len(now) > 1:  # another module of the unit is still to be converted
            return
        if getattr(fsdp, "orig_dtype", fsdp.sharded_param.dtype) != fsdp.sharded_param.dtype:
            for each in group.fsdp_params:
                each.all_gather_outputs = []
                each.__dict__.pop("_unsharded_param", None)
            group._init_mp_dtypes()

    fsdp.reset_sharded_param = reset_sharded_param
