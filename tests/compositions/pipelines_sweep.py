"""`python -m tests.compositions.pipelines_sweep [pipeline+fsdp ...]`: pipelines beside one device."""

from __future__ import annotations

import sys
import time

from shardwright.testing.pool import RankPool
from shardwright.testing.rank_errors import RankError
from tests.compositions.pipelines import cases
from tests.pipeline.ranks import Case, assert_right, beside_one_device

_LIMIT = 300.0


def main() -> int:
    """Try them all, or those whose strategies are named (`pipeline+fsdp`); 0 if all are right."""
    wanted = {frozenset(text.split("+")) for text in sys.argv[1:]}
    bad, tried, start = 0, 0, time.monotonic()
    with RankPool(preload=("tests.pipeline.ranks",)) as pool:
        for case in cases():
            if wanted and frozenset(case.how) not in wanted:
                continue
            tried += 1
            text = _tried(pool, case)
            bad += bool(text)
            print(f"{' + '.join(case.how)} | {case}: {text or 'as one device'}", flush=True)
    print(f"{tried} pipelines, {bad} not as one device, {time.monotonic() - start:.0f} s")
    return 1 if bad or not tried else 0


def _tried(pool: RankPool, case: Case) -> str:
    try:
        assert_right(pool.run(case.world, beside_one_device, case, timeout=_LIMIT))
    except (RankError, AssertionError) as error:
        return str(error).strip().splitlines()[-1]
    return ""


if __name__ == "__main__":
    sys.exit(main())
