"""A plain torch loop: train a small Llama of transformers, widen it, and continue with the widened optimizer.

    python examples/plain_loop.py

The model was not written for mupscale, and the guess of how it grows is wrong: `call` shows that, and `upscale` lets
`discover` find how it grows. For a model of more than 20 million parameters, call `discover` with small models of the
same family, and give `upscale` what `found.resolved(narrow, wide)` adapts to the large ones.
"""

import mupscale  # before transformers, which may look for torchvision

# isort: split
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from mupscale.hf.config import wide_config

VOCABULARY, LENGTH = 61, 24

CONFIG = LlamaConfig(
    hidden_size=32,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCABULARY,
    max_position_embeddings=LENGTH,
)


def batch(generator: torch.Generator, rows: int = 16) -> Tensor:
    """Rows that count upwards, each with its own first number and step."""
    first = torch.randint(VOCABULARY, (rows, 1), generator=generator)
    step = torch.randint(1, 5, (rows, 1), generator=generator)
    return (first + step * torch.arange(LENGTH)) % VOCABULARY


def loss_of(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def train(model: PreTrainedModel, optimizer: torch.optim.Optimizer, steps: int, generator: torch.Generator) -> float:
    """The mean loss of the last ten steps."""
    losses = []
    for _ in range(steps):
        loss = loss_of(model, batch(generator))
        optimizer.zero_grad()
        loss.backward()
        # this norm does not depend on the width
        mupscale.clip_grad_norm_(model, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


def main() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    narrow = AutoModelForCausalLM.from_config(CONFIG)
    optimizer = torch.optim.AdamW(narrow.parameters(), lr=3e-3)
    print(f"hidden size {CONFIG.hidden_size}: loss {train(narrow, optimizer, 100, generator):.4f}")

    wide = AutoModelForCausalLM.from_config(wide_config(CONFIG, 2))
    probe = batch(generator)
    report = mupscale.upscale(
        narrow,
        wide,
        optimizer,
        call=lambda model: model(input_ids=probe, use_cache=False).logits,  # compared before anything is written
        noise=mupscale.AdditiveNoise(0.01),
    )
    print(report)

    with torch.no_grad():
        before, after = loss_of(narrow, probe).item(), loss_of(wide, probe).item()
    print(f"the same batch: loss {before:.4f} before, {after:.4f} after, which is the noise")
    size = wide.config.hidden_size
    print(f"hidden size {size}: loss {train(wide, report.optimizer, 100, generator):.4f}")


if __name__ == "__main__":
    main()
