"""Which tests ask for more than an older release of torch has: pattern of node ids -> what it brought."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

_BROUGHT: dict[tuple[int, int], dict[str, str]] = {
    (2, 13): {
        "*zero_bubble*": "gradients of weights where a backward is taken apart",
        "*/test_pieces_for_torch.py::test_stages_of_torchs_pipelines*": "strided cuts in stages",
        "*/test_default_device.py::*training]": "optimizers whose counts lie beside their states",
        "*/test_default_device.py::*checkpoints]": "optimizers whose counts lie beside their states",
        "*/test_forms.py::*": "linear_cross_entropy",
        "*/test_fsdp_several.py::*": "units of several modules that run apart",
        "*/test_failures.py::test_data_peers*one unit]": "the same",
        "*/test_list_forms.py::test_each_position_follows*": "_foreach_mm",
        "*/test_made_gradients.py::test_a_gradient_that_nobody_made*": "a derivative of nextafter",
        "*/test_written_memory.py::test_writes_that_one_device_refuses*": "a refusal of logcumsumexp",
    },
    (2, 12): {
        "*/test_pieces_for_torch.py*": "metas of DTensors in pipelines",
        "*/*life_of_a_call*": "a dispatch of their own for DTensors of other classes",
        "*/test_compile_empty_ranks.py::*found_by_all*": "graphs that are found by what DTensors say",
        "*/test_compile_empty_ranks.py::*not_of_the_package*": "the same",
        "*/test_compiled_cuts.py::test_a_move_of_many_parts*": "placements that a graph closes over",
        "*/test_compile_sizes.py::test_each_size_of_batch*": "meshes in graphs",
        "*/test_placement_functions.py*": "placements that say their mesh",
        "*/test_refusals.py::test_torchs_context_parallel*": "words of its own",
        "*/test_import.py::test_a_graph_holds_from_local*": "meshes in graphs",
        "*/test_torch_protocols.py::*registered_with_torch*": "a strategy for each op",
        "*/test_on_ranks.py::*into_an_expanded*": "strides of a copy",
    },
}


@cache
def later() -> dict[str, str]:
    """What this release has not: pattern -> why. Asked where tests are collected, for it imports torch."""
    from shardwright.compat import RELEASE

    return {
        pattern: f"torch {'.'.join(map(str, release))} brought {what}"
        for release, rows in _BROUGHT.items()
        for pattern, what in rows.items()
        if release > RELEASE
    }


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """A file of which nothing can be asked imports what is not there."""
    whole = [pattern.removesuffix("*") for pattern in later() if pattern.endswith(".py*")]
    return True if any(fnmatchcase(str(collection_path), pattern) for pattern in whole) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        why = next((why for pattern, why in later().items() if fnmatchcase(item.nodeid, pattern)), None)
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))
