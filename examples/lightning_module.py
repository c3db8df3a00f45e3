"""Your own LightningModule: check that its network widens exactly, then widen it in the middle of its training.

    python examples/lightning_module.py

The module defines `build(width)` and `loss(batch)`; `Growable` does the rest. Only the output layer of the network
comes from mupscale. The network grows by more heads of the same size: larger heads would not compute the same function,
because PyTorch scales attention by 1/sqrt(head size). The data is the text that is included in mupscale.
"""

import logging
import tempfile
import warnings

import mupscale  # before lightning, which may look for torchvision

# isort: split
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn

from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.datamodules.fineweb import FineWeb
from mupscale.models.base import Growable

VOCABULARY, CONTEXT, HEAD_SIZE = 4096, 32, 8
NARROW, WIDE, GROWS_AT, STEPS = 32, 64, 100, 200


class Decoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            width, width // HEAD_SIZE, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.readout = mupscale.Readout(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        later = nn.Transformer.generate_square_subsequent_mask(length, dtype=self.tokens.weight.dtype)
        x = self.tokens(tokens) + self.positions.weight[:length]
        return self.readout(self.blocks(x, mask=later, is_causal=True))


class Writer(Growable):
    def __init__(self, width: int, base_width: int = NARROW) -> None:
        super().__init__(width, base_width, optimizer=lambda params: torch.optim.AdamW(params, lr=5e-3))

    def build(self, width: int) -> nn.Module:
        return Decoder(width)

    def loss(self, batch: Tensor) -> Tensor:
        logits = self(batch[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class Losses(Callback):
    """The training loss of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: dict[str, Tensor], batch: Tensor, batch_idx: int
    ) -> None:
        self.values.append(outputs["loss"].item())

    def mean(self, first: int, last: int) -> float:
        return sum(self.values[first:last]) / (last - first)


def check(module: Writer) -> mupscale.Verdict:
    """Whether widening is exact: copies of both widths are trained side by side in float64."""

    def loss(network: nn.Module, batch: Tensor) -> Tensor:
        module.net = network
        return module.loss(batch)

    verdict = mupscale.verify(
        module.network(NARROW),
        module.network(WIDE),
        optimizer=lambda params: mupscale.apply_mup(torch.optim.AdamW(params, lr=5e-3)),
        batches=torch.randint(VOCABULARY, (4, 2, 9)),  # four batches of two rows
        loss=loss,
        steps=10,
    )
    module.net = None
    return verdict


def train(module: Writer, *callbacks: Callback) -> Losses:
    losses = Losses()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_steps=STEPS,
            accelerator="cpu",
            callbacks=[losses, *callbacks],
            default_root_dir=folder,  # the narrow model is saved before it is widened
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
        )
        trainer.fit(module, FineWeb(batch_size=8, context=CONTEXT))
    return losses


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    seed_everything(0, verbose=False)

    module = Writer(NARROW)
    print(f"checked: widening {NARROW} → {WIDE} is {check(module)}")

    noise = mupscale.AdditiveNoise(0.1, centred=True)
    losses = train(module, UpscaleCallback(GROWS_AT, WIDE, noise))
    print(f"width {NARROW}: loss {losses.mean(0, 10):.4f} in the first 10 steps")
    print(f"width {NARROW}: loss {losses.mean(GROWS_AT - 10, GROWS_AT):.4f} in the last 10 steps before the growth")
    print(f"width {WIDE}: loss {losses.mean(GROWS_AT, GROWS_AT + 10):.4f} in the first 10 steps after it")
    print(f"width {module.width}: loss {losses.mean(STEPS - 10, STEPS):.4f} in the last 10 steps")


if __name__ == "__main__":
    main()
