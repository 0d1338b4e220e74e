"""What plans may know of the network: which axes cross its slow links, and what a round costs.

Every rank must decide alike, so nothing is measured here and nothing is guessed: a program states it, and
`shardwright.comm.use_network` gives all ranks what the first one states.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from shardwright.errors import PlanError, as_several


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
        """Raises: PlanError: what are no names, one name alone included; what is no number of bytes."""
        name, fix = "slow_axes are names of axes: slow_axes", '("dp",)'
        axes = as_several(name, self.slow_axes, PlanError, fix=fix, ordered=False)
        if not all(isinstance(axis, str) for axis in axes):
            raise PlanError(f"slow_axes are names of axes, got {axes}")
        few: Any = self.one_round_bytes
        if few is not None and (type(few) is not int or few < 0):
            raise PlanError(
                f"a network's one_round_bytes={few!r:.60} is no number of bytes from 0 on; None: 64 KiB"
            )
        object.__setattr__(self, "slow_axes", axes)

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
        except (TypeError, ValueError) as error:
            raise PlanError(f"not the text of a network: {error}") from None
        known = {field.name for field in fields(cls)}
        if not isinstance(given, dict) or not set(given) <= known:
            raise PlanError(f"a network has {', '.join(sorted(known))}; this is {text[:80]}")
        return cls(**given)


current = Network()  # what plans are made for
version = 0  # changes with the network: a part of the key under which plans are remembered


def set_network(network: Network) -> None:
    """Make plans for this network from now on, on this rank only: see `shardwright.comm.use_network`."""
    global current, version
    current, version = network, version + 1
