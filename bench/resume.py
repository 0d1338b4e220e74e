"""Resume: ten steps after a checkpoint beside the run that was never stopped, on the same and other meshes.

    python -m bench.resume

Prints, per mesh, the largest differences of loss and gradient norm, and whether metrics.jsonl has every step
once. Exit 1 if a bound is broken: bitwise on the same mesh; 1e-6 of the loss at the first step and 1e-4 over
ten steps on another.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STEPS, CHECKPOINT = 20, 10
COMMON = (
    "--steps",
    str(STEPS),
    "--batch-size",
    "8",
    "--seq-len",
    "64",
    "--checkpoint-every",
    str(CHECKPOINT),
)
WHOLE = ("--world", "4", "--dp-replicate", "2", "--dp-shard", "2", "--ep", "2")
MESHES = {
    "the same mesh": WHOLE,
    "4 ranks, fsdp + ep 4": ("--world", "4", "--dp-shard", "4", "--ep", "4"),
    "2 ranks, replicate": ("--world", "2", "--dp-replicate", "2", "--dp-shard", "1"),
    "2 ranks, tp": ("--world", "2", "--tp", "2"),
    "1 rank": ("--world", "1"),
}


def _train(out: Path, mesh: tuple[str, ...], *more: str) -> None:
    command = [sys.executable, "-m", "shardwright", "train", *mesh, *COMMON, "--out", str(out), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")


def _metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def _compare(name: str, whole: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> bool:
    complete = [row["step"] for row in resumed] == list(range(1, STEPS + 1))
    after = list(zip(whole, resumed, strict=False))[CHECKPOINT:]
    loss = [abs(a["loss"] - b["loss"]) for a, b in after]
    norm = [abs(a["grad_norm"] - b["grad_norm"]) for a, b in after]
    first = loss[0] / after[0][0]["loss"]
    print(
        f"{name:22}  first step {first:.2e} of the loss   {len(loss)} steps: loss {max(loss):.2e}, "
        f"gradient norm {max(norm):.2e}   metrics {'complete' if complete else 'NOT complete'}",
        flush=True,
    )
    if name == "the same mesh":
        return complete and max(loss) == max(norm) == 0.0
    return complete and first <= 1e-6 and max(loss) <= 1e-4


def run() -> None:
    """Train once without a stop, and go on from its middle on every mesh."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "whole")
        _train(whole, WHOLE)
        held = True
        for index, (name, mesh) in enumerate(MESHES.items()):
            out = Path(folder, f"resumed-{index}")
            shutil.copytree(whole, out)
            _train(out, mesh, "--resume", f"step-{CHECKPOINT:08d}")
            held = _compare(name, _metrics(whole), _metrics(out)) and held
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    run()
