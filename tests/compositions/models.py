"""The models of the table: how each is built, cut over an axis by name and by style, and made tricky."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

import shardwright as sw
from shardwright.testing.rank_device import here
from tests.compositions import huggingface, strangers
from tests.compositions.decoder import VOCAB, Decoder, ExpertStack

Plan = Mapping[str, sw.Placement]
_ROWS, _COLUMNS = sw.Shard(0), sw.Shard(1)


@dataclass(frozen=True)
class Model:
    """One family: a builder, and what strategies must be told about it.

    Args:
        build: `build(tied=...)`, with random weights.
        by_name: parameter pattern -> placement on the tensor-parallel axis; {} where nothing is cut.
        by_style: submodule pattern -> "columns", "rows" or "heads" (a norm of each head): torch's
            styles; {} where torch has none.
        blocks: the path of its list of blocks.
        shared: a submodule of a block that a second block may use too.
        experts: whether it has `MoELayer`s.
        no_rows: whether plain torch takes a batch of no rows.
        sequence: whether the plan that also cuts tokens between the matrices (`SEQUENCE`) fits.
        words: whether it brings a plan of words.
    """

    build: Callable[..., nn.Module]
    by_name: Plan
    by_style: Mapping[str, str]
    blocks: tuple[str, ...]
    shared: str
    experts: bool = False
    no_rows: bool = False
    vocab: int = huggingface.VOCAB
    sequence: bool = False
    words: bool = False

    def styles(self) -> dict[str, ParallelStyle]:
        """Torch's styles, made anew: one object serves one module."""
        made: dict[str, Callable[[], ParallelStyle]] = {
            "columns": ColwiseParallel,
            "rows": RowwiseParallel,
            "heads": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
        }
        return {pattern: made[kind]() for pattern, kind in self.by_style.items()}


_OURS: Plan = {
    "*.q.weight": _ROWS, "*.k.weight": _ROWS, "*.v.weight": _ROWS, "*.o.weight": _COLUMNS,
    "*.mlp.gate.*": _ROWS, "*.mlp.up.*": _ROWS, "*.mlp.down.weight": _COLUMNS,
    "embedding.weight": _ROWS, "head.weight": _ROWS,
}  # fmt: skip
_OUR_ATTENTION: Plan = {pattern: _OURS[pattern] for pattern in list(_OURS)[:4]}
_OUR_HEADS = {f"blocks.*.attention.{name}": "columns" for name in "qkv"} | {"blocks.*.attention.o": "rows"}
_OUR_MLP = {"blocks.*.mlp.gate": "columns", "blocks.*.mlp.up": "columns", "blocks.*.mlp.down": "rows"}

# Sequence parallelism: norms see some tokens of each row, attention and MLP gather them and leave a part.
_SOME, _WHOLE = sw.Shard(1), sw.Replicate()
SEQUENCE: dict[str, Callable[[], ParallelStyle]] = {
    "embedding": lambda: RowwiseParallel(input_layouts=_WHOLE, output_layouts=_SOME),
    "blocks.*.*_norm": SequenceParallel,
    "blocks.*.attention": lambda: PrepareModuleInput(input_layouts=_SOME, desired_input_layouts=_WHOLE),
    "blocks.*.attention.[qkv]": ColwiseParallel,
    "blocks.*.attention.o": lambda: RowwiseParallel(output_layouts=_SOME),
    "blocks.*.mlp": lambda: PrepareModuleInput(input_layouts=_SOME, desired_input_layouts=_WHOLE),
    "blocks.*.mlp.gate": ColwiseParallel,
    "blocks.*.mlp.up": ColwiseParallel,
    "blocks.*.mlp.down": lambda: RowwiseParallel(output_layouts=_SOME),
    "norm": SequenceParallel,
    "head": lambda: ColwiseParallel(input_layouts=_SOME, output_layouts=_WHOLE),
}

_LLAMA_HEADS: Plan = {
    "*.q_proj.weight": _ROWS, "*.k_proj.weight": _ROWS, "*.v_proj.weight": _ROWS, "*.o_proj.weight": _COLUMNS,
    "*.embed_tokens.weight": _ROWS, "*.lm_head.weight": _ROWS,
}  # fmt: skip
_LLAMA: Plan = _LLAMA_HEADS | {
    "*.gate_proj.weight": _ROWS, "*.up_proj.weight": _ROWS, "*.down_proj.weight": _COLUMNS,
}  # fmt: skip
_LAYERS = "inner.model.layers"
_LLAMA_HEAD_STYLES = {f"{_LAYERS}.*.self_attn.{name}_proj": "columns" for name in "qkv"} | {
    f"{_LAYERS}.*.self_attn.o_proj": "rows"
}
_LLAMA_STYLES = _LLAMA_HEAD_STYLES | {
    f"{_LAYERS}.*.mlp.gate_proj": "columns",
    f"{_LAYERS}.*.mlp.up_proj": "columns",
    f"{_LAYERS}.*.mlp.down_proj": "rows",
}
_GPT2: Plan = {
    "*.attn.c_attn.weight": sw.Interleaved(1, 3), "*.attn.c_attn.bias": sw.Interleaved(0, 3),
    "*.attn.c_proj.weight": _ROWS, "*.mlp.c_fc.weight": _COLUMNS, "*.mlp.c_fc.bias": _ROWS,
    "*.mlp.c_proj.weight": _ROWS, "*.wte.weight": _ROWS, "*.lm_head.weight": _ROWS,
}  # fmt: skip
_T5: Plan = {
    "*.q.weight": _ROWS, "*.k.weight": _ROWS, "*.v.weight": _ROWS, "*.o.weight": _COLUMNS,
    "*.wi_?.weight": _ROWS, "*.wo.weight": _COLUMNS, "*.relative_attention_bias.weight": _COLUMNS,
    "*.shared.weight": _ROWS, "*.embed_tokens.weight": _ROWS, "*.lm_head.weight": _ROWS,
}  # fmt: skip
# T5 hands a position bias of all heads to its attention, which torch's styles would leave with some of them.
_T5_STYLES = {
    f"inner.{side}.block.*.layer.{index}.DenseReluDense.{name}": kind
    for side, index in (("encoder", 1), ("decoder", 2))
    for name, kind in (("wi_0", "columns"), ("wi_1", "columns"), ("wo", "rows"))
}


def _other(made: Callable[..., nn.Module], plan: Plan, shared: str) -> Model:
    plan = dict(plan) | {"embedding.weight": _ROWS, "head.weight": _ROWS}
    return Model(made, plan, {}, ("blocks",), shared, no_rows=True, vocab=VOCAB)


MODELS: dict[str, Model] = {
    "decoder": Model(
        Decoder, _OURS, _OUR_HEADS | _OUR_MLP, ("blocks",), "mlp", no_rows=True, vocab=VOCAB, sequence=True
    ),
    "decoder with biases": Model(
        lambda *, tied: Decoder(bias=True, tied=tied),
        _OURS, _OUR_HEADS | _OUR_MLP, ("blocks",), "mlp", no_rows=True, vocab=VOCAB, sequence=True,
    ),
    "decoder with experts": Model(
        lambda *, tied: Decoder(experts=True, tied=tied),
        _OUR_ATTENTION, _OUR_HEADS, ("blocks",), "mlp", experts=True, no_rows=True, vocab=VOCAB,
    ),
    "stack of experts": Model(
        ExpertStack,
        {"dense.*": _ROWS, "head.*": _ROWS}, {}, ("layers",), "", experts=True, no_rows=True, vocab=VOCAB,
    ),
    "encoder": _other(
        strangers.encoder,
        {"*.in_proj_*": sw.Interleaved(0, 3), "*.out_proj.weight": _COLUMNS, "*.linear1.*": _ROWS,
         "*.linear2.weight": _COLUMNS},
        "linear1",
    ),
    "convolutions": _other(
        strangers.convolutions,
        {"*.wide.*": _ROWS, "*.norm.*": _ROWS, "*.each.*": _ROWS, "*.back.weight": _ROWS}, "each",
    ),
    "lstm": _other(strangers.lstm, {}, "cell"),
    "gru": _other(strangers.gru, {}, "cell"),
    "arithmetic": _other(
        strangers.arithmetic, {"*.base.weight": _ROWS, "*.left.*": _ROWS, "*.high": _COLUMNS, "*.low": _ROWS},
        "base",
    ),
    "llama": Model(huggingface.llama, _LLAMA, _LLAMA_STYLES, (_LAYERS,), "mlp", words=True),
    "qwen3": Model(
        huggingface.qwen3, _LLAMA, _LLAMA_STYLES | {f"{_LAYERS}.*.self_attn.?_norm": "heads"},
        (_LAYERS,), "mlp", words=True,
    ),
    "gpt2": Model(huggingface.gpt2, _GPT2, {}, ("inner.transformer.h",), "mlp"),
    "mixtral": Model(
        huggingface.mixtral,
        _LLAMA_HEADS | {"*.gate_up_proj": sw.Interleaved(1, 2), "*.experts.down_proj": sw.Shard(2)},
        _LLAMA_HEAD_STYLES, (_LAYERS,), "mlp", words=True,
    ),
    "mixtral of our layers": Model(
        huggingface.mixtral_of_our_layers, _LLAMA_HEADS, _LLAMA_HEAD_STYLES, (_LAYERS,), "mlp", experts=True
    ),
    "t5": Model(
        huggingface.t5, _T5, _T5_STYLES,
        ("inner.encoder.block", "inner.decoder.block"), "layer.0.SelfAttention.o",
    ),
}  # fmt: skip


def build(name: str, *, tied: bool, frozen: bool, twice: bool, checkpointing: str, dtype: str) -> nn.Module:
    """The model of that name, the same on every rank and in the parent's process."""
    torch.manual_seed(0)
    huggingface.quiet()
    family = MODELS[name]
    with torch.device("cpu"):  # whose generator draws the same for everybody
        model = family.build(tied=tied).train()
    if twice:
        _share(model, family)
    if frozen:
        _freeze(model)
    if checkpointing:
        _checkpoint(model, checkpointing)
    return model.to(here(), getattr(torch, dtype))


def blocks_of(model: nn.Module, name: str) -> list[nn.Module]:
    """Its blocks, first to last."""
    return [block for path in MODELS[name].blocks for block in model.get_submodule(path)]


def _share(model: nn.Module, family: Model) -> None:
    """The last block uses the submodule of the first too; without one, the first block is used again."""
    first, *_, last = [block for path in family.blocks[:1] for block in model.get_submodule(path)]
    if family.shared:
        path, _, leaf = family.shared.rpartition(".")
        setattr(last.get_submodule(path), leaf, first.get_submodule(family.shared))
    else:
        model.get_submodule(family.blocks[0]).append(first)


def _freeze(model: nn.Module) -> None:
    """Every fourth parameter, norms and cut matrices among them."""
    for index, parameter in enumerate(model.parameters()):
        if index % 4 == 1:
            parameter.requires_grad_(requires_grad=False)


def _checkpoint(model: nn.Module, kind: str) -> None:
    if isinstance(model, huggingface.Logits):
        model.inner.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
    else:
        model.checkpointing = kind
