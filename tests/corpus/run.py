"""Runs units, each in a fork of this process that knows nothing yet: no row depends on another unit's.

Nothing is forgotten by name, so that no cache inside the library can be left out.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import signal
import sys
import tempfile
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

import shardwright as sw
from tests.corpus.row import Row
from tests.corpus.unit import Sizes, Unit
from tests.corpus.world import world

_MODULES = ("checkpoint", "grads", "moe", "parallel", "rules", "show")  # beside what is public at the top
_LIMIT = 300  # seconds that the cases of one process may take


class _Running(NamedTuple):
    pid: int
    what: str
    file: Path


def run(units: Sequence[Unit], jobs: int) -> Iterator[list[Row]]:
    """The rows of each unit, in order."""
    yield from _forked([(str(unit), partial(rows_of, unit)) for unit in units], jobs)


def run_shuffled(units: Sequence[Unit], jobs: int, seed: int) -> Iterator[list[Row]]:
    """The rows of each family and mesh, in one process and in random order: what depends on it differs."""
    known = sorted({(unit.family, mesh) for unit in units for mesh in unit.meshes})
    work = [(f"{f} {m}", partial(_shuffled, units, f, m, random.Random(seed))) for f, m in known]
    yield from _forked(work, jobs)


def rows_of(unit: Unit) -> list[Row]:
    """Run all cases of a unit here and now."""
    rows: list[Row] = []
    for mesh in unit.meshes:
        with world(mesh):
            rows += [unit.row(mesh, case) for case in unit.cases(mesh)]
    return rows


def _shuffled(units: Sequence[Unit], family: str, mesh: Sizes, draw: random.Random) -> list[Row]:
    with world(mesh):
        some = [unit for unit in units if unit.family == family and mesh in unit.meshes]
        work = [(unit, case) for unit in some for case in unit.cases(mesh)]
        draw.shuffle(work)
        return [unit.row(mesh, case) for unit, case in work]


def _import_everything() -> None:
    """What is loaded on first use is loaded once, before the forks."""
    for name in sw.__all__:
        getattr(sw, name)
    for module in _MODULES:
        importlib.import_module(f"shardwright.{module}")


def _forked(work: Sequence[tuple[str, Callable[[], list[Row]]]], jobs: int) -> Iterator[list[Row]]:
    _import_everything()
    torch.set_num_threads(1)  # a fork of a process that has pools of threads hangs
    gc.collect()
    gc.freeze()  # what is shared with the forks stays shared
    running: deque[_Running] = deque()
    with tempfile.TemporaryDirectory() as folder:
        for number, (what, task) in enumerate(work):
            if len(running) == jobs:
                yield _collected(running.popleft())
            running.append(_start(what, task, Path(folder) / str(number)))
        while running:
            yield _collected(running.popleft())


def _start(what: str, task: Callable[[], list[Row]], file: Path) -> _Running:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _be(task, file)
    return _Running(pid, what, file)


def _be(task: Callable[[], list[Row]], file: Path) -> None:
    """The life of a fork."""
    status = 1
    try:
        signal.alarm(_LIMIT)
        warnings.simplefilter("ignore")
        gc.disable()  # when a cycle goes, a cache may forget what it held: rows would depend on it
        file.write_text("".join(f"{row}\n" for row in task()))
        status = 0
    except BaseException:  # noqa: BLE001 - what ends a fork is told here, nothing goes up from it
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _collected(one: _Running) -> list[Row]:
    _, status = os.waitpid(one.pid, 0)
    if status:  # a row of its own, so that the others are told all the same
        return [Row("died", one.what, "", f"its process ended with {os.waitstatus_to_exitcode(status)}")]
    rows = [Row.from_line(line) for line in one.file.read_text().splitlines()]
    one.file.unlink()
    return rows
