"""The spec of a DTensor that a compiled program took apart and puts together again, at every call of it."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwright.compat import axis_names, current_graph_task_id
from shardwright.compat.symbols import has_example, has_symbols, hints
from shardwright.errors import LayoutError
from shardwright.layout.layout import Layout
from shardwright.remember import memo
from shardwright.tensor.graph_spec import of_sizes
from shardwright.tensor.spec import Extra, Spec, spec_of

_MANY = 16384
_HANDED = "_has_a_holder"
# By identity of what the program keeps of a tensor, which the entry holds, so that nothing else has its id.
_known: dict[tuple[Any, ...], tuple[Spec, Any, Any]] = memo("specs of compiled results", {})


class Kept(tuple[Any, ...]):  # noqa: SLOT001 - a tuple cannot have slots of its own
    """What a graph keeps of a tensor, as torch reads and compares it, and where it begins in its storage.

    Torch takes views of a base from there; without one it is 0.
    """

    offset: int

    def __new__(cls, kept: tuple[Any, ...], offset: int) -> Self:
        """Hang the offset on what torch keeps."""
        made = super().__new__(cls, kept)
        made.offset = offset
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, (tuple(self), self.offset)


def spec_again(inner: dict[str, Any], kept: tuple[Any, ...], size: Any, stride: Any) -> Spec:
    """What the tensor had: `inner` and `kept` are what `__tensor_flatten__` named, the rest is of now."""
    mesh, _, meta, _ = constants_of(kept)
    mesh, local = inner.get("device_mesh", mesh), inner["_local_tensor"]
    dtype = local.dtype if isinstance(local, torch.Tensor) else meta.dtype
    sizes = (*size, *stride)
    if has_symbols(sizes):  # while a graph of any size is traced
        _refuse_unknown(size)
        return of_sizes(_made(mesh, kept, hints(size), hints(stride), dtype), size, stride)
    key = id(mesh), id(kept), dtype, sizes
    known = _known.get(key)
    if known is None:
        if len(_known) >= _MANY:
            _known.clear()
        known = _known[key] = _made(mesh, kept, size, stride, dtype), mesh, kept
    return known[0]


def _refuse_unknown(size: Any) -> None:
    """Raises: LayoutError: a size of which there is no example."""
    for dim in [dim for dim, length in enumerate(size) if not has_example(length)]:
        raise LayoutError(
            f"a graph takes no DTensor whose dim {dim} has no example of its size (mark_unbacked, or of data "
            f"alone): where elements are is decided for a size\n  fix: torch._dynamo.mark_dynamic(x, {dim})"
        )


def as_gradient(local: Any) -> Any:
    """A local part that comes out of a compiled backward, for one holder: a copy where another has it.

    The graph hands a part on to as many as get it, also one that came in. torch keeps the first gradient of a
    leaf as it is if nobody refers to it, and looks at the wrapper, which is new for each of them.
    """
    if current_graph_task_id() == -1 or not isinstance(local, torch.Tensor):
        return local
    if hasattr(local, _HANDED):
        return local.clone()
    hand_over(local)
    return local


def hand_over(local: torch.Tensor) -> None:
    """Note that somebody has it: in a backward, what flattens a tensor has got a gradient."""
    if current_graph_task_id() != -1:
        setattr(local, _HANDED, True)


def constants_of(kept: tuple[Any, ...]) -> tuple[Any, Any, Any, Any]:
    """The mesh (None where the graph holds it by itself), placements, meta and order."""
    spec = kept[0]
    if isinstance(spec, Spec):  # torch 2.11
        return spec.mesh, spec.placements, spec.tensor_meta, spec.shard_order
    return None, *kept[:3]


def _made(mesh: DeviceMesh, kept: tuple[Any, ...], size: Any, stride: Any, dtype: torch.dtype) -> Spec:
    _, placements, _, extra = constants_of(kept)
    layout = Layout(
        mesh, placements, tuple(size), dtype=dtype, stride=tuple(stride), order=_names(mesh, extra)
    )
    return spec_of(layout, mesh, extra.use if isinstance(extra, Extra) else None)


def _names(mesh: DeviceMesh, extra: Any) -> tuple[str, ...] | None:
    if not isinstance(extra, Extra):
        return None
    names = axis_names(mesh)
    return tuple(names[axis] for axis in extra.order)
