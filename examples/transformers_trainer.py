"""transformers.Trainer: train a small GPT-2, widen it, and continue in a second Trainer with the widened optimizer.

    pip install accelerate                       # transformers.Trainer needs it
    python examples/transformers_trainer.py

Trainer has no support for growing, so note:

- Resuming. `trainer.train(resume_from_checkpoint=...)` loads the state into the optimizer of the Trainer. Without
  `optimizers=` this is a new one with two groups and one learning rate, which the saved state does not fit. So pass an
  optimizer with the same groups: make it as here, from the narrow model. The noise depends only on the seed, and the
  saved weights and state replace those of the new optimizer and model.
- Clipping. Trainer clips by the plain norm, which is larger in a wider model: `max_grad_norm=0` turns that off.
  `mupscale.clip_grad_norm_` in a callback's `on_pre_optimizer_step` clips both widths alike.
- Gains of the form 1 + w, as in Gemma: the optimizer has hooks for their weight decay, which no checkpoint of Trainer
  holds. `upscale` adds them again when the optimizer is made as above.
"""

import tempfile

import mupscale  # before transformers, which may look for torchvision

# isort: split
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel, Trainer, TrainingArguments

from mupscale.hf.config import wide_config

VOCABULARY, LENGTH = 61, 24

CONFIG = GPT2Config(
    n_embd=32,
    n_head=4,
    n_layer=2,
    vocab_size=VOCABULARY,
    n_positions=LENGTH,
    bos_token_id=0,
    eos_token_id=0,
    resid_pdrop=0.0,  # with dropout no growth is exact
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)


class Counting(Dataset[dict[str, Tensor]]):
    """Rows that count upwards, each with its own first number and step."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (index + (1 + index % 4) * torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def trained(model: PreTrainedModel, steps: int, optimizer: torch.optim.Optimizer | None = None) -> Trainer:
    """A Trainer that has trained the model for `steps` steps."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
            use_cpu=True,
            seed=0,
        )
        trainer = Trainer(model, arguments, train_dataset=Counting(), optimizers=(optimizer, None))
        result = trainer.train()
    print(f"hidden size {model.config.hidden_size}: mean loss of {steps} steps {result.training_loss:.4f}")
    return trainer


def main() -> None:
    torch.manual_seed(0)
    narrow = AutoModelForCausalLM.from_config(CONFIG)
    first = trained(narrow, 100)

    wide = AutoModelForCausalLM.from_config(wide_config(CONFIG, 2))
    batch = torch.stack([Counting()[index]["input_ids"] for index in range(16)])
    optimizer = getattr(first.optimizer, "optimizer", first.optimizer)  # inside of accelerate's
    report = mupscale.upscale(
        narrow,
        wide,
        optimizer,
        call=lambda model: model(input_ids=batch, use_cache=False).logits,  # compared before anything is written
        noise=mupscale.AdditiveNoise(0.01),
    )
    print(report)

    with torch.no_grad():
        before, after = (model(input_ids=batch, labels=batch).loss.item() for model in (narrow, wide))
    print(f"the same batch: loss {before:.4f} before, {after:.4f} after, which is the noise")
    trained(wide, 100, report.optimizer)


if __name__ == "__main__":
    main()
