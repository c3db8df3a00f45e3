"""fit, validate, test and predict: a LightningCLI with short class names and sensible defaults."""

import importlib
import pkgutil
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger

from mupscale import callbacks, datamodules, models, noise
from mupscale.callbacks.curves import Curves
from mupscale.callbacks.summary import Summary
from mupscale.models.base import WidthScalable

LOGGER = {"class_path": "lightning.pytorch.loggers.TensorBoardLogger", "init_args": {"save_dir": "runs", "name": "default"}}


class ConfigAsText(SaveConfigCallback):
    """Saves config.yaml beside the run's logs, and its text in TensorBoard."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        text = self.parser.dump(self.config, skip_none=False)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and stage == "fit":
                logger.experiment.add_text("config", f"```yaml\n{text}\n```")


class CLI(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults({"checkpoint.save_last": True, "checkpoint.every_n_train_steps": 500})

    def before_instantiate_classes(self) -> None:
        assert self.subcommand is not None
        path = self.config[self.subcommand].get("ckpt_path")
        if path in ("last", "best", "hpc") or (path and not Path(path).exists()):
            raise SystemExit(
                f"--ckpt_path {path}: there is no such checkpoint. Name a file, or go on with a run: python -m mupscale resume RUN"
            )


def main(command: str, arguments: list[str]) -> None:
    run([command, *arguments])


def run(arguments: list[str], *, overwrite: bool = False) -> CLI:
    """Parses and runs a command; `overwrite` lets a resumed run write its config again."""
    for package in (models, datamodules, callbacks):
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")  # so that their classes go by short names
    assert noise
    try:
        return CLI(
            WidthScalable,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            save_config_callback=ConfigAsText,
            save_config_kwargs={"overwrite": overwrite},
            trainer_defaults={"logger": LOGGER, "callbacks": default_callbacks(), "log_every_n_steps": 10},
            parser_kwargs={"prog": "python -m mupscale"},
            args=arguments,
        )
    except ValueError as error:
        if "--debug" in sys.argv:
            raise
        raise SystemExit(f"error: {error}") from error


def default_callbacks() -> list[Any]:
    return [LearningRateMonitor(logging_interval="step"), Curves(), Summary()]
