"""The meshes that a model computes on, by the names of their axes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import axis_names, root_mesh
from shardwright.context.submesh import submesh
from shardwright.errors import MeshError, ParallelError
from shardwright.parallel.sequence_scope import find_scope
from shardwright.tensor.local_use import kept_spec
from shardwright.tensor.wrap import as_ours


class Homes:
    """Finds this rank's mesh of some axes: that of a parameter, or a slice of the root of all.

    A layout that another stage tells names axes; this rank's mesh of these axes has other ranks.
    """

    def __init__(self, model: nn.Module, pipeline: DeviceMesh) -> None:
        self._pipeline = pipeline
        self._found: dict[tuple[str, ...], DeviceMesh] = {}
        for mesh in _meshes(model):
            self._found.setdefault(axis_names(mesh), mesh)

    def __call__(self, axes: tuple[str, ...]) -> DeviceMesh:
        """The mesh. Raises: ParallelError: this rank has none with these axes."""
        if axes not in self._found:
            found = self._sliced(axes)
            if found is None:
                raise ParallelError(
                    f"pipeline: the stage before hands over a tensor on {axes}, which nothing here is on\n"
                    "  fix: make the meshes of all strategies slices of one mesh that has the pipeline's axis"
                )
            self._found[axes] = found
        return self._found[axes]

    def _sliced(self, axes: tuple[str, ...]) -> DeviceMesh | None:
        """A slice of a parameter's mesh, or of the root of the pipeline's."""
        around = [mesh for names, mesh in self._found.items() if set(axes) <= set(names)]
        for mesh in (*around, root_mesh(self._pipeline)):
            with suppress(MeshError, KeyError, RuntimeError):
                return submesh(mesh, axes)
        return None


def _meshes(model: nn.Module) -> Iterator[DeviceMesh]:
    for module in model.modules():
        scope = find_scope(module)
        if scope is not None:
            yield scope.mesh
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, TorchDTensor):
            spec = as_ours(tensor)._spec
            inner = kept_spec(spec)
            if inner is not None:
                yield inner.mesh
            yield spec.mesh
