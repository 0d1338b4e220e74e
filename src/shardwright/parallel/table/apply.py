"""`parallelize`: a model, a context and a table."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from shardwright.context.context import DistributedContext
from shardwright.context.domains import BATCH_DOMAIN
from shardwright.context.submesh import submesh
from shardwright.errors import ParallelError, ShardwrightError, words_of
from shardwright.parallel.logical_dropout import logical_dropout
from shardwright.parallel.meshes import refuse_no_module
from shardwright.parallel.table.agree import Word, agree, word_of
from shardwright.parallel.table.calls import Call, calls_of
from shardwright.parallel.table.initialise import Init, materialise, refuse_cut
from shardwright.parallel.table.meshes import Axes, stage_of
from shardwright.parallel.table.rehearsal import Placed, check_new, rehearse
from shardwright.parallel.table.report import Report, print_report, report_of
from shardwright.parallel.table.resolve import resolve
from shardwright.parallel.table.rows import Plan, read_rows
from shardwright.parallel.table.words import CONTEXT
from shardwright.tensor.modules.same_model import compared_before
from shardwright.tensor.modules.ties import ties_kept

Print = Callable[[Report], object]


def parallelize(
    module: nn.Module,
    context: DistributedContext,
    plan: Plan,
    *,
    init: Init | None = None,
    report: Print | None = print_report,
) -> nn.Module:
    """Place a whole model by one table, `{pattern of modules: strategies}`, in place.

    Calls the functions of this package in the order in which they compose, and does nothing else. A pattern
    names modules (a star stands for one name; "" is the model). A strategy is a word, several in a list, or
    `{word: options}`. The words are those of tensor parallelism (`"auto"`, `"colwise"`, `"rowwise"`, ...;
    `{"tensor": {"tp": placement}}` of a parameter) and `"sequence"` beside them; `"expert"`, `"context"`,
    `"batch_norm"`; and `"replicate"`, `"fsdp"`, `"hsdp"`, which are over the data ranks, and over the context
    ranks where no row says `"context"`: each module that is named so is a unit of its own.

    Everything is tried first on tensors without memory, and the ranks tell each other what came of it. A
    model on the meta device gets memory for this rank's part and the weights of one device: see `init`. After
    `context.seed(seed, dropout="logical")` dropout masks are those of one device (`logical_dropout`).

    Args:
        plan: a mapping, a word for the whole model, or the path of a .toml or .json file.
        init: of a model on the meta device, a function of the module that writes all parameters and buffers;
            without it `reset_parameters` and `transformers`' `_init_weights` do, drawing from the generator
            of the CPU what one device would draw from it (`context.seed(seed)` before).
        report: gets the `Report` on rank 0; None for silence.
    Returns: the module itself.
    Raises: ParallelError: an unknown word, option or pattern, rows that contradict each other, an axis
        that the context does not have, a parameter that nothing places, a call that cannot be made, ranks
        with other tables or models. The same error on every rank, and the module is as it was.
    Cost: as the strategies; and 16 bytes per parameter over each axis, once.
    """
    _check_context(context)
    calls, placed, words = _prepared(module, context, plan, init, report)
    is_new = any(p.is_meta for p in module.parameters())
    with ties_kept(module, "parallelize"):
        with compared_before():
            for call in calls:
                call.apply()
        if is_new:
            materialise(module, context.device, init)
        if context.dropout == "logical":
            logical_dropout(module, submesh(context.mesh_for(BATCH_DOMAIN), "dp"))
    if report is not None and context.is_main:
        report(report_of(calls, placed, words))
    return module


def _check_context(context: object) -> None:
    """Raise ParallelError for what has no axes; this needs no word of other ranks."""
    if not isinstance(context, DistributedContext):
        raise ParallelError(
            f"parallelize takes a context, which names all axes, got {type(context).__name__}\n"
            "  fix: context = DeviceMeshParameters(data_parallel_shard=...).build()"
        )
    if not context.is_open:
        raise ParallelError("parallelize: the context is closed; build another one")


def _check_functions(init: object, report: object) -> None:
    """Raise ParallelError for what is to be called later and cannot be."""
    for name, given, what in (("init", init, "the module"), ("report", report, "the report")):
        if given is not None and not callable(given):
            raise ParallelError(f"parallelize: {name}={given!r:.60} is no function of {what}, nor None")


def _prepared(
    module: nn.Module, context: DistributedContext, plan: Plan, init: Init | None, report: Print | None
) -> tuple[list[Call], list[Placed], list[Word]]:
    """What is to be done, after all ranks have found that it can be."""
    calls: list[Call] = []
    placed: list[Placed] = []
    try:
        refuse_no_module("parallelize", module)
        _check_functions(init, report)
        check_new(module)
        if init is None:
            refuse_cut(module)
        rows = read_rows(plan)
        cuts_all = all(not row.pattern for row in rows if row.strategy == CONTEXT)
        axes = Axes(context, frozenset(row.strategy for row in rows), cuts_all=cuts_all)
        calls = calls_of(resolve(module, rows, axes))
        placed = rehearse(module, calls, axes)
        word = word_of(context.rank, module, rows, placed)
    except ShardwrightError as error:
        word = Word(context.rank, str(error))
    except Exception as error:  # noqa: BLE001  the others wait for this rank's word, whatever happened
        word = Word(context.rank, f"parallelize: {words_of(error)}; nothing was changed")
    return calls, placed, agree(word, stage_of(context))
