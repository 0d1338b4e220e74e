"""The inside of torch's `fully_shard`: the private names that relabelling its parameters needs.

Nothing of it is imported here: tensors ask who manages them, in programs without FSDP as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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


@dataclass(frozen=True, slots=True)
class FsdpUnit:
    """What torch does around the forward of a sharded unit."""

    module: nn.Module

    @property
    def phase(self) -> str:
        """What it does, as torch calls it: IDLE is neither its forward nor its backward."""
        name: str = self._state._training_state.name
        return name

    @property
    def is_idle(self) -> bool:
        """Neither in its forward nor in its backward."""
        return self.phase == "IDLE"

    @property
    def has_root(self) -> bool:
        """A unit is around it, or it is one module."""
        return len(self._state._modules) == 1 or getattr(self._state, "around", None) is not None

    def goes_on(self, begun: Iterable[nn.Module]) -> bool:
        """It is in a forward of a unit of several modules that one of `begun` has begun."""
        if self.is_idle or len(self._state._modules) == 1:
            return False
        return any(FsdpUnit(each)._state is self._state for each in begun)

    def stay_open_on_error(self) -> None:
        """Let a module that raises leave its unit of several in its forward, as one does that is a unit.

        torch ends the unit then, and no backward of it would come.
        """
        for handle in self._state._post_forward_hook_handle.handles:
            for part in self._state._modules:
                part._forward_hooks_always_called.pop(handle.id, None)

    @property
    def runs_alone(self) -> bool:
        """In its forward, which no other unit's is around."""
        alone: bool = not self.is_idle and self._state._state_ctx.iter_forward_root is self._state
        return alone

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather the parameters, before a forward with these arguments; they may be cast."""
        begin_at_the_root(self.module)
        entered: tuple[tuple[Any, ...], dict[str, Any]] = self._state._pre_forward(self.module, args, kwargs)
        return entered

    def gather_again(self) -> None:
        """In its backward: gather what that may have freed, for what is computed again in it."""
        for group in groups_of(self._state):
            group.unshard()
            group.wait_for_unshard()

    def leave(self, args: tuple[Any, ...], out: Any) -> Any:
        """Free what `enter` gathered; a backward of `out` gathers it again."""
        self._state._modules_to_run_forward.clear()  # of a unit of several modules
        return self._state._post_forward(self.module, args, out)

    def gathered(self) -> list[torch.Tensor]:
        """Its parameters, as a forward sees them between `enter` and `leave`."""
        held = [each.owner._parameters[each.name] for each in fsdp_parameters(self.module)]
        return [each for each in held if each is not None]

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


def is_around(unit: nn.Module, inner: nn.Module) -> None:
    """Note that a unit holds another one."""
    inner._get_fsdp_state().around = unit._get_fsdp_state()  # type: ignore[operator]


def begin_at_the_root(unit: nn.Module) -> None:
    """Before a unit's first forward: torch takes the first unit that runs for the root of all inside of it.

    Of a model of which a part is called first (`model.encode(x)`), it would refuse the whole afterwards.
    """
    root = state = unit._get_fsdp_state()  # type: ignore[operator]
    while getattr(root, "around", None) is not None:
        root = root.around
    if state._is_root is None:
        _begin(root)
    elif state._state_ctx.post_backward_final_callback_queued and torch._C._current_graph_task_id() == -1:
        _forget_a_backward_that_raised(state)


def _forget_a_backward_that_raised(state: Any) -> None:
    """torch ends a backward in a callback that an error drops, and would end no later one.

    What it left under way is lost, as the step is; gradients that are in their places stay there.
    """
    states = state._state_ctx.all_states
    managed = [each for one in states for group in groups_of(one) for each in group.fsdp_params]
    for each in managed:
        if not isinstance(getattr(type(each), "unsharded_accumulated_grad", None), property):  # torch 2.15
            each.unsharded_accumulated_grad = None
        if hasattr(each, "_unsharded_param"):  # it was gathered once
            each._unsharded_param.grad = None
    kept = [(each.sharded_param, each.sharded_param.grad) for each in managed]
    next(one for one in states if one._is_root)._root_post_backward_final_callback()
    for parameter, gradient in kept:
        parameter.grad = gradient


def _begin(root: Any) -> None:
    """Start a root and all inside of it, or none: torch marks them before it looks at their parameters."""
    inside = [m._get_fsdp_state() for m in root._modules[0].modules() if hasattr(m, "_get_fsdp_state")]
    before = [state._is_root for state in inside]
    try:
        root._lazy_init()
    except BaseException:
        for state, was in zip(inside, before, strict=True):
            state._is_root = was
        root._state_ctx.all_states.clear()
        raise


def fsdp_parameters(module: nn.Module) -> list[FsdpParameter]:
    """The parameters that the `fully_shard` of this very module manages."""
    return [FsdpParameter(p, group) for group in _fsdp_groups(module) for p in group.fsdp_params]


def replaced_parameters(module: nn.Module) -> list[str]:
    """The parameters of a `fully_shard` unit whose place is empty, or has tensors that it would pass over.

    Once it has started, any others; before, it takes over parameters (`load_state_dict(assign=True)`).
    """
    started = module._get_fsdp_state()._is_root is not None  # type: ignore[operator]
    found = []
    for managed in fsdp_parameters(module):
        held, inner = managed.owner._parameters.get(managed.name), managed.inner
        between = getattr(inner, "_sharded_post_forward_param", None)  # `reshard_after_forward=2`
        own = (inner.sharded_param, getattr(inner, "_unsharded_param", None), between)
        passed_over = held is None or all(held is not each for each in own)
        if (passed_over and (started or not isinstance(held, nn.Parameter))) or not managed.follow_swapped():
            found.append(str(inner._param_fqn or managed.name))
    return found


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


def forget_unit(module: nn.Module) -> None:
    """A module that is put back as it was before `fully_shard` may be given to it again."""
    if not hasattr(module, "_get_fsdp_state"):  # it is no unit, and torch marks one before it is
        _composable_state._module_state_mapping.pop(module, None)
