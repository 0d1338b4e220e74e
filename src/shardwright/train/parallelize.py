"""From degrees to placements: which public verb places which part of the decoder, in which order."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.compat import axis_names
from shardwright.context.context import DistributedContext
from shardwright.context.domains import DENSE_DOMAIN, EXPERT_DOMAIN, REGULAR_DOMAIN
from shardwright.context.submesh import submesh
from shardwright.parallel.context_parallel import parallelize_context
from shardwright.parallel.expert import parallelize_expert_parallel
from shardwright.parallel.fsdp import parallelize_fsdp
from shardwright.parallel.pipeline_parallel import parallelize_pipeline
from shardwright.parallel.replicate import parallelize_replicate
from shardwright.parallel.sequence_scope import find_scope
from shardwright.placement.base import Placement, Replicate
from shardwright.placement.shard import Shard
from shardwright.placement.zigzag import ZigZag
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.modules.distribute import distribute_module
from shardwright.train.config import TrainConfig
from shardwright.train.model import Attention, AttentionCore, Block, Decoder, ModelShape, init_weights

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
    """Place every parameter of the model, in place, innermost cut first.

    Stages, then tensor, context, experts, replicas, FSDP. Tensor parallelism takes the attentions only;
    everything else is computed alike on the ranks of a tp group, or, under `--sp`, each on its own tokens.
    """
    dense, expert = context.mesh_for(DENSE_DOMAIN), context.mesh_for(EXPERT_DOMAIN)
    regular = context.mesh_for(REGULAR_DOMAIN)
    if config.pp > 1:
        firsts = (config.layers * stage // config.pp for stage in range(1, config.pp))
        parallelize_pipeline(model, submesh(regular, "pp"), [f"blocks.{layer}" for layer in firsts])
    tp = submesh(dense, "tp") if config.tp > 1 else None
    for attention in [module for module in model.modules() if isinstance(module, Attention)]:
        if config.cp > 1:
            _cut_sequence(attention.core, submesh(regular, "cp_shard"), tp)
        if tp is not None:
            _cut_heads(attention, tp, between=Shard(1) if config.sp else Replicate())
    summed = ("ep_replicate", "ep_shard", *(("tp",) if config.sp else ()))
    parallelize_expert_parallel(model, mesh_experts=submesh(expert, summed), expert_shard_dim="ep_shard")
    if config.sp and tp is not None:
        for module in _between_attentions(model):
            parallelize_replicate(module, tp)
    if (config.dp_shard or 1) * config.cp == 1:
        parallelize_replicate(model, submesh(dense, ("dp_replicate", "cp_replicate")))
        return
    if config.cp_replicate > 1:
        parallelize_replicate(model, submesh(dense, "cp_replicate"))
    hybrid = config.dp_replicate > 1
    sharding = submesh(dense, ("dp_replicate", "dp_cp_shard") if hybrid else "dp_cp_shard")
    for module in _units(model, config.unit_mib * 2**20):
        parallelize_fsdp(module, sharding)


def _units(model: Decoder, small: float) -> list[nn.Module]:
    """What is gathered at once: each block, and the rest; all of it where that is a `small` message of bytes.

    A gather of a small block takes longer to begin than to send, twice in a step.
    """
    if sum(p.nbytes for p in model.parameters() if not _is_experts(p)) <= small:
        return [model]
    return [*(block for block in model.blocks if isinstance(block, Block)), model]


def _is_experts(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and "ep_shard" in axis_names(parameter.device_mesh)


def _between_attentions(model: Decoder) -> list[nn.Module]:
    """What computes on some tokens of the ranks of `--tp`, and is not an expert."""
    norms = [n for b in model.blocks if isinstance(b, Block) for n in (b.attention_norm, b.moe_norm)]
    return [model.embedding, *norms, model.norm, model.head]


def _cut_heads(attention: nn.Module, tp: DeviceMesh, between: Placement) -> None:
    """Give each rank of the axis its own heads; the residual stream stays plain on each rank.

    Args: between: what the stream is on the ranks: equal on all of them, or some tokens of each sequence.
    Cost: an all-reduce of the attention's output forward, and of its input's gradient backward; of a stream
        that is cut, its two halves.
    """

    def enter(_module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        stream = DTensor.from_local(inputs[0], mesh, [between], run_check=False)
        return (stream.redistribute(mesh, [Replicate()]),)

    def leave(_module: nn.Module, output: Any, mesh: DeviceMesh) -> Tensor:
        finished: DTensor = output.redistribute(mesh, [between])
        return finished.to_local()

    core: Any = attention.core
    tables = core.cos, core.sin
    distribute_module(attention, tp, _by_name("tp"), enter, leave, src_data_rank=None)
    if find_scope(core) is not None:
        core.cos, core.sin = tables  # positions are those of another mesh there


def _cut_sequence(core: AttentionCore, cp: DeviceMesh, tp: DeviceMesh | None) -> None:
    """Let queries meet the keys of all ranks of the axis; each rank has its positions of each head.

    Cost: as `parallelize_context`: keys and values go round.
    """
    cut = ZigZag(2)

    def enter(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        mine = [x.to_local() if isinstance(x, DTensor) else x for x in inputs]
        return tuple(DTensor.from_local(x, cp, [cut], run_check=False) for x in mine)

    def leave(_module: nn.Module, _inputs: Any, output: DTensor) -> Tensor:
        local = output.redistribute(cp, [cut]).to_local()
        return local if tp is None else DTensor.from_local(local, tp, [Shard(1)], run_check=False)

    core.register_forward_pre_hook(enter)
    parallelize_context(core, cp, attention="ring", cut={"q": 2, "k": 2, "v": 2})
    core.register_forward_hook(leave)


def _by_name(axis: str) -> dict[str, dict[str, Placement]]:
    return {name: {axis: placement} for name, placement in ATTENTION_PLAN.items()}
