"""transformers.Trainer: train a small GPT-2, grow it, and continue in a second Trainer with its optimizer.

    pip install accelerate                       # transformers.Trainer needs it
    python examples/transformers_trainer.py

docs/hf.md says what to note about resuming, clipping and gains with a Trainer.
"""

import tempfile

import mupscale  # before transformers, which may look for torchvision

# isort: split
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel, Trainer, TrainingArguments

from mupscale.hf.config import wide_config

CONFIG = GPT2Config(
    n_embd=32, n_head=4, n_layer=2, vocab_size=61, n_positions=24, bos_token_id=0, eos_token_id=0,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip  # with dropout no growth is exact


class Counting(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (index + (1 + index % 4) * torch.arange(24)) % 61
        return {"input_ids": tokens, "labels": tokens}


def train(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=100, per_device_train_batch_size=16, lr_scheduler_type="constant", max_grad_norm=0.0,
            save_strategy="no", report_to="none", disable_tqdm=True, logging_strategy="no", use_cpu=True, seed=0,
        )  # fmt: skip
        result = Trainer(model, arguments, train_dataset=Counting(), optimizers=(optimizer, None)).train()
    print(f"hidden size {model.config.hidden_size}: mean loss of 100 steps {result.training_loss:.4f}")


def main() -> None:
    torch.manual_seed(0)
    narrow, wide = (AutoModelForCausalLM.from_config(config) for config in (CONFIG, wide_config(CONFIG, 2)))
    optimizer = torch.optim.AdamW(narrow.parameters(), lr=3e-3)
    train(narrow, optimizer)
    batch = torch.stack([Counting()[index]["input_ids"] for index in range(16)])
    loss_of = lambda model: model(input_ids=batch, labels=batch, use_cache=False).loss  # noqa: E731
    report = mupscale.upscale(narrow, wide, optimizer, call=loss_of, noise="auto")
    before, after = (loss_of(model).item() for model in (narrow, wide))
    print(report, f"the same batch: loss {before:.4f} before, {after:.4f} after", sep="\n")
    train(wide, report.optimizer)


if __name__ == "__main__":
    main()
