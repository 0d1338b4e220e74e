"""`local_map`: a function on local tensors becomes a function on DTensors, by stating its placements."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import tree_flatten, tree_unflatten
from shardwright.compat.dynamo import never_traced
from shardwright.errors import LayoutError, as_several, refuse_other_kind
from shardwright.index.stride import stride_like
from shardwright.layout import layout_of
from shardwright.layout.mesh_shape import MeshShape, are_relatives, as_mesh_shape
from shardwright.placement.base import Placement
from shardwright.tensor.agreed import check_alike, listed, told_by_all, whole_of
from shardwright.tensor.between import is_placed_as, layout_on
from shardwright.tensor.conversions import apart, together
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.placements import resolve_placements
from shardwright.tensor.spec import coords_of
from shardwright.tensor.wrap import as_ours

Shape = tuple[int, ...]
# What hardly decides how long a result is: ranks may have other ones of these.
_WITHOUT_SHAPE, _ANY = (float, complex, torch.dtype, torch.device, type(None)), "any"
# Calls with different layouts that one mapped function remembers the shapes of.
_MANY = 256
_UNEVEN = (
    "local_map asks all ranks for their parts of what is cut unevenly, which no graph holds; "
    "fix: local_map(..., out_shapes=[shape])"
)

_TWO_MESHES = (
    "local_map compares the ranks of two meshes, which no graph holds; fix: redistribute(device_mesh, "
    "placements) before what is compiled"
)


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Any = None,
    in_placements: Sequence[Any] | None = None,
    in_grad_placements: Sequence[Any] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
    out_shapes: Sequence[Sequence[int] | None] | None = None,
) -> Callable[..., Any]:
    """Run `func` on local tensors; DTensors go in and come out.

    Args:
        func: takes and returns local tensors; called without any DTensor, what it returns stays as it is.
        out_placements: per output its placements (None: a plain value); one entry serves all outputs.
        in_placements: per flattened argument the placements that it must have, which apply from left to right
            if they state no order; None: any.
        in_grad_placements: per flattened argument the placements of its gradient.
        device_mesh: the mesh of the outputs; by default that of the first DTensor argument.
        redistribute_inputs: move inputs to `in_placements` instead of refusing them.
        out_shapes: per output its logical shape; without it, the ranks tell each other their parts. Where all
            inputs are cut evenly a compiled graph takes parts to be as long as this rank's; else it breaks.
    Raises: LayoutError: an input with other placements, or on a mesh of other ranks (a slice of the mesh will
        do), a wrong number of placements, or outputs that are not the parts of one tensor: on all ranks alike
        where they tell each other.
    Cost: beyond `func`, the moves that `redistribute_inputs` asks for, and one all-gather of 536 bytes over
        each axis for each output that is cut, if `out_shapes` does not give its shape. What was told is
        remembered for these layouts of the arguments, unless there are arguments beside DTensors and
        fractions that may be this rank's own: whole numbers, plain tensors, objects.
    """
    _check_stated(func, in_placements, in_grad_placements, device_mesh, redistribute_inputs, out_shapes)
    if func is None:
        stated = out_placements, in_placements, in_grad_placements, device_mesh
        named: dict[str, Any] = {"redistribute_inputs": redistribute_inputs, "out_shapes": out_shapes}
        return lambda decorated: local_map(decorated, *stated, **named)
    shapes_told = _ShapesTold()

    @functools.wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        flat, tree = tree_flatten(args)
        _check_counts(len(flat), in_placements=in_placements, in_grad_placements=in_grad_placements)
        mesh = _home(flat, device_mesh)
        placed = [_placed(a, i, in_placements, redistribute=redistribute_inputs) for i, a in enumerate(flat)]
        local = [_local(x, i, in_grad_placements) for i, x in enumerate(placed)]
        out = func(*tree_unflatten(local, tree), **kwargs)
        given = [x for x in placed if isinstance(x, DTensor)]
        if not given or mesh is None:
            return out
        if torch.compiler.is_compiling() and (_are_stated(out_shapes) or all(map(_cut_evenly, given))):
            return _leave(out, out_placements, mesh, out_shapes, None)
        return shapes_told.leave(flat, kwargs, out, out_placements, mesh, out_shapes)

    return mapped


def _check_stated(
    func: Any, inputs: Any, gradients: Any, mesh: Any, redistribute_inputs: Any, out_shapes: Any
) -> None:
    """Refuse what is no function, list, mesh or flag where it is stated, not where it is called."""
    none = type(None)
    refuse_other_kind(
        "local_map: func", func, (Callable, none), LayoutError, fix="a function of local tensors"
    )
    refuse_other_kind("local_map: device_mesh", mesh, (DeviceMesh, none), LayoutError, fix="a mesh, or None")
    given, fix = redistribute_inputs, "True or False"
    refuse_other_kind("local_map: redistribute_inputs", given, bool, LayoutError, fix=fix)
    for name, several in (
        ("in_placements", inputs),
        ("in_grad_placements", gradients),
        ("out_shapes", out_shapes),
    ):
        if several is not None:
            fix = "a tuple with an entry for each tensor, None where nothing is stated"
            as_several(f"local_map: {name}", several, LayoutError, fix=fix)


def _check_counts(flat: int, **stated: Sequence[Any] | None) -> None:
    for name, given in stated.items():
        if given is not None and len(given) != flat:
            raise LayoutError(f"local_map: {len(given)} {name} for {flat} flattened arguments")


def _home(flat: Sequence[Any], stated: DeviceMesh | None) -> DeviceMesh | None:
    """The mesh of the outputs, if there is one; all arguments are on it, or on a slice of it."""
    mesh = stated
    for index, value in enumerate(flat):
        if isinstance(value, TorchDTensor):
            if mesh is None:
                mesh = value.device_mesh
            elif value.device_mesh != mesh:
                _refuse_other_ranks(index, value.device_mesh, mesh)
    return mesh


@never_traced(_TWO_MESHES)
def _refuse_other_ranks(index: int, mesh: DeviceMesh, home: DeviceMesh) -> None:
    """Raise where a rank's coords on two meshes differ: its parts belong to other elements."""
    own, wanted = as_mesh_shape(mesh), as_mesh_shape(home)
    if own.ranks != wanted.ranks and not are_relatives(own, wanted):
        raise LayoutError(
            f"local_map: argument {index} is on {own} of ranks {own.ranks}, the others or the outputs on "
            f"{wanted} of ranks {wanted.ranks}: a rank's parts of both do not belong together\n"
            "  fix: redistribute(device_mesh, placements) moves it to the mesh of the others"
        )


def _placed(value: Any, index: int, wanted: Sequence[Any] | None, *, redistribute: bool) -> Any:
    if not isinstance(value, TorchDTensor):
        return value
    x: DTensor = value if isinstance(value, DTensor) else as_ours(value)
    want = None if wanted is None else wanted[index]
    return x if want is None else placed_in_graph(x, index, *apart(want), redistribute)


def _local(value: Any, index: int, grads: Sequence[Any] | None) -> Any:
    if not isinstance(value, DTensor):
        return value
    return value.to_local(grad_placements=None if grads is None else grads[index])


def placed_in_graph(
    x: DTensor, index: int, names: Sequence[str] | None, values: Any, redistribute: bool
) -> DTensor:
    """An argument as it is wanted, with arguments that a graph can write down."""
    want: Any = together(names, values)
    if is_placed_as(x, want):
        return x
    if not redistribute:
        expected = layout_on(x, x.device_mesh, want)
        raise LayoutError(
            f"local_map: argument {index} has layout {x._spec.layout}, expected {expected}; "
            "redistribute it, or set redistribute_inputs=True"
        )
    return x.redistribute(placements=want)


def _are_stated(shapes: Sequence[Any] | None) -> bool:
    return shapes is not None and None not in shapes


def _cut_evenly(x: DTensor) -> bool:
    """Are all ranks' parts as large as this one's? Dynamo reads this; what it cannot tell from says no."""
    lengths = list(x.shape)
    placements: Sequence[Any] = x.placements
    for placement, ranks in zip(placements, x.device_mesh.shape, strict=True):
        if placement.is_shard():
            if lengths[placement.dim] % ranks:
                return False
            lengths[placement.dim] //= ranks
        elif not (placement.is_replicate() or placement.is_partial()):
            return False
    return True


def _seen(value: Any) -> object | None:
    """What all ranks know alike of an argument; None: it may be this rank's own, and decide about shapes."""
    if isinstance(value, TorchDTensor):
        return layout_of(value)
    return _ANY if isinstance(value, _WITHOUT_SHAPE) else None


def _leave(
    out: Any,
    placements: Any,
    mesh: DeviceMesh,
    shapes: Sequence[Sequence[int] | None] | None,
    told: _ShapesTold | None,
) -> Any:
    flat, tree = tree_flatten(out)
    per_output = _per_output(placements, len(flat))
    if shapes is not None and len(shapes) != len(flat):
        raise LayoutError(f"local_map: {len(shapes)} out_shapes for {len(flat)} outputs")
    wrapped = []
    for index, (value, want) in enumerate(zip(flat, per_output, strict=True)):
        if want is None:
            wrapped.append(value)
            continue
        if not isinstance(value, torch.Tensor):
            raise LayoutError(
                f"local_map: output {index} is a {type(value).__name__}, and has placements: give one entry "
                "per output in a tuple, None for a plain value"
            )
        shape = None if shapes is None else shapes[index]
        if shape is not None:
            shape = tuple(shape)
        elif told is not None:
            shape = told.of(index, value, mesh, want)
        stride = None if shape is None else stride_like(tuple(shape), tuple(value.stride()))
        wrapped.append(DTensor.from_local(value, mesh, want, shape=shape, stride=stride))
    return tree_unflatten(wrapped, tree)


class _ShapesTold:
    """The logical shapes of the outputs of one mapped function, as its ranks told each other once.

    asked: what all ranks know alike of the call: the same on every rank, so that all of them ask together.
        None: there is more than that to a call, and they ask each time.
    """

    def __init__(self) -> None:
        self.asked: tuple[object, ...] | None = None
        # For each mesh, whose ranks fill it alike: what one of them forgets, all of them do.
        self._known: dict[MeshShape, dict[tuple[object, ...], tuple[Shape, Shape]]] = {}

    @never_traced(_UNEVEN)
    def leave(
        self,
        flat: Sequence[Any],
        named: Mapping[str, Any],
        out: Any,
        placements: Any,
        mesh: DeviceMesh,
        shapes: Any,
    ) -> Any:
        """`_leave` of a call with these arguments, of which is noted what all ranks know alike."""
        others = tuple((name, _seen(value)) for name, value in sorted(named.items()) if _seen(value) != _ANY)
        seen = (*map(_seen, flat), *others)
        self.asked = None if None in (*seen, *dict(others).values()) else seen
        return _leave(out, placements, mesh, shapes, self)

    def of(self, index: int, local: torch.Tensor, mesh: DeviceMesh, placements: Any) -> Shape | None:
        """The logical shape of an output; None where each rank knows it from its own part."""
        resolved, order = resolve_placements(mesh, placements, default="error")
        cuts = any(p.is_partition and n > 1 for p, n in zip(resolved, mesh.shape, strict=True))
        if not cuts or torch.compiler.is_compiling() or coords_of(mesh) is None:
            return None
        if self.asked is None:
            return _told(local, mesh, resolved, order)
        key, known = (index, resolved, *self.asked), self._known.setdefault(as_mesh_shape(mesh), {})
        if key not in known:
            if len(known) >= _MANY:
                known.clear()
            known[key] = tuple(local.shape), _told(local, mesh, resolved, order)
        own, shape = known[key]
        if own != tuple(local.shape):
            raise LayoutError(
                f"local_map: output {index} has local shape {tuple(local.shape)}, and {own} when the ranks "
                "told each other theirs for the same layouts: its shape depends on more than those\n"
                "  fix: pass out_shapes= with the logical shape"
            )
        return shape


def _told(
    local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], order: Sequence[str] | None
) -> Shape:
    what = "local_map"
    told = told_by_all(local, mesh, (placements, order), f"{what}: the shapes of an output")
    check_alike(told, what)
    found = whole_of(told, mesh, placements, local.dtype)
    if found is None:
        raise LayoutError(
            f"{what}: the parts do not tell of which tensor they are under {placements}\n{listed(told)}\n"
            "  fix: return the part that belongs to the rank, or pass out_shapes= and the placements that "
            "the parts have"
        )
    return found.shape


def _per_output(placements: Any, count: int) -> list[Any]:
    nested = isinstance(placements, tuple) and all(
        p is None or isinstance(p, list | tuple) for p in placements
    )
    if not nested:
        return [placements] * count
    if len(placements) != count:
        raise LayoutError(f"local_map: {len(placements)} out_placements for {count} outputs")
    return list(placements)
