# torchrun --standalone --nproc-per-node 4 examples/llama.py
"""A Llama of `transformers`, unmodified, on 2 ranks of FSDP x 2 ranks of tensor and sequence parallelism."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright as sw
from shardwright.context import BATCH_DOMAIN, REGULAR_DOMAIN, DeviceMeshParameters
from shardwright.grads import GradientSynchronizer, clip_grad_norm_, global_mean
from shardwright.parallel import parallelize

CONFIG = LlamaConfig(
    vocab_size=101,
    hidden_size=48,
    intermediate_size=90,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=3,
    max_position_embeddings=64,
)
TABLE = {"": ["auto", "sequence", "fsdp"], "model.layers.*": "fsdp"}
STEPS = 3


def main() -> None:
    with DeviceMeshParameters(data_parallel_shard=2, tensor_parallel=2).build() as context:
        context.seed(0)
        with torch.device("meta"):
            model = LlamaForCausalLM(CONFIG)
        parallelize(model, context, TABLE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        synchronizer = GradientSynchronizer(model)
        data = context.mesh_for(BATCH_DOMAIN)["dp"]
        tp = context.mesh_for(REGULAR_DOMAIN)["tp"]

        torch.manual_seed(0)
        one = LlamaForCausalLM(CONFIG).to(context.device)
        beside = torch.optim.AdamW(one.parameters(), lr=1e-3)
        for step in range(STEPS):
            tokens = torch.randint(101, (4, 17), generator=torch.Generator().manual_seed(step))
            tokens = tokens.to(context.device)
            mine = tokens[data.get_local_rank() :: data.size()]
            rows = mine.shape[0]
            with sw.spmd(tp):
                mean = model(input_ids=mine, labels=mine).loss
                loss = global_mean(mean * rows, rows, data)
                loss.backward()
            synchronizer.synchronize()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

            expected = one(input_ids=tokens, labels=tokens).loss
            expected.backward()
            torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            beside.step()
            beside.zero_grad()
            torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
            if context.is_main:
                print(f"step {step}: loss {loss:.6f}, one device {expected:.6f}")
        if context.is_main:
            print("q_proj", sw.layout_of(model.model.layers[0].self_attn.q_proj.weight))


if __name__ == "__main__":
    main()
