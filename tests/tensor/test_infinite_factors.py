"""Terms of a sum times an infinite number: the sum comes first, as on one device."""

import pytest
import torch

import shardwright as sw
from shardwright.testing import rank_mesh

INF = float("inf")
FORMS = {
    "mul": lambda a: a * INF,
    "div": lambda a: a / 0.0,
    "alpha of add": lambda a: torch.add(a, a, alpha=INF),
    "alpha of sub": lambda a: torch.sub(a * 0, a, alpha=-INF),
    "beta of addmm": lambda a: torch.addmm(a, a, a, beta=INF),
    "alpha of addmm": lambda a: torch.addmm(a, a, a, alpha=INF),
    "value of addcmul": lambda a: torch.addcmul(a, a, a, value=INF),
    "weight of lerp": lambda a: torch.lerp(a * 0, a, INF),
    "alpha of a list": lambda a: torch._foreach_add([a], [a], alpha=INF)[0],
    "factor of a list": lambda a: torch._foreach_mul([a], INF)[0],
}


def _of_terms(name):
    mesh = rank_mesh((2,), ("x",))
    whole = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    own = whole if mesh.get_local_rank() == 0 else torch.zeros(2, 2)
    terms = sw.DTensor.from_local(own, mesh, [sw.Partial()])
    for _ in range(3):  # decided, known, and in C
        torch.testing.assert_close(FORMS[name](terms).full_tensor(), FORMS[name](whole), equal_nan=True)


@pytest.mark.parametrize("name", FORMS)
def test_infinite_factors_meet_the_sum(ranks, name):
    ranks(2, _of_terms, name, timeout=60)
