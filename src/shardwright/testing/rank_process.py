"""What one rank of a pool does: join the process group, then run one function after another."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardwright.context.randomness import forget_streams
from shardwright.testing.gloo_device import share_one_device
from shardwright.testing.rank_device import device_of_ranks, take_device

HOST = "127.0.0.1"
MAX_RANKS = 64  # of one world: what one message of the pool to the zygote carries
SEEDS = 2**32  # numpy takes no larger ones
_GROUP_TIMEOUT = timedelta(minutes=10)  # the pool gives up long before: only it can name the rank that hangs
_MAX_LOCALS = 12
_MAX_REPR = 200


@dataclass(frozen=True, slots=True)
class RankSeat:
    """Where a rank sits: its number, the size of its world, its socket, and the folder for what it prints."""

    rank: int
    world: int
    fd: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Task:
    """One call. `call` is a pickled (function, args, kwargs); `modules` are loaded before it is unpickled."""

    modules: tuple[tuple[str, str], ...]
    path: tuple[str, ...]
    call: bytes
    filters: tuple[Any, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call: a pickled value, or an error as text and, where it can be pickled, as itself."""

    value: bytes = b""
    error: str = ""
    traceback: str = ""
    exception: bytes = b""
    open_files: int = 0
    reusable: bool = True


def run_rank(seat: RankSeat) -> None:
    """Serve calls until the pool closes its end of the socket."""
    connection = Connection(seat.fd)
    with _redirected(seat), (seat.folder / f"{seat.rank}.stack").open("a") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        faulthandler.enable(sys.stderr)  # what a rank dies of shows where it was
        with contextlib.suppress(EOFError, BrokenPipeError):
            _join(seat, connection)
            while True:
                connection.send(_run(connection.recv()))


@contextlib.contextmanager
def _redirected(seat: RankSeat) -> Iterator[None]:
    """Send what this rank prints to a file that the pool shows, and truncates between calls."""
    with (seat.folder / f"{seat.rank}.out").open("a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        yield


def _join(seat: RankSeat, connection: Connection) -> None:
    torch.set_num_threads(1)
    if seat.rank == 0:
        store = dist.TCPStore(HOST, 0, seat.world, is_master=True, wait_for_workers=False)
        port = store.port
        connection.send(port)
    else:
        port = connection.recv()
        store = dist.TCPStore(HOST, port, seat.world, is_master=False)
    os.environ.update(_torchrun_environment(seat, port))
    share_one_device()
    dist.init_process_group(
        take_device(seat.rank), store=store, rank=seat.rank, world_size=seat.world, timeout=_GROUP_TIMEOUT
    )


def _torchrun_environment(seat: RankSeat, port: int) -> dict[str, str]:
    rank, world = str(seat.rank), str(seat.world)
    return {
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
    }


def _run(task: Task) -> Outcome:
    environment, folder = dict(os.environ), Path.cwd()
    try:
        outcome = _call(task)
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.stdout.flush()
        sys.stderr.flush()
    return outcome


def _call(task: Task) -> Outcome:
    try:
        sys.path[:] = task.path
        for name, file in task.modules:
            _load(name, file)
        function, args, kwargs = pickle.loads(task.call)
        _reset(task.seed)
        with warnings.catch_warnings():
            warnings.filters[:] = list(task.filters)  # type: ignore[index]
            warnings._filters_mutated()  # type: ignore[attr-defined]
            value = pickle.dumps(function(*args, **kwargs))
    except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the caller
        return _failure(error)
    return Outcome(value=value, open_files=_open_files(), reusable=dist.is_initialized())


def _load(name: str, file: str) -> ModuleType:
    """Import by name if that gives this file, else from the file, under the name that pickles refer to."""
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == file:
        return known
    if name != "__main__":
        with contextlib.suppress(ImportError):
            module = importlib.import_module(name)
            if module.__file__ == file:
                return module
    return _load_file(name, file)


def _load_file(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("__mp_main__" if name == "__main__" else name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"no module can be loaded from {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _reset(seed: int) -> None:
    """Undo what the last call may have left in the process, as far as torch lets it be undone."""
    gc.collect()
    gc.freeze()  # a call that looks for garbage finds its own, and not slower in a world that has seen many
    forget_streams()
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the legacy state is what a test may have used
    # `torch.manual_seed` formats the stack for each kind of device that has not begun.
    (torch.default_generator if device_of_ranks() == "cpu" else torch).manual_seed(seed)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    if torch.are_deterministic_algorithms_enabled():  # to be asked imports Inductor: 0.2 s of each rank
        torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)


def _failure(error: BaseException) -> Outcome:
    text = "".join(traceback.format_exception(error)) + _locals_of(error)
    try:
        exception = pickle.dumps(error)
        pickle.loads(exception)  # many exceptions pickle but do not unpickle
    except Exception:  # noqa: BLE001 - the text says it all
        exception = b""
    return Outcome(error=type(error).__name__, traceback=text, exception=exception, reusable=False)


def _locals_of(error: BaseException) -> str:
    """Show the values in the frame that failed: a bare assert tells nothing about them."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not isinstance(error, AssertionError):
        return ""
    names: Sequence[str] = sorted(trace.tb_frame.f_locals)[:_MAX_LOCALS]
    return "".join(f"    {name} = {_short(trace.tb_frame.f_locals[name])}\n" for name in names)


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - a repr that fails must not hide the failure it was to explain
        text = f"<repr raised {type(error).__name__}>"
    return text if len(text) <= _MAX_REPR else text[:_MAX_REPR] + "..."


def _open_files() -> int:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0
