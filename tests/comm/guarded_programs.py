"""Programs whose two ranks do not do the same, one per kind of difference."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import shardwright as sw
from shardwright.errors import PlanError
from shardwright.testing import rank_mesh

R, S0, S1 = sw.Replicate(), sw.Shard(0), sw.Shard(1)


def _of(mesh, *shape, dtype=torch.float32, placement=S0):
    return sw.distribute_tensor(torch.ones(shape, dtype=dtype), mesh, [placement], src_data_rank=None)


def other_op(mesh, first):
    x = _of(mesh, 4, 6)
    if first:
        x.sum().full_tensor()
    else:
        x.amax().full_tensor()


def other_op_in_place_of_its_twin(mesh, first):
    """Equal plans, one line: only the reason tells them apart."""
    x, plain = _of(mesh, 4, 6), _of(mesh, 4, 6, placement=R).sum(0)
    pending = x.sum(0)
    (torch.minimum if first else torch.maximum)(pending, plain)


def other_placement(mesh, first):
    _of(mesh, 4, 6).redistribute(placements=[R if first else S1])


def other_shape(mesh, first):
    _of(mesh, 4, 6 if first else 8).full_tensor()


def other_dtype(mesh, first):
    _of(mesh, 4, 6, dtype=torch.float32 if first else torch.float64).full_tensor()


def other_sizes(mesh, first):
    placement = sw.Ragged((3, 1) if first else (1, 3))
    _of(mesh, 8, 6, placement=placement).full_tensor()


def other_order(mesh, first):
    x, y = _of(mesh, 4, 6), _of(mesh, 4, 6)
    if first:
        x.full_tensor()
        y.full_tensor()
    else:
        y.full_tensor()
        x.full_tensor()


def an_extra_call(mesh, first):
    x = _of(mesh, 4, 6)
    x.full_tensor()
    if first:
        x.full_tensor()


def a_missing_call(mesh, first):
    x = _of(mesh, 4, 6)
    if first:
        x.full_tensor()
    x.redistribute(placements=[S1])


def a_missing_call_before_a_barrier(mesh, first):
    x = _of(mesh, 4, 6)
    if first:
        x.full_tensor()
    dist.barrier()


def calls_of_the_program_itself(mesh, first):
    dist.all_reduce(torch.ones(3 if first else 4))


def other_parts_of_a_tensor(mesh, first):
    """The parts are of one size, so no call tells them apart."""
    sw.distribute_tensor(torch.ones(4, 4), mesh, [S0 if first else S1])


def a_tensor_of_other_shape(mesh, first):
    sw.distribute_tensor(torch.ones(4 if first else 6, 4), mesh, [S0])


def a_tensor_of_other_dtype(mesh, first):
    """Of one size: bytes of the one had been read as numbers of the other."""
    sw.distribute_tensor(torch.ones(4, 4, dtype=torch.float32 if first else torch.int32), mesh, [R])


def a_tensor_of_another_source(mesh, first):
    sw.distribute_tensor(torch.ones(4, 4), mesh, [S0], src_data_rank=0 if first else 1)


def other_scatter(mesh, first):
    dist.scatter(torch.empty(2 if first else 3), [torch.ones(2)] * 2 if first else None)


def other_gather(mesh, first):
    dist.gather(torch.ones(2 if first else 3), [torch.empty(2)] * 2 if first else None)


def a_root_that_gives_other_shapes(mesh, first):
    dist.scatter(torch.empty(2), [torch.ones(2), torch.ones(3)] if first else None)


def other_roots(mesh, first):
    dist.broadcast(torch.ones(2), 0 if first else 1)


def other_reduce(mesh, first):
    dist.reduce(torch.ones(2, dtype=torch.float32 if first else torch.float64), 0)


def other_lists_of_all_gather(mesh, first):
    dist.all_gather([torch.empty(2 if first else 3) for _ in range(2)], torch.ones(2 if first else 3))


def other_lists_of_reduce_scatter(mesh, first):
    dist.reduce_scatter(torch.empty(2), [torch.ones(2), torch.ones(2 if first else 3)])


def rows_that_nobody_takes(mesh, first):
    """Each sends one row to each; the second takes two from the first."""
    out = torch.empty(2 if first else 3, 4)
    dist.all_to_all_single(out, torch.ones(2, 4), [1, 1] if first else [2, 1], [1, 1])


def lists_that_nobody_takes(mesh, first):
    out = [torch.empty(1), torch.empty(1)] if first else [torch.empty(2), torch.empty(1)]
    dist.all_to_all(out, [torch.ones(1), torch.ones(1)])


def an_algorithm_beside_a_plan(mesh, first):
    x = _of(mesh, 4, 600)
    x.softmax(0) if first else x.full_tensor()


DIFFERENT = (
    other_op,
    other_op_in_place_of_its_twin,
    other_placement,
    other_shape,
    other_dtype,
    other_sizes,
    other_order,
    an_extra_call,
    a_missing_call,
    a_missing_call_before_a_barrier,
    calls_of_the_program_itself,
    other_parts_of_a_tensor,
    a_tensor_of_other_shape,
    a_tensor_of_other_dtype,
    a_tensor_of_another_source,
    other_scatter,
    other_gather,
    a_root_that_gives_other_shapes,
    other_roots,
    other_reduce,
    other_lists_of_all_gather,
    other_lists_of_reduce_scatter,
    rows_that_nobody_takes,
    lists_that_nobody_takes,
    an_algorithm_beside_a_plan,
)


def run_different():
    """What each program says on this rank, and how long it took to say it; all one after the other."""
    mesh, first = rank_mesh((2,), ("tp",)), dist.get_rank() == 0
    said = {}
    for program in DIFFERENT:
        start, text = time.monotonic(), ""
        try:
            with sw.guarded(patience=20):
                program(mesh, first)
        except PlanError as error:
            text = str(error)
        said[program.__name__] = text, time.monotonic() - start
    return said


def run_alike():
    """The same on both ranks, one of which is slow, with a backward and calls of the program itself."""
    mesh, rank = rank_mesh((2,), ("tp",)), dist.get_rank()
    with sw.guarded():
        x = _of(mesh, 5, 6).requires_grad_()
        w = _of(mesh, 6, 6, placement=S1).requires_grad_()
        time.sleep(0.3 * rank)
        (x @ w).softmax(0).square().sum().backward()
        everybody = [None] * 2
        dist.all_gather_object(everybody, "x" * (1 + 40 * rank))
        if rank == 0:
            dist.broadcast(torch.ones(2), 0)
        else:
            dist.broadcast(torch.zeros(2), 0)
        _uneven_calls(rank)
        peer = torch.ones(3)
        dist.send(peer, 1) if rank == 0 else dist.recv(peer, 0)
        sw.redistribute_many([x.detach(), w.detach()], [{"tp": R}] * 2)
        torch.nn.utils.clip_grad_norm_([x, w], 1.0)
    return float(w.grad.full_tensor().norm())


def _uneven_calls(rank):
    """Calls in which the ranks rightly do not give and take the same."""
    ones, rows = torch.ones(2), torch.ones(3, 4)
    dist.scatter(torch.empty(2), [ones, ones] if rank == 0 else None)
    dist.gather(ones, [ones.clone(), ones.clone()] if rank == 1 else None, dst=1)
    dist.reduce(ones.clone(), 1)
    dist.all_gather([ones.clone(), ones.clone()], ones)
    dist.reduce_scatter(ones.clone(), [ones, ones])
    taken = torch.empty(2 if rank == 0 else 4, 4)
    dist.all_to_all_single(taken, rows, [1, 1] if rank == 0 else [2, 2], [1, 2])
    sw.distribute_tensor(torch.ones(5, 4), rank_mesh((2,), ("tp",)), [S0])


def run_error():
    """One rank leaves by an error of its own: the other hears of it instead of waiting."""
    mesh = rank_mesh((2,), ("tp",))
    try:
        with sw.guarded(patience=20):
            if dist.get_rank() == 1:
                raise KeyError("mine")
            _of(mesh, 4, 6).full_tensor()
    except (PlanError, KeyError) as error:
        return repr(error)
    return ""


def run_silent():
    """One rank does nothing for longer than the other's patience."""
    mesh = rank_mesh((2,), ("tp",))
    said = ""
    try:
        with sw.guarded(patience=0.2):
            if dist.get_rank() == 0:
                _of(mesh, 4, 6).full_tensor()
            else:
                time.sleep(1)
    except PlanError as error:
        said = str(error)
    return said


def files_called():
    """The files of the library that a known redistribution passes through, with the guard off."""
    x, seen = _of(rank_mesh((2,), ("tp",)), 4, 6), []
    x.redistribute(placements=[S1])
    sys.setprofile(lambda frame, event, _: seen.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        x.redistribute(placements=[S1])
    finally:
        sys.setprofile(None)
    return [file.rpartition("shardwright/")[2] for file in seen if "/shardwright/" in file]


def main():
    """A whole program under SHARDWRIGHT_GUARD=1: the second rank ends before the first one's last call."""
    rank = int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
    x = _of(rank_mesh((2,), ("tp",)), 4, 6)
    x.full_tensor()
    if rank == 0:
        x.full_tensor()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
