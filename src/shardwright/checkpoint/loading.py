"""A load: opened, compared with the state of all ranks, read, and only then put in place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from shardwright.checkpoint import change
from shardwright.checkpoint.agree import ApartError, Call, rank, world
from shardwright.checkpoint.change import Change
from shardwright.checkpoint.collect import EXTRA
from shardwright.checkpoint.compare import Identity, alike, refuse_differences
from shardwright.checkpoint.contents import TRIES
from shardwright.checkpoint.patterns import Only, Patterns, refuse_unfitted
from shardwright.checkpoint.pieces import local_of, note_written, refuse_unwritable, views
from shardwright.checkpoint.rng_state import KEY as RNG
from shardwright.checkpoint.rng_state import check_generator, check_rng, write_rng
from shardwright.checkpoint.shared_memory import (
    Shared,
    refuse_different,
    refuse_overlaps,
    shared_by,
    shown_once,
)
from shardwright.checkpoint.state import Kind, Node, nodes_of
from shardwright.checkpoint.storage.arena import Arena, copy_bytes, fill, room_for
from shardwright.checkpoint.storage.element_types import DTYPES, in_order, name_of
from shardwright.checkpoint.storage.manifest import Manifest, read_manifest
from shardwright.checkpoint.storage.pages import unless_cut_short
from shardwright.checkpoint.storage.place import Place, place_of
from shardwright.checkpoint.storage.proof import proven
from shardwright.checkpoint.storage.reader import Pair, Reader, Want, is_small, wants
from shardwright.checkpoint.storage.source import Source, check_sizes
from shardwright.checkpoint.storage.sums import sum_of
from shardwright.checkpoint.storage.values import decode
from shardwright.checkpoint.targets import VALUED, Targets, add_others, of_rank, prepared, tensors_of
from shardwright.compat import DisableTorchFunctionSubclass, foreach_copy_, hooks_of_loads
from shardwright.errors import CheckpointError, refuse_other_kind


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint says beside its tensors.

    Args: values: the plain values of the state, by path. rng_restored: the generators go on where they were.
        bytes_read: of this rank.
    """

    path: Place
    step: int | None
    extra: Any
    config: dict[str, Any]
    rng_restored: bool
    values: dict[str, Any] = field(default_factory=dict)
    bytes_read: int = 0


def loaded(call: Call, path: Place | str, only: Only, state: Mapping[str, Any], *, in_place: bool) -> Loaded:
    """Load what stands at the path. Where a save replaces it meanwhile, that is the new one."""
    for _ in range(TRIES):
        loading = Loading(call, path, only, in_place)
        try:
            return loading.run(state)
        except ApartError:
            raise
        except CheckpointError:
            if not loading.replaced():
                raise
    return Loading(call, path, only, in_place).run(state)


class Told(NamedTuple):
    """A rank's first word: the save that it sees, a digest of its `Identity`, whether it reads in place."""

    save: str
    identity: str
    in_place: bool


class Loading:
    """One load: opened, compared, read, and only then put in place."""

    path: Place
    patterns: Patterns
    manifest: Manifest
    reader: Reader
    mine: Identity
    changing = False

    def __init__(self, call: Call, path: Place | str, only: Only, in_place: bool) -> None:
        self.agreed = call.agreed
        self.call, self.given, self.only, self.in_place = call, path, only, in_place
        self.rank = rank()  # which costs more than what is looked up by it
        self.nodes: list[Node] = []
        self.chosen: list[Node] = []
        self.targets = Targets()
        self.staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.small: list[Pair] = []
        self.shared: list[Shared] = []
        self.beside: dict[str, torch.Tensor] = {}  # what is to be written where memory is shared
        self.held: list[tuple[torch.Tensor, memoryview]] = []
        self.values: dict[str, Any] = {}
        self.rng: Any = None
        self.extra: Any = None
        self.config: dict[str, Any] = {}
        self.optimizers: list[Change] = []

    def run(self, state: Mapping[str, Any]) -> Loaded:
        """All of it, on every rank at once."""
        told = self.agreed(f"reading {self.given}", lambda: self._open(state))
        if len({one.save for one in told}) > 1:
            raise CheckpointError(
                f"the ranks see different checkpoints at {self.path}: it was replaced while it was read "
                "(load it again), or it is on a disk of one node"
            )
        identities = [self.mine]
        if len({one.identity for one in told}) > 1:
            identities = self.agreed(f"comparing the state with {self.path}", lambda: self.mine)
        fitted = [one.fitted for one in identities]
        patterns = [one.only for one in identities]
        refuse_unfitted(
            self.patterns, patterns, fitted, {path for one in identities for path in one.optimizers}
        )
        refuse_differences(self.path, self.manifest, identities, self.patterns.want)
        apart = any(one.in_place for one in told)  # then what is read is changed, so all else is known before
        if apart:
            self.agreed(f"comparing the optimizer with {self.path}", self._compare_others)
        try:
            self.agreed(f"reading {self.path}", lambda: self._read(compared=apart))
            self.changing = True
            change.make(self.call, self.path, self._changes())
        finally:
            self.reader.close()
        plain = [node.path for node in self.nodes if node.kind is Kind.VALUE and node.path in self.values]
        values = {path: self.values[path] for path in plain}
        step, restored, read = self.manifest.step, self.rng is not None, self.reader.bytes_read
        return Loaded(self.path, step, self.extra, self.config, restored, values, read)

    def replaced(self) -> bool:
        """Whether what stands at the path is not what failed here, with nothing changed yet. A collective."""
        return not self.changing and any(self.agreed(f"reading {self.given}", self._is_another))

    def _is_another(self) -> bool:
        with contextlib.suppress(CheckpointError):
            return hasattr(self, "manifest") and read_manifest(self.path).id != self.manifest.id
        return False

    def _wants_node(self, node: Node) -> bool:
        whole = node.kind is Kind.OPTIMIZER
        return self.patterns.want_whole(node.path) if whole else self.patterns.want(node.path)

    def _open(self, state: Mapping[str, Any]) -> Told:
        """Read the arguments and the manifest, and look at this rank's part of the files and at its state."""
        refuse_other_kind("in_place", self.in_place, bool, CheckpointError, fix="give True or False")
        self.path = place_of(self.given)
        self.manifest = proven(self.path)
        self.patterns = Patterns(self.only, self.manifest.modules)
        source = Source.of(self.path, self.manifest)
        self.reader = Reader(source)
        mine = range(rank(), len(self.manifest.files), world())
        try:
            check_sizes(source, mine)
            self.reader.check_headers(mine)
        finally:
            self.reader.close()
        self.mine = self._compare(state)
        # Most often all ranks have the same, and their number of descriptions of it would be sent to each.
        return Told(self.manifest.id, sum_of(repr(self.mine).encode()), self.in_place)

    def _compare(self, state: Mapping[str, Any]) -> Identity:
        """Find where the tensors of modules go; what this rank has."""
        saved = self.manifest.values
        self.nodes = [node for node in nodes_of(state) if node.live is not None or node.path in saved]
        self.targets = tensors_of(self.nodes, self.patterns.want)
        self.chosen = [node for node in self.nodes if self._wants_node(node)]
        live = self.targets.live
        with DisableTorchFunctionSubclass():  # else a question to a DTensor costs ten times as much
            for name, tensor in live.items():
                refuse_unwritable(tensor, name)
            tensors = {name: (name_of(one.dtype), tuple(one.shape)) for name, one in live.items()}
        roots = tuple(node.path for node in self.nodes if node.kind is Kind.MODULE)
        values = (*self.targets.objects, *(node.path for node in self.chosen if node.kind in VALUED))
        tuned = tuple(node.path for node in self.nodes if node.kind is Kind.OPTIMIZER)
        only = None if self.patterns.everything else self.patterns.all
        fitted = frozenset(self.patterns.fitted)
        return Identity(tensors, self.targets.ties, roots, values, tuned, only, fitted)

    def _compare_others(self) -> None:
        try:
            add_others(self.targets, self.chosen, self.manifest, rank=rank(), world=world())
            are_alike = partial(alike, self.manifest)
            if self.in_place:
                refuse_overlaps(self.targets.placed(), are_alike)
            else:
                self.shared = list(shared_by(self.targets.placed(), are_alike))
        except CheckpointError as error:
            raise CheckpointError(f"{self.path} is not of this state: {error}") from None

    def _read(self, *, compared: bool) -> None:
        """Read everything and make all values; nothing of the state is changed but with `in_place`."""
        if not compared:
            self._compare_others()
        wanted: list[Want] = []
        detours: list[tuple[torch.Tensor, torch.Tensor]] = []
        for key, tensor in self.targets.fresh.items():
            local = local_of(tensor)
            if not local.is_contiguous():
                detours.append((local, in_order(local)))
                local = detours[-1][1]
            wanted += self._wants(key, tensor, local)
        wanted += self._live_wants()
        self.reader.read(wanted)
        for each in self.shared:
            refuse_different(each, self.beside)
        self.beside.clear()
        for local, read in detours:
            local.copy_(read)
        take = self.targets.fresh.__getitem__
        try:
            self.values = {path: decode(one, path, take) for path, one in self.targets.values.items()}
            self._try_states()
            self._prepare_optimizers()
            self.config = decode(self.manifest.config, "config")
            if self.patterns.everything:
                self._read_own()
            self.reader.check_held()
        except CheckpointError as error:
            raise CheckpointError(f"{self.path} cannot be used: {error}") from None

    def _try_states(self) -> None:
        for node in self.nodes:
            if node.kind is Kind.GENERATOR and node.path in self.values:
                check_generator(node.live, self.values[node.path], node.path)
            none = node.kind is Kind.STATEFUL and self.values.get(node.path, node) is None
            if none and node.live.state_dict() is not None:
                raise CheckpointError(f"{node.path} has a state here, and was None when it was saved")

    def _prepare_optimizers(self) -> None:
        loaded = {**self.targets.live, **self.targets.fresh}
        for node in self.chosen:
            if node.kind is Kind.OPTIMIZER:
                put = prepared(self.targets, self.manifest, node, loaded)
                self.optimizers.append(Change(node.path, put))

    def _read_own(self) -> None:
        if EXTRA in self.manifest.values:
            self.extra = decode(self.manifest.values[EXTRA], EXTRA, self._take_whole)
        if self.manifest.world == world() and RNG in self.manifest.values:
            self.rng = decode(of_rank(self.manifest, RNG, rank(), world()), RNG)
            check_rng(self.rng)

    def _take_whole(self, key: str) -> torch.Tensor:
        """A plain tensor that a value names."""
        saved = self.manifest.tensors.get(key)
        if saved is None:
            raise CheckpointError(f"{key} is named by a value and is no tensor of the checkpoint")
        whole = torch.empty(saved.shape, dtype=DTYPES[saved.dtype], device="cpu")
        self.reader.read(self._wants(key, whole, whole))
        return whole

    def _live_wants(self) -> list[Want]:
        """What is read of the tensors of the state: into them (`in_place`), or into memory beside them.

        What the system keeps in memory anyway is copied from there, without memory of its own.
        """
        wanted: list[Want] = []
        small: list[Want] = []
        large: list[tuple[str, torch.Tensor, torch.Tensor, list[Want]]] = []
        apart: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        shared = {name for each in self.shared for _, name in each.members}
        for name, tensor in self.targets.live.items():
            local = local_of(tensor)
            if not local.is_contiguous() or name in shared:
                apart.append((name, tensor, local))
                continue
            own = self._wants(name, tensor, local)
            if self.in_place:
                wanted += own
            elif all(map(is_small, own)):
                small += own
            else:
                large.append((name, tensor, local, own))
        self.reader.keep(want for *_, own in large for want in own)
        apart += [(name, tensor, local) for name, tensor, local, own in large if not self._hold(own)]
        self.small = list(self.reader.read_apart(small))
        arena = Arena(sum(room_for(local.nbytes) for _, _, local in apart))
        for name, tensor, local in apart:
            staged = arena.take(tuple(local.shape), local.dtype)
            strides = local.stride()
            self.staged.append((shown_once(local, strides), shown_once(staged, strides)))
            if name in shared:
                self.beside[name] = staged
            wanted += self._wants(name, tensor, staged)
        return wanted

    def _hold(self, wanted: list[Want]) -> bool:
        """Whether all that a tensor needs is held where it was read."""
        held = [(want.view, data) for want in wanted if (data := self.reader.hold(want)) is not None]
        if len(held) < len(wanted):
            return False
        self.held += held
        return True

    def _wants(self, name: str, tensor: torch.Tensor, local: torch.Tensor) -> list[Want]:
        key = self.manifest.ties.get(name, name)
        saved = self.manifest.tensors[key]
        return wants(key, saved, views(tensor, local, rank=self.rank))

    def _changes(self) -> Iterator[Change]:
        """What puts that which was read into place: first what cannot fail, then the code of others."""
        yield Change("tensors", self._put_tensors)
        yield from self.optimizers
        for node in self.nodes:
            if node.kind is Kind.GENERATOR and node.path in self.values:
                yield Change(node.path, partial(node.live.set_state, self.values[node.path]))
        for path, module in self.targets.objects.items():
            yield Change(path, partial(module.set_extra_state, self.values[path]))
        changed = (*self.targets.live, *self.targets.ties, *self.targets.objects)
        modules = [node for node in self.nodes if node.kind is Kind.MODULE]
        loaded = [one for one in modules if any(name.startswith(f"{one.path}/") for name in changed)]
        if hooks := [hook for one in loaded for hook in hooks_of_loads(one.live)]:
            yield Change("hooks of modules", lambda: [hook() for hook in hooks])
        for node in self.nodes:
            if node.kind is Kind.STATEFUL and node.path in self.values:
                yield Change(node.path, partial(node.live.load_state_dict, self.values[node.path]))
        if self.rng is not None:
            yield Change("the generators", partial(write_rng, self.rng))

    def _put_tensors(self) -> None:
        with torch.no_grad():
            for views, found in self.small:
                foreach_copy_(views, found)
            for target, staged in self.staged:
                copy_bytes(target, staged)
            for target, data in self.held:
                with unless_cut_short(data):
                    fill(target, data)
        self.held.clear()
        note_written((*self.targets.live.values(), *self.targets.twins))
