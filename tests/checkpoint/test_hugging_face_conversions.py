"""`maps="auto"`: what `save_pretrained` wrote is loaded by transformers' own conversions, and written so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as t
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.core_model_loading import Chunk, Interleave, PermuteForRope, WeightConverter

from shardwright import Ragged, Shard, distribute_module
from shardwright.checkpoint import load_hf, save_hf
from shardwright.errors import CheckpointError
from shardwright.parallel import parallelize_fsdp
from shardwright.testing import rank_mesh
from tests.tiers import only

Ranks = Callable[..., list[Any]]
SMALL = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 30}
TEXT = SMALL | {"vocab_size": 50, "num_key_value_heads": 2}
VISION = SMALL | {"image_size": 16, "patch_size": 8}
MOE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 7, "head_dim": 8}


# Experts in one tensor, names, prefixes, files that join tensors, files of the model's own tensors. What a
# family needs is imported by the test that has it.
FAMILIES: dict[str, Callable[[], tuple[type[nn.Module], Any]]] = {
    "qwen3 moe": lambda: (t.Qwen3MoeForCausalLM, t.Qwen3MoeConfig(**TEXT, **MOE)),
    "mixtral": lambda: (t.MixtralForCausalLM, t.MixtralConfig(**TEXT, num_local_experts=3)),
    "llava": lambda: (
        t.LlavaForConditionalGeneration,
        t.LlavaConfig(
            text_config=t.LlamaConfig(**TEXT),
            vision_config=t.CLIPVisionConfig(**VISION),
            image_token_index=49,
        ),
    ),
    "swin": lambda: (
        t.SwinModel,
        t.SwinConfig(embed_dim=8, depths=[1, 1], num_heads=[2, 2], image_size=32, window_size=4),
    ),
    "vit": lambda: (t.ViTModel, t.ViTConfig(**VISION)),
    "nomic bert": lambda: (t.NomicBertModel, t.NomicBertConfig(**SMALL, vocab_size=50)),
    "llama": lambda: (t.LlamaForCausalLM, t.LlamaConfig(**TEXT)),
}


def made(family: str, seed: int) -> nn.Module:
    kind, config = FAMILIES[family]()
    torch.manual_seed(seed)
    model: nn.Module = kind(config)
    return model


def are_equal(model: nn.Module, wanted: nn.Module) -> None:
    for name, one in model.state_dict().items():
        whole = one.full_tensor() if hasattr(one, "full_tensor") else one
        assert torch.equal(whole, wanted.state_dict()[name]), name


def there_and_back(folder: Path, family: str) -> None:
    warnings.simplefilter("ignore")
    wanted, model = made(family, 0), made(family, 1)
    if dist.get_rank() == 0:
        wanted.save_pretrained(folder / "in")
    dist.barrier()
    cut = {name: {"tp": Shard(p.ndim - 1)} for name, p in model.named_parameters() if p.ndim > 1}
    distribute_module(model, rank_mesh((2,), ("tp",)), cut)
    assert load_hf(model, folder / "in", maps="auto").unused == ()
    are_equal(model, wanted)
    save_hf(model, folder / "out", maps="auto")


@pytest.mark.parametrize("family", only(["qwen3 moe", "llava", "nomic bert"], FAMILIES))
def test_files_of_transformers_are_read_and_written(ranks: Ranks, tmp_path: Path, family: str) -> None:
    ranks(2, there_and_back, tmp_path, family)
    first, second = (load_file(tmp_path / which / "model.safetensors") for which in ("in", "out"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    kind, config = FAMILIES[family]()
    config.save_pretrained(tmp_path / "out")
    again, wanted = kind.from_pretrained(tmp_path / "out").state_dict(), made(family, 0).state_dict()
    assert all(torch.equal(again[name], wanted[name]) for name in wanted)


def of_a_sharded_model(folder: Path) -> tuple[str, ...]:
    """A class whose conversions go by its name, which `fully_shard` exchanges."""
    torch.manual_seed(1)
    model = t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**SMALL, vocab_size=50))
    parallelize_fsdp(model, rank_mesh((2,), ("dp",)))
    unused = load_hf(model, folder / "in", maps="auto").unused
    save_hf(model, folder / "out", maps="auto")
    return unused


def test_sharded_models_have_the_conversions_of_their_classes(ranks: Ranks, tmp_path: Path) -> None:
    t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**SMALL, vocab_size=50)).save_pretrained(tmp_path / "in")
    assert ranks(2, of_a_sharded_model, tmp_path) == [(), ()]
    first, second = (load_file(tmp_path / which / "model.safetensors") for which in ("in", "out"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_compiled_model_has_the_conversions_of_what_it_wraps(tmp_path: Path) -> None:
    wanted, model = made("llava", 0), made("llava", 1)
    wanted.save_pretrained(tmp_path / "in")
    assert load_hf(torch.compile(model), tmp_path / "in", maps="auto").unused == ()
    save_hf(torch.compile(wanted), tmp_path / "out", maps="auto")
    first, second = (load_file(tmp_path / which / "model.safetensors") for which in ("in", "out"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def with_a_head() -> nn.Module:
    torch.manual_seed(2)
    return t.Qwen3MoeForSequenceClassification(t.Qwen3MoeConfig(**TEXT, **MOE, num_labels=5))


def equals(model: nn.Module, other: nn.Module) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(one, theirs[name]) for name, one in model.state_dict().items())


def test_a_base_model_is_read_from_files_with_a_head(tmp_path: Path) -> None:
    """Other prefixes, and experts by number under them."""
    wanted = made("qwen3 moe", 0)
    wanted.save_pretrained(tmp_path)
    base = t.Qwen3MoeModel(t.Qwen3MoeConfig(**TEXT, **MOE))
    assert load_hf(base, tmp_path, maps="auto").unused == ("lm_head.weight",)
    assert equals(base, wanted.model)


def test_a_head_that_no_file_has_is_refused_and_its_base_loaded(tmp_path: Path) -> None:
    made("qwen3 moe", 0).model.save_pretrained(tmp_path)
    model = with_a_head()
    word = r"score\.weight is in no file; all of 'model' is there: load_hf\(model\.model, \.\.\.\) loads that"
    with pytest.raises(CheckpointError, match=word):
        load_hf(model, tmp_path, maps="auto")
    load_hf(model.model, tmp_path, maps="auto")
    assert equals(model.model, made("qwen3 moe", 0).model)


def test_files_of_older_releases_are_read(tmp_path: Path) -> None:
    """`gamma` and `beta` of the first files, without the prefix; a tied head; a mask that nobody asks for."""
    config = t.BertConfig(**SMALL, vocab_size=50)
    wanted = t.BertForMaskedLM(config)
    held = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): one
        for name, one in wanted.state_dict().items()
        if not name.startswith("cls.predictions.decoder")
    }
    held = {name.removeprefix("bert."): one.clone() for name, one in held.items()} | {"mask": torch.ones(2)}
    save_file(held, tmp_path / "model.safetensors")
    model = t.BertForMaskedLM(config)
    assert load_hf(model, tmp_path, maps="auto").unused == ("mask",)
    assert equals(model, wanted)


def test_what_a_class_says_files_may_lack_stays_as_it_is(tmp_path: Path) -> None:
    """A buffer of zeros that only the model with a head has."""
    config = t.BartConfig(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=20, decoder_ffn_dim=20
    )
    wanted, model = t.BartModel(config), t.BartForConditionalGeneration(config)
    wanted.save_pretrained(tmp_path)
    load_hf(model, tmp_path, maps="auto")
    assert equals(model.model, wanted)
    assert not model.final_logits_bias.any()


def test_a_tied_weight_is_written_by_the_name_that_the_base_model_knows(tmp_path: Path) -> None:
    """The head of this model comes before its embedding."""
    config = t.CamembertConfig(**SMALL, vocab_size=50, is_decoder=True)
    wanted = t.CamembertForCausalLM(config)
    save_hf(wanted, tmp_path, maps="auto")
    wanted.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors").keys() == theirs.keys()


def joining(seed: int, *ops: Any) -> nn.Module:
    """A model in whose files both gates are one tensor."""
    model = made("llama", seed)
    names = [f"mlp.{name}_proj.weight" for name in ("gate", "up")]
    model._weight_conversions = [WeightConverter(["mlp.gate_up.weight"], names, [*ops, Chunk()])]
    return model


def test_a_tensor_of_the_files_is_joined_of_tensors_of_the_model(tmp_path: Path) -> None:
    wanted, model = joining(0), joining(1)
    wanted.save_pretrained(tmp_path / "in")
    assert load_hf(model, tmp_path / "in", maps="auto").unused == ()
    assert equals(model, wanted)
    save_hf(model, tmp_path / "out", maps="auto", max_shard_size=2000)
    whole = torch.cat([getattr(wanted.model.layers[0].mlp, name).weight for name in ("gate_proj", "up_proj")])
    found = {k: v for file in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(file).items()}
    assert torch.equal(found["model.layers.0.mlp.gate_up.weight"], whole)


def rotary(seed: int, *ops: Any) -> nn.Module:
    """A model whose files hold queries, keys and values in one, the first two in pairs for rotary halves."""
    torch.manual_seed(seed)
    model = t.LlamaForCausalLM(t.LlamaConfig(**TEXT | {"hidden_size": 32, "num_key_value_heads": 4}))
    names = [f"self_attn.{name}_proj.weight" for name in "qkv"]
    model._weight_conversions = [WeightConverter(["self_attn.qkv.weight"], names, [*ops])]
    return model


REORDERED: dict[str, Callable[[int], nn.Module]] = {
    "rows in turn": lambda seed: joining(seed, Interleave()),
    "rows in turn, the other way": lambda seed: joining(seed, Interleave(inverse=True)),
    "columns in turn": lambda seed: joining(seed, Interleave(dim=1)),
    "rotary halves": lambda seed: rotary(seed, Chunk(), PermuteForRope(permute_layer_names=["q_", "k_"])),
}


def reordered(folder: Path, which: str) -> None:
    """Each rank has some columns, or some rows that begin in the middle of a pair."""
    wanted = REORDERED[which](0)
    if dist.get_rank() == 0:
        wanted.save_pretrained(folder / "in")
    dist.barrier()
    for dim in (0, 1):
        model = REORDERED[which](1)
        cut = {name: {"tp": Ragged((1, 2), (dim,))} for name, p in model.named_parameters() if p.ndim > 1}
        distribute_module(model, rank_mesh((2,), ("tp",)), cut)
        assert load_hf(model, folder / "in", maps="auto").unused == ()
        are_equal(model, wanted)
    save_hf(model, folder / "out", maps="auto")


@pytest.mark.parametrize("which", only(["rows in turn", "rotary halves"], REORDERED))
def test_what_the_files_reorder_is_read_and_written(ranks: Ranks, tmp_path: Path, which: str) -> None:
    ranks(2, reordered, tmp_path, which)
    first, second = (load_file(tmp_path / there / "model.safetensors") for there in ("in", "out"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    own = REORDERED[which](0).state_dict()
    assert any("qkv" in name or "gate_up" in name for name in first.keys() - own.keys())


class Turned(Interleave):
    def convert(self, *args: Any, **kwargs: Any) -> Any:
        return {name: one.flip(0) for name, one in super().convert(*args, **kwargs).items()}

    @property
    def reverse_op(self) -> Any:
        return self


def test_what_boxes_do_not_make_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"mlp\.gate_up\.weight of the files is not made of boxes"):
        save_hf(joining(0, Turned()), tmp_path / "c", maps="auto")


@pytest.mark.parametrize("wrong", ["Auto", "hf"])
def test_another_word_is_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(CheckpointError, match="is no map"):
        save_hf(made("llama", 0), tmp_path / "c", maps=wrong)


def test_a_model_of_ones_own_has_no_conversions(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match='maps="auto": Linear is no model of transformers'):
        save_hf(nn.Linear(2, 2), tmp_path / "c", maps="auto")
