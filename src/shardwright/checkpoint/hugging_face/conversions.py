"""What files call the tensors of a model of `transformers`, by the table that it converts them with.

Its newer models have other tensors than their files: experts in one tensor, other names. `transformers` says
so in conversions, which it reverts where it saves. They are reverted here on tensors without memory, of which
each remembers where in the model's it begins and with which strides: that is what a map says. What is joined
there, or reordered by a reshape that copies, is noted part by part.

Files may be of an older release, or of the model with or without a head, and call the same tensors otherwise.
What such a name means is asked of the conversions too, in their own direction.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from shardwright.checkpoint.hugging_face.maps import Link, Map, Shape, listed
from shardwright.checkpoint.model_state import read_model
from shardwright.errors import CheckpointError, words_of
from shardwright.index.assemble import unravel
from shardwright.index.stride import contiguous_stride
from shardwright.tensor.modules.wrappers import unwrapped

Maps = Sequence[Map] | Map | Literal["auto"]


_Meaning = tuple[str, str | None, int]
# A tensor of the model ("": of none), where a box of it begins in one of the files, how far apart there its
# neighbours are, and the view that it is.
_Part = tuple[str, Shape, Shape, torch.Tensor]
_Joined = tuple[torch.Tensor, list[tuple[Shape, Shape, torch.Tensor]]]  # begins and steps in it


def maps_of(model: nn.Module, given: Maps, held: Collection[str] = ()) -> tuple[Map, ...]:
    """What `maps=` was given. Raises: CheckpointError: no maps, or "auto" of a model that has none.

    Args: held: the names in the files that are read; none: they are yet to be written.
    """
    return (conversions(model, held),) if given == "auto" else listed(given)


def conversions(model: nn.Module, held: Collection[str]) -> Map:
    """The map of a model of `transformers`: that of its files, as `save_pretrained` writes them.

    Args: held: names of files that may be called otherwise, as `from_pretrained` takes them.
    Raises: CheckpointError: it is none of its models, or the files hold a tensor that no box of one of the
        model's tensors is (elements in another order).
    """
    shapes = {name: tuple(x.shape) for name, x in read_model(model).tensors.items()}
    links: defaultdict[str, list[Link]] = defaultdict(list)
    plain = _as_made(model, {})
    try:
        written = _in_files(plain, shapes)
        called = _called(plain, shapes, written, held)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f'maps="auto": its conversions failed: {words_of(error)}') from error
    for source, (whole, parts) in written.items():
        for name, start, steps, view in parts:
            link = _link(called.get(source, source), view, shapes[name]) if name else None
            if link is None:
                raise CheckpointError(
                    f'maps="auto": {source} of the files is not made of boxes of tensors of the model: '
                    "transformers reorders what is in it; give maps= of your own, or load with "
                    "from_pretrained before you place it"
                )
            step = steps if max(steps, default=1) > 1 else None
            links[name].append(link if len(parts) == 1 else link._replace(within=(start, whole), step=step))

    def converted(name: str, shape: Shape) -> list[Link] | None:  # noqa: ARG001 - that of the model
        return links.get(name)

    return converted


def _as_made(module: nn.Module, known: dict[nn.Module, nn.Module]) -> nn.Module:
    """The module and all in it, over the same tensors, of the classes with which they were made.

    `transformers` knows them by the names of their classes, which `fully_shard` exchanges, and by their
    paths, into which wrappers put names.
    """
    module = unwrapped(module)
    if module not in known:
        own: Any = next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))
        known[module] = plain = object.__new__(own)
        inner = {name: None if one is None else _as_made(one, known) for name, one in module._modules.items()}
        vars(plain).update(vars(module), _modules=inner)
    return known[module]


def _in_files(model: nn.Module, shapes: Mapping[str, Shape]) -> dict[str, tuple[Shape, list[_Part]]]:
    """By name in the files, the shape, and of what it is made."""
    of_models = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
    revert = getattr(sys.modules.get("transformers.core_model_loading"), "revert_weight_conversion", None)
    if not isinstance(model, of_models) or revert is None:
        raise CheckpointError(f'maps="auto": {type(model).__name__} is no model of transformers 5')
    given = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    of_memory = {_memory(x): name for name, x in given.items()}
    kept = list(given.values())  # so that no other one gets the place of its storage
    with _Noted() as noted:
        made = revert(model, given)
    found = {source: (tuple(x.shape), list(_parts(x, of_memory, noted.joined))) for source, x in made.items()}
    kept.clear()
    return found


def _parts(
    view: torch.Tensor, of_memory: Mapping[int, str], joined: Mapping[int, _Joined]
) -> Iterator[_Part]:
    """The model's tensors of which a view is made."""
    memory = _memory(view)
    whole, parts = joined.get(memory, (view, []))
    box = _link("", view, tuple(whole.shape)) if parts else None
    if box is None:
        yield of_memory.get(memory, ""), (0,) * view.dim(), (1,) * view.dim(), view
        return
    for start, steps, part in parts:
        sides = list(zip(box.offset, box.size, start, steps, part.shape, strict=True))
        low = [max(0, -(-(a - b) // k)) for a, _, b, k, _ in sides]
        high = [min(m, -(-(a + n - b) // k)) for a, n, b, k, m in sides]
        if all(a < b for a, b in zip(low, high, strict=True)):
            cut = part[tuple(slice(a, b) for a, b in zip(low, high, strict=True))]
            gone = [dim for dim in range(cut.dim()) if dim not in box.dims]
            cut = cut.permute([*box.dims, *gone]).squeeze(tuple(range(len(box.dims), cut.dim())))
            for name, at, own, inner in _parts(cut, of_memory, joined):
                spread = {d: (low[d] + a) * steps[d] for d, a in zip(box.dims, at, strict=True)}
                moved = tuple(start[d] + n - box.offset[d] for d, n in spread.items())
                yield name, moved, tuple(steps[d] * k for d, k in zip(box.dims, own, strict=True)), inner


def _memory(x: torch.Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _called(
    model: nn.Module, shapes: Mapping[str, Shape], written: Iterable[str], held: Collection[str]
) -> dict[str, str]:
    """By the name under which a tensor is written, that which it has in files that do not hold this name."""
    unknown = [source for source in written if source not in held] if held else []
    if not unknown:
        return {}
    theirs: dict[_Meaning, str] = {}
    for name, meaning in _meanings(model, shapes, held).items():
        theirs.setdefault(meaning, name)
    ours = _meanings(model, shapes, written)
    return {source: theirs[ours[source]] for source in unknown if ours[source] in theirs}


def _meanings(model: nn.Module, shapes: Mapping[str, Shape], names: Iterable[str]) -> dict[str, _Meaning]:
    """What `from_pretrained` makes of the names in files, as it goes through them.

    That is a tensor of the model, a pattern of the conversion that makes it, and which of the tensors of this
    pattern it is (experts are counted, not numbered).
    """
    core = sys.modules["transformers.core_model_loading"]
    mapping = sys.modules["transformers.conversion_mapping"].get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, core.WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, core.WeightConverter)]
    prefix, count = model.base_model_prefix, Counter[tuple[str, str | None]]()
    found: dict[str, _Meaning] = {}
    for name in sorted(names, key=core.dot_natural_key):
        target, pattern = core.rename_source_key(name, renamings, converters, prefix, shapes)
        if target not in shapes and name in shapes:
            target, pattern = core.rename_source_key(name, [], [], prefix, shapes)
        found[name] = target, pattern, count[target, pattern]
        count[target, pattern] += 1
    return found


class _Noted(TorchFunctionMode):
    """A copy is the tensor itself, so that it still says of what it is a view; what is joined is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.joined: dict[int, _Joined] = {}  # by its memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _COPIES:
            return args[0]
        made = func(*args, **(kwargs or {}))
        if func in _JOINS and made.is_contiguous():
            self._note(made, func is torch.stack, *args, **(kwargs or {}))
        if func in _RESHAPES and _memory(made) != _memory(args[0]):
            self._note_copy(made, args[0])
        return made

    def _note(self, made: torch.Tensor, stacked: bool, tensors: Sequence[torch.Tensor], dim: int = 0) -> None:
        parts, at, dim = [], 0, dim % made.dim()
        for one in tensors:
            part = one.unsqueeze(dim) if stacked else one
            parts.append(((*(0,) * dim, at, *(0,) * (made.dim() - dim - 1)), (1,) * made.dim(), part))
            at += part.shape[dim]
        self.joined[_memory(made)] = made, parts

    def _note_copy(self, made: torch.Tensor, x: torch.Tensor) -> None:
        """A reshape that merged dims: what are neighbours in `x` are a step apart in `made`."""
        groups = _merged(tuple(x.shape), tuple(made.shape))
        kept = [min(group, key=lambda dim: (x.shape[dim] == 1, x.stride(dim))) for group in groups]
        unit = {dim: prod(x.shape[d] for d in group if d > dim) for group in groups for dim in group}
        over = [dim for dim in unit if dim not in kept]
        if not groups or prod(x.shape[dim] for dim in over) > _MOST_PARTS:
            return
        parts = []
        for index in product(*(range(x.shape[dim]) for dim in over)):
            at = dict(zip(over, index, strict=True))
            part = x[tuple(at.get(dim, slice(None)) for dim in range(x.dim()))]
            start = tuple(sum(at.get(dim, 0) * unit[dim] for dim in group) for group in groups)
            parts.append((start, tuple(unit[dim] for dim in kept), part))
        self.joined[_memory(made)] = made, parts


def _merged(shape: Shape, into: Shape) -> list[list[int]]:
    """For each dim, those that were merged to it; none: the shape was made in another way."""
    groups: list[list[int]] = []
    at = 0
    for n in into:
        stop = at + 1
        while stop < len(shape) and prod(shape[at:stop]) < n:
            stop += 1
        if prod(shape[at:stop]) != n or at == len(shape):
            return []
        groups.append(list(range(at, stop)))
        at = stop
    return groups if at == len(shape) else []


_COPIES = frozenset({torch.Tensor.contiguous, torch.Tensor.clone, torch.clone})
_RESHAPES = frozenset({torch.Tensor.reshape, torch.reshape, torch.Tensor.flatten, torch.flatten})
_MOST_PARTS = 4096  # of a copy; what is in more is refused
_JOINS = frozenset({torch.cat, torch.concat, torch.concatenate, torch.stack})


def _link(source: str, view: torch.Tensor, shape: Shape) -> Link | None:
    """The box of a tensor of this shape that a view of it is, if it is one."""
    strides = contiguous_stride(shape)
    offset = unravel(int(view.storage_offset()), shape) if view.numel() else (0,) * len(shape)
    dims: dict[int, int] = {}
    for at in sorted(range(view.dim()), key=lambda dim: -view.shape[dim]):
        size, stride = view.shape[at], view.stride(at)
        free = [d for d in range(len(shape)) if d not in dims.values() and offset[d] + size <= shape[d]]
        fitting = [d for d in free if strides[d] == stride] or (free if size == 1 else [])
        if not fitting:
            return None
        dims[at] = fitting[0]
    sizes = [1] * len(shape)
    for at, dim in dims.items():
        sizes[dim] = view.shape[at]
    return Link(source, offset, tuple(sizes), tuple(dims[at] for at in range(view.dim())))
