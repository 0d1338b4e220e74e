"""What `shardwright doctor` looks at. Each check gives findings; none raises."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.checkpoint.storage.manifest import library_version
from shardwright.cli.doctor_ping import check_ping
from shardwright.plan.network import Network
from shardwright.tensor.doors import why_python

OLDEST_TORCH = (2, 11)
_GIB = 1 << 30
_MIB = 1 << 20
# Beyond this a plan would move more than the law allows; below, the latency was not measured well.
_LEAST_ONE_ROUND, _MOST_ONE_ROUND = 16 << 10, 256 << 10


@dataclass(frozen=True)
class Finding:
    """One fact; `advice` when it deserves attention, `wrong` when something will not work because of it.

    network: what plans may take from it.
    """

    name: str
    fact: str
    advice: str = ""
    wrong: bool = False
    network: Network | None = None

    def __str__(self) -> str:
        mark = "!!" if self.wrong else ("? " if self.advice else "ok")
        return f"{mark} {self.name:<12} {self.fact}{f'  -> {self.advice}' if self.advice else ''}"


def examine() -> Iterator[Finding]:
    """Every finding, the quick ones first."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _versions,
        _backends,
        _cores,
        _memory,
        _limits,
        _host,
        _environment,
        _extras,
        _known_calls,
        _ping,
    )
    for check in checks:
        yield from check()


def _versions() -> Iterator[Finding]:
    yield Finding("shardwright", library_version())
    yield Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    old = found < OLDEST_TORCH
    wanted = ".".join(map(str, OLDEST_TORCH))
    yield Finding("torch", torch.__version__, f"install torch>={wanted}" if old else "", wrong=old)


def _backends() -> Iterator[Finding]:
    if not dist.is_available():
        yield Finding(
            "backends", "torch without torch.distributed", "install another build of torch", wrong=True
        )
        return
    gloo, nccl, cuda = dist.is_gloo_available(), dist.is_nccl_available(), torch.cuda.is_available()
    missing = not gloo or (cuda and not nccl)
    yield Finding(
        "backends",
        f"gloo {_yes(gloo)}, nccl {_yes(nccl)}, CUDA devices {torch.cuda.device_count() if cuda else 0}",
        f"install a build of torch with {'nccl' if gloo else 'gloo'}" if missing else "",
        wrong=missing,
    )


def _cores() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("cores", f"{cores} usable: that many ranks run at full speed, with one thread each")


def _memory() -> Iterator[Finding]:
    available = _available_memory()
    if available is None:
        yield Finding("memory", "unknown on this system")
        return
    low = available < _GIB
    yield Finding(
        "memory",
        f"{available / _GIB:.1f} GiB available",
        "close something: a rank needs 0.5 GiB" if low else "",
    )


def _available_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


def _limits() -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = 0 <= files < 1024
    yield Finding("open files", str(files), "raise it for many ranks: ulimit -n 4096" if few else "")
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        small = free < 16 * _MIB
        yield Finding(
            "/dev/shm", f"{free / _MIB:.0f} MiB free", "enlarge it (docker: --shm-size=1g)" if small else ""
        )


def _host() -> Iterator[Finding]:
    name = socket.gethostname()
    try:
        yield Finding("host name", f"{name} is {socket.gethostbyname(name)}")
    except OSError:
        yield Finding(
            "host name",
            f"{name} has no address",
            "torchrun with gloo needs one: set GLOO_SOCKET_IFNAME, or add the name to /etc/hosts",
        )


def _environment() -> Iterator[Finding]:
    left = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in os.environ]
    if left:
        yield Finding(
            "environment",
            f"{', '.join(left)} set",
            "train will take this process for one rank of torchrun: unset them to have the ranks started",
        )


def _extras() -> Iterator[Finding]:
    found = importlib.util.find_spec("matplotlib") is not None
    advice = "" if found else "no loss curve is drawn without it: pip install 'shardwright[plot]'"
    yield Finding("matplotlib", _yes(found), advice)


def _known_calls() -> Iterator[Finding]:
    why = why_python()
    advice = "install with a C compiler at hand: small ops are quicker then" if "not built" in why else ""
    yield Finding("known calls", f"in Python: {why}" if why else "in C", advice)


def _ping() -> Iterator[Finding]:
    result = check_ping()
    if isinstance(result, str):
        yield Finding(
            "two ranks", result, "ranks cannot talk on loopback: look at firewall and lo", wrong=True
        )
        return
    speed = f"{result.bytes_per_second / 1e9:.2f} GB/s"
    yield Finding(
        "two ranks", f"start {result.start:.2f} s, latency {result.latency * 1e6:.0f} us, {speed} (gloo)"
    )
    # A round more costs a latency; what travels in that time may as well be sent at once.
    measured = int(result.latency * result.bytes_per_second)
    few = min(max(measured, _LEAST_ONE_ROUND), _MOST_ONE_ROUND)
    fact = f"{few // 1024} KiB per rank or less go in one round of more bytes (without --save: 64 KiB)"
    yield Finding("small sums", fact, network=Network(one_round_bytes=few))


def _yes(value: bool) -> str:
    return "yes" if value else "no"
