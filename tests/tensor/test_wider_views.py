"""Writes through views as a wider dtype, and dtypes that a backend does not send itself."""

import pytest
import torch

import shardwright as sw
from shardwright.testing.meshes import rank_mesh

from .cases import close

VIEWS = (
    (torch.uint8, torch.int16), (torch.uint8, torch.float32), (torch.int16, torch.float64),
    (torch.float32, torch.float64), (torch.uint8, torch.complex64), (torch.float64, torch.complex128),
    (torch.float16, torch.int32), (torch.int32, torch.uint8), (torch.float32, torch.int32),
    (torch.complex64, torch.float64),
)  # fmt: skip
WRITES = {"a part": lambda v: v[:, :1].fill_(2), "an index": lambda v: v.__setitem__((0, 1), 5)}


def _written():
    mesh = rank_mesh((2,))
    values = torch.arange(1, 129, dtype=torch.uint8)
    for cut in (sw.Shard(0), sw.Shard(2), sw.Interleaved(1, 2), sw.Replicate()):
        for have, wider in VIEWS:
            for name, write in WRITES.items():
                plain = values.clone().view(have)
                plain = plain[: plain.numel() // 16 * 16].view(2, 2, -1)
                ours = sw.distribute_tensor(plain, mesh, [cut], src_data_rank=None)
                plain = plain.clone()
                with sw.spmd(mesh):
                    for x in (ours, plain):
                        write(x.view(wider))
                whole = ours.full_tensor()
                same = torch.equal(whole.contiguous().view(torch.uint8), plain.view(torch.uint8))
                assert same, f"{have} as {wider}, {cut}, {name}: {whole} for {plain}"


def test_writes_through_a_view_as_another_dtype(ranks):
    ranks(2, _written, timeout=120)


def _placed():
    mesh = rank_mesh((2,))
    for dtype in (
        torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
        torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.int8, torch.complex32,
    ):  # fmt: skip
        for shape in ((4, 2), (), (0, 3)):
            plain = torch.arange(8.0)[: torch.Size(shape).numel()].view(shape).to(dtype)
            ours = sw.distribute_tensor(plain, mesh, [sw.Replicate()])
            assert ours.dtype == dtype
            assert torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (ours.to_local(), plain)))
            x = sw.DTensor.from_local(plain, mesh, [sw.Replicate()], run_check=True)
            assert x.dtype == dtype


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_is_placed_from_the_source_rank(ranks):
    ranks(2, _placed)


def _itself():
    mesh = rank_mesh((2,))
    index = torch.tensor([0])
    for dtype in (torch.bool, torch.float32):
        for place in (torch.clone, lambda v: sw.distribute_tensor(v, mesh, [sw.Replicate()])):
            x, at = place(torch.ones(1, 1, 1, dtype=dtype)), place(index)
            with pytest.raises(RuntimeError, match="single memory location"):
                x[at, :, 0:] = x
    masked, plain = sw.distribute_tensor(torch.eye(3), mesh, [sw.Replicate()]), torch.eye(3)
    for x in (masked, plain):
        x[x > 0] = 2.0
    close(masked, plain)
    for cut in (sw.Replicate(), sw.Shard(0)):
        base, wanted = torch.arange(4.0).view(2, 2) + 1j, torch.arange(4.0).view(2, 2) + 1j
        ours = sw.distribute_tensor(base, mesh, [cut])
        with sw.spmd(mesh):
            for x in (ours, wanted):
                assert x.masked_scatter_(torch.eye(2) > 0, x * 2) is x
                x.H.masked_scatter_(torch.eye(2) > 0, torch.full((2, 2), 3j))
                x.mH.put_(torch.tensor([1, 0]), torch.tensor([1j, 2.0 + 0j]))
        close(ours, wanted)


def test_writes_whose_size_data_decide(ranks):
    ranks(2, _itself)


def _while_gradients_are_asked():
    """Ranks that had to copy derive a view again after a write; the others need not."""
    mesh = rank_mesh((4,), ("tp",))
    value = torch.arange(35.0).view(5, 7)
    for cut in (sw.Shard(0), sw.Shard(1), sw.Interleaved(1, 2), sw.BlockCyclic(1, 1), sw.ZigZag(1)):
        for write in (lambda v: v.mul_(3), lambda v: v.zero_(), lambda v: v.add_(v)):
            seen = []
            for x in (value.clone(), sw.distribute_tensor(value.clone(), mesh, [cut], src_data_rank=None)):
                x.requires_grad_()
                y = x * 1
                view = y.view(-1)[::2]
                write(view)
                (view * 2).sum().backward()
                seen.append((y.detach(), view.detach(), x.grad))
            for wanted, got in zip(*seen, strict=True):
                close(got, wanted, str(cut))


def test_writes_through_views_that_some_ranks_copied(ranks):
    ranks(4, _while_gradients_are_asked, timeout=60)
