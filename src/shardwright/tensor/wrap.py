"""Making the DTensor of a local tensor: no checks, no autograd, no communication."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch.autograd import forward_ad

from shardwright.layout.layout import Layout
from shardwright.layout.of_tensor import layout_of_spec
from shardwright.placement.base import Replicate
from shardwright.tensor.spec import spec_of

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor as TorchDTensor

    from shardwright.tensor.dtensor import DTensor
    from shardwright.tensor.spec import Spec

# The two classes of this package, entered where they are defined: [0] ordinary, [1] with a local use.
CLASSES: list[Any] = [None, None]
# The function that starts a redistribution without waiting, entered by the module of the class it returns.
STARTERS: list[Any] = []
# What brings a view that had to copy up to date with its base, entered by the module that knows such views.
REFRESHERS: list[Any] = []


def up_to_date(x: TorchDTensor) -> None:
    """Derive the local tensor again if `x` is a copied view of a base that was written since."""
    for refresh in REFRESHERS:
        refresh(x)


def wrap(local: torch.Tensor, spec: Spec, *, requires_grad: bool = False) -> DTensor:
    """The DTensor whose part on this rank is `local`.

    torch gives a wrapper the storage offset of what it is made of: where this rank's part begins inside a
    storage. Forward-mode AD wants that of a view and of its tangent to agree, whose layouts may differ; there
    every wrapper begins at 0.
    """
    cls = CLASSES[spec.use is not None]
    if forward_ad._current_level >= 0 and local.storage_offset():
        made = cls.__new__(cls, local.new_empty(0), spec, requires_grad=requires_grad)
        made._local_tensor = local
        return cast("DTensor", made)
    return cast("DTensor", cls.__new__(cls, local, spec, requires_grad=requires_grad))


def as_ours(x: TorchDTensor) -> DTensor:
    """torch's own DTensor as ours: the same local tensor, no communication, no autograd."""
    if isinstance(x, CLASSES[0]):
        return cast("DTensor", x)
    spec = x._spec
    return wrap(x._local_tensor.detach(), spec_of(layout_of_spec(spec), spec.mesh))


def as_replicated(x: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """The DTensor that every rank holds whole; not differentiable."""
    layout = Layout(mesh, (Replicate(),) * mesh.ndim, tuple(x.shape), dtype=x.dtype, stride=tuple(x.stride()))
    return wrap(x.detach(), spec_of(layout, mesh))
