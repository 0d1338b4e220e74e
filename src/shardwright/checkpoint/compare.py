"""What of a state is not as in a checkpoint, over all ranks: one phrase for each name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from shardwright.checkpoint.storage.manifest import Manifest
from shardwright.checkpoint.storage.place import Place
from shardwright.checkpoint.storage.values import kept_in
from shardwright.errors import CheckpointError

_SHOWN = 3
Wanted = Callable[[str], bool]


class Identity(NamedTuple):
    """What a rank has: tensors by name, ties, the modules and the values that it wants.

    Args: roots: paths of modules: the checkpoint has nothing below them that is not here.
        only: the patterns of `only=`. fitted: those that fit something here.
    """

    tensors: dict[str, tuple[str, tuple[int, ...]]]
    ties: dict[str, str]
    roots: tuple[str, ...]
    values: tuple[str, ...]
    optimizers: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None
    fitted: frozenset[str] = frozenset()


def refuse_differences(path: Place, manifest: Manifest, ranks: Iterable[Identity], wanted: Wanted) -> None:
    """Raises CheckpointError, the same on every rank, where the state here is another one."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    ties: dict[str, str] = {}
    roots: set[str] = set()
    values: set[str] = set()
    for one in ranks:
        tensors |= one.tensors
        ties |= one.ties
        roots |= set(one.roots)
        values |= set(one.values)
    found = _tensors(manifest, tensors, ties, roots, wanted)
    found += _values(manifest, values, roots, wanted)
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise CheckpointError(
            f"{path} is a checkpoint of another model: {'; '.join(found[:_SHOWN])}{more}. Build the model "
            "with the settings of the checkpoint (manifest.json has them), load a part of it (only=), or "
            "start a new run"
        )


def _tensors(
    manifest: Manifest,
    here: dict[str, tuple[str, tuple[int, ...]]],
    ties: dict[str, str],
    roots: set[str],
    wanted: Wanted,
) -> list[str]:
    saved = manifest.tensors
    below = tuple(f"{root}/" for root in roots)
    names = [name for name in (*saved, *manifest.ties) if name.startswith(below) and wanted(name)]
    # Large tensors of an extra state are no tensors of the model.
    valued = [value for path, value in manifest.values.items() if path.startswith(below)]
    of_values = {key for key, _ in kept_in(valued)}
    names = [name for name in names if name not in of_values]
    found = [f"{name} is not in the model" for name in names if name not in here and name not in ties]
    for name, (dtype, shape) in here.items():
        theirs = saved.get(manifest.ties.get(name, name))
        if theirs is None:
            value = " as a tensor: it is a value" if name in manifest.values else _instead(manifest, name)
            found.append(f"{name} is not in the checkpoint{value}")
        elif (theirs.shape, theirs.dtype) != (shape, dtype):
            found.append(f"{name} is {theirs} in the checkpoint but {dtype}{list(shape)} in the model")
    here_too = [name for name in (*here, *ties) if name in saved or name in manifest.ties]
    found += _untied(here_too, manifest.ties, ties, "in the checkpoint but not in the model", manifest)
    return found + _untied(here_too, ties, manifest.ties, "in the model but not in the checkpoint", manifest)


def _untied(
    names: list[str], one: dict[str, str], other: dict[str, str], where: str, manifest: Manifest
) -> list[str]:
    """Names that are one tensor in `one` and two in `other` (which of them comes first does not matter).

    Two tensors of the checkpoint that hold the same, as another program stores what is tied, may be one here.
    """
    first: dict[str, str] = {}
    found = []
    for name in names:
        head = first.setdefault(one.get(name, name), name)
        apart = other.get(name, name) != other.get(head, head)
        if apart and not (other is manifest.ties and alike(manifest, name, head)):
            found.append(f"{name} is tied to {head} {where}")
    return found


def alike(manifest: Manifest, name: str, other: str) -> bool:
    """Whether two tensors of a checkpoint hold the same, as far as boxes and checksums tell."""
    pair = [manifest.tensors[manifest.ties.get(key, key)] for key in (name, other)]
    one, two = ({(part.offset, part.size, part.sums) for part in saved.parts} for saved in pair)
    return (pair[0].dtype, pair[0].shape) == (pair[1].dtype, pair[1].shape) and one == two


def _values(manifest: Manifest, here: set[str], roots: set[str], wanted: Wanted) -> list[str]:
    below = tuple(f"{root}/" for root in roots)
    extra = {name for name in manifest.values if name.startswith(below) and wanted(name)}
    return [f"{name} is in the checkpoint only" for name in sorted(extra - here)] + [
        f"{name} is not in the checkpoint{_instead(manifest, name)}"
        for name in sorted(here - set(manifest.values))
    ]


def _instead(manifest: Manifest, name: str) -> str:
    """What stands where a value was looked for."""
    above = name.rpartition("/")[0]
    while above and above not in manifest.values:
        above = above.rpartition("/")[0]
    if above:
        return f" by itself: {above} is there, as one value (give None for it: what was saved is returned)"
    others = (*manifest.tensors, *manifest.ties, *manifest.values, *manifest.optimizers)
    below = next((one for one in others if one == name or one.startswith(f"{name}/")), None)
    return "" if below is None else f" as a value: it holds {below} (give what that is to be loaded into)"
