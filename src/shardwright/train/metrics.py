"""What a run reports about each step, and the file that keeps it."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from torch import Tensor

if TYPE_CHECKING:
    from shardwright.train.step import StepResult


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

    @classmethod
    def of(cls, step: int, result: StepResult, held_out: float | None, speed: float, seconds: float) -> Self:
        """Of what a step returned. speed: tokens a second. seconds: since training began."""
        return cls(
            step=step,
            loss=result.loss,
            held_out_loss=held_out,
            grad_norm=result.grad_norm,
            lr=result.lr,
            load_entropy=load_entropy(result.loads),
            tokens_per_second=speed,
            bytes_communicated=result.bytes_communicated,
            seconds=seconds,
        )


class MetricsFile:
    """`metrics.jsonl` of a run: one line per finished step, in order, each step once.

    Each line is handed to the operating system before the step's checkpoint is written, so a checkpoint never
    is ahead of the file; what the file is ahead of the checkpoint, `resume_at` drops.
    """

    def __init__(self, path: Path, file: IO[str]) -> None:
        self.path = path
        self.missing = 0
        self._file = file

    @classmethod
    def create(cls, path: Path) -> Self:
        """A new, empty file."""
        return cls(path, path.open("x", encoding="utf-8"))

    @classmethod
    def resume_at(cls, path: Path, step: int) -> Self:
        """The file of a run that goes on after `step`, without later lines and what is no line of a step.

        A file that lacks steps is no reason to lose the checkpoint: `missing` says how many it lacks.
        """
        kept = {number: line for line in _whole_lines(path) if 0 < (number := _step_of(line)) <= step}
        temporary = path.with_suffix(".jsonl.new")
        temporary.write_text("".join(kept[number] for number in sorted(kept)), encoding="utf-8")
        temporary.replace(path)
        file = cls(path, path.open("a", encoding="utf-8"))
        file.missing = step - len(kept)
        return file

    def append(self, record: StepRecord) -> None:
        """Add the line of one finished step. A number that is not finite is written as null."""
        line = {name: _finite(value) for name, value in asdict(record).items()}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """No line follows. What a full disk has not taken was an error of `append`."""
        with contextlib.suppress(OSError):
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, as written; what is no line of a step is left out."""
    return [json.loads(line) for line in _whole_lines(path) if _step_of(line)]


def load_entropy(loads: Tensor) -> float:
    """Mean over layers of the entropy, in nats, of how tokens were shared out:  counts [layers, experts]."""
    shares = loads.double() / loads.sum(-1, keepdim=True).clamp(min=1)
    return float(-(shares * shares.clamp(min=1e-300).log()).sum(-1).mean())


def _step_of(line: str) -> int:
    """The step of a line; 0: it is none (a damaged file)."""
    try:
        found = json.loads(line)
        numbers = [number for number in (found["loss"], found["held_out_loss"]) if number is not None]
        whole = type(found["step"]) is int and all(type(number) in (int, float) for number in numbers)
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0
    return found["step"] if whole else 0


def _whole_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n")]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
