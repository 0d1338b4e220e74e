"""The description that a DTensor carries: torch's `DTensorSpec`, answered from one `Layout`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwright.compat import (
    DTensorSpec,
    ShardOrderEntry,
    TensorMeta,
    asked_by_context_parallel,
    root_mesh,
    torch_shard_order,
)
from shardwright.compat.dynamo import out_of_graph, stands_in_graph
from shardwright.errors import MeshError, ParallelError
from shardwright.index.region import Shape
from shardwright.layout.kind import Kind
from shardwright.layout.layout import Layout, all_hold_some
from shardwright.layout.mesh_shape import MeshShape, as_mesh_shape
from shardwright.remember import memo
from shardwright.tensor.placements import placements_of


@dataclass(frozen=True, slots=True)
class LocalUse:
    """How a parameter takes part in computation: as its local tensor on `axes`.

    axes:   mesh axes on which the computation sees the local tensor.
    summed: axes on which the ranks compute different terms of the gradient, which must still be added up
        where the parameter is replicated. On those of `axes` they are terms of the loss; on others they come
        of one program whose activations are cut there (a sequence).
    shared: ranks, this one among them, that compute with other tokens of the rows that this one reads: they
        may lie on axes of another mesh than the parameter's (an expert's).
    """

    axes: tuple[str, ...]
    summed: tuple[str, ...]
    shared: tuple[int, ...] = ()


class Extra(tuple[ShardOrderEntry, ...]):  # noqa: SLOT001 - a tuple cannot have slots of its own
    """torch's shard order, with what torch's spec has no field for: it travels with a flattened tensor.

    order: the axes in order of application; torch's entries name only those that cut.
    """

    order: tuple[int, ...]
    use: LocalUse | None

    def __new__(
        cls, entries: Iterable[ShardOrderEntry], order: tuple[int, ...], use: LocalUse | None
    ) -> Self:
        """Make the tuple of torch's entries, and hang the rest on it."""
        made = super().__new__(cls, entries)
        made.order, made.use = order, use
        return made

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Extra):
            return self.order == other.order and self.use == other.use and super().__eq__(other)
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__

    def __repr__(self) -> str:
        return f"Extra({super().__repr__()}, {self.order}, {self.use})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Extra, (tuple(self), self.order, self.use)


class Placements(tuple[Any, ...]):  # noqa: SLOT001 - a tuple cannot have slots of its own
    """The placements where torch's own code reads them off a spec; `DTensor.placements` is another tuple.

    Its context parallelism asks whether they are not a *list*, as every tuple is, and then raises without a
    word. Nothing else of ours is asked there: `F.scaled_dot_product_attention` itself is replaced.
    """

    def __ne__(self, other: object) -> bool:
        if type(other) is list and asked_by_context_parallel():
            raise ParallelError(_ATTENTION_OF_TORCHS)
        return super().__ne__(other)

    __eq__, __hash__ = tuple.__eq__, tuple.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)


_ATTENTION_OF_TORCHS = (
    "scaled_dot_product_attention inside torch's context_parallel takes each rank's plain part of a "
    "sequence, not a DTensor\n  fix:  shardwright.parallel.parallelize_context(module, mesh) takes the place "
    "of the block; a DTensor whose sequence is cut needs none"
)


class _Ordered:
    """What torch reads of a spec whose placements do not apply left to right: what its tensor answers."""

    def __get__(self, spec: Spec, _: type) -> tuple[Any, ...]:
        return placements_of(spec.layout)


class Token:
    """Stands for all equal specs in the key of a call: hashed and compared by identity, which C does."""

    __slots__ = ("spec",)

    def __init__(self, spec: Spec) -> None:
        self.spec = spec


_MANY_SPECS = 65536
_tokens: dict[tuple[Layout, int, LocalUse | None], Token] = memo("tokens of specs", {})


class Spec(DTensorSpec):
    """torch's spec as a view of a layout: nothing in it can disagree with the layout.

    Not a dataclass of its own: torch reads `mesh`, `placements`, `tensor_meta` and `shard_order`.

    coords: this rank's coordinates on the mesh, None when it is not part of it.
    """

    layout: Layout
    coords: tuple[int, ...] | None
    use: LocalUse | None
    kind: SpecKind | None
    token: Token
    pending: bool  # on some axis
    plain: Spec  # itself, but for `asking`
    shown: Spec  # itself, but for symbols of a graph: of numbers that stand for any, where none matters
    form: Any  # of `asking`
    placements = _Ordered()

    def __init__(self, layout: Layout, mesh: DeviceMesh, use: LocalUse | None = None) -> None:
        self.__dict__.update(_without_sizes(layout.placements, layout.order, mesh, use, None))
        self._sized(layout)

    @staticmethod
    def of_kind(kind: SpecKind, layout: Layout) -> Spec:
        """The spec of a layout of this kind: what does not depend on its sizes is taken as it is."""
        self = Spec.__new__(Spec)
        self.__dict__.update(kind.fields)
        self._sized(layout)
        return self

    def _sized(self, layout: Layout) -> None:
        fields = self.__dict__
        fields["layout"] = layout
        fields["tensor_meta"] = TensorMeta(torch.Size(layout.shape), layout.stride, layout.dtype)
        fields["_hash"] = hash((layout, fields["use"]))
        if len(_tokens) >= _MANY_SPECS:
            _tokens.clear()
        fields["token"] = _tokens.setdefault((layout, id(fields["mesh"]), fields["use"]), Token(self))
        fields["plain"] = fields["shown"] = self
        fields["form"] = None

    def asking(self, form: Any = None) -> Spec:
        """The same spec under another token: of a value whose finished form is known, perhaps.

        One for each value, since it holds the form; the token is one for all. Copies are plain.
        """
        made = Spec.__new__(Spec)
        made.__dict__.update(self.plain.__dict__, kind=None, form=form)
        made.__dict__["token"] = self.plain.__dict__.setdefault("_asking", None) or _asking_token(self.plain)
        return made

    @cached_property
    def held_by_all(self) -> bool:
        """Does every rank surely hold elements?"""
        return all_hold_some(self.layout)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_equals(self, other: object, skip_shapes: bool = False) -> bool:  # noqa: ARG002  torch's signature
        """What torch asks of a spec without saying which sizes a graph holds for: all of it."""
        return self == other

    def asked_by_graph(self, sizes: Sequence[int | None]) -> Callable[[Spec], bool]:
        """What a graph asks of the spec of an input that had this one. sizes: None where it holds for any."""
        kind = self.plain.kind
        if kind is None or None not in sizes:
            return lambda spec: spec == self
        numbers = [(dim, size) for dim, size in enumerate(sizes) if size is not None]

        def fits(spec: Spec) -> bool:
            shape = spec.layout.shape
            return spec.plain.kind is kind and all(shape[dim] == size for dim, size in numbers)

        return fits

    def __hash__(self) -> int:
        return self._hash  # type: ignore[return-value]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Spec):
            return NotImplemented
        if self.mesh is not other.mesh and not (
            self.mesh == other.mesh and root_mesh(self.mesh) == root_mesh(other.mesh)
        ):  # torch calls slices of two meshes equal if ranks and names are
            return False
        return self.layout == other.layout and self.use == other.use

    def __deepcopy__(self, _: Any) -> Spec:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Spec, (self.layout, self.mesh, self.use)


def _asking_token(plain: Spec) -> Token:
    spec = Spec.__new__(Spec)
    spec.__dict__.update(plain.__dict__, kind=None)
    token = plain.__dict__["_asking"] = spec.__dict__["token"] = Token(spec)
    return token


# Axes on which ranks compute terms of their own, by mesh; a backward there has numbers of its own too.
_summed: set[tuple[MeshShape, str]] = set()


def is_of_ranks(layout: Layout) -> bool:
    """Is something pending that ranks have computed each for itself, with numbers of their own?"""
    mesh = layout.mesh_shape
    return any((mesh, mesh.axes[axis]) in _summed for axis in layout.pending_axes)


def _without_sizes(
    placements: tuple[Any, ...],
    order: tuple[int, ...],
    mesh: DeviceMesh,
    use: LocalUse | None,
    kind: SpecKind | None,
) -> dict[str, Any]:
    _summed.update((as_mesh_shape(mesh), axis) for axis in (use.summed if use is not None else ()))
    return {
        "kind": kind,
        "use": use,
        "mesh": mesh,
        "coords": coords_of(mesh),
        **({"placements": Placements(placements)} if order == tuple(range(len(order))) else {}),
        "pending": any(p.is_pending for p in placements),
        "shard_order": Extra(torch_shard_order(placements, order), order, use),
        "use_strided_shard_as_shard_order": False,
    }


class SpecKind:
    """What the specs of all layouts of one kind on one mesh share; makes them, one object per shape.

    Compared and hashed by identity. Not a spec: it has no sizes.
    """

    __slots__ = ("_specs", "fields", "layouts")

    def __init__(self, layouts: Kind, mesh: DeviceMesh, use: LocalUse | None) -> None:
        self.layouts = layouts
        self.fields = _without_sizes(
            layouts.arrangement.placements, layouts.arrangement.order, mesh, use, self
        )
        self._specs: dict[Shape, Spec] = {}

    def spec(self, shape: Shape, layout: Layout | None = None) -> Spec:
        """The one spec of this kind for a tensor of this shape, whose dims are 0, 1 or more as the kind's."""
        known = self._specs.get(shape)
        if known is None:
            if len(self._specs) >= _MANY_SHAPES:
                self._specs.clear()
            layout = Layout.of_kind(self.layouts, shape) if layout is None else layout
            known = self._specs[layout.shape] = Spec.of_kind(self, layout)
        return known


_MANY_SHAPES = 4096
_MANY_KINDS = 16384
_kinds: dict[tuple[Kind, int, LocalUse | None], SpecKind] = memo("kinds of specs", {})
_meshes: dict[tuple[DeviceMesh, int], tuple[DeviceMesh, DeviceMesh]] = memo("slices of meshes", {})


def spec_of(layout: Layout, mesh: DeviceMesh, use: LocalUse | None = None) -> Spec:
    """The one spec object of a layout on a mesh: remembered, so that dispatch compares by identity."""
    kind = layout.kind
    if kind is None:
        home = one_object(mesh)
        made = _tokens.get((layout, id(home), use))
        return Spec(layout, home, use) if made is None else made.spec
    return spec_kind(kind, mesh, use).spec(layout.shape, layout)


def spec_kind(kind: Kind, mesh: DeviceMesh, use: LocalUse | None) -> SpecKind:
    """The one object of a kind of layouts on a mesh."""
    key = kind, id(mesh), use  # what is found holds its mesh, so that no other one has this id
    known = _kinds.get(key)
    if known is None:
        home = one_object(mesh)
        if home is not mesh:
            return spec_kind(kind, home, use)
        if len(_kinds) >= _MANY_KINDS:
            _kinds.clear()
        known = _kinds[key] = SpecKind(kind, mesh, use)
    return known


def one_object(mesh: DeviceMesh) -> DeviceMesh:
    """What stands for all slices of one mesh that are equal: `mesh["tp"]` is a new object at every call.

    Not for equal slices of two meshes: those lead back to other meshes, and have other process groups.
    """
    root = root_mesh(mesh)
    known = _meshes.get((mesh, id(root)))
    if known is None:
        if len(_meshes) >= _MANY_SPECS:
            _meshes.clear()
        mesh = out_of_graph(mesh)
        known = _meshes[mesh, id(root)] = mesh, root
    if known[0] is not mesh:
        stands_in_graph(known[0], mesh)
    return known[0]


def with_dtype(layout: Layout, dtype: torch.dtype) -> Layout:
    """The same placements, shape and stride for elements of another type."""
    if layout.dtype == dtype:
        return layout
    return layout.with_shape(layout.shape, layout.stride, dtype=dtype)


def finished(layout: Layout) -> Layout:
    """The layout with every Pending replaced by its dual: where the gradient of such a value lives."""
    return layout.with_placements(tuple(p.dual() for p in layout.placements), order=layout.order_names)


def coords_of(mesh: DeviceMesh) -> tuple[int, ...] | None:
    """This rank's coordinates on the mesh, None when it is not part of it.

    Raises: MeshError: they are those of several ranks, which torch's `LocalTensorMode` runs in one process.
    """
    found = mesh.get_coordinate()
    if found and not isinstance(found[0], int):
        raise MeshError(
            "torch's LocalTensorMode runs all ranks as one; here each rank runs a program of its own\n"
            "  fix: shardwright.testing.RankPool, which runs ranks as processes"
        )
    return None if found is None else tuple(found)


def has_form(tensors: Iterable[Any]) -> bool:
    """Is a finished form of one of these known, perhaps?"""
    for x in tensors:  # noqa: SIM110  a generator is a call for each
        if x._spec.plain is not x._spec:
            return True
    return False
