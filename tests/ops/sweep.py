"""The parent's side: operators are dealt to workers, each with worlds of its own; a death costs one case."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from math import prod
from pathlib import Path

from shardwright.testing.pool import RankPool
from shardwright.testing.rank_errors import RankError, RankTimeoutError
from tests.ops.cases import CRASH, Case, Options, Record
from tests.ops.ranks import check_operator

_PRELOAD = ("torch.testing._internal.common_methods_invocations", "scipy.special", "tests.ops.ranks")
_LIMIT = 900.0  # seconds for one operator on one mesh; a case that hangs is noticed long before
_ENOUGH = 12  # worlds that one operator may cost
Check = Callable[[str, Options, str, int], int]


def sweep(
    names: Sequence[str],
    runs: Sequence[Options],
    *,
    jobs: int,
    preload: Sequence[str] = _PRELOAD,
    check: Check = check_operator,
    pool: RankPool | None = None,
) -> Iterator[tuple[str, list[Record]]]:
    """Check operators under every option; yields each operator's records as soon as it is done.

    Each job has ranks of its own, or all have those of `pool`, one at a time.
    """
    state = threading.local()
    pools: list[RankPool] = []

    def own() -> RankPool:
        if not hasattr(state, "pool"):
            state.pool = RankPool(preload=preload)
            pools.append(state.pool)
        made: RankPool = state.pool
        return made

    def one(name: str) -> list[Record]:
        ranks = own() if pool is None else pool
        return [record for options in runs for record in _operator(ranks, name, options, check)]

    try:
        with ThreadPoolExecutor(jobs) as executor:
            waiting = {executor.submit(one, name): name for name in names}
            for done in as_completed(waiting):
                yield waiting[done], done.result()
    finally:
        for made in pools:
            made.close()


def _operator(pool: RankPool, name: str, options: Options, check: Check) -> list[Record]:
    """All records of one operator; after a death the next world goes on behind the case that was lost."""
    records: list[Record] = []
    start = 0
    with tempfile.TemporaryDirectory() as folder:
        for attempt in range(_ENOUGH):
            file = Path(folder) / f"{attempt}.jsonl"
            file.touch()
            failure = _attempt(lambda file=file, start=start: pool.run(
                prod(options.mesh), check, name, options, str(file), start, timeout=_LIMIT
            ))  # fmt: skip
            found, lost = _read(file)
            records += found
            if failure is None:
                return records
            if lost is not None:
                number, case = lost
                records.append(Record(case, options.mesh, CRASH, failure))
                start = number + 1
            elif found:
                start = _last(file) + 1
            else:
                break
        text = f"given up after {attempt + 1} worlds: {failure}"
        records.append(Record(Case(name, "", -1, "", "", mixed=False), options.mesh, CRASH, text))
    return records


def _attempt(run: Callable[[], object]) -> str | None:
    try:
        run()
    except RankTimeoutError as error:
        return f"hang: {str(error).splitlines()[0]}"
    except RankError as error:
        lines = str(error).strip().splitlines()
        if " was killed by " in lines[0]:
            return str(error)[:8000]  # what it died of stands among what it printed
        named = [line for line in lines if "UnlikeRanksError: " in line]
        return (named[-1] if named else f"{lines[0]} ... {lines[-1]}")[:600]
    return None


def _read(file: Path) -> tuple[list[Record], tuple[int, Case] | None]:
    """The finished records, and the case that was begun last and never finished."""
    records: list[Record] = []
    open_case: tuple[int, Case] | None = None
    for line in file.read_text().splitlines():
        event = json.loads(line)
        if "begin" in event:
            open_case = event["begin"], Case(**event["case"])
        else:
            event.pop("end")
            records.append(Record.from_dict(event))
            open_case = None
    return records, open_case


def _last(file: Path) -> int:
    return int(json.loads(file.read_text().splitlines()[-1])["end"])
