"""Telling all ranks what the network is like: plans must be equal everywhere, so one rank's word counts."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from shardwright.errors import PlanError
from shardwright.plan.network import Network, set_network


def use_network(network: Network | str | Path) -> Network:
    """Plan for this network from now on; every rank of the world calls it, and all get what rank 0 was given.

    Args: network: a `Network`, or a file that `shardwright doctor --save` wrote; only rank 0 reads it.
    Returns: the network that all ranks use.
    Raises: PlanError: neither, or the file's text is no network. OSError: rank 0 cannot read it.
    Cost: one small broadcast; none without process groups.
    """
    alone = not (dist.is_available() and dist.is_initialized())
    agreed: list[Network | Exception | None] = [_read(network) if alone or dist.get_rank() == 0 else None]
    if not alone:
        dist.broadcast_object_list(agreed, src=0)
    outcome = agreed[0]
    if not isinstance(outcome, Network):
        raise outcome or PlanError("rank 0 stated no network")
    set_network(outcome)
    return outcome


def _read(network: Network | str | Path) -> Network | Exception:
    """What rank 0 was given; an error is returned, so that it is raised on every rank."""
    if isinstance(network, Network):
        return network
    if not issubclass(type(network), str | Path):
        return PlanError(f"use_network takes a Network, or the path of a file of one, got {network!r:.60}")
    try:
        return Network.from_json(Path(network).read_text(encoding="utf-8"))
    except Exception as error:  # noqa: BLE001 - whatever it is (a text in no UTF-8), the peers wait for a word
        return error
