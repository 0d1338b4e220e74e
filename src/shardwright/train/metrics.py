"""What a run reports about each step, and the file that keeps it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Self

from torch import Tensor

from shardwright.errors import CheckpointError


@dataclass(frozen=True)
class StepRecord:
    """One line of `metrics.jsonl`. `held_out_loss` is None on steps that did not measure it.

    Losses in nats per byte; `load_entropy` in nats, the mean over layers, at most log(experts);
    `bytes_communicated` is what all ranks together sent during the step; `seconds` since this process began
    to train.
    """

    step: int
    loss: float
    held_out_loss: float | None
    grad_norm: float
    lr: float
    load_entropy: float
    tokens_per_second: float
    bytes_communicated: int
    seconds: float


class MetricsFile:
    """`metrics.jsonl` of a run: one line per finished step, in order, each step once.

    Each line is handed to the operating system before the step's checkpoint is written, so a checkpoint never
    is ahead of the file; what the file is ahead of the checkpoint, `resume_at` drops.
    """

    def __init__(self, path: Path, file: IO[str]) -> None:
        self.path = path
        self._file = file

    @classmethod
    def create(cls, path: Path) -> Self:
        """A new, empty file."""
        return cls(path, path.open("x", encoding="utf-8"))

    @classmethod
    def resume_at(cls, path: Path, step: int) -> Self:
        """The file of a run that goes on after `step`, without later lines and without a last one cut short.

        Raises: CheckpointError: the file lacks one of the steps up to `step`.
        """
        kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= step]
        steps = [json.loads(line)["step"] for line in kept]
        if steps != list(range(1, step + 1)):
            raise CheckpointError(
                f"{path} does not hold each of the steps 1 to {step} of the checkpoint once: "
                "put the file back as the run wrote it, or start a new run"
            )
        temporary = path.with_suffix(".jsonl.new")
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(path)
        return cls(path, path.open("a", encoding="utf-8"))

    def append(self, record: StepRecord) -> None:
        """Add the line of one finished step. A number that is not finite is written as null."""
        line = {name: _finite(value) for name, value in asdict(record).items()}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """No line follows."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, as written."""
    return [json.loads(line) for line in _whole_lines(path)]


def load_entropy(loads: Tensor) -> float:
    """Mean over layers of the entropy, in nats, of how tokens were shared out:  counts [layers, experts]."""
    shares = loads.double() / loads.sum(-1, keepdim=True).clamp(min=1)
    return float(-(shares * shares.clamp(min=1e-300).log()).sum(-1).mean())


def _whole_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n")]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
