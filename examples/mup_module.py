"""A LightningModule under muP grows in mid-run: its learning rates are those that a tuned base width transfers.

    python examples/mup_module.py

`set_base_shapes` in `__init__` tells which sizes are width, and rescales the initial weights; `apply_mup` in
`configure_optimizers` scales the rates. The rate is tuned once, at the base width. After the growth the rates are those
of a module that was built wide.
"""

import mupscale  # before lightning, which may look for torchvision

# isort: split
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn

from mupscale.datamodules.covertype import Covertype


def build(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(54, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), mupscale.Readout(width, 7)
    )


class Classifier(LightningModule):
    def __init__(self, width: int, base_width: int = 32, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = mupscale.set_base_shapes(build(width), build(base_width), build(2 * base_width))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return mupscale.apply_mup(torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"]), self)


def rates(module: Classifier, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {names[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}


def main() -> None:
    seed_everything(0, verbose=False)
    module, growth = Classifier(width=32), mupscale.UpscaleCallback(at_step=30, hparams={"width": 128})
    trainer = Trainer(
        accelerator="cpu", max_steps=60, callbacks=[growth], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module, Covertype(batch_size=200))
    print(f"loss of one batch {growth.summary['loss_before']:.4f} before, {growth.summary['loss_after']:.4f} after")
    wide = Classifier(width=128)
    for name, rate in rates(wide, wide.configure_optimizers()).items():
        print(f"{name}: rate {rates(module, trainer.optimizers[0])[name]:.6f}, if built wide {rate:.6f}")


if __name__ == "__main__":
    main()
