"""One call as the ways of running it see it: each fact is found once, when it is first asked for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from torch.distributed.device_mesh import DeviceMesh

from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import Coords
from shardwright.rules.call import Args, Call, Kwargs, Op, TensorInfo
from shardwright.rules.catalog.view_maps import Chains, is_described, views_of
from shardwright.rules.propagate import Decision, propagate
from shardwright.rules.registry import rules_of
from shardwright.tensor.dispatch.metadata import DataDependentError, described, result_infos
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.spec import LocalUse, coords_of
from shardwright.tensor.wrap import common_use


class Asked:
    """A call of an op on DTensors. tensors: those among the arguments, lists flattened, in schema order."""

    def __init__(self, func: Op, args: Args, kwargs: Kwargs, tensors: list[DTensor]) -> None:
        self.func, self.args, self.kwargs, self.tensors = func, args, kwargs, tensors

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the first operand; where others have another one, `ways.one_mesh` answers."""
        return self.tensors[0].device_mesh

    @property
    def on_one_mesh(self) -> bool:
        """Do all operands live on the same mesh?"""
        return are_together(self.tensors)

    @cached_property
    def coords(self) -> Coords | None:
        """Where this rank is on the mesh; None outside of it."""
        return coords_of(self.mesh)

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """Of the operands."""
        return tuple([t._spec.layout for t in self.tensors])

    @cached_property
    def use(self) -> LocalUse | None:
        """How the results take part in computation."""
        return common_use(self.tensors)

    @cached_property
    def infos(self) -> tuple[TensorInfo | None, ...] | None:
        """Metadata of the results; None: the data decide. Raises: what one device raises for these shapes."""
        try:
            return result_infos(self.func, self.args, self.kwargs)
        except DataDependentError:
            return None

    @cached_property
    def needs_whole_operands(self) -> str:
        """Why nothing but whole operands will do, whatever their layouts are; "" where a rule may know."""
        if not rules_of(self.func) and self.coords is not None:
            return "no rule; every operand is made whole"
        if self.infos is None:
            return f"{self.func.name()}: the shape of its result depends on the data"
        return ""

    @cached_property
    def call(self) -> Call:
        """The call on logical tensors; its results are not described where they need whole operands."""
        named = zip(self.kwargs, described(tuple(self.kwargs.values())), strict=True)
        infos = () if self.needs_whole_operands else self.infos or ()
        return Call(self.func, described(self.args), tuple(named), infos)

    @cached_property
    def views(self) -> Chains | None:
        """What each result sees of the first operand, if the call is a view."""
        return views_of(self.call) if is_described(self.func) else None

    @cached_property
    def decision(self) -> Decision:
        """What the rules make of it."""
        return propagate(self.call, self.layouts)


def are_together(tensors: Sequence[DTensor]) -> bool:
    """Do they live on the same mesh?"""
    first = tensors[0]
    shape = first._spec.layout.mesh_shape
    return all(x.device_mesh is first.device_mesh or x._spec.layout.mesh_shape == shape for x in tensors[1:])
