"""The rules that ship, one family per file. Families know nothing of each other."""

from shardwright.rules.catalog import (
    attention,
    convolution,
    embedding,
    factories,
    indexing,
    joining,
    losses,
    matmul,
    means,
    norms,
    optimizers,
    pointwise,
    reductions,
    softmax,
    sorting,
    views,
)

__all__ = [
    "attention",
    "convolution",
    "embedding",
    "factories",
    "indexing",
    "joining",
    "losses",
    "matmul",
    "means",
    "norms",
    "optimizers",
    "pointwise",
    "reductions",
    "softmax",
    "sorting",
    "views",
]
