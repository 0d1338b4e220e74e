"""What networks are made of, continued: convolutions, pools, cells, more norms and losses."""

from __future__ import annotations

from typing import Any

import torch

from tests.fuzz.program import Ref
from tests.fuzz.scope import Nope, Scope

_ACTIVATIONS = ("celu", "hardshrink", "hardsigmoid", "softshrink", "threshold", "prelu", "tanhshrink", "glu")


def _real(s: Scope) -> torch.dtype:
    if s.dtype not in {torch.float64, torch.float32, torch.bfloat16}:
        raise Nope
    return s.dtype


def _images(s: Scope, dims: int, least: int = 3) -> Ref:
    """A batch of images of this many dims, one that there is or a new one."""
    fits = lambda t: t.dim() == dims + 2 and min(t.shape[2:]) >= least and t.shape[0] > 0  # noqa: E731
    try:
        return s.pick("f", dims=dims + 2, where=fits)
    except Nope:
        sizes = [s.rng.randint(least, 6 if dims == 1 else 4) for _ in range(dims)]
        return s.leaf((s.rng.randint(1, 3), s.rng.choice((2, 4)), *sizes), _real(s))


def convolution(s: Scope) -> None:
    """conv1d, conv2d, transposed, with strides, paddings, dilations, groups."""
    dims = s.rng.choice((1, 2))
    x = _images(s, dims)
    t = s[x]
    channels = t.shape[1]
    groups = s.rng.choice([g for g in (1, 2) if channels % g == 0])
    kernel = [s.rng.randint(1, 3) for _ in range(dims)]
    transposed = s.chance(0.25)
    out = 2 * groups
    shape = (channels, out // groups, *kernel) if transposed else (out, channels // groups, *kernel)
    kwargs: dict[str, Any] = {
        "stride": s.rng.randint(1, 2),
        "padding": s.rng.choice((0, 1)),
        "groups": groups,
    }
    if not transposed and s.chance(0.2):
        kwargs["dilation"] = 2
    bias = (s.leaf((out,), t.dtype),) if s.chance(0.5) else ()
    s.do(f"F.conv{'_transpose' if transposed else ''}{dims}d", x, s.leaf(shape, t.dtype), *bias, **kwargs)


def pool(s: Scope) -> None:
    """Pools, adaptive ones, and changes of resolution."""
    dims = s.rng.choice((1, 2))
    name = s.rng.choice(("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool",
                         "interpolate",
                         "unfold", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "pad"))  # fmt: skip
    x = _images(s, 2 if name in {"unfold", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle"} else dims)
    t = s[x]
    if name in {"max_pool", "avg_pool"}:
        s.do(f"F.{name}{dims}d", x, 2, stride=s.rng.randint(1, 2), padding=s.rng.choice((0, 1)),
             ceil_mode=s.chance(0.3))  # fmt: skip
    elif name.startswith("adaptive"):
        s.do(f"F.{name}{dims}d", x, s.rng.randint(1, 3))
    elif name == "lp_pool":
        s.do(f"F.lp_pool{dims}d", x, 2.0, 2)
    elif name == "interpolate":
        mode = s.rng.choice(("nearest", "linear" if dims == 1 else "bilinear", "area", "nearest-exact"))
        s.do("F.interpolate", x, scale_factor=s.rng.choice((2, 0.5)), mode=mode)
    elif name == "unfold":
        s.do("F.unfold", x, 2, stride=s.rng.randint(1, 2))
    elif name == "pad":
        sides = tuple(s.rng.randint(0, 2) for _ in range(2 * dims))
        s.do("F.pad", x, sides, mode=s.rng.choice(("reflect", "replicate", "circular")))
    elif name == "channel_shuffle":
        s.do("F.channel_shuffle", x, 2)
    elif name == "pixel_shuffle":
        s.do("F.pixel_shuffle", s.leaf((2, 4, 2, 3), t.dtype), 2)
    else:
        s.do("F.pixel_unshuffle", s.leaf((2, 2, 4, 2), t.dtype), 2)


def cell(s: Scope) -> None:
    """A step of a recurrent network."""
    dtype, hidden = _real(s), s.rng.choice((2, 3))
    try:
        x = s.pick("f", dims=2, where=lambda t: t.dim() == 2 and t.numel() > 0 and t.dtype == dtype)
    except Nope:
        x = s.leaf((s.rng.randint(1, 4), 3), dtype)
    rows, width = s[x].shape
    name, gates = s.rng.choice(
        (("rnn_tanh_cell", 1), ("rnn_relu_cell", 1), ("gru_cell", 3), ("lstm_cell", 4))
    )
    h = s.leaf((rows, hidden), dtype)
    state: Any = [h, s.leaf((rows, hidden), dtype)] if name == "lstm_cell" else h
    weights = [s.leaf((gates * hidden, n), dtype) for n in (width, hidden)]
    biases = [s.leaf((gates * hidden,), dtype) for _ in range(2)] if s.chance(0.6) else []
    s.do(f"torch.{name}", x, state, *weights, *biases)


def more_norms(s: Scope) -> None:
    """Batch, instance and local norms; running values are written."""
    name = s.rng.choice(("batch_norm", "batch_norm", "instance_norm", "local_response_norm", "normalize"))
    x = s.pick("f", dims=3 if name in {"instance_norm", "local_response_norm"} else 2,
               where=lambda t: t.numel() > 0)  # fmt: skip
    t = s[x]
    c = t.shape[1]
    if name == "local_response_norm":
        s.do("F.local_response_norm", x, 2)
    elif name == "normalize":
        s.do("F.normalize", x, p=s.rng.choice((1.0, 2.0, 3.0)), dim=s.dims(t))
    elif name == "instance_norm":
        affine = {k: s.leaf((c,), t.dtype) for k in ("weight", "bias")} if s.chance(0.5) else {}
        s.do("F.instance_norm", x, **affine)
    else:
        running = [s.leaf((c,), t.dtype, "positive", grad=False, pending=False) for _ in range(2)]
        affine = {k: s.leaf((c,), t.dtype) for k in ("weight", "bias")} if s.chance(0.5) else {}
        s.do("F.batch_norm", x, *running, training=s.chance(0.6), **affine)


def more_losses(s: Scope) -> None:
    """Losses that compare pairs, margins and distributions."""
    reduction = s.rng.choice(("mean", "sum", "none"))
    name = s.rng.choice(("margin_ranking_loss", "hinge_embedding_loss", "poisson_nll_loss",
                         "gaussian_nll_loss",
                         "triplet_margin_loss", "cosine_embedding_loss", "multi_margin_loss",
                         "multilabel_soft_margin_loss", "binary_cross_entropy"))  # fmt: skip
    x = s.pick("f", dims=2, where=lambda t: t.dim() == 2 and t.numel() > 0)
    t = s[x]
    if name in {"margin_ranking_loss", "triplet_margin_loss"}:
        third = s.do("torch.sign", s.leaf(tuple(t.shape), t.dtype, grad=False))[0]
        s.do(f"F.{name}", x, s.partner(t), third, reduction=reduction)
    elif name == "hinge_embedding_loss":
        s.do(f"F.{name}", x, s.do("torch.sign", s.leaf(tuple(t.shape), t.dtype, grad=False))[0],
             reduction=reduction)  # fmt: skip
    elif name == "gaussian_nll_loss":
        s.do(f"F.{name}", x, s.partner(t), s.leaf(tuple(t.shape), t.dtype, "positive"), reduction=reduction)
    elif name == "cosine_embedding_loss":
        s.do(
            f"F.{name}",
            x,
            s.partner(t),
            s.leaf((t.shape[0],), t.dtype, "ones", grad=False),
            reduction=reduction,
        )
    elif name == "multi_margin_loss":
        s.do(f"F.{name}", x, s.leaf((t.shape[0],), torch.int64, f"index {t.shape[1]}"), reduction=reduction)
    elif name == "binary_cross_entropy":
        s.do("F.binary_cross_entropy", s.do("torch.sigmoid", x)[0], s.do("torch.sigmoid", s.partner(t))[0],
             reduction=reduction)  # fmt: skip
    elif name == "multilabel_soft_margin_loss":
        s.do(f"F.{name}", x, s.leaf(tuple(t.shape), t.dtype, "ones", grad=False), reduction=reduction)
    else:
        s.do(f"F.{name}", x, s.partner(t), reduction=reduction)


def more_activations(s: Scope) -> None:
    """Functions of `F` with parameters; bags and bilinear forms."""
    name = s.rng.choice((*_ACTIVATIONS, "embedding_bag", "bilinear", "fold"))
    x = s.pick("f", dims=2)
    t = s[x]
    if name == "threshold":
        s.do("F.threshold", x, 0.1, 2.0)
    elif name == "prelu":
        s.do("F.prelu", x, s.leaf((t.shape[1],) if s.chance(0.5) else (1,), t.dtype))
    elif name == "glu":
        s.do("F.glu", x, dim=s.dims(t))
    elif name == "embedding_bag":
        table = s.pick("f", dims=2, where=lambda v: v.dim() == 2 and v.shape[0] > 0)
        index = s.leaf((3, 2), torch.int64, f"index {s[table].shape[0]}")
        s.do("F.embedding_bag", index, table, mode=s.rng.choice(("sum", "mean", "max")))
    elif name == "bilinear":
        if t.dim() != 2:
            raise Nope
        s.do("F.bilinear", x, s.partner(t, (t.shape[0], 3)), s.leaf((2, t.shape[1], 3), t.dtype))
    elif name == "fold":
        s.do("F.fold", s.leaf((2, 4, 6), t.dtype), (3, 4), 2)
    else:
        s.do(f"F.{name}", x)
