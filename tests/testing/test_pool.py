"""The pool of ranks: results, every way to fail, and what is left between calls and at the end."""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard as TorchShard

import shardwright as sw
from shardwright.errors import ConfigError, MeshError, PlacementError, RuleError
from shardwright.testing import RuleCheckError, Sample, check_placement, check_rule
from shardwright.testing.meshes import rank_mesh
from shardwright.testing.pool import RankPool
from shardwright.testing.rank_errors import RankError, RankTimeoutError
from tests.tiers import only


@dataclass
class Pair:
    """A result of a class that only this test module knows."""

    rank: int
    total: torch.Tensor


def add_up(scale):
    x = torch.full((3,), float(dist.get_rank() + 1)) * scale
    dist.all_reduce(x)
    return Pair(dist.get_rank(), x)


def rank_and_seed_draws():
    return dist.get_rank(), dist.get_world_size(), torch.rand(2).tolist(), random.random()


def fail_on(rank):
    if dist.get_rank() == rank:
        raise KeyError("lost key")
    dist.barrier()


def fail_everywhere():
    found = dist.get_rank() + 40
    assert found == 0


def hang_on(rank):
    if dist.get_rank() == rank:
        loiter()


def loiter():
    time.sleep(100)


def die_on(rank, how):
    if dist.get_rank() == rank:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), how)
    dist.barrier()


def warn():
    warnings.warn("look out", UserWarning, stacklevel=1)
    return "survived"


def print_something():
    print("printed by", dist.get_rank())


def spoil():
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    os.environ["SPOILED"] = "1"
    os.chdir("/")
    return os.getpid()


def see():
    at_root = str(Path.cwd()) == "/"
    strict = torch.are_deterministic_algorithms_enabled()
    return torch.get_default_dtype(), torch.is_grad_enabled(), strict, os.environ.get("SPOILED"), at_root


LEFT: list[object] = []
MANY = 20_000


class Circle:
    """What only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


def leave_objects():
    LEFT[:] = [weakref.ref(Circle()), *([number] for number in range(MANY))]


def look_for_objects():
    looked_at = len(gc.get_objects())
    is_gone = LEFT[0]() is None
    LEFT.clear()
    return looked_at, is_gone


def pid():
    return os.getpid()


def parallel_op():
    return torch.get_num_threads(), (torch.ones(400, 400) @ torch.ones(400, 400)).sum().item()


def mesh_group_count():
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    x = torch.ones(1)
    dist.all_reduce(x, group=mesh.get_group("tp"))
    return x.item(), id(mesh)


def end_the_group():
    dist.destroy_process_group()
    return os.getpid()


def test_results_come_in_rank_order_with_classes_of_the_test_module(ranks):
    results = ranks(3, add_up, 2.0)
    assert [result.rank for result in results] == [0, 1, 2]
    assert all(torch.equal(result.total, torch.full((3,), 12.0)) for result in results)


def test_keyword_arguments_and_partials_reach_the_function(ranks):
    assert ranks(2, add_up, scale=1.0)[1].total[0] == 3
    assert ranks(2, functools.partial(add_up, 3.0))[1].total[0] == 9


def test_every_rank_starts_every_call_with_the_same_seed(ranks):
    first, second = ranks(2, rank_and_seed_draws), ranks(2, rank_and_seed_draws)
    assert first == second
    assert first[0][2:] == first[1][2:]
    assert ranks(2, rank_and_seed_draws, seed=1)[0][2] != first[0][2]
    assert [(rank, world) for rank, world, *_ in first] == [(0, 2), (1, 2)]


def test_an_exception_names_its_rank_and_keeps_its_traceback_and_type(ranks):
    with pytest.raises(RankError, match=r"rank 1 of 3 raised KeyError") as caught:
        ranks(3, fail_on, 1)
    assert caught.value.rank == 1
    assert "in fail_on" in caught.value.traceback
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_failed_assert_shows_the_values_around_it(ranks):
    with pytest.raises(RankError, match=r"found = 40"):
        ranks(2, fail_everywhere)


def test_a_hang_is_killed_and_says_where_each_silent_rank_was(ranks):
    ranks(2, pid)
    start = time.monotonic()
    with pytest.raises(RankTimeoutError, match=r"no answer within 2 s from rank 1 of 2") as caught:
        ranks(2, hang_on, 1, timeout=2)
    assert "in loiter" in str(caught.value)
    assert time.monotonic() - start < 10


def test_a_stopped_rank_is_reported_as_stopped(ranks):
    ranks(2, pid)
    with pytest.raises(RankTimeoutError, match="it is stopped"):
        ranks(2, die_on, 0, signal.SIGSTOP, timeout=2)


@pytest.mark.parametrize(
    ("how", "said"), [(signal.SIGKILL, "was killed by SIGKILL"), ("exit", "exited with status 3")]
)
def test_a_dead_rank_is_named_with_how_it_died(ranks, how, said):
    with pytest.raises(RankError, match=f"rank 2 of 3 {said}"):
        ranks(3, die_on, 2, how)


def test_a_wrong_device_of_ranks_is_an_error_before_anything_is_started(monkeypatch):
    monkeypatch.setenv("SHARDWRIGHT_RANKS_ON", "gpu")
    with pytest.raises(ConfigError, match="RANKS_ON='gpu' is no device of ranks: use 'cpu' or 'cuda'"):
        RankPool().start()


def abort_on(rank):
    if dist.get_rank() == rank:
        os.abort()


def test_a_rank_that_crashes_says_where(ranks):
    with pytest.raises(RankError, match=r"was killed by SIGABRT(.|\n)*Fatal Python error(.|\n)*in abort_on"):
        ranks(2, abort_on, 1)


def test_ranks_are_reused_after_success_and_replaced_after_failure(ranks):
    first = ranks(2, pid)
    assert ranks(2, pid) == first
    with pytest.raises(RankError):
        ranks(2, fail_on, 0)
    assert not set(ranks(2, pid)) & set(first)


def test_between_calls_nothing_runs_in_a_rank(ranks):
    pids = ranks(2, os.getpid)
    deadline = time.monotonic() + 10  # threads stop where the kernel next sees them
    while any(psutil.Process(pid).status() != psutil.STATUS_STOPPED for pid in pids):
        assert time.monotonic() < deadline, "threads of gloo would wake a hundred times a second"
    assert ranks(2, os.getpid) == pids


def test_fresh_ranks_never_ran_anything_and_are_ended(ranks):
    warm = ranks(2, pid)
    fresh = ranks(2, pid, fresh=True)
    assert not set(fresh) & set(warm)
    assert not any(psutil.pid_exists(one) for one in fresh)
    assert ranks(2, pid) == warm


def test_a_call_leaves_no_settings_to_the_next(ranks):
    before = ranks(2, see)
    spoiled = ranks(2, spoil)
    assert ranks(2, pid) == spoiled
    assert ranks(2, see) == before


def test_a_collection_in_a_call_looks_at_nothing_that_earlier_ones_left(ranks):
    """Its garbage is gone, and what it keeps is not looked through again: a world sees many calls."""
    ranks(1, leave_objects)
    ((looked_at, is_gone),) = ranks(1, look_for_objects)
    assert looked_at < MANY
    assert is_gone


def test_ranks_that_ended_their_group_are_not_reused(ranks):
    ended = ranks(2, end_the_group)
    assert not set(ranks(2, pid)) & set(ended)


def test_a_warning_is_an_error_in_a_rank_as_it_is_here(ranks):
    with pytest.raises(RankError, match="look out"):
        ranks(1, warn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert ranks(1, warn) == ["survived"]


def test_what_ranks_print_is_printed_here(ranks, capsys):
    ranks(2, print_something)
    assert capsys.readouterr().out == "[rank 0] printed by 0\n[rank 1] printed by 1\n"


def test_a_rank_has_one_thread_and_runs_parallel_ops(ranks):
    assert ranks(4, parallel_op) == [(1, 400.0**3)] * 4


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such policy")
def test_a_rank_that_wakes_interrupts_no_other(ranks):
    assert ranks(2, os.sched_getscheduler, 0) == [os.SCHED_BATCH] * 2


def test_a_mesh_is_made_once_per_rank(ranks):
    first, second = ranks(4, mesh_group_count), ranks(4, mesh_group_count)
    assert first == second
    assert first[0][0] == 2.0


def test_a_function_that_cannot_be_sent_is_refused_with_the_reason(ranks):
    with pytest.raises(TypeError, match="top level of a module"):
        ranks(2, lambda: None)


def test_a_small_call_on_warm_ranks_takes_milliseconds(ranks):
    ranks(4, pid)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        ranks(4, pid)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.05


@pytest.mark.processes
def test_nothing_is_left_after_close():
    pool = RankPool()
    children = pool.run(2, pid)
    family = psutil.Process().children(recursive=True)
    assert set(children) <= {process.pid for process in family}
    mine = psutil.Process(children[0]).parent()
    pool.close()
    assert not mine.is_running()
    assert not any(psutil.pid_exists(child) for child in children)


@pytest.mark.processes
@pytest.mark.parametrize("how", only([signal.SIGKILL], [signal.SIGKILL, signal.SIGINT]))
def test_nothing_is_left_when_the_owner_is_killed(tmp_path, how):
    script = tmp_path / "owner.py"
    script.write_text(
        textwrap.dedent("""
            import os, time
            from shardwright.testing.pool import RankPool

            def show():
                print(os.getpid(), flush=True)
                return os.getpid()

            def sleep():
                open(f"asleep-{os.getpid()}", "w").close()
                time.sleep(100)

            if __name__ == "__main__":
                with RankPool() as pool:
                    print(*pool.run(2, show), flush=True)
                    pool.run(2, sleep)
        """)
    )
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path,
    ) as owner:
        lines = [owner.stdout.readline() for _ in range(3)]
        children = [int(word) for word in lines[-1].split()]
        assert len(children) == 2
        wait_until(lambda: all((tmp_path / f"asleep-{child}").exists() for child in children))
        owner.send_signal(how)
        owner.wait(60)
    wait_until(lambda: not any(psutil.pid_exists(child) for child in children))


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.processes
def test_a_preloaded_module_that_starts_a_thread_is_refused(tmp_path, monkeypatch):
    """A fork copies one thread only: what the others hold locked stays locked in every rank."""
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(30,), daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with RankPool(preload=["starts_a_thread"]) as pool, pytest.raises(RankError, match="2 threads run"):
        pool.run(1, pid)


@pytest.mark.slow
@pytest.mark.processes
def test_a_preloaded_module_that_fails_is_the_business_of_ranks_that_need_it():
    with RankPool(preload=["no_such_module"]) as pool:
        assert pool.run(1, add_up, 1.0)[0].rank == 0


@pytest.mark.parametrize("call", [{"n": 0}, {"n": "x"}, {"n": 1.5}, {"timeout": "x"}, {"timeout": None}])
def test_ranks_and_times_that_are_none_are_refused_before_anything_is_started(call):
    pool = RankPool()
    with pytest.raises(ConfigError, match=r"is no (whole )?number above 0"):
        pool.run(**{"n": 1, "function": abs, **call})
    assert pool._zygote is None


@pytest.mark.parametrize("call", [{"n": 65}, {"seed": -1}, {"seed": "x"}, {"seed": 2**32}, {"seed": True}])
def test_what_a_rank_could_not_begin_with_is_refused_before_anything_is_started(call):
    pool = RankPool()
    with pytest.raises(ConfigError, match=r"up to 64 ranks|is no seed; give a whole number"):
        pool.run(**{"n": 1, "function": abs, **call})
    assert pool._zygote is None
    with pytest.raises(ConfigError, match=r"preload='torch' is one name"):
        RankPool(preload="torch")


@pytest.mark.parametrize("sizes", [3, "x", (), (0,), ("x",), (1.5,)])
def test_sizes_of_axes_that_are_none_are_refused(sizes):
    rule = functools.partial(check_rule, "aten::exp", [torch.ones(2)])
    placement = functools.partial(check_placement, sw.Shard(0))
    takes = [
        rank_mesh,
        lambda x: rule(worlds=x),
        *([lambda x: placement(axis_sizes=x)] if sizes != () else []),
    ]
    for take in takes:
        with pytest.raises(MeshError, match="is no whole number above 0"):
            take(sizes)


def another_mesh(sizes, axes):
    with pytest.raises(MeshError) as caught:
        rank_mesh(sizes, axes)
    return str(caught.value)


def test_a_mesh_that_is_not_of_this_world_is_refused(ranks):
    assert ranks(2, another_mesh, (3,), ("a",)) == ["sizes=(3,) are 3 ranks, and the world has 2"] * 2
    assert "do not name the sizes (2,) one by one" in ranks(2, another_mesh, (2,), ("a", "b"))[0]


def test_what_is_no_sample_is_refused():
    with pytest.raises(RuleError, match="3 is no sample"):
        check_rule("aten::exp", [3])
    with pytest.raises(RuleError, match="takes a tuple of positional arguments"):
        Sample(torch.ones(3))
    with pytest.raises(RuleError, match=r"aten::mm refuses the sample .*: aten::mm.. is missing value"):
        check_rule("aten::mm", [torch.ones(3, 4)])


def test_a_formula_is_checked_by_its_text():
    samples = [(torch.randn(3, 4), torch.randn(4, 5))]
    assert check_rule("aten::mm", samples, formula="m k, k n -> m n").cut
    with pytest.raises(RuleCheckError):
        check_rule("aten::mm", samples, formula="m k, k n -> n m")
    with pytest.raises(RuleError, match="formula=3 is no formula"):
        check_rule("aten::mm", samples, formula=3)


def test_what_is_no_placement_is_refused_and_torchs_own_is_checked():
    check_placement(TorchShard(0), axis_sizes=(2,))
    with pytest.raises(PlacementError, match=r"3 \(int\) is not a placement"):
        check_placement(3)
