"""Own code that asks a model of `transformers` for what its layers returned, as what reads images does."""

import copy

import pytest
import torch
from torch import nn

from shardwright.errors import ParallelError
from shardwright.parallel import Pipeline, parallelize_pipeline
from shardwright.testing import rank_mesh
from tests.pipeline.models import HIDDEN, VOCABULARY, hugging_face


class ReadsStates(nn.Module):
    """A head on states of single layers."""

    asked = "output_hidden_states"

    def __init__(self):
        super().__init__()
        self.body = hugging_face("llama", num_hidden_layers=3, attn_implementation="eager").model
        self.head = nn.Linear(HIDDEN, 2)

    def forward(self, ids):
        states = self.body(input_ids=ids, **{self.asked: True})[self.asked.removeprefix("output_")]
        return self.head(states[1] + states[-2].tanh() * states[0])


class ReadsAttentions(ReadsStates):
    asked = "output_attentions"


def _loss(out, _):
    return out.sin().sum()


def _cut(model):
    parallelize_pipeline(model, rank_mesh((2,), ("pp",)), ["body.layers.1"])
    return Pipeline(model, _loss, micro_batches=2)


def _states(ran):
    torch.manual_seed(0)
    model, ids = ReadsStates(), torch.randint(VOCABULARY, (4, 5))
    if ran:  # its layers are hooked before the cut
        model(ids)
    alone = copy.deepcopy(model)
    value = _cut(model).step(ids)
    wanted = _loss(alone(ids), None)
    wanted.backward()
    torch.testing.assert_close(value, wanted.detach())
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (alone.get_parameter(name).grad is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, alone.get_parameter(name).grad, msg=name)


@pytest.mark.parametrize("ran", [False, True])
def test_each_stage_has_the_states_of_all_layers(ranks, ran):
    ranks(2, _states, ran)


def _attentions():
    with pytest.raises(ParallelError, match=r"asks for attentions of LlamaAttention, .* another stage"):
        _cut(ReadsAttentions()).step(torch.randint(VOCABULARY, (4, 5)))


def test_what_is_recorded_inside_of_a_layer_is_refused(ranks):
    ranks(2, _attentions)
