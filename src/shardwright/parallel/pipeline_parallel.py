"""Pipeline parallelism: a model is cut into stages by the names of modules, one or more on each rank."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.errors import ParallelError
from shardwright.parallel.meshes import one_axis, refuse_other_order
from shardwright.parallel.pipeline.mark import ATTRIBUTE
from shardwright.parallel.pipeline.places import VERB, Stages, read_places
from shardwright.parallel.pipeline.schedules import rank_of_stage
from shardwright.parallel.pipeline.split import refuse_placed, take_apart
from shardwright.tensor.modules.same_model import agreed


def parallelize_pipeline(
    module: nn.Module, mesh: DeviceMesh, cuts: Sequence[str], *, stages: Stages | None = None
) -> nn.Module:
    """Leave on each rank of `mesh` the parts of `module` that its stages compute, in place.

    `Pipeline(module, ...)` then runs it. Every stage runs the model's own forward on the arguments of the
    model: masks, positions and rotary tables are made where they are used. What the parts of other stages
    return is received where it is computed with (the stream of activations; what an encoder left), with the
    layout that it had, and is a tensor without values where it is not. Names of parameters and of the
    state_dict are those of the whole model.

    Args:
        mesh: the one axis of the pipeline.
        cuts: names of modules, in the order of computation; each begins a stage. `len(cuts) + 1` stages run
            on the ranks in turn: as many as ranks, or a multiple.
        stages: `{name of a module or parameter: stage}` for what is not computed in the order in which it is
            registered; several stages in a tuple hold a copy each, whose gradients are summed.
    Returns: the module itself. Parameters that parts of different stages share (tied weights) are held by
        each of them.
    Raises: ParallelError: not one axis, no such module, cuts out of order, a number of stages that the ranks
        do not divide, a stage without parameters, a module that was cut already or that `fully_shard`
        manages, ranks with other cuts or parameters; nothing has been changed then.
    Cost: an all-reduce of 40 bytes. The module is whole on every rank before; make a large one on the meta
        device.
    Source: GPipe, arXiv 1811.06965; 1F1B: PipeDream, arXiv 2006.09503; interleaved: arXiv 2104.04473.
    """
    with agreed(VERB, module, mesh) as said:
        said.options = {"cuts": cuts, "stages": stages}
        if hasattr(module, ATTRIBUTE):
            raise ParallelError(f"{VERB}: {type(module).__name__} is cut into stages already; cut it once")
        refuse_other_order(mesh, one_axis(mesh, VERB, module, "pp"), VERB)
        refuse_placed(module, mesh)
        places = read_places(module, cuts, {} if stages is None else stages)
    take_apart(module, mesh, places, rank_of_stage(places.stages, mesh.size()))
    return module
