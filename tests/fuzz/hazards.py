"""Calls whose answer on one device depends on the order in which a kernel reads and writes: nobody's promise.

torch refuses some of them, and that is an answer; what it lets pass is not drawn.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.fuzz.program import Ref, Step, values_in
from tests.fuzz.run import Env, resolved

# They read other elements than the one that they write.
_NOT_BY_ELEMENT = ("addmm", "addmv", "baddbmm", "addbmm", "addr", "index_", "scatter", "masked_scatter",
                   "put", "mm", "bmm", "mv", "cat", "stack", "matmul", "gather", "take", "sort", "cum",
                   "tri")  # fmt: skip
# They begin with a value of their own in what they write, before they read.
_REDUCE = ("sum", "mean", "prod", "amax", "amin", "max", "min", "all", "any", "arg", "nan", "norm", "var",
           "std", "logsumexp", "count_nonzero", "median", "mode")  # fmt: skip
_ONE_VALUE = ("fill_", "zero_", "fill_diagonal_", "requires_grad_")


_COMPARISONS = frozenset(f".{name}_" for name in ("eq", "ne", "lt", "le", "gt", "ge"))


def slips(step: Step, env: Env) -> bool:
    """Does one device take or refuse the step by a slip, or answer so?

    A median sorts a copy in place that has the strides of what was expanded. A comparison in place of a view
    whose base was written takes the view for a leaf, until someone looks at its `grad_fn`. A contraction of
    small integers mixes types that its kernels refuse, unless it is empty. Which of equal elements is the
    k-th, and whether a cross product of a tensor with itself is exactly 0, a quotient or a cosine exactly 1,
    depends on how a kernel goes, or on the terms that it is made of. A scatter into a copy of windows that
    overlap copies them so that they overlap still.
    """
    given = [env[value.name] for value in values_in(step.args) if isinstance(value, Ref)]
    if step.call.endswith("median"):
        return any(0 in x.stride() for x in given if isinstance(x, torch.Tensor))
    if step.call.endswith("kthvalue"):
        return any(x.detach().unique().numel() < x.numel() for x in given if isinstance(x, torch.Tensor))
    if step.call.endswith("_scatter") and isinstance(given[0], torch.Tensor):
        return _places(given[0]).unique().numel() < given[0].numel()
    if step.call.rstrip("_").endswith(("cross", "div", "divide")):
        return given[0] is given[-1] and len(given) > 1
    if step.call.endswith("cosine_embedding_loss"):
        return given[0] is given[1]
    if step.call in _COMPARISONS:
        return given[0]._is_view() and given[0].requires_grad
    small = [
        x for x in given if isinstance(x, torch.Tensor) and not (x.is_floating_point() or x.is_complex())
    ]
    return step.call == "torch.einsum" and any(x.dtype != torch.int64 for x in small)


def collides(step: Step, env: Env) -> bool:
    """Does the step read places that it writes, for another element?"""
    return any(_collides(step, env, target) for target in _targets(step, env) if target.numel())


def _collides(step: Step, env: Env, target: torch.Tensor) -> bool:
    name = step.call.rpartition(".")[2]
    if name not in _ONE_VALUE and _places(target).unique().numel() < target.numel():
        return True  # windows that overlap: which value stays?
    by_element = not (step.call.startswith("torch.linalg.") or name.startswith(_NOT_BY_ELEMENT + _REDUCE))
    return any(_meet(target, x, by_element=by_element) for x in _read(step, env, target))


def _targets(step: Step, env: Env) -> list[torch.Tensor]:
    """What is written; of a call on lists, each tensor of the first."""
    if step.call.startswith("torch._foreach_") and step.call.endswith("_"):
        return [env[value.name] for value in values_in(step.args[:1]) if isinstance(value, Ref)]
    target = _target(step, env)
    return [] if target is None else [target]


def _target(step: Step, env: Env) -> torch.Tensor | None:
    """What is written; of an index, the view that it means, if it is one."""
    out = dict(step.kwargs).get("out")
    if isinstance(out, Ref):
        return env[out.name]
    if step.call == "[]=":
        index = resolved(step.args[1], env)
        parts = index if isinstance(index, tuple) else (index,)
        whole: torch.Tensor = env[step.args[0].name]
        return whole if any(isinstance(p, torch.Tensor) for p in parts) else whole.detach()[index]
    first = step.args[0] if step.args else None
    in_place = dict(step.kwargs).get("inplace") or (step.call.startswith(".") and step.call.endswith("_"))
    return env[first.name] if in_place and isinstance(first, Ref) else None


def _read(step: Step, env: Env, target: torch.Tensor) -> Iterator[torch.Tensor]:
    own = 0 if dict(step.kwargs).get("out") is not None else 1
    for value in values_in(step.args[own:]):
        x = env[value.name] if isinstance(value, Ref) else None
        if isinstance(x, torch.Tensor) and x.numel() and _memory(x) == _memory(target):
            yield x


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _meet(target: torch.Tensor, x: torch.Tensor, *, by_element: bool) -> bool:
    if target.dtype != x.dtype:
        return True
    wrote, read = _places(target), _places(x)
    if by_element:
        try:
            wrote, read = torch.broadcast_tensors(wrote, read)
        except RuntimeError:
            return True
        elsewhere = read[read != wrote]
    else:
        elsewhere = read
    return bool(torch.isin(elsewhere.flatten(), wrote.flatten()).any())


def _places(x: torch.Tensor) -> torch.Tensor:
    size = x.untyped_storage().nbytes() // x.element_size()
    return torch.arange(size).as_strided(x.shape, x.stride(), x.storage_offset())
