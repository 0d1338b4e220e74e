"""Text that a trained decoder writes."""

from __future__ import annotations

import torch

from shardwright.train.model import Decoder

PROMPT = b"def "
TEMPERATURE = 0.8
DIVERGED = " [no further: the outputs of the model are not finite, try a smaller --lr]"


def write_text(model: Decoder, length: int, seed: int) -> str:
    """`PROMPT` and `length` sampled bytes after it; bytes that are no UTF-8 are shown as U+FFFD.

    The model must be whole and local. Its window slides: it sees the last seq_len bytes at most.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    text = list(PROMPT)
    with torch.no_grad():
        for _ in range(length):
            window = torch.tensor([text[-model.shape.seq_len :]], device=device)
            chances = (model(window)[0, -1].float() / TEMPERATURE).softmax(-1).cpu()
            if not chances.isfinite().all():  # training has diverged, which the losses show
                return bytes(text).decode("utf-8", errors="replace") + DIVERGED
            text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(text).decode("utf-8", errors="replace")
