"""The checkpoints of a run: their names, which are finished, which to go on from, which to remove.

A run's folder holds `checkpoints/step-00000100`; one that has no manifest is being written, or was left by a
run that ended while it wrote.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

from shardwright.checkpoint.agree import rank
from shardwright.checkpoint.storage import disk
from shardwright.checkpoint.storage.commit import lock, remove, tidy
from shardwright.checkpoint.storage.folder_names import look
from shardwright.checkpoint.storage.manifest import NAME, is_named, read_manifest
from shardwright.checkpoint.storage.place import folder_of
from shardwright.checkpoint.storage.proof import prove
from shardwright.checkpoint.storage.source import Source, check_sizes
from shardwright.errors import CheckpointError

_STEP = re.compile(r"step-(\d{8,})")
_OLD_PARTIAL = ".partial"  # how the first format called what it had not finished
NEWEST = "newest"


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that cannot be used, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"skipped {self.path.name}: {self.reason}"


@dataclass(frozen=True)
class Checkpoints:
    """What is in a run's folder, each newest first."""

    committed: tuple[Path, ...]
    unfinished: tuple[Path, ...]


@dataclass(frozen=True)
class Choice:
    """The checkpoint to go on from, and the newer ones that cannot be used."""

    path: Path
    skipped: tuple[Skipped, ...]


def step_path(out: Path | str, step: int) -> Path:
    """Where the checkpoint of a step belongs: `<out>/checkpoints/step-00000100`."""
    return Path(out) / "checkpoints" / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step in a checkpoint's name, -1 if it has none."""
    found = _STEP.match(path.name)
    return int(found[1]) if found else -1


def list_checkpoints(out: Path | str) -> Checkpoints:
    """The finished and the unfinished checkpoints of a run, in `<out>/checkpoints` or `out` itself."""
    folder = _home(folder_of(out))
    found = sorted(folder.glob("step-*"), key=step_of, reverse=True) if folder.is_dir() else []
    named = [one for one in found if _STEP.fullmatch(one.name.removesuffix(_OLD_PARTIAL)) and one.is_dir()]
    finished = [one for one in named if not one.name.endswith(_OLD_PARTIAL) and is_named(one / NAME)]
    return Checkpoints(tuple(finished), tuple(one for one in named if one not in finished))


def _home(out: Path) -> Path:
    return out / "checkpoints" if (out / "checkpoints").is_dir() else out


def latest(out: Path | str) -> Path:
    """The newest checkpoint of a run that can be used, as far as names, sizes and its manifest tell.

    Args: out: the folder of a run, or of its checkpoints (`step-00000100`, ...).
    Raises: CheckpointError: there is none; each that was skipped is named, with the reason.
    """
    return choose(out).path


def choose(out: Path | str, name: str = NEWEST) -> Choice:
    """The checkpoint to resume from: the newest finished one of a run, or the one that a person named.

    The rule for damage: a checkpoint that is unfinished, or of which a file is missing or short, is skipped
    for an older one and reported. Wrong bytes in a file of the right size are found by `load`, which
    refuses: they mean a failing disk, and going back further is then a person's decision. A checkpoint that
    is named is never replaced.

    Args:
        out: the folder of the run.
        name: `newest`, the name of a checkpoint in `out` (`step-00000100`), or a path.

    Raises: CheckpointError: there is none that can be used, or the named one cannot.
    """
    if name != NEWEST:
        return Choice(_named(folder_of(out), name), ())
    listing = list_checkpoints(out)
    skipped: list[Skipped] = []
    for path in sorted((*listing.committed, *listing.unfinished), key=step_of, reverse=True):
        reason = why_unusable(path)
        if not reason:
            return Choice(path, tuple(skipped))
        skipped.append(Skipped(path, reason))
    why = "; ".join(str(one) for one in skipped)
    raise CheckpointError(
        f"{out} has no finished checkpoint to resume from{f' ({why})' if why else ''}: "
        "start a new run, in another folder"
    )


def why_unusable(path: Path) -> str:
    """Why a checkpoint cannot be used, as far as its manifest, names and sizes tell; empty if it can."""
    try:
        manifest = read_manifest(path)
        prove(manifest)
        check_sizes(Source.of(path, manifest))
    except CheckpointError as error:
        return str(error)
    return ""


def prune(out: Path | str, *, keep: int, every: int | None = None) -> tuple[Path, ...]:
    """Remove all but the newest `keep` checkpoints that can be used, and what was left before the newest.

    Only rank 0 removes, and only what is proven to be this library's: files that a manifest or a journal
    names. A link, and a folder of somebody else, stay and do not count. A checkpoint that cannot be used
    does not count either; it goes where it is older than all that are kept. What the disk refuses to remove
    is no reason to end a run: a warning names it.

    Args: every: keep also those whose step is a multiple of this, for ever.
    Returns: the checkpoints that were removed, or tidied away (on rank 0).
    Raises: CheckpointError: `keep` or `every` is less than 1.
    """
    if keep < 1 or (every is not None and every < 1):
        raise CheckpointError(f"keep={keep}, every={every} would remove every checkpoint: keep at least 1")
    if rank() != 0:
        return ()
    try:
        return _pruned(out, keep, every)
    except OSError as error:
        warnings.warn(f"nothing was pruned in {out}: {error}", stacklevel=2)
        return ()


def _pruned(out: Path | str, keep: int, every: int | None) -> tuple[Path, ...]:
    listing = list_checkpoints(out)
    committed = [path for path in listing.committed if not path.is_symlink()]
    usable = [path for path in committed if not why_unusable(path)]
    if not usable:
        return ()
    oldest = committed.index(usable[:keep][-1])
    old = [one for one in committed[oldest + 1 :] if every is None or step_of(one) % every]
    removed = [path for path in old if _removed(path)]
    newest = step_of(usable[0])
    left = [path for path in listing.unfinished if step_of(path) <= newest and _tidied_away(path)]
    return (*removed, *left)


def _removed(path: Path) -> bool:
    """Remove a checkpoint, unless it is somebody else's or is being written."""
    try:
        remove(path)
    except CheckpointError:
        return False
    except OSError as error:
        warnings.warn(f"{path} was not removed: {error}", stacklevel=4)
        return False
    return True


def _tidied_away(path: Path) -> bool:
    """Remove an unfinished checkpoint, if nobody writes it now and nothing in it is somebody else's."""
    if path.is_symlink():
        return False
    try:
        handle = lock(path)
    except (CheckpointError, OSError):
        return False
    try:
        tidy(path, look(path))
        with contextlib.suppress(OSError):
            path.rmdir()
        return not path.exists()
    finally:
        disk.unlock_folder(handle)


def _named(out: Path, name: str) -> Path:
    tries = (out / "checkpoints" / name, out / name, Path(name))
    path = next((one for one in tries if one.exists()), None)
    if path is None:
        known = ", ".join(one.name for one in list_checkpoints(out).committed) or "none"
        raise CheckpointError(f"there is no checkpoint {name!r} in {out} (finished ones: {known})")
    reason = why_unusable(path)
    if reason:
        raise CheckpointError(reason)
    return path
