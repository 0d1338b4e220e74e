"""Dense strides in the order of others are those that torch gives a copy."""

from random import Random

import torch

from shardwright.index.stride import stride_like


def _view(seed: int) -> torch.Tensor:
    """Permuted, some of its dims expanded."""
    rng = Random(seed)
    dims = rng.randint(1, 5)
    order = rng.sample(range(dims), dims)
    x = torch.empty([rng.randint(1, 4) for _ in range(dims)]).permute(order)
    for dim in range(dims):
        if rng.random() < 0.4:
            sizes = [-1] * dims
            sizes[dim] = rng.randint(2, 4)
            x = x.narrow(dim, 0, 1).expand(sizes)
    return x.permute(rng.sample(range(dims), dims))


def _of_more_than_one(stride, x):
    return [step for step, size in zip(stride, x.shape, strict=True) if size > 1]


def test_a_copy_is_dense_in_the_order_of_what_it_copies():
    for seed in range(2000):
        x = _view(seed)
        found = stride_like(tuple(x.shape), tuple(x.stride()))
        assert _of_more_than_one(found, x) == _of_more_than_one(torch.empty_like(x).stride(), x), x.stride()
