"""From degrees to placements: which public verb places which part of the decoder, in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwright.context.domains import DENSE_DOMAIN, EXPERT_DOMAIN
from shardwright.context.submesh import submesh
from shardwright.parallel.expert import parallelize_expert_parallel
from shardwright.parallel.fsdp import parallelize_fsdp
from shardwright.parallel.replicate import parallelize_replicate
from shardwright.placement.base import Placement, Replicate
from shardwright.placement.shard import Shard
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.modules.distribute import distribute_module
from shardwright.train.model import Attention, Decoder, ModelShape, init_weights

if TYPE_CHECKING:
    from torch import nn

    from shardwright.context.context import DistributedContext
    from shardwright.train.config import TrainConfig

ATTENTION_PLAN = {"wq.weight": Shard(0), "wk.weight": Shard(0), "wv.weight": Shard(0), "wo.weight": Shard(1)}


def build_model(config: TrainConfig, context: DistributedContext) -> Decoder:
    """The decoder of `config` with its weights, placed on the meshes of `context`. Collective.

    Every rank makes the whole model from the seed first: the weights cannot depend on the mesh.
    """
    model = Decoder(ModelShape.of(config))
    init_weights(model, config.seed)
    model.to(context.device)
    parallelize(model, config, context)
    return model


def parallelize(model: Decoder, config: TrainConfig, context: DistributedContext) -> None:
    """Place every parameter of the model, in place, innermost cut first: tensor, experts, replicas, FSDP.

    Tensor parallelism takes the attentions only; everything else is computed alike on the ranks of a tp
    group.
    """
    dense, expert = context.mesh_for(DENSE_DOMAIN), context.mesh_for(EXPERT_DOMAIN)
    if config.tp > 1:
        for attention in (module for module in model.modules() if isinstance(module, Attention)):
            _cut_heads(attention, submesh(dense, "tp"))
    parallelize_expert_parallel(
        model, mesh_experts=submesh(expert, ("ep_replicate", "ep_shard")), expert_shard_dim="ep_shard"
    )
    if (config.dp_shard or 1) == 1:
        parallelize_replicate(model, submesh(dense, ("dp_replicate", "cp_replicate")))
        return
    if config.cp_replicate > 1:
        parallelize_replicate(model, submesh(dense, "cp_replicate"))
    hybrid = config.dp_replicate > 1
    sharding = submesh(dense, ("dp_replicate", "dp_cp_shard") if hybrid else "dp_cp_shard")
    for module in (*model.blocks, model):
        parallelize_fsdp(module, sharding)


def _cut_heads(attention: nn.Module, tp: DeviceMesh) -> None:
    """Give each rank of the axis its own heads; the residual stream stays plain, equal on all of them.

    Cost: an all-reduce of the attention's output forward, and of its input's gradient backward.
    """

    def enter(_module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        return (DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False),)

    def leave(_module: nn.Module, output: Any, mesh: DeviceMesh) -> Tensor:
        finished: DTensor = output.redistribute(mesh, [Replicate()])
        return finished.to_local()

    distribute_module(attention, tp, _by_name("tp"), enter, leave, src_data_rank=None)


def _by_name(axis: str) -> dict[str, dict[str, Placement]]:
    return {name: {axis: placement} for name, placement in ATTENTION_PLAN.items()}
