"""What plans may know of the network: which axes cross its slow links, and what a round costs.

Every rank must decide alike, so nothing is measured here and nothing is guessed: a program states it, and
`shardwright.comm.use_network` gives all ranks what the first one states.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from shardwright.errors import PlanError


@dataclass(frozen=True)
class Network:
    """What a plan takes into account.

    slow_axes: names of mesh axes whose ranks are on different nodes; all other axes are fast.
    one_round_bytes: terms of at most this many bytes per rank go in one round of more bytes; None: 64 KiB,
    which suits gloo on one machine and NCCL alike.
    """

    slow_axes: tuple[str, ...] = ()
    one_round_bytes: int | None = None

    def __post_init__(self) -> None:
        """Raises: PlanError: one name, whose letters would be taken for names."""
        if issubclass(type(self.slow_axes), str):
            raise PlanError(f"slow_axes are names of axes: ({self.slow_axes!r},)")

    def to_json(self) -> str:
        """The text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Network:
        """A network from its text, as `shardwright doctor --save` writes it.

        Raises: PlanError: it is no such text.
        """
        try:
            given: Any = json.loads(text)
        except ValueError as error:
            raise PlanError(f"not the text of a network: {error}") from None
        known = {field.name for field in fields(cls)}
        if not isinstance(given, dict) or not set(given) <= known:
            raise PlanError(f"a network has {', '.join(sorted(known))}; this is {text[:80]}")
        axes, least = given.get("slow_axes", ()), given.get("one_round_bytes")
        names = isinstance(axes, list | tuple) and all(isinstance(axis, str) for axis in axes)
        if not names or not isinstance(least, int | None):
            raise PlanError(f"slow_axes are names, one_round_bytes is a number or null; this is {text[:80]}")
        return cls(tuple(axes), least)


current = Network()  # what plans are made for
version = 0  # changes with the network: a part of the key under which plans are remembered


def set_network(network: Network) -> None:
    """Make plans for this network from now on, on this rank only: see `shardwright.comm.use_network`."""
    global current, version
    current, version = network, version + 1
