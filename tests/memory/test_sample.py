"""A sample of `python -m tests.memory`: views and composites of torch, each in a few forms of memory."""

from __future__ import annotations

import warnings

import pytest
import torch
import xxhash

from shardwright.testing.meshes import rank_mesh
from tests.memory.check import KINDS, differs, observe, placing
from tests.memory.extras import EXTRAS, arguments_of
from tests.memory.forms import FORMS

# Views of expanded rows that only one of the two refuses to write: one as another dtype that had to move its
# elements, here; a negative one, which torch fills by a copy, on one device.
_REFUSED = {"view(dtype)": "expanded", "imag of conj": "expanded"}


def _cases(count: int) -> list[tuple[str, str, str]]:
    """So many forms and placements of each function, by a hash of their names."""
    chosen = []
    for name in EXTRAS:
        found = [(name, form, kind) for form in FORMS for kind in KINDS if _REFUSED.get(name) != form]
        chosen += sorted(found, key=lambda case: xxhash.xxh3_64_intdigest("".join(case).encode()))[:count]
    return chosen


def _checked(count: int) -> list[str]:
    warnings.simplefilter("ignore")
    mesh = rank_mesh((2,), ("dp",))
    found = []
    for name, form, kind in _cases(count):
        arguments = arguments_of(EXTRAS[name])
        wanted = observe(EXTRAS[name].op, arguments, form, lambda base: base, lambda _: True)
        got = observe(EXTRAS[name].op, arguments, form, placing(kind, mesh), lambda _: True)
        assert (got.error is None) == (wanted.error is None), (name, form, kind, got.error, wanted.error)
        text = differs(got, wanted)
        found += [f"{name}, {form}, {kind}: {text}"] if text else []
    return found


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_views_lie_in_memory_and_are_written_through_as_on_one_device(ranks, count):
    """Values, strides, storage offsets; what a write into a result, or into the base, reaches."""
    assert ranks(2, _checked, count, timeout=300) == [[], []]


def _offsets() -> list[int]:
    x = torch.arange(80.0).reshape(8, 10)
    placed = placing("Shard(0)", rank_mesh((2,), ("dp",)))(x)
    views = [placed[5:], placed[1:, 3:], placed[2], placed.t()[4:], placed[2:].detach()[1:], placed[7:] + 0]
    with torch._C.DisableTorchFunctionSubclass():  # what C++ sees
        return [view.storage_offset() for view in views]


def test_a_storage_offset_is_that_of_the_whole_tensor_on_every_rank(ranks):
    assert ranks(2, _offsets) == [[50, 13, 20, 4, 30, 0]] * 2
