"""Mixtures of experts, on one device and over an expert-parallel group."""

from shardwright.moe.communicator import ExpertCommunicator
from shardwright.moe.experts import GroupedExperts, SharedExpert
from shardwright.moe.grouped_linear import GroupedLinear
from shardwright.moe.layer import MoELayer
from shardwright.moe.router import Routing, TopKRouter

__all__ = [
    "ExpertCommunicator",
    "GroupedExperts",
    "GroupedLinear",
    "MoELayer",
    "Routing",
    "SharedExpert",
    "TopKRouter",
]
