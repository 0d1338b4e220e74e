"""`shardwright checkpoint ls | show | verify | diff | convert | prune`: checkpoints without a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.errors import CheckpointError, printable

if TYPE_CHECKING:
    from shardwright.checkpoint.storage.place import Place

# Text, not a Path: an address of object storage (s3://bucket/run) has two slashes, of which Path keeps one.
Where = Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint's folder, or its address.")]
Run = Annotated[str, typer.Argument(metavar="PATH", help="The folder of a run, or of its checkpoints.")]

app = typer.Typer(
    help="Look at checkpoints: list, show, verify, compare, convert, prune.", rich_markup_mode=None
)


@app.command("ls")
def list_all(path: Run) -> int:
    """List the checkpoints of a run, newest first; of one that cannot be used, why. Exits 1 if none can."""
    from shardwright.checkpoint import list_checkpoints
    from shardwright.checkpoint.folder import step_of, why_unusable

    found = list_checkpoints(path)
    usable = False
    for one in sorted((*found.committed, *found.unfinished), key=step_of, reverse=True):
        reason = why_unusable(one)
        usable = usable or not reason
        _say(f"{one.name}  {f'!! {reason}' if reason else _summary(one)}")
    if not usable:
        alone = "one checkpoint, not the folder of a run (see `shardwright checkpoint show`)"
        _say(f"{path}: {'no checkpoint that can be used' if why_unusable(path) else alone}")
    return int(not usable)


def _summary(path: Place | str) -> str:
    from shardwright.checkpoint import read_manifest

    manifest = read_manifest(path)
    nbytes = sum(file.size for file in manifest.files)
    return (
        f"step {manifest.step}, {len(manifest.tensors)} tensors, {_size(nbytes)}, by {manifest.world} ranks"
    )


@app.command()
def show(
    path: Where,
    *,
    match: Annotated[str, typer.Option(help="Only tensors and values that fit this pattern.")] = "*",
) -> int:
    """Show what a checkpoint holds: its files, tensors with their layouts, optimizers, values."""
    from fnmatch import fnmatchcase

    from shardwright.checkpoint.contents import bytes_of, open_checkpoint

    manifest = open_checkpoint(path)
    _say(f"{path}: save {manifest.id} of shardwright {manifest.library}, torch {manifest.torch}")
    _say(f"  {_summary(path)}, {len(manifest.files)} files")
    for key, tensor in manifest.tensors.items():
        if fnmatchcase(key, match):
            how = f"{len(tensor.parts)} boxes" if len(tensor.parts) != 1 else "1 box"
            _say(f"  {key}  {tensor.layout or tensor}  {_size(bytes_of(tensor))} in {how}")
    for name, first in manifest.ties.items():
        _say(f"  {name}  is {first}")
    for name, one in manifest.optimizers.items():
        _say(f"  {name}  {one.kind}, {len(one.groups)} groups")
    for name in manifest.values:
        if fnmatchcase(name, match):
            _say(f"  {name}  a value")
    return 0


@app.command()
def verify(path: Where) -> int:
    """Read every byte and compare it with its checksum.

    Exits 1, with the file and the tensor, if one differs.
    """
    from shardwright.checkpoint import contents

    try:
        total = sum(map(contents.bytes_of, contents.open_checkpoint(path).tensors.values()))
        with _progress("verify", total) as told:
            contents.verify(path, told)
    except CheckpointError as error:
        _say(f"!! {error}")
        return 1
    _say(f"{path}: {_size(total)}, every byte is as it was written")
    return 0


@app.command()
def diff(one: Where, other: Where) -> int:
    """Compare two checkpoints, whatever layouts wrote them. Exits 1 if they differ."""
    from shardwright.checkpoint import contents

    total = sum(map(contents.bytes_of, contents.open_checkpoint(one).tensors.values()))
    with _progress("diff", total) as told:
        found = contents.diff(one, other, told)
    for difference in found:
        _say(f"{difference.path}: {difference.how}")
    if not found:
        _say("they hold the same")
    return int(bool(found))


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(help="A folder of torch's DCP, a file of torch.save, or a checkpoint of version 1."),
    ],
    target: Annotated[str, typer.Argument(help="The new checkpoint's folder.")],
) -> int:
    """Write a model that torch saved as a checkpoint of this library; nothing of the source is executed."""
    from shardwright.checkpoint import convert as write_anew

    write_anew(source, target)
    _say(f"{target}: {_summary(target)}")
    return 0


@app.command()
def prune(
    path: Run,
    *,
    keep: Annotated[int, typer.Option(help="How many of the newest to keep.", min=1)],
    every: Annotated[int | None, typer.Option(help="Keep also steps that this divides.", min=1)] = None,
    interrupted: Annotated[
        bool, typer.Option("--interrupted", help="No run writes there: remove what interrupted saves left.")
    ] = False,
) -> int:
    """Remove old checkpoints of a run, and what interrupted saves left; nothing that is not ours."""
    from shardwright.checkpoint import list_checkpoints
    from shardwright.checkpoint import prune as remove_old

    found = list_checkpoints(path)
    if not (found.committed or found.unfinished):
        raise CheckpointError(f"{path} holds no checkpoints of a run")
    for gone in remove_old(path, keep=keep, every=every, interrupted=interrupted):
        _say(f"removed {gone.name}")
    return 0


def _say(text: str) -> None:
    """One line, whatever stands in names: a checkpoint of others moves no cursor and writes no line."""
    typer.echo(printable(text))


def _size(nbytes: int) -> str:
    from shardwright.parallel.table.report import size_text

    return size_text(nbytes)


@contextlib.contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal's error stream; none where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns: list[Any] = [TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn()]
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda nbytes: progress.advance(task, nbytes)
