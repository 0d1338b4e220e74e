"""Meshes of a run: degrees, domains, process groups."""

from shardwright.context.context import DistributedContext
from shardwright.context.degrees import Degrees
from shardwright.context.domains import BATCH_DOMAIN, DENSE_DOMAIN, EXPERT_DOMAIN, FLAT_DOMAIN, REGULAR_DOMAIN
from shardwright.context.parameters import DeviceMeshParameters
from shardwright.context.registry import register_domain
from shardwright.context.submesh import submesh

__all__ = [
    "BATCH_DOMAIN",
    "DENSE_DOMAIN",
    "EXPERT_DOMAIN",
    "FLAT_DOMAIN",
    "REGULAR_DOMAIN",
    "Degrees",
    "DeviceMeshParameters",
    "DistributedContext",
    "register_domain",
    "submesh",
]
