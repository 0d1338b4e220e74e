"""Making the DTensor of a local tensor: no checks, no autograd, no communication."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from shardwright.compat import DisableTorchFunctionSubclass, TensorMeta, without_modes
from shardwright.compat.symbols import has_symbols, hints
from shardwright.layout.layout import Layout
from shardwright.layout.of_tensor import layout_of_spec
from shardwright.placement.base import Replicate
from shardwright.remember import remembered
from shardwright.tensor.graph_spec import of_sizes
from shardwright.tensor.spec import spec_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor as TorchDTensor

    from shardwright.tensor.dtensor import DTensor
    from shardwright.tensor.spec import LocalUse, Spec

# The two classes of this package, [0] ordinary, [1] with a local use: `tensor.install` puts them in.
CLASSES: list[Any] = [None, None]


class _Knots:
    """What stands above this module and is asked for below it: `tensor.install` puts it in.

    copies:  the views that had to copy, as long as they are alive: empty, nothing is out of date.
    refresh: brings one of them up to date with its base.
    start:   starts a redistribution without waiting.
    """

    copies: Mapping[Any, Any]
    refresh: Callable[[Any], None]
    start: Callable[[DTensor, Layout], DTensor]


knots = _Knots()


def up_to_date(x: TorchDTensor) -> None:
    """Derive the local tensor again if `x` is a copied view of a base that was written since."""
    if knots.copies:
        knots.refresh(x)


# Attributes of one tensor that no copy of it has.
REMEMBERED = frozenset({"_reshaped_in_place", "_turned_among_views", "_derived"})


def hand_out(local: torch.Tensor) -> torch.Tensor:
    """A local tensor that the program gets, or gave: what is done to its memory is seen by nobody here."""
    if type(local) is torch.Tensor:
        for held in (local, local.untyped_storage()):  # `data` of the tensor may become another memory
            vars(held)["in_hands"] = True
    return local


# Filled once a program holds any local tensor: until then no graph but ours can have saved one.
held_outside: set[str] = set()


def hold_outside(by: str) -> None:
    """Have local tensors count what is written into them from here on: the program has one.

    Its graphs may save one. A version for each of 1,500 parameters is a tenth of an optimizer's step.
    """
    if not torch.compiler.is_compiling() and not held_outside:
        held_outside.add(by)


def in_hands(local: torch.Tensor) -> bool:
    """Was its memory handed out?"""
    return hasattr(local, "in_hands") or hasattr(local.untyped_storage(), "in_hands")


def reshaped(x: DTensor) -> None:
    """Remember that the sizes of `x` were changed in place: views of it are of what it was."""
    vars(x)["_reshaped_in_place"] = True


def is_reshaped(x: DTensor) -> bool:
    """Were its sizes changed in place?"""
    return "_reshaped_in_place" in vars(x)


_STOOD_IN = "_base_of_what_it_was"


def as_it_was(x: DTensor) -> DTensor:
    """What `x` is now, for who must know it when `x` itself has been given another shape."""
    made = wrap(x._local_tensor, x._spec, offset=offset_of(x))
    vars(made)[_STOOD_IN] = base_of(x)
    return made


def base_of(x: torch.Tensor) -> torch.Tensor | None:
    """The tensor of which torch, or what it stands for, knows it as a view."""
    known: torch.Tensor | None = x._base if x._is_view() else vars(x).get(_STOOD_IN)
    return known


def wrap(local: torch.Tensor, spec: Spec, *, requires_grad: bool = False, offset: int = 0) -> DTensor:
    """The DTensor whose part on this rank is `local`.

    offset: where the logical tensor begins in its storage on one device, for a view. torch would take the
        local tensor's, which is another one on every rank, for what its own code asks of memory.
    """
    cls = CLASSES[spec.use is not None]
    made: DTensor
    if local.storage_offset() == offset:
        made = cls.__new__(cls, local, spec, requires_grad=requires_grad)
        return made
    empty = _empty_at(offset, local.dtype, local.device, local.is_conj(), local.is_neg())
    made = cls.__new__(cls, empty, spec, requires_grad=requires_grad)
    made._local_tensor = local
    return made


@remembered(4096)
def _empty_at(
    offset: int, dtype: torch.dtype, device: torch.device, conjugate: bool, negative: bool
) -> torch.Tensor:
    """What gives a wrapper its storage offset; nothing is ever read from it."""
    with without_modes():
        made = torch.empty(0, dtype=dtype, device=device).as_strided((0,), (1,), offset)
        made = made.conj() if conjugate else made
        return made._neg_view() if negative else made


def local_part(x: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: of a plain one itself."""
    return x._local_tensor if isinstance(x, CLASSES[0]) else x


def offset_of(x: torch.Tensor) -> int:
    """Where `x` begins in its storage, as torch's own code sees it: for a DTensor, on one device."""
    with DisableTorchFunctionSubclass():
        return cast("int", x.storage_offset())


def as_ours(x: TorchDTensor) -> DTensor:
    """torch's own DTensor as ours: the same local tensor, no communication, no autograd."""
    if isinstance(x, CLASSES[0]):
        return x  # type: ignore[no-any-return]
    spec = x._spec
    if torch.compiler.is_compiling() and has_symbols(x.shape):
        meta = TensorMeta(torch.Size(hints(x.shape)), hints(x.stride()), x.dtype)
        shown = spec_of(layout_of_spec(replace(spec, tensor_meta=meta)), spec.mesh)
        return wrap(x._local_tensor.detach(), of_sizes(shown, x.shape, x.stride()))
    return wrap(x._local_tensor.detach(), spec_of(layout_of_spec(spec), spec.mesh))


def as_replicated(x: torch.Tensor, mesh: DeviceMesh, use: LocalUse | None = None) -> DTensor:
    """The DTensor that every rank holds whole; not differentiable."""
    if x._is_zerotensor():  # autograd's, without memory: a kernel below this dispatch would read it
        x = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    shape, stride = tuple(x.shape), tuple(x.stride())
    traced = torch.compiler.is_compiling() and has_symbols(shape)
    numbers = (hints(shape), hints(stride)) if traced else (shape, stride)
    layout = Layout(mesh, (Replicate(),) * mesh.ndim, numbers[0], dtype=x.dtype, stride=numbers[1])
    spec = spec_of(layout, mesh, use)
    return wrap(x.detach(), of_sizes(spec, shape, stride) if traced else spec)


def common_use(tensors: Sequence[DTensor]) -> LocalUse | None:
    """Results of localized parameters alone are localized too; beside an ordinary DTensor they are not."""
    use = tensors[0]._spec.use
    return use if all(t._spec.use == use for t in tensors) else None


def used_as(x: DTensor, use: LocalUse | None) -> DTensor:
    """`x` with the part in computation that its operands had; see `common_use`."""
    if use is None or x._spec.use == use:
        return x
    return wrap(x._local_tensor, spec_of(x._spec.layout, x.device_mesh, use))


def with_stride(x: DTensor, stride: tuple[int, ...]) -> DTensor:
    """A new result with the strides that one device's has; its local tensor lies as it was made."""
    spec = x._spec
    if spec.layout.stride == stride:
        return x
    layout = spec.layout.with_shape(spec.layout.shape, stride)
    return wrap(x._local_tensor, spec_of(layout, spec.mesh, spec.use))
