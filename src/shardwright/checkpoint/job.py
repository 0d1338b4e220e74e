"""A save, from what the ranks say of their state to the commit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from threading import Event
from typing import Any

import torch

from shardwright.checkpoint.agree import Call, Group, rank, world
from shardwright.checkpoint.collect import Collected, Part, collect, optimizers_of, values_of
from shardwright.checkpoint.collector import no_collection
from shardwright.checkpoint.folder import whole_step
from shardwright.checkpoint.pieces import local_of, views
from shardwright.checkpoint.plan import Plan, Told, planned, tell
from shardwright.checkpoint.spread import Held_by_key, Share
from shardwright.checkpoint.state import nodes_of
from shardwright.checkpoint.storage.commit import Saving
from shardwright.checkpoint.storage.element_types import in_order
from shardwright.checkpoint.storage.folder_names import is_committed, metadata
from shardwright.checkpoint.storage.manifest import VERSION, Manifest, dump, library_version
from shardwright.checkpoint.storage.place import Place, place_of
from shardwright.checkpoint.storage.proof import prove
from shardwright.checkpoint.storage.stores.of import store_of
from shardwright.checkpoint.storage.sums import CHUNK
from shardwright.checkpoint.storage.values import encode
from shardwright.checkpoint.storage.writer import Entry, Written, into_files, write_file
from shardwright.errors import CheckpointError
from shardwright.index.region import Box

# Where threads of this process write, and what is set when they have ended. No table: only they know.
in_background: dict[Place, Event] = {}


class Job:
    """A save whose plan is known: what this rank writes of what it holds."""

    def __init__(
        self, call: Call, path: Place, save: str, plan: Plan, collected: Collected, about: dict[str, Any]
    ) -> None:
        self._call = call
        self.path, self.id, self.whole, self._about = path, save, plan.whole, about
        self.saving: Saving | None = None
        self.begun = True
        self.failure: Exception | None = None
        self.of_first = path  # what rank 0 was given
        self._rank = rank()
        self._part = collected.part()
        self._tensors = collected.tensors
        self._shares = plan.shares
        self._views: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        self.copied: list[Entry] | None = None

    def entries(self) -> list[Entry]:
        """What this rank writes: copies where there are some, else views of the state.

        It may fail on one rank alone, so it is called where the others hear of that.
        """
        return [self._entry(share) for share in self._shares] if self.copied is None else self.copied

    def let_go(self) -> None:
        """Forget the state and its copies."""
        self.copied = []
        self._tensors, self._views = {}, {}

    def _entry(self, share: Share) -> Entry:
        held = self.whole[share.key]
        view = self._view(share)
        copied = view.dtype == torch.float4_e2m1fn_x2  # in which torch cannot copy all that it shows
        elements = partial(in_order, view) if copied else view
        return Entry(share.key, held.dtype, share.cell, share.cell[1] == held.shape, elements)

    def _view(self, share: Share) -> torch.Tensor:
        if share.key not in self._views:
            tensor = self._tensors[share.key]
            self._views[share.key] = views(tensor, local_of(tensor), copies=True, rank=self._rank)
        view = self._views[share.key][share.box][1]
        if tuple(view.shape) == share.cell[1]:
            return view
        return view.narrow(share.dim, share.start, share.stop - share.start)

    def finish(self, group: Group = None) -> None:
        """Write and commit. A collective over `group`, by default the world."""
        if not self.begun:
            self._call.agreed(f"beginning {self.path}", self._begin, group)
        with no_collection():
            done = self._call.agreed(f"writing {self.path}", lambda: (self._write(), self._part), group)
        try:
            self._call.agreed(f"committing {self.path}", lambda: self._commit(done), group, whole=True)
        except CheckpointError:
            # Rank 0 has said that it did not commit; any other error says nothing of that, and files stay.
            self._withdraw(done[rank()][0])
            raise

    def _begin(self) -> None:
        if self.saving is not None:
            self.saving.begin()

    def _withdraw(self, mine: list[Written]) -> None:
        """Remove this rank's files of a save that was not committed, wherever they are."""
        with contextlib.suppress(OSError, CheckpointError):
            store = store_of(self.path)
            if not is_committed(store, self.id):
                for file in mine:
                    store.remove(file.name)

    def _write(self) -> list[Written]:
        if self.failure is not None:
            raise self.failure
        store = store_of(self.path)
        if self.saving is not None:
            self.saving.check()
        elif not store.has(f"saving-{self.id}.json"):
            apart = "" if self.path == self.of_first else f" as {self.of_first} (a time in the path?)"
            raise CheckpointError(
                f"rank {rank()} does not see {self.path}, which rank 0 made{apart}: the ranks do not share "
                "this file system (a disk of one node, the memory of one process?); name a folder that all "
                "of them see"
            )
        names: list[str] = []
        try:
            done = []
            for number, entries in enumerate(into_files(self.entries())):
                names.append(f"data-{self.id}-{rank():05d}-{number:03d}.safetensors")
                done.append(write_file(store, names[-1], entries, metadata(self.id)))
            return done
        except BaseException:
            for name in names:
                with contextlib.suppress(OSError):
                    store.remove(name)
            raise

    def _commit(self, done: list[tuple[list[Written], Part]]) -> None:
        if self.saving is not None:
            files = [file for written, _ in done for file in written]
            with no_collection():
                text = dump(self._body(files, [part for _, part in done]))
                prove(Manifest.parse(text))
            self.saving.commit(text, files)

    def _body(self, files: list[Written], parts: list[Part]) -> dict[str, Any]:
        tensors: dict[str, dict[str, Any]] = {
            key: {"dtype": held.dtype, "shape": held.shape, "layout": held.layout, "parts": []}
            for key, held in self.whole.items()
        }
        for number, file in enumerate(files):
            for key, (offset, size), at, sums in file.boxes:
                tensors[key]["parts"].append(
                    {"file": number, "at": at, "offset": offset, "size": size, "sums": sums}
                )
        names = {one.name: one for one in files}
        return {
            "format": "shardwright",
            "version": VERSION,
            "id": self.id,
            **self._about,
            "chunk": CHUNK,
            "files": [
                {"name": name, "size": one.size, "header": one.header, "sum": one.sum}
                for name, one in names.items()
            ],
            "tensors": tensors,
            # What is a tie on one rank and a tensor of its own on another (two stages) is a tensor.
            "ties": {
                name: first for part in parts for name, first in part.ties.items() if name not in self.whole
            },
            "modules": list(dict.fromkeys(name for part in parts for name in part.modules)),
            "optimizers": optimizers_of(parts),
            "values": values_of(parts),
        }


@contextlib.contextmanager
def prepared(
    call: Call,
    path: Place | str,
    state: Mapping[str, Any],
    extra: Any,
    step: int | None,
    config: Mapping[str, Any] | None,
    before: Callable[[], object] | None = None,
) -> Iterator[Job]:
    """A save up to its plan, which is the same on every rank.

    A collective of a call; what fails leaves nothing behind.

    Args: before: what a save in the background does first; such a save writes nothing before `finish`.
    """
    begun: list[Saving] = []
    try:
        yield _prepare(call, path, state, extra, about_run(step, config), begun, before)
    except BaseException:
        for saving in begun:
            saving.abandon()
        raise


def about_run(step: int | None, config: Mapping[str, Any] | None) -> Callable[[], dict[str, Any]]:
    """What the manifest says of the run; made where a failure of one rank is told to all."""

    def made() -> dict[str, Any]:
        number = None if step is None else whole_step(step)
        if config is not None and not isinstance(config, Mapping):
            raise CheckpointError(f"config={config!r:.60} is no dict: give settings by name")
        return {
            "library": library_version(),
            "torch": torch.__version__,
            "world": world(),
            "step": number,
            "config": _plain(dict(config or {})),
        }

    return made


def refuse_other_steps(steps: Sequence[int | None]) -> None:
    """Raises CheckpointError, the same on every rank, where ranks save what they had after other steps.

    A rank whose loop is a step ahead, for an exception that the others did not hear of, gives a state that is
    none of theirs. One that gives no step goes by those that do.
    """
    first = next((number for number, step in enumerate(steps) if step is not None), 0)
    for number, step in enumerate(steps):
        if step is not None and step != steps[first]:
            raise CheckpointError(
                f"rank {first} saves step={steps[first]} and rank {number} step={step}: their loops are "
                "apart, and a checkpoint of both is of no step; bring the ranks to one step, and save again"
            )


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = encode(config, "config")
    if "$" in found:
        raise CheckpointError("config: its names are not all text, or one of them is '$'")
    return found


def _prepare(
    call: Call,
    path: Place | str,
    state: Mapping[str, Any],
    extra: Any,
    about: Callable[[], dict[str, Any]],
    begun: list[Saving],
    before: Callable[[], object] | None,
) -> Job:
    collected = Collected()
    held: Held_by_key = {}
    place: Place

    def first() -> tuple[Told, str, dict[str, Any], Place]:
        nonlocal collected, held, place
        place = place_of(path)
        if before is not None:
            before()
        elif (ended := in_background.get(place)) is not None:
            ended.wait()  # a save of this process, which an interrupt may have taken from whoever would wait
        collected = collect(nodes_of(state), extra, first_rank=rank() == 0)
        held, copies = collected.held()
        told = about()
        if rank() == 0:
            begun.append(Saving(place))
            if before is None:
                begun[0].begin()
        return tell(held, copies), begun[0].id if begun else "", told, place

    with no_collection():
        doing = "preparing the checkpoint" if before is None else "staging the checkpoint"
        told = call.agreed(doing, first)
        refuse_other_steps([about["step"] for _, _, about, _ in told])
        plan = planned([one[0] for one in told], held, call)
        job = Job(call, place, told[0][1], plan, collected, told[0][2])
    job.saving, job.of_first = begun[0] if begun else None, told[0][3]
    job.begun = before is None
    return job
