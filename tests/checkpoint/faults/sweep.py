"""Each family of faults as (name, verdict) pairs; a verdict is empty where all is as it must be."""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from shardwright.checkpoint import load, save
from shardwright.errors import CheckpointError
from tests.checkpoint.faults import damage, hostile
from tests.checkpoint.faults.inject import READING, failing

Verdicts = Iterator[tuple[str, str]]


def flips(folder: Path, count: int, seed: int = 0) -> Verdicts:
    """Bits of any file: what is loaded is right, or the file is named and nothing has changed."""
    damage.saved(folder / "good")
    at = random.Random(seed)
    for _ in range(count):
        shutil.rmtree(folder / "bad", ignore_errors=True)
        shutil.copytree(folder / "good", folder / "bad")
        place = damage.flip(folder / "bad", at)
        text = damage.outcome(folder / "bad")
        named = place.split()[0] in text or ("manifest" in text and place.startswith("manifest"))
        yield place, "" if named else text


def files(folder: Path) -> Verdicts:
    """Truncated, missing, swapped, stale files: refused with a name; alien ones: left alone."""
    damage.saved(folder / "other", 2.0)
    for harm in damage.FILES:
        shutil.rmtree(folder / "bad", ignore_errors=True)
        damage.saved(folder / "bad")
        harm(folder / "bad", folder / "other")
        text = damage.outcome(folder / "bad")
        yield harm.__name__, "" if str(folder / "bad") in text else text
        yield f"{harm.__name__}, saved again", _saves_again(folder / "bad")
    shutil.rmtree(folder / "bad")
    damage.saved(folder / "bad")
    damage.alien(folder / "bad", folder / "other")
    names = {one.name for one in (folder / "bad").iterdir()} - {"manifest.json"}
    strangers = {name for name in names if "notes" in name or "copy" in name or "0123456789abcdef" in name}
    yield "alien, loaded", "" if damage.outcome(folder / "bad") == "right" else "not loaded"
    yield "alien, saved again", _saves_again(folder / "bad")
    yield "alien, still there", "" if all((folder / "bad" / name).exists() for name in strangers) else "gone"


def _saves_again(path: Path) -> str:
    """A process that lives can save to this path at once, and load that."""
    try:
        damage.saved(path, 3.0)
    except CheckpointError as error:
        return "" if "no checkpoint" in str(error) and not _ours(path) else str(error)
    found = damage.outcome(path, (3.0,))
    return "" if found == "right" else found


def _ours(path: Path) -> bool:
    return any(path.glob("data-*"))


def errors(folder: Path, code: int, *, lasting: bool, over: bool) -> Verdicts:
    """A disk error at each operation of a save in a living process, to a new path or over a checkpoint."""
    at, path, seen = 0, folder / "c", True
    while seen:
        at += 1
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if over:
            damage.saved(path)
        text = ""
        with failing(folder, at, code, lasting=lasting) as count:
            try:
                damage.saved(path, 2.0)
            except CheckpointError as error:
                text = str(error)
        seen = bool(count.failed)
        name = f"{errno.errorcode[code]} at {count.failed} {at}{', lasting' if lasting else ''}"
        found = damage.outcome(path, (1.0, 2.0)) if over or not text else "right"
        told = "\n" not in text and "Errno" not in text
        yield name, "" if found == "right" and told else f"{text}; then {found}"
        yield f"{name}, saved again", _saves_again(path)
        left = {one.name.split("-")[0] for one in path.iterdir()}
        yield f"{name}, nothing left", "" if left == {"data", "manifest.json"} else str(sorted(left))


def read_errors(folder: Path) -> Verdicts:
    """EIO at each operation of a load."""
    damage.saved(folder / "c")
    at, seen = 0, True
    while seen:
        at += 1
        with failing(folder, at, errno.EIO, names=READING) as count:
            found = damage.outcome(folder / "c")
        seen = bool(count.failed)
        good = found == "right" or (str(folder / "c") in found and "Errno" not in found)
        yield f"EIO at {count.failed} {at} of a load", "" if good and not found.startswith("WRONG") else found


def hostile_folders(folder: Path) -> Verdicts:
    """False manifests with right checksums, pickles: refused in one line, nothing run, written or removed."""
    damage.saved(folder / "good")
    (folder / "outside").write_text("untouched")
    names = [name for name, _ in hostile.changes(hostile.body_of(folder / "good"))]
    for number, name in enumerate(names):
        bad = _copy(folder)
        hostile.forge(bad, list(hostile.changes(hostile.body_of(bad)))[number][1])
        yield name, _harmless(folder, name)
    for name, text in hostile.texts():
        hostile.raw(_copy(folder), text)
        yield name, _harmless(folder, name)
    mark = folder / "executed"
    hostile.pickles(_copy(folder), mark)
    yield (
        "pickles beside it",
        "" if damage.outcome(folder / "bad") == "right" and not mark.exists() else "run",
    )
    (folder / "bad" / "manifest.json").unlink()
    yield "pickles alone", _harmless(folder, "pickles")
    for link in ("/etc", str(folder / "outside"), "/dev/zero", "nowhere"):
        bad = _copy(folder)
        (bad / "manifest.json").unlink()
        (bad / "manifest.json").symlink_to(link)
        yield f"a manifest that leads to {link}", _harmless(folder, link)


def _copy(folder: Path) -> Path:
    shutil.rmtree(folder / "bad", ignore_errors=True)
    shutil.copytree(folder / "good", folder / "bad")
    return folder / "bad"


def _harmless(folder: Path, name: str) -> str:
    before = sorted(str(one) for one in folder.rglob("*"))
    text = damage.outcome(folder / "bad")
    after = sorted(str(one) for one in folder.rglob("*"))
    if text == "right" or text.startswith("WRONG") or str(folder / "bad") not in text:
        return f"{name}: {text}"
    return "" if before == after and (folder / "outside").read_text() == "untouched" else "the folder changed"


def strangers(folder: Path) -> Verdicts:
    """What is not provably ours stays, and a save says so."""
    for number, make in enumerate(_STRANGERS):
        path = folder / f"s{number}" / "c"
        path.mkdir(parents=True)
        make(path)
        before = sorted(str(one) for one in path.parent.rglob("*"))
        try:
            save(path, damage.model(1.0))
            yield make.__name__, "saved over it"
        except CheckpointError as error:
            after = sorted(str(one) for one in path.parent.rglob("*"))
            yield make.__name__, "" if before == after and "\n" not in str(error) else f"{before} {after}"
        try:
            load(path, damage.model(1.0))
            yield f"{make.__name__}, loaded", "loaded"
        except CheckpointError:
            yield f"{make.__name__}, loaded", ""


def _their_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('{"name": "my web app", "icons": []}')
    (path / "index.html").write_text("hello")


def _thesis(path: Path) -> None:
    (path / "thesis.txt").write_text("years of work")


def _named_like_ours(path: Path) -> None:
    (path / "saving-0123456789abcdef.json").write_text('{"format": "shardwright save", "id": "x"}')
    (path / "photo.jpg").write_text("photo")


_STRANGERS = (_their_manifest, _thesis, _named_like_ours)


def beside(folder: Path) -> Verdicts:
    """Folders beside the path that an earlier version would have deleted."""
    for name in ("c.partial", "c.removed"):
        (folder / name).mkdir(parents=True)
        (folder / name / "thesis.txt").write_text("years of work")
    damage.saved(folder / "c")
    damage.saved(folder / "c")
    kept = all((folder / name / "thesis.txt").exists() for name in ("c.partial", "c.removed"))
    yield "c.partial and c.removed of somebody", "" if kept else "deleted"
