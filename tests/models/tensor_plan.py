"""Tensor parallel as a model's own plan says it (`base_model_tp_plan`), as placements by parameter name."""

from __future__ import annotations

import fnmatch
import re

import torch
from torch import nn

import shardwright as sw

# Where a model states no plan: the last part of the names of its layers that enter a wide space, or leave it.
_INTO = [
    "q_proj",
    "k_proj",
    "v_proj",
    "q",
    "k",
    "v",
    "query",
    "key",
    "value",
    "fc1",
    "wi",
    "wi_0",
    "wi_1",
    "up_proj",
    "gate_proj",
    "query_key_value",
    "dense_h_to_4h",
    "intermediate.dense",
    "q_lin",
    "k_lin",
    "v_lin",
    "lin1",
    "query_proj",
    "key_proj",
    "value_proj",
    "Wqkv",
    "Wi",
    "fc_in",
    "c_attn",
    "c_fc",
    "in_proj",
]
_OUT_OF = [
    "o_proj",
    "out_proj",
    "o",
    "fc2",
    "wo",
    "down_proj",
    "attention.dense",
    "self_attention.dense",
    "dense_4h_to_h",
    "output.dense",
    "out_lin",
    "lin2",
    "Wo",
    "fc_out",
    "c_proj",
]
_INTO_STYLES = {"colwise", "colwise_gather_output"}
_OUT_OF_STYLES = {"rowwise", "rowwise_split_input"}


def tensor_plan(model: nn.Module, axis: str = "tp") -> dict[str, dict[str, sw.Placement]]:
    """`{name of a parameter: {axis: placement}}`; parameters that are not named stay whole."""
    styles = _styles(model)
    plan: dict[str, dict[str, sw.Placement]] = {}
    for name, parameter in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        style = _style_of(name, styles)
        placement = None if style is None else _placement(style, name, parameter, module)
        if placement is not None:
            plan[name] = {axis: placement}
    assert plan, f"{type(model).__name__} has nothing that a tensor plan names"
    return plan


def _styles(model: nn.Module) -> dict[str, str]:
    stated = dict(getattr(model, "_tp_plan", None) or {})
    if any("layers" in pattern for pattern in stated):
        return stated
    into = {f"*.{name}": "colwise" for name in _INTO}
    return {**{f"*.{name}": "rowwise" for name in _OUT_OF}, **into}


def _style_of(name: str, styles: dict[str, str]) -> str | None:
    """The style of the parameter itself, or of the layer that owns it."""
    for candidate in (name, name.rpartition(".")[0]):
        for pattern, style in styles.items():
            if fnmatch.fnmatchcase(candidate, pattern):
                return style
    return None


def _placement(style: str, name: str, parameter: torch.Tensor, module: nn.Module) -> sw.Placement | None:
    bias = bool(re.search(r"bias(_|$)|_bias$", name))
    turned = type(module).__name__ == "Conv1D" or getattr(module, "is_transposed", False)
    outputs, inputs = (-1, -2) if turned else (-2, -1)
    if bias or parameter.ndim == 1:
        outputs, inputs = -1, None
    match style:
        case "packed_colwise":
            return sw.Interleaved(outputs % parameter.ndim, 2)
        case "embedding_rowwise":
            return sw.Shard(0)
        case _ if style in _INTO_STYLES:
            return sw.Shard(outputs % parameter.ndim)
        case _ if style in _OUT_OF_STYLES and inputs is not None:
            return sw.Shard(inputs % parameter.ndim)
        case _:
            return None
