"""Save a checkpoint with two ranks, and die before the n-th file operation of one of them, for every n.

With storage `local` the folder is object storage to the library (fsspec's `local://`), and a write dies
half-way, too. Every attempt is a pair of processes forked from one that has no process group.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.implementations.local import LocalFileOpener
from torch import nn

from shardwright.checkpoint import (
    choose,
    latest,
    list_checkpoints,
    load,
    load_hf,
    prune,
    save,
    save_hf,
    step_of,
    step_path,
)
from shardwright.checkpoint.folder import why_unusable
from shardwright.checkpoint.storage import manifest
from shardwright.errors import CheckpointError

DIED = -signal.SIGKILL
STORAGE = ""
REPLACED = 20.0
CHANGING = {"os.rename", "os.remove", "os.mkdir", "os.rmdir"}


def in_ranks(
    function: Callable[..., None], *args: Any, dies: tuple[int, int] | None = None, world: int = 2
) -> bool:
    """Run a function on forked ranks; `dies`: (rank, before which file operation). True if one died."""
    store = str(args[0]) + ".store"
    pids = [_fork((rank, world), store, function, args, dies) for rank in range(world)]
    codes: dict[int, int] = {}
    while len(codes) < world:
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid]:  # as the launcher does: a run without one of its ranks is ended
            for other in set(pids) - set(codes):
                os.kill(other, signal.SIGKILL)
    Path(store).unlink(missing_ok=True)
    died = DIED in codes.values()
    if not died and set(codes.values()) != {0}:
        raise SystemExit(f"ranks ended with {codes}")
    return died


def _fork(
    place: tuple[int, int], store: str, function: Callable[..., None], args: Any, dies: tuple[int, int] | None
) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rank, world = place
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    if dies is not None and dies[0] == rank:
        _die_before(str(args[0]), dies[1])
    try:
        function(*args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001  whatever it is, this process must not go on as its parent
        if dies is None:
            print(error, file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def _die_before(folder: str, operation: int) -> None:
    """End this process before the n-th change that it makes to a file in the folder."""
    count = 0
    sync = os.fsync

    def one_more(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == operation:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(args[0], str | Path) and bool(args[2] & os.O_WRONLY)
        inside = str(args[0]).startswith(folder) if args else False
        relative = event in {"os.remove", "os.rmdir"} and args[1] != -1  # as shutil.rmtree names them
        if (writes or event in CHANGING) and (inside or relative):
            one_more()

    def counted_sync(handle: int) -> None:
        one_more()
        sync(handle)

    os.fsync = counted_sync
    sys.addaudithook(hook)
    if STORAGE:
        _die_half_way(one_more)


def _die_half_way(one_more: Callable[[], None]) -> None:
    """A write to object storage that dies has written the first half."""
    real = LocalFileOpener.write

    def write(self: LocalFileOpener, data: Any) -> Any:
        half = len(data) // 2
        count = real(self, data[:half])
        self.flush()
        one_more()
        return count + real(self, data[half:])

    LocalFileOpener.write = write


def where(out: Path) -> Path | str:
    """The folder as the library is told of it."""
    return f"{STORAGE}://{out}" if STORAGE else out


def save_step(out: Path, step: int) -> None:
    model = nn.Linear(3, 3)
    nn.init.constant_(model.weight, step)
    save(step_path(where(out), step), model=model, step=step)


def replace(out: Path) -> None:
    model = nn.Linear(3, 3)
    nn.init.constant_(model.weight, REPLACED)
    save(step_path(where(out), 2), model=model, step=2)


def check_loads(out: Path, verb: str) -> None:
    """By `latest` and by its own path, the checkpoint loads, and holds what one save gave it."""
    newest = latest(where(out))
    for path in {newest, step_path(where(out), 2)} if verb == "replace" else {newest}:
        model = nn.Linear(3, 3)
        load(path, model=model)
        allowed = {float(step_of(path)), REPLACED if verb == "replace" else float(step_of(path))}
        if set(model.weight.flatten().tolist()) - allowed or len(set(model.weight.flatten().tolist())) != 1:
            raise SystemExit("a checkpoint holds the values of another")


def prune_to_one(out: Path) -> None:
    prune(where(out), keep=1)


def attempt(template: Path, out: Path, verb: str, rank: int, operation: int) -> dict[str, Any]:
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(template, out)
    doing = {"save": (save_step, out, 3), "replace": (replace, out), "prune": (prune_to_one, out)}[verb]
    died = in_ranks(*doing, dies=(rank, operation))
    unusable = [one.name for one in list_checkpoints(where(out)).committed if why_unusable(one)]
    chosen = step_of(choose(where(out)).path)
    check_loads(out, verb)
    if died and verb != "prune":
        in_ranks(*doing)
    prune_to_one(out)
    check_loads(out, verb)
    return {
        "died": died,
        "unusable": unusable,
        "chosen": chosen,
        "afterwards": sorted(one.name for one in (out / "checkpoints").iterdir()),
    }


def export(out: Path, kind: str) -> None:
    """Write for another program, over whatever a dead export left, but not over one that is committed."""
    model = nn.Linear(3, 3)
    nn.init.constant_(model.weight, REPLACED)
    try:
        if kind == "dcp":
            save(out / "x", model, format="dcp")
        else:
            save_hf(model, out / "x", max_shard_size=1 if kind == "hf" else 1 << 30)
    except CheckpointError as error:
        if " holds " not in str(error):
            raise


def is_whole(path: Path, kind: str) -> bool:
    """Whether a stranger would read it; what he reads is right."""
    model = nn.Linear(3, 3)
    if not any(path.glob(".metadata" if kind == "dcp" else "model.safetensors*")):
        return False
    if kind == "dcp":
        dcp.load({"model": model.state_dict()}, checkpoint_id=path, no_dist=True)
    else:
        load_hf(model, path)
    if not model.weight.eq(REPLACED).all():
        raise SystemExit("an export holds other values")
    return True


def deaths_of_exports(folder: Path, kind: str, rank: int, world: int) -> list[tuple[bool, bool, list[str]]]:
    """An attempt for each file operation of the rank, and a last one in which it lived.

    Returns: of each whether the rank died, whether what it left is whole, what is there after one more go.
    """
    dist.destroy_process_group()
    warnings.simplefilter("ignore")  # torch's: of one process
    export(folder / "imports", kind)  # what is imported here is not imported by each fork
    found: list[tuple[bool, bool, list[str]]] = []
    while not found or found[-1][0]:
        out = folder / str(len(found))
        (out / "x").mkdir(parents=True)
        if kind != "dcp":
            (out / "x" / "config.json").write_text("{}")
        died = in_ranks(export, out, kind, dies=(rank, len(found) + 1), world=world)
        whole = is_whole(out / "x", kind)
        in_ranks(export, out, kind, world=world)
        if not is_whole(out / "x", kind):
            raise SystemExit("an export cannot be repeated")
        names = sorted(str(one.relative_to(out)) for one in out.rglob("*") if not one.is_dir())
        found.append((died, whole, names))
    return found


def deaths(folder: Path, verb: str, rank: int, storage: str) -> list[dict[str, Any]]:
    """An attempt for each file operation of the rank, and a last one in which it lived.

    Args:
        folder: new; it is filled with two steps, and copied for each attempt.
        verb: what dies: `save`, `replace` or `prune`.
        rank: which one dies.
        storage: `local`, `local-planted` (nobody looks for a manifest that was cut), or a folder: "".
    Returns: which checkpoints look complete but are not, the one that resuming chooses, what is there after
        one more go.
    """
    global STORAGE
    STORAGE, planted = storage.partition("-")[::2]
    if planted:
        manifest.cut_short = lambda *_: False
    dist.destroy_process_group()
    folder.mkdir(parents=True, exist_ok=True)
    template = folder / "template"
    for step in (1, 2):
        in_ranks(save_step, template, step)
    found = [attempt(template, folder / "out", verb, rank, 1)]
    while found[-1]["died"]:
        found.append(attempt(template, folder / "out", verb, rank, len(found) + 1))
    return found
