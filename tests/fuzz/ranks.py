"""Many programs in one call on the ranks of a world; each verdict is written before the next begins."""

from __future__ import annotations

import json
import pickle
import warnings
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwright.testing.meshes import rank_mesh
from tests.fuzz.check import check
from tests.fuzz.program import Program
from tests.fuzz.verdicts import Verdict

_PATIENCE = timedelta(seconds=20)  # for the slowest rank of one program
_OF_COMPILERS = timedelta(seconds=90)


class UnlikeRanksError(Exception):
    """Some rank failed where another did not: their next messages would not fit together."""


def check_programs(programs: list[Program], file: str, erased: bool = False) -> None:
    """Check programs in turn; every rank appends its verdicts to a file of its own, `{file}.{rank}`.

    Raises: UnlikeRanksError: the world must be replaced; go on with the next program in another one.
    """
    warnings.simplefilter("ignore")
    with Path(f"{file}.{dist.get_rank()}").open("a") as out:
        for number, program in enumerate(programs):
            mesh = rank_mesh(program.mesh, ("dp", "tp", "pp")[: len(program.mesh)])
            meeting = _Meeting(f"{file}/{number}", _OF_COMPILERS if program.compiled else _PATIENCE)
            verdict = check(program, mesh, meeting.alike, erased=erased)
            out.write(json.dumps(asdict(verdict)) + "\n")
            out.flush()
            if meeting.parted:
                raise UnlikeRanksError(verdict.text)


def verdicts_of(file: str, ranks: int) -> list[list[Verdict]]:
    """What the ranks wrote, by program, for as many programs as any of them finished."""
    found = []
    for rank in range(ranks):
        path = Path(f"{file}.{rank}")
        lines = path.read_text().splitlines() if path.exists() else []
        found.append([Verdict(**json.loads(line)) for line in lines])
    return [[v[i] for v in found if i < len(v)] for i in range(max(len(v) for v in found))]


class _Meeting:
    """Where the ranks tell each other how they fare: at the store, where no message of a collective waits."""

    def __init__(self, key: str, patience: timedelta) -> None:
        self._key, self._patience, self.parted = key, patience, False
        self._store: Any = dist.distributed_c10d._get_default_store()

    def alike(self, text: str) -> bool:
        size, rank = dist.get_world_size(), dist.get_rank()
        keys = [f"{self._key}/{r}" for r in range(size)]
        self._store.set(keys[rank], pickle.dumps(text))
        try:
            self._store.wait(keys, self._patience)
        except dist.DistStoreError as error:
            raise UnlikeRanksError(f"{text}; a peer does not come back") from error
        self.parted = len({self._store.get(key) for key in keys}) > 1
        return not self.parted
