"""Tensor parallelism on one axis: the words of models, placements by parameter name, or torch's styles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.parallel import ParallelStyle

from shardwright.errors import ParallelError, refuse_other_kind
from shardwright.grads.stages import heard_by_stages
from shardwright.parallel.meshes import one_axis
from shardwright.parallel.pipeline.mark import is_elsewhere, refuse_cut
from shardwright.parallel.plan_of_styles import Styles, apply_styles
from shardwright.parallel.swap import put_all, replace_parameters
from shardwright.parallel.tensor.bring import brought_plan
from shardwright.parallel.tensor.by_words import place_by_words
from shardwright.tensor.distribute import refuse_source
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.modules.distribute import carry_over, place_by_pattern, placements_by
from shardwright.tensor.modules.more_axes import KEPT, is_free_for, on_more_axes
from shardwright.tensor.modules.same_model import agreed
from shardwright.tensor.modules.slots import Slot, slots_of
from shardwright.tensor.modules.ties import ties_kept
from shardwright.tensor.wrap import as_ours

AUTO = "auto"


@heard_by_stages
def parallelize_tensor(
    module: nn.Module,
    mesh: DeviceMesh,
    parallelize_plan: ParallelStyle | str | Mapping[str, Any],
    *,
    sequence_parallel: bool = False,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Cut the parameters that the plan names over the one axis of `mesh`, in place; compute on DTensors.

    By words and by placements the model computes on distributed tensors: run it inside `sw.spmd(mesh)`. Its
    logits stay cut over the vocabulary, and a loss of them sends a few numbers per row. Heads stay whole:
    where the axis does not divide them, some ranks have one more; where there are fewer key-value heads than
    ranks, their weights are whole. Matrices that are fused in one are cut one by one.

    Args:
        parallelize_plan: `"auto"`, the words that the model brings (`_tp_plan` of `transformers`); or
            `{pattern: word}`, the same words (`"colwise"`, `"rowwise"`, `"embedding_rowwise"`, ...) of
            submodules or parameters, a star for one name, and beside them `{parameter pattern: placements}`;
            or such placements alone (see `distribute_module`), and what no pattern names is replicated; or
            `{submodule pattern: style}` with torch's own styles (`ColwiseParallel`, ...), which hand plain
            tensors from one module to the next; or a style or a word for the module itself.
        sequence_parallel: with words: between the parts of blocks that are cut, each rank holds 1/n of the
            tokens of [rows, tokens, features]. So too where the plan has the word `"sequence_parallel"`.
        src_data_rank: the rank of the axis whose parameters count; None: each rank's own, all equal.
    Raises: ParallelError: not one axis, an empty plan, styles beside anything else, an unknown name or word,
        a model that brings no plan for `"auto"`, two words or styles for one shared parameter or module, a
        parameter that this axis has placed already, a style for parameters that are placed already or for a
        module that it does not take, a model that is cut into pipeline stages, ranks with other parameters or
        plans; nothing has been changed then.
    Cost: an all-reduce of 40 bytes, once. Of what is computed an all-reduce (or, sequence-parallel, its two
        halves) per pair of cut layers and pass; as the styles say.
    Source: Megatron-LM, arXiv 1909.08053, section 3; of sequence parallelism arXiv 2205.05198, section 4.
    """
    with agreed("parallelize_tensor", module, mesh) as said:
        one_axis(mesh, "parallelize_tensor", module, "tp")
        refuse_source(mesh, src_data_rank)
        name, fix = "parallelize_tensor: sequence_parallel", "True or False"
        refuse_other_kind(name, sequence_parallel, bool, ParallelError, fix=fix)
        how = {"sequence_parallel": sequence_parallel, "src_data_rank": src_data_rank}
        said.options = {**how, "plan": parallelize_plan}
        if is_elsewhere(module):
            return module
        refuse_cut(module, "parallelize_tensor")
        plan = _as_mapping(parallelize_plan)
        kinds = _kinds(plan, sequence=sequence_parallel)
        brought = brought_plan(module) if plan is None else {}
        placed = {p: v for p, v in (plan or {}).items() if not isinstance(v, str)}
        said.becomes = {} if ParallelStyle in kinds else placements_by(placed, module, mesh)
    if ParallelStyle in kinds:
        return _by_styles(module, mesh, cast("Styles", plan), src_data_rank)
    if plan is not None and str not in kinds:
        place_by_pattern(module, mesh, plan, src_data_rank, "parallelize_tensor")
        return module
    words = brought if plan is None else {p: w for p, w in plan.items() if isinstance(w, str)}
    strict, cut = plan is not None, sequence_parallel
    return place_by_words(module, mesh, words, placed, src_data_rank, strict=strict, sequence=cut)


def _kinds(plan: Mapping[str, Any] | None, *, sequence: bool) -> set[type]:
    """What the plan says of its patterns: styles, words (also where the model brings it), placements."""
    kinds: set[type] = {_kind(value) for value in plan.values()} if plan is not None else {str}
    if not kinds or (ParallelStyle in kinds and len(kinds) > 1):
        raise ParallelError(
            "parallelize_tensor: the plan names styles, or words and placements, at least one and not both"
        )
    if sequence and str not in kinds:
        raise ParallelError(
            "parallelize_tensor: sequence_parallel=True goes with a plan of words ('auto', 'colwise', ...); "
            "among torch's styles it is SequenceParallel and its kin"
        )
    return kinds


def _as_mapping(plan: ParallelStyle | str | Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A plan by patterns; None for that which the model brings."""
    if isinstance(plan, (ParallelStyle, str)):
        return None if plan == AUTO else {"": plan}
    if not isinstance(plan, Mapping):
        raise ParallelError(f"parallelize_tensor: a plan is a mapping or a word, got {plan!r:.60}")
    for pattern in plan:
        fix = 'the name of a module or parameter, a star for one name: "layers.*.up"'
        refuse_other_kind("parallelize_tensor: the pattern", pattern, str, ParallelError, fix=fix)
    return plan


def _kind(value: Any) -> type:
    if isinstance(value, type) and issubclass(value, ParallelStyle):
        name = value.__name__
        raise ParallelError(f"parallelize_tensor: the plan has the class {name}\n  fix: make one: {name}()")
    return next((kind for kind in (ParallelStyle, str) if isinstance(value, kind)), object)


def _by_styles(module: nn.Module, mesh: DeviceMesh, plan: Styles, source: int | None) -> nn.Module:
    """torch's styles on what each rank holds; the axes of an earlier replicate are put back afterwards."""
    with ties_kept(module, "parallelize_tensor"):
        before = [(slot, slot.get()) for slot in slots_of(module)]
        plain = {old: _bare(old) for old in dict.fromkeys(old for _, old in before) if _is_free(old, mesh)}
        put_all([slot for slot, _ in before], plain)
        apply_styles(module, mesh, plan, source)
        _in_our_class(module)
        _put_axes_back([(slot, old) for slot, old in before if old in plain], plain)
    return module


def _put_axes_back(
    before: Sequence[tuple[Slot, nn.Parameter]], plain: Mapping[nn.Parameter, nn.Parameter]
) -> None:
    """What the plan did not name is what it was; what it cut lives on the axes of its replicas too."""
    made: dict[nn.Parameter, nn.Parameter] = {new: old for old, new in plain.items()}
    for slot, old in before:
        new = slot.get()
        if new not in made:
            home, cut = _ours(old), _ours(new)
            value = on_more_axes(cut, home.device_mesh, home.placements, home._spec.use or KEPT, None)
            made[new] = nn.Parameter(value, requires_grad=old.requires_grad)
            carry_over(old, made[new])
        slot.put(made[new])


def _is_free(parameter: nn.Parameter, mesh: DeviceMesh) -> bool:
    return isinstance(parameter, DTensor) and is_free_for(parameter, mesh)


def _ours(parameter: torch.Tensor) -> DTensor:
    """A parameter that is a DTensor, typed."""
    return as_ours(cast("TorchDTensor", parameter))


def _bare(parameter: nn.Parameter) -> nn.Parameter:
    """What a replicated parameter is on this rank."""
    plain = nn.Parameter(_ours(parameter)._local_tensor.detach(), requires_grad=parameter.requires_grad)
    carry_over(parameter, plain)
    return plain


def _in_our_class(module: nn.Module) -> nn.Module:
    """torch's styles make torch's DTensors; from here on every op on them is dispatched by our rules."""

    def make(_: str, parameter: nn.Parameter) -> nn.Parameter | None:
        value: torch.Tensor = parameter
        if not isinstance(value, TorchDTensor) or isinstance(value, DTensor):
            return None
        new = nn.Parameter(as_ours(value), requires_grad=parameter.requires_grad)
        carry_over(parameter, new)
        return new

    replace_parameters(module, make)
    return module
