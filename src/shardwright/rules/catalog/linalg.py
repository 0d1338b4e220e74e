"""Linear algebra on the last two dims: a matrix is whole, the batch of matrices may be cut.

And Fourier transforms, which are linear along whole dims.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardwright.compat import argument_name
from shardwright.rules.call import Call, TensorInfo
from shardwright.rules.catalog.labels import join, letters
from shardwright.rules.formula import Formula, formula
from shardwright.rules.rule import register_rule, rule

# name -> the dims at the end that one matrix (or vector) takes, by argument
_MATRIX = {"A": 2, "self": 2, "input": 2, "LU": 2, "LD": 2, "LU_data": 2, "B": 2, "input2": 2, "input3": 2}
_OF_ONE = """
    _linalg_det _linalg_eigh _linalg_slogdet _linalg_svd cholesky cholesky_inverse geqrf linalg_cholesky_ex
    linalg_eig linalg_eigvals linalg_inv_ex linalg_ldl_factor_ex linalg_lu linalg_lu_factor_ex
    linalg_matrix_exp linalg_qr
"""
_OF_SEVERAL: dict[str, Mapping[str, int]] = {
    "linalg_householder_product": {"input": 2, "tau": 1},
    "ormqr": {"self": 2, "input2": 1, "input3": 2},
    "linalg_solve_triangular": _MATRIX,
    "triangular_solve": {"self": 2, "A": 2},
    "cholesky_solve": {"self": 2, "input2": 2},
    "linalg_lu_solve": {"LU": 2, "pivots": 1, "B": 2},
    "lu_unpack": {"LU_data": 2, "LU_pivots": 1},
    "linalg_ldl_solve": {"LD": 2, "pivots": 1, "B": 2},
    "linalg_pinv": {"self": 2, "atol": 0, "rtol": 0},
}
# A solution is linear in its right-hand side: the gradients of solutions are such solutions.
_LINEAR_IN = {
    "cholesky_solve": ("self: sum->sum",),
    "linalg_ldl_solve": ("B: sum->sum",),
    "linalg_lu_solve": ("B: sum->sum",),
    "linalg_solve_triangular": ("B: sum->sum",),
    "ormqr": ("input3: sum->sum",),
}


@register_rule(*(f"aten::{name}" for name in _OF_ONE.split()))
def of_one_matrix(call: Call) -> Formula | None:
    """Factorizations and functions of a matrix; a result may be a matrix, a vector, a number or empty."""
    return _by_matrix(call, _MATRIX)


@register_rule(*(f"aten::{name}" for name in _OF_SEVERAL))
def of_several(call: Call) -> Formula | None:
    """Solutions and products of factors; the batches broadcast."""
    name = call.op._schema.name.partition("::")[2]
    return _by_matrix(call, _OF_SEVERAL[name], _LINEAR_IN.get(name, ()))


@register_rule("aten::_linalg_solve_ex", "aten::linalg_lstsq")
def solve(call: Call) -> Formula | None:
    """The right-hand side may be a vector: torch's own criterion."""
    system, values = ("A", "B") if "A" in call.bound else ("self", "b")
    matrix, right = call.arg(system).shape, call.arg(values).shape
    vector = len(right) == 1 or (len(right) + 1 == len(matrix) and right == matrix[:-1])
    if not vector and len(right) + 1 == len(matrix) and right[-1] == matrix[-1]:
        # A part of the systems could have the sizes by which torch takes the same values for vectors.
        return _by_matrix(call, {system: len(matrix), values: len(right)})
    return _by_matrix(call, {system: 2, values: 1 if vector else 2})


def _by_matrix(call: Call, dims: Mapping[str, int], facts: tuple[str, ...] = ()) -> Formula | None:
    operands = [(operand.info, dims[operand.name]) for operand in call.flat_operands if not operand.out]
    if any(len(info.shape) < count for info, count in operands):
        return None
    batch = torch.broadcast_shapes(*(info.shape[: len(info.shape) - count] for info, count in operands))
    left = ", ".join(_text(count) for _, count in operands)
    right = ", ".join(_result(info, tuple(batch)) for info in call.results)
    return formula(f"{left} -> {right}", hom=facts)


def _result(info: TensorInfo | None, batch: tuple[int, ...]) -> str:
    """A result that does not begin with the batch is one that was not asked for: empty."""
    if info is None or info.shape[: len(batch)] != batch:
        return "-"
    return _text(len(info.shape) - len(batch))


def _text(count: int) -> str:
    return " ".join(["...", *["_"] * count])


@register_rule("aten::linalg_cross")
def cross(call: Call) -> Formula:
    """Vectors along one dim; the others broadcast."""
    rank = max(len(call.arg(name).shape) for name in ("self", "other"))
    labels = [f"{label}?" for label in letters(rank)]
    labels[call.arg("dim") % rank] = "_"
    operands = [labels[rank - len(call.arg(name).shape) :] for name in ("self", "other")]
    text = join(operands, [[label.removesuffix("?") for label in labels]])
    return formula(text, hom=("self: sum->sum", "other: sum->sum"))


rule("aten::_linalg_check_errors", "- ->")  # what one matrix refuses, every rank must refuse
rule("aten::_cdist_forward", "... m _, ... n _ -> ... m n")
rule(
    "aten::_cdist_backward",
    "... m n, ... m _, ... n _, ... m n -> ... m _",
    reduce="sum",
    hom=f"{argument_name('aten::_cdist_backward', 0)}: sum->sum",
)

for _name in ("_fft_r2c", "_fft_c2r", "_fft_c2c"):
    rule(f"aten::{_name}", "...[dim:_] -> ...[dim:_]", hom="self: sum->sum")
