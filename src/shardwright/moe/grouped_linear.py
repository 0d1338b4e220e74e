"""One linear map per group of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.nn import functional

from shardwright.comm.traced import goes_in_groups
from shardwright.errors import ConfigError, refuse_no_number
from shardwright.moe.cut_tokens import computes_locally

# Where torch defines its grouped kernel; its shape function, which a traced graph needs, knows bfloat16 only.
_GROUPED_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16,),
    "traced": (torch.bfloat16,),
}
_ALIGNMENT_BYTES = 16
_SHOWN = 8


class GroupedLinear(nn.Module):
    """y_i = x_i W[g(i)], where rows are sorted by group g:  [T, in], int64 [groups] -> [T, out].

    `weight` is [num_experts, in_features, out_features], no bias. It is used in one op together with plain
    rows, so it may be a distributed parameter of which this rank holds some groups: `counts` then has one
    entry per local group. Groups without rows, and no rows at all, are fine: the gradient is zeros, not None.

    Args:
        num_experts: number of groups over all ranks.
        in_features: length of a row of x.
        out_features: length of a row of y.
    """

    def __init__(self, num_experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        refuse_no_sizes(num_experts=num_experts, in_features=in_features, out_features=out_features)
        self.num_experts = num_experts
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(num_experts, in_features, out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew: normal, standard deviation 1/sqrt(in_features)."""
        nn.init.normal_(self.weight, std=self.in_features**-0.5)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return [T, out] for rows [T, in] sorted by group; group g has `counts[g]` rows.

        Raises: ConfigError: counts that are no whole numbers, one for each group; on the CPU also those below
            0, or with another sum than T. An accelerator is not waited for to look at them.
        """
        refuse_no_rows("GroupedLinear", rows, self.in_features)
        refuse_wrong_counts(rows, counts, self.weight)
        rows = as_autocast(rows)
        refuse_other_dtype(rows, self.weight)
        if not self._kernel_takes(rows):
            return _padded_matmul(rows, self.weight, counts)
        offsets = counts.cumsum(0).to(torch.int32)
        # The kernel is not on torch's list for autocast, so its second operand is cast here, beside the rows.
        weight = self.weight.type_as(rows) if _under_autocast(rows) else self.weight
        return _contiguous_gradient(functional.grouped_mm(rows.contiguous(), weight, offs=offsets))

    def _kernel_takes(self, rows: Tensor) -> bool:
        """Return whether torch's grouped kernel is defined here: some rows, its dtypes, whole vectors."""
        sizes = (self.in_features * rows.element_size(), self.out_features * rows.element_size())
        where = "traced" if torch.compiler.is_compiling() else rows.device.type
        return (
            rows.shape[0] > 0
            and rows.dtype in _GROUPED_DTYPES.get(where, ())
            and all(size % _ALIGNMENT_BYTES == 0 for size in sizes)
        )

    def extra_repr(self) -> str:
        """Return the sizes, for `print(module)`."""
        return f"{self.num_experts}, {self.in_features}, {self.out_features}"


def refuse_no_sizes(**sizes: object) -> None:
    """Raise ConfigError for a size of a part that is no whole number above 0."""
    for name, size in sizes.items():
        refuse_no_number(name, size, ConfigError, whole=True)


def refuse_no_rows(name: str, rows: object, length: int) -> None:
    """Raise ConfigError for what are no rows of this length, one after the other or in any dims."""
    if not isinstance(rows, Tensor):
        raise ConfigError(f"{name} takes a tensor of rows [..., {length}], got {type(rows).__name__}")
    if not rows.ndim or rows.shape[-1] != length:
        raise ConfigError(f"{name} takes rows of length {length}, got a tensor of shape {tuple(rows.shape)}")


def as_autocast(x: Tensor) -> Tensor:
    """Return x in the dtype that a matmul under the active autocast would use; x itself without one."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if _under_autocast(x) else x


def refuse_other_dtype(rows: Tensor, weight: Tensor) -> None:
    """Raise ConfigError where a matmul of both would: a sharded unit around spread experts cast the rows."""
    if rows.dtype != weight.dtype and not _under_autocast(rows):
        raise ConfigError(
            f"tokens are {rows.dtype}, and the weight of {tuple(weight.shape)} that they meet is "
            f"{weight.dtype}: the param_dtype of a MixedPrecisionPolicy casts what its unit gathers, which "
            "spread experts and their router are not\n"
            f"  fix: torch.autocast in place of param_dtype; or `.to({rows.dtype})` of the MoELayer's router "
            "and experts before they are spread"
        )


def refuse_wrong_counts(rows: Tensor, counts: object, weight: Tensor) -> None:
    """Raise ConfigError for what does not count the rows of each group: the kernels believe what they get."""
    if not isinstance(counts, Tensor) or not _is_whole(counts.dtype) or counts.ndim != 1:
        got = type(counts).__name__
        if isinstance(counts, Tensor):
            got = f"{counts.dtype} of shape {tuple(counts.shape)}"
        raise ConfigError(
            f"counts say how many rows each group has, in one int64 tensor of shape [groups], got {got}\n"
            "  fix: torch.bincount(group_of_row, minlength=groups)"
        )
    if torch.compiler.is_compiling():
        return
    groups = _groups_of(weight)
    if groups is not None and counts.shape[0] != groups:
        raise ConfigError(
            f"counts say how many rows each group has, and here are {counts.shape[0]} counts for the "
            f"{groups} groups of the weight on this rank\n  fix: one for each of them, 0 where it has no rows"
        )
    # A program that is recorded must not depend on the numbers of its first batch.
    if counts.device.type != "cpu" or goes_in_groups(counts):
        return
    values = counts.tolist()
    if min(values, default=0) < 0 or sum(values) != rows.shape[0]:
        raise ConfigError(
            f"counts {_shown(values)} do not say how the {rows.shape[0]} rows belong to groups: their sum is "
            f"{sum(values)}, the smallest {min(values, default=0)}\n"
            "  fix: torch.bincount(group_of_row, minlength=groups), of the rows that are given"
        )


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _groups_of(weight: Tensor) -> int | None:
    """How many groups a plain tensor of counts is about; None where groups are counted over several ranks."""
    if not isinstance(weight, TorchDTensor):
        return weight.shape[0]
    return weight._local_tensor.shape[0] if computes_locally(weight) else None


def _shown(values: list[int]) -> str:
    more = f", ... {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    return f"[{', '.join(map(str, values[:_SHOWN]))}{more}]"


def _under_autocast(x: Tensor) -> bool:
    """Return whether autocast is on for a tensor; like torch's, it leaves double precision alone."""
    return torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64


def _padded_matmul(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Return the same product by one batched matmul, every group padded to the longest.

    A loop over groups would index the weight, which means something else on a distributed parameter; a
    batched matmul is one op on the rows and the whole weight. Cost: up to groups times the rows in memory,
    and exactly that in a traced graph, whose shapes cannot depend on the counts.
    """
    groups = counts.shape[0]
    longest = rows.shape[0] if torch.compiler.is_compiling() or not groups else int(counts.max())
    starts = counts.cumsum(0) - counts
    group_of_row = torch.repeat_interleave(counts, output_size=rows.shape[0])
    position = torch.arange(rows.shape[0], device=rows.device) - starts[group_of_row]
    slot = group_of_row * longest + position
    padded = rows.new_zeros(groups * longest, rows.shape[1]).index_copy(0, slot, rows)
    product = torch.bmm(padded.view(groups, longest, rows.shape[1]), weight)
    return product.flatten(0, 1).index_select(0, slot)


class _ContiguousGradient(torch.autograd.Function):
    """Identity; its gradient arrives contiguous, for the kernel's backward rejects the stride 0 of `sum`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004 - the signature is torch's
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ARG004 - as above
        return gradient.contiguous()


_contiguous_gradient: Callable[[Tensor], Tensor] = _ContiguousGradient.apply
