"""A plain torch loop: train a small Llama of transformers, grow it, and continue with its optimizer.

    python examples/plain_loop.py

The model was not written for mupscale, and the guess of how it grows is wrong: `call` shows that, and `upscale` lets
`discover` find how it grows.
"""

import mupscale  # before transformers, which may look for torchvision

# isort: split
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from mupscale.hf.config import wide_config

CONFIG = LlamaConfig(
    hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=61, max_position_embeddings=24,
)  # fmt: skip


def batch(generator: torch.Generator, rows: int = 16) -> Tensor:
    """Rows that count upwards, each with its own first number and step."""
    first, step = (torch.randint(*ends, (rows, 1), generator=generator) for ends in ((0, 61), (1, 5)))
    return (first + step * torch.arange(24)) % 61


def loss_of(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def train(model: PreTrainedModel, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
    for _ in range(100):
        loss = loss_of(model, batch(generator))
        optimizer.zero_grad()
        loss.backward()
        mupscale.clip_grad_norm_(model, 1.0)  # by a norm that does not depend on the width
        optimizer.step()
    print(f"hidden size {model.config.hidden_size}: loss {loss.item():.4f}")


def main() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    narrow = AutoModelForCausalLM.from_config(CONFIG)
    optimizer = torch.optim.AdamW(narrow.parameters(), lr=3e-3)
    train(narrow, optimizer, generator)
    wide, probe = AutoModelForCausalLM.from_config(wide_config(CONFIG, 2)), batch(generator)
    report = mupscale.upscale(narrow, wide, optimizer, call=lambda model: loss_of(model, probe), noise="auto")
    print(report)  # outputs and gradients of both models were compared before anything was written
    before, after = (loss_of(model, probe).item() for model in (narrow, wide))
    print(f"the same batch: loss {before:.4f} before, {after:.4f} after")
    train(wide, report.optimizer, generator)


if __name__ == "__main__":
    main()
