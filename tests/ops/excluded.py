"""Operators of the database that have no single-device answer to compare with, each with its reason."""

_UNSET = "returns memory that was never written: there is no value to compare"
_SPARSE = "its operands or results are sparse tensors, which have no layout"

EXCLUDED: dict[str, str] = {
    "empty": _UNSET,
    "empty_like": _UNSET,
    "empty_permuted": _UNSET,
    "empty_strided": _UNSET,
    "new_empty": _UNSET,
    "new_empty_strided": _UNSET,
    "to_sparse": _SPARSE,
    "sparse.sampled_addmm": _SPARSE,
    "sparse.mm.reduce": _SPARSE,
}
