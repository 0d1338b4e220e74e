"""Strategies: small functions that place the parameters of a module."""

from shardwright.parallel.batch_norm import parallelize_batch_norm
from shardwright.parallel.buffers import differing_buffers
from shardwright.parallel.context_parallel import cut_sequence, parallelize_context
from shardwright.parallel.expert import ShardMoESparseExpertsParallel, parallelize_expert_parallel
from shardwright.parallel.fsdp import parallelize_fsdp
from shardwright.parallel.hsdp import parallelize_hsdp
from shardwright.parallel.logical_dropout import logical_dropout
from shardwright.parallel.pipeline.pipeline import Pipeline
from shardwright.parallel.pipeline_parallel import parallelize_pipeline
from shardwright.parallel.replicate import parallelize_replicate
from shardwright.parallel.table.apply import parallelize
from shardwright.parallel.table.report import Report
from shardwright.parallel.tensor_parallel import parallelize_tensor
from shardwright.parallel.to_local import ToLocalParallel

__all__ = [
    "Pipeline",
    "Report",
    "ShardMoESparseExpertsParallel",
    "ToLocalParallel",
    "cut_sequence",
    "differing_buffers",
    "logical_dropout",
    "parallelize",
    "parallelize_batch_norm",
    "parallelize_context",
    "parallelize_expert_parallel",
    "parallelize_fsdp",
    "parallelize_hsdp",
    "parallelize_pipeline",
    "parallelize_replicate",
    "parallelize_tensor",
]
