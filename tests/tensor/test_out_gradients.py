"""`out=` beside operands that require a gradient: what torch copies there has one, the rest is refused."""

import pytest
import torch

import shardwright as sw

from .cases import close, full, mesh

PASS_IT_ON = {
    "ndtr": lambda x, out: torch.special.ndtr(x, out=out),
    "tensordot": lambda x, out: torch.tensordot(x, x.detach().T @ x.detach(), 1, out=out),
    "quantile": lambda x, out: torch.quantile(x, 0.3, dim=1, keepdim=True, out=out),
    "matrix_norm": lambda x, out: torch.linalg.matrix_norm(x, out=out),
}
REFUSED = {
    "exp": lambda x, out: torch.exp(x, out=out),
    "sum": lambda x, out: torch.sum(x, 0, out=out),
    "matmul": lambda x, out: torch.matmul(x, x.T, out=out),
}


def _as_on_one_device():
    for name, call in PASS_IT_ON.items():
        for cut in (sw.Shard(0), sw.Shard(1), sw.Replicate()):
            x = full(5, 3)
            plain, ours = x.clone().requires_grad_(), sw.distribute_tensor(x, mesh(), [cut]).requires_grad_()
            shape = call(x.clone(), torch.empty(0)).shape
            wanted = torch.zeros(shape)
            got = sw.distribute_tensor(wanted.clone(), mesh(), [sw.Replicate()])
            call(plain, wanted)
            call(ours, got)
            assert got.requires_grad == wanted.requires_grad, name
            close(got.detach(), wanted.detach(), f"{name} {cut}")
            wanted.pow(2).sum().backward()
            got.pow(2).sum().backward()
            close(ours.grad, plain.grad, f"{name} {cut}: gradient")


def _refused():
    for call in REFUSED.values():
        for x in (full(5, 3).requires_grad_(), sw.distribute_tensor(full(5, 3), mesh(), [sw.Shard(0)])):
            x.requires_grad_()
            with pytest.raises(RuntimeError, match="automatic differentiation"):
                call(x, x.detach().clone())


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_passes_gradients_on_where_torch_does(ranks):
    ranks(2, _as_on_one_device)


def test_other_functions_refuse_out_beside_gradients(ranks):
    ranks(2, _refused)
