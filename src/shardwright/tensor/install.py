"""What ties the modules of this package together: each knot stands here, and nothing is entered by an import.

A low module that needs a higher one (making a tensor needs its class, the class needs its dispatch) has an
open place; here it gets what belongs there, once, when the package is imported.
"""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwright.compat.dynamo import call_in_graphs
from shardwright.rules.registry import registry
from shardwright.tensor import autograd, conversions, local_map, redistribution
from shardwright.tensor.algorithms import embedding_bag, key_parts, one_hot, orders, padding, scans, windows
from shardwright.tensor.attention import function as attention
from shardwright.tensor.dispatch import written_memory
from shardwright.tensor.doors import open_doors
from shardwright.tensor.dtensor import DTensor, above
from shardwright.tensor.localized import LocalizedDTensor, compute_view
from shardwright.tensor.modules.replaced import refuse_replaced
from shardwright.tensor.optimizer_gradients import bring_gradients, give_back
from shardwright.tensor.plain import (
    backward,
    boundary,
    kept_shapes,
    made_gradients,
    own_terms,
    packed_sequences,
    set_data,
    shared_memory,
)
from shardwright.tensor.plain.host_reads import OWN as HOST
from shardwright.tensor.random import full
from shardwright.tensor.safe_globals import allow_safe_loading
from shardwright.tensor.under_way import start_redistribution
from shardwright.tensor.views import graph_results, strided, write_back
from shardwright.tensor.wrap import CLASSES, knots

# Functions of torch that are done in a way of our own above autograd; none stands in two of the tables.
OWN: tuple[dict[Any, boundary.Own], ...] = (
    strided.OWN,
    made_gradients.OWN,
    set_data.OWN,
    kept_shapes.OWN,
    shared_memory.OWN,
    HOST,
    backward.OWN,
    packed_sequences.OWN,
    attention.OWN,
    embedding_bag.OWN,
    one_hot.OWN,
    full.OWN,
)
# Their algorithms are in the registry of rules, which is open: it is filled as they are imported.
ALGORITHMS = (key_parts, orders, padding, scans, windows)


def install() -> None:
    """Tie every knot."""
    CLASSES[:] = [DTensor, LocalizedDTensor]
    knots.copies, knots.refresh = write_back.origins.data, write_back.refresh
    knots.start = start_redistribution
    for table in OWN:
        boundary.OWN.update(table)
    boundary.OF_GRAPHS.update(made_gradients.OWN)
    above.from_local, above.to_local = conversions.from_local, autograd.to_local
    above.redistribute, above.replicated = redistribution.redistribute, redistribution.replicated
    above.term_of, above.laid_out = own_terms.term_of, made_gradients.as_operand
    open_doors()
    call_in_graphs(  # of these a graph sees the call alone
        conversions.from_local_in_graph,
        local_map.placed_in_graph,
        compute_view,
        told=made_gradients.await_all,
        asked=written_memory.refuse_shared,
        watch=graph_results.WATCH,
    )
    register_optimizer_step_pre_hook(refuse_replaced)
    register_optimizer_step_pre_hook(bring_gradients)
    register_optimizer_step_post_hook(give_back)
    allow_safe_loading()
    registry.is_changed = False  # what comes now is the program's own
