"""`python -m tests.compositions.tables_sweep [tensor+context+expert ...]`: every table beside one device."""

from __future__ import annotations

import sys
import time

from shardwright.testing.pool import RankPool
from shardwright.testing.rank_errors import RankError
from tests.compositions.tables import cases, world_of
from tests.compositions.tables_ranks import train

_LIMIT = 240.0


def main() -> int:
    """Try them all, or those whose strategies are named (`tensor+context`); 0 if all are right."""
    wanted = {frozenset(text.split("+")) for text in sys.argv[1:]}
    bad, tried, start = 0, 0, time.monotonic()
    with RankPool(preload=("tests.compositions.tables_ranks",)) as pool:
        for strategies, variant in cases():
            if wanted and frozenset(strategies) not in wanted:
                continue
            tried += 1
            try:
                found = pool.run(world_of(strategies), train, strategies, variant, timeout=_LIMIT)
                text = next((f"rank {rank}: {said[0]}" for rank, said in enumerate(found) if said), "")
            except RankError as error:
                text = str(error).strip().splitlines()[-1]
            bad += bool(text)
            print(f"{' + '.join(strategies)} | {variant}: {text or 'as one device'}", flush=True)
    print(f"{tried} tables, {bad} not as one device, {time.monotonic() - start:.0f} s")
    return 1 if bad or not tried else 0


if __name__ == "__main__":
    sys.exit(main())
