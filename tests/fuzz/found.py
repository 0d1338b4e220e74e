"""Programs that random ones came down to: each stands for a class of faults that is mended."""

from __future__ import annotations

from tests.fuzz.program import Leaf, Program, Ref, Step

R, S0 = "Replicate()", "Shard(0)"


def _leaf(name: str, shape: tuple[int, ...], *placements: str, dtype: str = "float64", values: str = "normal",
          grad: bool = False) -> Leaf:  # fmt: skip
    return Leaf(name, shape, dtype, placements, values, int(name[1:]), grad)


def _do(out: str, call: str, *args: object, form: str = "plain", **kwargs: object) -> Step:
    """`out = call(*args)`; a name among the arguments that begins with x or v is a variable."""
    return Step((out,) if out else (), call, tuple(_named(a) for a in args), tuple(kwargs.items()), form)


def _named(value: object) -> object:
    if isinstance(value, list | tuple):
        return type(value)(_named(v) for v in value)
    return Ref(value) if isinstance(value, str) and value[:1] in "xv" and value[1:].isdigit() else value


FOUND = {
    "views with gaps whose few elements on a rank are one place": Program(
        (3,),
        (_leaf("x1", (6, 2), "Ragged((2, 0, 3), (0, 1))"),),
        (
            _do("v1", ".select", "x1", 1, 1),
            _do("v2", ".diagonal", "x1", 2, 1, 0),
            _do("", "[]=", "v1", slice(0, None, 3), "v2", form="setitem"),
        ),
    ),
    "an in-place form that takes a wider operand where a rank holds nothing": Program(
        (2,),
        (_leaf("x1", (4, 1, 2), "Owner(1)"), _leaf("x2", (2, 4, 3, 2), S0)),
        (_do("", ".copysign_", "x1", "x2", form="in place"),),
    ),
    "an expanded tensor copied into itself": Program(
        (2,),
        (_leaf("x1", (3, 1), S0),),
        (_do("v1", ".expand", "x1", 3, 4, form="view"), _do("", ".copy_", "v1", "v1", form="in place")),
    ),
    "a kernel that conjugates what it multiplies": Program(
        (2,),
        (
            _leaf("x1", (3, 4, 1), S0, dtype="complex128"),
            _leaf("x2", (4, 4), R, dtype="complex128", values="eye"),
        ),
        (
            _do("v1", ".mH", "x1", form="attribute"),
            _do("v2", "torch.matmul", "x1", "v1"),
            _do("v3", "torch.add", "v2", "x2"),
            _do("v4", "torch.linalg.pinv", "v3"),
        ),
    ),
    "a join, expanded and filled, differentiated": Program(
        (2,),
        (
            _leaf("x1", (4, 8, 1), "Ragged((2, 0), (2,))", grad=True),
            _leaf("x2", (1, 8, 1), "PermutedRows(1)"),
            _leaf("x3", (5, 8, 1), "PermutedRows(0)"),
        ),
        (
            _do("v1", "torch.cat", ["x1", "x2"], -3),
            _do("v2", ".expand", "v1", -1, -1, 2, form="view"),
            _do("", ".fill_", "v2", 0, form="through a view"),
            _do("", "torch.autograd.backward", ["v1"], ["x3"], form="backward"),
        ),
    ),
    "a bool joined to a pending product": Program(
        (2,),
        (
            _leaf("x1", (6, 2), "Partial('product')", grad=True),
            _leaf("x2", (6, 1), S0, dtype="bool", values="bool"),
        ),
        (_do("v1", "torch.hstack", ["x1", "x2"]),),
    ),
    "a copy of an expanded tensor that moved, written through another shape": Program(
        (3,),
        (_leaf("x1", (1, 4, 4, 2), "Owner(2)"), _leaf("x2", (8, 6), R)),
        (
            _do("v1", ".expand", "x1", 3, -1, 4, -1, form="view"),
            _do("v2", "move", "v1", (R,)),
            _do("v3", ".reshape", "v2", 2, 8, 6, form="view"),
            _do("", "[]=", "v3", -1, "x2", form="setitem"),
        ),
    ),
    "a largest element along a dim from the end, of no elements": Program(
        (2,),
        (_leaf("x1", (2, 0), S0),),
        (_do("v1", "torch.linalg.vector_norm", "x1", float("inf"), dim=-2, keepdim=True),),
    ),
}
