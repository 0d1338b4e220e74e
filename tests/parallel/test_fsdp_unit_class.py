"""What libraries know of a class by how it reads holds for the class of a sharded unit too."""

import copy

import torch
from transformers import LlamaConfig, LlamaModel

from shardwright.parallel import parallelize_fsdp
from shardwright.testing.meshes import rank_mesh

CONFIG = LlamaConfig(
    vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4
)


def _sum_of_states(model, ids):
    states = model(input_ids=ids, output_hidden_states=True).hidden_states
    assert len(states) == 3
    return sum(state.sin().sum() for state in states)


def _recorded():
    mesh = rank_mesh((2,), ("dp",))
    torch.manual_seed(0)
    model, ids = LlamaModel(CONFIG), torch.randint(20, (2, 5))
    alone = copy.deepcopy(model)
    own = str(type(model))
    parallelize_fsdp(model.layers[0], mesh)
    parallelize_fsdp(model, mesh)
    assert str(type(model)) == own
    assert type(model).__name__ == "FSDPLlamaModel"
    _sum_of_states(model, ids[mesh.get_local_rank()][None]).backward()
    _sum_of_states(alone, ids).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad.full_tensor(), alone.get_parameter(name).grad, rtol=1e-4, atol=1e-4, msg=name
        )


def test_a_unit_records_what_its_model_records(ranks):
    ranks(2, _recorded)
