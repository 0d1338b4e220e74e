"""Models that were made on the meta device: placed, given memory, and the weights of one device."""

import pytest
import torch
import transformers
from torch import nn

from shardwright.errors import ParallelError
from shardwright.moe import MoELayer
from shardwright.parallel import parallelize
from tests.tiers import only

from .worlds import context


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(12, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.wide, self.bn = nn.Conv1d(8, 6, 3), nn.BatchNorm1d(6)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight


def _experts():
    return nn.Sequential(nn.Linear(8, 8), MoELayer(8, 16, 4, 2, shared_expert_dim=12), nn.LSTM(8, 4))


def _hf(name, **given):
    small = {"hidden_size": 24, "intermediate_size": 30, "num_hidden_layers": 2, "num_attention_heads": 6}
    if name == "llama":
        config = transformers.LlamaConfig(vocab_size=41, num_key_value_heads=3, **small, **given)
        return transformers.LlamaForCausalLM(config)
    if name == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=41, n_embd=24, n_layer=2, n_head=4, n_positions=16)
        )
    if name == "t5":
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=41, d_model=24, d_kv=6, d_ff=30, num_layers=2, num_heads=4)
        )
    if name == "mixtral":
        config = transformers.MixtralConfig(
            vocab_size=41, num_key_value_heads=3, num_local_experts=4, **small
        )
        return transformers.MixtralForCausalLM(config)
    config = transformers.BertConfig(vocab_size=41, max_position_embeddings=16, **small)
    return transformers.BertForMaskedLM(config)


MODELS = {
    "tied": (_Tied, {}),
    "experts": (_experts, {}),
    "llama": (_hf, {"name": "llama"}),
    "tied llama": (_hf, {"name": "llama", "tie_word_embeddings": True}),
    "gpt2": (_hf, {"name": "gpt2"}),
    "t5": (_hf, {"name": "t5"}),
    "mixtral": (_hf, {"name": "mixtral"}),
    "bert": (_hf, {"name": "bert"}),
}
FSDP = {"data_parallel_shard": 2}
TABLES = {
    **{name: (FSDP, {"": "fsdp"}) for name in MODELS},
    "experts": ({"data_parallel_shard": 2, "expert_parallel": 2}, {"": ["expert", "fsdp"]}),
    "tied llama": ({"tensor_parallel": 2}, {"": ["auto", "sequence", "replicate"]}),
    "mixtral": ({"tensor_parallel": 2}, {"": ["auto", "replicate"]}),
    "gpt2": ({"data_parallel_replicate": 2}, {"": "replicate"}),
}


OWN_DRAWS = ("gpt2",)  # its Conv1D draws in the constructor, and has no reset_parameters


def _one_device(name):
    """The weights of a constructor; of one that draws for itself, those of its parts' own methods."""
    make, given = MODELS[name]
    torch.manual_seed(8)
    one = make(**given)
    if name not in OWN_DRAWS:
        return one
    for module in one.modules():
        module._is_hf_initialized = False
    for tensor in (*one.parameters(), *one.buffers()):
        tensor._is_hf_initialized = False
    torch.manual_seed(8)
    embedded = one.transformer.wte.weight
    for module in (one.transformer.wte, one.transformer.wpe):
        module.reset_parameters()
    for block in one.transformer.h:
        block.ln_1.reset_parameters(), block.ln_2.reset_parameters()
    one.transformer.initialize_weights()
    one.lm_head.weight = nn.Parameter(torch.empty_like(embedded))  # untied, as while it is made
    one.lm_head.reset_parameters()
    one.initialize_weights()
    one.lm_head.weight = embedded
    return one


def _weights(name):
    make, given = MODELS[name]
    one = _one_device(name)
    after = torch.get_rng_state()
    degrees, plan = TABLES[name]
    at = context(**degrees)
    with torch.device("meta"):
        model = make(**given)
    names = list(model.state_dict())
    at.seed(8)
    parallelize(model, at, plan, report=None)
    assert torch.equal(torch.get_rng_state(), after)  # what is drawn next is equal too
    assert list(model.state_dict()) == names
    wrong = []
    for key, p in model.named_parameters():
        assert p.device.type == "cpu"
        if not torch.equal(p.full_tensor(), one.get_parameter(key)):
            wrong.append(key)
    for key, value in model.named_buffers():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        if not torch.equal(whole, one.get_buffer(key)):
            wrong.append(key)
    return wrong


@pytest.mark.parametrize("name", only(["tied", "experts", "tied llama"], MODELS))
def test_a_model_without_memory_gets_the_weights_of_one_device(ranks, name):
    assert ranks(2, _weights, name) == [[], []]


class _Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(3))
        self.register_buffer("places", torch.arange(4.0))
        self.inner = nn.Linear(3, 3)


def _nobody_starts():
    at = context(**FSDP)
    with torch.device("meta"):
        model = _Own()
    with pytest.raises(ParallelError) as caught:
        parallelize(model, at, "fsdp", report=None)
    assert all(x.is_meta for x in (*model.parameters(), *model.buffers()))

    def init(module):
        nn.init.constant_(module.gain, 2.0)
        module.places.copy_(torch.arange(4.0))
        module.inner.reset_parameters()

    torch.manual_seed(0)
    parallelize(model, at, "fsdp", init=init, report=None)
    torch.manual_seed(0)
    wanted = nn.Linear(3, 3)
    assert torch.equal(model.inner.weight.full_tensor(), wanted.weight)
    assert model.gain.full_tensor().tolist() == [2.0] * 3
    assert model.places.tolist() == [0.0, 1.0, 2.0, 3.0]
    return str(caught.value)


def test_what_nobody_gives_a_value_is_named_and_a_function_may_give_it(ranks):
    for text in ranks(2, _nobody_starts):
        assert "nothing gives a value to gain, places" in text


def _other_states():
    at = context(**FSDP)
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    torch.manual_seed(at.rank)
    with pytest.raises(ParallelError, match="generators of ranks 0 and 1 are in other states"):
        parallelize(model, at, "fsdp", report=None)
    half = nn.Sequential(nn.Linear(2, 2), model)
    with pytest.raises(ParallelError, match=r"has values, and .* is on the meta device"):
        parallelize(half, at, "fsdp", report=None)


def test_generators_in_other_states_and_models_half_made_are_refused(ranks):
    ranks(2, _other_states)
