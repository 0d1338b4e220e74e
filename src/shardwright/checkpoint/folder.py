"""The checkpoints of a run: their names, which are finished, which to go on from, which to remove.

A run's folder holds `checkpoints/step-00000100`; one that has no manifest is being written, or was left by a
run that ended while it wrote.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from shardwright.checkpoint.agree import rank
from shardwright.checkpoint.contents import open_checkpoint
from shardwright.checkpoint.storage.commit import finished, remove, tidy
from shardwright.checkpoint.storage.folder_names import look
from shardwright.checkpoint.storage.manifest import LIMIT, NAME
from shardwright.checkpoint.storage.place import Address, Place, at_home, place_of
from shardwright.checkpoint.storage.stores.of import store_of
from shardwright.errors import CheckpointError, reason_of, refuse_no_number, refuse_other_kind

_STEP = re.compile(r"step-([0-9]{8,})")
_OLD_PARTIAL = ".partial"  # how the first format called what it had not finished
NEWEST = "newest"


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that cannot be used, and why."""

    path: Place
    reason: str

    def __str__(self) -> str:
        return f"skipped {self.path.name}: {self.reason}"


@dataclass(frozen=True)
class Checkpoints:
    """What is in a run's folder, each newest first."""

    committed: tuple[Place, ...]
    unfinished: tuple[Place, ...]


@dataclass(frozen=True)
class Choice:
    """The checkpoint to go on from, and the newer ones that cannot be used."""

    path: Place
    skipped: tuple[Skipped, ...]


def step_path(out: Place | str, step: int) -> Place:
    """Where the checkpoint of a step belongs: `<out>/checkpoints/step-00000100`.

    Raises: CheckpointError: `step` is no number of steps, so that nobody would find it under its name.
    """
    step, found = whole_step(step), place_of(out)
    home = found if isinstance(found, Address) or "://" in str(out) else at_home(Path(str(out)))
    return home / "checkpoints" / f"step-{step:08d}"


def whole_step(step: Any) -> int:
    """A number of steps; numpy's is one too.

    Raises: CheckpointError: it is none.
    """
    if isinstance(step, bool) or not isinstance(step, Integral) or not 0 <= int(step) < LIMIT:
        raise CheckpointError(f"step={step!r:.60} is no number of steps: a whole one from 0 to 2**62 - 1")
    return int(step)


def step_of(path: Place | str) -> int:
    """The step in a checkpoint's name, -1 if it has none."""
    found = _STEP.match(place_of(path).name)
    return int(found[1]) if found else -1


def list_checkpoints(out: Place | str) -> Checkpoints:
    """The finished and the unfinished checkpoints of a run, in `<out>/checkpoints` or `out` itself.

    One whose manifest cannot be asked for counts as unfinished. Raises: CheckpointError: the folder cannot be
    read.
    """
    try:
        folder = _home(place_of(out))
        store = store_of(folder)
        if not store.exists() and isinstance(folder, Path) and folder.exists():
            raise CheckpointError(f"{out} is no folder: name that of a run")
        found = [folder / one for one in (store.folders() if store.exists() else ())]
    except OSError as error:
        raise CheckpointError(f"{out} cannot be read: {reason_of(error)}") from error
    named = [one for one in found if _STEP.fullmatch(one.name.removesuffix(_OLD_PARTIAL))]
    named.sort(key=step_of, reverse=True)
    finished = [one for one in named if not one.name.endswith(_OLD_PARTIAL) and _has_manifest(one)]
    return Checkpoints(tuple(finished), tuple(one for one in named if one not in finished))


def _has_manifest(path: Place) -> bool:
    try:
        return store_of(path).has(NAME)
    except OSError:  # `why_unusable` reads it, and says the reason
        return False


def _home(out: Place) -> Place:
    below = out / "checkpoints"
    return below if store_of(below).exists() else out


def latest(out: Place | str) -> Place:
    """The newest checkpoint of a run that can be used, as far as names, sizes and its manifest tell.

    Args: out: the folder of a run, or of its checkpoints (`step-00000100`, ...).
    Raises: CheckpointError: there is none; each that was skipped is named, with the reason.
    """
    return choose(out).path


def choose(out: Place | str, name: str = NEWEST) -> Choice:
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
    refuse_other_kind("name", name, str, CheckpointError, fix=f"{NEWEST!r}, or the name of a checkpoint")
    if name != NEWEST:
        return Choice(_named(place_of(out), name), ())
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


def why_unusable(path: Place | str) -> str:
    """Why a checkpoint cannot be used, as far as its manifest, names and sizes tell; empty if it can."""
    try:
        open_checkpoint(path)
    except CheckpointError as error:
        return str(error)
    return ""


def prune(
    out: Place | str, *, keep: int, every: int | None = None, interrupted: bool = False
) -> tuple[Place, ...]:
    """Remove all but the newest `keep` checkpoints that can be used, and what was left before the newest.

    Only rank 0 removes, and only what is proven to be this library's: files that a manifest or a journal
    names. A link, and a folder of somebody else, stay and do not count. A checkpoint that cannot be used
    does not count either; it goes where it is older than all that are kept. What the disk refuses to remove
    is no reason to end a run: a warning names it.

    Args:
        every: keep also those whose step is a multiple of this, for ever.
        interrupted: nobody saves there now, so that what interrupted saves left goes too. It need only be
            said where there are no locks: in object storage nothing tells a save that died on another machine
            from a slow one.

    Returns: the checkpoints that were removed, or tidied away (on rank 0).
    Raises: CheckpointError: `keep` or `every` is less than 1, or `out` is no path.
    """
    refuse_no_number("keep", keep, CheckpointError, whole=True, fix="keep at least 1")
    refuse_no_number("every", 1 if every is None else every, CheckpointError, whole=True)
    refuse_other_kind("interrupted", interrupted, bool, CheckpointError, fix="give True or False")
    place_of(out)
    if rank() != 0:
        return ()
    try:
        return _pruned(out, keep, every, interrupted)
    except (OSError, CheckpointError) as error:
        warnings.warn(f"nothing was pruned in {out}: {reason_of(error)}", stacklevel=2)
        return ()


def _pruned(out: Place | str, keep: int, every: int | None, interrupted: bool) -> tuple[Place, ...]:
    listing = list_checkpoints(out)
    committed = [path for path in listing.committed if not store_of(path).is_link()]
    usable = [path for path in committed if not why_unusable(path)]
    if interrupted:
        for path in committed:
            _tidied_away(path, interrupted)
    if not usable:
        return ()
    oldest = committed.index(usable[:keep][-1])
    old = [one for one in committed[oldest + 1 :] if every is None or step_of(one) % every]
    removed = [path for path in old if _removed(path, interrupted)]
    newest = step_of(usable[0])
    older = [path for path in listing.unfinished if step_of(path) <= newest]
    return (*removed, *(path for path in older if _tidied_away(path, interrupted)))


def _removed(path: Place, interrupted: bool) -> bool:
    """Remove a checkpoint, unless it is somebody else's or is being written."""
    try:
        remove(path, interrupted=interrupted)
    except CheckpointError:
        return False
    except OSError as error:
        warnings.warn(f"{path} was not removed: {reason_of(error)}", stacklevel=4)
        return False
    return True


def _tidied_away(path: Place, interrupted: bool) -> bool:
    """Remove what interrupted saves left, if nobody writes there now; whether nothing is left then."""
    store = store_of(path)
    if store.is_link():
        return False
    try:
        hold = store.hold_there()
    except (CheckpointError, OSError):
        return False
    if store.renames and not (hold.alone or interrupted):
        hold.let_go()
        return False
    try:
        content = finished(store, look(store))
        tidy(store, content, alone=hold.alone, interrupted=interrupted)
        store.drop_empty()
        return not store.exists()
    except OSError as error:
        warnings.warn(f"{path} was not tidied up: {reason_of(error)}", stacklevel=4)
        return False
    finally:
        hold.let_go()


def _named(out: Place, name: str) -> Place:
    alone = place_of(name)
    tries = [one for one in (out / "checkpoints" / name, out / name) if store_of(one).exists()]
    path = tries[0] if tries else alone
    if not store_of(path).exists():
        known = ", ".join(one.name for one in list_checkpoints(out).committed) or "none"
        raise CheckpointError(f"there is no checkpoint {name!r} in {out} (finished ones: {known})")
    reason = why_unusable(path)
    if reason:
        raise CheckpointError(reason)
    return path
