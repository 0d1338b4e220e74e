"""Views that copy elements of a conjugate, or of what is noted to be negative, carry that out."""

import torch

import shardwright as sw
from shardwright.errors import RuleError
from shardwright.testing.meshes import rank_mesh

from .cases import close

VIEWS = {
    "merged": lambda x: x.mT.reshape(8, -1),
    "split and merged": lambda x: x.unflatten(1, (2, -1)).mT.reshape(8, -1),
    "every other": lambda x: x[:, 1::2],
    "windows": lambda x: x.unfold(1, 2, 1),
    "chosen": lambda x: x[:, [2, 0]],
    "expanded": lambda x: x[:, :1].expand(2, 3, 4).reshape(6, -1),
}
NOTED = {"conjugate": torch.conj, "adjoint": lambda x: x.mH, "negative": lambda x: x.conj().imag}


def _cuts():
    return sw.Shard(0), sw.Shard(1), sw.Interleaved(1, 2), sw.ZigZag(1)


def _read_and_written():
    mesh = rank_mesh((2,))
    value = torch.randn(2, 4, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))
    for cut in _cuts():
        for noted, note in NOTED.items():
            for name, view in VIEWS.items():
                plain = value.clone()
                ours = sw.distribute_tensor(value, mesh, [cut], src_data_rank=None)
                one, two = view(note(ours)), view(note(plain))
                close(one, two, f"{noted} {name} {cut}")
                assert (one.is_conj(), one.is_neg()) == (two.is_conj(), two.is_neg()), (noted, name, cut)
                close(one * 2, two * 2, f"{noted} {name} {cut}, computed with")
                _fill(two)
                try:
                    _fill(one)
                except RuleError:  # by every rank, else the others wait
                    assert name == "windows", (noted, name, cut)
                else:
                    close(ours, plain, f"{noted} {name} {cut}, written")


def _fill(x):
    x.fill_(0.5 + 2j if x.is_complex() else 0.5)


def _multiplied():
    mesh = rank_mesh((4,))
    value = torch.randn(2, 4, 2, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))
    ours = sw.distribute_tensor(value, mesh, [sw.Shard(1)], src_data_rank=None).unflatten(1, (2, -1))
    plain = value.unflatten(1, (2, -1))
    close(ours @ ours.mH, plain @ plain.mH, "a matrix and its adjoint")


def test_views_of_conjugates_and_negatives(ranks):
    ranks(2, _read_and_written, timeout=120)


def test_a_cut_matrix_and_its_adjoint(ranks):
    ranks(4, _multiplied, timeout=60)
