"""Every mesh of the training command beside one device, at full size: 20 steps each, `--verify`.

    python -m bench.verify_matrix [PART OF A NAME]

Prints one line per mesh and batch size and exits 1 if a bound is broken. Takes half an hour on two
cores; the tests run the same matrix on a tiny model.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

MESHES = {
    "replicate": "--world 4 --dp-replicate 4",
    "fsdp": "--world 4",
    "hsdp": "--world 4 --dp-replicate 2",
    "cp_replicate": "--world 4 --cp-replicate 4",
    "ep 2": "--world 2 --dp-replicate 2 --ep 2",
    "ep 4": "--world 4 --dp-replicate 4 --ep 4",
    "hsdp + ep": "--world 4 --dp-replicate 2 --ep 2",
    "tp 2": "--world 2 --tp 2",
    "tp + fsdp + ep": "--world 4 --tp 2 --ep 2",
    "cp_replicate + hsdp + ep": "--world 8 --cp-replicate 2 --dp-replicate 2 --ep 4",
    "tp + replicate + cp_replicate": "--world 8 --tp 2 --dp-replicate 2 --cp-replicate 2 --ep 2",
    "three ranks": "--world 3",
    "pp 2": "--world 2 --pp 2",
    "pp + fsdp": "--world 4 --pp 2 --dp-shard 2",
    "pp + tp": "--world 4 --pp 2 --tp 2",
    "pp + cp": "--world 4 --pp 2 --cp 2",
}
BATCHES = {"even": 32, "uneven": 29, "fewer than ranks": 1}


def main() -> int:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    failures = 0
    for mesh, flags in MESHES.items():
        for batch, size in BATCHES.items():
            if wanted in mesh:
                failures += not _verified(f"{mesh}, {batch} batch", f"{flags} --batch-size {size}")
    print(f"{failures} broken" if failures else "all within their bounds")
    return int(failures > 0)


def _verified(name: str, flags: str) -> bool:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "shardwright", "train", "--verify", "--steps", "20"]
        command += [*flags.split(), "--out", str(Path(folder) / "run")]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("verify: ")] or [ended.stderr]
    print(
        f"{name:45} {time.monotonic() - began:4.0f} s  exit {ended.returncode}  {lines[-1].strip()}",
        flush=True,
    )
    for line in lines[:-1]:
        print(f"    {line}")
    return ended.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
