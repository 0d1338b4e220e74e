"""The parent's side: each case on warm ranks of its own world, beside the facts of one device."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import torch

from shardwright.testing.pool import RankPool
from shardwright.testing.rank_errors import RankError, RankTimeoutError
from tests.compositions.cases import Case
from tests.compositions.erased import STEPS as ERASED_STEPS
from tests.compositions.erased import check_erased
from tests.compositions.ranks import TAKEN, Fault, check, refuses
from tests.compositions.reference import one_device, one_device_again

OK, WRONG, ERROR, REFUSED = "ok", "wrong", "error", "refused"
BAD = (WRONG, ERROR)
PRELOAD = ("transformers.models.auto", "tests.compositions.preload")
_LIMIT = 120.0  # seconds of one case; most take less than one


@dataclass(frozen=True)
class Record:
    """What came of a case: ok; wrong: another number than one device's; error; refused, for its reason."""

    case: Case
    verdict: str
    text: str = ""
    seconds: float = 0.0


def sweep(
    cases: Sequence[Case],
    *,
    jobs: int,
    fault: Fault | None = None,
    pool: RankPool | None = None,
    erased: bool = False,
) -> Iterator[Record]:
    """Try every case; yields each record as soon as it is there. Each job has ranks of its own.

    erased: the steps are erased; cases that are refused, or in which a rank does not run, are left out.
    """
    if erased:
        cases = [
            case
            for case in cases
            if not case.refusal and not case.variant.idle and case.variant.dtype != "bfloat16"
        ]
    torch.set_num_threads(1)
    state = threading.local()
    pools: list[RankPool] = []

    def one(case: Case) -> Record:
        if pool is not None:
            return attempt(pool, case, fault, erased=erased)
        if not hasattr(state, "pool"):
            state.pool = RankPool(preload=PRELOAD)
            pools.append(state.pool)
        return attempt(state.pool, case, fault, erased=erased)

    try:
        with ThreadPoolExecutor(jobs) as executor:
            for done in as_completed([executor.submit(one, case) for case in cases]):
                yield done.result()
    finally:
        for made in pools:
            made.close()


def attempt(pool: RankPool, case: Case, fault: Fault | None = None, *, erased: bool = False) -> Record:
    """One case on the ranks of `pool`."""
    start = time.monotonic()
    verdict, text = OK, ""
    world = case.composition.world
    try:
        if case.refusal:
            verdict = REFUSED
            found = pool.run(world, refuses, case, case.refusal.says, timeout=_LIMIT)
        if erased:
            facts = one_device_again(case, ERASED_STEPS)
            of_ranks = pool.run(world, check_erased, case, facts, timeout=_LIMIT)
            found = [texts for texts, _, _ in of_ranks]
            text = f"{of_ranks[0][1]} replays" if of_ranks[0][1] else of_ranks[0][2].partition("\n")[2]
        elif not case.refusal or (case.refusal.either and found == [[TAKEN]] * world):
            verdict = OK
            found = pool.run(world, check, case, one_device(case), fault, timeout=_LIMIT)
        ranks = [rank for rank, texts in enumerate(found) if texts]
        if ranks:
            verdict, text = WRONG, _wrong_text(found[ranks[0]], ranks)
    except RankTimeoutError as error:
        verdict, text = ERROR, f"hang: {error}"
    except RankError as error:
        verdict, text = ERROR, str(error)
    except Exception as error:  # noqa: BLE001  of one device: the other cases are still to be tried
        verdict, text = ERROR, f"on one device: {type(error).__name__}: {error}"
    return Record(case, verdict, text, time.monotonic() - start)


def _wrong_text(texts: list[str], ranks: list[int]) -> str:
    more = f" and {len(texts) - 4} more" if len(texts) > 4 else ""
    return f"on ranks {ranks}: " + "; ".join(texts[:4]) + more
