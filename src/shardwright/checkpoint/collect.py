"""What one rank has to save: its tensors as they live, everything else as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import xxhash
from torch.distributed.tensor import DTensor

from shardwright.checkpoint.agree import rank as this_rank
from shardwright.checkpoint.agree import world
from shardwright.checkpoint.model_state import read_model
from shardwright.checkpoint.optimizer_state import OptimizerPart, merge, read_optimizer
from shardwright.checkpoint.pieces import Held, describe, is_copied, local_of
from shardwright.checkpoint.rng_state import KEY as RNG
from shardwright.checkpoint.rng_state import read_rng
from shardwright.checkpoint.state import Kind, Node
from shardwright.checkpoint.storage.values import canonical, encode, refuse_half_a_character
from shardwright.checkpoint.storage.writer import blocks
from shardwright.errors import CheckpointError

EXTRA = "extra"
RANKS = "ranks"


class Part(NamedTuple):
    """What a rank tells of its state beside tensors; values as text, so that they can be compared."""

    ties: dict[str, str]
    modules: tuple[str, ...]
    optimizers: dict[str, OptimizerPart]
    values: dict[str, str]


@dataclass
class Collected:
    """A rank's state: `tensors` are the live objects by key, each once; `ties` are their further names."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)
    optimizers: dict[str, OptimizerPart] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    def keep(self, key: str, tensor: torch.Tensor) -> None:
        """Take a tensor. Raises: CheckpointError: there is another one of this name."""
        if key in self.tensors or key in self.ties:
            raise CheckpointError(f"two tensors of the state are called {key}")
        refuse_half_a_character(key, "the name of a tensor")
        self.tensors[key] = tensor

    def keep_of_value(self, key: str, tensor: torch.Tensor) -> str:
        """Take a tensor that a value names; its key: another one where two places of a value read alike.

        Where there are more ranks, each has values of its own: a plain tensor is called by what is in it too,
        so that it is one tensor on those ranks that have the same.
        """
        if not isinstance(tensor, DTensor) and world() > 1:
            found = digest(tensor)
            key = f"{key}@{found[:16]}"
            self.digests[key] = found
        while key in self.tensors or key in self.ties:
            key += "~"
        self.tensors[key] = tensor
        return key

    def put(self, path: str, value: Any) -> None:
        """Take a value, as JSON. Raises: CheckpointError: there is another one of this name."""
        if path in self.values:
            raise CheckpointError(f"two values of the state are called {path}")
        refuse_half_a_character(path, "the name of a value")
        self.values[path] = value

    def keep_once(self, key: str, tensor: torch.Tensor) -> None:
        """Take a tensor, or note that it is one that is there already."""
        first = self.names.setdefault(id(tensor), key)
        if first == key:
            self.keep(key, tensor)
        else:
            self.ties[key] = first

    def part(self) -> Part:
        """What is no tensor."""
        values = {key: json.dumps(one, allow_nan=False) for key, one in self.values.items()}
        return Part(self.ties, tuple(self.modules), self.optimizers, values)

    def held(self) -> tuple[dict[str, Held], dict[str, str]]:
        """What this rank holds of each tensor, and digests of what other ranks have, or may have, too.

        Cost: one read of that.
        """
        ranks, mine = world(), this_rank()
        held = {key: describe(one, key, mine) for key, one in self.tensors.items()}
        if ranks == 1:
            return held, {}
        apart = {
            key: tensor
            for key, tensor in self.tensors.items()
            # A plain tensor is on no mesh at all.
            if held[key].boxes and (len(held[key].ranks) < ranks or is_copied(tensor))
        }
        return held, {key: self.digests.get(key) or digest(tensor) for key, tensor in apart.items()}


def collect(nodes: list[Node], extra: Any, *, first_rank: bool) -> Collected:
    """Read a state. Nothing is copied; what is not a tensor is made JSON at once.

    Raises: CheckpointError: something cannot be saved; its path is named.
    """
    found = Collected()
    for node in nodes:
        if node.kind is Kind.MODULE:
            _module(found, node)
        elif node.kind is Kind.TENSOR:
            found.keep_once(node.path, node.live)
    for node in nodes:
        if node.kind is Kind.OPTIMIZER:
            found.optimizers[node.path] = read_optimizer(
                node.live, found.names, node.path, found.keep, found.keep_of_value
            )
        elif node.kind is Kind.GENERATOR:
            found.put(node.path, encode(node.live.get_state(), node.path))
        elif node.kind is Kind.STATEFUL:
            found.put(node.path, encode(node.live.state_dict(), node.path, found.keep_of_value))
        elif node.kind is Kind.VALUE:
            found.put(node.path, encode(node.live, node.path, found.keep_of_value))
    if first_rank:
        found.put(EXTRA, encode(extra, EXTRA, found.keep_of_value))
    found.put(RNG, encode(read_rng(), RNG))
    return found


def _module(found: Collected, node: Node) -> None:
    found.modules.append(node.path)
    state = read_model(node.live)
    if state.others:
        raise CheckpointError(
            f"the state_dict() of {node.path} gives {state.others[0]!r}, which is no tensor and would be "
            "lost: give it by get_extra_state(), take it by set_extra_state(), or save it beside the module"
        )
    for name, tensor in state.tensors.items():
        found.keep_once(f"{node.path}/{name}", tensor)
    for name, module in state.objects.items():
        key = f"{node.path}/{name}"
        found.put(key, encode(module.get_extra_state(), key, found.keep_of_value))


def digest(tensor: torch.Tensor) -> str:
    """A checksum of what this rank holds of a tensor: dtype, shape and bytes."""
    local = local_of(tensor)
    whole = xxhash.xxh3_128(f"{local.dtype}{list(local.shape)}".encode())
    for block in blocks(local):
        whole.update(block)
    return str(whole.hexdigest())


def values_of(parts: list[Part]) -> dict[str, Any]:
    """The values of all ranks: one where they agree, else `{"$": "ranks", "v": {rank: value}}`."""
    by_key: dict[str, dict[int, str]] = {}
    for rank, part in enumerate(parts):
        for key, text in part.values.items():
            by_key.setdefault(key, {})[rank] = text
    merged: dict[str, Any] = {}
    for key, texts in by_key.items():
        if key != RNG and _are_one(texts):
            merged[key] = json.loads(next(iter(texts.values())))
        else:
            merged[key] = {"$": RANKS, "v": {str(rank): json.loads(text) for rank, text in texts.items()}}
    return merged


def _are_one(texts: dict[int, str]) -> bool:
    """Whether the ranks say the same, dicts in any order."""
    different = set(texts.values())
    return len(different) == 1 or len({canonical(json.loads(one)) for one in different}) == 1


def optimizers_of(parts: list[Part]) -> dict[str, dict[str, Any]]:
    """The optimizers of all ranks, each once."""
    paths = dict.fromkeys(path for part in parts for path in part.optimizers)
    return {path: merge(path, [p.optimizers[path] for p in parts if path in p.optimizers]) for path in paths}
