"""What a run did, said at its end; and width and loss on the way."""

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.models.base import WidthScalable


class Summary(Callback):
    """Shows the width in the progress bar, and prints at the end of a run what its upscales did and where its curves are."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        assert isinstance(pl_module, WidthScalable)
        width = pl_module.width
        pl_module.log("width", float(max(width) if isinstance(width, list) else width), prog_bar=True, logger=False)

    @rank_zero_only
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, WidthScalable)
        lines = [f"{trainer.global_step} steps, width {pl_module.width}, {sum(p.numel() for p in pl_module.parameters()):,} parameters"]
        for callback in trainer.callbacks:
            if isinstance(callback, UpscaleCallback) and callback.summary:
                s = callback.summary
                lines.append(
                    f"  step {s['step']}: width {s['before']} → {s['after']} in {s['seconds']:.2f} s; "
                    f"loss {s['loss_before']:.6f} just before, {s['loss_after']:.6f} just after"
                )
        if pl_module.train_loss is not None:
            lines.append(f"  training loss of the last batch {float(pl_module.train_loss):.6f}")
        for name, value in trainer.callback_metrics.items():
            if name.startswith("val/"):
                lines.append(f"  {name} {float(value):.4f}")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                lines.append(f"  curves: tensorboard --logdir {logger.log_dir}")
        print("\n".join(lines))
