"""Your own LightningModule grows in the middle of its training, by one added callback.

    python examples/lightning_module.py
    tensorboard --logdir runs

The module knows nothing of mupscale. Its network grows by more heads of the same size: larger heads would compute
another function, because PyTorch scales attention by 1/sqrt(head size). Stop the script at any time and start it
again: it continues where it stood.
"""

import mupscale  # before lightning, which may look for torchvision

# isort: split
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn

from mupscale.datamodules.fineweb import FineWeb


class Writer(LightningModule):
    def __init__(self, width: int = 32, heads: int = 4, context: int = 32, vocabulary: int = 4096) -> None:
        super().__init__()
        self.save_hyperparameters()  # the wide module is made of these, with some of them changed
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.readout = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        later = nn.Transformer.generate_square_subsequent_mask(length, dtype=self.tokens.weight.dtype)
        return self.readout(self.blocks(self.tokens(tokens) + self.positions.weight[:length], mask=later))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def main() -> None:
    seed_everything(0, verbose=False)
    growth = mupscale.UpscaleCallback(at_step=100, hparams={"width": 64, "heads": 8})
    settings = mupscale.run_settings("runs/lightning_module", growth, save_every=50, enable_progress_bar=False)
    trainer = Trainer(accelerator="cpu", max_steps=200, limit_val_batches=0, **settings)
    trainer.fit(Writer(), FineWeb(batch_size=8, context=32), ckpt_path="last")
    print(f"loss of one batch {growth.summary['loss_before']:.4f} before, {growth.summary['loss_after']:.4f} after")
    print(f"mean loss of the last ten steps {float(trainer.callback_metrics['train/loss']):.4f}")


if __name__ == "__main__":
    main()
