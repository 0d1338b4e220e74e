"""The parent's side: programs are drawn and dealt to worlds of ranks; a death costs one program."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from math import prod
from pathlib import Path
from typing import Self

from shardwright.testing.pool import RankPool
from shardwright.testing.rank_errors import RankError, RankTimeoutError
from tests.fuzz.compiled import one_device_fails_too
from tests.fuzz.program import Program
from tests.fuzz.ranks import check_programs, verdicts_of
from tests.fuzz.run import Plain, run
from tests.fuzz.verdicts import CRASH, OK, UNDUE, Verdict, worst

PRELOAD = ("tests.fuzz.ranks",)
_PER_PROGRAM = 3.0  # seconds; with the patience of a meeting, how long a batch may take
_COMPILED = 10  # times as much
Checked = list[tuple[Program, Verdict]]


class Worlds:
    """Ranks for `jobs` batches at a time; with a `pool`, that pool's, for one at a time.

    erased: replays are compared.
    """

    def __init__(
        self,
        jobs: int = 1,
        preload: Sequence[str] = PRELOAD,
        *,
        pool: RankPool | None = None,
        erased: bool = False,
    ) -> None:
        self._erased = erased
        self._preload, self._state, self._pools = preload, threading.local(), []  # type: ignore[var-annotated]
        self._given = pool
        self._executor = ThreadPoolExecutor(jobs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(cancel_futures=True)
        for pool in self._pools:
            pool.close()

    def sweep(self, batches: Sequence[Sequence[Program]]) -> Iterator[Checked]:
        """The verdicts of each batch (of programs on worlds of one size) as soon as it is done."""
        waiting = [self._executor.submit(self.check, batch) for batch in batches]
        for done in as_completed(waiting):
            yield done.result()

    def check(self, programs: Sequence[Program]) -> Checked:
        """The verdicts of programs on worlds of one size; after a death the next world goes on behind it."""
        found: Checked = []
        with tempfile.TemporaryDirectory() as folder:
            while len(found) < len(programs):
                rest = list(programs[len(found) :])
                found += self._attempt(rest, f"{folder}/{len(found)}")
        return found

    def _attempt(self, programs: list[Program], file: str) -> Checked:
        ranks = prod(programs[0].mesh)
        failure = ""
        try:
            limit = 60 + _PER_PROGRAM * len(programs) * (_COMPILED if programs[0].compiled else 1)
            self._pool().run(ranks, check_programs, programs, file, self._erased, timeout=limit)
        except RankTimeoutError as error:
            failure = f"hang: {str(error).splitlines()[0]}"
        except RankError as error:
            failure = _told(error)
        every = verdicts_of(file, ranks) if Path(f"{file}.0").exists() else []
        whole = [v for v in every if len(v) == ranks]
        found = [(p, worst(v)) for p, v in zip(programs, whole, strict=False)]
        if failure and not (
            found and found[-1][1].text.startswith("ranks part") and len(found) == len(every)
        ):
            program, verdicts = programs[len(found)], every[len(found)] if len(every) > len(found) else []
            found.append((program, Verdict(OK) if _is_torchs(program) else _lost(verdicts, failure)))
        return found

    def _pool(self) -> RankPool:
        if self._given is not None:
            return self._given
        if not hasattr(self._state, "pool"):
            self._state.pool = RankPool(preload=self._preload)
            self._pools.append(self._state.pool)
        pool: RankPool = self._state.pool
        return pool


def _is_torchs(program: Program) -> bool:
    """Does a compiled program fail on one device too? Ranks that hold nothing may pass what peers do not."""
    return bool(program.compiled) and one_device_fails_too(program, run(program, Plain()))


def _lost(verdicts: list[Verdict], failure: str) -> Verdict:
    """What became of a program that some ranks did not finish."""
    parted = [v for v in verdicts if v.kind == UNDUE]
    return Verdict(
        CRASH, f"{failure}; {parted[0].text}" if parted else failure, parted[0].step if parted else ""
    )


def _told(error: RankError) -> str:
    lines = str(error).strip().splitlines()
    named = [line for line in lines if "UnlikeRanksError: " in line or "killed by" in line]
    return (named[-1] if named else f"{lines[0]} ... {lines[-1]}")[:400]
