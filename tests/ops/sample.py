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

# More of them, which the page about operators must not show to gather for want of a rule.
OF_NETWORKS = (
    *NETWORKS,
    *(f"nn.functional.{name}" for name in (
        "conv1d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "bilinear",
        "max_pool1d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
        "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d",
        "adaptive_max_pool3d", "fractional_max_pool2d", "fractional_max_pool3d", "max_unpool2d",
        "group_norm", "instance_norm", "local_response_norm", "normalize", "pixel_shuffle",
        "pixel_unshuffle", "channel_shuffle", "unfold", "grid_sample", "interpolate.nearest",
        "interpolate.nearest-exact", "interpolate.linear", "interpolate.bilinear", "interpolate.bicubic",
        "interpolate.trilinear", "interpolate.area", "pad.constant", "pad.reflect", "pad.replicate",
        "pad.circular", "dropout2d", "dropout3d", "alpha_dropout", "relu6", "elu", "selu", "celu", "mish",
        "leaky_relu", "prelu", "rrelu", "hardtanh", "hardswish", "hardsigmoid", "hardshrink", "softshrink",
        "softplus", "softsign", "softmin", "logsigmoid", "tanhshrink", "threshold", "glu", "one_hot",
        "multi_head_attention_forward", "linear_cross_entropy", "linear_cross_entropy.chunked",
        "linear_cross_entropy.chunked_none", "nll_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
        "kl_div", "binary_cross_entropy", "binary_cross_entropy_with_logits", "gaussian_nll_loss",
        "poisson_nll_loss", "cosine_embedding_loss", "margin_ranking_loss", "multi_margin_loss",
        "multilabel_margin_loss", "multilabel_soft_margin_loss", "soft_margin_loss", "triplet_margin_loss",
        "hinge_embedding_loss", "cosine_similarity", "pairwise_distance",
    )),
    "matmul", "mm", "baddbmm", "einsum", "logsumexp", "sigmoid", "tanh", "exp", "log", "pow", "rsqrt", "sub",
    "div.no_rounding_mode", "neg", "abs", "sign", "square", "maximum", "clamp", "where", "masked_fill",
    "tril", "triu", "cumsum", "topk", "sort", "argmax", "max.reduction_with_dim", "gather", "scatter",
    "scatter_add", "index_select", "index_add", "index_copy", "chunk", "stack", "permute", "reshape",
    "flatten", "unflatten", "expand", "repeat", "roll", "flip", "norm", "linalg.vector_norm", "var", "std",
    "contiguous", "clone", "to", "split_with_sizes", "unbind", "squeeze", "unsqueeze", "narrow", "select",
)  # fmt: skip


def chosen(names: Iterable[str]) -> list[str]:
    """Those of the networks, and as many others as `HASHED`, the lowest by a hash of their names."""
    by_hash = sorted(names, key=lambda name: xxhash.xxh3_64_intdigest(name.encode()))
    others = [name for name in by_hash if name not in NETWORKS][:HASHED]
    return [*NETWORKS, *others]
