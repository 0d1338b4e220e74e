"""The operators that every run of the tests checks: a fixed choice by hash, and what networks consist of."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

HASHED = 15

# What a transformer, a convolutional network and an optimizer call.
NETWORKS = (
    "add", "mul", "addmm", "bmm", "nn.functional.linear", "nn.functional.embedding", "nn.functional.rms_norm",
    "nn.functional.layer_norm", "nn.functional.scaled_dot_product_attention", "softmax", "log_softmax",
    "nn.functional.gelu", "nn.functional.silu", "nn.functional.cross_entropy", "nn.functional.conv2d",
    "nn.functional.max_pool2d", "nn.functional.batch_norm", "nn.functional.relu", "nn.functional.mse_loss",
    "nn.functional.dropout", "view", "transpose", "cat", "split", "sum", "mean", "sqrt", "addcmul",
    "addcdiv", "lerp",
)  # fmt: skip


def chosen(names: Iterable[str]) -> list[str]:
    """Those of the networks, and as many others as `HASHED`, the lowest by a hash of their names."""
    by_hash = sorted(names, key=lambda name: xxhash.xxh3_64_intdigest(name.encode()))
    others = [name for name in by_hash if name not in NETWORKS][:HASHED]
    return [*NETWORKS, *others]
