"""The tiers of the suite: `make test-unit` starts no process, `make test-all` leaves out nothing.

* `unit`: a test that starts no process. It is found, not written down: it uses no fixture that starts ranks
  and has no mark `processes`. While it runs nothing can be started, so the mark cannot be forgotten.
* `slow`: left to `make test-all`. Each kind of check keeps a part that is not slow, and `make test` runs it.
"""

from __future__ import annotations

import multiprocessing.util
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import pytest

_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec"}
_PLANTED = re.compile(r"planted|goes?_red|is_caught")
_RANKS = "rank_pool"
_running: list[str] = []  # the unit test that runs now


class StartsAProcessError(Exception):
    """A test that says it starts nothing starts a process."""


def pytest_configure() -> None:
    sys.addaudithook(_refuse_processes)
    # The one start that raises no event: that of `torch.multiprocessing.spawn`.
    start = multiprocessing.util.spawnv_passfds

    def refused_or_started(*arguments: Any) -> int:
        _refuse_processes("subprocess.Popen", arguments)
        return start(*arguments)

    multiprocessing.util.spawnv_passfds = refused_or_started


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts nothing, before `-m` chooses; refuse a planted fault that is slow."""
    for item in items:
        if _RANKS not in getattr(item, "fixturenames", ()) and item.get_closest_marker("processes") is None:
            item.add_marker(pytest.mark.unit)
    hidden = [item.nodeid for item in items if _PLANTED.search(item.name) and item.get_closest_marker("slow")]
    if hidden:
        raise pytest.UsageError(f"a planted fault shows what `make test` sees, so it is not slow: {hidden}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if item.get_closest_marker("unit") is not None:
        _running.append(item.nodeid)
    try:
        return (yield)
    finally:
        _running.clear()


def _refuse_processes(event: str, _arguments: tuple[Any, ...]) -> None:
    if _running and event in _STARTS:
        raise StartsAProcessError(
            f"{_running[0]} starts a process ({event}); use the fixture `ranks` or the mark `processes`"
        )


def one_in(step: int, cases: Iterable[Any], *, first: int = 0) -> list[Any]:
    """Parameters of which every `step`-th, from `first` on, is in `make test`; the others are slow."""
    return [_case(case, slow=at % step != first) for at, case in enumerate(cases)]


def all_but(slow: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Parameters of which those named are slow. Raises: ValueError: a name is of no case."""
    every = _named(slow, cases)
    return [_case(case, slow=case in slow) for case in every]


def only(kept: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Parameters of which those named are in `make test`. Raises: ValueError: a name is of no case."""
    every = _named(kept, cases)
    return [_case(case, slow=case not in kept) for case in every]


def _named(names: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, after a look for a name that a change of the cases has left behind."""
    every = list(cases)
    unknown = [name for name in names if name not in every]
    if unknown:
        raise ValueError(f"{unknown} are not among the cases {every}")
    return every


def _case(case: Any, *, slow: bool) -> Any:
    """A tuple is one value for each argument."""
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=[pytest.mark.slow] if slow else [])
