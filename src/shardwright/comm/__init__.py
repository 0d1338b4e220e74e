"""Communication: collectives on local tensors, the execution of plans, and the record of both."""

from shardwright.comm.collectives import all_gather_uneven, all_reduce, all_to_all_uneven
from shardwright.comm.guard import guarded
from shardwright.comm.network import use_network
from shardwright.comm.record import Decision, Event, Recorder, record_collective, record_decision

__all__ = [
    "Decision",
    "Event",
    "Recorder",
    "all_gather_uneven",
    "all_reduce",
    "all_to_all_uneven",
    "guarded",
    "record_collective",
    "record_decision",
    "use_network",
]
