"""What networks are made of: softmax, losses, norms, attention, embeddings, convolutions."""

from __future__ import annotations

from typing import Any

import torch

from tests.fuzz.families.pointwise import mask_for
from tests.fuzz.scope import Nope, Scope


def softmax(s: Scope) -> None:
    """softmax and its like."""
    x = s.pick("f", dims=1)
    name = s.rng.choice(
        ("F.softmax", "F.log_softmax", ".softmax", "torch.log_softmax", "F.softmin", "F.normalize", "F.glu")
    )
    s.do(name, x, dim=s.dims(s[x]))


def loss(s: Scope) -> None:
    """A loss of a variable and targets."""
    reduction = s.rng.choice(("mean", "sum", "none"))
    name = s.rng.choice(("cross_entropy", "cross_entropy", "nll_loss", "mse_loss", "l1_loss",
                         "smooth_l1_loss",
                         "binary_cross_entropy_with_logits", "kl_div", "huber_loss", "probabilities",
                         "soft_margin_loss", "cosine_similarity"))  # fmt: skip
    if name in {"cross_entropy", "nll_loss"}:
        x = s.pick("f", dims=2)
        t = s[x]
        y = s.leaf((t.shape[0], *t.shape[2:]), torch.int64, f"index {t.shape[1]}")
        kwargs: dict[str, Any] = {"reduction": reduction}
        if s.chance(0.25):
            kwargs["weight"] = s.leaf((t.shape[1],), t.dtype, "positive", grad=False)
        if s.chance(0.25):
            kwargs["ignore_index"] = 0
        if name == "cross_entropy" and s.chance(0.25):
            kwargs["label_smoothing"] = 0.1
        if name == "nll_loss":
            (x,) = s.do("F.log_softmax", x, dim=1)
        s.do(f"F.{name}", x, y, **kwargs)
    elif name == "probabilities":
        x = s.pick("f", dims=2)
        (p,) = s.do("F.softmax", s.leaf(tuple(s[x].shape), s[x].dtype), dim=1)
        s.do("F.cross_entropy", x, p, reduction=reduction)
    elif name == "cosine_similarity":
        x = s.pick("f", dims=1)
        s.do("F.cosine_similarity", x, s.partner(s[x]), dim=s.dims(s[x]))
    else:
        x = s.pick("f")
        s.do(f"F.{name}", x, s.partner(s[x]), reduction=reduction)


def norm(s: Scope) -> None:
    """Layer, RMS and group norms."""
    name = s.rng.choice(("layer_norm", "rms_norm", "group_norm", "layer_norm"))
    x = s.pick("f", dims=2)
    t = s[x]
    if name == "group_norm":
        groups = [g for g in (1, 2, 3) if t.shape[1] % g == 0]
        affine = [s.leaf((t.shape[1],), t.dtype) for _ in range(2)] if s.chance(0.5) else []
        s.do("F.group_norm", x, s.rng.choice(groups), *affine)
        return
    shape = tuple(t.shape[-s.rng.randint(1, 2) :])
    count = s.rng.randint(0, 2 if name == "layer_norm" else 1)
    s.do(f"F.{name}", x, shape, *[s.leaf(shape, t.dtype) for _ in range(count)])


def attention(s: Scope) -> None:
    """Scaled dot products, causal, masked, with groups of heads."""
    if s.dtype.is_complex or not s.dtype.is_floating_point:
        raise Nope
    b, h, q, k, e = (
        s.rng.choice((1, 2)),
        s.rng.choice((2, 4)),
        s.rng.randint(1, 5),
        s.rng.randint(1, 6),
        s.rng.choice((2, 4)),
    )
    few = h // 2 if s.chance(0.25) else h
    kwargs: dict[str, Any] = {"enable_gqa": True} if few != h else {}
    query = s.leaf((b, h, q, e))
    try:
        query = s.pick("f", dims=4, where=lambda t: t.dim() == 4 and t.shape[1] % 2 == 0 and t.numel() > 0)
        b, h, q, e = s[query].shape
        few, kwargs = h, {}
    except Nope:
        pass
    key, value = s.leaf((b, few, k, e), s[query].dtype), s.leaf((b, few, k, e), s[query].dtype)
    roll = s.rng.random()
    if roll < 0.4:
        kwargs["is_causal"] = True
    elif roll < 0.6:
        kwargs["attn_mask"] = s.leaf((q, k), s[query].dtype, grad=False)
    s.do("F.scaled_dot_product_attention", query, key, value, **kwargs)


def lookup(s: Scope) -> None:
    """Embeddings, one-hot, counts."""
    name = s.rng.choice(("embedding", "embedding", "one_hot", "bincount"))
    if name == "embedding":
        table = s.pick("f", dims=2, where=lambda t: t.dim() == 2 and t.shape[0] > 0)
        index = s.leaf(s.rng.choice(((3,), (2, 4), (5,))), torch.int64, f"index {s[table].shape[0]}")
        kwargs = {"padding_idx": 0} if s.chance(0.3) else {}
        s.do("F.embedding", index, table, **kwargs)
        return
    index = s.leaf((s.rng.randint(2, 6),), torch.int64, "index 4")
    if name == "one_hot":
        s.do("F.one_hot", index, s.rng.choice((-1, 4, 5)))
    else:
        s.do("torch.bincount", index, **({"minlength": 6} if s.chance(0.5) else {}))


def spatial(s: Scope) -> None:
    """Convolutions, pooling, padding."""
    name = s.rng.choice(("conv1d", "max_pool1d", "avg_pool1d", "pad", "pad", "unfold"))
    x = s.pick("f", dims=3 if name != "pad" else 1)
    t = s[x]
    if name == "pad":
        sides = tuple(s.rng.randint(-1, 2) for _ in range(2 * s.rng.randint(1, min(2, t.dim()))))
        s.do("F.pad", x, sides, value=s.rng.choice((0.0, 1.5)))
    elif name == "conv1d" and t.dim() == 3:
        weight = s.leaf((3, t.shape[1], s.rng.randint(1, 3)), t.dtype)
        s.do("F.conv1d", x, weight, padding=s.rng.randint(0, 1), stride=s.rng.randint(1, 2))
    elif t.dim() == 3:
        s.do(f"F.{name}" if name != "unfold" else "F.avg_pool1d", x, s.rng.randint(1, 3), s.rng.randint(1, 2))
    else:
        raise Nope


def dropout_free(s: Scope) -> None:
    """Masks by position."""
    x = s.pick("fi", dims=2)
    name = s.rng.choice(("tril", "triu"))
    form = s.rng.choice(("plain", "method", "in place"))
    if form == "in place":
        x = s.pick("fi", dims=2, written=True)
        s.do(f".{name}_", x, s.rng.randint(-1, 1), form=form, result=False)
    else:
        s.do(f"torch.{name}" if form == "plain" else f".{name}", x, s.rng.randint(-1, 1), form=form)


def masked(s: Scope) -> None:
    """Values where a mask says so: the shape depends on the data."""
    x = s.pick("fci", dims=1)
    mask = mask_for(s, s[x])
    if s.chance(0.4):
        s.do("torch.masked_select", x, mask)
    elif s.chance(0.5):
        s.do("[]", x, mask, form="index")
    else:
        s.do("torch.nonzero", mask)
