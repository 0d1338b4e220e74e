"""Context parallelism: the sequence is cut over an axis, the parameters are whole, attention goes round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import axis_names
from shardwright.errors import ParallelError, refuse_other_kind, words_of
from shardwright.grads.stages import heard_by_stages
from shardwright.parallel.expert import experts_of, spread_over
from shardwright.parallel.meshes import is_other_view, named_axes, one_axis, refuse_twice
from shardwright.parallel.sequence_scope import SequenceScope, find_scope
from shardwright.parallel.swap import replace_parameters
from shardwright.placement.base import Partition, Replicate
from shardwright.placement.zigzag import ZigZag
from shardwright.tensor.attention.asked import Asked
from shardwright.tensor.attention.choice import AUTO, WAYS
from shardwright.tensor.distribute import distribute_tensor, refuse_source
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.local_use import kept_spec
from shardwright.tensor.modules.distribute import carry_over
from shardwright.tensor.modules.more_axes import KEPT, comes_in_terms, on_more_axes
from shardwright.tensor.modules.same_model import agreed
from shardwright.tensor.modules.slots import slots_of
from shardwright.tensor.modules.ties import ties_kept
from shardwright.tensor.spec import LocalUse, spec_of
from shardwright.tensor.wrap import as_ours, wrap

_OUTPUTS = ("cut", "whole")


@heard_by_stages
def parallelize_context(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    attention: str = AUTO,
    cut: Mapping[str, int] | None = None,
    placement: Callable[[int], Partition] = ZigZag,
    output: str = "cut",
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Compute `module` on sequences that are cut over the one axis of `mesh`, in place.

    Every rank of the axis calls the module with the same whole tensors, or with DTensors (`cut_sequence`
    makes them). Inside, one program runs on distributed tensors (`sw.spmd`): positions, masks and shifted
    labels mean what they mean on one device, and each rank holds 1/n of every activation. Attention to the
    others' keys is a ring (they travel while the last are computed with) or an all-to-all of heads.

    Args:
        attention: "ring", "all_to_all", or "auto": the one that sends fewer bytes.
        cut: `{argument: dim of its sequence}`, arguments of the forward that are cut; by default the first
            tensor among them, along dim 1 ([batch, sequence, ...]). Other arguments count as replicated.
        placement: of the sequence, from its dim. `sw.ZigZag` gives causal attention equal work on all ranks;
            `sw.Shard` keeps neighbours together, for windows and convolutions.
        output: "cut": the results are DTensors; "whole": plain tensors, gathered, where plain modules
            follow.
        src_data_rank: the rank of the axis whose parameters count; None: each rank's own, all equal.
    Returns: the module itself, with parameters replicated on the axis; class, names and ties are untouched.
    Raises: ParallelError: not one axis, an unknown `attention`, `output`, placement or argument, a module
        whose sequence is cut already, ranks with other parameters, parameters that `fully_shard` manages or
        that live on different axes; nothing has been changed then. Place on tensor-parallel axes before
        this, on data-parallel ones after.
    Cost: a broadcast of the parameters, once. In a forward of attention each rank sends n - 1 parts of keys
        and values in a ring, in the backward as many again and as many gradients; in an all-to-all (n-1)/n of
        its queries, keys, values and results. Gradients of parameters are pending until somebody sums them.
    Source: Liu, Zaharia, Abbeel, arXiv 2310.01889; Jacobs et al., arXiv 2309.14509.
    """
    with agreed("parallelize_context", module, mesh) as said:
        axis = one_axis(mesh, "parallelize_context", module, "cp")
        _check_words(attention, output)
        _check_placement(placement)
        _check_once(module, axis)
        refuse_source(mesh, src_data_rank)
        if not isinstance(cut, Mapping | None):
            raise ParallelError(
                f"parallelize_context: cut={cut!r:.60}; give {{argument: dim of its sequence}}"
            )
        scope = SequenceScope(axis, dict(cut or {}), placement, Asked(attention, stated=True), output)
        scope.check_arguments(module)
        words = {"attention": attention, "cut": cut, "placement": placement, "output": output}
        said.options = {**words, "src": src_data_rank}
    with ties_kept(module, "parallelize_context"):
        homes: set[DeviceMesh] = set()
        experts = experts_of(module)

        def make(path: str, parameter: nn.Parameter) -> nn.Parameter | None:
            is_local = parameter in experts
            new = _placed(path, parameter, mesh, src_data_rank, is_local=is_local)
            if new is not None and not is_local:
                homes.add(_computes_on(new))
            elif new is None and output == "whole" and mesh.size() > 1:
                _refuse_summed(path, parameter, module, mesh)
            return new

        replace_parameters(module, make)
        for slot in slots_of(module) if mesh.size() > 1 else ():
            comes_in_terms(slot.owner, slot.name, mesh)
        scope.mesh = _one_home(homes, mesh)
        _place_buffers(module, mesh)
        scope.enter_with(module)
    return module


def cut_sequence(
    batch: Any, mesh: DeviceMesh, *, dim: int = 1, placement: Callable[[int], Partition] = ZigZag
) -> Any:
    """The tensors of a batch, equal on every rank of the axis, as DTensors cut along their sequence.

    Args:
        batch: a tensor, or tensors in lists, tuples and dicts; what has no such dim is left as it is.
        mesh: of one axis, or of several of which the last is cut and the others replicate.
        dim: of the sequence.
        placement: a partition of a dim, made of the dim: `sw.ZigZag`, `sw.Shard`.
    Returns: as `batch`.
    Raises: ParallelError: a mesh without axis names, a dim that is no number, no such placement.
    Cost: none; each rank keeps its part.
    """
    names = named_axes(mesh, "cut_sequence")
    _check_placement(placement, "cut_sequence")
    fix = "the number of the sequence's dim"
    refuse_other_kind(
        "cut_sequence: dim", None if isinstance(dim, bool) else dim, int, ParallelError, fix=fix
    )
    placed = {names[-1]: placement(dim)}
    if isinstance(batch, Mapping):
        return {k: cut_sequence(v, mesh, dim=dim, placement=placement) for k, v in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(cut_sequence(v, mesh, dim=dim, placement=placement) for v in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(cut_sequence(v, mesh, dim=dim, placement=placement) for v in batch)
    if not isinstance(batch, Tensor) or batch.ndim <= dim or isinstance(batch, TorchDTensor):
        return batch
    return distribute_tensor(batch, mesh, placed, src_data_rank=None)


def _check_placement(placement: object, verb: str = "parallelize_context") -> None:
    why = ""
    try:
        made = placement(1) if callable(placement) else None
    except Exception as error:  # noqa: BLE001  whatever a function of the caller's raises
        made, why = None, f" ({words_of(error)})"
    if not isinstance(made, Partition):
        raise ParallelError(
            f"{verb}: placement={placement!r:.60} makes no partition of a dim{why}\n"
            "  fix: placement=sw.ZigZag, sw.Shard, or a function of the dim such as "
            "lambda dim: sw.BlockCyclic(dim, 4)"
        )


def _check_words(attention: str, output: str) -> None:
    for name, given, known in (("attention", attention, WAYS), ("output", output, _OUTPUTS)):
        if given not in known:
            raise ParallelError(
                f"parallelize_context: {name}={given!r}; there are {', '.join(map(repr, known))}"
            )


def _check_once(module: nn.Module, axis: str) -> None:
    for path, child in module.named_modules():
        scope = find_scope(child)
        if scope is not None:
            raise ParallelError(
                f"parallelize_context: {path or 'the module'} computes on sequences that are cut over "
                f"{scope.axis!r} already; apply it once, to the whole module or to its parts"
                + ("" if scope.axis == axis else f" (asked for now: {axis!r})")
            )


def _placed(
    path: str, parameter: nn.Parameter, mesh: DeviceMesh, source: int | None, *, is_local: bool
) -> nn.Parameter | None:
    """The parameter on one axis more, whole there; None for one spread over these ranks as an expert.

    Args: is_local: of experts that are spread over other ranks: each rank computes with its tokens alone.
    """
    if getattr(parameter, "_fully_sharded", ""):
        raise ParallelError(
            f"{path}: fully_shard manages this parameter; call parallelize_context before parallelize_fsdp"
        )
    whole, axes = (Replicate(),), axis_names(mesh) if mesh.size() > 1 else ()
    if not isinstance(parameter, TorchDTensor):
        value = distribute_tensor(parameter.detach(), mesh, whole, src_data_rank=source)
    else:
        before = as_ours(parameter)
        if is_other_view(path, before.device_mesh, mesh):
            _refuse_distributed(path, before, mesh)
            return None
        if _is_complete(before, mesh):
            return None
        refuse_twice(path, before, axis_names(mesh))
        value = _computing(
            on_more_axes(before, mesh, whole, LocalUse(axes if is_local else (), axes), source)
        )
    new = nn.Parameter(value, requires_grad=parameter.requires_grad)
    carry_over(parameter, new)
    return new


def _refuse_distributed(path: str, x: DTensor, mesh: DeviceMesh) -> None:
    """Raise ParallelError for what computes as a DTensor on a mesh that holds the ranks of this one."""
    if kept_spec(x._spec) is not None:
        raise ParallelError(
            f"{path}: it computes on {axis_names(x.device_mesh)}, over the ranks of {axis_names(mesh)} too, "
            "and one program runs on one mesh\n"
            "  fix: place it on an axis beside the one that cuts sequences, both sliced from one mesh"
        )


def _refuse_summed(path: str, parameter: nn.Parameter, module: nn.Module, mesh: DeviceMesh) -> None:
    """Raise ParallelError for what was replicated over these ranks, as if each read rows of its own.

    In the module they compute terms, and of what stands outside, replicated with it, the whole gradient each.
    """
    placed = as_ours(parameter)  # type: ignore[arg-type]  # a parameter on other axes
    if placed._spec.layout.is_fully_replicated and parameter not in spread_over(module, placed.device_mesh):
        raise ParallelError(
            f"{path}: it is replicated on {axis_names(placed.device_mesh)}, which hold the ranks of "
            f"{axis_names(mesh)}; what stands outside of a module with output='whole' would be summed once "
            "for each of these\n  fix: parallelize_context first, then parallelize_replicate over axes "
            f"without the ranks of {axis_names(mesh)}: mesh['dp']"
        )


def _is_complete(x: DTensor, mesh: DeviceMesh) -> bool:
    """On a mesh of one rank a parameter that computes locally (an expert's) is what it must be."""
    return mesh.size() == 1 and x._spec.use is not None and kept_spec(x._spec) is None


def _computing(x: DTensor) -> DTensor:
    """A parameter that no axis lets compute locally computes as what it is."""
    use = x._spec.use
    if use is not None and not use.axes:
        return wrap(x._local_tensor, spec_of(x._spec.layout, x.device_mesh))
    return x


def _computes_on(parameter: nn.Parameter) -> DeviceMesh:
    spec = as_ours(parameter)._spec  # type: ignore[arg-type]  # a parameter that is a DTensor
    return (kept_spec(spec) or spec).mesh


def _one_home(homes: set[DeviceMesh], mesh: DeviceMesh) -> DeviceMesh:
    if len(homes) > 1:
        said = " and ".join(str(axis_names(home)) for home in homes)
        raise ParallelError(
            f"parallelize_context: some parameters compute on axes {said}: one program runs on one mesh\n"
            "  fix: place every parameter on the tensor-parallel axis first, with placements by name "
            "(sw.distribute_module), which replicates what the plan does not name; torch's styles place some"
        )
    return homes.pop() if homes else mesh


def _place_buffers(module: nn.Module, mesh: DeviceMesh) -> None:
    """Buffers that an earlier strategy distributed come along; plain ones count as replicated inside."""
    made: dict[Any, Any] = {}
    for child in module.modules():
        for name, value in child._buffers.items():
            if not isinstance(value, TorchDTensor) or is_other_view(name, value.device_mesh, mesh):
                continue
            if value not in made:
                made[value] = _computing(on_more_axes(as_ours(value), mesh, (Replicate(),), KEPT, None))
            child._buffers[name] = made[value]
