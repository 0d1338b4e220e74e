"""A tiny model of any architecture: the sizes that its default configuration has are made small."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.models.configs import spread

TOKENS, MOST = 48, 2_000_000
DRAWING = {"phimoe": "its routers draw random numbers, others in each run"}
# By what sizes are called in the configurations.
_SIZES: dict[int, str] = {
    TOKENS: "vocab_size vocab_size_per_layer_input",
    64: "max_position_embeddings n_positions n_ctx max_seq_len",
    24: "intermediate_size n_inner ffn_dim d_ff ffn_hidden_size decoder_ffn_dim encoder_ffn_dim",
    16: "hidden_size n_embd d_model dim emb_dim lru_width",
    12: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size",
    8: "head_dim q_lora_rank kv_lora_rank qk_nope_head_dim v_head_dim block_size mamba_d_head d_kv "
    "linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "attention_heads num_experts n_routed_experts num_local_experts moe_num_experts qk_rope_head_dim "
    "sliding_window mamba_d_state state_size mamba_n_heads linear_num_value_heads linear_num_heads "
    "rotary_dim index_topk attention_window_size hidden_size_per_layer_input",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_key_value_heads "
    "num_experts_per_tok num_experts_per_token moe_k moe_topk moe_top_k linear_num_key_heads index_n_heads "
    "eos_token_id",
    1: "n_group topk_group first_k_dense_replace mamba_n_groups moe_num_shared_experts n_shared_experts "
    "bos_token_id",
    0: "pad_token_id",
}
_TINY = {name: size for size, names in _SIZES.items() for name in names.split()}


def kinds() -> list[str]:
    """The causal models of this release, those of texts."""
    others = ("vision", "audio", "_vl", "_omni", "image")
    return [
        kind
        for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if kind not in DRAWING and not any(word in kind for word in others)
    ]


def build(kind: str) -> nn.Module:
    """The same random weights each time. Raises: whatever the architecture makes of such sizes."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(_config(kind))
    if sum(p.numel() for p in model.parameters()) > MOST:
        raise ValueError(f"{kind} stays large")
    torch.manual_seed(0)
    return spread(transformers.AutoModelForCausalLM.from_config(_config(kind)).float()).train()


def brings_a_plan(model: nn.Module) -> bool:
    """Has it words of tensor parallelism?"""
    plan: Any = getattr(model, "_tp_plan", None) or getattr(model.config, "base_model_tp_plan", None)
    return bool(plan)


def batch(length: int, rows: int = 2) -> dict[str, torch.Tensor]:
    """Token ids, and the same as labels."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, TOKENS, (rows, length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def _config(kind: str) -> Any:
    default = CONFIG_MAPPING[kind]()
    sizes: dict[str, Any] = {
        name: size
        for name, size in _TINY.items()
        if not isinstance(getattr(type(default), name, None), property) and _is_set(default, name)
    }
    if "kv_lora_rank" in sizes:  # all its dims of heads are called otherwise, and keys are as many as heads
        heads = dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 4)
        sizes |= {name: size for name, size in {**heads, "num_key_value_heads": 4}.items() if name in sizes}
    types = None if _is_property(default, "layer_types") else getattr(default, "layer_types", None)
    if types and "num_hidden_layers" in sizes:
        each = list(dict.fromkeys(types))
        sizes["num_hidden_layers"] = max(2, len(each))
        sizes["layer_types"] = (each * 2)[: sizes["num_hidden_layers"]]
    config = type(default)(**sizes)
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def _is_property(config: Any, name: str) -> bool:
    return isinstance(getattr(type(config), name, None), property)


def _is_set(config: Any, name: str) -> bool:
    if name.endswith("token_id"):
        return hasattr(config, name)
    return isinstance(getattr(config, name, None), int | float)
