"""Real ranks on one machine: gloo processes that are forked once and run one function after another."""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any, Self

from shardwright.errors import ConfigError, refuse_no_number
from shardwright.testing.rank_errors import RankError, RankTimeoutError
from shardwright.testing.rank_process import MAX_RANKS, SEEDS, Outcome, Task
from shardwright.testing.worlds import World, Zygote

DEFAULT_TIMEOUT = 60.0
_GRACE = 0.3  # after one rank failed, how long the others may take to say that they failed too
_MAX_OPEN_FILES = 400  # a rank whose calls made this many sockets is replaced before it runs out
_MAX_WARM_RANKS = 32


class RankPool:
    """Runs functions on n real ranks; the ranks of each n stay warm between calls.

    Each rank is a process with one thread and an initialised gloo group of world size n, forked from a
    zygote that imported `preload` and ran nothing. Between calls a rank keeps its imported modules and
    process groups, but is stopped: a thread that a call leaves behind goes on in the next call. Seeds,
    default dtype, grad mode, environment and working folder are set anew. Ranks whose call failed are never
    used again. Not a launcher of real runs: it serves tests, documents and benchmarks.
    """

    def __init__(self, *, preload: Sequence[str] = ("torch.distributed.tensor",)) -> None:
        if isinstance(preload, str):
            raise ConfigError(f"preload={preload!r} is one name; give a list of names of modules")
        self._preload = tuple(preload)
        self._worlds: dict[int, World] = {}
        self._lock = threading.Lock()
        self._zygote: Zygote | None = None

    def start(self) -> None:
        """Start the zygote without waiting for it; otherwise the first call does."""
        self._started()

    def _started(self) -> Zygote:
        if self._zygote is None:
            self._zygote = Zygote(self._preload)
        return self._zygote

    def run(
        self,
        n: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = DEFAULT_TIMEOUT,
        fresh: bool = False,
        seed: int = 0,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `function(*args, **kwargs)` on n ranks at once.

        Args:
            n: the number of ranks, 64 at most.
            function: a module-level function; it, its arguments and its result are pickled.
            args: its positional arguments.
            timeout: seconds after which the ranks are killed.
            fresh: use ranks that never ran anything, and end them afterwards.
            seed: what every rank seeds its generators with.
            kwargs: its keyword arguments.
        Returns: the results in rank order.
        Raises: RankError: a rank raised or died. RankTimeoutError: a rank did not answer in time.
            TypeError: the call cannot be pickled. ConfigError: no such number of ranks or seconds, or no
            seed.
        """
        refuse_no_number("n", n, ConfigError, whole=True)
        refuse_no_number("timeout", timeout, ConfigError)
        if n > MAX_RANKS:
            raise ConfigError(f"n={n}: a pool has worlds of up to {MAX_RANKS} ranks; ask for fewer")
        _refuse_no_seed(seed)
        task = _task(function, args, kwargs, seed)
        with self._lock:
            world = self._take(n, fresh=fresh)
            try:
                outcomes = self._exchange(world, task, timeout)
            except BaseException:
                self._retire(world)
                raise
            if fresh or not _reusable(outcomes):
                self._retire(world)
            else:
                self._keep(n, world)
        return [pickle.loads(outcome.value) for outcome in outcomes]

    def close(self) -> None:
        """End every rank and the zygote."""
        with self._lock:
            for world in self._worlds.values():
                world.hang_up()
            self._worlds.clear()
            if self._zygote is not None:
                self._zygote.close()
                self._zygote = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, n: int, *, fresh: bool) -> World:
        zygote = self._started()
        world = None if fresh else self._worlds.pop(n, None)
        if world is not None and not world.alive:
            self._retire(world)
            world = None
        if world is None:
            return zygote.fork(n)
        world.resume()
        return world

    def _keep(self, n: int, world: World) -> None:
        world.pause()
        self._worlds[n] = world
        while sum(self._worlds) > _MAX_WARM_RANKS and len(self._worlds) > 1:
            self._retire(self._worlds.pop(next(iter(self._worlds))))

    def _retire(self, world: World) -> dict[int, int]:
        """Kill the ranks of a world and return how each one died."""
        statuses = self._zygote.end(world.pids) if self._zygote is not None else {}
        world.hang_up()
        return {rank: statuses[pid] for rank, pid in enumerate(world.pids) if pid in statuses}

    def _exchange(self, world: World, task: Task, timeout: float) -> list[Outcome]:
        world.forget_output()
        for connection in world.connections:
            with contextlib.suppress(BrokenPipeError):  # a dead rank shows when answers are gathered
                connection.send(task)
        outcomes = _gather(world, timeout)
        failed = [rank for rank, outcome in outcomes.items() if outcome is None or outcome.error]
        if failed:
            self._raise_failure(world, outcomes, failed)
        silent = [rank for rank in range(len(world.pids)) if rank not in outcomes]
        if silent:
            raise _timeout_error(world, silent, timeout)
        _show_output(world)
        return [outcome for _, outcome in sorted(outcomes.items()) if outcome is not None]

    def _raise_failure(self, world: World, outcomes: dict[int, Outcome | None], failed: list[int]) -> None:
        # A dead rank explains its peers, who only lost a connection; else the first to fail does.
        rank = next((rank for rank in failed if outcomes[rank] is None), failed[0])
        outcome = outcomes[rank]
        statuses = self._retire(world)
        if outcome is None:
            message = f"rank {rank} of {len(world.pids)} {_describe(statuses.get(rank))}"
        else:
            message = f"rank {rank} of {len(world.pids)} raised {outcome.error}\n{outcome.traceback}"
        others = {other: outcomes[other] for other in failed if other != rank}
        for other, result in others.items():
            message += f"\nrank {other}: {'died' if result is None else result.traceback.splitlines()[-1]}"
        printed = world.printed(rank)
        if printed:
            message += f"\nrank {rank} printed:\n{printed}"
        error = RankError(message, rank=rank, traceback=outcome.traceback if outcome else "")
        cause = pickle.loads(outcome.exception) if outcome and outcome.exception else None
        raise error from cause


def _refuse_no_seed(seed: object) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < SEEDS:
        raise ConfigError(f"seed={seed!r:.60} is no seed; give a whole number, 0 or larger, below 2**32")


def _task(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> Task:
    try:
        call = pickle.dumps((function, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{function} or its arguments cannot be sent to a rank ({error}); a rank function stands at "
            "the top level of a module, and gets what it needs as arguments that can be pickled"
        ) from error
    return Task(_modules(function), tuple(sys.path), call, tuple(warnings.filters), seed)


def _modules(function: Callable[..., Any]) -> tuple[tuple[str, str], ...]:
    while isinstance(function, functools.partial):
        function = function.func
    module = inspect.getmodule(function)
    if not isinstance(module, ModuleType) or getattr(module, "__file__", None) is None:
        return ()
    return ((module.__name__, str(module.__file__)),)


def _gather(world: World, timeout: float) -> dict[int, Outcome | None]:
    """Collect answers until all are in, or time is up, or a rank failed and its peers had a moment.

    Returns: the outcome of each rank that answered; None for one that died.
    """
    waiting = {connection: rank for rank, connection in enumerate(world.connections)}
    outcomes: dict[int, Outcome | None] = {}
    deadline = time.monotonic() + timeout
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        for ready in wait(list(waiting), remaining):
            if not isinstance(ready, Connection):
                continue
            outcome = _receive(ready)
            outcomes[waiting.pop(ready)] = outcome
            if outcome is None or outcome.error:
                deadline = min(deadline, time.monotonic() + _GRACE)
    return outcomes


def _receive(connection: Connection) -> Outcome | None:
    try:
        outcome: Outcome = connection.recv()
    except (EOFError, ConnectionResetError):
        return None
    return outcome


def _reusable(outcomes: list[Outcome]) -> bool:
    return all(outcome.reusable and outcome.open_files < _MAX_OPEN_FILES for outcome in outcomes)


def _timeout_error(world: World, silent: list[int], timeout: float) -> RankTimeoutError:
    lines = [f"no answer within {timeout:g} s from rank {', '.join(map(str, silent))} of {len(world.pids)}"]
    for rank, stack in world.stacks(silent).items():
        lines += [f"rank {rank} was at:", stack or "  (it does not answer a signal: it is stopped)"]
        lines += [f"rank {rank} printed:\n{text}" for text in (world.printed(rank),) if text]
    return RankTimeoutError("\n".join(lines), rank=silent[0], traceback=lines[2])


def _describe(status: int | None) -> str:
    if status is None:
        return "died"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"


def _show_output(world: World) -> None:
    """Print what ranks printed where the caller's own output goes."""
    for rank in range(len(world.pids)):
        for line in world.printed(rank).splitlines():
            sys.stdout.write(f"[rank {rank}] {line}\n")
