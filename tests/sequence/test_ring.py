"""Messages around a ring: sizes that differ, lanes, waiting at once."""

import torch
import torch.distributed as dist

from shardwright.comm.ring import Ring


def _round(blocking):
    n, own = dist.get_world_size(), dist.get_rank()
    ring = Ring(tuple(range(n)), own, None, "cp", "a test", blocking)
    sizes, found = [3, 0, 5][:n], []
    flat, terms = torch.full((sizes[own],), float(own)), torch.full((2,), 10.0 + own)
    for step in range(n - 1):
        size = sizes[ring.source(step + 1)]
        passing, other = ring.pass_on(flat, size), ring.pass_on(terms, 2, lane=1)
        flat, terms = passing.wait(), other.wait()
        found.append((flat.tolist(), terms.tolist()))
    return found


def _expected(own):
    sizes = [3, 0, 5]
    sources = [(own - step) % 3 for step in (1, 2)]
    return [([float(s)] * sizes[s], [10.0 + s] * 2) for s in sources]


def test_parts_of_any_size_go_round(ranks):
    for blocking in (False, True):
        assert ranks(3, _round, blocking) == [_expected(own) for own in range(3)]
