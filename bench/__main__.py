"""`python -m bench [NAME...]`: run the benchmarks, each in a process of its own.

`python -m bench NAME --help` shows the options of one that has some.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

_NAMES = (
    "checkpoint",
    "compiled",
    "data_parallel",
    "context",
    "erased",
    "first_call",
    "lists",
    "meshes",
    "moe",
    "op_overhead",
    "pipeline",
    "planning",
    "random_draws",
    "redistribution",
    "regions",
    "scale",
    "step",
    "trainer",
    "wire",
    "words",
)
_WITH_OPTIONS = ("checkpoint", "redistribution")


def main(names: list[str]) -> int:
    """Run one benchmark here, or several one after another."""
    if names[1:] and names[1].startswith("-"):
        return _run(names[0], names[1:])
    unknown = [name for name in names if name not in _NAMES]
    if unknown:
        print(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(_NAMES)}", file=sys.stderr)
        return 2
    if len(names) == 1:
        return _run(names[0], [])
    codes = []
    for name in names or _NAMES:
        print(f"\n{name}: {_summary(name)}", flush=True)
        codes.append(subprocess.run([sys.executable, "-m", "bench", name], check=False).returncode)
    return max(codes)


def _run(name: str, options: list[str]) -> int:
    module = importlib.import_module(f"bench.{name}")
    return int((module.run(options) if name in _WITH_OPTIONS else module.run()) or 0)


def _summary(name: str) -> str:
    return (Path(__file__).with_name(f"{name}.py")).read_text().splitlines()[0].strip('"')


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
