# torchrun --standalone --nproc-per-node 2 examples/generate.py
"""`generate` of `transformers`, with its cache, on a model whose heads are cut over 2 ranks."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright as sw
from shardwright.context import REGULAR_DOMAIN, DeviceMeshParameters
from shardwright.parallel import parallelize

CONFIG = LlamaConfig(
    vocab_size=101,
    hidden_size=48,
    intermediate_size=90,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=3,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def main() -> None:
    with DeviceMeshParameters(tensor_parallel=2).build() as context:
        context.seed(0)
        with torch.device("meta"):
            model = LlamaForCausalLM(CONFIG)
        parallelize(model, context, {"": ["auto", "replicate"]}).eval()
        torch.manual_seed(0)
        one = LlamaForCausalLM(CONFIG).to(context.device).eval()

        prompt = torch.randint(3, 101, (2, 7), generator=torch.Generator().manual_seed(1)).to(context.device)
        options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
        with torch.no_grad(), sw.spmd(context.mesh_for(REGULAR_DOMAIN)["tp"]):
            made = model.generate(prompt, **options)
        tokens = made.full_tensor() if isinstance(made, sw.DTensor) else made
        assert torch.equal(tokens, one.generate(prompt, **options))
        if context.is_main:
            for row in tokens.tolist():
                print(row[:7], "->", row[7:])


if __name__ == "__main__":
    main()
