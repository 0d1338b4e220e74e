"""Every operator of torch's database on placed samples: its backward, forms that write, `explicit()`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

import shardwright as sw
from tests.corpus.seen import arguments_text, error_text, results, seen
from tests.corpus.unit import Case, Sizes, Unit
from tests.corpus.world import mesh_of
from tests.ops import check
from tests.ops.cases import Case as Call
from tests.ops.database import dtypes_of, operators, samples_of, seed
from tests.ops.placing import UNLIKE, copied, placed, placements_for
from tests.ops.ranks import has_tensor
from tests.torch_samples import OF_A_SET

# What comes out depends on values, and those are made up: sizes of results, tests of values.
OF_VALUES = frozenset({
    "argwhere", "bincount", "masked_select", "nonzero", "nonzero_static", "unique", "unique_consecutive",
    "histogramdd", "repeat_interleave", "combinations", "_segment_reduce.lengths", "_segment_reduce.offsets",
    "nn.functional.ctc_loss",
})  # fmt: skip


class Tried(NamedTuple):
    """Which inputs of an operator are tried on a mesh, in which forms and under which placements."""

    family: str
    mesh: Sizes
    dtype: torch.dtype
    forms: tuple[str, ...]
    kinds: tuple[str, ...]
    mixed: bool = False


_FEW = ("Shard(0)", "Shard(-1)", "Partial")
_ONE_AXIS = (
    "Shard(0)", "Shard(-1)", "uneven", "Interleaved", "Partial", "Owner", "flat", "unlike", "unlike, pending",
)  # fmt: skip
_ONE, _TWO = (2,), (2, 2)
TRIED = (
    Tried("operators", _ONE, torch.float32, ("call",), _ONE_AXIS),
    Tried("operators", _ONE, torch.int64, ("call",), ("Partial", "unlike")),
    Tried("operators", _TWO, torch.float32, ("call",), ("uneven", "Partial", "unlike")),
    Tried("operators", _TWO, torch.float32, ("call",), ("unlike, pending",), mixed=True),
    Tried("forms", _ONE, torch.float32, ("in place", "out="), (*_FEW, "unlike")),
    Tried("forms", _ONE, torch.float32, ("through a view",), _FEW),
    Tried("explicit", _ONE, torch.float32, ("explicit",), ("Shard(-1)", "Partial", "unlike")),
)


def units() -> Iterator[Unit]:
    """One for each operator."""
    for name, info in operators().items():
        if name not in OF_VALUES | OF_A_SET:
            yield Unit("operators", name, (_ONE, _TWO), partial(_cases, info), ("forms", "explicit"))


def _cases(info: Any, mesh: Sizes) -> Iterator[Case]:
    sampled = lru_cache(partial(samples_of, info, count=1))
    for one in (one for one in TRIED if one.mesh == mesh):
        for dtype in dtypes_of(info, (one.dtype,)):
            if dtype != torch.float32 and one.dtype == torch.int64 and dtype != one.dtype:
                continue  # the operator's only dtype is tried once
            for index, sample in sampled(dtype):
                if has_tensor(sample):
                    yield from _of_sample(info, one, dtype, index, sample)


def _of_sample(info: Any, one: Tried, dtype: torch.dtype, index: int, sample: Any) -> Iterator[Case]:
    mesh, known = mesh_of(one.mesh), set()
    text = arguments_text((sample.input, *sample.args), sample.kwargs)
    for form in one.forms:
        if not _has(info, form, sample):
            continue
        for kind in one.kinds:
            call = Call(info.full_name, str(dtype), index, form, kind, one.mixed)
            placements = _placements(call, sample, mesh)
            if (form, placements) not in known:  # kinds that are the same for this sample are tried once
                known.add((form, placements))
                tell = _refused if form == "explicit" else _told
                words = f"{form}({text}) {placements}"
                yield Case(words, partial(tell, info, call, sample, mesh), one.family)


def _has(info: Any, form: str, sample: Any) -> bool:
    if form in ("in place", "through a view"):
        return info.inplace_variant is not None and not sample.broadcasts_input
    return form != "out=" or info.supports_out


def _placements(call: Call, sample: Any, mesh: DeviceMesh) -> str:
    """The placements of all tensors, in words."""
    kinds = cycle(UNLIKE.get(call.kind, (call.kind,)))
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    tensors = {id(x): x for x in leaves if isinstance(x, torch.Tensor)}
    return " ".join(
        str(tuple(placements_for(next(kinds), x, mesh, mixed=call.mixed))) for x in tensors.values()
    )


def _told(info: Any, call: Call, sample: Any, mesh: DeviceMesh) -> str:
    return seen(partial(_run, info, call, sample, mesh))


def _refused(info: Any, call: Call, sample: Any, mesh: DeviceMesh) -> str:
    """Where nothing may move unasked: the whole text of the refusal, or the results."""
    try:
        x, args, kwargs = placed(
            copied((sample.input, sample.args, sample.kwargs)), call.kind, mesh, mixed=False
        )
        seed()
        with torch.no_grad(), sw.explicit():
            return results(info(x, *args, **kwargs))
    except Exception as error:  # noqa: BLE001 - a refusal is what the user sees
        return f"raises {error_text(error, whole=True)}"


def _run(info: Any, call: Call, sample: Any, mesh: DeviceMesh) -> Any:
    """Results and gradients; raises what the operator raises."""
    given = (sample.input, sample.args, sample.kwargs)
    wanted = None
    process = sample.output_process_fn_grad if call.form == "call" else lambda results: results
    if call.form == "out=":
        wanted = check.reference(info, call, given, process, backward=False)
        if wanted.error is not None:
            raise wanted.error
    arguments = placed(copied(given), call.kind, mesh, mixed=call.mixed)
    if call.form == "through a view":
        return _through_a_view(info, *arguments)
    got = check._run(info, call, arguments, wanted, mesh, process, backward=True)
    if got.error is not None:
        raise got.error
    return got.results, got.gradients


def _through_a_view(info: Any, x: Any, args: Any, kwargs: Any) -> Any:
    """Write into the second of two tensors that are stacked."""
    with torch.no_grad():
        base = torch.stack([x, x])
        result = info.inplace_variant(base[1], *args, **kwargs)
    return base, result
