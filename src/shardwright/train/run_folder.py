"""The folder of a run, `--out`: metrics, loss curve, layouts, sample and checkpoints."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from shardwright.checkpoint.folder import list_checkpoints, step_of
from shardwright.checkpoint.storage.disk import is_at
from shardwright.checkpoint.storage.place import at_home, folder_of
from shardwright.checkpoint.storage.stores.local import lock_or_warn
from shardwright.errors import CheckpointError, ConfigError
from shardwright.train.config import TrainConfig
from shardwright.train.metrics import MetricsFile, StepRecord, read_metrics
from shardwright.train.plot import draw_losses

METRICS = "metrics.jsonl"
SAMPLE = "sample.txt"
CURVE = "loss.png"
LAYOUTS = "layouts.txt"
SETTINGS = "config.json"


def choose_folder(config: TrainConfig) -> Path:
    """`--out`, by default a new folder below `runs` named after the time.

    Raises: ConfigError: a new run would write into a folder that already holds something.
    """
    path = at_home(config.out or Path("runs") / datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"))
    with _refusals(path, "name a folder that you may write to"):
        _look(path, config)
    _refuse_unwritable(path)
    return path


def _look(path: Path, config: TrainConfig) -> None:
    if path.is_symlink() and not path.exists():
        raise ConfigError(f"--out {path} is a link to what is not there: name a folder")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--out {path} is a file: name a folder")
    if config.resume is None and path.exists() and any(path.iterdir()):
        raise ConfigError(
            f"--out {path} is not empty, and a new run would mix with what is there: "
            "add --resume to go on with it, or name another folder"
        )
    if config.resume is not None and not path.is_dir():
        raise ConfigError(
            f"--out {path} does not exist, so there is nothing to --resume: name the run's folder"
        )


@contextlib.contextmanager
def _refusals(path: Path, then: str = "mend that, then --resume") -> Iterator[None]:
    """Raises: ConfigError: what the system refuses inside, why, and what to do `then`."""
    try:
        yield
    except OSError as error:
        why = f"{error.strerror or error}{f' at {error.filename}' if error.filename else ''}"
        raise ConfigError(f"--out {path} cannot be written: {why}; {then}") from None


def _refuse_unwritable(path: Path) -> None:
    """Try to write where the run will, and leave nothing. Raises: ConfigError: that is impossible."""
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise ConfigError(
            f"--out {path} cannot be written: {error.strerror or error} at {nearest}; "
            "name a folder that you may write to"
        ) from None


def set_aside(out: Path, done: int) -> list[str]:
    """Rename the checkpoints of later steps than `done`, which a run that goes on from there will write anew.

    Returns: their names. They stay on the disk as `discarded-...`, where no `--resume` looks.
    """
    folder = out / "checkpoints"
    committed = map(folder_of, reversed(list_checkpoints(out).committed))
    later = [path for path in committed if step_of(path) > done]
    for path in later:
        path.rename(_unused(folder / f"discarded-{path.name}"))
    return [path.name for path in later]


def _unused(path: Path) -> Path:
    tries = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(one for one in itertools.chain([path], tries) if not one.exists())


class RunFolder:
    """What one rank keeps of a run. Only the first rank writes; on the others the calls do nothing."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        self.path, self.writes = path, writes
        self._metrics: MetricsFile | None = None
        self._lock = -1

    def lock(self) -> None:
        """Keep other runs out until `close`, or until this process ends, however it ends.

        Where the file system has no locks, one warning says so.
        Raises: CheckpointError: another run writes there.
        """
        if self.writes:
            with _refusals(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock, _ = lock_or_warn(self.path)

    def check(self) -> None:
        """Raises CheckpointError where the folder is not there any more, or is another one."""
        if self._lock >= 0 and not is_at(self._lock, self.path):
            raise CheckpointError(
                f"--out {self.path} was removed or renamed while the run goes on: what it would write now "
                "would be without its metrics and checkpoints; put it back and --resume, or start a new run"
            )

    def open(self, config: TrainConfig, done: int) -> int:
        """Begin a run, or go on with one that has `done` steps behind it.

        Returns: of how many of these steps the metrics are lost.
        """
        if not self.writes:
            return 0
        metrics = self.path / METRICS
        with _refusals(self.path):  # a new run that another has overtaken here ends before it writes
            begin = MetricsFile.resume_at(metrics, done) if config.resume else MetricsFile.create(metrics)
        self._metrics = begin
        self.write(SETTINGS, config.model_dump_json(indent=2) + "\n")
        return begin.missing

    def log(self, record: StepRecord) -> None:
        """Add the line of a finished step."""
        if self._metrics is not None:
            with _refusals(self.path):
                self._metrics.append(record)

    def write(self, name: str, text: str) -> None:
        """Keep a text under this name."""
        if self.writes:
            with _refusals(self.path):
                (self.path / name).write_text(text, encoding="utf-8")

    def draw(self) -> bool:
        """Draw the loss curve; False without matplotlib."""
        with _refusals(self.path):
            return self.writes and draw_losses(read_metrics(self.path / METRICS), self.path / CURVE)

    def close(self) -> None:
        """No line follows."""
        if self._metrics is not None:
            self._metrics.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
