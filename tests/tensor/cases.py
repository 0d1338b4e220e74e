"""Meshes and layouts that every test of an op goes through, and the comparison with plain torch."""

import torch
import torch.distributed as dist

import shardwright as sw
from shardwright.testing.meshes import rank_mesh

LINE = {2: ((2,), ("tp",)), 3: ((3,), ("tp",)), 4: ((2, 2), ("dp", "tp")), 6: ((3, 2), ("dp", "tp"))}


def mesh():
    """The mesh of this world: one axis up to 3 ranks, two above."""
    sizes, axes = LINE[dist.get_world_size()]
    return rank_mesh(sizes, axes)


def full(*shape, seed=0, dtype=torch.float32):
    """The same values on every rank, without ties."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def placements_of(dims, *, pending=True):
    """Every placement that a tensor of that many dims can have on one axis."""
    found = [sw.Replicate(), *(sw.Shard(d) for d in range(dims))]
    return [*found, sw.Partial("sum")] if pending else found


def layouts_of(dims, *, pending=True):
    """On one axis every placement; on two axes a choice with equal dims, mixed and pending ones."""
    single = placements_of(dims, pending=pending)
    if mesh().ndim == 1:
        return [(p,) for p in single]
    pairs = [(sw.Replicate(), sw.Shard(0)), (sw.Shard(0), sw.Shard(0)), (sw.Shard(dims - 1), sw.Shard(0))]
    if pending:
        pairs += [(sw.Partial("sum"), sw.Shard(dims - 1)), (sw.Shard(0), sw.Partial("sum"))]
    return pairs


def placed(x, grid, placements):
    """What `distribute_tensor` makes of a tensor that all ranks have, without the broadcasts.

    A collective takes a rank a millisecond of processor time, and most tests place more than they compute.
    """
    return sw.distribute_tensor(torch.empty_like(x).copy_(x), grid, placements, src_data_rank=None)


def place(x, placements, *, requires_grad=False):
    """The leaf DTensor of a full tensor; a pending one holds different terms on the ranks."""
    grid = mesh()
    if not any(p.is_partial() for p in placements):
        made = placed(x, grid, placements)
        return made.requires_grad_(requires_grad)
    cut = [sw.Replicate() if p.is_partial() else p for p in placements]
    local = placed(x, grid, cut).to_local()
    for axis, p in enumerate(placements):
        if p.is_partial():
            size, coord = grid.size(axis), grid.get_local_rank(axis)
            local = local - (size - 1) * 0.5 if coord == 0 else torch.full_like(local, 0.5)
    made = sw.DTensor.from_local(local, grid, placements, shape=x.shape, stride=x.stride())
    assert torch.allclose(made.full_tensor(), x, atol=1e-5)
    return made.detach().requires_grad_(requires_grad)


def whole(x):
    """The full value of a DTensor, a plain tensor as it is."""
    return x.full_tensor() if isinstance(x, torch.distributed.tensor.DTensor) else x


def close(got, wanted, where=""):
    """Equal up to rounding, with the shape and dtype of the wanted value."""
    got = whole(got)
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5, msg=lambda m: f"{where}: {m}")


def check_op(function, operands, layouts, *, gradient=True):
    """Value and gradients of `function` on DTensors in these layouts equal those of plain torch."""
    plain = [x.clone().requires_grad_(gradient and x.is_floating_point()) for x in operands]
    placed = [
        place(x, layout, requires_grad=gradient and x.is_floating_point())
        for x, layout in zip(operands, layouts, strict=True)
    ]
    where = f"layouts {[str(sw.layout_of(p)) for p in placed]}"
    wanted, got = function(*plain), function(*placed)
    wanted, got = (v if isinstance(v, tuple | list) else (v,) for v in (wanted, got))
    assert len(wanted) == len(got), where
    total_wanted, total_got = 0.0, 0.0
    for index, (w, g) in enumerate(zip(wanted, got, strict=True)):
        close(g, w.detach(), f"{where}, result {index}")
        assert tuple(g.shape) == tuple(w.shape), where
        assert g.dtype == w.dtype, where
        if gradient and w.is_floating_point() and w.requires_grad:
            weight = torch.cos(torch.arange(w.numel()).reshape(w.shape))
            total_wanted = total_wanted + (w * weight).sum()
            total_got = total_got + (g * place(weight, [sw.Replicate()] * mesh().ndim)).sum()
    if gradient and isinstance(total_wanted, torch.Tensor):
        total_wanted.backward()
        total_got.backward()
        for index, (x, p) in enumerate(zip(placed, plain, strict=True)):
            if p.grad is not None:
                assert x.grad is not None, f"{where}: operand {index} has no gradient"
                close(x.grad, p.grad, f"{where}, gradient of operand {index}")
