"""Damage to the files of a checkpoint of one process: each way returns whether it was found or harmless."""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import nn

from shardwright.checkpoint import load, save
from shardwright.errors import CheckpointError


def model(value: float) -> nn.Module:
    """Tensors of several sizes, one larger than a chunk."""
    made = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 14_000))
    with torch.no_grad():
        for number, one in enumerate(made.parameters()):
            one.copy_(torch.arange(one.numel()).reshape(one.shape) % 97 + value + number)
    return made


def optimizer(of: nn.Module) -> torch.optim.Optimizer:
    made = torch.optim.AdamW(of.parameters())
    for one in of.parameters():
        one.grad = one.detach() * 0.5
    made.step()
    return made


@cache
def wanted(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer that nobody else has: the library gets copies of them."""
    made = model(value)
    return made, optimizer(made)


def saved(path: Path, value: float = 1.0) -> None:
    save(path, *copy.deepcopy(wanted(value)), extra={"value": value}, step=int(value))


def outcome(path: Path, values: tuple[float, ...] = (1.0,)) -> str:
    """`right`: it loads what was saved. Otherwise the error; `WRONG` if other values were loaded."""
    fresh, tuned = copy.deepcopy(wanted(-1.0))
    before = [one.clone() for one in fresh.state_dict().values()]
    try:
        extra = load(path, fresh, tuned).extra
    except CheckpointError as error:
        same = all(torch.equal(a, b) for a, b in zip(before, fresh.state_dict().values(), strict=True))
        return str(error) if same and "\n" not in str(error) else f"WRONG: changed, and {error}"
    if any(extra == {"value": value} and _same(fresh, tuned, *wanted(value)) for value in values):
        return "right"
    return "WRONG: other values"


def _same(a: nn.Module, b: torch.optim.Optimizer, c: nn.Module, d: torch.optim.Optimizer) -> bool:
    tensors = zip(a.state_dict().values(), c.state_dict().values(), strict=True)
    states = zip(
        (x for s in b.state.values() for x in s.values()),
        (x for s in d.state.values() for x in s.values()),
        strict=True,
    )
    return all(torch.equal(x, y) for x, y in (*tensors, *states))


def flip(path: Path, at: random.Random) -> str:
    """Change one bit of one file, the place drawn over all bytes of all files; says which."""
    files = sorted(one for one in path.iterdir() if one.is_file())
    place = at.randrange(sum(one.stat().st_size for one in files))
    for file in files:
        if place < file.stat().st_size:
            break
        place -= file.stat().st_size
    with file.open("r+b") as stream:
        stream.seek(place)
        old = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([old ^ (1 << at.randrange(8))]))
    return f"{file.name} byte {place}"


def _data(path: Path) -> Path:
    return max(path.glob("data-*"), key=lambda one: one.stat().st_size)


def truncated(path: Path, other: Path) -> None:
    with _data(path).open("r+b") as stream:
        stream.truncate(_data(path).stat().st_size - 1)


def longer(path: Path, other: Path) -> None:
    with _data(path).open("ab") as stream:
        stream.write(b"\0")


def empty(path: Path, other: Path) -> None:
    _data(path).write_bytes(b"")


def missing(path: Path, other: Path) -> None:
    _data(path).unlink()


def swapped(path: Path, other: Path) -> None:
    """The data of another save of the same model under this one's name."""
    shutil.copyfile(_data(other), _data(path))


def stale_manifest(path: Path, other: Path) -> None:
    shutil.copyfile(other / "manifest.json", path / "manifest.json")


def linked(path: Path, other: Path) -> None:
    data = _data(path)
    data.rename(path.parent / "moved")
    data.symlink_to(path.parent / "moved")


def folder_for_file(path: Path, other: Path) -> None:
    data = _data(path)
    data.unlink()
    data.mkdir()


def no_manifest(path: Path, other: Path) -> None:
    (path / "manifest.json").unlink()


def empty_manifest(path: Path, other: Path) -> None:
    (path / "manifest.json").write_bytes(b"")


def cut_manifest(path: Path, other: Path) -> None:
    text = (path / "manifest.json").read_bytes()
    (path / "manifest.json").write_bytes(text[: len(text) // 2])


FILES: tuple[Callable[[Path, Path], None], ...] = (
    truncated, longer, empty, missing, swapped, stale_manifest, linked, folder_for_file, no_manifest,
    empty_manifest, cut_manifest,
)  # fmt: skip


def alien(path: Path, other: Path) -> None:
    """Files that are nobody's: they are not looked at, and never deleted."""
    (path / "notes.txt").write_text("mine")
    (path / "data-0123456789abcdef-00000-000.safetensors").write_bytes(b"not ours")
    shutil.copyfile(_data(other), path / "copy.safetensors")
