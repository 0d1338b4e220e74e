"""What the ranks of a sweep need, imported once before they are forked."""

from transformers import (  # noqa: F401 - imported for its effect
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MixtralForCausalLM,
    Qwen3ForCausalLM,
    T5ForConditionalGeneration,
)

import tests.compositions.ranks  # noqa: F401 - as above
